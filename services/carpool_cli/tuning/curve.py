"""l(n) as measured: the median times of some sizes, with straight lines between them. Pure.

No formula is fitted. So a model whose time grows like a logarithm, or jumps at 32, is simulated as it is. The
classes of close sizes, and what is assumed of larger sizes, are the batcher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from carpool_batcher.core.learned.curve import Curve, non_decreasing
from carpool_batcher.core.learned.size_class import size_class

Sizes = Sequence[tuple[int, int]]  # of batches: number of requests, and time in us


class Line(NamedTuple):
    """A time that grows with the size of a batch, in microseconds."""

    intercept_us: float
    slope_us: float

    def at(self, size: float) -> float:
        """The time of a batch of `size`."""
        return self.intercept_us + self.slope_us * size


def curve_of(observed: Sizes) -> Curve:
    """The median time of each size, never less for a larger size. `observed` must not be empty.

    Sizes that occurred by chance lie close together: those of a class are one knot of the curve.
    """
    groups = [tuple(zip(*group, strict=True)) for group in _groups(observed)]
    medians_us = [float(median(times_us)) for _, times_us in groups]
    mean_sizes = [sum(sizes) / len(sizes) for sizes, _ in groups]
    return Curve(mean_sizes, non_decreasing(medians_us, [len(sizes) for sizes, _ in groups]))


def line_through(curve: Curve) -> Line:
    """The nearest line (least squares) to the knots of a curve; with neither part negative."""
    sizes, times_us = curve.sizes, curve.times_us
    mean_size, mean_us = sum(sizes) / len(sizes), sum(times_us) / len(sizes)
    variance = sum((size - mean_size) ** 2 for size in sizes)
    if not variance:
        return Line(mean_us, 0.0)
    knots = zip(sizes, times_us, strict=True)
    slope_us = sum((size - mean_size) * (time_us - mean_us) for size, time_us in knots) / variance
    slope_us = min(slope_us, mean_us / mean_size)
    return Line(mean_us - slope_us * mean_size, slope_us)


def spread_of(observed: Sizes, curve: Curve) -> Sequence[float]:
    """How much times vary: factors relative to the median of their size, ascending.

    The slowest observation is excluded, because a single pause of the machine cannot be told from a tail.
    `curve` only scales close sizes to the same level; how well it fits does not show in the factors.
    """
    factors: list[float] = []
    for group in _groups(observed):
        relative = [time_us / max(1.0, curve.at(size)) for size, time_us in group]
        middle = median(relative) or 1.0
        factors += [factor / middle for factor in relative]
    factors.sort()
    return tuple(factors[:-1] or factors)


def _groups(observed: Sizes) -> list[Sizes]:
    """Batches grouped by classes of sizes, ascending."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for batch in sorted(observed):
        groups.setdefault(size_class(batch[0]), []).append(batch)
    return list(groups.values())
