"""Deadlines: timers for runs that wait and for batches in flight, and what happens when one is due.

Timers are never cancelled. One whose runs no longer wait, or whose batch has settled, has no effect. It is
dropped when it would be the next one, so that nobody wakes up for it; and all such timers are dropped from
time to time, to bound memory. A timer keeps runs that do not wait any more, and not their bodies: these are
released by who carries out what became of the run (`BatchesInFlight.launch`, `EntryTable.update_from`).

Each run is looked at once for its timer, and once for each time that it is set anew. So the cost is linear,
however many lanes and deadlines an entry has.

Why: docs/decisions/0017 and docs/decisions/0023.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Mapping
from itertools import count
from typing import Final, NamedTuple

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages.requests import Run
from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import Decision, Expire, refusal
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.waiting.queue import Queue

TURNAROUND_LEAD_RATIO: Final = 1.5  # urgent: this many turnarounds (dispatch to settled) before the deadline,
LEAD_US_MIN: Final = 2000  # and this much more
RUNS_OF_TIMER_MAX: Final = 256
PIECE_RUNS: Final = 128  # of a timer, or timers, after which a piece ends
NO_WORKER: Final = "; no worker serves its model now"  # the end of why a request expired
EXPIRED_AT_ONCE: Final = 8192  # about: twice as many as are admitted at once, so that none is late for long


class RunTimer(NamedTuple):
    """Look at these runs, which have this deadline. Those that wait no more are dropped from the end."""

    at_us: int
    deadline_us: int
    runs: list[Run]


class BatchTimer(NamedTuple):
    """Look at this batch in flight."""

    at_us: int
    batch_id: str


class Deadlines:
    """The timers of all runs with a deadline."""

    def __init__(self, applied: AppliedSettings, queue: Queue, capacity: Capacity, learned: Learned) -> None:
        self._applied = applied
        self._queue = queue
        self._capacity = capacity
        self._learned = learned
        self._timers: list[tuple[int, int, RunTimer | BatchTimer]] = []  # a heap
        self._numbers = count()
        self._latest: RunTimer | None = None  # set by `watch`: the next run may share it

    def wake_at_us(self) -> int | None:
        """When the next timer that has an effect is due; None if there is none. O(log timers) amortised."""
        while self._timers and not self._has_effect(self._timers[0][2]):
            self._forget_latest(heapq.heappop(self._timers)[2])
        return self._timers[0][0] if self._timers else None

    # --- setting timers ------------------------------------------------------------------------------------

    def watch(self, run: Run, deadline_us: int, now_us: int) -> None:
        """Set a timer for a waiting run: for its deadline, or, if batches are delayed, for when it is
        urgent."""
        at_us = deadline_us
        if self._applied.has_queue_delay:
            at_us = max(now_us, self._urgent_at_us(run.lane, deadline_us))
        latest = self._latest
        is_same = latest is not None and latest.at_us == at_us and latest.deadline_us == deadline_us
        if latest is not None and is_same and len(latest.runs) < RUNS_OF_TIMER_MAX:
            latest.runs.append(run)
        else:
            self._latest = timer = RunTimer(at_us, deadline_us, [run])
            self._set(timer)

    def watch_all_again(self) -> None:
        """Set the timers of all waiting runs anew, because from now on batches are delayed."""
        self._timers = [item for item in self._timers if type(item[2]) is BatchTimer]
        heapq.heapify(self._timers)
        self._latest = None
        self.watch_again(self._queue.runs())

    def watch_again(self, runs: Iterable[Run]) -> None:
        """Set timers for those of these runs that wait; they may have others. Of a sequence: for its new
        head, which could not be urgent as a follower."""
        for run in runs:
            if run.deadline_us is not None and run.waits_in is not None and not run.is_late:
                self.watch(run, run.deadline_us, 0)

    def watch_batch(self, batch_id: str, expiring: Mapping[int, Run]) -> None:
        """Set a timer for a batch in flight, at the earliest deadline of these runs."""
        if expiring:
            self._set(BatchTimer(min(run.deadline_us or 0 for run in expiring.values()), batch_id))

    def _urgent_at_us(self, lane: str, deadline_us: int) -> int:
        return deadline_us - int(TURNAROUND_LEAD_RATIO * self._learned.turnaround_us(lane)) - LEAD_US_MIN

    def _set(self, timer: RunTimer | BatchTimer) -> None:
        heapq.heappush(self._timers, (timer.at_us, next(self._numbers), timer))
        if len(self._timers) > 4 * (self._queue.count + len(self._capacity.in_flight)) + 1000:
            self._drop_outdated()

    def _forget_latest(self, timer: RunTimer | BatchTimer) -> None:
        """This timer is not set any more."""
        if timer is self._latest:
            self._latest = None

    def _drop_outdated(self) -> None:
        """Drop timers that have no effect any more, and runs that wait no more, to bound memory. O(1)
        amortised."""
        for _, _, timer in self._timers:
            if type(timer) is RunTimer:
                timer.runs[:] = [run for run in timer.runs if run.waits_in is not None]
        self._timers = [item for item in self._timers if self._has_effect(item[2])]
        heapq.heapify(self._timers)
        self._latest = None

    def _has_effect(self, timer: RunTimer | BatchTimer) -> bool:
        """O(1) amortised: runs that are found not to wait are dropped."""
        if type(timer) is BatchTimer:
            return timer.batch_id in self._capacity.in_flight
        assert type(timer) is RunTimer
        runs = timer.runs
        while runs and runs[-1].waits_in is None:
            runs.pop()
        return bool(runs)

    # --- timers that are due -------------------------------------------------------------------------------

    def run_due(self, now_us: int) -> Generator[None, None, list[Decision]]:
        """Handle the timers that are due by now, in pieces of a timer. If these are very many, only some of
        them: see `has_due`."""
        decisions: list[Decision] = []
        handled = 0
        while len(decisions) < EXPIRED_AT_ONCE and self.has_due(now_us):
            timer = heapq.heappop(self._timers)[2]
            handled += 1
            if type(timer) is BatchTimer:
                decisions += self._check_batch(timer.batch_id, now_us)
            elif type(timer) is RunTimer:
                self._forget_latest(timer)
                decisions += self._check_runs(timer, now_us)
                if len(timer.runs) > PIECE_RUNS or not handled % PIECE_RUNS:
                    yield
        return decisions

    def has_due(self, now_us: int) -> bool:
        """Whether timers are due by now that `run_due` has not handled."""
        return bool(self._timers) and self._timers[0][0] <= now_us

    def _check_batch(self, batch_id: str, now_us: int) -> list[Decision]:
        """Expire the runs of a batch in flight that are past their deadlines."""
        batch = self._capacity.in_flight.get(batch_id)
        if batch is None:
            return []
        past = [at for at, run in batch.expiring.items() if (run.deadline_us or 0) <= now_us]
        expired: list[Decision] = [Expire(batch_id, at, batch.expiring.pop(at)) for at in past]
        self.watch_batch(batch_id, batch.expiring)
        return expired

    def _check_runs(self, timer: RunTimer, now_us: int) -> list[Decision]:
        """Mark those of these runs that wait as urgent, or expire them if they are past their deadline."""
        # A head of a sequence may be there twice, and the second time it waits no more.
        in_time = (run for run in timer.runs if run.waits_in is not None and not run.is_late)
        if timer.deadline_us <= now_us:
            return [decision for run in in_time for decision in self._expire(run)]
        urgent = list(in_time)
        for run in urgent:
            self._queue.mark_urgent(run)
        if urgent:
            self._set(RunTimer(timer.deadline_us, timer.deadline_us, urgent))
        return []

    def _expire(self, run: Run) -> list[Decision]:
        if self._applied.served_late[run.priority]:
            self._queue.move_expired(run)
            return []
        awaited = self._queue.awaited(run)
        self._queue.remove(run)
        after_us = (run.deadline_us or 0) - run.arrival_us  # less than 0: see `decode_entry`
        expiration_ms = max(0, after_us // 1000 + run.not_before_ms)
        detail = f"expired: still waiting {expiration_ms} ms after its arrival"
        if awaited:
            detail += f", for {awaited}"
        elif self._applied.pause is not None:
            detail += f"; {self._applied.pause.detail}"
        elif not self._capacity.processes:
            detail += NO_WORKER
        return [refusal(run, DEADLINE_EXCEEDED, "waiting", detail)]
