"""Plots as SVG, drawn by hand: the bench needs no plotting library, and equal figures give equal files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 860
LABELS: Final = 220  # the space for the names of bars
FIGURES: Final = 130  # the space for figures behind bars
ROW: Final = 20
TICKS_MAX: Final = 8
COLORS: Final = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bb5500",
    "#555555",
    "#999933",
)
FOCUS: Final = "#4477aa"  # Carpool
OTHERS: Final = "#b8c4d0"


def bars(title: str, panels: Mapping[str, Mapping[str, float]]) -> str:
    """Horizontal bars: one panel for each key, in it one bar for each name."""
    parts: list[str] = []
    y = 10.0
    for panel, values in panels.items():
        scale = (WIDTH - LABELS - FIGURES) / max(values.values(), default=1.0)
        y += 22
        parts.append(_text(LABELS, y, f"{title}, {panel}", weight="bold"))
        for name, value in values.items():
            y += ROW
            color = FOCUS if name.startswith("Carpool") else OTHERS
            parts.append(_text(LABELS - 8, y, name, anchor="end"))
            parts.append(_bar(LABELS, y, value * scale, color))
            parts.append(_text(LABELS + value * scale + 6, y, f"{value:,.0f}"))
        y += 12
    return _svg(y + 12, parts)


def stacked_bars(title: str, systems: Mapping[str, Mapping[str, float]]) -> str:
    """One bar for each name, of a part for each role."""
    roles = list(dict.fromkeys(role for values in systems.values() for role in values))
    colors = dict(zip(roles, COLORS * 2, strict=False))
    totals = {name: sum(values.values()) for name, values in systems.items()}
    shown_max = _shown_max(totals.values())
    scale = (WIDTH - LABELS - FIGURES) / shown_max
    parts, y = [_text(LABELS, 26, title, weight="bold"), *_legend(LABELS, 44, colors)], 52.0
    for name, values in systems.items():
        y += ROW
        parts.append(_text(LABELS - 8, y, name, anchor="end"))
        x, shortened = float(LABELS), min(1.0, shown_max / totals[name])
        for role, value in values.items():
            width = value * shortened * scale
            parts.append(_bar(x, y, width, colors[role]))
            x += width
        cut = " (shortened)" if totals[name] > shown_max else ""
        parts.append(_text(x + 6, y, f"{totals[name]:,.0f}{cut}"))
    return _svg(y + 24, parts)


def lines(
    x_title: str,
    y_title: str,
    systems: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = True,
) -> str:
    """One line for each name. The vertical axis is logarithmic, or begins at 0."""
    colors = dict(zip(systems, COLORS * 2, strict=False))
    points = [point for of_system in systems.values() for point in of_system]
    left, right, top, bottom = 70.0, WIDTH - 230.0, 30.0, 330.0
    x_max = max(x for x, _ in points)
    height = _Logarithmic(points) if logarithmic else _Linear(points)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / x_max, bottom - (bottom - top) * height.share(y)

    parts = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>']
    xs = sorted({x for x, _ in points})
    for x in xs if len(xs) <= TICKS_MAX else _steps(x_max):
        parts.append(_text(at(x, 0)[0], bottom + 18, f"{x:,g}", anchor="middle"))
    for y in height.ticks():
        parts.append(f'<path d="M{left} {at(0, y)[1]:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(left - 8, at(0, y)[1] + 4, f"{y:,g}", anchor="end"))
    parts.append(_text((left + right) / 2, bottom + 38, x_title, anchor="middle"))
    parts.append(_text(left, top - 12, y_title))
    for number, (name, of_system) in enumerate(systems.items()):
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in of_system)
        width = 3 if name.startswith("Carpool") else 1.5
        parts.append(f'<path d="M{path}" fill="none" stroke="{colors[name]}" stroke-width="{width}"/>')
        for x, y in (at(*point) for point in of_system if len(of_system) <= TICKS_MAX):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colors[name]}"/>')
        parts.append(_bar(right + 20, top + 18 + number * ROW, 12, colors[name]))
        parts.append(_text(right + 40, top + 18 + number * ROW, name))
    return _svg(bottom + 50, parts)


class _Linear:
    """A vertical axis from 0."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._max = max(y for _, y in points) * 1.05

    def share(self, y: float) -> float:
        return y / self._max

    def ticks(self) -> list[float]:
        return _steps(self._max)


class _Logarithmic:
    """A vertical axis from a little below the least value."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        low, high = (math.log10(pick(y for _, y in points)) for pick in (min, max))
        self._low, self._high = math.floor(low * 4) / 4, math.ceil(high * 4) / 4

    def share(self, y: float) -> float:
        return (math.log10(y) - self._low) / (self._high - self._low) if y > 0 else 0.0

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten."""
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in values if self._low <= math.log10(value) <= self._high]


def _steps(largest: float) -> list[float]:
    """About five round numbers from 0 to `largest`."""
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    return [step * number for number in range(int(largest / step) + 1)]


def _shown_max(totals: Iterable[float]) -> float:
    """The largest total, or a smaller one if it would flatten all others: at most four times the median."""
    ordered = sorted(totals)
    return min(ordered[-1], 4 * ordered[len(ordered) // 2])


def _legend(x: float, y: float, colors: Mapping[str, str]) -> Iterator[str]:
    for name, color in colors.items():
        yield _bar(x, y, 12, color)
        yield _text(x + 16, y, name)
        x += 30 + 7 * len(name)


def _bar(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="{max(width, 0.5):.1f}" height="14" fill="{color}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def _svg(height: float, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
    style = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + style, *parts, "</svg>", ""])
