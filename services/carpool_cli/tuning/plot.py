"""The plot of `carpool tune`. matplotlib comes with `pip install 'carpool[plot]'`; only this imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from carpool_cli.tuning.search import Figures
from carpool_cli.tuning.simulator import World


def plot(
    path: Path,
    title: str,
    latency_ms: float,
    curves: Mapping[str, Sequence[Figures]],
    world: World,
    seen: Sequence[tuple[int, int]],
    max_size: int,
) -> None:
    """p99 over rate for each of `curves`, and l(n) beside it, with what was measured. Raises ImportError."""
    import matplotlib as mpl  # noqa: PLC0415 (not everybody has it)

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (over_rate, over_size) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, curve in curves.items():
        over_rate.plot([one.rate for one in curve], [one.p99_ms for one in curve], "o-", ms=3, label=label)
    over_rate.axhline(latency_ms, color="gray", lw=1, ls="--")
    over_rate.set(title=title, xlabel="requests/s", ylabel="p99, ms", ylim=(0, 2.5 * latency_ms))
    over_rate.legend(frameon=False)
    sizes = range(1, max_size + 1)
    over_size.plot(sizes, [world.takes_us(size) / 1000 for size in sizes], lw=1)
    if seen:
        over_size.plot(
            [size for size, _ in seen], [took_us / 1000 for _, took_us in seen], "o", ms=3, alpha=0.5
        )
    law = f"l(n) = {world.intercept_us / 1000:.3g} + {world.slope_us / 1000:.3g} n ms"
    over_size.set(title=law, xlabel="n, requests in a batch", ylabel="ms", ylim=(0, None))
    for axes in (over_rate, over_size):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
