"""The workers of a model: what each has, since when, and whether it takes batches.

For people who look: each look is two round trips, and reads counts and IDs only. O(processes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from carpool.keys import WORKERS_GROUP, Keys, batch_id_of, batch_streams, models_key
from carpool.process_names import parse_process_name, worker_of
from carpool.store.connection import Argument, CommandError, Link
from carpool.store.directory import ProcessMemory, no_errors, read_memory, texts
from carpool.wire.orders import DrainOrder, read_about, read_drain_order
from carpool.wire.registration import VERSION

BATCHES_SHOWN: Final = 10  # of those that a process has
UNKNOWN: Final = ProcessMemory(0, 0)


class ProcessState(NamedTuple):
    """A model process. `in_hand`: how many batches it has; `batches`: the IDs of the oldest of these, and
    `oldest_ms`, when the first was dispatched, by Redis's clock. `memory`: as far as its worker tells."""

    name: str
    is_alive: bool  # its lease runs
    is_draining: bool  # it takes no more batches, or begins no more sequences
    lease_ends_ms: int
    in_hand: int
    batches: Sequence[str] = ()
    memory: ProcessMemory = UNKNOWN
    device: str = ""

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest of its batches was dispatched; None if it has none."""
        return int(self.batches[0].partition("-")[0]) if self.batches else None


class WorkerState(NamedTuple):
    """A worker of a model. Times are of Redis's clock; None where the worker does not tell."""

    model: str
    name: str
    at_ms: int  # now
    version: str
    processes: Sequence[ProcessState]
    order: DrainOrder | None  # of an operator, to drain
    since_ms: int | None = None  # it serves
    last_beat_ms: int | None = None

    @property
    def host(self) -> str:
        """The host that it runs on, as its name says; empty if that has another form."""
        parsed = parse_process_name(self.name)
        return "" if parsed is None else parsed.host

    @property
    def state(self) -> str:
        """serving; draining, as it stops or because of an operator; or lost: no lease of it runs."""
        alive = [process for process in self.processes if process.is_alive]
        if not alive:
            return "lost"
        drains = self.order is not None or all(process.is_draining for process in alive)
        return "draining" if drains else "serving"

    @property
    def memory(self) -> ProcessMemory:
        """Of all of its processes."""
        return ProcessMemory(
            sum(process.memory.resident for process in self.processes),
            sum(process.memory.on_gpus for process in self.processes),
        )


class FoundWorker(NamedTuple):
    """A worker, by its name, and the model that it serves."""

    model: str
    worker: str


def read_workers(link: Link, keys: Keys) -> list[WorkerState]:
    """The workers of a model, by name. Raises LinkError and CommandError."""
    time_reply, scores, draining, drained, declared = no_errors(
        link.call_many(
            ("TIME",),
            ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
            ("SMEMBERS", keys.draining),
            ("HGETALL", keys.drained),
            ("HGETALL", keys.declared),
        )
    )
    now_ms = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
    leases = {name.decode(): int(float(end)) for name, end in zip(scores[::2], scores[1::2], strict=True)}
    versions = _versions(texts(declared))
    named = sorted({worker_of(process) for process in leases})
    told = dict(zip(named, _hashes(link, [keys.memory(worker) for worker in named]), strict=True))
    held = _in_hand(link, keys, {process: versions.get(worker_of(process), "") for process in leases})
    orders = texts(drained)
    return [
        _worker(
            keys.model,
            worker,
            now_ms,
            versions.get(worker, ""),
            {process: end for process, end in leases.items() if worker_of(process) == worker},
            {name.decode() for name in draining},
            held,
            told[worker],
            read_drain_order(orders[worker]) if worker in orders else None,
        )
        for worker in named
    ]


def find_workers(link: Link, prefix: str, name: str) -> list[FoundWorker]:
    """The workers whose name begins with this, of any model; or the one whose process has this name."""
    models = sorted(model.decode() for model in link.call("SMEMBERS", models_key(prefix)))
    replies = no_errors(link.call_many(*[("ZRANGE", Keys(model, prefix).workers, 0, -1) for model in models]))
    found = {
        FoundWorker(model, worker_of(process.decode()))
        for model, processes in zip(models, replies, strict=True)
        for process in processes
    }
    exact = [one for one in found if one.worker == worker_of(name)]
    return sorted(exact or [one for one in found if one.worker.startswith(name)])


def _worker(
    model: str,
    worker: str,
    now_ms: int,
    version: str,
    leases: Mapping[str, int],
    draining: set[str],
    held: Mapping[str, tuple[int, list[str]]],
    told: Mapping[str, str],
    order: DrainOrder | None,
) -> WorkerState:
    about = read_about(told.get("about", ""))
    memory: dict[int, ProcessMemory] = {}
    with suppress(ValueError):  # of another version
        memory = read_memory(told)
    processes = []
    for process, end_ms in sorted(leases.items()):
        parsed = parse_process_name(process)
        number = -1 if parsed is None or parsed.replica is None else parsed.replica
        has_device = about is not None and 0 <= number < len(about.devices)
        processes.append(
            ProcessState(
                process,
                end_ms > now_ms,
                process in draining,
                end_ms,
                *held.get(process, (0, [])),
                memory=memory.get(number, UNKNOWN),
                device=about.devices[number] if about is not None and has_device else "",
            )
        )
    since_ms = last_beat_ms = None
    if about is not None:
        since_ms, last_beat_ms = about.since_ms, max(leases.values()) - about.lease_ms
    return WorkerState(model, worker, now_ms, version, processes, order, since_ms, last_beat_ms)


def _versions(declared: Mapping[str, str]) -> dict[str, str]:
    """Of each worker that names one, the version of its model."""
    found: dict[str, str] = {}
    for worker, text in declared.items():
        with suppress(ValueError, AttributeError):  # a user wrote it
            found[worker] = str(json.loads(text).get(VERSION, ""))
    return found


def _hashes(link: Link, keys: Sequence[str]) -> list[dict[str, str]]:
    """Those under these keys; empty where that may not be read."""
    replies = link.call_many(*[("HGETALL", key) for key in keys])
    return [{} if isinstance(reply, CommandError) else texts(reply) for reply in replies]


def _in_hand(link: Link, keys: Keys, versions: Mapping[str, str]) -> dict[str, tuple[int, list[str]]]:
    """How many batches each of these processes has, and the IDs of the oldest. `versions`: of each."""
    streams = {stream: of for of in {"", *versions.values()} for stream in batch_streams(keys, of)}
    replies = link.call_many(*[("XINFO", "CONSUMERS", stream, WORKERS_GROUP) for stream in streams])
    held: dict[str, tuple[int, list[str]]] = {}
    asked: list[tuple[str, str]] = []
    for stream, reply in zip(streams, replies, strict=True):
        for consumer in () if isinstance(reply, CommandError) else reply:  # without a group, nobody has any
            fields: dict[bytes, Any] = dict(zip(consumer[::2], consumer[1::2], strict=True))
            process, number = fields[b"name"].decode(), int(fields[b"pending"])
            if process in versions and number:
                held[process] = held.get(process, (0, []))[0] + number, []
                asked.append((stream, process))
    commands: list[tuple[Argument, ...]] = [
        ("XPENDING", stream, WORKERS_GROUP, "-", "+", BATCHES_SHOWN, process) for stream, process in asked
    ]
    for (stream, process), reply in zip(asked, link.call_many(*commands), strict=True):
        if not isinstance(reply, CommandError):
            of = streams[stream] if stream != keys.batches else ""
            ids = [*held[process][1], *(batch_id_of(entry[0].decode(), of) for entry in reply)]
            in_order = sorted(ids, key=lambda name: tuple(map(int, name.partition("@")[0].split("-"))))
            held[process] = held[process][0], in_order[:BATCHES_SHOWN]
    return held
