"""A simulation in virtual time: the production scheduler between simulated producers and model processes.

The scheduler is the real one; its environment is simulated. Requests arrive as a trace says. A dispatched
batch takes time to reach a model process, executes for l(n), and the scheduler learns of it after the way
back. It learns of a request some time after that was sent, and is woken up later than it asked for. Two
effects are not simulated: a batcher that needs time to decide and dispatch, and model processes that compete
for the same CPU. Pure: no clock, no Redis.

Why: docs/decisions/0038.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeGuard

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages.requests import JSON, Entry, Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool.rows import Bodies
from carpool.wire.report import BatcherReport
from carpool_batcher.core.learned.curve import Curve
from carpool_batcher.core.scheduler import Decision, Dispatch, Expire
from carpool_cli.tuning.arrivals import Arrival

PROGRESS_REQUESTS: Final = 1000  # between two reports of progress
NO_SPREAD: Final = (1.0,)
SPREAD_FACTORS: Final = 101  # of a normal spread: one for each interval of equal probability
SPREAD_FACTOR_MIN: Final = 0.1
_EQUAL_LANES: Final[Mapping[str, float]] = MappingProxyType({})
_NO_BODIES: Final[Bodies] = [b""]


class World(NamedTuple):
    """The environment of the scheduler: execution time and round trip of a batch of n, in us.

        execution   l(n) = intercept + slope n, or `curve`       times one of `spread`, chosen at random
        round trip  out + back + round_trip_slope n              times one of `round_trip_spread`

    A round trip is the time from dispatch to settled without the execution. Half of its slope belongs to the
    way out, where workers read bodies, and half to the way back, where results are read. A batch has one
    factor for both ways. `slower` multiplies l(n) of a lane. Where there is a `curve`, measured on a live
    model, it replaces the line. Deadlines count from when a request is sent, which is `in_us` before the
    batcher knows of it.
    """

    processes: int = 1
    intercept_us: float = 5000.0
    slope_us: float = 50.0
    out_us: int = 250  # from the batcher's decision to the start of the model
    back_us: int = 350  # from the end of the model until batcher and producer have the result
    round_trip_slope_us: float = 0.0
    spread: Sequence[float] = NO_SPREAD
    round_trip_spread: Sequence[float] = NO_SPREAD
    slower: Mapping[str, float] = _EQUAL_LANES
    curve: Curve | None = None
    in_us: int = 0  # from when a request is sent until the batcher has read it
    late_us: int = 0  # how late the batcher is when it acts at a time at which nothing arrives

    def execution_us(self, size: int, lane: str = "") -> float:
        """l(size) in a lane."""
        line_us = self.intercept_us + self.slope_us * size
        return (line_us if self.curve is None else self.curve.at(size)) * self.slower.get(lane, 1.0)

    def round_trip_us(self, size: int) -> float:
        """The round trip of a batch of `size`, which does not include l(size)."""
        return self.out_us + self.back_us + self.round_trip_slope_us * size


def normal(share: float) -> Sequence[float]:
    """Factors of a normal distribution with mean 1 and standard deviation `share`, none below the minimum."""
    if not share:
        return NO_SPREAD
    factors = NormalDist(1.0, share).quantiles(SPREAD_FACTORS)
    return tuple(max(SPREAD_FACTOR_MIN, factor) for factor in factors)


def lognormal(nine_of_ten: float) -> Sequence[float]:
    """Factors of a lognormal distribution with median 1, of which nine of ten are at most this."""
    if nine_of_ten <= 1:
        return NO_SPREAD
    sigma = math.log(nine_of_ten) / NormalDist().inv_cdf(0.9)
    return tuple(map(math.exp, NormalDist(0.0, sigma).quantiles(SPREAD_FACTORS)))


def has_transit(report: BatcherReport | None) -> TypeGuard[BatcherReport]:
    """Whether batches have settled since this batcher took over, so that it knows the transit."""
    return report is not None and report.transit_us[0] > 0


def with_transit(world: World, report: BatcherReport) -> World:
    """This world with the transit and delays that a batcher reports, whatever the size of a batch.

    Transit has a lognormal distribution through what half and nine of ten batches took.
    """
    usual_us, at_most_us = report.transit_us
    in_us, late_us = report.delays_us
    return world._replace(
        out_us=usual_us // 2,
        back_us=usual_us - usual_us // 2,
        round_trip_slope_us=0.0,
        round_trip_spread=lognormal(at_most_us / max(1, usual_us)),
        in_us=in_us,
        late_us=late_us,
    )


@dataclass(slots=True)
class SimulationResult:
    """How the requests of a trace ended. Each request counts once: as good, late or refused."""

    latencies_us: list[int] = field(default_factory=list)  # of good requests
    good_arrivals_us: list[int] = field(default_factory=list)  # when good requests arrived, in the same order
    late: int = 0  # answered DEADLINE_EXCEEDED, or after the deadline
    refused: int = 0  # any other refusal
    batch_sizes: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)  # batches by their reason for dispatch
    arrivals_us: int = 0  # from the first arrival to the last
    duration_us: int = 0  # from the first arrival to the last result
    is_complete: bool = True  # whether all requests of the trace have ended

    @property
    def good(self) -> int:
        """Requests answered OK within their deadline."""
        return len(self.latencies_us)

    @property
    def requests(self) -> int:
        """All requests of the trace."""
        return self.good + self.late + self.refused

    @property
    def offered_per_s(self) -> float:
        """Mean rate of arrivals. For a random trace it is near the rate that was asked for."""
        return 1e6 * max(0, self.requests - 1) / max(1, self.arrivals_us)

    @property
    def served_per_s(self) -> float:
        """Mean rate of good requests."""
        return 1e6 * self.good / max(1, self.duration_us)

    def share_within(self, latency_ms: float) -> float:
        """The share of all requests that were answered within a latency and within their deadline."""
        return sum(latency_us <= 1000 * latency_ms for latency_us in self.latencies_us) / max(
            1, self.requests
        )

    @property
    def mean_batch(self) -> float:
        """Mean number of requests in a batch."""
        return sum(self.batch_sizes) / max(1, len(self.batch_sizes))

    def latency_ms(self, quantile: float) -> float:
        """A quantile of the latency of good requests; 0 if there are none."""
        ordered = sorted(self.latencies_us)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] / 1000 if ordered else 0.0


class Requirement:
    """That all requests which arrive from `from_us` on are answered within a latency, but for `misses_max`.

    A miss is known when the latency has passed without an answer, which may be long before there is one.
    """

    def __init__(self, latency_ms: float, from_us: int, misses_max: int) -> None:
        self._latency_ms = latency_ms
        self._from_us = from_us
        self._misses_max = misses_max
        self._young_us: deque[int] = deque()  # arrivals after which the latency has not passed
        self._old = self._in_time = 0  # requests that arrived before those, and requests answered in time

    def arrived(self, at_us: int) -> None:
        """A request arrived. They do in order of time."""
        if at_us >= self._from_us:
            self._young_us.append(at_us)

    def answered(self, arrival_us: int, at_us: int) -> None:
        """A request got its result, before its deadline."""
        if arrival_us >= self._from_us and (at_us - arrival_us) / 1000 <= self._latency_ms:
            self._in_time += 1

    def is_missed(self, now_us: int) -> bool:
        """Whether it is certain now that too many are not answered in time. All answers until now are known.

        It is found a little late, because answers to young requests are counted as if to old ones.
        """
        young_us, latency_ms = self._young_us, self._latency_ms
        while young_us and (now_us - young_us[0]) / 1000 > latency_ms:
            young_us.popleft()
            self._old += 1
        return self._old - self._in_time > self._misses_max


class BatchesInFlightProtocol(Protocol):
    """What a simulation tells of batches: see `carpool_batcher.core.in_flight`."""

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None: ...
    def settle(self, event: BatchSettled) -> None: ...


class SchedulerProtocol(Protocol):
    """The part of a scheduler that a simulation calls: see `carpool_batcher.core.scheduler`."""

    @property
    def in_flight(self) -> BatchesInFlightProtocol: ...
    def offer(self, run: Run, now_us: int) -> list[Refusal]: ...
    def poll(self, now_us: int) -> list[Decision]: ...
    def wake_at_us(self) -> int | None: ...


class OrderedResults:
    """preserve_ordering: results are delivered in the order in which requests were admitted.

    A result that is ready before an earlier one is withheld. O(1) for each request, which is a run of one.
    """

    def __init__(self) -> None:
        self._tickets: deque[Run] = deque()
        self._ready: dict[Run, bool] = {}  # whether a model computed the result

    def admit(self, run: Run) -> None:
        """Give a request the next ticket."""
        self._tickets.append(run)

    def complete(self, run: Run, *, computed: bool) -> list[Run]:
        """A request has a result, which a model `computed` or not. Return the requests whose computed results
        are delivered now, in order."""
        self._ready[run] = computed
        delivered: list[Run] = []
        while self._tickets and self._tickets[0] in self._ready:
            first = self._tickets.popleft()
            if self._ready.pop(first):
                delivered.append(first)
        return delivered


class SimulatedBatch(NamedTuple):
    """A batch in flight. `back_us`: from its end to its settling. `waited_us`, for a model process, and
    `compute_us` are set when it executes."""

    batch_id: str
    runs: list[Run]
    back_us: int
    arrived_us: int = 0
    waited_us: int = 0
    compute_us: int = 0


class Simulation:
    """Runs one trace through one scheduler, which must be new. Each request is an entry and a run of its own.

    `on_progress` is called with PROGRESS_REQUESTS after as many further arrivals. `in_order` is the model's
    preserve_ordering. The scheduler does not learn of withheld results, so they do not count towards its
    queue size. When the `requirement` is missed, the simulation ends, and its result is not complete.
    """

    def __init__(
        self,
        scheduler: SchedulerProtocol,
        world: World,
        seed: int = 0,
        on_progress: Callable[[int], None] = lambda _: None,
        *,
        in_order: bool = False,
        requirement: Requirement | None = None,
    ) -> None:
        self._world = world
        self._random = random.Random(seed)  # noqa: S311 (a simulation)
        self._scheduler = scheduler
        # A heap of future events: time, a number that makes the order unique, handler, batch.
        self._events: list[tuple[int, int, Callable[[int, SimulatedBatch], None], SimulatedBatch]] = []
        self._number = count(1)
        self._idle_processes = world.processes
        self._batches_waiting: deque[SimulatedBatch] = deque()  # for a model process
        self._answered: set[Run] = set()  # in flight, and answered at their deadline
        self._result = SimulationResult()
        self._on_progress = on_progress
        self._ordered = OrderedResults() if in_order else None
        self._requirement = requirement

    def run(self, arrivals: Iterable[Arrival]) -> SimulationResult:
        """Simulate until each request has its result, or the requirement is missed. `arrivals` are in order
        of time."""
        scheduler, events, requirement = self._scheduler, self._events, self._requirement
        in_us, late_us = self._world.in_us, self._world.late_us
        trace = iter(arrivals)
        arrival = next(trace, None)
        first_us = now_us = 0 if arrival is None else arrival.at_us
        arrived = 0
        while True:
            next_us = scheduler.wake_at_us()
            if next_us is not None and next_us > now_us:
                next_us += late_us
            if events and (next_us is None or events[0][0] < next_us):
                next_us = events[0][0]
            if arrival is not None and (next_us is None or arrival.at_us + in_us < next_us):
                next_us = arrival.at_us + in_us
            if next_us is None:
                break
            now_us = max(now_us, next_us)
            while arrival is not None and arrival.at_us + in_us <= now_us:
                self._result.arrivals_us = arrival.at_us - first_us
                self._offer(arrival)
                arrival = next(trace, None)
                arrived += 1
                if not arrived % PROGRESS_REQUESTS:
                    self._on_progress(PROGRESS_REQUESTS)
            while events and events[0][0] <= now_us:
                at_us, _, handle, batch = heapq.heappop(events)
                handle(at_us, batch)
            self._poll(now_us)
            if requirement is not None and requirement.is_missed(now_us):
                self._result.is_complete = False
                break
        self._result.duration_us = now_us - first_us
        return self._result

    # --- the scheduler -------------------------------------------------------------------------------------

    def _offer(self, arrival: Arrival) -> None:
        at_us, expiration_us, lane, priority, cost = arrival
        if self._requirement is not None:
            self._requirement.arrived(at_us)
        deadline_us = None if expiration_us is None else at_us + expiration_us
        entry = Entry("", at_us)
        run = Run(
            entry, [str(next(self._number))], _NO_BODIES, JSON, None, at_us, deadline_us, priority, lane, cost
        )
        entry.runs.append(run)
        if self._scheduler.offer(run, at_us):
            self._result.refused += 1
        elif self._ordered is not None:
            self._ordered.admit(run)

    def _poll(self, now_us: int) -> None:
        result = self._result
        for decision in self._scheduler.poll(now_us):
            if type(decision) is Dispatch:
                self._dispatch(decision, now_us)
            elif type(decision) is Expire:
                self._answered.add(decision.run)
                result.late += 1
                self._release_withheld(decision.run, now_us)
            elif type(decision) is Refusal:
                late = decision.status == DEADLINE_EXCEEDED
                result.late += late
                result.refused += not late
                if decision.run is not None:
                    self._release_withheld(decision.run, now_us)

    # --- the events of a batch, in their order -------------------------------------------------------------

    def _dispatch(self, dispatch: Dispatch, now_us: int) -> None:
        """A batch is on the way to the workers."""
        batch_id, size = str(next(self._number)), dispatch.size
        result, world = self._result, self._world
        self._scheduler.in_flight.launch(batch_id, dispatch, now_us)
        result.batch_sizes.append(size)
        result.reasons[dispatch.reason] = result.reasons.get(dispatch.reason, 0) + 1
        factor = self._random.choice(world.round_trip_spread)
        each_way_us = world.round_trip_slope_us * size / 2
        out_us, back_us = (
            int(factor * (world.out_us + each_way_us)),
            int(factor * (world.back_us + each_way_us)),
        )
        self._schedule(now_us + out_us, self._arrive, SimulatedBatch(batch_id, dispatch.runs, back_us))

    def _arrive(self, at_us: int, batch: SimulatedBatch) -> None:
        """A batch waits for a model process."""
        self._batches_waiting.append(batch._replace(arrived_us=at_us))
        self._execute_next(at_us)

    def _execute_next(self, at_us: int) -> None:
        """Execute the next batch, if there is one and a model process is idle."""
        if self._idle_processes and self._batches_waiting:
            self._idle_processes -= 1
            batch = self._batches_waiting.popleft()
            execution_us = self._world.execution_us(len(batch.runs), batch.runs[0].lane)
            execution_us *= self._random.choice(self._world.spread)
            compute_us = max(1, int(execution_us))
            executed = batch._replace(waited_us=at_us - batch.arrived_us, compute_us=compute_us)
            self._schedule(at_us + compute_us, self._finish, executed)

    def _finish(self, at_us: int, batch: SimulatedBatch) -> None:
        """A model process has executed a batch."""
        self._idle_processes += 1
        self._schedule(at_us + batch.back_us, self._settle, batch)
        self._execute_next(at_us)

    def _settle(self, at_us: int, batch: SimulatedBatch) -> None:
        """The batcher learns of the commit, and producers get their results."""
        answered, ordered = self._answered, self._ordered
        size = len(batch.runs)
        self._scheduler.in_flight.settle(
            BatchSettled(batch.batch_id, "", size, batch.compute_us, at_us, size, batch.waited_us)
        )
        for run in batch.runs:
            if answered and run in answered:
                answered.discard(run)
            elif ordered is None:
                self._deliver(run, at_us)
            else:
                for ready in ordered.complete(run, computed=True):
                    self._deliver(ready, at_us)

    def _schedule(
        self, at_us: int, handle: Callable[[int, SimulatedBatch], None], batch: SimulatedBatch
    ) -> None:
        heapq.heappush(self._events, (at_us, next(self._number), handle, batch))

    # --- results -------------------------------------------------------------------------------------------

    def _release_withheld(self, run: Run, at_us: int) -> None:
        """A request was refused: deliver the results that were withheld for it."""
        if self._ordered is not None:
            for ready in self._ordered.complete(run, computed=False):
                self._deliver(ready, at_us)

    def _deliver(self, run: Run, at_us: int) -> None:
        """A producer gets a computed result."""
        result = self._result
        if run.deadline_us is not None and run.deadline_us < at_us:
            result.late += 1  # withheld for too long, or the scheduler ignores deadlines
        else:
            result.latencies_us.append(at_us - run.arrival_us)
            result.good_arrivals_us.append(run.arrival_us)
            if self._requirement is not None:
                self._requirement.answered(run.arrival_us, at_us)
