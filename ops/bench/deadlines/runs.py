"""What a run on the real system showed, beside its bound and virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Self

import numpy as np
from host import STOLEN_MAX, CpuShares

from carpool.model_settings import ModelSettings
from carpool.wire.report import BatcherReport
from carpool_batcher.core.learned.curve import Curve
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import recorded
from carpool_cli.tuning.simulator import Simulation, World, with_transit
from deadlines.bounds import bound
from deadlines.load import CAUSES, Sent
from deadlines.plans import LEARNING_S, Plan
from deadlines.points import Point, world_of

# More, and a run says nothing about policies.
BUSY_MAX: Final = 0.9
LATE_MS_MAX: Final = 5.0  # of half of the requests, when they were sent: the producer lacked CPU time


class Run(NamedTuple):
    """What a run showed: numbers of requests, sent, of the bound, in virtual time, and really good ones.

    `missed`: the others, by cause. `transit_us`: what half and nine of ten batches took in transit;
    `delays_us`: how long the batcher took to read a request, and how late it was woken up: both are medians
    of the batcher's reports. `predicted`: what is good in virtual time with these, and the l(n) that was
    learned. `busy` and `stolen` are shares of the machine's CPU time; `late_ms` is the median
    of how late requests were sent.
    """

    plan: Plan
    seconds: float
    sent: int
    bound: int
    virtual: int
    good: int
    missed: dict[str, int]
    transit_us: tuple[int, int]
    delays_us: tuple[int, int]
    predicted: int
    late_ms: float
    stolen: float
    busy: float

    @property
    def is_valid(self) -> bool:
        """Whether the host withheld little CPU time, some was left, and the producer kept up."""
        return self.stolen <= STOLEN_MAX and self.busy <= BUSY_MAX and self.late_ms <= LATE_MS_MAX

    def to_json(self) -> str:
        """The run as a line of a file."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The run of a line."""
        fields: dict[str, Any] = json.loads(line)
        point, policy, beside = fields.pop("plan")
        for name in ("transit_us", "delays_us"):
            fields[name] = tuple(fields[name])
        return cls(Plan(Point(*point), policy, beside), **fields)


def evaluate(plan: Plan, sent: Sequence[Sent], reports: Sequence[BatcherReport], shares: CpuShares) -> Run:
    """The figures of the requests that count, all for the moments at which they were really sent.

    The bound assumes no way to the worker and back; virtual time the default round trip, and no flood; the
    prediction the transit and the l(n) that the batcher reported meanwhile.
    """
    told = typical(reports)
    point, learning_us, deadline_us = plan.point, 1e6 * LEARNING_S, 1000 * plan.point.deadline_ms
    counted = [request for request in sent if request.at_us >= learning_us]
    times_us = np.array([request.at_us for request in counted], float)
    world = world_of(point)
    best = bound(times_us, world._replace(out_us=0, back_us=0), deadline_us, point.max_batch_size)
    settings = ModelSettings.from_mapping({"max_batch_size": point.max_batch_size, "policy": plan.policy})
    arrivals = list(recorded([request.at_us for request in sent], deadline_us))

    def good_in(simulated: World) -> int:
        result = Simulation(Scheduler(settings, point.workers), simulated).run(arrivals)
        return sum(at_us >= learning_us for at_us in result.good_arrivals_us)

    causes = Counter(request.missed for request in counted)
    return Run(
        plan,
        float(times_us[-1] - times_us[0]) / 1e6,
        len(counted),
        best,
        good_in(world),
        causes[None],
        {cause: causes[cause] for cause in CAUSES},
        told.transit_us,
        told.delays_us,
        good_in(as_told(world, told)),
        median(request.late_us for request in counted) / 1000,
        *shares,
    )


def typical(reports: Sequence[BatcherReport]) -> BatcherReport:
    """The last report with the medians of all for transit, delays and l(n): one report tells of the last 64
    batches, which may be those of a tenth of a second."""
    curves = [Curve(*zip(*report.learned, strict=True)) for report in reports if report.learned]
    sizes = sorted({size for report in reports for size, _ in report.learned})
    return replace(
        reports[-1],
        transit_us=_medians([report.transit_us for report in reports]),
        delays_us=_medians([report.delays_us for report in reports]),
        learned=tuple((size, round(median(curve.at(size) for curve in curves))) for size in sizes),
    )


def _medians(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return round(median(first)), round(median(second))


def as_told(world: World, told: BatcherReport) -> World:
    """This world with the transit, the delays and the l(n) that a batcher has learned."""
    curve = Curve(*zip(*told.learned, strict=True)) if told.learned else world.curve
    return with_transit(world._replace(curve=curve), told)


def read_runs(path: Path) -> list[Run]:
    """The runs that a file keeps; none if there is no file."""
    return [Run.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []
