"""The model processes as a batcher knows them: how many there are, what is in flight, and when there is room.

Whoever is idle takes the next batch, so no batch belongs to a process and none is named. Of the batches in
flight the oldest, one for each process, are being executed; the others wait ahead of a busy one. When a busy
one will be free is known beforehand:

    a batch that found a process idle is heard of after      l(n) + trip
    one that waited ahead is begun when another is done, so  l(n)   after that was heard

where l(n) is that of the batch's lane, and the trip is the way there and the way back. The next batch leaves
so long before a process is free that it arrives in that moment: one trip before it would be heard of.

Processes that begin together end together, and who comes just after that waits for nearly all of l(n),
whatever their number. So where more arrive than can ride alone, batches set out at even intervals: of N
processes one every l(n) / N, and nobody waits longer than that for one that is free.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from heapq import heapreplace
from typing import Final, NamedTuple

from carpool.messages import Request
from carpool_batcher.core.lane_latency import LaneLatencies
from carpool_batcher.core.latency import LatencyModel

ALONE: Final = 1.2  # requests in a batch, on average: up to so many ride alone
CROWDED: Final = 2.2  # from so many on intervals are even; between the two, in proportion
_OF_LATE: Final = 0.1  # what the latest batch counts in the average
BATCHES_EACH: Final = 2  # the one that a process executes, and one that it has at hand
_TRIPS: Final = 16


class InFlightBatch(NamedTuple):
    """A batch in flight. `due`: those of its requests with a deadline, by position; `arrivals_us`: of all."""

    dispatched_us: int
    size: int
    lane: str
    due: dict[int, Request]
    arrivals_us: Sequence[int] = ()


class Capacity:
    """See the module. Times are those at which the batcher hears of things."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._latencies = LaneLatencies()
        self.now_us = 0  # when the scheduler looked last
        self.in_flight: dict[str, InFlightBatch] = {}  # in the order in which they were dispatched
        self._departing = 0  # decided on, and not named yet
        self._executing: list[tuple[int, str]] = []  # when they are done, soonest first
        self._ahead: deque[str] = deque()
        self._found_idle: set[str] = set()
        self._trips: deque[int] = deque(maxlen=_TRIPS)
        self._trip_us = 0
        self._mean_size = 0.0
        self._next_us = 0  # when the next batch may set out, for even intervals

    # --- what happens --------------------------------------------------------------------------------------

    def resize(self, processes: int) -> None:
        """So many model processes live."""
        self.processes = processes
        while self._ahead and len(self._executing) < processes:
            self._begin_next(self.in_flight[self._ahead[0]].dispatched_us + self._trip_us)

    def reserve(self) -> None:
        """A batch is about to leave: it takes up room from now on."""
        self._departing += 1

    def cancel(self) -> None:
        """It has left, or nobody was left to ride."""
        self._departing -= 1

    def launch(self, batch_id: str, riding: InFlightBatch) -> None:
        """A batch is in flight."""
        self.in_flight[batch_id] = riding
        self._set_pace(riding)
        self._ahead.append(batch_id)
        if len(self._executing) < self.processes:
            self._found_idle.add(batch_id)
            self._begin_next(riding.dispatched_us + self._trip_us)

    def settle(self, batch_id: str, compute_us: int, now_us: int) -> None:
        """A batch is done, or gone (`compute_us` 0): one that waited ahead is begun."""
        riding = self.in_flight.pop(batch_id, None)
        if riding is None:
            return
        took_us = now_us - riding.dispatched_us
        self._latencies.observe(riding.lane, riding.size, took_us, compute_us, now_us)
        if compute_us and batch_id in self._found_idle:
            self._learn_trip(took_us - compute_us)
        self._found_idle.discard(batch_id)
        if batch_id in self._ahead:
            self._ahead.remove(batch_id)
        else:
            self._executing = [one for one in self._executing if one[1] != batch_id]
        if len(self._executing) < self.processes:
            self._begin_next(now_us)

    def _set_pace(self, riding: InFlightBatch) -> None:
        """The next batch sets out l(n) / N after this one, n the mean size. Sooner where l(n) mostly grows:
        waiting makes batches larger there, and larger ones make everybody wait. At once where n is one."""
        self._mean_size += _OF_LATE * (riding.size - self._mean_size)
        latency = self.latency_of(riding.lane)
        takes_us = latency.of(round(self._mean_size))
        if self.processes < 2 or not takes_us:
            self._next_us = 0
            return
        crowding = min(max((self._mean_size - ALONE) / (CROWDED - ALONE), 0.0), 1.0)
        sloping = 1 - latency.of(0) / takes_us
        interval_us = crowding * (1 - sloping**2) * takes_us / self.processes
        self._next_us = riding.dispatched_us + int(interval_us)

    def _begin_next(self, start_us: int) -> None:
        if self._ahead:
            batch_id = self._ahead.popleft()
            insort(self._executing, (start_us + self._takes_us(batch_id), batch_id))

    def _learn_trip(self, trip_us: int) -> None:
        self._trips.append(max(0, trip_us))
        self._trip_us = sorted(self._trips)[len(self._trips) // 2]

    # --- what there is to know -----------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether a batch may leave that nothing could improve: at most one waits ahead of each process."""
        return self._taken() < BATCHES_EACH * self.processes

    def room_at_us(self) -> int | None:
        """The moment from which a batch may leave that could still grow: when a process is idle, or just
        before one is. None: not before something is settled."""
        taken = self._taken()
        if taken < self.processes:
            return 0
        next_free = taken - self.processes  # those that are free before it have a batch ahead already
        if not self.latency.known or next_free >= len(self._executing) or not self.has_room():
            return None
        done_us, batch_id = self._executing[next_free]
        if self.now_us > done_us + self._grace_us(batch_id):
            return None  # it takes longer than it should, and nobody knows how much
        return done_us - self._trip_us

    def evenly_us(self) -> int:
        """From when on a batch that nothing hurries may set out, so that intervals are even."""
        return self._next_us

    def frees_us(self, now_us: int) -> list[int]:
        """When a batch may leave for each process: now, or one trip before it would be heard of as free, with
        what waits ahead of it done."""
        done_us = [done_us for done_us, _ in self._executing[: self.processes]]
        for batch_id in self._ahead if done_us else ():  # sorted, and so a heap
            heapreplace(done_us, done_us[0] + self._takes_us(batch_id))
        busy = [max(now_us, one - self._trip_us) for one in done_us]
        return busy + [now_us] * (self.processes - len(busy))

    @property
    def trip_us(self) -> int:
        """The way there and back of a batch, beside what it takes to compute."""
        return self._trip_us

    @property
    def latency(self) -> LatencyModel:
        """l(n) of the model, whatever the lane."""
        return self._latencies.model.latency

    def latency_of(self, lane: str) -> LatencyModel:
        """l(n) of a lane; the model's as long as little is known of it."""
        return self._latencies.of(lane).latency

    def ride_us(self, lane: str) -> float:
        """How long a batch of a lane takes from dispatch to settled, of late."""
        return self._latencies.of(lane).ride_us

    def begin_trial(self, lane: str, now_us: int) -> bool:
        """Whether a batch of a lane in which nobody can be met is to leave all the same (`core.pace`).
        O(batches in flight)."""
        if any(riding.lane == lane for riding in self.in_flight.values()):
            return False
        return self._latencies.begin_trial(lane, now_us)

    def _takes_us(self, batch_id: str) -> int:
        """How long a batch in flight should compute."""
        riding = self.in_flight[batch_id]
        return self.latency_of(riding.lane).of(riding.size)

    def _grace_us(self, batch_id: str) -> int:
        """How late a batch may be and still be about to be done."""
        return self._trip_us + self.latency_of(self.in_flight[batch_id].lane).at_most(1)

    def _taken(self) -> int:
        return len(self.in_flight) + self._departing
