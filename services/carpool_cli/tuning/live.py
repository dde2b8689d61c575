"""What the simulator needs to know of a live model: its settings, processes, recent batches and arrivals.

Also what `carpool simulate` and `carpool tune` share as commands: connection, errors, exit status.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from carpool.clock import RedisClock
from carpool.errors import CarpoolError
from carpool.keys import Keys
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelKind, ModelSettings
from carpool.settings import ConnectionSettings
from carpool.shown import complain
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory, take_snapshot
from carpool.store.overrides import ConfigError
from carpool.wire.batches import decode_batch, decode_settled
from carpool.wire.report import BatcherReport
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.tuning.arrivals import TraceError

_READ_BATCHES: Final = 64
_SETTLED_BATCHES: Final = 64  # the latest ones, from which l(n) is derived
_SETTLED_ENTRIES: Final = 2 * _SETTLED_BATCHES  # some tell of processes or of settings, not of a batch
_BLOCK_MS: Final = 200


class UnavailableModelError(Exception):
    """The model cannot be measured or simulated. The message says why."""


class LiveModel(NamedTuple):
    """What Redis knows of a model."""

    registered: ModelSettings  # by its workers
    settings: ModelSettings  # the effective ones
    kind: ModelKind
    processes: int
    # Size and execution time (us) of recently settled batches, the latest last.
    observed: list[tuple[int, int]]
    report: BatcherReport | None = None  # the latest one of its batcher
    paused: str = ""  # since when, by whom and why; empty if it is not


class Recording(NamedTuple):
    """When requests arrived, to the millisecond, which is the precision of entry IDs.

    `missed` counts batches that were deleted before they could be read (0 before Redis 7, which cannot tell).
    """

    times_us: list[int]
    missed: int


def run_command(command: str, run: Callable[[], None]) -> int:
    """Run a command and return its exit status; print errors to standard error.

    0: success. 1: Redis or the model failed. 2: the arguments are invalid, or the model cannot be measured.
    """
    try:
        run()
    except (ConfigError, TraceError, UnavailableModelError) as error:
        complain(f"carpool {command}: {error}")
        return 2
    except (CarpoolError, CommandError, OSError) as error:
        complain(f"carpool {command}: {explain(error)}")
        return 1
    return 0


@contextmanager
def connected(settings: ConnectionSettings, command: str) -> Iterator[Link]:
    """A command's connection to Redis, closed at the end of the block."""
    link = Link(settings.redis_url, name=f"carpool-{command}-{os.getpid()}")
    try:
        yield link
    finally:
        link.close()


def read_live_model(link: Link, prefix: str, model: str) -> LiveModel:
    """Read the state of a model; nothing is sent to it.

    Raises UnavailableModelError, also for a stepping model: there is no l(n); and for a bound one: the
    simulator has no slots.
    """
    registered = Directory(link, prefix).models()
    if model not in registered:
        raise UnavailableModelError(describe_unregistered(model, registered))
    keys = Keys(model, prefix)
    snapshot = take_snapshot(link, keys, RedisClock())
    kind = ModelKind.of(snapshot.registration)
    if kind is ModelKind.STEPPING:
        raise UnavailableModelError(
            f"{model} is a stepping model, which forms no batches: this command is for models with predict"
        )
    if kind is ModelKind.BOUND:
        raise UnavailableModelError(
            f"{model} binds each sequence to one of its processes, but this command is for models whose "
            "batches any process may execute"
        )
    latest = link.call("XREVRANGE", keys.settled, "+", "-", "COUNT", _SETTLED_ENTRIES)
    settled = [decode_settled(flat) for _, flat in reversed(latest)]
    return LiveModel(
        ModelSettings.from_mapping(snapshot.registration),
        ModelSettings.from_mapping({**snapshot.registration, **snapshot.overrides}),
        kind,
        len(snapshot.model_processes),
        [
            (batch.executed, batch.compute_us + batch.overhead_us)
            for batch in settled
            if type(batch) is BatchSettled and batch.executed and batch.compute_us
        ][-_SETTLED_BATCHES:],
        BatcherReport.decode(link.call("GET", keys.report) or b""),
        "" if snapshot.paused is None else snapshot.paused.describe(),
    )


def record(link: Link, keys: Keys, seconds: float, on_progress: Callable[[float, int], None]) -> Recording:
    """Record the arrivals of a model for `seconds`.

    `on_progress` is called repeatedly with the seconds passed and the number of arrivals. The recorder reads
    batches, not requests: a request may be deleted before it is read, and one that is put back would be read
    twice.
    """
    start = _stream(link, keys.batches)
    after = start[b"last-generated-id"].decode()
    times_us: list[int] = []
    batches = 0
    started_s = time.monotonic()
    while (passed_s := time.monotonic() - started_s) < seconds:
        on_progress(passed_s, len(times_us))
        reply = link.call("XREAD", "COUNT", _READ_BATCHES, "BLOCK", _BLOCK_MS, "STREAMS", keys.batches, after)
        for _, entries in reply or ():
            batches += len(entries)
            for entry_id, flat in entries:
                times_us += [request.arrival_us for request in decode_batch(entry_id, flat, 0).requests]
            after = entries[-1][0].decode()
    unread = len(link.call("XRANGE", keys.batches, f"({after}", "+"))
    added = _stream(link, keys.batches).get(b"entries-added", 0) - start.get(b"entries-added", 0)
    return Recording(times_us, max(0, added - batches - unread))


def _stream(link: Link, key: str) -> dict[bytes, Any]:
    flat = link.call("XINFO", "STREAM", key)
    return dict(zip(flat[::2], flat[1::2], strict=True))
