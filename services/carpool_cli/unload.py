"""`carpool unload NAME`: nodes stop serving a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, LinkError
from carpool.store.nodes import NodeStore
from carpool_cli.load import POLL_S, open_link, rollouts_of
from carpool_cli.refused import explain
from carpool_cli.screen import count

_PROCESSES: Final = ("process", "processes")


class UnloadSettings(ConnectionSettings):
    """Have nodes stop serving a model, or one version of it, and wait until its processes have ended.

    They finish the batches that they have. Requests that come later wait, each as long as its timeout, and
    are served when the model is loaded again.
    """

    model: CliPositionalArg[str] = Field(description="the model's name")
    version: str | None = Field(
        None, description="only this version; what it was to replace stays (default: all of them)"
    )
    wait: bool = Field(True, description="do not wait until its processes have ended")


def main(argv: Sequence[str]) -> int:
    """Unload it. Returns 1 if it is not loaded, or if Redis fails."""
    settings = read_settings(UnloadSettings, argv, "carpool unload")
    link = open_link(settings, "unload")
    try:
        return unload(
            settings, NodeStore(link, settings.prefix), settings.model, settings.version, wait=settings.wait
        )
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()


def _fail(error: str) -> int:
    complain(f"carpool unload: {error}")
    return 1


def unload(
    settings: ConnectionSettings, store: NodeStore, model: str, version: str | None, *, wait: bool = True
) -> int:
    """Unload a model, or one version of it. Returns 1 if it is not loaded."""
    title = model if version is None else f"{model} version {version}"
    before = store.wanted()
    numbers = {
        wanted.generation for wanted in before if wanted.model == model and version in (None, wanted.version)
    }
    if not rollouts_of(settings, store).unload(model, version):
        loaded = ", ".join(sorted(wanted.title for wanted in before)) or "nothing is"
        return _fail(f"{title} is not loaded; loaded: {loaded}")
    told = 0
    while wait:
        snapshot = store.snapshot()
        left = sum(seat.name.generation in numbers for node in snapshot.nodes for seat in node.seats)
        if not left:
            break
        if left != told:
            told = left
            complain(f"{count(left, *_PROCESSES)} of {model} to end")
        time.sleep(POLL_S)
    print(printable_lines(f"{title} is unloaded"))
    return 0
