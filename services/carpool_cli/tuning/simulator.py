"""The production scheduler in virtual time, between producers and model processes that are made up.

What is simulated is the world around the core, not the core: requests arrive, dispatched batches reach a
process after the way out, take l(n), and are heard of after the way back. What is not there: a batcher that
is busy (it decides and dispatches in no time), and processes that want the same CPU at the same moment. Pure:
no clock, no Redis.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages import JSON, Entry, Refusal, Request
from carpool_batcher.core.scheduler import Decision, Dispatch, Expire
from carpool_cli.tuning.arrivals import Arrival
from carpool_cli.tuning.curve import Curve, at

STEP: Final = 1000
_ALIKE: Final[Mapping[str, float]] = MappingProxyType({})
STEADY: Final = (1.0,)  # a spread that is none
FACTORS: Final = 101  # of a spread that is normal: so many intervals of equal probability
_NOWHERE: Final = Entry("", 0)  # no stream carries these requests


class World(NamedTuple):
    """What is around the scheduler, in us: how long a batch of n is computed, and how long it is on its way.

        computed    l(n) = intercept + slope n, or `curve`  times one of `spread`, by chance
        on its way  trip(n) = out + back + trip slope n     times one of `trip_spread`, by chance

    The slope of the trip is half on the way out, where bodies are read, half on the way back, where results
    are. A batch that has bad luck has it both ways. In lanes that are slower all batches are, by a factor.
    Where there is a `curve`, what was measured, the line is not looked at.
    """

    processes: int = 1
    intercept_us: float = 5000.0
    slope_us: float = 50.0
    out_us: int = 250  # from the batcher's decision to the model's start
    back_us: int = 350  # from the model's end to the batcher's, and the producer's, knowledge
    trip_slope_us: float = 0.0
    spread: Sequence[float] = STEADY
    trip_spread: Sequence[float] = STEADY
    slower: Mapping[str, float] = _ALIKE
    curve: Curve | None = None

    def takes_us(self, size: int, lane: str = "") -> float:
        """l(size), of a lane."""
        line_us = self.intercept_us + self.slope_us * size
        return (line_us if self.curve is None else at(self.curve, size)) * self.slower.get(lane, 1.0)

    def trip_us(self, size: int) -> float:
        """The way there and back of a batch of `size`, without l(size)."""
        return self.out_us + self.back_us + self.trip_slope_us * size


def normal(share: float) -> Sequence[float]:
    """Factors of a normal distribution about 1, of which `share` is the standard deviation; 0.1 at least."""
    if not share:
        return STEADY
    factors = NormalDist(1.0, share).quantiles(FACTORS)
    return tuple(max(0.1, one) for one in factors)


@dataclass(slots=True)
class Outcome:
    """What became of a trace. Of every request one thing: good, late or refused."""

    latencies_us: list[int] = field(default_factory=list)  # of those answered OK, and in time
    good_arrivals_us: list[int] = field(default_factory=list)  # when those arrived
    late: int = 0  # answered DEADLINE_EXCEEDED
    refused: int = 0  # any other refusal
    sizes: list[int] = field(default_factory=list)  # of batches
    reasons: dict[str, int] = field(default_factory=dict)  # why they left
    arriving_us: int = 0  # from the first arrival to the last
    took_us: int = 0  # from the first arrival to the last result

    @property
    def good(self) -> int:
        """Requests answered in time."""
        return len(self.latencies_us)

    @property
    def requests(self) -> int:
        """All of them."""
        return self.good + self.late + self.refused

    @property
    def offered_per_s(self) -> float:
        """How many came in a second, on average: of a trace by chance, near the rate that was asked for."""
        return 1e6 * max(0, self.requests - 1) / max(1, self.arriving_us)

    @property
    def served_per_s(self) -> float:
        """How many were answered in time in a second, on average."""
        return 1e6 * self.good / max(1, self.took_us)

    def share_within(self, latency_ms: float) -> float:
        """Of all requests, those answered within a latency (and in time)."""
        return sum(one <= 1000 * latency_ms for one in self.latencies_us) / max(1, self.requests)

    @property
    def mean_batch(self) -> float:
        """Requests in a batch, on average."""
        return sum(self.sizes) / max(1, len(self.sizes))

    def latency_ms(self, quantile: float) -> float:
        """A quantile of the latency of those answered in time; 0 if none was."""
        ordered = sorted(self.latencies_us)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] / 1000 if ordered else 0.0


class Decides(Protocol):
    """What a scheduler is asked and told: see `carpool_batcher.core.scheduler`."""

    def offer(self, request: Request, now_us: int) -> Refusal | None: ...
    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None: ...
    def settle(self, batch_id: str, compute_us: int, now_us: int) -> None: ...
    def poll(self, now_us: int) -> list[Decision]: ...
    def wake_at_us(self) -> int | None: ...


class InOrder:
    """preserve_ordering: answers in the order in which requests were accepted. One that is there too early is
    held until those before it are. O(1) a request."""

    def __init__(self) -> None:
        self._slots: deque[Request] = deque()
        self._held: dict[Request, bool] = {}

    def accept(self, request: Request) -> None:
        """A request waits, and takes its slot."""
        self._slots.append(request)

    def answer(self, request: Request, computed: bool) -> list[Request]:
        """A request has its answer. Returns those that get a computed result now, in order."""
        self._held[request] = computed
        released: list[Request] = []
        while self._slots and self._slots[0] in self._held:
            first = self._slots.popleft()
            if self._held.pop(first):
                released.append(first)
        return released


class Ride(NamedTuple):
    """A batch under way; `back_us` is how long it will be heard of after its end, and `compute_us` is known
    once a process has begun it."""

    batch_id: str
    requests: list[Request]
    back_us: int
    compute_us: int = 0


class Simulation:
    """Runs one trace through one scheduler, which nobody else may use.

    `step` is called with STEP when so many more requests have arrived. `in_order`: the model's
    preserve_ordering. The scheduler is not told of results that are held, so they do not fill its queue.
    """

    def __init__(
        self,
        scheduler: Decides,
        world: World,
        seed: int = 0,
        step: Callable[[int], None] = lambda _: None,
        *,
        in_order: bool = False,
    ) -> None:
        self._world = world
        self._random = random.Random(seed)  # noqa: S311 (a simulation)
        self._scheduler = scheduler
        # What will happen: when, in which order, what, to whom. A heap.
        self._events: list[tuple[int, int, Callable[[int, Ride], None], Ride]] = []
        self._number = count(1)
        self._idle = world.processes
        self._queue: deque[Ride] = deque()
        self._answered: set[Request] = set()  # in flight, and answered by their deadline
        self._outcome = Outcome()
        self._step = step
        self._in_order = InOrder() if in_order else None

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Everything that happens, until the last request has its result. `arrivals` in order of time."""
        scheduler, events = self._scheduler, self._events
        trace = iter(arrivals)
        arrival = next(trace, None)
        first_us = now_us = 0 if arrival is None else arrival.at_us
        arrived = 0
        while True:
            next_us = scheduler.wake_at_us()
            if events and (next_us is None or events[0][0] < next_us):
                next_us = events[0][0]
            if arrival is not None and (next_us is None or arrival.at_us < next_us):
                next_us = arrival.at_us
            if next_us is None:
                break
            now_us = max(now_us, next_us)
            while arrival is not None and arrival.at_us <= now_us:
                self._outcome.arriving_us = arrival.at_us - first_us
                self._arrive(arrival)
                arrival = next(trace, None)
                arrived += 1
                if not arrived % STEP:
                    self._step(STEP)
            while events and events[0][0] <= now_us:
                at_us, _, happen, ride = heapq.heappop(events)
                happen(at_us, ride)
            self._decide(now_us)
        self._outcome.took_us = now_us - first_us
        return self._outcome

    def _arrive(self, one: Arrival) -> None:
        at_us, expiration_us, lane, priority, cost = one
        deadline_us = None if expiration_us is None else at_us + expiration_us
        request = Request(_NOWHERE, "", b"", JSON, None, at_us, deadline_us, priority, lane, cost)
        if self._scheduler.offer(request, at_us) is not None:
            self._outcome.refused += 1
        elif self._in_order is not None:
            self._in_order.accept(request)

    def _decide(self, now_us: int) -> None:
        outcome = self._outcome
        for one in self._scheduler.poll(now_us):
            if type(one) is Dispatch:
                batch_id = str(next(self._number))
                self._scheduler.launch(batch_id, one, now_us)
                outcome.sizes.append(len(one.requests))
                outcome.reasons[one.reason] = outcome.reasons.get(one.reason, 0) + 1
                self._set_out(now_us, batch_id, one.requests)
            elif type(one) is Expire:
                self._answered.add(one.request)
                outcome.late += 1
                self._make_way(one.request, now_us)
            elif type(one) is Refusal:
                late = one.status == DEADLINE_EXCEEDED
                outcome.late += late
                outcome.refused += not late
                if one.request is not None:
                    self._make_way(one.request, now_us)

    # --- the workers ---------------------------------------------------------------------------------------

    def _at(self, at_us: int, happen: Callable[[int, Ride], None], ride: Ride) -> None:
        heapq.heappush(self._events, (at_us, next(self._number), happen, ride))

    def _set_out(self, now_us: int, batch_id: str, requests: list[Request]) -> None:
        """A batch is on its way."""
        world = self._world
        factor = self._random.choice(world.trip_spread)
        own_us = world.trip_slope_us * len(requests) / 2
        out_us, back_us = int(factor * (world.out_us + own_us)), int(factor * (world.back_us + own_us))
        self._at(now_us + out_us, self._reach, Ride(batch_id, requests, back_us))

    def _reach(self, at_us: int, ride: Ride) -> None:
        """A batch is where the processes are."""
        self._queue.append(ride)
        self._begin(at_us)

    def _begin(self, at_us: int) -> None:
        """An idle process, if there is one, takes the next batch, if there is one."""
        if self._idle and self._queue:
            self._idle -= 1
            ride = self._queue.popleft()
            takes_us = self._world.takes_us(len(ride.requests), ride.requests[0].lane)
            takes_us *= self._random.choice(self._world.spread)
            compute_us = max(1, int(takes_us))
            self._at(at_us + compute_us, self._end, ride._replace(compute_us=compute_us))

    def _end(self, at_us: int, ride: Ride) -> None:
        """A process is done with a batch."""
        self._idle += 1
        self._at(at_us + ride.back_us, self._hear, ride)
        self._begin(at_us)

    def _hear(self, at_us: int, ride: Ride) -> None:
        """Everybody knows that a batch is done."""
        answered, in_order = self._answered, self._in_order
        self._scheduler.settle(ride.batch_id, ride.compute_us, at_us)
        for request in ride.requests:
            if answered and request in answered:
                answered.discard(request)
            elif in_order is None:
                self._get(request, at_us)
            else:
                for released in in_order.answer(request, computed=True):
                    self._get(released, at_us)

    def _make_way(self, request: Request, at_us: int) -> None:
        """A request was answered without a result: those that were held for it are not any more."""
        if self._in_order is not None:
            for released in self._in_order.answer(request, computed=False):
                self._get(released, at_us)

    def _get(self, request: Request, at_us: int) -> None:
        """A producer has its result."""
        outcome = self._outcome
        if request.deadline_us is not None and request.deadline_us < at_us:
            outcome.late += 1  # it was held too long, or the scheduler does not see to deadlines
        else:
            outcome.latencies_us.append(at_us - request.arrival_us)
            outcome.good_arrivals_us.append(request.arrival_us)
