"""The plot of `carpool tune`. Only this module imports matplotlib (the extra `plot`).

What rests on a guess, because no batch of that size was observed, is hollow, or on grey.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from carpool_cli.tuning.calibrate import Measured
from carpool_cli.tuning.observed import ObservedSizes, observed_sizes
from carpool_cli.tuning.search import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_SHOWN_RATIO_MAX: Final = 3.0  # of the vertical axis to the requested latency
BLUE, RED, GRAY = "#1f5fa8", "#d1495b", "#777777"
STYLES: Final[Sequence[dict[str, Any]]] = (  # the second curve stays visible where it covers the first
    {"color": BLUE, "lw": 4, "alpha": 0.45, "solid_capstyle": "round"},
    {"color": RED, "lw": 1.5, "ls": "--", "marker": "o", "ms": 3.5},
)


def plot(
    path: Path,
    title: str,
    latency_ms: float,
    curves: Mapping[str, Sequence[Figures]],
    measurement: Measured,
    max_size: int,
) -> None:
    """Plot p99 over rate for one or two `curves`, and l(n) with its measurement. Raises ImportError.

    Where requests expire, there is goodput over rate too: refused requests have no latency.
    """
    import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure = draw(title, latency_ms, curves, measurement, max_size)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(
    title: str,
    latency_ms: float,
    curves: Mapping[str, Sequence[Figures]],
    measurement: Measured,
    max_size: int,
) -> Figure:
    """The figure of the plot."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    panels = 3 if has_expiration(curves) else 2
    figure, axes_of_panels = plt.subplots(1, panels, figsize=(5.5 * panels, 4.4), layout="constrained")
    over_rate, *_, over_size = axes_of_panels
    _plot_over_rate(over_rate, latency_ms, curves)
    _plot_over_size(over_size, measurement, max_size)
    over_rate.set_title(f"{title}: simulated p99 latency by request rate", fontsize=11)
    over_size.set_title("l(n): execution time of a batch of n", fontsize=11)
    if panels == 3:
        _plot_goodput(axes_of_panels[1], latency_ms, curves)
        axes_of_panels[1].set_title("simulated goodput by request rate", fontsize=11)
    for axes in axes_of_panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize=9)
    return figure


def has_expiration(curves: Mapping[str, Sequence[Figures]]) -> bool:
    """Whether requests expire under the settings of any of these curves."""
    points = (point for curve in curves.values() for point in curve)
    return any(point.candidate.settings.default_expiration_ms is not None for point in points)


def _plot_over_rate(axes: Axes, latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> None:
    _plot_curves(axes, curves, lambda point: point.p99_ms)
    axes.axhline(latency_ms, color=GRAY, lw=1, ls=":", label=f"requested latency, {latency_ms:g} ms")
    axes.set(ylabel="p99, ms", ylim=(0, _top_ms(latency_ms, curves)))
    if not any(isfinite(point.p99_ms) for curve in curves.values() for point in curve):
        note = "none: over 1% of the requests are refused or expire"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", color=GRAY, fontsize=9)


def _plot_goodput(axes: Axes, latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> None:
    _plot_curves(axes, curves, lambda point: point.goodput)
    rates = [0.0, *(point.rate for curve in curves.values() for point in curve)]
    axes.plot([0, max(rates)], [0, max(rates)], color=GRAY, lw=1, ls=":", label="all requests")
    axes.set(ylabel=f"answered within {latency_ms:g} ms, requests/s", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _plot_curves(
    axes: Axes, curves: Mapping[str, Sequence[Figures]], value_of: Callable[[Figures], float]
) -> None:
    """Each curve over its rates; points that rest on a guess have hollow marks."""
    for style, (label, curve) in zip(STYLES, curves.items(), strict=False):
        axes.plot([point.rate for point in curve], list(map(value_of, curve)), label=label, **style)
    guesses = [point for curve in curves.values() for point in curve if point.is_guess]
    if guesses:
        rates, values = [point.rate for point in guesses], list(map(value_of, guesses))
        axes.plot(rates, values, "o", mfc="white", mec=GRAY, ms=5, label="a guess: sizes not observed")
    axes.set(xlabel="requests/s", xlim=(0, 1.05 * max(p.rate for curve in curves.values() for p in curve)))
    axes.locator_params(axis="x", nbins=7)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _top_ms(latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> float:
    """The end of the vertical axis: above each finite value, but low enough to tell the latency from 0."""
    highest_ms = max(
        (point.p99_ms for curve in curves.values() for point in curve if isfinite(point.p99_ms)), default=0
    )
    return min(LATENCY_SHOWN_RATIO_MAX * latency_ms, max(1.25 * latency_ms, 1.1 * highest_ms))


def _plot_over_size(axes: Axes, measurement: Measured, max_size: int) -> None:
    sizes = range(1, max_size + 1)
    observed = ((size, time_us / 1000) for size, time_us in measurement.observed)
    axes.plot(
        *zip(*observed, strict=True), "o", color=BLUE, ms=4, alpha=0.35, mew=0, label="measured batches"
    )
    curve_ms = [measurement.curve.at(size) / 1000 for size in sizes]
    axes.plot(sizes, curve_ms, color=BLUE, lw=1.5, label="simulated")
    _shade_guesses(axes, observed_sizes(measurement.observed), max_size)
    axes.set(xlabel="n, requests in a batch", ylabel="execution, ms", xlim=(0, None), ylim=(0, None))


def _shade_guesses(axes: Axes, observed: ObservedSizes, max_size: int) -> None:
    """Grey behind the sizes below the smallest observed one, and above the largest."""
    label = f"a guess: only {observed} were observed"
    for start, end in ((1, observed.smallest), (observed.largest, max_size)):
        if start < end:
            axes.axvspan(start, end, color=GRAY, alpha=0.15, lw=0, label=label)
            label = "_"  # not in the legend again
