"""`carpool load NAME`: nodes serve a version of a model, in place of the one that they serve."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg

from carpool.keys import Keys, NodesKeys
from carpool.settings import ConnectionSettings, Lines, Seconds, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.nodes import NodeStore
from carpool.store.traffic import Traffic
from carpool.wire.nodes import REPLICAS_MAX, OutcomeState, Wanted
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain

POLL_S: Final = 0.1
SHORTAGE_S_MAX: Final = 3.0  # nodes may come, and processes end; then there is no room
_PERCENT: Final = re.compile(r"(\d{1,2})\s*%?")


def _share(value: object) -> object:
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(match[1]) if match else value


class LoadSettings(ConnectionSettings):
    """Have nodes (`carpool worker --repository`) serve a version of a model, and wait until it serves.

    It takes the place of the version that they serve: that one goes when as many processes of the new one
    serve as are wanted, and no request fails. If the new one cannot be loaded, the other one stays.
    """

    model: CliPositionalArg[str] = Field(
        description="an entry of the nodes' folder; NAME=ENTRY serves it under another name"
    )
    version: str | None = Field(
        None, description="version to serve (default: the newest one that nodes have)"
    )
    param: Lines = Field(
        [], description="NAME=VALUE: a parameter of the model, in place of that of its file; repeatable"
    )
    replicas: int | None = Field(
        None,
        ge=1,
        le=REPLICAS_MAX,
        description="number of model processes, on all nodes together (default: as many as now, or as "
        "its entry declares)",
    )
    share: Annotated[int | None, BeforeValidator(_share)] = Field(
        None,
        ge=1,
        le=99,
        description="per cent of the traffic, such as 10%, beside the version that serves (default: all)",
    )
    wait: bool = Field(True, description="only say what is wanted, and do not wait until it serves")
    timeout_s: Seconds | None = Field(
        None, gt=0, description="seconds to wait until it serves (default: no limit)"
    )


def main(argv: Sequence[str]) -> int:
    """Load it, and follow what becomes of it. Returns 1 if it does not serve, and says why."""
    settings = read_settings(LoadSettings, argv, "carpool load")
    link = open_link(settings, "load")
    try:
        return _load(settings, NodeStore(link, settings.prefix))
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    except ValueError as error:
        return _fail(str(error))
    finally:
        link.close()


def open_link(settings: ConnectionSettings, command: str) -> Link:
    """A connection to what nodes share."""
    key = NodesKeys(settings.prefix).wanted
    return Link(settings.redis_url, name=f"carpool-{command}-{os.getpid()}", key=key)


def _fail(error: str) -> int:
    complain(f"carpool load: {error}")
    return 1


def _load(settings: LoadSettings, store: NodeStore) -> int:
    """Raises ValueError."""
    name, _, entry = settings.model.partition("=")
    generation = store.load(
        name,
        settings.version,
        _parameters(settings.param),
        settings.replicas,
        settings.share,
        actor=this_operator(),
        entry=entry or name,
    )
    if settings.share is not None:  # before any of its processes takes a batch
        set_share(settings, name, _version_of(store, generation), settings.share)
    if not settings.wait:
        if settings.share is None and store.snapshot().trial(name) is None:
            set_share(settings, name, None)
        print(printable_lines(f"{name} is wanted as generation {generation}; `carpool nodes` shows it"))
        return 0
    if settings.share is None:
        return _serve_all(settings, store, name, generation, settings.timeout_s)
    status = _follow(store, name, generation, settings.timeout_s)
    if not any(wanted.generation == generation for wanted in store.wanted()):
        set_share(settings, name, None)
    return status


def take_over(settings: ConnectionSettings, store: NodeStore, trial: Wanted) -> int:
    """Have a version that has a share of the traffic serve all of it, in place of the others, and wait until
    these have ended. Returns 1 if it does not serve."""
    of_trial = trial.version, trial.parameters, None, None
    generation = store.load(
        trial.model, *of_trial, actor=this_operator(), entry=trial.entry, settings=trial.settings
    )
    return _serve_all(settings, store, trial.model, generation, None)


def _serve_all(
    settings: ConnectionSettings, store: NodeStore, name: str, generation: int, timeout_s: float | None
) -> int:
    """Follow a generation until it serves in place of the others. Then no version has a share, unless one is
    wanted with a share beside it."""
    status = _follow(store, name, generation, timeout_s)
    if status == 0 and store.snapshot().trial(name) is None:
        set_share(settings, name, None)
    return status


def _version_of(store: NodeStore, generation: int) -> str:
    """Raises ValueError."""
    for wanted in store.wanted():
        if wanted.generation == generation:
            return wanted.version
    raise ValueError(f"generation {generation} was unloaded meanwhile")


def set_share(settings: ConnectionSettings, model: str, version: str | None, share: int = 0) -> None:
    """Give this share of the traffic to a version, and the rest to the others; None: no version has one."""
    keys = Keys(model, settings.prefix)
    link = Link(settings.redis_url, name=f"carpool-share-{os.getpid()}", key=keys.shares)
    try:
        traffic, shares = Traffic(link, keys), {} if version is None else {version: share}
        if shares != traffic.shares():
            traffic.set(shares, actor=this_operator())
    finally:
        link.close()


def _parameters(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(f"--param: {word!r:.60} is not NAME=VALUE")
        if name in found:
            raise ValueError(f"--param: {name} is given twice")
        found[name] = value
    return found


def _follow(store: NodeStore, name: str, generation: int, timeout_s: float | None) -> int:
    """Tell on standard error how it goes, until it serves or does not."""
    try:
        return _follow_on(store, name, generation, timeout_s)
    except KeyboardInterrupt:
        complain(f"carpool load: not waited for; {name} remains wanted: `carpool nodes` shows it")
        raise


def _follow_on(store: NodeStore, name: str, generation: int, timeout_s: float | None) -> int:
    began_s = time.monotonic()
    told, lacking_since_s = "", None
    while True:
        state, reason = store.outcome(name, generation)
        now_s = time.monotonic()
        if state is OutcomeState.SERVING:
            print(printable_lines(reason))
            return 0
        if state in (OutcomeState.FAILED, OutcomeState.GONE):
            return _fail(f"{name} {_HOW[state]}: {reason}")
        if state is not OutcomeState.WAITING:
            lacking_since_s = None
        elif lacking_since_s is None:
            lacking_since_s = now_s
        elif now_s - lacking_since_s > SHORTAGE_S_MAX:
            given_up = store.fail(name, generation, reason)
            rest = "" if given_up else ". It remains wanted, for nodes that have room later"
            return _fail(f"{reason}{rest}")
        if timeout_s is not None and now_s - began_s > timeout_s:
            return _fail(f"after {timeout_s:g} s {reason}. It remains wanted")
        if reason != told:
            told = reason
            complain(reason)
        time.sleep(POLL_S)


_HOW: Final = {OutcomeState.FAILED: "is not loaded", OutcomeState.GONE: "does not serve"}
