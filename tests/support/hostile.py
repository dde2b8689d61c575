"""Entries of producers that mean harm: within all limits, and shaped so that they cost a batcher much."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

import msgpack
from redis import Redis
from redis.exceptions import RedisError

from carpool.keys import Keys

HOSTILE: Final = "hostile"

Sent = list[dict[str, Any]]  # the fields of entries
Shape = Callable[[int], Sent]  # the entries with this number of requests


def packed(count: int, of_request: Callable[[int], dict[str, Any]], **shared: Any) -> dict[str, Any]:
    """An entry of this many requests."""
    requests = [{"correlation_id": f"r{at}", "body": b"1", **of_request(at)} for at in range(count)]
    return {"requests": msgpack.packb(requests), **shared}


def in_lanes_that_expire(count: int) -> Sent:
    return [packed(count, lambda at: {"lane": f"l{at}"}, expiration=1)]


def with_deadlines_of_their_own(count: int) -> Sent:
    return [packed(count, lambda at: {"lane": f"l{at % 2}", "expiration": 1 + at % 7})]


def malformed_of_a_sequence_that_waits(count: int) -> Sent:
    waiting = packed(
        count, lambda at: {"correlation_id": f"w{at}", "sequence_id": "s", "sequence_index": at + 1}
    )
    return [waiting, packed(count, lambda at: {"sequence_id": "s", "priority": "x"})]


def malformed_starts(count: int) -> Sent:
    return [packed(count, lambda at: {"sequence_id": f"s{at}", "sequence_start": 1, "priority": "x"})]


def malformed_starts_of_one_sequence(count: int) -> Sent:
    return [packed(count, lambda at: {"sequence_id": "s", "sequence_start": 1, "priority": "x"})]


def ends_of_sequences(count: int) -> Sent:
    return [{"end_sequences": " ".join(f"s{at}" for at in range(count))}]


def misspelt(count: int) -> Sent:
    return [
        packed(
            count, lambda at: {"priority": "x", **{f"sequence{letter}{at:x}": b"" for letter in "abcdefgh"}}
        )
    ]


def of_different_costs(count: int) -> Sent:
    return [packed(count, lambda at: {"cost": at})]


def without_bodies(count: int, first: int = 0) -> Sent:
    ids = range(first, first + count)
    return [{"requests": msgpack.packb([{"correlation_id": f"r{at}"} for at in ids])}]


def of_one_correlation_id(count: int) -> Sent:
    return [packed(count, lambda at: {"correlation_id": "same", "cost": at})]


PLAIN: Final = (
    in_lanes_that_expire,
    with_deadlines_of_their_own,
    misspelt,
    of_different_costs,
    without_bodies,
    of_one_correlation_id,
)
OF_SEQUENCES: Final = (
    malformed_of_a_sequence_that_waits,
    malformed_starts,
    malformed_starts_of_one_sequence,
    ends_of_sequences,
)


class HostileProducer:
    """Sends entries of all shapes to a model, one after another, whatever becomes of Redis. Its results are
    on the reply stream HOSTILE."""

    def __init__(self, url: str, keys: Keys, *, requests: int, pause_s: float) -> None:
        """`requests`: in each entry. It pauses after each entry."""
        self.sent = 0
        self._keys, self._requests, self._pause_s = keys, requests, pause_s
        self._redis = Redis.from_url(url, socket_timeout=5)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more. May be called repeatedly."""
        self._stopping.set()
        self._thread.join()
        self._redis.close()

    def _send(self) -> None:
        for shape in cycle((*PLAIN, *OF_SEQUENCES)):
            for fields in shape(self._requests):
                if self._stopping.is_set():
                    return
                try:
                    entry: dict[Any, Any] = {"reply_to": HOSTILE, **fields}
                    self._redis.xadd(self._keys.requests, entry)
                    self.sent += 1
                except RedisError:
                    pass  # Redis is what the fault is about
                self._stopping.wait(self._pause_s)
