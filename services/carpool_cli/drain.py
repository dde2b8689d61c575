"""`carpool drain WORKER`: a worker takes no more batches, and stays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode

from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.operations import Operations
from carpool.store.workers import FoundWorker, find_workers
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain
from carpool_cli.screen import count


def _split(joined: object) -> object:
    """pydantic-settings joins positional arguments with commas before they arrive here."""
    return joined.split(",") if isinstance(joined, str) and joined else joined


class DrainSettings(ConnectionSettings):
    """Have workers take no more batches, and finish what they have; with --undo, take batches again.

    A worker learns of it within seconds. It stays, with its model loaded. Requests of a model that steps go
    to other processes, if there are any; sequences of a model that binds them end where they are, and no
    others begin there. A worker that is restarted has another name, and takes batches.
    """

    workers: CliPositionalArg[Annotated[list[str], NoDecode, BeforeValidator(_split)]] = Field(
        description="names of workers, or how they begin, as a host; `carpool workers` lists them"
    )
    undo: bool = Field(False, description="let them take batches again")


def main(argv: Sequence[str]) -> int:
    """Drain them, or undo that, and say what was done. Returns 1 if one is unknown, or Redis fails."""
    settings = read_settings(DrainSettings, argv, "carpool drain")
    link = Link(settings.redis_url, name=f"carpool-drain-{os.getpid()}")
    status = 0
    try:
        operations = Operations(link, settings.prefix, this_operator())
        for name in dict.fromkeys(settings.workers):
            found = find_workers(link, settings.prefix, name)
            if not found:
                status = _fail(f"no worker {name!r:.140} serves a model; `carpool workers` lists them")
            for worker in found:
                done = _undo(operations, worker) if settings.undo else _drain(operations, worker)
                for line in done:
                    print(printable_lines(line))
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    except ValueError as error:  # it has ended meanwhile
        return _fail(str(error))
    finally:
        link.close()
    return status


def _drain(operations: Operations, found: FoundWorker) -> Iterator[str]:
    model, worker = found
    drained = operations.drain(model, worker)
    processes = count(drained.processes, "process", "processes")
    before = "" if drained.is_new else f"; it is {drained.order.describe()} already"
    yield f"{worker} of {model} drains: {processes}{before}"
    if not drained.others:
        yield f"no other process serves {model}: its requests wait"


def _undo(operations: Operations, found: FoundWorker) -> Iterator[str]:
    model, worker = found
    order = operations.undrain(model, worker)
    if order is None:
        yield f"{worker} of {model} was not drained"
    else:
        yield f"{worker} of {model} takes batches again; it was {order.describe()}"


def _fail(error: str) -> int:
    complain(f"carpool drain: {error}")
    return 1
