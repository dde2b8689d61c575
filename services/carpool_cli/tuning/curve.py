"""l(n) as measured: the times of some sizes, with straight lines between them. Pure.

No formula is fitted. So a model whose time grows like a logarithm, or jumps at 32, is simulated as it is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import Final

from carpool_batcher.core.latency import EXTRAPOLATION_RATIO, LatencyModel, Line

Sizes = Sequence[tuple[int, int]]  # of batches: number of requests, and time in us
Curve = Sequence[tuple[float, float]]  # size and time in us, both ascending, each size once; never empty

SIZE_GROUPS_PER_OCTAVE: Final = 2  # 30 and 32 are one group: their difference is noise, not a steep step


def medians(observed: Sizes) -> Curve:
    """The median time of each size, never less for a larger size. `observed` must not be empty.

    Sizes that occurred by chance lie close together: close ones are one group here.
    """
    groups = [tuple(zip(*group, strict=True)) for group in _groups(observed)]
    mean_sizes = [sum(sizes) / len(sizes) for sizes, _ in groups]
    medians_us = [float(median(times_us)) for _, times_us in groups]
    times_us = _non_decreasing(medians_us, [len(sizes) for sizes, _ in groups])
    return list(zip(mean_sizes, times_us, strict=True))


def curve_of(observed: Sizes) -> Curve:
    """l(n) from n = 1. Where nothing was observed, it is what a batcher assumes."""
    points = list(medians(observed))
    size, time_us = points[0]
    if len(points) == 1:
        points.append((2 * size, time_us * (1 + EXTRAPOLATION_RATIO)))
    elif size > 1:
        points.insert(0, (1.0, min(time_us, float(learned_line(observed).at(1)))))
    return points


def at(curve: Curve, size: int) -> float:
    """The time of a batch of `size` in us. Beyond the largest known size the last slope continues."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    above = min(bisect_left(curve, (float(size), 0.0)), len(curve) - 1)
    (left, left_us), (right, right_us) = curve[above - 1], curve[above]
    return left_us + (right_us - left_us) * (size - left) / (right - left)


def spread_of(observed: Sizes, curve: Curve) -> Sequence[float]:
    """How much times vary: factors relative to the median of their size, ascending.

    The slowest observation is excluded, because a single pause of the machine cannot be told from a tail.
    `curve` only scales close sizes to the same level; how well it fits does not show in the factors.
    """
    factors: list[float] = []
    for group in _groups(observed):
        relative = [time_us / max(1.0, at(curve, size)) for size, time_us in group]
        middle = median(relative) or 1.0
        factors += [factor / middle for factor in relative]
    factors.sort()
    return tuple(factors[:-1] or factors)


def learned_line(observed: Sizes) -> Line:
    """The line that a batcher learns from these batches."""
    latency = LatencyModel()
    for size, time_us in observed:
        latency.observe(size, time_us)
    assert latency.line is not None
    return latency.line


def largest_error(line: Line, curve: Curve, max_size: int) -> tuple[int, float]:
    """The size, up to `max_size`, at which the line differs most from the curve, and the relative error."""
    sizes = {1, max_size, *(round(size) for size, _ in curve if size <= max_size)}
    errors = [(size, line.at(size) / max(1.0, at(curve, size)) - 1) for size in sorted(sizes)]
    return max(errors, key=lambda size_and_error: abs(size_and_error[1]))


def _groups(observed: Sizes) -> list[Sizes]:
    """Batches grouped by close sizes, ascending."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for batch in sorted(observed):
        groups.setdefault(round(SIZE_GROUPS_PER_OCTAVE * math.log2(batch[0])), []).append(batch)
    return list(groups.values())


def _non_decreasing(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest non-decreasing values (isotonic regression): neighbours that fall get their mean."""
    blocks: list[tuple[float, int, int]] = []  # value, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            previous = blocks.pop()
            total_weight = previous[1] + block[1]
            mean = (previous[0] * previous[1] + block[0] * block[1]) / total_weight
            block = (mean, total_weight, previous[2] + block[2])
        blocks.append(block)
    return [value for value, _, number in blocks for _ in range(number)]
