"""`carpool models`: what is served, what waits, and for how long."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.clock import RedisClock
from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.settings import ProducerSettings, read_settings
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory, take_snapshot
from carpool_cli.screen import Screen, duration, table


class ModelsSettings(ProducerSettings):
    """List the registered models.

    waiting     entries of the request stream: one request each, or several that were sent together
    oldest      how long the first of them has waited
    in flight   batches dispatched and not settled
    workers     model processes alive
    batcher     whether one is active
    dead        requests that were given up, and kept
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    as_json: bool = Field(False, description="an array of objects, for a program")


class ModelState(NamedTuple):
    """A model as Redis tells of it."""

    model: str
    waiting_entries: int
    oldest_ms: int | None
    batches_in_flight: int
    workers: int
    batcher: bool
    dead: int
    max_batch_size: int | None


def main(argv: Sequence[str]) -> int:
    """Print the table. 1 if Redis cannot be asked."""
    settings = read_settings(ModelsSettings, argv, "carpool models")
    link = Link(settings.redis_url, name=f"carpool-models-{os.getpid()}")
    try:
        states = look(link, settings.prefix)
    except (UnavailableError, CommandError) as error:
        print(
            f"carpool models: {error}\n    start a stack with `carpool up MODEL`, or name another Redis with "
            "--redis-url (CARPOOL_REDIS_URL)",
            file=sys.stderr,
        )
        return 1
    finally:
        link.close()
    if settings.as_json:
        print(json.dumps([state._asdict() for state in states]))
    else:
        show(states, Screen())
    return 0


def look(link: Link, prefix: str) -> list[ModelState]:
    """Every registered model, as it is now."""
    directory = Directory(link, prefix)
    states = []
    for model in directory.models():
        keys = Keys(model, prefix)
        clock = RedisClock()
        snapshot = take_snapshot(link, keys, clock)
        arrival_us = directory.oldest_arrival_us(model)
        batcher, dead = link.call("EXISTS", keys.batcher), link.call("XLEN", keys.dead)
        size = snapshot.registration.get("max_batch_size", "")
        states.append(
            ModelState(
                model,
                snapshot.waiting_entries,
                None if arrival_us is None else max(0, clock.now_us() - arrival_us) // 1000,
                snapshot.batches_in_flight,
                len(snapshot.workers),
                bool(batcher),
                dead,
                int(size) if size.isdigit() else None,
            )
        )
    return states


def show(states: Sequence[ModelState], screen: Screen) -> None:
    """The table, or what to do where there is nothing to show."""
    if not states:
        screen.say("no model is registered; `carpool up square` serves one")
        return
    rows = [("model", "waiting", "oldest", "in flight", "workers", "batcher", "dead", "batch size")]
    rows += [
        (
            state.model,
            f"{state.waiting_entries:,}",
            "-" if state.oldest_ms is None else duration(state.oldest_ms / 1000),
            f"{state.batches_in_flight:,}",
            f"{state.workers:,}",
            "yes" if state.batcher else "none",
            f"{state.dead:,}",
            "?" if state.max_batch_size is None else f"up to {state.max_batch_size}",
        )
        for state in states
    ]
    head, *rest = table(rows)
    screen.say(screen.bold(head))
    for line in rest:
        screen.say(line)
