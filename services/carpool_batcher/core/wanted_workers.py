"""How many workers a model wants: enough for what its requests are owed, whatever the length of its queue.

A length says little: 10,000 requests may be a tenth of a second of work, or an hour. What is known here says
more: how fast requests arrive, l(n), when they are due, and what waits. Of these follow numbers of model
processes, of which the largest counts:

  arrivals   What arrives is served in time. With k processes, which begin their batches evenly spaced, a
             request waits l(n) / k at most until the next batch begins; if several lanes have requests, for
             a batch of each. So batches have n requests where this and l(n) are in time, and k processes
             serve k n / l(n). UTILISATION_MAX of that is planned. Where hardly any requests come together,
             fewer are enough: so few that one in a hundred waits too long (Erlang's formula C).
  waiting    What waits is begun in the time that it may wait, or, if that is longer, in the time after which
             further processes were there before: one that has less to do than that is not worth its start.
             Requests are served in order, so this is not added to what arrives.
  late       If requests are late all the same, although all processes that were wanted are there, l(n) says
             too little: of a mixture of lanes, or of costs. From then on proportionally more are wanted; this
             is forgotten slowly.
  sequences  Each sequence of a bound model has a slot.

A request may wait `scale_wait_ms`. It must be in time: for its deadline, of which the shortest tenth counts,
and for `target_latency_ms`. Where a policy makes requests wait on purpose, only this counts. Of a stepping
model a request takes a slot for as long as one took lately: the slots are many processes with batches of one.

More workers are wanted at once, fewer when fewer were enough for `scale_down_ms`. None are wanted after
`scale_idle_ms` without any request, if `min_workers` is 0, and one again as soon as a request waits. A paused
model wants what it has. So does one whose batcher has just taken over, for `scale_down_ms`, because it has
seen nothing yet. A step up from ten or more workers is larger than a tenth: Kubernetes ignores a smaller one.

Time is an argument, and nothing here does I/O. Why: docs/decisions/0120.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple, Protocol

UTILISATION_MAX: Final = 0.8  # of the processes: arrivals are not even, and rates are estimates
LATE_CHANCE_MAX: Final = 0.01  # of a request that waits too long
RATE_US_MIN: Final = 2_000_000  # over which a rate is measured, at least and at most
RATE_US_MAX: Final = 60_000_000
RATE_DEVIATIONS: Final = 2.0
POINT_US: Final = 1_000_000  # between two points of the record of arrivals
BUDGETS_MAX: Final = 32  # of requests, that are remembered
BUDGET_AGE_US_MAX: Final = 60_000_000
REACTION_US: Final = 30_000_000  # until it is known: from wanting more until a process is there
REACTION_US_MIN: Final = 1_000_000
REACTION_US_MAX: Final = 600_000_000  # if it took longer, nobody was watching
REACTION_WEIGHT: Final = 0.5  # of the latest one
CORRECTION_STEP: Final = 1.25
CORRECTION_MAX: Final = 4.0
CORRECTION_FORGOTTEN: Final = 0.01  # of it, in each interval without late requests
CORRECTION_US: Final = 5_000_000  # the interval in which it is looked whether requests are late
DURATION_WEIGHT: Final = 1 / 16  # of the latest request of a stepping model
ERLANG_LOAD_MAX: Final = 500.0  # above that chance matters little
PROCESSES_MAX: Final = 100_000
EVEN_STEP_WORKERS: Final = 10  # a step up from at least so many is more than one in as many


class Times(Protocol):
    """How long batches take, in microseconds, by the number of requests in them; 0: not known."""

    def of(self, size: int) -> int:
        """How long a batch of `size` is expected to take."""

    def at_most(self, size: int) -> int:
        """A time that nine of ten batches of `size` do not exceed."""


class Owed(NamedTuple):
    """What is owed to a request, in microseconds after its arrival: when it is dispatched, and when its
    result is there. None: at any time."""

    dispatched_us: int | None
    settled_us: int | None


class Service(NamedTuple):
    """How a model process serves: it executes `batches` batches at a time, each of at most `size` requests;
    those of a stepping model are its slots. `transit_us`: what a result takes beside l(n). `sequences`: how
    many it keeps at most; 0 if that limits nothing."""

    batches: int
    size: int
    times: Times
    transit_us: int = 0
    sequences: int = 0


class Demand(NamedTuple):
    """What is asked of a model at one moment, and by what it is served.

    `workers`: processes of these have the `processes`, those that drain left out. `arrived`: how many
    requests ever arrived that a model executes; `missed`: how many were ever late. `waiting`: requests that
    could be dispatched, in so many `lanes`; `oldest_us`: how long the oldest has waited. `in_flight`:
    batches. `sequences`: that have a slot, or wait for one. `is_reading`: not all has been read that waited
    when this batcher took over.
    """

    now_us: int
    processes: int
    workers: int
    arrived: int
    waiting: int = 0
    oldest_us: int = 0
    lanes: int = 1
    in_flight: int = 0
    missed: int = 0
    sequences: int = 0
    is_reading: bool = False
    is_paused: bool = False


class Bounds(NamedTuple):
    """The settings of a model by which it is scaled. `workers_max`: None for no limit."""

    workers_min: int = 1
    workers_max: int | None = None
    down_us: int = 60_000_000
    idle_us: int = 300_000_000


class Wanted(NamedTuple):
    """How many workers are wanted, with how many processes together, and the reason, for people."""

    workers: int
    processes: int
    reason: str


class WantedWorkers:
    """How many workers one model wants. `observe` is called a few times a second; it takes up to 0.1 ms
    while there are requests, and 10 µs while there are none.

    `budget_us` is to be set to the time that a request has from its arrival until its deadline. `now`: the
    latest outcome.
    """

    def __init__(self) -> None:
        self.budget_us: int | None = None
        self.now = Wanted(0, 0, "")
        self._budgets: deque[tuple[int, int]] = deque(maxlen=BUDGETS_MAX)  # when, and the budget
        self._arrivals = ArrivalRate()
        self._reaction = Reaction()
        self._correction = Correction()
        self._held = SlidingMaximum()
        self._duration_us = 0.0
        self._processes_each = 1  # of a worker
        self._waiting_before = 0  # processes for what waits, when that was looked at last
        self._begun = False
        self._arrived = 0
        self._busy_us = 0  # when there last was any request
        self._now_us = 0  # when it was looked last

    # --- what is observed ----------------------------------------------------------------------------------

    def observe_duration(self, took_us: int) -> None:
        """A request of a stepping model had its slot for so long."""
        weight = DURATION_WEIGHT if self._duration_us else 1.0
        self._duration_us += weight * (took_us - self._duration_us)

    @property
    def duration(self) -> Times:
        """For how long a request of a stepping model takes a slot."""
        return Constant(round(self._duration_us))

    def budget(self, now_us: int) -> int | None:
        """The time that requests have until their deadlines, of which nine of ten have more; None if no
        request has had a deadline lately."""
        budgets = self._budgets
        if self.budget_us is not None:
            budgets.append((now_us, self.budget_us))
            self.budget_us = None
        while budgets and budgets[0][0] < now_us - BUDGET_AGE_US_MAX:
            budgets.popleft()
        ordered = sorted([budget_us for _, budget_us in budgets])
        return ordered[len(ordered) // 10] if ordered else None

    def observe(self, demand: Demand, service: Service, owed: Owed, bounds: Bounds) -> Wanted:
        """How many workers are wanted now."""
        now_us = demand.now_us
        if now_us < self._now_us:
            self._begin_anew()
        self._now_us = now_us
        if demand.workers:
            self._processes_each = math.ceil(demand.processes / demand.workers)
        if not self._begun:
            self._begun = True
            self._busy_us = now_us
            self._held.add(now_us, demand.workers)
        per_us = self._arrivals.observe(now_us, demand.arrived, starts_over=demand.is_reading)
        processes, reason = self._needed(demand, service, owed, per_us)
        is_busy = bool(demand.waiting or demand.in_flight or demand.sequences)
        if is_busy or demand.arrived != self._arrived:
            self._busy_us, self._arrived = now_us, demand.arrived
        workers = math.ceil(processes / self._processes_each)
        if bounds.workers_min == 0 and not is_busy and now_us - self._busy_us >= bounds.idle_us:
            self._held.clear()
            workers, reason = 0, "idle"
        else:
            workers, reason = max(workers, 1), reason or "minimum"
            if self._held.add(now_us, workers, now_us - bounds.down_us) > workers:
                workers, reason = self._held.maximum, "held"
        self.now = self._bounded(demand, bounds, workers, reason)
        self._reaction.observe(now_us, demand.processes, self.now.processes)
        return self.now

    def _begin_anew(self) -> None:
        """The clock was set back: times that were remembered are in the future, and mean nothing."""
        self._budgets.clear()
        self._arrivals, self._held, self._correction = ArrivalRate(), SlidingMaximum(), Correction()
        self._reaction.forget_beginning()
        self._begun = False

    # --- what follows --------------------------------------------------------------------------------------

    def _needed(self, demand: Demand, service: Service, owed: Owed, per_us: float) -> tuple[int, str]:
        """How many processes are needed at this moment, and for what; 0 if nothing is asked."""
        for_sequences = 0
        if service.sequences:
            for_sequences = math.ceil(demand.sequences / (UTILISATION_MAX * service.sequences))
        if not service.times.of(1):
            return _most((for_sequences, "sequences"), self._for_unknown(demand, service))
        plan = Plan(service, owed, max(1, demand.lanes))
        for_arrivals = plan.processes_for(per_us)
        for_waiting = plan.processes_for_waiting(demand, for_arrivals, self._reaction.usual_us)
        # What waits for a moment only, such as a burst that the next batches take, needs nothing.
        confirmed, self._waiting_before = min(for_waiting, self._waiting_before), for_waiting
        factor = self._correction.observe(
            demand, owed, max(for_arrivals, confirmed), is_possible=plan.is_possible
        )
        needed = _most((for_arrivals, "arrivals"), (confirmed, "waiting"), (for_sequences, "sequences"))
        corrected = math.ceil(factor * needed[0] - 1e-9)
        return (corrected, "late") if corrected > needed[0] else needed

    def _for_unknown(self, demand: Demand, service: Service) -> tuple[int, str]:
        """Nothing was executed yet: of a stepping model a slot for each request, but not more than about
        twice what there is; of others what there is."""
        is_busy = demand.waiting or demand.in_flight
        if service.size > 1 or service.batches == 1 or not is_busy:
            return (demand.processes if is_busy else 0), "waiting"
        slots = demand.waiting + demand.in_flight
        return min(math.ceil(slots / service.batches), 2 * demand.processes + 1), "waiting"

    def _bounded(self, demand: Demand, bounds: Bounds, workers: int, reason: str) -> Wanted:
        there = demand.workers
        if demand.is_paused:
            return Wanted(there, demand.processes, "paused")
        if workers > there >= EVEN_STEP_WORKERS:
            workers = max(workers, there + there // EVEN_STEP_WORKERS + 1)
        if workers < bounds.workers_min:
            workers, reason = bounds.workers_min, "minimum"
        if bounds.workers_max is not None and workers > bounds.workers_max:
            workers, reason = bounds.workers_max, "maximum"
        return Wanted(workers, workers * self._processes_each, reason)


def _most(*needed: tuple[int, str]) -> tuple[int, str]:
    """The largest number with its reason, of equal ones the first; without a reason if it is 0."""
    number, reason = max(needed, key=lambda one: one[0])
    return number, reason if number else ""


class Constant:
    """Times that do not depend on the size."""

    def __init__(self, time_us: int) -> None:
        self._time_us = time_us

    def of(self, size: int) -> int:
        return self._time_us

    def at_most(self, size: int) -> int:
        return self._time_us


class Plan:
    """How many processes serve what is owed. `is_possible`: whether any number serves a request in time; if
    not, only its wait counts."""

    def __init__(self, service: Service, owed: Owed, lanes: int) -> None:
        self._service = service
        self._lanes = lanes
        self._wait_us = owed.dispatched_us
        self._settled_us = owed.settled_us
        soonest_us = service.times.at_most(1) + service.transit_us
        self.is_possible = self._settled_us is None or self._settled_us >= soonest_us
        if not self.is_possible:
            self._settled_us = None

    def processes_for(self, per_us: float) -> int:
        """For requests that arrive at this rate."""
        if per_us <= 0:
            return 0
        if self._service.size == 1:
            return self._for_few(per_us)
        few = self._for_few(per_us)
        return min(few, self._for_batches(per_us, few)) if few else self._for_batches(per_us, PROCESSES_MAX)

    def processes_for_waiting(self, demand: Demand, processes: int, reaction_us: float) -> int:
        """For what waits behind what is in flight."""
        if not demand.waiting:
            return 0
        service = self._service
        size = max(1, self._largest(max(processes, 1)))
        execution_us = service.times.of(size)
        longest_us = max(self._allowed_us(size), reaction_us)
        batches = math.ceil(demand.waiting / size) + demand.in_flight
        return math.ceil(batches / (service.batches * (1 + longest_us / execution_us)))

    def _allowed_us(self, size: int) -> float:
        """How long a request may wait that is executed in a batch of `size`."""
        limits_us = [PROCESSES_MAX * 1e6] if self._wait_us is None else [float(self._wait_us)]
        if self._settled_us is not None:
            limits_us.append(self._settled_us - self._service.times.at_most(size) - self._service.transit_us)
        return max(0.0, min(limits_us))

    def _is_in_time(self, size: int, batches: int) -> bool:
        """Whether a request is in time in batches of `size`, of which so many are executed at a time."""
        return self._lanes * self._service.times.of(size) <= batches * self._allowed_us(size)

    def _largest(self, processes: int) -> int:
        """The largest batches in which requests are in time; 0 if none are."""
        batches = processes * self._service.batches
        low, high = 0, self._service.size + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_in_time(middle, batches) else (low, middle)
        return low

    def _for_batches(self, per_us: float, most: int) -> int:
        """If requests come together, and form batches: at most `most`."""

        def serves(processes: int) -> bool:
            size = self._largest(processes)
            served = processes * self._service.batches * size / self._service.times.of(max(1, size))
            return UTILISATION_MAX * served >= per_us

        too_few, enough = 0, 1
        while enough < most and not serves(enough):
            too_few, enough = enough, 2 * enough
        enough = min(enough, most)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if serves(middle) else (middle, enough)
        return enough

    def _for_few(self, per_us: float) -> int:
        """If each request is executed alone: so many that hardly any waits too long. 0: too many to say."""
        alone_us = self._service.times.of(1)
        load = per_us * alone_us
        if load > ERLANG_LOAD_MAX:
            return 0 if self._service.size > 1 else math.ceil(load / UTILISATION_MAX / self._service.batches)
        least = math.ceil(load / UTILISATION_MAX)
        servers = servers_for(load, least, self._allowed_us(1) / alone_us)
        return math.ceil(servers / self._service.batches)


def servers_for(load: float, least: int, allowed: float) -> int:
    """How many servers, at least `least`, let at most LATE_CHANCE_MAX of all arrivals wait for longer than
    `allowed` service times (Erlang's formula C). `load`: how many are busy on average. O(load)."""
    blocked, servers = 1.0, 0
    while True:
        servers += 1
        blocked = load * blocked / (servers + load * blocked)  # Erlang's formula B
        if servers <= load or servers < least:
            continue
        waits = blocked / (1 - (load / servers) * (1 - blocked))
        if waits * math.exp(-(servers - load) * min(allowed, 1e6)) <= LATE_CHANCE_MAX:
            return servers


class ArrivalRate:
    """The rate of arrivals: their mean over the last RATE_US_MAX, or the nearest to it that agrees with what
    arrived in shorter times, of at least RATE_US_MIN, within RATE_DEVIATIONS standard deviations. So a burst
    is seen within seconds, and the rate of rare requests is not a matter of chance."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, int]] = deque()  # times, and how many had arrived by then

    def observe(self, now_us: int, arrived: int, *, starts_over: bool = False) -> float:
        """Requests in a microsecond, of which `arrived` ever arrived. `starts_over`: those before do not
        count, because they did not arrive when they were read."""
        points = self._points
        if starts_over:
            points.clear()
        if not points or now_us - points[-1][0] >= POINT_US:
            points.append((now_us, arrived))
        while len(points) > 1 and points[1][0] <= now_us - RATE_US_MAX:
            points.popleft()
        from_us, before = points[0]
        if arrived == before:
            return 0.0
        per_us = (arrived - before) / max(now_us - from_us, RATE_US_MIN)
        for at_us, number in points:  # the later, the more they count
            lasted_us, count = now_us - at_us, arrived - number
            if lasted_us < RATE_US_MIN:
                break
            deviation = RATE_DEVIATIONS * math.sqrt(count)
            highest = (count + deviation + RATE_DEVIATIONS**2) / lasted_us
            per_us = max((count - deviation) / lasted_us, min(per_us, highest))
        return per_us


class Reaction:
    """How long it takes from wanting more processes until one more is there: of an autoscaler that looks
    rarely, machines that start slowly, and models that load for long."""

    def __init__(self) -> None:
        self.usual_us = float(REACTION_US)
        self._wanted_since_us: int | None = None
        self._processes = 0

    def forget_beginning(self) -> None:
        """It is not known since when more are wanted."""
        self._wanted_since_us = None

    def observe(self, now_us: int, processes: int, wanted: int) -> None:
        """There are so many processes, and as many are wanted."""
        since_us = self._wanted_since_us
        if since_us is not None and processes > self._processes:
            took_us = max(now_us - since_us, REACTION_US_MIN)
            if took_us <= REACTION_US_MAX:
                self.usual_us += REACTION_WEIGHT * (took_us - self.usual_us)
            since_us = None
        if wanted <= processes:
            since_us = None
        elif since_us is None:
            since_us = now_us
        self._wanted_since_us, self._processes = since_us, processes


class Correction:
    """By which factor more processes are needed than follows from l(n), because requests are late."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._since: Demand | None = None  # the beginning of the interval
        self._always_waited = True  # too long, in this interval
        self._all_there = True  # the processes that were wanted

    def observe(self, demand: Demand, owed: Owed, needed: int, *, is_possible: bool) -> float:
        """The factor. `needed` processes are enough by l(n)."""
        wanted = math.ceil(self.factor * needed - 1e-9)
        self._all_there = self._all_there and 0 < wanted <= demand.processes
        waits_us = owed.dispatched_us
        self._always_waited = self._always_waited and waits_us is not None and demand.oldest_us > waits_us
        since = self._since
        if since is None or demand.missed < since.missed:
            self._begin(demand)
        elif demand.now_us - since.now_us >= max(CORRECTION_US, 2 * (owed.settled_us or 0)):
            self._decide(since, demand, is_possible=is_possible)
            self._begin(demand)
        return self.factor

    def _decide(self, since: Demand, demand: Demand, *, is_possible: bool) -> None:
        missed = demand.missed - since.missed > LATE_CHANCE_MAX * max(1, demand.arrived - since.arrived)
        waited = self._always_waited and demand.waiting >= since.waiting
        if not (missed or waited):
            self.factor = max(1.0, self.factor * (1 - CORRECTION_FORGOTTEN))
        elif self._all_there and is_possible:
            self.factor = min(CORRECTION_MAX, self.factor * CORRECTION_STEP)

    def _begin(self, demand: Demand) -> None:
        self._since, self._always_waited, self._all_there = demand, True, True


class SlidingMaximum:
    """The largest of the numbers that were added lately. Memory: at most one for each number."""

    def __init__(self) -> None:
        self._falling: deque[tuple[int, int]] = deque()  # times and numbers, the largest first

    @property
    def maximum(self) -> int:
        """The largest; 0 if there is none."""
        return self._falling[0][1] if self._falling else 0

    def add(self, now_us: int, number: int, since_us: int = -(1 << 62)) -> int:
        """Add a number, and return the largest of those that were added after `since_us`."""
        falling = self._falling
        while falling and falling[-1][1] <= number:
            falling.pop()
        falling.append((now_us, number))
        while falling[0][0] <= since_us and len(falling) > 1:
            falling.popleft()
        return self.maximum

    def clear(self) -> None:
        """Forget all."""
        self._falling.clear()
