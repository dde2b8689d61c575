"""What each worker of a model declares, and what is registered of that.

The registration is one hash, which everything else reads. Beside it every worker keeps what it declares. The
worker that registers, and each one that finds at a heartbeat that others came or went, makes the registration
anew of what the living ones declare (`wire.registration.combined`). They all come to the same, so nothing has
to be atomic: a write that is overtaken is made right by the next heartbeat.

If what a living worker declares is missing, because a user removed the key, what is registered counts as
declared by it, until its next heartbeat.

Why: docs/decisions/0089.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from carpool.keys import Keys
from carpool.process_names import worker_of
from carpool.store.connection import Link
from carpool.store.directory import alive, no_errors, texts
from carpool.wire.registration import FIELDS, Registration

EXPIRES_MS: Final = 3_600_000  # after the last heartbeat of the last worker


class Living(NamedTuple):
    """Which workers live, as their leases say. `undeclared`: some of these declare nothing."""

    workers: frozenset[str]
    undeclared: bool


class Declared(NamedTuple):
    """What each living worker declares, by its name; and the names of those that declared something and are
    gone."""

    living: Living
    by_worker: Mapping[str, Registration]
    gone: Sequence[str]


class Declarations:
    """What the workers of one model declare. All of it raises CommandError."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def write(self, worker: str, registration: Registration) -> None:
        """This worker declares this."""
        key = self._keys.declared
        no_errors(
            self._link.call_many(
                ("HSET", key, worker, json.dumps(registration)), ("PEXPIRE", key, EXPIRES_MS)
            )
        )

    def remove(self, *workers: str) -> None:
        """Forget what these workers declared, which have stopped."""
        self._link.call("HDEL", self._keys.declared, *workers)

    def living(self) -> Living:
        """Which workers live. It takes much less than `read`, and keeps what they declare."""
        key = self._keys.declared
        declared, _, *workers = no_errors(
            self._link.call_many(("HKEYS", key), ("PEXPIRE", key, EXPIRES_MS), *self._of_workers())
        )
        return _living([name.decode() for name in declared], *workers)

    def read(self) -> Declared:
        """What the living workers declare."""
        declared, time_reply, processes = no_errors(
            self._link.call_many(("HGETALL", self._keys.declared), *self._of_workers())
        )
        by_worker: dict[str, Registration] = {}
        for name, text in texts(declared).items():
            with suppress(ValueError):  # a user wrote the key
                by_worker[name] = dict(json.loads(text))
        living = _living(list(by_worker), time_reply, processes)
        of_living = {name: fields for name, fields in by_worker.items() if name in living.workers}
        known = {worker_of(process.decode()) for process in processes[::2]}  # also if their leases ran out
        return Declared(living, of_living, [name for name in texts(declared) if name not in known])

    def registered(self) -> Registration:
        """What is registered; empty if nothing is. A worker may not read the hash as a whole."""
        key = self._keys.registration
        replies = no_errors(self._link.call_many(*[("HGET", key, name) for name in FIELDS]))
        fields = zip(FIELDS, replies, strict=True)
        return {name: text.decode("utf-8", "replace") for name, text in fields if text is not None}

    def _of_workers(self) -> Sequence[tuple[str, ...]]:
        return ("TIME",), ("ZRANGE", self._keys.workers, "0", "-1", "WITHSCORES")


def _living(declared: Sequence[str], time_reply: Sequence[bytes], processes: Sequence[Any]) -> Living:
    now_ms = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
    workers = {worker_of(process) for process in alive(processes, now_ms)}
    return Living(frozenset(workers.intersection(declared)), not workers.issubset(declared))
