"""A model that is being served, as the simulator needs to know it: its settings, its processes, its speed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from carpool.clock import RedisClock
from carpool.errors import CarpoolError
from carpool.keys import Keys
from carpool.messages import BatchSettled
from carpool.model_settings import ModelSettings
from carpool.settings import ProducerSettings
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory, take_snapshot
from carpool.wire.batches import decode_batch, decode_settled
from carpool_cli.config import ConfigError
from carpool_cli.tuning.arrivals import TraceError

_READ_BATCHES: Final = 64
_SETTLED: Final = 64  # batches, from which l(n) is read
_BLOCK_MS: Final = 200
# Redis says so in these words, whichever client hands it on, and from 6 to 8 in one of two cases.
_REFUSED: Final = "no permissions"
_WHO_MAY: Final = """
    This user of Redis may not do that. Looking at a model takes what the role `admin` may; sending it a BODY,
    as `carpool tune` does, takes what `producer` may besides. Name with --redis-url a user who may both, or
    sign in as `admin` and leave the BODY out: then what the model served of late tells."""


class NotServedError(Exception):
    """There is nothing to learn from this model, and why."""


class Live(NamedTuple):
    """What Redis tells of a model."""

    registered: ModelSettings  # as its workers say
    settings: ModelSettings  # as they hold
    processes: int
    seen: list[tuple[int, int]]  # batches of late, the last one last: size, and us


class Recording(NamedTuple):
    """When requests arrived, as exact as entry IDs: to the millisecond. `missed`: batches gone before they
    could be read (Redis counts them from 7 on)."""

    times_us: list[int]
    missed: int


def exit_status(command: str, do: Callable[[], None]) -> int:
    """Do what a command is to do: 0, 1 if the model cannot be asked, 2 if what was asked for makes no sense.
    Why is on standard error."""
    try:
        do()
    except (ConfigError, TraceError, NotServedError) as error:
        print(f"carpool {command}: {error}", file=sys.stderr)
        return 2
    except (CarpoolError, CommandError, OSError) as error:
        remedy = _WHO_MAY if _REFUSED in str(error).lower() else ""
        print(f"carpool {command}: {error}{remedy}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def linked(settings: ProducerSettings, command: str) -> Iterator[Link]:
    """A connection of a command's, while it lasts."""
    link = Link(settings.redis_url, name=f"carpool-{command}-{os.getpid()}")
    try:
        yield link
    finally:
        link.close()


def look(link: Link, prefix: str, model: str) -> Live:
    """The model as it is now; nothing is sent to it. Raises NotServedError."""
    known = Directory(link, prefix).models()
    if model not in known:
        there = f"there are {', '.join(known)}" if known else "none is; `carpool up square` serves one"
        raise NotServedError(f"no model {model!r:.140} is registered; {there}")
    keys = Keys(model, prefix)
    snapshot = take_snapshot(link, keys, RedisClock())
    latest = link.call("XREVRANGE", keys.settled, "+", "-", "COUNT", _SETTLED)
    settled = [decode_settled(flat) for _, flat in reversed(latest)]
    seen = [(one.size, one.compute_us) for one in settled if type(one) is BatchSettled and one.compute_us]
    return Live(
        ModelSettings.from_mapping(snapshot.registration),
        ModelSettings.from_mapping({**snapshot.registration, **snapshot.config}),
        len(snapshot.workers),
        seen,
    )


def record(link: Link, keys: Keys, seconds: float, step: Callable[[float, int], None]) -> Recording:
    """Watch a model for so long. `step` is told now and then for how long it was, and how many arrived.

    Batches are followed and not requests, because a request may leave before anybody could look, and one that
    is put back would be seen twice.
    """
    began = _stream(link, keys.batches)
    after = began[b"last-generated-id"].decode()
    times_us: list[int] = []
    batches = 0
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < seconds:
        step(passed_s, len(times_us))
        reply = link.call("XREAD", "COUNT", _READ_BATCHES, "BLOCK", _BLOCK_MS, "STREAMS", keys.batches, after)
        for _, entries in reply or ():
            batches += len(entries)
            for entry_id, flat in entries:
                times_us += [one.arrival_us for one in decode_batch(entry_id, flat, 0).requests]
            after = entries[-1][0].decode()
    left_unseen = len(link.call("XRANGE", keys.batches, f"({after}", "+"))
    added = _stream(link, keys.batches).get(b"entries-added", 0) - began.get(b"entries-added", 0)
    return Recording(times_us, max(0, added - batches - left_unseen))


def _stream(link: Link, key: str) -> dict[bytes, Any]:
    flat = link.call("XINFO", "STREAM", key)
    return dict(zip(flat[::2], flat[1::2], strict=True))
