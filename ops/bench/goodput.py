"""Goodput: requests answered within their deadline, by policy, as a share of what no policy can pass. And how
long requests take on average where there is little to do.

    .venv/bin/python ops/bench/goodput.py [--requests 6000] [--write]

In virtual time, with the production core: Poisson and bursty arrivals, two models, 1 and 16 workers,
deadlines from 15 ms, load from 0.3 to 1.5 of capacity. Triton's policy and count-or-timeout are given the
best delay that a search finds at each point. Policies and bounds are judged on the same requests. The bounds:

    U1  no more than workers * max b / l(b) per second, over the b that can be in time at all: of those who
        arrive in any stretch of time no more than that for as long as it lasts, and a deadline longer
    U3  the exact offline optimum for one worker and equal deadlines, which knows all arrivals beforehand:
        served batches are contiguous blocks, so a dynamic programme over (considered, served) finds it

--write puts the table and the plot into GOODPUT.md and goodput.svg beside this file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from rivals import Aimd, CountOrTimeout

from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival, Traffic, bursty, poisson
from carpool_cli.tuning.simulator import Decides, Simulation, World

HERE: Final = Path(__file__).parent
MAX_BATCH: Final = 256
MODELS: Final = ((5000.0, 50.0), (2000.0, 1000.0))
WORKERS: Final = (1, 16)
DEADLINES_MS: Final = (15, 50)
LOADS: Final = (0.3, 0.6, 0.9, 1.2, 1.5)
# Bursts so short that a trace has several.
ARRIVALS: Final[dict[str, Traffic]] = {"Poisson": poisson, "bursty": partial(bursty, phase_s=0.1)}
DELAYS_MS: Final = (0.5, 2, 5, 10, 20)
LOW_LOADS: Final = (0.05, 0.1, 0.2, 0.3)
SLOW_US: Final = 50_000  # what AIMD aims at where nobody expires
LEARNED: Final = 3000  # requests for each worker, before those that are judged
SILENCE_US: Final = 20_000_000
DEADLINES_LONG: Final = 20  # a trace is at least so many, or much of it could be served after it has ended
POLICIES: Final = ("deferred", "eager", "Triton", "AIMD", "count or timeout")


class Point(NamedTuple):
    """Where on the grid."""

    model: tuple[float, float]
    workers: int
    deadline_ms: int
    arrivals: str
    load: float

    @property
    def words(self) -> str:
        """For a sentence."""
        intercept_ms, slope_ms = (one / 1000 for one in self.model)
        law, workers = (
            f"{intercept_ms:g} + {slope_ms:g} b ms",
            f"{self.workers} worker{'s' * (self.workers > 1)}",
        )
        return f"{law}, {workers}, {self.deadline_ms} ms, {self.arrivals}, load {self.load:g}"


class Figures(NamedTuple):
    """Goodput of each policy, and the bound, in requests/s. `bound` is U3 for one worker, else U1."""

    point: Point
    bound: float
    good: dict[str, float]


def world_of(point: Point) -> World:
    """What is around the scheduler."""
    return World(point.workers, *point.model)


def u1(times_us: np.ndarray, world: World, deadline_us: int) -> int:
    """The most requests that workers can serve in time if all their batches are the best there are: a bucket
    that leaks so fast, and holds what leaks within a deadline."""
    per_us = u1_per_s(world, deadline_us) / 1e6
    holds = per_us * (deadline_us - world.out_us - world.back_us)
    served, level, last_us = 0, 0.0, float(times_us[0])
    for at_us in times_us.tolist():
        level = max(0.0, level - per_us * (at_us - last_us))
        last_us = at_us
        if level + 1 <= holds:
            level += 1
            served += 1
    return served


def u1_per_s(world: World, deadline_us: int) -> float:
    """Requests/s that no policy can pass, whatever arrives."""
    left_us = deadline_us - world.out_us - world.back_us
    rates = [
        size / (world.intercept_us + world.slope_us * size)
        for size in range(1, MAX_BATCH + 1)
        if world.intercept_us + world.slope_us * size <= left_us
    ]
    return world.processes * max(rates, default=0.0) * 1e6


def u3(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int = MAX_BATCH) -> int:
    """The most requests that one worker can serve in time, knowing all arrivals.

    `free[j, d]`: the earliest that the worker can be free, the first j considered and d of them given up.
    A batch changes j and not d, so all batches that begin with request j are one operation on a block. Having
    given up more is of use only where the worker is free earlier for it, and being free earlier than the next
    request is there is of no use at all: so of each row only a narrow band matters.
    """
    number = len(times_us)
    ready_us = times_us + world.out_us
    due_us = times_us + deadline_us - world.back_us
    takes_us = np.array([world.takes_us(size) for size in range(1, max_batch + 1)])
    free = np.full((max_batch + 1, number + 1), np.inf)  # a ring of rows: no batch reaches further ahead
    free[0, 0] = -np.inf
    for j in range(number):
        here, after = free[j % len(free)], free[(j + 1) % len(free)]
        low, high = _band(here, ready_us[j])
        np.minimum(after[low + 1 : high + 1], here[low:high], out=after[low + 1 : high + 1])  # j is given up
        sizes = min(max_batch, number - j)
        alone_us = ready_us[j : j + sizes] + takes_us[:sizes]
        sizes = int(np.searchsorted(alone_us, due_us[j], side="right"))  # larger ones are late in any case
        done_us = np.maximum(here[low:high], ready_us[j : j + sizes, None]) + takes_us[:sizes, None]
        done_us[done_us > due_us[j]] = np.inf
        rows = np.arange(j + 1, j + 1 + sizes) % len(free)
        free[rows, low:high] = np.minimum(free[rows, low:high], done_us)
        here[:] = np.inf
    return number - int(np.flatnonzero(free[number % len(free)] < np.inf)[0])


def _band(free_us: np.ndarray, needed_us: float) -> tuple[int, int]:
    """From the fewest given up that are possible, to the fewest with which the worker is free when needed."""
    possible = np.flatnonzero(free_us < np.inf)
    in_time = np.flatnonzero(free_us <= needed_us)
    return int(possible[0]), int(in_time[0] if len(in_time) else possible[-1]) + 1


class Trace(NamedTuple):
    """Requests to learn from, a silence in which whatever waits is served, and those that are judged: so a
    policy begins with an idle worker and an empty queue, as the bound does."""

    arrivals: list[Arrival]
    judged_us: np.ndarray

    @property
    def seconds(self) -> float:
        """From the first judged to the last."""
        return float(self.judged_us[-1] - self.judged_us[0]) / 1e6


def trace_of(point: Point, rate: float, requests: int, seed: int = 1) -> Trace:
    """The same requests for every policy, and for the bound."""
    make, expiration_us = ARRIVALS[point.arrivals], point.deadline_ms * 1000
    learned = list(make(rate, LEARNED * point.workers, seed, expiration_us))
    begins_us = learned[-1].at_us + SILENCE_US
    judged = [
        one._replace(at_us=begins_us + one.at_us) for one in make(rate, requests, seed + 1, expiration_us)
    ]
    return Trace(learned + judged, np.array([one.at_us for one in judged], float))


def goodput(point: Point, make: Callable[[], Decides], trace: Trace) -> float:
    """Of the requests that are judged, those answered in time, per second."""
    outcome = Simulation(make(), world_of(point)).run(trace.arrivals)
    good = sum(arrived_us >= trace.judged_us[0] for arrived_us in outcome.good_arrivals_us)
    return float(good) / trace.seconds


def measure(point: Point, requests: int) -> Figures:
    """Every policy at one point."""
    world, deadline_us, workers = world_of(point), point.deadline_ms * 1000, point.workers
    capacity = u1_per_s(world, deadline_us)
    rate = point.load * capacity
    trace = trace_of(point, rate, max(requests, int(rate * DEADLINES_LONG * point.deadline_ms / 1000)))
    makers = policies(workers, deadline_us)
    good = {name: max(goodput(point, make, trace) for make in those) for name, those in makers.items()}
    most = (u3 if workers == 1 else u1)(trace.judged_us, world, deadline_us)
    return Figures(point, most / trace.seconds, good)


def policies(workers: int, objective_us: int) -> dict[str, list[Callable[[], Decides]]]:
    """Every policy, with each of the delays that it is tried with."""

    def carpool(**settings: object) -> Callable[[], Decides]:
        return lambda: Scheduler(
            ModelSettings.from_mapping({"max_batch_size": MAX_BATCH, **settings}), workers
        )

    def count_or_timeout(delay_ms: float) -> Callable[[], Decides]:
        return lambda: CountOrTimeout(MAX_BATCH, int(delay_ms * 1000))

    return {
        "deferred": [carpool(policy="deferred")],
        "eager": [carpool()],
        "Triton": [carpool(max_queue_delay_ms=ms, preferred_batch_sizes=(64, 128)) for ms in DELAYS_MS],
        "AIMD": [lambda: Aimd(MAX_BATCH, objective_us, workers)],
        "count or timeout": [count_or_timeout(ms) for ms in DELAYS_MS],
    }


class Waits(NamedTuple):
    """What a request takes on average, in ms, by policy; nobody expires."""

    model: tuple[float, float]
    workers: int
    load: float
    mean_ms: dict[str, float]


def wait(model: tuple[float, float], workers: int, load: float, requests: int) -> Waits:
    """The shortest mean of each policy, whatever its delay. `load` is of what full batches would come to."""
    world = World(workers, *model)
    rate = load * workers * MAX_BATCH / world.takes_us(MAX_BATCH) * 1e6
    arrivals = list(poisson(rate, max(requests, int(rate / 2)), 3))
    mean_ms: dict[str, float] = {}
    for name, makers in policies(workers, SLOW_US).items():
        if name != "deferred":  # which is eager where nobody has a deadline
            outcomes = [Simulation(make(), world).run(arrivals) for make in makers]
            mean_ms[name] = min(sum(one.latencies_us) / one.good / 1000 for one in outcomes)
    return Waits(model, workers, load, mean_ms)


def waits_table(results: Sequence[Waits]) -> Iterator[str]:
    """The figures, in Markdown, `eager` as the share by which it is above the shortest."""
    yield "| l(b), ms | workers | load | " + " | ".join(results[0].mean_ms) + " | `eager` over the shortest |"
    yield "|---|---:|---:|" + "---:|" * (len(results[0].mean_ms) + 1)
    for (intercept_us, slope_us), workers, load, mean_ms in results:
        over = mean_ms["eager"] / min(mean_ms.values()) - 1
        cells = " | ".join(f"{one:,.2f} ms" for one in mean_ms.values())
        law = f"{intercept_us / 1000:g} + {slope_us / 1000:g} b"
        yield f"| {law} | {workers} | {load:g} | {cells} | {over:.1%} |"


def table(results: Sequence[Figures]) -> Iterator[str]:
    """The figures, in Markdown."""
    yield "| l(b), ms | workers | deadline | arrivals | load | bound/s | " + " | ".join(POLICIES) + " |"
    yield "|---|---:|---:|---|---:|---:|" + "---:|" * len(POLICIES)
    for point, bound, good in results:
        (intercept_us, slope_us), bound_name = point.model, "U3" if point.workers == 1 else "U1"
        shares = {name: good[name] / bound for name in POLICIES}
        top = max(shares.values())
        cells = [f"**{share:.1%}**" if share == top else f"{share:.1%}" for share in shares.values()]
        yield (
            f"| {intercept_us / 1000:g} + {slope_us / 1000:g} b | {point.workers} | {point.deadline_ms} ms | "
            f"{point.arrivals} | {point.load:g} | {bound_name} {bound:,.0f} | " + " | ".join(cells) + " |"
        )


def plot(results: Sequence[Figures], to: Path) -> None:
    """Share of the bound over load, a panel for each model, number of workers and deadline."""
    import matplotlib as mpl  # noqa: PLC0415 (only --write needs it)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "carpool"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    panels = list(product(MODELS, WORKERS, DEADLINES_MS))
    figure, grid = plt.subplots(2, len(panels) // 2, figsize=(13, 6), sharey=True, layout="constrained")
    for axes, (model, workers, deadline_ms) in zip(grid.flat, panels, strict=True):
        for policy in POLICIES:
            of_policy = [
                (one.point.load, one.good[policy] / one.bound)
                for one in results
                if one.point[:4] == (model, workers, deadline_ms, "Poisson")
            ]
            axes.plot(*zip(*of_policy, strict=True), "o-", ms=3, label=policy)
        bound = "U3" if workers == 1 else "U1"
        law = f"{model[0] / 1000:g} + {model[1] / 1000:g} b ms"
        axes.set_title(f"{law}, {workers} worker{'s' * (workers > 1)}, {deadline_ms} ms", fontsize=9)
        axes.set(xlabel="load", ylabel=f"goodput / {bound}", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    grid.flat[0].legend(frameon=False, fontsize=8)
    figure.savefig(to, metadata={"Date": None})


def summary(results: Sequence[Figures]) -> Iterator[str]:
    """What it comes to."""
    shortfall = [(max(one.good.values()) - one.good["deferred"]) / one.bound for one in results]
    worst = results[int(np.argmax(shortfall))].point
    yield (
        f"`deferred` is the best of these at all {len(results)} points, or at most {max(shortfall):.1%} of "
        f"the bound below it: {worst.words}.\n"
    )
    for workers, bound in ((1, "U3"), (16, "U1")):
        of = {one.point: one.good["deferred"] / one.bound for one in results if one.point.workers == workers}
        loaded = [share for point, share in of.items() if point.load == 0.9]
        name = f"{workers} worker{'s' * (workers > 1)}"
        yield f"- {name}: {min(of.values()):.1%} of {bound} at least, {min(loaded):.1%} at 0.9 load"


def main() -> None:
    """Measure the grid, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=6000, help="at each point")
    parser.add_argument("--write", action="store_true", help="write GOODPUT.md and goodput.svg")
    options = parser.parse_args()
    points = [Point(*one) for one in product(MODELS, WORKERS, DEADLINES_MS, ARRIVALS, LOADS)]
    began_s = time.monotonic()
    results: list[Figures] = []
    tasks = [(point, options.requests) for point in points]
    with multiprocessing.Pool() as pool:
        for one in pool.imap(_measure, tasks):
            results.append(one)
            print(
                f"\r{len(results)} of {len(points)} points, {time.monotonic() - began_s:.0f} s",
                end="",
                file=sys.stderr,
            )
    print(file=sys.stderr)
    lines = [*summary(results), "", *table(results), "", "## Mean latency where there is little to do", ""]
    low = list(product(MODELS, (1, 2, 4, 16), LOW_LOADS, [options.requests]))
    with multiprocessing.Pool() as pool:
        waits = pool.starmap(wait, low, chunksize=1)
    lines += ["Poisson arrivals, no deadlines; each policy with its best delay.", "", *waits_table(waits)]
    print("\n".join(lines))
    if options.write:
        head = ["# Goodput", "", "Written by `.venv/bin/python ops/bench/goodput.py --write`.", ""]
        (HERE / "GOODPUT.md").write_text("\n".join([*head, "![goodput](goodput.svg)", "", *lines, ""]))
        plot(results, HERE / "goodput.svg")


def _measure(task: tuple[Point, int]) -> Figures:
    return measure(*task)


if __name__ == "__main__":
    main()
