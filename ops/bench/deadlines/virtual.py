"""Goodput of each policy in virtual time, with the production scheduler; mean latency at low load."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival, poisson
from carpool_cli.tuning.simulator import SchedulerProtocol, Simulation, World
from deadlines.bounds import BATCH_SIZE_MAX, bound, u1_per_s
from deadlines.points import ARRIVALS, DEADLINES_MS, FLAT_LINE, LINE, MODELS, SQUARE, STEPS, Point, world_of
from deadlines.rivals import Aimd, CountOrTimeout

LINES: Final = (FLAT_LINE, LINE)
NO_LINES: Final = (SQUARE, STEPS)
WORKERS: Final = (1, 16)
LOADS: Final = (0.3, 0.6, 0.9, 1.2, 1.5)
NO_LINE_LOADS: Final = (0.6, 0.9, 1.2)
DELAYS_MS: Final = (0.5, 2, 5, 10, 20)
LATENCY_WORKERS: Final = (1, 2, 4, 16)
LOW_LOADS: Final = (0.05, 0.1, 0.2, 0.3)
OBJECTIVE_US: Final = 50_000  # of AIMD, for requests without deadlines
WARM_UP_REQUESTS: Final = 3000  # for each worker, before the requests that count
PAUSE_US: Final = 20_000_000  # between warm-up and the requests that count
TRACE_DEADLINES_MIN: Final = 20  # length of a trace: else much of it could be served after its end
POLICIES: Final = ("deferred", "eager", "Triton", "AIMD", "count or timeout")


class Figures(NamedTuple):
    """Goodput of each policy and the bound, in requests/s. The bound is U3 for one worker, else U1."""

    point: Point
    bound: float
    good: dict[str, float]


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
    max_batch = point.max_batch_size
    capacity = u1_per_s(world, deadline_us, max_batch)
    rate = point.load * capacity
    trace = trace_of(point, rate, max(requests, int(rate * TRACE_DEADLINES_MIN * point.deadline_ms / 1000)))
    makers = policies(workers, deadline_us, max_batch)
    good = {name: max(goodput(point, make, trace) for make in variants) for name, variants in makers.items()}
    best = bound(trace.counted_us, world, deadline_us, max_batch)
    return Figures(point, best / trace.seconds, good)


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


def measure_all(requests: int) -> list[Figures]:
    """Goodput at all points, with progress on stderr."""
    points, started_s = list(grid()), time.monotonic()
    results: list[Figures] = []
    with multiprocessing.Pool() as pool:
        for figures in pool.imap(_measure, [(point, requests) for point in points]):
            results.append(figures)
            progress = f"{len(results)} of {len(points)} points, {time.monotonic() - started_s:.0f} s"
            print(f"\r{progress}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return results


def _measure(task: tuple[Point, int]) -> Figures:
    return measure(*task)


def mean_latencies(requests: int) -> list[MeanLatency]:
    """Mean latencies at low load."""
    tasks = product([model.name for model in LINES], LATENCY_WORKERS, LOW_LOADS, [requests])
    with multiprocessing.Pool() as pool:
        return pool.starmap(mean_latency, list(tasks), chunksize=1)
