"""GOODPUT.md and its plot: goodput in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from deadlines.points import DEADLINES_MS
from deadlines.virtual import LINES, POLICIES, WORKERS, Figures, MeanLatency

HEAD: Final = """\
# Goodput

Written by `.venv/bin/python ops/bench/goodput.py --write`.

Requests answered within their deadline, as a share of a bound that no policy can exceed. U3 is the
exact optimum of one worker that knows all arrivals in advance. U1 is what all workers together could
execute in batches that meet the deadline. A batch of b requests takes l(b). AIMD is the policy of
Clipper (NSDI 2017).

![goodput](goodput.svg)
"""


def body(results: Sequence[Figures], latencies: Sequence[MeanLatency]) -> Iterator[str]:
    """The document below its head."""
    yield from summary(results)
    yield ""
    yield from table(results)
    yield from ("", "## Mean latency at low load", "")
    yield from ("Poisson arrivals, no deadlines; each policy with its best delay.", "")
    yield from latency_table(latencies)


def latency_table(results: Sequence[MeanLatency]) -> Iterator[str]:
    """The mean latencies as a Markdown table; the last column compares `eager` with the best policy."""
    yield "| l(b), ms | workers | load | " + " | ".join(results[0].mean_ms) + " | `eager` above the best |"
    yield "|---|---:|---:|" + "---:|" * (len(results[0].mean_ms) + 1)
    for model, workers, load, mean_ms in results:
        over = mean_ms["eager"] / min(mean_ms.values()) - 1
        cells = " | ".join(f"{latency_ms:,.2f} ms" for latency_ms in mean_ms.values())
        yield f"| {model} | {workers} | {load:g} | {cells} | {over:.1%} |"


def table(results: Sequence[Figures]) -> Iterator[str]:
    """Goodput as a Markdown table."""
    yield "| l(b), ms | workers | deadline | arrivals | load | bound/s | " + " | ".join(POLICIES) + " |"
    yield "|---|---:|---:|---|---:|---:|" + "---:|" * len(POLICIES)
    for point, bound, good in results:
        shares = {name: good[name] / bound for name in POLICIES}
        top = max(shares.values())
        cells = [f"**{share:.1%}**" if share == top else f"{share:.1%}" for share in shares.values()]
        yield (
            f"| {point.model} | {point.workers} | {point.deadline_ms} ms | "
            f"{point.arrivals} | {point.load:g} | {point.bound_name} {bound:,.0f} | "
            + " | ".join(cells)
            + " |"
        )


def plot(results: Sequence[Figures], to: Path) -> None:
    """Plot goodput over load, a panel for each model that is a line, number of workers and deadline."""
    import matplotlib as mpl  # noqa: PLC0415 (only --write needs it)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "carpool"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    panels = list(product([model.name for model in LINES], WORKERS, DEADLINES_MS))
    figure, grid = plt.subplots(2, len(panels) // 2, figsize=(13, 6), sharey=True, layout="constrained")
    for axes, (model, workers, deadline_ms) in zip(grid.flat, panels, strict=True):
        for policy in POLICIES:
            of_policy = [
                (figures.point.load, figures.good[policy] / figures.bound)
                for figures in results
                if figures.point[:4] == (model, workers, deadline_ms, "Poisson")
            ]
            axes.plot(*zip(*of_policy, strict=True), "o-", ms=3, label=policy)
        bound = "U3" if workers == 1 else "U1"
        axes.set_title(f"{model} ms, {workers} worker{'s' * (workers > 1)}, {deadline_ms} ms", fontsize=9)
        axes.set(xlabel="load", ylabel=f"goodput / {bound}", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    grid.flat[0].legend(frameon=False, fontsize=8)
    figure.savefig(to, metadata={"Date": None})


def summary(results: Sequence[Figures]) -> Iterator[str]:
    """The worst cases of `deferred`."""
    shortfall = [
        (max(figures.good.values()) - figures.good["deferred"]) / figures.bound for figures in results
    ]
    worst = results[int(np.argmax(shortfall))].point
    yield (
        f"At all {len(results)} points `deferred` is the best policy, or below the best by at most "
        f"{max(shortfall):.1%} of the bound (at {worst.description}).\n"
    )
    for workers, bound in ((1, "U3"), (16, "U1")):
        shares = {
            figures.point: figures.good["deferred"] / figures.bound
            for figures in results
            if figures.point.workers == workers
        }
        loaded = [share for point, share in shares.items() if point.load == 0.9]
        name = f"{workers} worker{'s' * (workers > 1)}"
        least, least_loaded = min(shares.values()), min(loaded)
        yield f"- {name}: at least {least:.1%} of {bound}, and at least {least_loaded:.1%} at load 0.9"
