"""A scheduler for unit tests: requests are names, times are milliseconds, decisions are short strings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from carpool.messages.requests import Entry, Run, Withdrawal
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Rows
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler
from carpool_batcher.core.waiting.lane import NEVER_US

MS = 1000


class SchedulerHarness:
    """Drives a Scheduler and carries out what it decides.

    A request is named by its correlation ID. `poll` returns "full: a b" for a batch that was dispatched,
    "DEADLINE_EXCEEDED: a" for a refusal, and "expired: a" for a run in flight that expired. The first batch
    has the ID "1", the next one "2".
    """

    def __init__(self, processes: int = 1, **settings: Any) -> None:
        self.scheduler = Scheduler(ModelSettings(**settings), processes)
        self._entry_ids = itertools.count(1)
        self._batch_ids = itertools.count(1)

    def offer(self, names: str, at: float = 0, **fields: Any) -> list[Refusal]:
        """Offer an entry with one run, and return the refusals."""
        return self.offer_runs([run(names, at, f"{next(self._entry_ids)}-0", **fields)], at)

    def offer_runs(self, offered: Iterable[Run], at: float) -> list[Refusal]:
        return [refused for one in offered for refused in self.scheduler.offer(one, int(at * MS))]

    def poll(self, at: float = 0) -> list[str]:
        """Carry out all decisions that are due."""
        done: list[str] = []
        for decision in self.scheduler.poll(int(at * MS)):
            if isinstance(decision, Dispatch):
                self.scheduler.in_flight.launch(str(next(self._batch_ids)), decision, int(at * MS))
                done.append(f"{decision.reason}: {names_of(decision.runs)}")
                for one in decision.runs:
                    one.entry.runs.remove(one)
            elif isinstance(decision, Expire):
                done.append(f"expired: {' '.join(decision.run.correlation_ids)}")
            elif isinstance(decision, SlotFreed):
                done.append(f"{decision.sequence_id} has no slot")
            elif isinstance(decision, SequenceChange):
                done.append(f"{decision.part.sequence_id} {decision.outcome}")
            elif isinstance(decision, Refusal):
                done.append(f"{decision.status}: {' '.join(decision.correlation_ids)}")
        return done

    def withdraw(self, names: str, at: float = 0) -> list[Refusal]:
        """A producer withdraws these requests, in an entry of its own. Returns the refusals that are due."""
        entry = Entry(f"{next(self._entry_ids)}-0", int(at * MS))
        self.scheduler.withdraw(Withdrawal(entry, frozenset(names.split())))
        return list(self.scheduler.carry_out_withdrawals(int(at * MS)).refusals)

    def settle(self, batch: int, at: float = 0) -> None:
        """Settle a batch of which no request was executed, so that no execution time is learned."""
        settle(self.scheduler, str(batch), 0, int(at * MS))

    def wake_at_ms(self) -> float | None:
        wake_us = self.scheduler.wake_at_us()
        return None if wake_us is None else wake_us / MS

    def earliest_dispatch_ms(self) -> float | None:
        """As of the last `poll`; None: not before a batch settles."""
        earliest_us = self.scheduler.earliest_dispatch_us()
        return None if earliest_us == NEVER_US else earliest_us / MS

    def learn(
        self, *, intercept: float = 10, slope: float = 1, lane: str = "", until: float = 0
    ) -> SchedulerHarness:
        """Teach l(n) of a lane, in ms, by batches that settle at `until`. Their round trip takes no time."""
        for number, size in enumerate((1, 11, 1, 11)):
            execution_us, settled_us = int((intercept + slope * size) * MS), int(until * MS)
            dispatch = Dispatch([run("x " * size, lane=lane)], "idle", lane)
            self.scheduler.in_flight.adopt(
                f"earlier {number}", dispatch, dispatched_us=settled_us - execution_us
            )
            settle(self.scheduler, f"earlier {number}", execution_us, settled_us)
        return self


class LearningCapacity(Capacity):
    """A Capacity whose batches are learned from when they settle, as a Scheduler does it."""

    def __init__(self, processes: int) -> None:
        self.learned = Learned()
        super().__init__(self.learned, processes)

    def settle(self, batch_id: str, execution_us: int, settled_us: int, **others: Any) -> None:
        batch = self.in_flight.get(batch_id)
        if batch is not None:
            self.learned.observe(batch, settled(batch_id, batch.size, execution_us, settled_us, **others))
            self.end(batch_id, settled_us)


def settle(scheduler: Scheduler, batch_id: str, execution_us: int, settled_us: int, **others: Any) -> None:
    """A batch is committed, whether it is in flight or not. `others`: as of `settled`."""
    batch = scheduler.in_flight.batches.get(batch_id)
    size = 0 if batch is None else batch.size
    scheduler.in_flight.settle(settled(batch_id, size, execution_us, settled_us, **others))


def settled(
    batch_id: str,
    size: int,
    execution_us: int,
    settled_us: int,
    *,
    executed: int | None = None,
    **others: Any,
) -> BatchSettled:
    """What a worker tells of a batch of which `executed` requests (None: all) were executed together."""
    number = size if executed is None else executed
    return BatchSettled(batch_id, "w/0", size, execution_us, settled_us, number, **others)


def run(
    names: str,
    at: float = 0,
    entry_id: str = "1-0",
    *,
    expiration: float | None = None,
    body: bytes = b"x",
    rows: bool = False,
    **fields: Any,
) -> Run:
    """An entry's only run, which arrived at `at`. Each request has the same body."""
    entry = Entry(entry_id, int(at * MS))
    ids = names.split()
    bodies: Bodies = Rows(b"", body * len(ids), len(body)) if rows else [body] * len(ids)
    deadline_us = None if expiration is None else int((at + expiration) * MS)
    one = Run(entry, ids, bodies, arrival_us=entry.arrival_us, deadline_us=deadline_us, **fields)
    entry.runs.append(one)
    return one


def names_of(runs: Sequence[Run]) -> str:
    return " ".join(name for run in runs for name in run.correlation_ids)
