"""A latency curve: execution times of batches by their size, as knots with straight lines between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

SHOWN_WITHIN: Final = 0.05  # of the curve, relative to it
SHOWN_MAX: Final = 24  # points
EXTRAPOLATION_RATIO: Final = 0.25  # growth beyond the only size known, relative to proportional growth
STEP_RISE_RATIO_MIN: Final = 1.1  # of the time after a step to the time before it
STEP_SLOPE_RATIO_MIN: Final = 3.0  # of the slope of a step to the slopes beside it


class Knot(NamedTuple):
    """A point of a curve. Nine of ten batches take `at_most_us`."""

    size: float
    time_us: float
    at_most_us: float


class Curve:
    """l(n) at one moment. `sizes` and `times_us` are its knots, ascending; nine of ten of their batches take
    at most `at_most_us`."""

    __slots__ = ("_beyond_us", "_shown", "at_most_us", "sizes", "times_us")

    def __init__(
        self, sizes: Sequence[float], times_us: Sequence[float], at_most_us: Sequence[float] = ()
    ) -> None:
        self.sizes = sizes
        self.times_us = times_us
        self.at_most_us = at_most_us or times_us
        self._beyond_us = beyond_us(sizes, times_us)
        self._shown: list[tuple[int, int]] | None = None

    def at(self, size: float) -> float:
        """The expected execution time of a batch of `size`, in microseconds."""
        return self._at(self.times_us, size)

    def at_most(self, size: float) -> float:
        """The execution time which nine of ten batches of `size` do not exceed."""
        return self._at(self.at_most_us, size)

    @property
    def shown(self) -> list[tuple[int, int]]:
        """Sizes and times (us) that show the curve: straight lines between them are near to it everywhere.

        Its ends, the powers of two between them, and as many others as that takes, such as both sides of a
        step; not more than SHOWN_MAX, as a curve that is all noise would have.
        """
        if self._shown is None:
            self._shown = self._points_shown()
        return self._shown

    def _points_shown(self) -> list[tuple[int, int]]:
        first, last = int(self.sizes[0]), int(self.sizes[-1])
        powers = {1 << power for power in range(first.bit_length(), last.bit_length())}
        chosen = sorted({first, last, *(size for size in powers if size < last)})
        while True:
            times_us = [self.at(size) for size in chosen]
            distances = [(self._distance(chosen, times_us, size), int(size)) for size in self.sizes]
            distance, farthest = max(distances)
            if distance <= SHOWN_WITHIN or farthest in chosen or len(chosen) >= SHOWN_MAX:
                return [(size, round(time_us)) for size, time_us in zip(chosen, times_us, strict=True)]
            insort(chosen, farthest)

    def _distance(self, sizes: Sequence[float], times_us: Sequence[float], size: float) -> float:
        """How far straight lines through these points are from the curve at `size`, relative to it."""
        time_us = self.at(size)
        return abs(interpolated_us(sizes, times_us, min(size, sizes[-1])) - time_us) / max(1.0, time_us)

    def throughput(self, size: int) -> float:
        """Requests per microsecond in batches of `size`."""
        return size / max(1.0, self.at(size))

    def _at(self, times_us: Sequence[float], size: float) -> float:
        largest = self.sizes[-1]
        if size >= largest:
            return times_us[-1] + self._beyond_us * (size - largest)
        return interpolated_us(self.sizes, times_us, size)


def non_decreasing(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest non-decreasing values (isotonic regression): neighbours that fall get their median.

    Weighted, and by absolute distance, so that a single outlier of little weight moves nothing.
    """
    blocks: list[tuple[float, list[tuple[float, int]]]] = []
    for member in zip(values, weights, strict=True):
        value, members = member[0], [member]
        while blocks and blocks[-1][0] > value:
            members = blocks.pop()[1] + members
            value = _weighted_median(members)
        blocks.append((value, members))
    return [value for value, members in blocks for _ in members]


def _weighted_median(members: Sequence[tuple[float, int]]) -> float:
    """The lower of two medians: of the same batch, the faster execution is the less disturbed one."""
    half = sum(weight for _, weight in members) / 2
    below = 0
    for value, weight in sorted(members):
        below += weight
        if below >= half:
            return value
    raise ValueError("a median needs members")


def beyond_us(sizes: Sequence[float], times_us: Sequence[float]) -> float:
    """What each further request is assumed to add (us) beyond the largest of these sizes, which ascend.

    The mean of the octave before. Where nothing is known of that octave but its end, a little less than
    proportional growth: such batches are then tried, and known.
    """
    largest, largest_us = sizes[-1], times_us[-1]
    proportional_us = largest_us / largest
    if sizes[0] > largest / 2:
        return EXTRAPOLATION_RATIO * proportional_us
    growth_us = (largest_us - interpolated_us(sizes, times_us, largest / 2)) / (largest / 2)
    return min(max(0.0, growth_us), proportional_us)


def interpolated_us(sizes: Sequence[float], times_us: Sequence[float], size: float) -> float:
    """The time of a batch of `size`, which is at most the largest of `sizes`."""
    above = bisect_left(sizes, size)
    if not above:
        return times_us[0]
    left, left_us, right_us = sizes[above - 1], times_us[above - 1], times_us[above]
    return left_us + (right_us - left_us) * (size - left) / (sizes[above] - left)


def with_steps(knots: Sequence[Knot]) -> list[Knot]:
    """Knots, ascending, with further ones, so that each steep rise between two known sizes is a step.

    A rise is steep if the curve is much flatter on both sides of it. The step is assumed in the middle: so it
    is found by halving. If the rise were spread over the sizes between, those before the step would seem
    slow, and would never be tried.
    """
    slopes_us = [(right.time_us - left.time_us) / (right.size - left.size) for left, right in pairwise(knots)]
    found = list(knots[:2])
    for at in range(2, len(knots)):
        before, after = knots[at - 1], knots[at]
        beside_us = max([slopes_us[at - 2], *slopes_us[at : at + 1]])
        is_steep = slopes_us[at - 1] > STEP_SLOPE_RATIO_MIN * beside_us
        if is_steep and after.time_us > STEP_RISE_RATIO_MIN * before.time_us:
            middle = (before.size + after.size) // 2
            if before.size < middle:
                found.append(before._replace(size=middle))
            if middle + 1 < after.size:
                found.append(after._replace(size=middle + 1))
        found.append(after)
    return found
