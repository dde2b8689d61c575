"""How long something took in the last 10 to 20 seconds, such as requests, from arrival until settled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from carpool.service_metrics import BucketCounts

WINDOW_US: Final = 10_000_000
_BOUND_RATIO: Final = 1.1  # a bucket is 10% wide, so a quantile is off by about 5% at most
BOUNDS_US: Final = tuple(int(100 * _BOUND_RATIO**power) for power in range(165))  # up to ten minutes


class RecentLatency:
    """Quantiles over a sliding window, from two histograms: every WINDOW_US the older one is dropped.

    Arrival times are whole milliseconds, so one batch has few different ones: equal ones are counted first,
    which costs 0.1 µs a run. Each different one costs 0.3.
    """

    def __init__(self, now_us: int) -> None:
        self._newer, self._older = BucketCounts(BOUNDS_US), BucketCounts(BOUNDS_US)
        self._rotate_at_us = now_us + WINDOW_US

    def observe(self, arrivals: Iterable[tuple[int, int]], now_us: int) -> None:
        """Requests are settled now that arrived at these times: (us, number of requests)."""
        self._rotate(now_us)
        for arrival_us, number in count_equal(arrivals):
            self._newer.observe_equal(now_us - arrival_us, number)

    def observe_one(self, duration_us: int, now_us: int) -> None:
        """Something took this long, and ended now."""
        self._rotate(now_us)
        self._newer.observe_equal(duration_us, 1)

    def quantiles_us(self, now_us: int) -> tuple[int, int] | None:
        """p50 and p99; None if nothing was observed in the window."""
        self._rotate(now_us)
        older, newer = self._older.snapshot()[0], self._newer.snapshot()[0]
        cumulative = list(accumulate(map(sum, zip(older, newer, strict=True))))
        if not cumulative[-1]:
            return None
        return _quantile_us(cumulative, 0.5), _quantile_us(cumulative, 0.99)

    def _rotate(self, now_us: int) -> None:
        if now_us < self._rotate_at_us:
            return
        both_expired = now_us >= self._rotate_at_us + WINDOW_US
        self._older = BucketCounts(BOUNDS_US) if both_expired else self._newer
        self._newer = BucketCounts(BOUNDS_US)
        self._rotate_at_us = now_us + WINDOW_US


def count_equal(numbers: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The total number for each value, of pairs of a value and a number."""
    totals: dict[int, int] = {}
    for value, number in numbers:
        totals[value] = totals.get(value, 0) + number
    return totals.items()


def _quantile_us(cumulative: Sequence[int], share: float) -> int:
    """The middle of the bucket in which this share of all values is reached."""
    bucket = bisect_left(cumulative, share * cumulative[-1])
    upper_us = BOUNDS_US[min(bucket, len(BOUNDS_US) - 1)]
    lower_us = BOUNDS_US[bucket - 1] if bucket else 0
    return (lower_us + upper_us) // 2
