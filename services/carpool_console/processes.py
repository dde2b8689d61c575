"""What model processes do: which batches they have, for how long, and what memory they take.

It is read only while somebody looks at it. Of each stream of batches, at most BATCHES_MAX are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from carpool.keys import WORKERS_GROUP, Keys
from carpool.process_names import parse_process_name, worker_of
from carpool.store.connection import Command, CommandError
from carpool.store.directory import ProcessMemory, alive, read_memory, texts
from carpool.wire.orders import About, DrainOrder, read_about, read_drain_order
from carpool.wire.registration import VERSION
from carpool_console.links import Links
from carpool_console.reading import ModelReading

BATCHES_MAX: Final = 200
HELD_MAX: Final = 8  # batches of a process that are shown


class HeldBatch(NamedTuple):
    """A batch in a process's hands. `since_s`: how long ago it was dispatched."""

    batch: str
    since_s: float
    deliveries: int


class Process(NamedTuple):
    """A model process that is alive. `resident` and `on_gpus`: bytes; None, as `since_s`, for how long its
    worker serves, and '' as `device`, if its worker does not tell. `order`: an operator's, to drain.

    `batches`: the oldest first, of which `batches[:HELD_MAX]` are shown.
    """

    name: str
    worker: str
    host: str
    pid: int | None
    model: str
    version: str
    is_draining: bool
    order: DrainOrder | None
    since_s: float | None
    device: str
    lease_s: float
    batches: Sequence[HeldBatch]
    resident: int | None
    on_gpus: int | None

    @property
    def busy_s(self) -> float | None:
        """For how long it has had its oldest batch."""
        return self.batches[0].since_s if self.batches else None


class ProcessesReader:
    """Reads the processes of models. Raises LinkError."""

    def __init__(self, links: Links, prefix: str) -> None:
        self._links = links
        self._prefix = prefix

    def read(self, models: Mapping[str, ModelReading], at_us: int) -> dict[str, list[Process]]:
        """The living processes of these models, in two round trips."""
        with_processes = {name: read for name, read in models.items() if read.processes}
        asked: list[tuple[str, str, Command]] = []
        for name, read in with_processes.items():
            keys = Keys(name, self._prefix)
            asked.append((name, "workers", ("ZRANGE", keys.workers, 0, -1, "WITHSCORES")))
            asked.append((name, "declared", ("HGETALL", keys.declared)))
            asked.append((name, "drained", ("HGETALL", keys.drained)))
            streams = [("", keys.batches), *((one, keys.batches_of(one)) for one in read.versions)]
            for version, stream in streams:
                pending = ("XPENDING", stream, WORKERS_GROUP, "-", "+", BATCHES_MAX)
                asked.append((name, f"pending {version}", pending))
            for worker in dict.fromkeys(map(worker_of, read.processes)):
                asked.append((name, f"memory {worker}", ("HGETALL", keys.memory(worker))))
        calls = [(Keys(name, self._prefix).requests, command) for name, _, command in asked]
        replies = self._links.call_all(calls, cuts=False) if calls else []
        found: dict[str, dict[str, Any]] = {name: {} for name in with_processes}
        for (name, what, _), reply in zip(asked, replies, strict=True):
            if not isinstance(reply, CommandError):  # no permission, no such group yet, or another type
                found[name][what] = reply
        return {name: _decoded(name, read, found[name], at_us) for name, read in with_processes.items()}


class _Told(NamedTuple):
    """What a worker tells: of its processes, by number, and of itself."""

    memory: Mapping[int, ProcessMemory] = {}
    about: About | None = None

    @classmethod
    def of(cls, told: Mapping[str, str]) -> _Told:
        memory: Mapping[int, ProcessMemory] = {}
        with suppress(ValueError):  # of another version, or a user wrote it
            memory = read_memory(told)
        return cls(memory, read_about(told.get("about", "")))

    def device(self, number: int) -> str:
        """Of a process."""
        devices = self.about.devices if self.about is not None else ()
        return devices[number] if 0 <= number < len(devices) else ""


def _decoded(model: str, read: ModelReading, found: Mapping[str, Any], at_us: int) -> list[Process]:
    leases = found.get("workers", ())
    until_ms = {member.decode(): float(end) for member, end in zip(leases[::2], leases[1::2], strict=True)}
    versions = _versions(found.get("declared", ()))
    batches: dict[str, list[HeldBatch]] = {}
    for what, reply in found.items():
        if what.startswith("pending "):
            for process, batch in _held(reply, at_us):
                batches.setdefault(process, []).append(batch)
    told = {
        what.removeprefix("memory "): _Told.of(texts(reply))
        for what, reply in found.items()
        if what.startswith("memory ")
    }
    orders = texts(found.get("drained", ()))
    draining = set(read.draining)
    processes = []
    for name in alive(leases, at_us // 1000):
        worker, parsed = worker_of(name), parse_process_name(name)
        number = -1 if parsed is None or parsed.replica is None else parsed.replica
        of_worker = told.get(worker, _Told())
        memory = of_worker.memory.get(number)
        since_ms = of_worker.about.since_ms if of_worker.about is not None else None
        processes.append(
            Process(
                name=name,
                worker=worker,
                host=parsed.host if parsed is not None else "",
                pid=parsed.pid if parsed is not None else None,
                model=model,
                version=versions.get(worker, ""),
                is_draining=name in draining or worker in orders,
                order=read_drain_order(orders[worker]) if worker in orders else None,
                since_s=None if since_ms is None else max(0.0, at_us / 1e6 - since_ms / 1e3),
                device=of_worker.device(number),
                lease_s=until_ms[name] / 1e3 - at_us / 1e6,
                batches=sorted(batches.get(name, ()), key=lambda one: -one.since_s),
                resident=(memory.resident or None) if memory is not None else None,
                on_gpus=(memory.on_gpus or None) if memory is not None else None,
            )
        )
    return sorted(processes)


def _held(pending: Iterable[Sequence[Any]], at_us: int) -> Iterable[tuple[str, HeldBatch]]:
    for entry_id, process, _, deliveries in pending:
        dispatched_ms = int(entry_id.partition(b"-")[0])
        since_s = max(0.0, at_us / 1e6 - dispatched_ms / 1e3)
        yield process.decode(), HeldBatch(entry_id.decode(), since_s, deliveries)


def _versions(flat: Sequence[bytes]) -> dict[str, str]:
    """By worker the version that it declares."""
    versions = {}
    for worker, text in texts(flat).items():
        with suppress(ValueError, AttributeError, RecursionError):  # a user wrote the key
            versions[worker] = str(json.loads(text).get(VERSION, ""))
    return versions
