"""The capacity of the model processes: how many there are, what is in flight, and when one becomes free.

An idle process takes the next batch, whichever process it is: batches are not assigned to processes. Of the
batches in flight the oldest, one for each process, are being executed. The others are dispatched ahead: each
waits until some process finishes its batch. A batch is dispatched when that is decided, and settled when its
worker commits it. Expected:

    a batch dispatched to an idle process settles   l(n) + round trip   after its dispatch
    a batch dispatched ahead settles                l(n)                after the one before it settled

Here l(n) is that of the batch's lane, and the round trip is the way to the worker and back. A batch should
reach a process at the moment at which it becomes free: so it is dispatched one round trip before the settling
of the batch that is being executed there. Round trips vary, and a process without a batch is the greater
loss: a batch that comes early waits there, and lacks only the requests that arrive meanwhile. So this lead is
what nine of ten round trips do not exceed; twice that for a full batch, which would get no more requests.
If batches take less time than that, two full ones are dispatched ahead of a process: the second one waits for
the first, and not for the batcher to learn that a batch settled. What such a batch then waits is part of its
time: it settles as if it had been dispatched one usual round trip before its process becomes free.

A deadline is met when the producer has the result, after its transit (`learned.transit`). For deadlines that
counts as nine of ten are, as the longest ones, or as usual (`policies.plan` says when); otherwise as the
median.

Processes that start batches together also finish them together. A request that arrives just after that
would wait for nearly all of l(n), however many processes there are. Therefore, when load is too high for
batches of one, dispatches are spaced evenly: with N processes one every l(n) / N, so that no request waits
longer than that. The more l(n) grows with n, the shorter this interval is; where l(n) is proportional to n,
it is 0.

A process of a model with an async `predict` executes several batches at a time (`max_concurrent_batches`):
here it counts as that number of processes.

Of a bound model each batch is for one process: `sequences.processes` knows if it is idle (BoundCapacity).

A batch at a process that drains, or for a version without processes, occupies none of the others: it is set
apart. How versions share processes is in `version_capacity`.

A process of a stepping model takes as many batches at a time as it has slots, each of one request, and a few
more that get a slot as soon as one is free. There l(n) is not learned, and all of the above follows from
`has_capacity`: a batch is dispatched if there is capacity for it.

Why: docs/decisions/0011 and docs/decisions/0012.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection
from heapq import heapreplace
from typing import Final

from carpool.model_settings import prefetched_slots
from carpool_batcher.core.applied_settings import NO_LIMIT
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.executed_share import ExecutionTimes
from carpool_batcher.core.learned.learned import Learned

UNSPACED_MEAN_SIZE_MAX: Final = 1.2  # mean batch size up to which dispatches are not spaced
SPACED_MEAN_SIZE_MIN: Final = 2.2  # from here they are spaced fully; between the two, in proportion
MEAN_SIZE_WEIGHT: Final = 0.1  # of the latest batch in the mean size
PROCESS_BATCHES_MAX: Final = 2  # in flight for each process: one executing, one ahead
FULL_BATCHES_MAX: Final = 3  # the same under `deferred`, where the last one is full
FULL_LEADS: Final = 2  # how many leads before a process is free a full batch may be dispatched to it
_LAST_ID: Final = "\uffff"  # after each batch ID


class Capacity:
    """The batches in flight, and how many more the model processes can take, and when. See the module."""

    def __init__(self, learned: Learned, processes: int) -> None:
        self.processes = processes
        self.in_flight: dict[str, InFlightBatch] = {}  # in the order in which they were dispatched
        self._learned = learned
        self._batches_per_process = PROCESS_BATCHES_MAX
        self._cost_per_process: int | None = None  # limit, for requests in slots
        self._cost = 0  # of all in flight and reserved, if there is a limit
        self._reserved: deque[int] = deque()  # the cost of each reserved batch
        self._executing: list[tuple[int, str]] = []  # (expected to settle, batch ID), soonest first
        self._ahead: deque[str] = deque()
        self._apart: set[str] = set()  # batches in flight that occupy no process that takes batches
        self._mean_size = 0.0
        self._spacing_ends_us = 0

    # --- events --------------------------------------------------------------------------------------------

    def resize(self, processes: int) -> None:
        """The number of live model processes changed."""
        self.processes = processes
        while self._ahead and len(self._executing) < processes:
            self._start_next()

    def set_slots(self, slots: int | None, cost_max: int | None) -> None:
        """Each process takes `slots` requests at a time, each in a batch of its own, of at most `cost_max`
        together (None: no limit). Without slots it executes one batch at a time."""
        if slots is None:
            self._batches_per_process = PROCESS_BATCHES_MAX
        else:
            self._batches_per_process = slots + prefetched_slots(slots)
        self._cost_per_process = cost_max if slots else None

    def reserve(self, cost: int = 0, version: str = "") -> None:
        """Take up capacity for a decided batch, at processes of this version if they are told apart; `launch`
        or `unreserve` follows, in this order."""
        self._reserved.append(cost)
        self._cost += cost

    def unreserve(self, version: str = "") -> None:
        """The batch reserved first was not dispatched. It was for this version."""
        self._cost -= self._reserved.popleft()

    def launch(self, batch_id: str, batch: InFlightBatch) -> None:
        """The batch reserved first is in flight."""
        self._cost -= self._reserved.popleft()
        self.adopt(batch_id, batch)

    def adopt_earlier(self, batch_id: str, batch: InFlightBatch) -> None:
        """A batch is in flight that a previous batcher dispatched."""
        self.adopt(batch_id, batch)

    def set_apart(self, batch_ids: Collection[str]) -> list[str]:
        """Of the batches in flight these occupy none of the processes, and all others do. Returns those of
        the others that did not before."""
        if not (batch_ids or self._apart):
            return []
        wanted = self.in_flight.keys() & batch_ids
        for batch_id in wanted - self._apart:
            self._apart.add(batch_id)
            self._cost -= self.in_flight[batch_id].cost
            self._vacate(batch_id, 0)
        unwanted = self._apart - wanted
        again = [batch_id for batch_id in self.in_flight if batch_id in unwanted]
        for batch_id in again:
            self._apart.discard(batch_id)
            self._cost += self.in_flight[batch_id].cost
            self._occupy(batch_id)
        return again

    def adopt(self, batch_id: str, batch: InFlightBatch) -> None:
        """A batch is in flight for which no capacity was reserved."""
        self.in_flight[batch_id] = batch
        self._cost += batch.cost
        self._space_dispatches(batch)
        self._occupy(batch_id)

    def _occupy(self, batch_id: str) -> None:
        """A batch occupies a process, or waits for one."""
        self._ahead.append(batch_id)
        if len(self._executing) < self.processes:
            self._start_next()

    def end(self, batch_id: str, now_us: int) -> None:
        """A batch is no longer in flight."""
        batch = self.in_flight.pop(batch_id, None)
        if batch is None:
            return
        if batch_id in self._apart:
            self._apart.discard(batch_id)
            return
        self._cost -= batch.cost
        self._vacate(batch_id, now_us)

    def _vacate(self, batch_id: str, now_us: int) -> None:
        """A batch does not occupy a process any more."""
        if batch_id in self._ahead:
            self._ahead.remove(batch_id)
        else:
            self._executing = [executing for executing in self._executing if executing[1] != batch_id]
        if len(self._executing) < self.processes:
            self._start_next(now_us)

    def _space_dispatches(self, batch: InFlightBatch) -> None:
        """The next batch is dispatched l(n) / N after this one, n being the mean size.

        Sooner where l(n) grows with n: there, waiting makes batches larger, and larger batches delay each of
        their results. At once where the mean size is about one.
        """
        self._mean_size += MEAN_SIZE_WEIGHT * (batch.executable - self._mean_size)
        self._spacing_ends_us = 0
        if self.processes < 2:
            return
        times = self._learned.times_of(batch.lane)
        execution_us = times.of(round(self._mean_size))
        if not execution_us:
            return
        excess_size = self._mean_size - UNSPACED_MEAN_SIZE_MAX
        spaced_ratio = min(max(excess_size / (SPACED_MEAN_SIZE_MIN - UNSPACED_MEAN_SIZE_MAX), 0.0), 1.0)
        slope_ratio = _slope_ratio(times, round(self._mean_size))
        interval_us = spaced_ratio * (1 - slope_ratio**2) * execution_us / self.processes
        self._spacing_ends_us = batch.dispatched_us + int(interval_us)

    def _start_next(self, free_us: int = 0) -> None:
        """The next batch is executed by a process of which the last batch settled at `free_us`.

        A batch that was dispatched less than a round trip before that arrives when the process is idle.
        """
        if self._ahead:
            batch_id = self._ahead.popleft()
            start_us = max(free_us, self.in_flight[batch_id].dispatched_us + self._learned.round_trip_us)
            insort(self._executing, (start_us + self._execution_us(batch_id), batch_id))

    # --- when a batch may be dispatched --------------------------------------------------------------------

    def has_capacity(self) -> bool:
        """Whether a batch that cannot grow may be dispatched: at most one ahead of each process.

        A limit on the cost may be exceeded by one request, which then waits in a worker for its slot: it
        might have the only process in which there is space.
        """
        batches, cost = self.left()
        return batches > 0 and cost > 0

    def next_version(self) -> str:
        """The version to whose processes the next batch goes that any may execute; '' if to all of them."""
        return ""

    def load(self) -> tuple[float, int]:
        """How much is in flight and reserved for the number of processes; for comparing versions."""
        occupied = self._occupied()
        return (occupied / self.processes if self.processes else float("inf")), occupied

    def left(self) -> tuple[int, int]:
        """How many batches that cannot grow may be dispatched, and what they may cost together."""
        batches = self._batches_per_process * self.processes - self._occupied()
        limit = self._cost_per_process
        return batches, NO_LIMIT if limit is None else limit * self.processes - self._cost

    def idle_processes(self, now_us: int) -> int:
        """How many processes could execute a batch dispatched now without delay. O(log processes)."""
        finished = bisect_right(self._executing, (now_us + self._learned.lead_us, _LAST_ID))
        return max(0, self.processes - self._occupied() + finished)

    def free_at_us(self, now_us: int, *, is_full: bool = False) -> int | None:
        """From when on a batch that can still grow may be dispatched; with `is_full`, one that cannot.

        `now_us` if a process is idle, or else `lead_us` before the last batch of one settles, or FULL_LEADS
        times as long before. None if that is unknown until a batch settles.
        """
        taken = self._occupied()
        if taken < self.processes:
            return now_us
        batches_max = FULL_BATCHES_MAX if is_full else PROCESS_BATCHES_MAX
        if not self._learned.latency.known or taken >= batches_max * self.processes:
            return None
        ahead = taken - self.processes
        before = self._before_next(ahead)
        if before is None:
            return None
        executing_us, executing_id = self._executing[ahead if ahead < len(self._executing) else 0]
        if now_us > executing_us + self._tolerance_us(executing_id):
            return None  # it takes longer than expected, and it is unknown how much longer
        return before[0] - self._learned.lead_us * (FULL_LEADS if is_full else 1)

    def is_early(self, now_us: int, *, is_full: bool = False) -> bool:
        """Whether it is too early to dispatch a batch that can grow; with `is_full`, one that cannot."""
        free_at_us = self.free_at_us(now_us, is_full=is_full)
        return free_at_us is None or free_at_us > now_us

    def _before_next(self, ahead: int) -> tuple[int, str] | None:
        """The batch for which the next one to be dispatched has to wait, and when it is expected to settle;
        None if that is unknown. `ahead`: how many batches wait for processes, none of which is idle. O(1) for
        the first batch ahead of each process."""
        if ahead < len(self._executing):
            return self._executing[ahead]  # processes that are free earlier have a batch ahead already
        if self._reserved or not self.processes or len(self._executing) < self.processes:
            return None
        last = self._executing[: self.processes]  # of each process; sorted, and so a heap
        for batch_id in self._ahead:
            heapreplace(last, (last[0][0] + self._execution_us(batch_id), batch_id))
        return last[0]

    def starts_us(self, now_us: int) -> int:
        """A batch that is dispatched now settles as if it were dispatched at this time: later than now, if it
        has to wait for a process that is still busy."""
        ahead = self._occupied() - self.processes
        before = None if ahead < 0 else self._before_next(ahead)
        return now_us if before is None else max(now_us, before[0] - self._learned.round_trip_us)

    def free_times_us(self, now_us: int) -> list[int]:
        """For each process, when to dispatch a batch that need not wait, after those dispatched ahead."""
        settle_us = [settles_us for settles_us, _ in self._executing[: self.processes]]
        for batch_id in self._ahead if settle_us else ():  # sorted, and so a heap
            heapreplace(settle_us, settle_us[0] + self._execution_us(batch_id))
        busy = [max(now_us, settles_us - self._learned.round_trip_us) for settles_us in settle_us]
        return busy + [now_us] * (self.processes - len(busy))

    def spacing_ends_us(self) -> int:
        """From when on a batch without any hurry may be dispatched, for even spacing; 0: at any time."""
        return self._spacing_ends_us

    def _execution_us(self, batch_id: str) -> int:
        """The expected execution time of a batch in flight."""
        batch = self.in_flight[batch_id]
        return self._learned.expected_us(batch.lane, batch.executable)

    def _tolerance_us(self, batch_id: str) -> int:
        """How late a batch may be while it is still expected to settle at any moment."""
        return self._learned.round_trip_us + self._learned.times_of(self.in_flight[batch_id].lane).at_most(1)

    def _occupied(self) -> int:
        return len(self.in_flight) + len(self._reserved) - len(self._apart)


class BoundCapacity(Capacity):
    """Of a bound model: what all processes can take says nothing of the one that must take a batch."""

    def has_capacity(self) -> bool:
        return True

    def free_at_us(self, now_us: int, *, is_full: bool = False) -> int | None:
        return now_us

    def spacing_ends_us(self) -> int:
        return 0


def _slope_ratio(times: ExecutionTimes, size: int) -> float:
    """By how much l(n) grows with n around `size`: 0 if it is constant, 1 if it is proportional to n."""
    half, execution_us = size // 2, times.of(size)
    growth_us = (execution_us - times.of(half)) / max(1, size - half)
    return min(1.0, growth_us * size / max(1, execution_us))
