"""`carpool models`: the registered models, and how many requests wait for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory, take_snapshot
from carpool.wire.report import BatcherReport
from carpool_cli.screen import Screen, build_table, duration

_HEADINGS: Final = (
    "model", "waiting", "oldest", "in flight", "processes", "batcher", "policy", "dead", "batch size",
)  # fmt: skip


class ModelsSettings(ConnectionSettings):
    """List the registered models.

    waiting     entries of the request stream; an entry is one request, or several that were sent together
    oldest      age of the entry that has waited longest
    in flight   batches dispatched and not settled
    processes   model processes; one that was killed counts until its lease runs out
    batcher     whether a batcher is active
    policy      the policy in force, as the batcher reports it
    dead        dead letters: requests given up because their model process or worker died repeatedly
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    as_json: bool = Field(False, description="print a JSON array instead of a table")


class ModelState(NamedTuple):
    """A model as Redis has it. The names are the keys of `carpool models --json`."""

    model: str
    waiting_entries: int
    oldest_ms: int | None
    batches_in_flight: int
    workers: int
    batcher: bool
    dead: int
    max_batch_size: int | None
    policy: str | None  # the one in force; None if no batcher reports it
    unheeded: str  # why the batcher rejects the model's settings; empty if it does not


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 1 if Redis does not answer, or refuses a command."""
    settings = read_settings(ModelsSettings, argv, "carpool models")
    link = Link(settings.redis_url, name=f"carpool-models-{os.getpid()}")
    try:
        states = read_models(link, settings.prefix)
    except LinkError as error:
        return _failed(
            f"{error}\n    if no Redis runs there, start one with `carpool up MODEL`, or name another with "
            "--redis-url (CARPOOL_REDIS_URL)"
        )
    except CommandError as error:
        return _failed(str(error))
    finally:
        link.close()
    if settings.as_json:
        print(json.dumps([state._asdict() for state in states]))
    else:
        show(states, Screen())
    return 0


def _failed(error: str) -> int:
    print(f"carpool models: {error}", file=sys.stderr)
    return 1


def read_models(link: Link, prefix: str) -> list[ModelState]:
    """The present state of every registered model."""
    directory = Directory(link, prefix)
    states = []
    for model in directory.models():
        keys = Keys(model, prefix)
        clock = RedisClock()
        snapshot = take_snapshot(link, keys, clock)
        arrival_us = directory.oldest_arrival_us(model)
        batcher, dead = link.call("EXISTS", keys.batcher), link.call("XLEN", keys.dead)
        report = BatcherReport.decode(link.call("GET", keys.report) or b"") if batcher else None
        size = snapshot.registration.get("max_batch_size", "")
        states.append(
            ModelState(
                model,
                snapshot.waiting_entries,
                None if arrival_us is None else max(0, clock.now_us() - arrival_us) // 1000,
                snapshot.batches_in_flight,
                len(snapshot.model_processes),
                bool(batcher),
                dead,
                int(size) if size.isdigit() else None,
                (report and report.policy) or None,
                report.unheeded if report else "",
            )
        )
    return states


def describe_unregistered(model: str, registered: Sequence[str]) -> str:
    """The error for a model that is not registered, with the models that are."""
    hint = f"registered models: {', '.join(registered)}" if registered else "`carpool up square` serves one"
    return f"model {model!r:.140} is not registered; {hint}"


def show(states: Sequence[ModelState], screen: Screen) -> None:
    """Write the table, or how to serve a model if there is none."""
    if not states:
        screen.print("no model is registered; `carpool up square` serves one")
        return
    rows = [_HEADINGS]
    rows += [
        (
            state.model,
            f"{state.waiting_entries:,}",
            "-" if state.oldest_ms is None else duration(state.oldest_ms / 1000),
            f"{state.batches_in_flight:,}",
            f"{state.workers:,}",
            "yes" if state.batcher else "none",
            state.policy or "-",
            f"{state.dead:,}",
            "?" if state.max_batch_size is None else f"up to {state.max_batch_size}",
        )
        for state in states
    ]
    screen.print_table(build_table(rows))
    for state in states:
        if state.unheeded:
            screen.print(
                f"\nThe batcher rejects the settings of {state.model} and serves it with others: "
                f"{state.unheeded}"
            )
