"""l(n) as it was measured: times for some sizes, and straight between them. Pure.

No law is laid through them. A model that takes a logarithm, or a step at 32, is simulated as what it is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import Final

from carpool_batcher.core.latency import EXTRAPOLATION_RATIO, LatencyModel, Line

Sizes = Sequence[tuple[int, int]]  # of batches: how many requests, and how many us
Curve = Sequence[tuple[float, float]]  # size and us, both in order, and no size twice; one at least

NEAR: Final = 2  # so many groups of sizes to an octave: 30 and 32 say one thing together, not a steep step


def medians(seen: Sizes) -> Curve:
    """The median time of each size, never less for a larger one. Of `seen` one at least.

    Sizes that were seen by chance lie close together, and close ones are one size here.
    """
    groups = [tuple(zip(*group, strict=True)) for group in _groups(seen)]
    sizes = [sum(sizes) / len(sizes) for sizes, _ in groups]
    times_us = _rising([float(median(times_us)) for _, times_us in groups], [len(one) for one, _ in groups])
    return list(zip(sizes, times_us, strict=True))


def curve_of(seen: Sizes) -> Curve:
    """l(n) from 1 on: where nothing was seen, what a batcher guesses."""
    points = list(medians(seen))
    size, took_us = points[0]
    if len(points) == 1:
        points.append((2 * size, took_us * (1 + EXTRAPOLATION_RATIO)))
    elif size > 1:
        points.insert(0, (1.0, min(took_us, float(learned(seen).at(1)))))
    return points


def at(curve: Curve, size: int) -> float:
    """The time of a batch of `size`, in us. Beyond the largest that is known the last slope goes on."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    above = min(bisect_left(curve, (float(size), 0.0)), len(curve) - 1)
    (left, left_us), (right, right_us) = curve[above - 1], curve[above]
    return left_us + (right_us - left_us) * (size - left) / (right - left)


def spread_of(seen: Sizes, curve: Curve) -> Sequence[float]:
    """How much times vary, as factors of what is usual for their size, in order: of all that was seen but the
    slowest, since one pause of the machine cannot be told from a tail.

    `curve` only brings sizes that are close together to the same level: how well it fits is not seen here.
    """
    off: list[float] = []
    for group in _groups(seen):
        factors = [took_us / max(1.0, at(curve, size)) for size, took_us in group]
        usual = median(factors) or 1.0
        off += [one / usual for one in factors]
    off.sort()
    return tuple(off[:-1] or off)


def learned(seen: Sizes) -> Line:
    """The line that a batcher makes of these batches."""
    latency = LatencyModel()
    for size, took_us in seen:
        latency.observe(size, took_us)
    assert latency.line is not None
    return latency.line


def furthest_off(line: Line, curve: Curve, max_size: int) -> tuple[int, float]:
    """Where up to `max_size` the line is off by most, and by which share of the time it takes there."""
    sizes = {1, max_size, *(round(size) for size, _ in curve if size <= max_size)}
    off = [(size, line.at(size) / max(1.0, at(curve, size)) - 1) for size in sorted(sizes)]
    return max(off, key=lambda one: abs(one[1]))


def _groups(seen: Sizes) -> list[Sizes]:
    """Batches by their size, in order; sizes that are close together in one."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for one in sorted(seen):
        groups.setdefault(round(NEAR * math.log2(one[0])), []).append(one)
    return list(groups.values())


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest to these of those that never fall: where they do, neighbours become their mean."""
    blocks: list[tuple[float, int, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            together = before[1] + block[1]
            mean = (before[0] * before[1] + block[0] * block[1]) / together
            block = (mean, together, before[2] + block[2])
        blocks.append(block)
    return [value for value, _, number in blocks for _ in range(number)]
