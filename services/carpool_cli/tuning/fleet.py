"""Fleets of workers in virtual time: a simulation in which an autoscaler starts and stops them. Pure.

A worker has one model process. It starts for `start_us`, in which it costs and serves nothing. One that is
stopped finishes its batch; those that still start are stopped first. An autoscaler works as Kubernetes' HPA
does, fed by KEDA: every POLL_US it asks how many workers a figure stands for, and ignores a change within a
tenth. It at most doubles them at a time, or adds four. It takes away what was too much for all of
`down_us`. The last worker is KEDA's: it goes if the figure has been 0 for IDLE_US, and comes when it is not.

Fleets differ in the figure:

  wanted    what this project's batchers report, `core.wanted_workers`. It waits by itself before fewer are
            wanted, so `down_us` is 0
  depth     the length of the request stream, XLEN, divided by a target
  pending   batches that were fetched and are not settled, XPENDING, divided by a target
  fixed     always the same number

The lag of a consumer group is none of them: Redis does not know it where entries are deleted, as here, so
that KEDA keeps the smallest number of workers; see the fixed ones.

Why: docs/decisions/0120.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival
from carpool_cli.tuning.simulator import SimulatedBatch, Simulation, SimulationResult, World

OBSERVED_US: Final = 500_000  # how often a batcher finds out how many workers are wanted
POLL_US: Final = 15_000_000
DOWN_US: Final = 300_000_000  # both the stabilisation window of the HPA ...
IDLE_US: Final = 300_000_000  # ... and the cooldown period of KEDA, by default
TOLERANCE: Final = 0.1
WORKERS_MAX: Final = 100  # if the model has no `max_workers`: KEDA's default
_NO_BATCH: Final = SimulatedBatch("", [], 0)


class Figures(NamedTuple):
    """What an autoscaler may ask: what is waiting, batches in flight, and the workers that are wanted."""

    waiting: int
    in_flight: int
    wanted: int


class Fleet(NamedTuple):
    """How a fleet is scaled: by `figure`, of which each worker stands for `target`. `fixed`: not at all, to
    this number. `down_us`: how long it must be too large before it is made smaller."""

    name: str
    figure: Callable[[Figures], float] = lambda figures: 0.0
    target: float = 1.0
    down_us: int = DOWN_US
    fixed: int | None = None


def wanted() -> Fleet:
    """Scaled by what batchers report."""
    return Fleet("wanted", lambda figures: figures.wanted, down_us=0)


def depth(target: int) -> Fleet:
    """Scaled by how many requests wait for each worker."""
    return Fleet(f"depth {target}", lambda figures: figures.waiting, target)


def pending(target: int) -> Fleet:
    """Scaled by how many batches are in flight for each worker."""
    return Fleet(f"pending {target}", lambda figures: figures.in_flight, target)


def fixed(number: int) -> Fleet:
    """Not scaled."""
    return Fleet(f"fixed {number}", fixed=number)


@dataclass(slots=True)
class FleetResult:
    """What became of the requests, and what the fleet cost. `worker_us`: added up over workers, starting ones
    too. `ups`, `downs`: how often their number was raised and lowered."""

    result: SimulationResult
    worker_us: int = 0
    workers_max: int = 0
    ups: int = 0
    downs: int = 0

    @property
    def workers_mean(self) -> float:
        """The mean number of workers."""
        return self.worker_us / max(1, self.result.duration_us)

    @property
    def missed(self) -> float:
        """The share of requests that were late or refused."""
        result = self.result
        return (result.late + result.refused) / max(1, result.requests)


@dataclass(slots=True)
class Autoscaler:
    """One autoscaler at work: how many workers there should be."""

    fleet: Fleet
    workers_min: int
    workers_max: int
    recommended: deque[tuple[int, int]] = field(default_factory=deque)  # times and numbers, lately
    active_us: int = 0

    def decide(self, now_us: int, figures: Figures, current: int) -> int:
        """Of `current` workers, with those that start."""
        fleet = self.fleet
        if fleet.fixed is not None:
            return fleet.fixed
        figure = fleet.figure(figures)
        if figure > 0:
            self.active_us = now_us
        if not current:
            return max(self.workers_min, 1 if figure > 0 else 0)
        if self.workers_min == 0 and now_us - self.active_us >= (IDLE_US if fleet.down_us else 1):
            return 0
        desired = current
        if abs(figure / (fleet.target * current) - 1) > TOLERANCE + 1e-9:
            desired = math.ceil(figure / fleet.target)
        self.recommended.append((now_us, desired))
        while self.recommended[0][0] < now_us - fleet.down_us:
            self.recommended.popleft()
        if desired < current:
            desired = min(current, max(number for _, number in self.recommended))
        desired = min(desired, max(2 * current, current + 4), self.workers_max)
        return max(desired, self.workers_min, 1)


class FleetSimulation(Simulation):
    """Runs one trace through one scheduler and one fleet. `start_us`: how long a worker starts; `poll_us`:
    how often the autoscaler looks."""

    def __init__(
        self,
        fleet: Fleet,
        model: ModelSettings,
        world: World,
        *,
        start_us: int,
        poll_us: int = POLL_US,
        seed: int = 0,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        most = WORKERS_MAX if model.max_workers is None else model.max_workers
        number = max(1, model.min_workers) if fleet.fixed is None else fleet.fixed
        self._fleet_scheduler = scheduler = Scheduler(model, number)
        super().__init__(
            scheduler,
            world._replace(processes=number),
            seed,
            on_progress,
            in_order=model.preserve_ordering,
        )
        self._autoscaler = Autoscaler(fleet, model.min_workers, most)
        self._start_us, self._poll_us = start_us, poll_us
        self._serving = number
        self._starting: list[int] = []  # when each began to
        self._stopping = 0  # of those that execute a batch
        self._counted_us = 0  # up to when workers are counted
        self._has_ended = False  # the trace
        self.fleet = FleetResult(self._result, workers_max=number)

    def run_fleet(self, arrivals: Iterable[Arrival]) -> FleetResult:
        """Simulate until each request has its result. `arrivals` are in order of time."""
        self._schedule(0, self._observe, _NO_BATCH)
        self._schedule(0, self._look, _NO_BATCH)
        self.run(self._until_ended(arrivals))
        self._count(self._result.duration_us)
        return self.fleet

    def _until_ended(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        yield from arrivals
        self._has_ended = True

    # --- looking -------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        scheduler = self._fleet_scheduler
        return not self._has_ended or bool(scheduler.queue.count or scheduler.in_flight.batches)

    def _observe(self, at_us: int, _: SimulatedBatch) -> None:
        """The batcher finds out how many workers are wanted."""
        result = self._result
        self._fleet_scheduler.observe_demand(at_us, self._serving, self._serving, result.late)
        if self._goes_on():
            self._schedule(at_us + OBSERVED_US, self._observe, _NO_BATCH)

    def _look(self, at_us: int, _: SimulatedBatch) -> None:
        """The autoscaler asks, and acts."""
        scheduler = self._fleet_scheduler
        figures = Figures(
            scheduler.queue.count, len(scheduler.in_flight.batches), scheduler.wanted.now.workers
        )
        current = self._serving + len(self._starting)
        desired = self._autoscaler.decide(at_us, figures, current)
        if desired != current:
            self._count(at_us)
            fleet = self.fleet
            fleet.ups += desired > current
            fleet.downs += desired < current
            fleet.workers_max = max(fleet.workers_max, desired)
            for _new in range(desired - current):
                self._start(at_us)
            self._stop(current - desired, at_us)
        if self._goes_on():
            self._schedule(at_us + self._poll_us, self._look, _NO_BATCH)

    # --- workers -------------------------------------------------------------------------------------------

    def _count(self, at_us: int) -> None:
        """Count workers up to now, before their number changes."""
        there = self._serving + len(self._starting) + self._stopping
        self.fleet.worker_us += there * max(0, at_us - self._counted_us)
        self._counted_us = max(at_us, self._counted_us)

    def _start(self, at_us: int) -> None:
        self._starting.append(at_us)
        self._schedule(at_us + self._start_us, self._serve, _NO_BATCH._replace(arrived_us=at_us))

    def _serve(self, at_us: int, started: SimulatedBatch) -> None:
        """A worker has started, unless it was stopped before."""
        if started.arrived_us in self._starting:
            self._count(at_us)
            self._starting.remove(started.arrived_us)
            self._serving += 1
            self._idle_processes += 1
            self._fleet_scheduler.model_processes = self._serving
            self._execute_next(at_us)

    def _stop(self, number: int, at_us: int) -> None:
        for _ in range(number):
            if self._starting:
                self._starting.pop()
                continue
            self._serving -= 1
            if self._idle_processes:
                self._idle_processes -= 1
            else:
                self._stopping += 1
        self._fleet_scheduler.model_processes = self._serving

    def _finish(self, at_us: int, batch: SimulatedBatch) -> None:
        if self._stopping:
            self._count(at_us)
            self._stopping -= 1
            self._idle_processes -= 1  # which `super` adds
        super()._finish(at_us, batch)


def figures_of(fleet: Fleet, outcome: FleetResult) -> dict[str, Any]:
    """The outcome as a JSON object."""
    result = outcome.result
    return {
        "fleet": fleet.name,
        "workers_mean": round(outcome.workers_mean, 2),
        "workers_max": outcome.workers_max,
        "worker_s": round(outcome.worker_us / 1e6),
        "missed": round(outcome.missed, 6),
        "p50_ms": result.latency_ms(0.5),
        "p99_ms": result.latency_ms(0.99),
        "ups": outcome.ups,
        "downs": outcome.downs,
    }
