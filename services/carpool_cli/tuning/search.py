"""The settings that serve most within a latency: tried in the simulator, best of each kind first. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Traffic, poisson
from carpool_cli.tuning.simulator import Simulation, World

QUANTILE: Final = 0.99
WARM_UP: Final = 0.1  # of a trace: what is learned before is not judged
LIKE: Final = 0.02  # what is so much apart is alike: then the settings that change least are better
LIKE_P99: Final = 0.05  # the same of p99, which from one trace is known to 2 to 4%
BUSIEST: Final = 0.97  # of what processes could do at best: at that rate itself queues grow without end
FOUND: Final = 0.01  # of a rate, is how exactly it is found
LEAST: Final = 0.001  # of the ceiling: rates below are nothing
FEWEST, MOST, LASTING_S = 4000, 12_000, 0.6  # requests in a trace
PAYS: Final = 0.1  # more requests/s, if batches were twice as large, is worth a word
FULL: Final = 0.5  # of the largest size on average: those that are larger would be larger still
KNOWN: Final = 0.75  # of the largest size was measured: what comes after it can be guessed
DELAYS: Final = (0.0, 0.2, 0.5)  # of the latency
TARGETS: Final = (0.7, 0.85, 1.0)  # of the latency


class Candidate(NamedTuple):
    """Settings that may be good. Those of one kind compete with each other first."""

    kind: str
    settings: ModelSettings


class Figures(NamedTuple):
    """What settings come to at a rate. `within`: the share of all requests that were answered within the
    latency. A quantile is of all requests too, and infinite where so many had no result."""

    candidate: Candidate
    rate: float
    within: float
    p50_ms: float
    p99_ms: float
    mean_batch: float


class Goal(NamedTuple):
    """For what the settings are to be good."""

    world: World
    latency_ms: float
    arrives: Traffic = poisson
    seed: int = 1

    def ceiling_per_s(self, max_size: int) -> float:
        """Requests/s that are not to be passed, whatever the settings."""
        rates = (size / max(1.0, self.world.takes_us(size)) for size in range(1, max_size + 1))
        return BUSIEST * 1e6 * self.world.processes * max(rates)

    def try_at(self, candidate: Candidate, rate: float) -> Figures:
        """Simulate settings at a rate."""
        settings, world = candidate.settings, self.world
        number = int(min(MOST, max(FEWEST, LASTING_S * rate)))
        expiration_ms = settings.default_expiration_ms
        expiration_us = None if expiration_ms is None else 1000 * expiration_ms
        trace = list(self.arrives(rate, number, self.seed, expiration_us))
        judged_us = trace[int(WARM_UP * number)].at_us
        judged = sum(one.at_us >= judged_us for one in trace)
        scheduler = Scheduler(settings, world.processes)
        in_order = settings.preserve_ordering
        outcome = Simulation(scheduler, world, self.seed, in_order=in_order).run(trace)
        ended = zip(outcome.good_arrivals_us, outcome.latencies_us, strict=True)
        latencies_us = sorted(took_us for arrived_us, took_us in ended if arrived_us >= judged_us)

        def quantile_ms(share: float) -> float:
            at = math.ceil(share * judged) - 1
            return latencies_us[at] / 1000 if at < len(latencies_us) else math.inf

        within = sum(took_us <= 1000 * self.latency_ms for took_us in latencies_us) / judged
        return Figures(candidate, rate, within, quantile_ms(0.5), quantile_ms(QUANTILE), outcome.mean_batch)

    def holds(self, candidate: Candidate, rate: float) -> bool:
        """Whether the latency is kept at a rate."""
        return self.try_at(candidate, rate).p99_ms <= self.latency_ms

    def capacity(self, candidate: Candidate, low: float, high: float) -> float:
        """The highest rate between these at which the latency is kept; `low` if none is."""
        if self.holds(candidate, high):
            return high
        nothing = LEAST * high
        while high - low > FOUND * high and high > nothing:
            middle = (low + high) / 2
            if self.holds(candidate, middle):
                low = middle
            else:
                high = middle
        return low


def candidates(present: ModelSettings, max_size: int, latency_ms: float) -> Iterator[Candidate]:
    """Settings to try: as they are, eager, waiting for company, for sizes, or for deadlines."""
    yield Candidate("as it is", present)
    plain = replace(
        present, policy="eager", max_queue_delay_ms=0, preferred_batch_sizes=(), target_latency_ms=None
    )
    sizes = sorted({max_size, *(max_size >> halvings for halvings in (1, 2) if max_size >> halvings)})
    for size in reversed(sizes):
        for share in DELAYS:
            delay_ms = round(share * latency_ms, 1)
            settings = replace(plain, max_batch_size=size, max_queue_delay_ms=delay_ms)
            yield Candidate("delay" if delay_ms else "eager", settings)
            if delay_ms and size == max_size and len(sizes) > 1:
                preferred = tuple(one for one in sizes if one < max_size)
                yield Candidate("preferred sizes", replace(settings, preferred_batch_sizes=preferred))
    for size in reversed(sizes[-2:]):
        for share in TARGETS:
            aims_ms = round(share * latency_ms, 1)
            settings = replace(plain, max_batch_size=size, policy="deferred", target_latency_ms=aims_ms)
            yield Candidate("deferred", settings)
        expires_ms = max(1, int(latency_ms))
        settings = replace(plain, max_batch_size=size, policy="deferred", default_expiration_ms=expires_ms)
        yield Candidate("deferred, expiring", settings)


def most_requests(
    goal: Goal, tried: Sequence[Candidate], max_size: int, step: Callable[[], None] = lambda: None
) -> list[Figures]:
    """The best of each kind at the highest rate at which it keeps the latency, the best kind first.

    One that does not keep it at a rate that another of its kind does need not be bisected.
    """
    ceiling = goal.ceiling_per_s(max_size)
    best: dict[str, tuple[float, Candidate]] = {}
    for candidate in tried:
        rate, _ = best.get(candidate.kind, (0.0, candidate))
        if not rate or goal.holds(candidate, min(ceiling, rate * (1 + LIKE))):
            best[candidate.kind] = goal.capacity(candidate, rate, ceiling), candidate
        step()
    found = [
        goal.try_at(candidate, rate) if rate else Figures(candidate, 0.0, 0.0, math.inf, math.inf, 0.0)
        for rate, candidate in best.values()
    ]
    return sorted(found, key=lambda one: -one.rate)


def most_in_time(
    goal: Goal, tried: Sequence[Candidate], rate: float, step: Callable[[], None] = lambda: None
) -> list[Figures]:
    """The best of each kind at this rate, the best first: most within the latency, then the least p99."""
    best: dict[str, Figures] = {}
    for candidate in tried:
        figures = goal.try_at(candidate, rate)
        if candidate.kind not in best or _order(figures) < _order(best[candidate.kind]):
            best[candidate.kind] = figures
        step()
    return sorted(best.values(), key=_order)


def _order(figures: Figures) -> tuple[float, float]:
    return -round(figures.within, 3), figures.p99_ms


def recommended(found: Sequence[Figures], present: ModelSettings, *, at_one_rate: bool) -> Figures:
    """Of those that are as good as the first, the one that changes least.

    At one rate a latency that is kept is better than one that is not, and p99 counts only where it is kept.
    """
    first = found[0]

    def alike(one: Figures) -> bool:
        if not at_one_rate:
            return one.rate >= first.rate * (1 - LIKE)
        if first.within < QUANTILE:
            return one.within >= first.within * (1 - LIKE)
        return one.within >= QUANTILE and one.p99_ms <= first.p99_ms * (1 + LIKE_P99)

    return min(filter(alike, found), key=lambda one: len(changes(one.candidate.settings, present)))


class Larger(NamedTuple):
    """Batches larger than any that was measured: how many more requests/s they would serve, as a share."""

    size: int
    gain: float


def larger(goal: Goal, best: Figures, max_size: int, seen_to: int) -> Larger | None:
    """Twice as large, where the curve goes on to say that it pays; None where it does not.

    It can only where the best settings fill batches as they are, where batches about as large as they may be
    were measured (a guess is not built upon a guess), and where one that large comes back within the latency.
    """
    twice, world = 2 * max_size, goal.world
    took_us = world.takes_us(twice)
    gain = 2 * world.takes_us(max_size) / max(1.0, took_us) - 1
    full = best.mean_batch >= FULL * max_size and seen_to >= KNOWN * max_size
    in_time = took_us + world.trip_us(twice) <= 1000 * goal.latency_ms
    return Larger(twice, gain) if full and in_time and gain > PAYS else None


def changes(settings: ModelSettings, present: ModelSettings) -> dict[str, str]:
    """What makes `settings` of the present ones, as `carpool config` reads it."""
    before = present.as_text()
    return {name: value or "none" for name, value in settings.as_text().items() if value != before[name]}
