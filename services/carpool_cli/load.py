"""`carpool load NAME`: nodes serve a version of a model, in place of the one that they serve."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg

from carpool.keys import Keys, NodesKeys
from carpool.settings import ConnectionSettings, Lines, Seconds, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.nodes import NodeStore
from carpool.store.rollouts import Following, Rollouts
from carpool.store.traffic import Traffic
from carpool.wire.nodes import REPLICAS_MAX, Wanted
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain

POLL_S: Final = 0.1
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
    rollouts = rollouts_of(settings, store)
    generation = rollouts.load(
        name,
        settings.version,
        _parameters(settings.param),
        settings.replicas,
        settings.share,
        entry=entry or name,
    )
    if not settings.wait:
        if settings.share is None:
            rollouts.finish(name, generation, with_share=False, has_failed=False)
        print(printable_lines(f"{name} is wanted as generation {generation}; `carpool nodes` shows it"))
        return 0
    status = _follow(store, name, generation, settings.timeout_s)
    rollouts.finish(name, generation, with_share=settings.share is not None, has_failed=status != 0)
    return status


def take_over(settings: ConnectionSettings, store: NodeStore, trial: Wanted) -> int:
    """Have a version that has a share of the traffic serve all of it, in place of the others, and wait until
    these have ended. Returns 1 if it does not serve."""
    rollouts = rollouts_of(settings, store)
    generation = rollouts.take_over(trial)
    status = _follow(store, trial.model, generation, None)
    rollouts.finish(trial.model, generation, with_share=False, has_failed=status != 0)
    return status


def rollouts_of(settings: ConnectionSettings, store: NodeStore) -> Rollouts:
    """What this operator does with versions that nodes serve."""

    @contextmanager
    def open_traffic(model: str) -> Iterator[Traffic]:
        keys = Keys(model, settings.prefix)
        link = Link(settings.redis_url, name=f"carpool-share-{os.getpid()}", key=keys.shares)
        try:
            yield Traffic(link, keys)
        finally:
            link.close()

    return Rollouts(store, open_traffic, this_operator())


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
    following, began_s, told = Following(store, name, generation), time.monotonic(), ""
    while True:
        now_s = time.monotonic()
        text, has_ended, has_failed = following.look(now_s)
        if has_failed:
            return _fail(text)
        if has_ended:
            print(printable_lines(text))
            return 0
        if timeout_s is not None and now_s - began_s > timeout_s:
            return _fail(f"after {timeout_s:g} s {text}. It remains wanted")
        if text != told:
            told = text
            complain(text)
        time.sleep(POLL_S)
