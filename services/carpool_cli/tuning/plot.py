"""The plot of `carpool tune`. Only this module imports matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from carpool_cli.tuning.calibrate import Measured
from carpool_cli.tuning.search import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Plot p99 over rate for one or two `curves`, and l(n) with its measurement. Raises ImportError."""
    import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (over_rate, over_size) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    _plot_over_rate(over_rate, latency_ms, curves)
    _plot_over_size(over_size, measurement, max_size)
    over_rate.set_title(f"{title}: simulated p99 latency by request rate", fontsize=11)
    over_size.set_title("l(n): execution time of a batch of n", fontsize=11)
    for axes in (over_rate, over_size):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_over_rate(axes: Axes, latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> None:
    for style, (label, curve) in zip(STYLES, curves.items(), strict=False):
        axes.plot([point.rate for point in curve], [point.p99_ms for point in curve], label=label, **style)
    axes.axhline(latency_ms, color=GRAY, lw=1, ls=":", label=f"requested latency, {latency_ms:g} ms")
    axes.set(xlabel="requests/s", ylabel="p99, ms", xlim=(0, None), ylim=(0, _top_ms(latency_ms, curves)))
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
    observed_sizes, observed_ms = zip(*observed, strict=True)
    axes.plot(observed_sizes, observed_ms, "o", color=BLUE, ms=4, alpha=0.35, mew=0, label="measured batches")
    size_max = max(observed_sizes)
    for part, line, label in (
        (sizes[:size_max], "-", "simulated"),
        (sizes[size_max - 1 :], ":", "extrapolated"),
    ):
        if len(part) > 1:
            curve_ms = [measurement.curve.at(size) / 1000 for size in part]
            axes.plot(part, curve_ms, line, color=BLUE, lw=1.5, label=label)
    axes.set(xlabel="n, requests in a batch", ylabel="execution, ms", xlim=(0, None), ylim=(0, None))
