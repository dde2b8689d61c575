"""The workers of a model: what each has, since when, and whether it takes batches.

For people who look, in two round trips: who the workers are, then what is known of these. What the second
asks, and what its replies say, is pure: `commands_for` and `read_states`. Counts, IDs and short texts are
read, and of each stream of batches at most the BATCHES_MAX oldest entries. O(processes).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final, NamedTuple

from carpool.keys import WORKERS_GROUP, Keys, batch_id_of, entry_of_batch, models_key
from carpool.process_names import parse_process_name, replica_of, worker_of
from carpool.store.connection import Command, CommandError, Link
from carpool.store.directory import ProcessMemory, What, names, no_errors, read_memory, texts
from carpool.wire.orders import DrainOrder, read_about, read_drain_order
from carpool.wire.registration import VERSION

BATCHES_MAX: Final = 200  # of a stream that are read
BATCHES_SHOWN: Final = 10  # of those that a process has
UNKNOWN: Final = ProcessMemory(0, 0)


class HeldBatch(NamedTuple):
    """A batch in a process's hands, by its ID."""

    batch: str
    deliveries: int

    @property
    def place(self) -> tuple[int, ...]:
        """Sorts batches by when they were dispatched, of which the first part is the time (ms)."""
        return tuple(map(int, entry_of_batch(self.batch).split("-")))


class ProcessState(NamedTuple):
    """A model process. `in_hand`: how many batches it has; `batches`: the oldest of these, which are unknown
    where BATCHES_MAX of other processes are older. `memory`: as far as its worker tells."""

    name: str
    is_alive: bool  # its lease runs
    is_draining: bool  # it takes no more batches, or begins no more sequences
    lease_ends_ms: int
    in_hand: int
    batches: Sequence[HeldBatch] = ()
    memory: ProcessMemory = UNKNOWN
    device: str = ""

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest of its batches was dispatched, by Redis's clock; None if it has none."""
        return self.batches[0].place[0] if self.batches else None


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
    deaths: int = 0  # of its processes, in the last minute

    @property
    def host(self) -> str:
        """The host that it runs on, as its name says; empty if that has another form."""
        parsed = parse_process_name(self.name)
        return "" if parsed is None else parsed.host

    @property
    def alive(self) -> list[ProcessState]:
        """Its processes whose lease runs."""
        return [process for process in self.processes if process.is_alive]

    @property
    def state(self) -> str:
        """serving; draining, as it stops or because of an operator; or lost: no lease of it runs."""
        if not self.alive:
            return "lost"
        drains = self.order is not None or all(process.is_draining for process in self.alive)
        return "draining" if drains else "serving"

    @property
    def memory(self) -> ProcessMemory:
        """Of all of its processes."""
        return ProcessMemory(
            sum(process.memory.resident for process in self.processes),
            sum(process.memory.on_gpus for process in self.processes),
        )

    def age_s(self, time_ms: int | None) -> float | None:
        """How long ago that was, one of the times here; None if it is unknown."""
        return None if time_ms is None else max(0, self.at_ms - time_ms) / 1000


class Members(NamedTuple):
    """Who the workers of a model are, at a time of Redis's clock. `leases`: by process, when it ends (ms);
    `versions`: those that have streams of batches."""

    at_ms: int
    leases: Mapping[str, int]
    draining: frozenset[str]  # processes
    versions: Sequence[str]

    @classmethod
    def of(
        cls, at_ms: int, leases: Sequence[bytes], draining: Iterable[Any], versions: Iterable[Any]
    ) -> Members:
        """From what Redis replies; `leases` is member, score, member, score, ..."""
        ends = zip(leases[::2], leases[1::2], strict=True)
        return cls(
            at_ms,
            {process.decode(): int(float(end_ms)) for process, end_ms in ends},
            frozenset(names(draining)),
            sorted(names(versions)),
        )

    def workers(self) -> dict[str, list[str]]:
        """By the name of a worker its processes, in order."""
        return {worker: list(of_worker) for worker, of_worker in groupby(sorted(self.leases), worker_of)}


def commands_for(keys: Keys, members: Members) -> dict[What, Command]:
    """The commands whose replies say what is known of these workers."""
    commands: dict[What, Command] = {
        ("declared", ""): ("HGETALL", keys.declared),
        ("drained", ""): ("HGETALL", keys.drained),
    }
    for worker in members.workers():
        commands["memory", worker] = ("HGETALL", keys.memory(worker))
    for version in ("", *members.versions):
        stream = keys.batches_of(version) if version else keys.batches
        commands["in hand", version] = ("XPENDING", stream, WORKERS_GROUP)
        commands["batches", version] = ("XPENDING", stream, WORKERS_GROUP, "-", "+", BATCHES_MAX)
    return commands


def read_states(model: str, members: Members, replies: Mapping[What, Any]) -> list[WorkerState]:
    """The workers, by name, from the replies to `commands_for`. A CommandError in place of a reply is as if
    nothing was told: no permission, no group yet, or a key of another type."""
    told = {what: reply for what, reply in replies.items() if not isinstance(reply, CommandError)}
    versions = _versions(texts(told.get(("declared", ""), ())))
    orders = texts(told.get(("drained", ""), ()))
    in_hand, batches = _in_hand(told)
    states = []
    for worker, of_worker in members.workers().items():
        about_it = texts(told.get(("memory", worker), ()))
        about, memory = read_about(about_it.get("about", "")), read_memory(about_it)
        processes = [
            ProcessState(
                name,
                members.leases[name] > members.at_ms,
                name in members.draining,
                members.leases[name],
                in_hand[name],
                batches[name][:BATCHES_SHOWN],
                memory.get(number, UNKNOWN),
                about.device(number) if about is not None else "",
            )
            for name, number in zip(of_worker, map(replica_of, of_worker), strict=True)
        ]
        last_end_ms = max(process.lease_ends_ms for process in processes)
        states.append(
            WorkerState(
                model,
                worker,
                members.at_ms,
                versions.get(worker, ""),
                processes,
                read_drain_order(orders[worker]) if worker in orders else None,
                about.since_ms if about is not None else None,
                last_end_ms - about.lease_ms if about is not None else None,
                about.deaths if about is not None else 0,
            )
        )
    return states


def read_workers(link: Link, keys: Keys) -> list[WorkerState]:
    """The workers of a model, by name. Raises LinkError and CommandError."""
    time_reply, leases, draining, versions = no_errors(
        link.call_many(
            ("TIME",),
            ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
            ("SMEMBERS", keys.draining),
            ("SMEMBERS", keys.versions),
        )
    )
    at_ms = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
    members = Members.of(at_ms, leases, draining, versions)
    commands = commands_for(keys, members)
    replies = link.call_many(*commands.values())
    return read_states(keys.model, members, dict(zip(commands, replies, strict=True)))


class FoundWorker(NamedTuple):
    """A worker, by its name, and the model that it serves."""

    model: str
    worker: str


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


def _in_hand(told: Mapping[What, Any]) -> tuple[Mapping[str, int], Mapping[str, list[HeldBatch]]]:
    """By process how many batches it has, and the oldest of these, the oldest first."""
    numbers, batches = Counter[str](), defaultdict[str, list[HeldBatch]](list)
    for (what, version), reply in told.items():
        if what == "in hand":
            numbers.update({process.decode(): int(number) for process, number in reply[3] or ()})
        elif what == "batches":
            for entry_id, process, _, deliveries in reply:
                batch = batch_id_of(entry_id.decode(), version)
                batches[process.decode()].append(HeldBatch(batch, deliveries))
    for of_process in batches.values():
        of_process.sort(key=lambda batch: batch.place)
    return numbers, batches


def _versions(declared: Mapping[str, str]) -> dict[str, str]:
    """Of each worker that names one, the version of its model."""
    found: dict[str, str] = {}
    for worker, text in declared.items():
        with suppress(ValueError, AttributeError, RecursionError):  # a user wrote it
            found[worker] = str(json.loads(text).get(VERSION, ""))
    return found
