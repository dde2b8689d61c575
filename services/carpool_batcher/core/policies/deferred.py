"""The policy `deferred`: dispatch as late as deadlines allow, and refuse early what cannot be in time.

`policies.plan` says when that is, and what to refuse. Here is what it is asked: about which requests, with
which deadlines, and how often more arrive. While l(n) is unknown, and in lanes in which nothing is ever due,
the policy is `eager`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages.batches import DispatchReason
from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool_batcher.core.applied_settings import AppliedSettings, Shares
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import refusal
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.policies.eager import Eager
from carpool_batcher.core.policies.plan import Forecast, is_efficient, latest_start_us, plan
from carpool_batcher.core.waiting.fairness import RunPart
from carpool_batcher.core.waiting.lane import NEVER_US, Lane
from carpool_batcher.core.waiting.lane_index import ANY_TIME_US, Gate
from carpool_batcher.core.waiting.queue import Queue

# How many waiting requests a plan considers one by one, in batches of the largest size; and as batches, for
# each process.
PLANNED_BATCHES_MAX: Final = 4


class Deferred(Eager):
    """The policy of one model. A full batch is dispatched early only while all that were are in time: once a
    batch could not be, `may_be_early` is false until a process is free."""

    full_gate = Gate.FULL  # it could be late if it is ahead for long
    is_full_final = False
    forecasts = True

    def __init__(self, applied: AppliedSettings, queue: Queue, capacity: Capacity, learned: Learned) -> None:
        super().__init__(applied, queue)
        self._capacity = capacity
        self._learned = learned
        self._arrivals = ArrivalRate()
        self.may_be_early = True

    def observe(self, now_us: int) -> None:
        self._arrivals.observe(self._queue.arrived_executable, now_us, self._learned.turnaround_all_us)
        self.may_be_early = self.may_be_early or not self._capacity.is_early(now_us)

    # --- when ----------------------------------------------------------------------------------------------

    def ready(self, lane: Lane, now_us: int) -> tuple[int, DispatchReason]:
        delay_ends_us, reason = at_once = super().ready(lane, now_us)
        if reason not in ("delay", "idle") or not self._is_due(lane):
            return at_once
        forecast, size = self._forecast(lane), max(1, lane.executable)
        if is_efficient(forecast.times, size, forecast.max_size, self._gap_us(lane, now_us)):
            return ANY_TIME_US, "efficient"
        start_us = latest_start_us(forecast, lane.earliest_due_us(self._applied.target_us), size)
        if reason == "delay" and delay_ends_us < start_us:
            return at_once
        return start_us, "deadline"

    def _is_due(self, lane: Lane) -> bool:
        """Whether l(n) is known, and when something in a lane is due."""
        return self._learned.latency.known and lane.earliest_due_us(self._applied.target_us) != NEVER_US

    def _gap_us(self, lane: Lane, now_us: int) -> float:
        """How long all idle processes together wait for one more request of a lane."""
        lane_ratio = lane.count / self._queue.undelayed  # of the arrivals, as of those that wait
        return self._arrivals.gap_us / lane_ratio * max(1, self._capacity.idle_processes(now_us))

    def _forecast(self, lane: Lane) -> Forecast:
        """What is known of a lane's batches, without when processes are free."""
        transit = self._learned.transit_by_size
        return Forecast(
            self._learned.times_of(lane.label), self._applied.batch.size, transit, transit.at_most_us
        )

    # --- which requests ------------------------------------------------------------------------------------

    def form(self, lane: Lane, reason: DispatchReason, now_us: int) -> tuple[int, Sequence[Refusal]]:
        """After a refusal no batch is dispatched yet: the lane is looked at again, because the other requests
        may have time to wait, and the fair turns have changed. If it is early, and only a part of a full
        batch would be in time, nothing is decided yet: others may arrive that can take part.
        """
        size = self._size(lane, reason)
        if not lane.executable or not self._is_due(lane):
            return size, ()
        forecast, starts_us = self._forecast(lane), self._capacity.starts_us(now_us)
        size_max = min(lane.executable, forecast.max_size)
        if forecast.latest_arrival_us(starts_us, size_max) <= lane.earliest_due_us(self._applied.target_us):
            return size, ()  # all are in time: no plan is needed
        parts = list(_planned_first(lane, self._applied.shares, PLANNED_BATCHES_MAX * size))
        if not parts:
            return size, ()
        forecast = forecast._replace(free_times_us=self._capacity.free_times_us(now_us))
        deadlines_us: list[int] = []
        for run, _, count in parts:
            deadlines_us += [self._strict_deadline_us(run)] * count
        ahead_max = PLANNED_BATCHES_MAX * size * max(1, len(forecast.free_times_us))
        behind = min(lane.executable, ahead_max) - len(deadlines_us)
        refused, planned_size = plan(forecast, deadlines_us, starts_us, behind)
        if planned_size < size_max and self._capacity.is_early(now_us):
            self.may_be_early = False
            return 0, ()
        if not planned_size and self._begins_trial(lane, now_us):
            return size, ()
        if refused:
            return 0, [_refuse_early(run, now_us) for run in self._queue.take_from(parts, refused)]
        return _length_with_doubtful(lane, self._applied.shares, planned_size, size), ()

    def _strict_deadline_us(self, run: Run) -> int:
        """The deadline for which a run may be refused early: NEVER_US if it has only a target, or is served
        even after its deadline."""
        if run.deadline_us is None or run.is_late:
            return NEVER_US
        return NEVER_US if self._applied.served_late[run.priority] else run.deadline_us

    def _begins_trial(self, lane: Lane, now_us: int) -> bool:
        """O(batches in flight)."""
        is_in_flight = any(batch.lane == lane.label for batch in self._capacity.in_flight.values())
        return not is_in_flight and self._learned.begin_trial(lane.label, now_us)


def _planned_first(lane: Lane, shares: Shares, size: int) -> Iterator[RunPart]:
    """The first `size` requests of a lane that the model is expected to execute, in order. Not those behind
    more than `size` others: these may be any number."""
    others = size
    for one in lane.in_order(shares):
        if one.run.is_doubtful:
            others -= one.size
        else:
            yield one._replace(size=min(one.size, size))
            size -= one.size
        if size <= 0 or others < 0:
            return


def _length_with_doubtful(lane: Lane, shares: Shares, executable: int, length_max: int) -> int:
    """The length of a batch that has `executable` requests that the model is expected to execute, and those
    between them and right behind them that it is not; at most `length_max`."""
    if not lane.doubtful:
        return min(executable, length_max)
    length = 0
    for run, _, count in lane.in_order(shares):
        if not run.is_doubtful:
            if count > executable:
                return min(length + executable, length_max)
            executable -= count
        length += count
        if length >= length_max:
            return length_max
    return length


def _refuse_early(run: Run, now_us: int) -> Refusal:
    remaining_ms = ((run.deadline_us or 0) - now_us) / 1000
    detail = f"refused early: the {remaining_ms:.0f} ms before its deadline are not enough to execute it"
    return refusal(run, DEADLINE_EXCEEDED, "early", detail)


class ArrivalRate:
    """How often requests arrive: the mean gap between recent arrivals, weighted exponentially. It is told
    their total from time to time, O(1) each time."""

    def __init__(self) -> None:
        self._observed: tuple[int, int] | None = None  # arrivals so far, and when (us)
        # Arrivals, and the time in which they arrived, weighted by their age: of a pause, at most the memory.
        self._recent = 0.0
        self._recent_us = 0.0

    def observe(self, arrived: int, now_us: int, memory_us: float) -> None:
        """By `now_us`, `arrived` requests had arrived. What is `memory_us` older counts e times less."""
        if self._observed is not None:
            arrived_before, observed_us = self._observed
            weight = math.exp(min(0, observed_us - now_us) / memory_us) if memory_us else 0.0
            self._recent *= weight
            self._recent_us = self._recent_us * weight + memory_us * (1 - weight)
            self._recent += arrived - arrived_before
        self._observed = arrived, now_us

    @property
    def gap_us(self) -> float:
        """The mean time from one arrival to the next; 0 while unknown."""
        return self._recent_us / self._recent if self._recent else 0.0
