"""The latency model l(n): how long a batch of n requests occupies a model process, learned from batches.

l(n) is the monotone curve that was seen. No formula is fitted: a model may take steps, because it pads its
batches to 8, 16 and 32, or grow like a logarithm. The median observation of each class of sizes
(`learned.size_class`) is a knot of the curve (`learned.curve`). Knots that fall with rising size are pooled
(isotonic regression). Between knots the curve is straight, below the first one it is constant, and beyond the
last one it grows as in the octave before that. Of the batches of a size, a tenth take longer than `at_most`.

- Where it rises between two knots far more than beside them, there is a step. It is assumed to be in the
  middle: so the sizes below are tried, and the step is found.

- The first observation of the largest class does not count if it is far above the curve of smaller sizes,
  until a second one confirms it. A class of the largest sizes that seems slow, was seen once or twice and not
  for long, is forgotten. Otherwise an outlier (a pause of the machine, a cold cache) could keep a size from
  being tried ever again.
- Several observations in a row far above, or far below, what their classes say are a change of the model's
  speed. All earlier observations are then scaled by the same ratio.
- Sizes that are not observed any more follow the slow drift of those that are.

Why: docs/decisions/0013.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from carpool_batcher.core.learned.curve import Curve, Knot, beyond_us, non_decreasing, with_steps
from carpool_batcher.core.learned.size_class import (
    EXACT_SIZES_MAX,
    TRUSTED_OBSERVATIONS_MIN,
    SeenTime,
    SizeClass,
    ends_of_class,
    size_class,
)

REFIT_INTERVAL_MIN: Final = 16  # observations between two fits; more if there are more classes
UNASKED_REFIT_INTERVAL: Final = 256  # the same while nobody asks
CHANGE_RATIO_MIN: Final = 1.3  # of the observed to the usual time, or of the usual to the observed
CHANGE_OBSERVATIONS_MIN: Final = 6  # in a row, all above or all below
UNCONFIRMED_RATIO_MIN: Final = 2.0  # of the first observation to the curve of smaller sizes
FORGOTTEN_AFTER_OBSERVATIONS: Final = 1000  # of other sizes, a class that seems slow is forgotten
FORGOTTEN_RATIO_MIN: Final = 1.25  # of its time to the curve of smaller sizes


class LatencyModel:
    """l(n) of one lane, or of all lanes. `observe` costs about 3 µs, the other methods less than one.

    The curve is fitted when somebody asks and enough is new. Per batch this adds 3 µs where batches have one
    size, and 12 µs where they have dozens.
    """

    def __init__(self) -> None:
        self._classes: dict[int, SizeClass] = {}
        self._count = 0  # of all observations so far
        self._changed: set[SizeClass] = set()  # classes with observations since the last fit
        self._count_at_fit = 0
        self._is_outdated = False
        self._curve: Curve | None = None
        self._times_us: dict[int, int] = {}  # l(n) and `at_most` as far as they were asked for
        self._at_most_us: dict[int, int] = {}
        # Observations of trusted classes: the class, and the ratio to the time that was usual.
        self._latest: deque[tuple[SizeClass, float]] = deque(maxlen=CHANGE_OBSERVATIONS_MIN)
        self._deviation_run = 0  # of these in a row, how many are far above, or, negative, far below

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._count > 0

    @property
    def curve(self) -> Curve | None:
        """The curve; None before the first observation. It is another object if anything changed."""
        if self._is_outdated:
            self._refresh()
        return self._curve

    def of(self, size: int) -> int:
        """The expected execution time of a batch of `size`, in microseconds; 0 if nothing is known."""
        if self._is_outdated:
            self._refresh()
        time_us = self._times_us.get(size)
        if time_us is None:
            time_us = self._times_us[size] = 0 if self._curve is None else round(self._curve.at(size))
        return time_us

    def at_most(self, size: int) -> int:
        """The execution time which nine of ten batches of `size` do not exceed; 0 if nothing is known."""
        if self._is_outdated:
            self._refresh()
        time_us = self._at_most_us.get(size)
        if time_us is None:
            time_us = 0 if self._curve is None else round(self._curve.at_most(size))
            self._at_most_us[size] = time_us
        return time_us

    # --- learning ------------------------------------------------------------------------------------------

    def observe(self, size: int, took_us: int, *, is_usual: bool = False) -> int | None:
        """Learn that a batch of `size` took `took_us`. Both are at least 1.

        Returns 1 if that was far above what its class says, -1 if far below, 0 if it was neither; None if
        too little is known of its class. `is_usual`: it does not tell of a change of speed.
        """
        self._count += 1
        number = size_class(size)
        of_class = self._classes.get(number)
        if of_class is None:
            of_class = self._classes[number] = SizeClass()
        of_class.append(size, took_us, self._count)
        self._changed.add(of_class)
        side = None
        if of_class.is_trusted:
            ratio = took_us / of_class.knot_us
            side = (ratio > CHANGE_RATIO_MIN) - (ratio * CHANGE_RATIO_MIN < 1)
            self._latest.append((of_class, ratio))
            if self._is_change(0 if is_usual else side):
                self._follow_change()
        interval = min(max(REFIT_INTERVAL_MIN, len(self._classes)), self._count // 4)
        if len(of_class) <= TRUSTED_OBSERVATIONS_MIN or self._count - self._count_at_fit >= interval:
            self._is_outdated = True
        if self._count - self._count_at_fit >= UNASKED_REFIT_INTERVAL:
            self._refresh()
        return side

    def _refresh(self) -> None:
        """Fit the curve, unless the latest observations may show a change of speed: the next ones tell."""
        if abs(self._deviation_run) <= 1:
            self._fit()

    def _is_change(self, side: int) -> bool:
        """Count the run of deviations, and return whether it is long enough to be a change of speed."""
        continues = side and side * self._deviation_run >= 0
        self._deviation_run = self._deviation_run + side if continues else side
        return abs(self._deviation_run) >= CHANGE_OBSERVATIONS_MIN

    def _follow_change(self) -> None:
        """Scale earlier observations to the new speed."""
        ratio = sorted(ratio for _, ratio in self._latest)[CHANGE_OBSERVATIONS_MIN // 2]
        after_change = [of_class for of_class, _ in self._latest]
        for of_class in self._classes.values():
            of_class.scale_by(ratio, min(after_change.count(of_class), len(of_class)))
        self._latest.clear()
        self._deviation_run = 0
        self._is_outdated = True

    def _fit(self) -> None:
        changed, count = self._changed, self._count
        for one in changed:
            if one.is_full:
                one.fit(0.0)
        margins = sorted([one.margin for one in self._classes.values() if one.is_full])
        usual_margin = margins[len(margins) // 2] if margins else 0.0
        for one in changed:
            if not one.is_full:
                one.fit(usual_margin)
        self._follow_drift()
        self._forget_unconfirmed()
        numbers = sorted(self._classes)
        if len(self._classes[numbers[-1]]) == 1 and self._is_slow(numbers[-1], UNCONFIRMED_RATIO_MIN):
            numbers.pop()
        self._curve = self._curve_of([(number, self._classes[number]) for number in numbers])
        self._times_us.clear()
        self._at_most_us.clear()
        changed.clear()
        self._count_at_fit = count
        self._is_outdated = False

    def _follow_drift(self) -> None:
        """Scale classes that are not active by as much as the others moved since they were last observed.

        Each class is compared with its own past, then and now, and counts by its share of the observations.
        So noise does not add up, whatever sizes are observed while the machine is slow.
        """
        count = self._count
        full = [(number, one) for number, one in self._classes.items() if one.is_full]
        active = [(number, one, one.share(count)) for number, one in full if one.is_active(count)]
        for one in self._classes.values() if active else ():
            if one not in self._changed and not one.is_active(count):
                one.follow(active)
        times = {number: SeenTime(one.knot_size, one.knot_us) for number, one in full}
        for one in self._changed:
            one.seen_us, one.seen_others = one.knot_us, times

    def _curve_of(self, classes: Sequence[tuple[int, SizeClass]]) -> Curve:
        """The curve through classes, ascending."""
        sizes: list[float] = []
        times_us: list[float] = []
        weights: list[int] = []
        margins: list[float] = []
        for at, (number, one) in enumerate(classes):
            ends: Sequence[int] = (one.knot_size,)
            if number >= EXACT_SIZES_MAX:  # of several sizes: the knot is extended to both ends
                slope_us = _slope_us([of for _, of in classes[max(0, at - 1) : at + 2]])
                one.slope_us = min(slope_us, one.knot_us / one.knot_size)
                first, last = ends_of_class(number)
                ends = sorted({first, last if at + 1 < len(classes) else max(one.sizes)})
            for size in ends:
                sizes.append(size)
                times_us.append(one.knot_us + one.slope_us * (size - one.knot_size))
                weights.append(len(one))
                margins.append(one.margin)
        times_us = non_decreasing(times_us, weights)
        longer_us = [time_us * (1 + margin) for time_us, margin in zip(times_us, margins, strict=True)]
        knots = map(Knot._make, zip(sizes, times_us, accumulate(longer_us, max), strict=True))
        sizes, times_us, longer_us = map(list, zip(*with_steps(list(knots)), strict=True))
        return Curve(sizes, times_us, longer_us)

    def _forget_unconfirmed(self) -> None:
        """Forget classes of the largest sizes that seem slow, were hardly seen, and not for long."""
        fresh_from = self._count - FORGOTTEN_AFTER_OBSERVATIONS
        largest_fresh = max(number for number, one in self._classes.items() if one.numbers[-1] > fresh_from)
        for number in sorted(number for number in self._classes if number > largest_fresh):
            one = self._classes[number]
            if len(one) < TRUSTED_OBSERVATIONS_MIN and self._is_slow(number, FORGOTTEN_RATIO_MIN):
                del self._classes[number]

    def _is_slow(self, number: int, ratio_min: float) -> bool:
        """Whether a class takes `ratio_min` times as long as smaller sizes make expect."""
        smaller = [self._classes[other] for other in sorted(self._classes) if other < number]
        if not smaller:
            return False
        sizes, times_us = [float(one.knot_size) for one in smaller], [one.knot_us for one in smaller]
        one = self._classes[number]
        expected_us = times_us[-1] + beyond_us(sizes, times_us) * (one.knot_size - sizes[-1])
        return one.knot_us > ratio_min * expected_us


def _slope_us(neighbours: Sequence[SizeClass]) -> float:
    """What a request more adds in the class in the middle: the least of the slopes to its neighbours, because
    there may be a step between them."""
    slopes_us = [
        (right.knot_us - left.knot_us) / (right.knot_size - left.knot_size)
        for left, right in pairwise(neighbours)
    ]
    return max(0.0, min(slopes_us, default=0.0))
