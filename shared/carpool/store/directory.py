"""What anybody may look at: which models are registered, and how they fare."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys, models_key
from carpool.store.connection import Argument, CommandError, Link
from carpool.wire.requests import arrival_of


class ModelSnapshot(NamedTuple):
    """What Redis says of a model, looked at a few times a second."""

    waiting_entries: int
    batches_in_flight: int
    tickets: int  # taken in the order of results: by who waits or is in flight, and by results that are held
    workers: list[str]
    registration: dict[str, str]
    config: dict[str, str]  # what an operator said instead


class ModelOverview(NamedTuple):
    """A model as whoever may count sees it; `status` is what its batcher says of itself, undecoded."""

    at_us: int
    waiting_entries: int
    batches_in_flight: int
    model_processes: int
    batcher: bool
    status: bytes | None


class Directory:
    """The registered models, for those who serve or show them all."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    def models(self) -> list[str]:
        """Names of the registered models, sorted."""
        return sorted(name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix)))

    def overview(self, model: str) -> ModelOverview:
        """A model as it is now, in one trip."""
        keys = Keys(model, self._prefix)
        time_reply, waiting, in_flight, workers, batcher, status = no_errors(
            self._link.call_many(
                ("TIME",),
                ("XLEN", keys.requests),
                ("XLEN", keys.batches),
                ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
                ("EXISTS", keys.batcher),
                ("GET", keys.status),
            )
        )
        at_us = int(time_reply[0]) * 1_000_000 + int(time_reply[1])
        return ModelOverview(
            at_us, waiting, in_flight, len(_alive(workers, at_us // 1000)), bool(batcher), status
        )

    def config(self, model: str) -> tuple[dict[str, str], dict[str, str]]:
        """What a model's workers registered, and what an operator said instead."""
        keys = Keys(model, self._prefix)
        replies = self._link.call_many(("HGETALL", keys.registration), ("HGETALL", keys.config))
        registration, config = map(_texts, no_errors(replies))
        return registration, config

    def configure(self, model: str, values: Mapping[str, str], back: Sequence[str]) -> None:
        """An operator says `values` instead of what is registered, and takes back the settings in `back`."""
        key = Keys(model, self._prefix).config
        commands: list[tuple[Argument, ...]] = [("MULTI",)]
        if values:
            commands.append(("HSET", key, *(part for pair in values.items() for part in pair)))
        if back:
            commands.append(("HDEL", key, *back))
        no_errors(self._link.call_many(*commands, ("EXEC",)))

    def oldest_arrival_us(self, model: str) -> int | None:
        """When the oldest waiting request of a model arrived."""
        oldest = self._link.call("XRANGE", Keys(model, self._prefix).requests, "-", "+", "COUNT", 1)
        if not oldest:
            return None
        arrival_ms = dict(zip(oldest[0][1][::2], oldest[0][1][1::2], strict=True)).get(b"arrival", b"")
        return int(arrival_ms) * 1000 if arrival_ms.isdigit() else arrival_of(oldest[0][0].decode())

    def close(self) -> None:
        """Hang up."""
        self._link.close()


def take_snapshot(link: Link, keys: Keys, clock: RedisClock) -> ModelSnapshot:
    """Look at a model, and at the clock."""
    tickets, *replies = link.call_many(
        ("LLEN", keys.order),
        ("TIME",),
        ("XLEN", keys.requests),
        ("XLEN", keys.batches),
        ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
        ("HGETALL", keys.registration),
        ("HGETALL", keys.config),
    )
    if isinstance(tickets, CommandError) and tickets.code == "WRONGTYPE":
        tickets = 0  # nobody is in order: see order.lua
    time_reply, waiting, in_flight, tickets, workers, *hashes = no_errors(
        [*replies[:3], tickets, *replies[3:]]
    )
    clock.set(time_reply, time.monotonic_ns())
    alive = _alive(workers, clock.now_us() // 1000)
    return ModelSnapshot(waiting, in_flight, tickets, alive, *map(_texts, hashes))


def no_errors(replies: list[Any]) -> list[Any]:
    """What was answered. Raises the first CommandError of them."""
    for reply in replies:
        if isinstance(reply, CommandError):
            raise reply
    return replies


def _alive(workers: Sequence[bytes], now_ms: int) -> list[str]:
    """Of members and scores in turn, the model processes whose lease runs."""
    return [
        member.decode()
        for member, lease_end_ms in zip(workers[::2], workers[1::2], strict=True)
        if float(lease_end_ms) > now_ms
    ]


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [text.decode("utf-8", "replace") for text in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
