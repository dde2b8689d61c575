"""The plot of `carpool tune`. matplotlib comes with `pip install 'carpool[plot]'`; only this imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from carpool_cli.tuning.calibrate import Measured
from carpool_cli.tuning.curve import at
from carpool_cli.tuning.search import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIGHEST: Final = 3.0  # times the latency
BLUE, RED, GRAY = "#1f5fa8", "#d1495b", "#777777"
LOOKS: Final[Sequence[dict[str, Any]]] = (  # the second curve can be seen where it lies upon the first
    {"color": BLUE, "lw": 4, "alpha": 0.45, "solid_capstyle": "round"},
    {"color": RED, "lw": 1.5, "ls": "--", "marker": "o", "ms": 3.5},
)


def plot(
    path: Path,
    title: str,
    latency_ms: float,
    curves: Mapping[str, Sequence[Figures]],
    found_out: Measured,
    max_size: int,
) -> None:
    """p99 over rate for one or two `curves`, and beside it l(n) and what was measured. Raises ImportError."""
    import matplotlib as mpl  # noqa: PLC0415 (not everybody has it)

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (over_rate, over_size) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    _over_rate(over_rate, latency_ms, curves)
    _over_size(over_size, found_out, max_size)
    over_rate.set_title(f"{title}: p99 over rate, simulated", fontsize=11)
    over_size.set_title("l(n): how long a batch is computed", fontsize=11)
    for axes in (over_rate, over_size):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _over_rate(axes: Axes, latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> None:
    for look, (label, curve) in zip(LOOKS, curves.items(), strict=False):
        axes.plot([one.rate for one in curve], [one.p99_ms for one in curve], label=label, **look)
    axes.axhline(latency_ms, color=GRAY, lw=1, ls=":", label=f"{latency_ms:g} ms asked for")
    axes.set(xlabel="requests/s", ylabel="p99, ms", xlim=(0, None), ylim=(0, _top_ms(latency_ms, curves)))
    axes.locator_params(axis="x", nbins=7)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _top_ms(latency_ms: float, curves: Mapping[str, Sequence[Figures]]) -> float:
    """High enough for all that is finite, and not so high that the latency lies on the ground."""
    highest_ms = max(
        (one.p99_ms for curve in curves.values() for one in curve if isfinite(one.p99_ms)), default=0
    )
    return min(HIGHEST * latency_ms, max(1.25 * latency_ms, 1.1 * highest_ms))


def _over_size(axes: Axes, found_out: Measured, max_size: int) -> None:
    sizes = range(1, max_size + 1)
    seen_at, seen_ms = zip(*((size, took_us / 1000) for size, took_us in found_out.seen), strict=True)
    axes.plot(seen_at, seen_ms, "o", color=BLUE, ms=4, alpha=0.35, mew=0, label="batches measured")
    known, guessed = sizes[: max(seen_at)], sizes[max(seen_at) - 1 :]
    for part, style, label in ((known, "-", "simulated"), (guessed, ":", "guessed")):
        if len(part) > 1:
            curve_ms = [at(found_out.curve, size) / 1000 for size in part]
            axes.plot(part, curve_ms, style, color=BLUE, lw=1.5, label=label)
    learned_ms = [found_out.line.at(size) / 1000 for size in sizes]
    axes.plot(sizes, learned_ms, color=GRAY, lw=1, ls="--", label="the line that the batcher learns")
    axes.set(xlabel="n, requests in a batch", ylabel="compute, ms", xlim=(0, None), ylim=(0, None))
