"""Goodput of each policy as a share of a bound, and the mean latency of each policy at low load.

    .venv/bin/python ops/bench/goodput.py [--requests 6000] [--write]

Goodput is the number of requests per second that are answered OK within their deadline. Simulated in virtual
time, with the production scheduler: Poisson and bursty arrivals, two models whose l(b) is a line with 1 and
16 workers, a logarithm and steps with one worker, deadlines from 15 ms, load from 0.3 to 1.5 of capacity.
Triton's policy and count-or-timeout use the best of several delays at each point. Policies and bounds count
the same requests. No policy can exceed the bounds:

    U1  workers * max b / l(b) requests per second, over the batch sizes b that can meet the deadline. Of the
        requests that arrive in an interval, at most that rate times (the interval plus a deadline)
    U3  the exact offline optimum for one worker and equal deadlines, where all arrivals are known in advance:
        served batches are contiguous blocks, so a dynamic programme over (considered, served) finds it

--write puts the table and the plot into GOODPUT.md and goodput.svg beside this file.
"""

from __future__ import annotations

import argparse
import math
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
from carpool_batcher.core.curve import Curve
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival, Traffic, bursty, poisson
from carpool_cli.tuning.simulator import SchedulerProtocol, Simulation, World

HERE: Final = Path(__file__).parent
EXPLANATION: Final = (
    "Requests answered within their deadline, as a share of a bound that no policy can exceed. U3 is the",
    "exact optimum of one worker that knows all arrivals in advance. U1 is what all workers together could",
    "execute in batches that meet the deadline. A batch of b requests takes l(b). AIMD is the policy of",
    "Clipper (NSDI 2017).",
)
BATCH_SIZE_MAX: Final = 256
WORKERS: Final = (1, 16)
DEADLINES_MS: Final = (15, 50)
LOADS: Final = (0.3, 0.6, 0.9, 1.2, 1.5)
# Short phases, so that a trace has several bursts.
ARRIVALS: Final[dict[str, Traffic]] = {"Poisson": poisson, "bursty": partial(bursty, phase_s=0.1)}
NO_LINE_LOADS: Final = (0.6, 0.9, 1.2)
DELAYS_MS: Final = (0.5, 2, 5, 10, 20)
LOW_LOADS: Final = (0.05, 0.1, 0.2, 0.3)
OBJECTIVE_US: Final = 50_000  # of AIMD, for requests without deadlines
WARM_UP_REQUESTS: Final = 3000  # for each worker, before the requests that count
PAUSE_US: Final = 20_000_000  # between warm-up and the requests that count
TRACE_DEADLINES_MIN: Final = 20  # length of a trace: else much of it could be served after its end
POLICIES: Final = ("deferred", "eager", "Triton", "AIMD", "count or timeout")


class Model(NamedTuple):
    """A model, and what it takes for a batch of b. `name` is l(b) in ms as text."""

    name: str
    l_us: Callable[[int], float]
    max_batch_size: int = 256

    @property
    def curve(self) -> Curve:
        """l(b) at each size."""
        sizes = range(1, self.max_batch_size + 1)
        return Curve(sizes, [self.l_us(size) for size in sizes])


def linear(intercept_us: float, slope_us: float) -> Model:
    """A model whose l(b) is a line."""
    name = f"{intercept_us / 1000:g} + {slope_us / 1000:g} b"
    return Model(name, lambda size: intercept_us + slope_us * size)


def padded(size: int) -> int:
    """The size to which a model pads a batch: 8, 16 or 32."""
    return next(size_padded for size_padded in (8, 16, 32) if size <= size_padded)


# A logarithm, as of the model `square` with what surrounds it, and steps.
SQUARE: Final = Model("0.1 + log(b + 1)", lambda size: 100 + 1000 * math.log(size + 1), 64)
STEPS: Final = Model("4 + 0.25 b, b padded to 8, 16, 32", lambda size: 4000 + 250 * padded(size), 32)
LINES: Final = (linear(5000, 50), linear(2000, 1000))
NO_LINES: Final = (SQUARE, STEPS)
MODELS: Final = {model.name: model for model in (*LINES, *NO_LINES)}


class Point(NamedTuple):
    """A point of the grid. `model` is a name in MODELS."""

    model: str
    workers: int
    deadline_ms: int
    arrivals: str
    load: float

    @property
    def description(self) -> str:
        """The point as text."""
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{self.model} ms, {workers}, {self.deadline_ms} ms, {self.arrivals}, load {self.load:g}"


class Figures(NamedTuple):
    """Goodput of each policy and the bound, in requests/s. The bound is U3 for one worker, else U1."""

    point: Point
    bound: float
    good: dict[str, float]


def world_of(point: Point) -> World:
    """The simulated environment of the scheduler."""
    return World(point.workers, curve=MODELS[point.model].curve)


def u1(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> int:
    """The most requests that workers can serve in time if all batches have the best size.

    A leaky bucket: it leaks at the rate of `u1_per_s`, and holds what leaks within a deadline.
    """
    per_us = u1_per_s(world, deadline_us, max_batch) / 1e6
    bucket_size = per_us * (deadline_us - world.out_us - world.back_us)
    served, level, last_us = 0, 0.0, float(times_us[0])
    for at_us in times_us.tolist():
        level = max(0.0, level - per_us * (at_us - last_us))
        last_us = at_us
        if level + 1 <= bucket_size:
            level += 1
            served += 1
    return served


def u1_per_s(world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> float:
    """Requests/s that no policy can exceed, for any arrivals."""
    execution_us_max = deadline_us - world.out_us - world.back_us
    rates = [
        size / world.execution_us(size)
        for size in range(1, max_batch + 1)
        if world.execution_us(size) <= execution_us_max
    ]
    return world.processes * max(rates, default=0.0) * 1e6


def u3(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> int:
    """The most requests that one worker can serve in time if all arrivals are known in advance.

    `free[j, d]` is the earliest time at which the worker can be idle after the first j requests, of which d
    were given up. A batch changes j and not d, so all batches that begin with request j are one operation on
    a block. Giving up more requests helps only if the worker is idle earlier, and no time before the arrival
    of the next request helps at all: so only a narrow band of each row matters.
    """
    number = len(times_us)
    ready_us = times_us + world.out_us
    due_us = times_us + deadline_us - world.back_us
    execution_us = np.array([world.execution_us(size) for size in range(1, max_batch + 1)])
    free = np.full((max_batch + 1, number + 1), np.inf)  # a ring of rows: no batch is larger
    free[0, 0] = -np.inf
    for j in range(number):
        here, after = free[j % len(free)], free[(j + 1) % len(free)]
        low, high = _band(here, ready_us[j])
        np.minimum(after[low + 1 : high + 1], here[low:high], out=after[low + 1 : high + 1])  # give up j
        sizes = min(max_batch, number - j)
        earliest_us = ready_us[j : j + sizes] + execution_us[:sizes]
        sizes = int(np.searchsorted(earliest_us, due_us[j], side="right"))  # larger batches are always late
        done_us = np.maximum(here[low:high], ready_us[j : j + sizes, None]) + execution_us[:sizes, None]
        done_us[done_us > due_us[j]] = np.inf
        rows = np.arange(j + 1, j + 1 + sizes) % len(free)
        free[rows, low:high] = np.minimum(free[rows, low:high], done_us)
        here[:] = np.inf
    return number - int(np.flatnonzero(free[number % len(free)] < np.inf)[0])


def _band(free_us: np.ndarray, needed_us: float) -> tuple[int, int]:
    """The range of d that matters: from the first possible one to the first that is idle in time."""
    possible = np.flatnonzero(free_us < np.inf)
    in_time = np.flatnonzero(free_us <= needed_us)
    return int(possible[0]), int(in_time[0] if len(in_time) else possible[-1]) + 1


class Trace(NamedTuple):
    """Requests for warm-up, a pause in which the queue becomes empty, and the requests that count.

    So a policy begins with an idle worker and an empty queue, as the bound does.
    """

    arrivals: list[Arrival]
    counted_us: np.ndarray

    @property
    def seconds(self) -> float:
        """From the first request that counts to the last."""
        return float(self.counted_us[-1] - self.counted_us[0]) / 1e6


def trace_of(point: Point, rate: float, requests: int, seed: int = 1) -> Trace:
    """The trace of a point, the same for each policy and for the bound."""
    make, expiration_us = ARRIVALS[point.arrivals], point.deadline_ms * 1000
    warm_up = list(make(rate, WARM_UP_REQUESTS * point.workers, seed, expiration_us))
    begins_us = warm_up[-1].at_us + PAUSE_US
    counted = [
        arrival._replace(at_us=begins_us + arrival.at_us)
        for arrival in make(rate, requests, seed + 1, expiration_us)
    ]
    return Trace(warm_up + counted, np.array([arrival.at_us for arrival in counted], float))


def goodput(point: Point, make: Callable[[], SchedulerProtocol], trace: Trace) -> float:
    """Requests answered in time, per second, of those that count."""
    result = Simulation(make(), world_of(point)).run(trace.arrivals)
    good = sum(arrived_us >= trace.counted_us[0] for arrived_us in result.good_arrivals_us)
    return float(good) / trace.seconds


def grid() -> Iterator[Point]:
    """All points."""
    for model in LINES:
        yield from map(Point._make, product([model.name], WORKERS, DEADLINES_MS, ARRIVALS, LOADS))
    for model in NO_LINES:
        yield from map(Point._make, product([model.name], [1], DEADLINES_MS, ARRIVALS, NO_LINE_LOADS))


def measure(point: Point, requests: int) -> Figures:
    """Goodput of every policy at one point."""
    world, deadline_us, workers = world_of(point), point.deadline_ms * 1000, point.workers
    max_batch = MODELS[point.model].max_batch_size
    capacity = u1_per_s(world, deadline_us, max_batch)
    rate = point.load * capacity
    trace = trace_of(point, rate, max(requests, int(rate * TRACE_DEADLINES_MIN * point.deadline_ms / 1000)))
    makers = policies(workers, deadline_us, max_batch)
    good = {name: max(goodput(point, make, trace) for make in variants) for name, variants in makers.items()}
    bound = (u3 if workers == 1 else u1)(trace.counted_us, world, deadline_us, max_batch)
    return Figures(point, bound / trace.seconds, good)


def policies(
    workers: int, objective_us: int, max_batch: int
) -> dict[str, list[Callable[[], SchedulerProtocol]]]:
    """Every policy, by name, with its variants."""

    def carpool(**settings: object) -> Callable[[], SchedulerProtocol]:
        return lambda: Scheduler(
            ModelSettings.from_mapping({"max_batch_size": max_batch, **settings}), workers
        )

    def count_or_timeout(delay_ms: float) -> Callable[[], SchedulerProtocol]:
        return lambda: CountOrTimeout(max_batch, int(delay_ms * 1000))

    preferred = (max_batch // 4, max_batch // 2)
    return {
        "deferred": [carpool(policy="deferred")],
        "eager": [carpool()],
        "Triton": [carpool(max_queue_delay_ms=ms, preferred_batch_sizes=preferred) for ms in DELAYS_MS],
        "AIMD": [lambda: Aimd(max_batch, objective_us, workers)],
        "count or timeout": [count_or_timeout(ms) for ms in DELAYS_MS],
    }


class MeanLatency(NamedTuple):
    """Mean latency in ms by policy, for requests without deadlines."""

    model: str
    workers: int
    load: float
    mean_ms: dict[str, float]


def mean_latency(model: str, workers: int, load: float, requests: int) -> MeanLatency:
    """The mean latency of each policy, with its best delay. Load 1 is the rate with full batches."""
    world = World(workers, curve=MODELS[model].curve)
    rate = load * workers * BATCH_SIZE_MAX / world.execution_us(BATCH_SIZE_MAX) * 1e6
    arrivals = list(poisson(rate, max(requests, int(rate / 2)), 3))
    mean_ms: dict[str, float] = {}
    for name, makers in policies(workers, OBJECTIVE_US, BATCH_SIZE_MAX).items():
        if name != "deferred":  # which is eager for requests without deadlines
            results = [Simulation(make(), world).run(arrivals) for make in makers]
            mean_ms[name] = min(sum(result.latencies_us) / result.good / 1000 for result in results)
    return MeanLatency(model, workers, load, mean_ms)


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
        bound_name = "U3" if point.workers == 1 else "U1"
        shares = {name: good[name] / bound for name in POLICIES}
        top = max(shares.values())
        cells = [f"**{share:.1%}**" if share == top else f"{share:.1%}" for share in shares.values()]
        yield (
            f"| {point.model} | {point.workers} | {point.deadline_ms} ms | "
            f"{point.arrivals} | {point.load:g} | {bound_name} {bound:,.0f} | " + " | ".join(cells) + " |"
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


def main() -> None:
    """Simulate all points, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=6000, help="number of requests at each point")
    parser.add_argument("--write", action="store_true", help="write GOODPUT.md and goodput.svg")
    options = parser.parse_args()
    points = list(grid())
    started_s = time.monotonic()
    results: list[Figures] = []
    tasks = [(point, options.requests) for point in points]
    with multiprocessing.Pool() as pool:
        for figures in pool.imap(_measure, tasks):
            results.append(figures)
            print(
                f"\r{len(results)} of {len(points)} points, {time.monotonic() - started_s:.0f} s",
                end="",
                file=sys.stderr,
            )
    print(file=sys.stderr)
    lines = [*summary(results), "", *table(results), "", "## Mean latency at low load", ""]
    low = list(product([model.name for model in LINES], (1, 2, 4, 16), LOW_LOADS, [options.requests]))
    with multiprocessing.Pool() as pool:
        latencies = pool.starmap(mean_latency, low, chunksize=1)
    lines += [
        "Poisson arrivals, no deadlines; each policy with its best delay.",
        "",
        *latency_table(latencies),
    ]
    print("\n".join(lines))
    if options.write:
        head = [
            "# Goodput",
            "",
            "Written by `.venv/bin/python ops/bench/goodput.py --write`.",
            "",
            *EXPLANATION,
            "",
        ]
        (HERE / "GOODPUT.md").write_text("\n".join([*head, "![goodput](goodput.svg)", "", *lines, ""]))
        plot(results, HERE / "goodput.svg")


def _measure(task: tuple[Point, int]) -> Figures:
    return measure(*task)


if __name__ == "__main__":
    main()
