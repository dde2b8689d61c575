"""The latency model l(n): how long the model takes for a batch of n requests, learned from settled batches.

    l(n) = intercept + slope n,    both at least 0;    a tenth of the batches take longer than l(n) + margin

It is a line fitted by least squares to the last observations of each size class, twice: the second time
without outliers of the first fit (a pause of the machine, a cold cache).

- Observations are kept by size class, so that a frequent size does not push out what is known of rare ones.
- A single observed size says nothing about others. Smaller batches are assumed to take as long. Larger ones
  are assumed to take a little longer: so they are tried, and then known.
- Several outliers in a row on the same side mean that the model's speed has changed. All earlier observations
  are then scaled by the same ratio. Slow drift is followed in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

CLASS_OBSERVATIONS_MAX: Final = 8  # kept for each size class: 1, 2 and 3, 4 to 7, and so on
REFIT_INTERVAL: Final = 8  # observations between two fits
CHANGE_RATIO_MIN: Final = 1.3  # of the observed to the expected time, or of the expected to the observed
CHANGE_OBSERVATIONS_MIN: Final = 6  # in a row, all above or all below the line
OUTLIER_MEDIAN_RATIO: Final = 4.0  # an outlier's distance from the line, in median distances
MARGIN_QUANTILE: Final = 0.9
EXTRAPOLATION_RATIO: Final = 0.25  # growth beyond the only observed size, relative to proportional growth


Observation = tuple[int, float]  # a batch's size, and its execution time (us)


class Line(NamedTuple):
    """l(n), in microseconds. `only_size` is the only observed size, where there is only one; otherwise 0."""

    intercept_us: float
    slope_us: float
    only_size: int = 0
    margin_us: float = 0.0

    def at(self, size: int) -> int:
        """The execution time of a batch of `size`."""
        if self.only_size:
            beyond = max(0.0, size / self.only_size - 1)
            return int(self.intercept_us * (1 + EXTRAPOLATION_RATIO * beyond))
        return int(self.intercept_us + self.slope_us * size)


class LatencyModel:
    """l(n) of one lane, or of all lanes. `observe` costs about 10 µs, the other methods less than one."""

    def __init__(self) -> None:
        # By size class, which is the number of bits of the size.
        self._observed: dict[int, deque[Observation]] = {}
        self._fitted: dict[int, list[Observation]] = {}  # as they were at the last fit
        self._count_since_fit: dict[int, int] = {}
        self._latest: deque[Observation] = deque(maxlen=CHANGE_OBSERVATIONS_MIN)
        self._line: Line | None = None
        self._deviation_run = 0  # observations in a row far above the line, or, negative, far below it

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._line is not None

    @property
    def line(self) -> Line | None:
        """The fitted line; None before the first observation."""
        return self._line

    def of(self, size: int) -> int:
        """The expected execution time of a batch of `size`, in microseconds; 0 if nothing is known."""
        return 0 if self._line is None else self._line.at(size)

    def at_most(self, size: int) -> int:
        """The execution time which nine of ten batches of `size` do not exceed; 0 if nothing is known."""
        return 0 if self._line is None else self._line.at(size) + int(self._line.margin_us)

    def observe(self, size: int, took_us: int) -> None:
        """Learn that a batch of `size` took `took_us`."""
        observation, size_class = (size, float(took_us)), size.bit_length()
        self._latest.append(observation)
        changed = self._line is not None and self._has_changed(took_us, self._line.at(size))
        if changed:
            self._follow_change()
        self._observed.setdefault(size_class, deque(maxlen=CLASS_OBSERVATIONS_MAX)).append(observation)
        self._count_since_fit[size_class] = self._count_since_fit.get(size_class, 0) + 1
        interval = min(REFIT_INTERVAL, sum(map(len, self._observed.values())) // 4)
        if self._line is None or changed or sum(self._count_since_fit.values()) >= interval:
            self._refit()

    def _refit(self) -> None:
        if self._line is not None and len(self._count_since_fit) < len(self._observed):
            self._follow_drift(self._line)
        self._line = fit([observation for of_class in self._observed.values() for observation in of_class])
        self._fitted |= {size_class: list(self._observed[size_class]) for size_class in self._count_since_fit}
        self._count_since_fit.clear()

    def _has_changed(self, took_us: int, expected_us: int) -> bool:
        """Count the run of deviations, and return whether it is long enough to be a change of speed."""
        side = (took_us > CHANGE_RATIO_MIN * expected_us) - (CHANGE_RATIO_MIN * took_us < expected_us)
        continues = side and side * self._deviation_run >= 0
        self._deviation_run = self._deviation_run + side if continues else side
        return abs(self._deviation_run) >= CHANGE_OBSERVATIONS_MIN

    def _follow_change(self) -> None:
        """Scale earlier observations to the new speed."""
        assert self._line is not None
        ratio = _slowness(self._latest, self._line)
        after_change = {id(observation) for observation in self._latest}
        for size_class, of_class in self._observed.items():
            scaled = [
                observation if id(observation) in after_change else (observation[0], ratio * observation[1])
                for observation in of_class
            ]
            self._observed[size_class] = deque(scaled, maxlen=CLASS_OBSERVATIONS_MAX)
        self._fitted.clear()
        self._deviation_run = 0

    def _follow_drift(self, line: Line) -> None:
        """Scale size classes without a new observation by as much as the others changed since the last fit.

        Each of the others is compared with its own past. Compared with the line, execution times that do not
        lie on a line would look like drift.
        """
        ratios = [
            _slowness(self._observed[size_class], line) / _slowness(self._fitted[size_class], line)
            for size_class in self._count_since_fit
            if size_class in self._fitted
        ]
        if not ratios:
            return
        ratio = sorted(ratios)[len(ratios) // 2]
        for size_class in self._observed.keys() - self._count_since_fit.keys():
            scaled = [(size, ratio * took_us) for size, took_us in self._observed[size_class]]
            self._observed[size_class] = deque(scaled, maxlen=CLASS_OBSERVATIONS_MAX)
            self._fitted[size_class] = scaled


def _slowness(observed: Iterable[Observation], line: Line) -> float:
    """The median ratio of the observed times to those on the line."""
    ratios = sorted(took_us / max(1, line.at(size)) for size, took_us in observed)
    return max(ratios[len(ratios) // 2], 1e-6)


def fit(observed: Sequence[Observation]) -> Line:
    """The line through these (size, microseconds), without outliers. There must be at least one."""
    line = _least_squares(observed)
    above_us = _distances_us(observed, line)
    distances_us = list(map(abs, above_us))
    limit_us = OUTLIER_MEDIAN_RATIO * sorted(distances_us)[len(distances_us) // 2]
    limit_us += 0.02 * line.at(observed[-1][0])
    if max(distances_us) > limit_us:
        near = zip(observed, distances_us, strict=True)
        kept = [observation for observation, distance_us in near if distance_us <= limit_us] or observed
        line = _least_squares(kept)
        above_us = _distances_us(kept, line)
    above_us.sort()
    margin_us = max(0, above_us[min(len(above_us) - 1, int(MARGIN_QUANTILE * len(above_us)))])
    return line._replace(margin_us=float(margin_us))


def _distances_us(observed: Sequence[Observation], line: Line) -> list[float]:
    """How far each observation is above the line. Few sizes differ, so each is calculated once."""
    expected_us = {size: line.at(size) for size in {size for size, _ in observed}}
    return [took_us - expected_us[size] for size, took_us in observed]


def _least_squares(observed: Sequence[Observation]) -> Line:
    count = len(observed)
    mean_size = sum([size for size, _ in observed]) / count
    mean_us = sum([took_us for _, took_us in observed]) / count
    variance = sum([(size - mean_size) ** 2 for size, _ in observed])
    if not variance:
        return Line(mean_us, 0.0, only_size=max(1, round(mean_size)))
    slope = sum([(size - mean_size) * (took_us - mean_us) for size, took_us in observed]) / variance
    slope = min(max(0.0, slope), mean_us / mean_size)  # so that neither slope nor intercept is negative
    return Line(mean_us - slope * mean_size, slope)
