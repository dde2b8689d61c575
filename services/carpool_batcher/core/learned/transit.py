"""How long batches are in transit, to a worker and back to the producer, by the size of the batch.

The round trip is the time from dispatch to settled, less the execution. What comes after the settling is not
known, but the batcher learns of batches that settle over the same way: the delivery is how long that takes.

Each process on the way works for each request of a batch, so large batches take longer. In a burst batches
are large, and nine of ten of the latest ones may be the small ones from before. So round trips are learned by
the magnitude of the size. Those of one with too few are taken to be those of the next smaller one that has
enough, and large batches are never taken to be faster than small ones. A magnitude that did not occur for
long is forgotten: if it was slow while the machine was, it might be avoided for ever.

If transit was long for a moment, no request may seem to be in time any more. Then only trials are executed
(`learned.lane_latency`), ten in a second. It would take seconds until they outnumber what was learned. So if
two batches in turn, each dispatched after a pause, take less than half of what is usual for their magnitude,
all is learned anew.

Why: docs/decisions/0051.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

TIMES_MAX: Final = 64  # kept of each kind
TRUSTED_TIMES_MIN: Final = 8  # of fewer the shortest counts: those of a cold start are far too long
LONGEST_TRANSIT_RATIO_MAX: Final = 2  # of the longest that counts, to what nine of ten do not exceed
FORGOTTEN_AFTER_BATCHES: Final = 1000  # of other magnitudes
PAUSE_US: Final = 50_000  # without a batch that settles, after which what was learned may be outdated
OUTDATED_RATIO_MIN: Final = 2  # of the usual round trip to that of a batch after a pause
OUTDATED_BATCHES_MIN: Final = 2  # after pauses, in turn
MAGNITUDES: Final = 12  # of sizes; the last one has those from 2^20


def magnitude(size: int) -> int:
    """The magnitude of a batch of `size` requests: 1 up to 3 of them, 2 up to 15, 3 up to 63, and so on."""
    return min((size.bit_length() + 1) // 2, MAGNITUDES - 1)


class RecentTimes:
    """Quantiles of the last TIMES_MAX times (us); 0 without any. They are read more often than one is added.

    `median_us`: half of the times do not exceed it; `at_most_us`: nine of ten do not; `longest_us`: the
    longest but one, because a single one may be an accident.
    """

    __slots__ = ("_ordered_us", "_times_us", "at_most_us", "longest_us", "median_us")

    def __init__(self) -> None:
        self.median_us = self.at_most_us = self.longest_us = 0
        self._times_us: deque[int] = deque()
        self._ordered_us: list[int] = []

    def observe(self, time_us: int) -> None:
        """Learn of one more. A negative one counts as 0: clocks differ a little."""
        time_us = max(0, time_us)
        self._times_us.append(time_us)
        insort(self._ordered_us, time_us)
        if len(self._times_us) > TIMES_MAX:
            del self._ordered_us[bisect_left(self._ordered_us, self._times_us.popleft())]
        self.median_us, self.at_most_us, self.longest_us = map(self._quantile_us, (0.5, 0.9, 0.99))

    @property
    def are_enough(self) -> bool:
        """Whether there are enough for quantiles."""
        return len(self._times_us) >= TRUSTED_TIMES_MIN

    def _quantile_us(self, quantile: float) -> int:
        ordered_us = self._ordered_us
        if not self.are_enough:
            return ordered_us[0]
        return ordered_us[int(quantile * (len(ordered_us) - 1))]


class TransitBySize(NamedTuple):
    """Both parts together (us) of a batch of each magnitude: what half of the batches do not exceed, what
    nine of ten do not, and what hardly any does."""

    usual_us: Sequence[int]
    at_most_us: Sequence[int]
    longest_us: Sequence[int]


class Transit:
    """What was learned of transit. See the module."""

    def __init__(self) -> None:
        self._settled_us = 0  # when the last batch did
        self._forget()

    def _forget(self) -> None:
        self.round_trips = RecentTimes()  # of batches of all sizes
        self.deliveries = RecentTimes()
        self._by_magnitude = [RecentTimes() for _ in range(MAGNITUDES)]
        self._latest = [0] * MAGNITUDES  # the number of the latest batch of each, counted over all
        self._batches = 0
        self._quick_after_pauses = 0  # batches in turn
        self._by_size: TransitBySize | None = None  # None: to be computed again

    def observe_round_trip(self, size: int, round_trip_us: int, dispatched_us: int, settled_us: int) -> None:
        """A batch of `size` took this long from dispatch to settled, without the execution. Both times show
        whether it was dispatched after a pause."""
        own = magnitude(size)
        if dispatched_us - self._settled_us > PAUSE_US:
            self._check_after_pause(self._by_magnitude[own], round_trip_us)
        self._settled_us = max(self._settled_us, settled_us)
        self.round_trips.observe(round_trip_us)
        self._by_magnitude[own].observe(round_trip_us)
        self._batches += 1
        self._latest[own] = self._batches
        for other, latest in enumerate(self._latest):
            if latest == self._batches - FORGOTTEN_AFTER_BATCHES:
                self._by_magnitude[other] = RecentTimes()
        self._by_size = None

    def _check_after_pause(self, usual: RecentTimes, round_trip_us: int) -> None:
        """After a pause: count batches that are quick, and forget all if there are enough in turn."""
        is_quick = usual.are_enough and 0 < OUTDATED_RATIO_MIN * round_trip_us < usual.median_us
        self._quick_after_pauses = self._quick_after_pauses + 1 if is_quick else 0
        if self._quick_after_pauses == OUTDATED_BATCHES_MIN:
            self._forget()

    def observe_delivery(self, delivery_us: int) -> None:
        """The batcher learned of a batch this long after it settled."""
        self.deliveries.observe(delivery_us)
        self._by_size = None

    @property
    def usual_us(self) -> int:
        """What half of the batches do not exceed, of any size."""
        return self.round_trips.median_us + self.deliveries.median_us

    @property
    def at_most_us(self) -> int:
        """What nine of ten batches do not exceed, of any size."""
        return self.round_trips.at_most_us + self.deliveries.at_most_us

    @property
    def by_size(self) -> TransitBySize:
        """Round trip and delivery together. Accidents, such as a pause of the machine, do not count."""
        if self._by_size is None:
            self._by_size = self._computed()
        return self._by_size

    def _computed(self) -> TransitBySize:
        known = [times for times in self._by_magnitude if times.are_enough]
        chosen = known[0] if known else self.round_trips
        of_each: list[RecentTimes] = []
        for own in self._by_magnitude:
            chosen = own if own.are_enough else chosen
            of_each.append(chosen)
        deliveries = self.deliveries
        usual_us = [*accumulate([times.median_us + deliveries.median_us for times in of_each], max)]
        at_most_us = [*accumulate([times.at_most_us + deliveries.at_most_us for times in of_each], max)]
        longest_us = accumulate([times.longest_us + deliveries.longest_us for times in of_each], max)
        limits_us = [LONGEST_TRANSIT_RATIO_MAX * transit_us for transit_us in at_most_us]
        return TransitBySize(usual_us, at_most_us, [*map(min, longest_us, limits_us)])
