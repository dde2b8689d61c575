"""Search for the settings that serve the most requests within a latency, by simulation. Pure.

Candidates are grouped by kind, such as `eager` or `deferred`; the result is the best candidate of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Traffic, poisson
from carpool_cli.tuning.observed import GUESSED_SHARE_MIN, ObservedSizes
from carpool_cli.tuning.simulator import Requirement, Simulation, World

LATENCY_QUANTILE: Final = 0.99
WARM_UP_SHARE: Final = 0.1  # of a trace: the scheduler learns from it, and it does not count
RATE_TOLERANCE: Final = 0.02  # smaller differences are no reason to change a setting
WITHIN_DECIMALS: Final = 3  # of shares within the latency: a smaller difference makes no candidate better
P99_TOLERANCE: Final = 0.05  # the same for p99, which one trace shows with an error of 2 to 4%
UTILISATION_MAX: Final = 0.97  # of the model processes: at 1 queues grow without end
RATE_PRECISION: Final = 0.01  # of the highest rate, at which the bisection stops
RATE_SHARE_MIN: Final = 0.001  # of the highest rate: lower rates count as none
TRACE_REQUESTS_MIN, TRACE_REQUESTS_MAX, TRACE_S = 4000, 12_000, 0.6
# When to suggest batches larger than the model allows so far:
GAIN_MIN: Final = 0.1  # more requests/s with batches of twice the size
MEAN_BATCH_SHARE_MIN: Final = 0.5  # of the largest size: fuller batches would be larger still if they could
OBSERVED_SHARE_MIN: Final = 0.75  # of the largest size: up to there l(n) was measured
DELAY_SHARES: Final = (0.0, 0.2, 0.5)  # of the latency
TARGET_SHARES: Final = (0.7, 0.85, 1.0)  # of the latency


class Candidate(NamedTuple):
    """Settings to try. Candidates of one kind compete with each other first."""

    kind: str
    settings: ModelSettings


class Figures(NamedTuple):
    """The simulated performance of a candidate at a rate.

    `within` is the share of all requests that were answered within the latency. Quantiles too are of all
    requests: one is infinite if too few requests had a result. `guessed` is the share of the batches whose
    l(n) is a guess.
    """

    candidate: Candidate
    rate: float
    within: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    guessed: float = 0.0

    @property
    def goodput(self) -> float:
        """Requests answered within the latency, per second."""
        return self.rate * self.within

    @property
    def is_guess(self) -> bool:
        """Whether these figures rest on sizes of batches that were not observed."""
        return self.guessed >= GUESSED_SHARE_MIN


class Goal(NamedTuple):
    """What the settings are for: a latency, in a world, with this kind of traffic. `observed`: None if the
    world was not measured, but given."""

    world: World
    latency_ms: float
    traffic: Traffic = poisson
    seed: int = 1
    observed: ObservedSizes | None = None

    def with_processes(self, number: int) -> Goal:
        """The same goal for another number of model processes."""
        return self._replace(world=self.world._replace(processes=number))

    def ceiling_per_s(self, max_size: int) -> float:
        """The rate above which no settings are tried."""
        rates = (size / max(1.0, self.world.execution_us(size)) for size in range(1, max_size + 1))
        return UTILISATION_MAX * 1e6 * self.world.processes * max(rates)

    def simulate(self, candidate: Candidate, rate: float) -> Figures:
        """Simulate a candidate at a rate."""
        figures = self.simulate_until_missed(candidate, rate, share=0.0, latency_ms=self.latency_ms)
        assert figures is not None, "nothing was required"
        return figures

    def simulate_until_missed(
        self, candidate: Candidate, rate: float, *, share: float, latency_ms: float
    ) -> Figures | None:
        """The same, or None as soon as it is certain that less than this share of the requests is answered
        within this latency: if the rate is far too high, long before the end of the trace.
        """
        settings, world = candidate.settings, self.world
        number = int(min(TRACE_REQUESTS_MAX, max(TRACE_REQUESTS_MIN, TRACE_S * rate)))
        expiration_ms = settings.default_expiration_ms
        expiration_us = None if expiration_ms is None else 1000 * expiration_ms
        trace = list(self.traffic(rate, number, self.seed, expiration_us))
        counted_from_us = trace[int(WARM_UP_SHARE * number)].at_us
        counted = sum(arrival.at_us >= counted_from_us for arrival in trace)
        scheduler = Scheduler(settings, world.processes)
        in_order = settings.preserve_ordering
        required = Requirement(latency_ms, counted_from_us, counted - math.ceil(share * counted))
        result = Simulation(scheduler, world, self.seed, in_order=in_order, requirement=required).run(trace)
        if not result.is_complete:
            return None
        good = zip(result.good_arrivals_us, result.latencies_us, strict=True)
        latencies_us = sorted(latency_us for arrival_us, latency_us in good if arrival_us >= counted_from_us)

        def quantile_ms(share: float) -> float:
            index = math.ceil(share * counted) - 1
            return latencies_us[index] / 1000 if index < len(latencies_us) else math.inf

        within = sum(latency_us / 1000 <= self.latency_ms for latency_us in latencies_us) / counted
        p50_ms, p99_ms = quantile_ms(0.5), quantile_ms(LATENCY_QUANTILE)
        guessed = self.observed.guessed_share(result.batch_sizes) if self.observed else 0.0
        return Figures(candidate, rate, within, p50_ms, p99_ms, result.mean_batch, guessed)

    def is_met(self, candidate: Candidate, rate: float) -> bool:
        """Whether a candidate keeps the latency at a rate."""
        figures = self.simulate_until_missed(
            candidate, rate, share=LATENCY_QUANTILE, latency_ms=self.latency_ms
        )
        return figures is not None and figures.p99_ms <= self.latency_ms

    def highest_rate(self, candidate: Candidate, low: float, high: float) -> float:
        """The highest rate from `low` to `high` at which the latency is kept, or `low`; by bisection."""
        if self.is_met(candidate, high):
            return high
        rate_min = RATE_SHARE_MIN * high
        while high - low > RATE_PRECISION * high and high > rate_min:
            middle = (low + high) / 2
            if self.is_met(candidate, middle):
                low = middle
            else:
                high = middle
        return low


def candidates(present: ModelSettings, max_size: int, latency_ms: float) -> Iterator[Candidate]:
    """The settings to try: the present ones, and every policy with several sizes and delays or targets."""
    yield Candidate("present", present)
    plain = replace(
        present, policy="eager", max_queue_delay_ms=0, preferred_batch_sizes=(), target_latency_ms=None
    )
    sizes = sorted({max_size, *(max_size >> halvings for halvings in (1, 2) if max_size >> halvings)})
    for size in reversed(sizes):
        for share in DELAY_SHARES:
            delay_ms = round(share * latency_ms, 1)
            settings = replace(plain, max_batch_size=size, max_queue_delay_ms=delay_ms)
            yield Candidate("delay" if delay_ms else "eager", settings)
            if delay_ms and size == max_size and len(sizes) > 1:
                preferred = tuple(smaller for smaller in sizes if smaller < max_size)
                yield Candidate("preferred sizes", replace(settings, preferred_batch_sizes=preferred))
    for size in reversed(sizes[-2:]):
        for share in TARGET_SHARES:
            target_ms = round(share * latency_ms, 1)
            settings = replace(plain, max_batch_size=size, policy="deferred", target_latency_ms=target_ms)
            yield Candidate("deferred", settings)
        expiration_ms = max(1, int(latency_ms))
        settings = replace(plain, max_batch_size=size, policy="deferred", default_expiration_ms=expiration_ms)
        yield Candidate("deferred, expiring", settings)


def rank_by_rate(
    goal: Goal, tried: Sequence[Candidate], max_size: int, on_progress: Callable[[], None] = lambda: None
) -> list[Figures]:
    """The best candidate of each kind at the highest rate at which it keeps the latency; best kind first.

    A candidate that fails at the rate of a better one of its kind is not bisected.
    """
    ceiling = goal.ceiling_per_s(max_size)
    best: dict[str, tuple[float, Candidate]] = {}
    for candidate in tried:
        rate, _ = best.get(candidate.kind, (0.0, candidate))
        if not rate or goal.is_met(candidate, min(ceiling, rate * (1 + RATE_TOLERANCE))):
            best[candidate.kind] = goal.highest_rate(candidate, rate, ceiling), candidate
        on_progress()
    ranked = [
        goal.simulate(candidate, rate) if rate else Figures(candidate, 0.0, 0.0, math.inf, math.inf, 0.0)
        for rate, candidate in best.values()
    ]
    return sorted(ranked, key=lambda figures: -figures.rate)


def rank_by_latency(
    goal: Goal, tried: Sequence[Candidate], rate: float, on_progress: Callable[[], None] = lambda: None
) -> list[Figures]:
    """The best candidate of each kind at this rate; best kind first.

    The share within the latency decides, then p99.
    """
    best: dict[str, Figures] = {}
    for candidate in tried:
        known = best.get(candidate.kind)
        figures = goal.simulate(candidate, rate) if known is None else _better(goal, candidate, known)
        if figures is not None:
            best[candidate.kind] = figures
        on_progress()
    return sorted(best.values(), key=_latency_rank)


def _better(goal: Goal, candidate: Candidate, known: Figures) -> Figures | None:
    """The figures of a candidate at the rate of the `known` figures, if they are better than these."""
    share, latency_ms = known.within - 0.1**WITHIN_DECIMALS, goal.latency_ms
    if round(known.within, WITHIN_DECIMALS) == 1:
        share, latency_ms = LATENCY_QUANTILE, known.p99_ms  # only a lower p99 can be better
    figures = goal.simulate_until_missed(candidate, known.rate, share=share, latency_ms=latency_ms)
    is_better = figures is not None and _latency_rank(figures) < _latency_rank(known)
    return figures if is_better else None


def _latency_rank(figures: Figures) -> tuple[float, float]:
    return -round(figures.within, WITHIN_DECIMALS), figures.p99_ms


def recommend(ranked: Sequence[Figures], present: ModelSettings, *, at_one_rate: bool) -> Figures:
    """Of those that are about as good as the first, the one that changes the fewest settings.

    At one rate, candidates that keep the latency beat those that do not, and p99 counts only among the
    former.
    """
    first = ranked[0]

    def is_as_good(figures: Figures) -> bool:
        if not at_one_rate:
            return figures.rate >= first.rate * (1 - RATE_TOLERANCE)
        if first.within < LATENCY_QUANTILE:
            return figures.within >= first.within * (1 - RATE_TOLERANCE)
        p99_ms_max = first.p99_ms * (1 + P99_TOLERANCE)
        return figures.within >= LATENCY_QUANTILE and figures.p99_ms <= p99_ms_max

    equals = filter(is_as_good, ranked)
    return min(equals, key=lambda figures: len(changed_settings(figures.candidate.settings, present)))


class LargerBatches(NamedTuple):
    """A larger batch size, and by which share it would increase requests/s."""

    size: int
    gain: float


def larger_batches(goal: Goal, best: Figures, max_size: int, observed_size_max: int) -> LargerBatches | None:
    """Twice the largest size, if l(n), extrapolated, promises a gain; else None.

    There is no suggestion where the best settings do not fill batches as they are, where batches near the
    largest size were not measured (the extrapolation would rest on a guess), or where a batch of that size
    would exceed the latency.
    """
    twice, world = 2 * max_size, goal.world
    execution_us = world.execution_us(twice)
    gain = 2 * world.execution_us(max_size) / max(1.0, execution_us) - 1
    is_full = best.mean_batch >= MEAN_BATCH_SHARE_MIN * max_size
    is_measured = observed_size_max >= OBSERVED_SHARE_MIN * max_size
    is_in_time = execution_us + world.round_trip_us(twice) <= 1000 * goal.latency_ms
    return LargerBatches(twice, gain) if is_full and is_measured and is_in_time and gain > GAIN_MIN else None


def changed_settings(settings: ModelSettings, present: ModelSettings) -> dict[str, str]:
    """The settings that differ from the present ones, as `carpool config` reads them."""
    before = present.as_text()
    return {name: value or "none" for name, value in settings.as_text().items() if value != before[name]}
