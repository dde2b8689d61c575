"""Classes of batch sizes, and what was observed of the batches in each.

    sizes up to 32    a class for each size
    larger sizes      16 classes to an octave, each of which ends where a model that pads may have a step

So what is known of rare sizes is kept apart from what is seen all the time, in bounded memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

EXACT_SIZE_BITS: Final = 5
EXACT_SIZES_MAX: Final = 1 << EXACT_SIZE_BITS  # sizes up to this have a class each
CLASS_OBSERVATIONS_MAX: Final = 8  # kept for each class
TRUSTED_OBSERVATIONS_MIN: Final = 3  # of a class, before it says what is normal
ACTIVE_PAUSE_OBSERVATIONS: Final = 16  # of other classes, which are no sign that a class is not active
OUTLIER_MEDIAN_RATIO: Final = 4.0  # an outlier's distance from its class's median, in median distances
OUTLIER_RATIO_MIN: Final = 0.02  # smaller distances, relative to the time, are no outliers
MARGIN_QUANTILE: Final = 0.9
SCALE_MAX: Final = 1e6  # changes of speed multiply for ever: beyond this the times are stored anew


def size_class(size: int) -> int:
    """The number of a size's class, ascending with the size. Each class ends at a multiple of its width."""
    shift = max(0, (size - 1).bit_length() - EXACT_SIZE_BITS)
    return ((size - 1) >> shift) + (shift << (EXACT_SIZE_BITS - 1))


def ends_of_class(number: int) -> tuple[int, int]:
    """The first and the last size of a class, by its number."""
    shift = (number >> (EXACT_SIZE_BITS - 1)) - 1
    last = ((number - (shift << (EXACT_SIZE_BITS - 1))) + 1) << shift
    return last - (1 << shift) + 1, last


class SeenTime(NamedTuple):
    """How long a batch of a size took."""

    size: int
    time_us: float


class SizeClass:
    """The observations of one class of sizes. Times are stored divided by `scale`, so that it costs the same
    to follow a change of speed however many there are."""

    __slots__ = (
        "_observed", "knot_size", "knot_us", "margin", "numbers", "scale", "seen_others", "seen_us",
        "slope_us",
    )  # fmt: skip

    def __init__(self) -> None:
        self._observed: deque[tuple[int, float]] = deque(maxlen=CLASS_OBSERVATIONS_MAX)  # size and time
        self.numbers: deque[int] = deque(maxlen=CLASS_OBSERVATIONS_MAX)  # of these, counted over all classes
        self.scale = 1.0
        # When it was last observed: its `knot_us`, and the times of all full classes, by their numbers
        self.seen_us = 0.0
        self.seen_others: Mapping[int, SeenTime] = {}
        # As of the last fit:
        self.knot_size = 0
        self.knot_us = 0.0
        self.slope_us = 0.0  # what a request more adds, where the class has several sizes
        self.margin = 0.0  # how much longer nine of ten batches take at most, relative to the knot

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def sizes(self) -> list[int]:
        """The sizes observed."""
        return [size for size, _ in self._observed]

    @property
    def is_full(self) -> bool:
        """Whether it has as many observations as are kept."""
        return len(self.numbers) == CLASS_OBSERVATIONS_MAX

    @property
    def is_trusted(self) -> bool:
        """Whether it says what is normal for its sizes."""
        return self.knot_size > 0 and len(self.numbers) >= TRUSTED_OBSERVATIONS_MIN

    def moved_log(self, since: SeenTime) -> float:
        """The logarithm of how much slower its batches became since that time of one size."""
        return math.log((self.knot_us + self.slope_us * (since.size - self.knot_size)) / since.time_us)

    def follow(self, others: Sequence[tuple[int, SizeClass, float]]) -> None:
        """Scale by as much as others moved since this class was observed: their numbers, and their shares.

        One that was not full then is taken to have moved as far as this class followed until now.
        """
        followed = self.knot_us / self.seen_us
        fresh = {
            number: SeenTime(one.knot_size, one.knot_us / followed)
            for number, one, _ in others
            if number not in self.seen_others
        }
        if fresh:
            self.seen_others = {**self.seen_others, **fresh}
        moved = sum([share * one.moved_log(self.seen_others[number]) for number, one, share in others])
        self.scale_by(math.exp(moved / sum([share for _, _, share in others])) / followed)

    def append(self, size: int, took_us: int, number: int) -> None:
        """Add an observation, the `number`th of all classes."""
        self._observed.append((size, took_us / self.scale))
        self.numbers.append(number)

    def share(self, count: int) -> float:
        """Its share of the latest observations, of `count` in all."""
        return len(self.numbers) / (count - self.numbers[0] + 1)

    def is_active(self, count: int) -> bool:
        """Whether it was observed about as recently as it usually is."""
        latest = self.numbers[-1]
        return count - latest <= latest - self.numbers[0] + ACTIVE_PAUSE_OBSERVATIONS

    def scale_by(self, ratio: float, but_last: int = 0) -> None:
        """Scale the times of all observations, but for the last ones."""
        self.scale *= ratio
        self.knot_us *= ratio
        self.slope_us *= ratio
        for at in range(len(self._observed) - but_last, len(self._observed)):
            size, time_us = self._observed[at]
            self._observed[at] = (size, time_us / ratio)

    def _apply_scale(self) -> None:
        observed = [(size, time_us * self.scale) for size, time_us in self._observed]
        self._observed.extend(observed)  # which pushes out those before
        self.scale = 1.0

    def fit(self, usual_margin: float) -> None:
        """Find the knot and the margin anew.

        `usual_margin`: of other classes, for the doubt about one that was seen too rarely to show its own.
        """
        if not 1 / SCALE_MAX < self.scale < SCALE_MAX:
            self._apply_scale()
        count, slope_us = len(self._observed), self.slope_us / self.scale
        ordered = sorted([(time_us - slope_us * size, size) for size, time_us in self._observed])
        level_us, size = ordered[(count - 1) // 2]
        time_us = level_us + slope_us * size
        self.knot_size, self.knot_us = size, time_us * self.scale
        self.margin = _margin([(other_us - level_us) / time_us for other_us, _ in ordered], usual_margin)


def _margin(excess: Sequence[float], usual_margin: float) -> float:
    """The quantile of these relative distances above the knot, which ascend, without outliers.

    Fewer observations than a class can have show less than there is: then it is at least the usual margin,
    and the more, the fewer they are.
    """
    count = len(excess)
    middle = sorted(map(abs, excess))[count // 2] if count > TRUSTED_OBSERVATIONS_MIN else usual_margin
    limit = OUTLIER_MEDIAN_RATIO * middle + OUTLIER_RATIO_MIN
    kept = bisect_right(excess, limit)
    margin = max(0.0, excess[min(kept - 1, int(MARGIN_QUANTILE * kept))])
    return margin if count == CLASS_OBSERVATIONS_MAX else max(margin, usual_margin * (1 + 1 / count))
