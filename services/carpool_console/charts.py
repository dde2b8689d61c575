"""Curves as coordinates, which templates draw as SVG. Pure: no styles, no scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from carpool_console.history import GAP_S, POINT_S, POINTS_MAX, Point

SPARK_WIDTH: Final = 96
SPARK_HEIGHT: Final = 20


class Spark(NamedTuple):
    """A small curve. `lines`: each the points of a polyline; `label`: what it shows, in words."""

    lines: Sequence[str]
    label: str
    width: int
    height: int


def spark(
    points: Sequence[Point], now_s: float, values: Sequence[float], label: str, *, scale: int = 1
) -> Spark:
    """The last ten minutes, from 0 to the largest value. It is interrupted where nobody looked."""
    width, height = SPARK_WIDTH * scale, SPARK_HEIGHT * scale
    span_s, largest = POINTS_MAX * POINT_S, max(values, default=0.0)
    lines, before_s = list[list[str]](), -GAP_S
    for point, value in zip(points, values, strict=True):
        x = width * (1 - min(1.0, (now_s - point.at_s) / span_s))
        y = (height - 2) * (1 - value / largest) + 1 if largest else height - 1
        if not lines or point.at_s - before_s > GAP_S:
            lines.append([])
        lines[-1].append(f"{x:.0f},{y:.1f}")
        before_s = point.at_s
    return Spark([" ".join(line) for line in lines if len(line) > 1], label, width, height)


# --- l(n) --------------------------------------------------------------------------------------------------

CURVE_WIDTH: Final = 460
CURVE_HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 30  # margins, for the labels of axes
_TICKS: Final = 4


class Curve(NamedTuple):
    """A curve with axes. `line`: what half of the batches take; `band`: from there to what nine of ten take;
    `dots`: the sizes that were seen. Ticks are places and texts."""

    line: str
    band: str
    dots: Sequence[tuple[str, str]]
    x_ticks: Sequence[tuple[str, str]]
    y_ticks: Sequence[tuple[str, str]]
    left: int = _LEFT
    right: int = CURVE_WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = CURVE_HEIGHT - _BOTTOM
    width: int = CURVE_WIDTH
    height: int = CURVE_HEIGHT


def latency_curve(points: Sequence[tuple[int, float, float]], shown: Callable[[float], str]) -> Curve | None:
    """l(n) from points of a size, the time of half of the batches and that of nine of ten, in seconds; None
    without points. `shown`: a time as text."""
    if not points:
        return None
    largest, longest_s = max(size for size, _, _ in points), max(max(pair) for _, *pair in points)
    y_step = _step(max(longest_s, 1e-6) / _TICKS)
    y_max = y_step * math.ceil(longest_s / y_step) or y_step

    def x(size: float) -> str:
        return f"{_LEFT + (CURVE_WIDTH - _LEFT - _RIGHT) * size / largest:.1f}"

    def y(time_s: float) -> str:
        return f"{_TOP + (CURVE_HEIGHT - _TOP - _BOTTOM) * (1 - time_s / y_max):.1f}"

    there = [f"{x(size)},{y(half_s)}" for size, half_s, _ in points]
    back = [f"{x(size)},{y(most_s)}" for size, _, most_s in reversed(points)]
    sizes = sorted({1 if largest < 2 else 0, *(round(largest * at / _TICKS) for at in range(1, _TICKS + 1))})
    return Curve(
        line=" ".join(there),
        band=" ".join([*there, *back]),
        dots=[(x(size), y(half_s)) for size, half_s, _ in points],
        x_ticks=[(x(size), f"{size:,}") for size in sizes],
        y_ticks=[(y(at * y_step), shown(at * y_step)) for at in range(round(y_max / y_step) + 1)],
    )


def _step(least: float) -> float:
    """1, 2 or 5 times a power of ten, the smallest that is not less. `least` is above 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)
