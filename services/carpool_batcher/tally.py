"""What a batcher says of itself about once a second, for whoever watches (`carpool top`): what is counted.

Counters begin with the lease: a batcher that takes over begins at nothing, and says since when. Whoever wants
rates subtracts one status from a later one of the same batcher.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from carpool.messages import Refusal
from carpool.wire.report import BatcherReport, Gauges
from carpool_batcher.core.scheduler import Scheduler

RECENT_US: Final = 10_000_000
_STEP: Final = 1.1  # a quantile is off by no more than half of it
BOUNDS_US: Final = tuple(int(100 * _STEP**at) for at in range(165))  # up to ten minutes


def gauges(scheduler: Scheduler, now_us: int) -> Gauges:
    """What there is to see now. O(lanes + batches in flight)."""
    oldest_us = scheduler.oldest_arrival_us()
    in_flight = scheduler.in_flight()
    return Gauges(
        scheduler.waiting,
        scheduler.waiting_bytes,
        0.0 if oldest_us is None else max(0, now_us - oldest_us) / 1e6,
        len(in_flight),
        sum(riding.size for riding in in_flight.values()),
        scheduler.model_processes,
        scheduler.withheld,
    )


class Tally:
    """What an active batcher has done since it began. A request costs 0.1 µs, 0.3 if alone in its ms."""

    def __init__(self, began_us: int) -> None:
        self._began_us = began_us
        self._batches: Counter[str] = Counter()
        self._requests = 0
        self._fill_percent = 0
        self._refused: Counter[str] = Counter()
        self._recent = Recent(began_us)

    def dispatched(self, reasons: Iterable[str], sizes: Iterable[int], fill_percents: Iterable[int]) -> None:
        """Batches left."""
        self._batches.update(reasons)
        self._requests += sum(sizes)
        self._fill_percent += sum(fill_percents)

    def refused(self, refusals: Iterable[Refusal]) -> None:
        """Requests were answered without a ride."""
        self._refused.update(f"{one.status}/{one.reason}" for one in refusals)

    def expired_in_flight(self, cause: str, requests: int) -> None:
        """Requests were answered while their batch was under way."""
        if requests:
            self._refused[cause] += requests

    def settled(self, arrivals_us: Iterable[int], now_us: int) -> None:
        """A batch of requests that arrived then is heard of as settled."""
        self._recent.observe(arrivals_us, now_us)

    def status(self, batcher: str, scheduler: Scheduler, now_us: int) -> BatcherReport:
        """All of it, and what there is to see."""
        line = scheduler.capacity.latency.line
        return BatcherReport(
            batcher,
            self._began_us,
            now_us,
            gauges(scheduler, now_us),
            dict(self._batches),
            self._requests,
            self._fill_percent,
            dict(self._refused),
            None if line is None else (line.intercept_us, line.slope_us, line.known_to),
            self._recent.quantiles_us(now_us),
        )


class Recent:
    """How long requests took in the last 10 to 20 s, in bins of 10%.

    Two histograms: every RECENT_US the older one is forgotten, and the newer one takes its place. Requests
    arrive at milliseconds, so those of one batch fall into few bins: counting them costs less than finding
    each one's.
    """

    def __init__(self, now_us: int) -> None:
        self._newer, self._older = _nothing(), _nothing()
        self._turn_at_us = now_us + RECENT_US

    def observe(self, arrivals_us: Iterable[int], now_us: int) -> None:
        """Requests that arrived then are done now."""
        self._turn(now_us)
        for arrival_us, requests in Counter(arrivals_us).items():
            self._newer[bisect_left(BOUNDS_US, now_us - arrival_us)] += requests

    def quantiles_us(self, now_us: int) -> tuple[int, int] | None:
        """What half of them, and 99 of 100, did not exceed; None if there were none."""
        self._turn(now_us)
        below = list(accumulate(older + newer for older, newer in zip(self._older, self._newer, strict=True)))
        if not below[-1]:
            return None
        return _quantile_us(below, 0.5), _quantile_us(below, 0.99)

    def _turn(self, now_us: int) -> None:
        if now_us < self._turn_at_us:
            return
        both = now_us >= self._turn_at_us + RECENT_US
        self._older, self._newer = _nothing() if both else self._newer, _nothing()
        self._turn_at_us = now_us + RECENT_US


def _nothing() -> list[int]:
    return [0] * (len(BOUNDS_US) + 1)


def _quantile_us(below: Sequence[int], share: float) -> int:
    """The middle of the bin in which this share of all is reached."""
    at = bisect_left(below, share * below[-1])
    upper_us = BOUNDS_US[min(at, len(BOUNDS_US) - 1)]
    lower_us = BOUNDS_US[at - 1] if at else 0
    return (lower_us + upper_us) // 2
