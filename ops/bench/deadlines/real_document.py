"""GOODPUT_REAL.md: goodput on the real system, beside bound, virtual time, causes and floods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

from host import STOLEN_MAX

from deadlines import load
from deadlines.flood import FLOODS
from deadlines.load import CAUSES
from deadlines.plans import COUNTED_REQUESTS_MAX, FLOODED_POINTS, LEARNING_S, NO_FLOOD, Plan
from deadlines.points import ARRIVALS, MODELS, Point
from deadlines.runs import BUSY_MAX, LATE_MS_MAX, Run

MARK: Final = "†"
HEAD: Final = f"""\
# Goodput on the real system

Written by `.venv/bin/python ops/bench/goodput.py --real --write`.

Redis, a batcher, a worker with a model process for each of "workers", and one AsyncClient share a machine.
The services use Redis's Unix socket, as those of `carpool up` do, and the client TCP. The model sleeps l(b)
for a batch of b, and is awake for the last 0.15 ms of it. The client sends requests at random, without
waiting for results, each with the deadline as its `timeout`. A load of 1 is the highest rate at which the
model could execute batches that meet the deadline. Bound and virtual time are of the moments at which
requests were really sent: U3 is the exact optimum of one worker that knows them all in advance, U1 what all
workers together could execute in time; neither has any way to the worker and back. "Virtual" is the same
policy, simulated with the default round trip; "predicted" is simulated with the l(b), the transit and the
delays that the batcher reported. Transit has a lognormal distribution through what half and nine of ten
batches took. The delays are the medians of how long the batcher took to read a request, and of how
late it was woken up. The batcher learns for {LEARNING_S:g} s; of what follows at most
{COUNTED_REQUESTS_MAX:,} requests count.
"""
CAUSES_HEAD: Final = f"""\

## Why requests were missed

Shares of all requests. Each cause is found where the answer was given:

```text
{(load.__doc__ or "").split(":", 2)[2].strip(chr(10))}
```
"""
_FLOODED: Final = FLOODED_POINTS[0]
FLOODS_HEAD: Final = f"""\

## Beside a flood

Another producer sends bodies that `validate` refuses, or on which `predict` raises, each without a deadline.
The figures are of the others' requests: {_FLOODED.model} ms, {_FLOODED.deadline_ms} ms, one worker,
{_FLOODED.arrivals}, `deferred`. Runs with and without a flood took turns.
"""


class Cell(NamedTuple):
    """All runs of a plan together: shares of the bound, and of the requests by cause."""

    plan: Plan
    per_s: float
    bound_per_s: float
    virtual: float
    predicted: float
    real: float
    transit_ms: str
    missed: dict[str, float]
    stolen: float
    busy: float
    is_valid: bool

    @property
    def below(self) -> float:
        """How far it is below virtual time, in shares of the bound."""
        return self.virtual - self.real

    @property
    def mark(self) -> str:
        """A mark for figures that say nothing."""
        return "" if self.is_valid else f" {MARK}"


def cells(runs: Sequence[Run]) -> dict[Plan, Cell]:
    """The runs of each plan together; of the valid ones, if there are any. Ordered by points and policies."""
    by_plan: dict[Plan, list[Run]] = {}
    for run in runs:
        by_plan.setdefault(run.plan, []).append(run)
    valid = {plan: [run for run in of_plan if run.is_valid] for plan, of_plan in by_plan.items()}
    return {plan: _cell(plan, valid[plan] or by_plan[plan]) for plan in sorted(by_plan, key=_place)}


def _place(plan: Plan) -> tuple[int, int, int, int, float, str]:
    """The order of the cells in the document. Floods of a point stay in the order in which they were run."""
    point = plan.point
    model, arrivals = [*MODELS].index(point.model), [*ARRIVALS].index(point.arrivals)
    return model, point.workers, point.deadline_ms, arrivals, point.load, plan.policy


def _cell(plan: Plan, runs: Sequence[Run]) -> Cell:
    seconds = sum(run.seconds for run in runs)
    sent, bound = sum(run.sent for run in runs), sum(run.bound for run in runs)
    return Cell(
        plan,
        sent / seconds,
        bound / seconds,
        sum(run.virtual for run in runs) / bound,
        sum(run.predicted for run in runs) / bound,
        sum(run.good for run in runs) / bound,
        " to ".join(f"{max(run.transit_us[at] for run in runs) / 1000:.1f}" for at in (0, 1)),
        {cause: sum(run.missed[cause] for run in runs) / sent for cause in CAUSES},
        max(run.stolen for run in runs),
        max(run.busy for run in runs),
        all(run.is_valid for run in runs),
    )


def body(runs: Sequence[Run]) -> Iterator[str]:
    """The document below its head."""
    by_plan = cells(runs)
    of_points = [cell for plan, cell in by_plan.items() if not plan.flood]
    if of_points:
        seconds = max(run.seconds for run in runs)
        yield f"In each run, the requests that count were sent within {seconds:.0f} s."
        yield from summary(of_points)
        yield from shares(of_points)
        yield from (CAUSES_HEAD, *causes(of_points))
    if any(plan.flood for plan in by_plan):
        yield from (FLOODS_HEAD, *floods(by_plan))
    if any(cell.mark for cell in by_plan.values()):
        yield ""
        yield f"{MARK} The host withheld more than {STOLEN_MAX:.0%} of the CPU time, or the machine was busy"
        yield f"for more than {BUSY_MAX:.0%} of it, or the producer sent half of the requests more than"
        yield f"{LATE_MS_MAX:g} ms late: the figures say nothing about policies."


def summary(of_points: Sequence[Cell]) -> Iterator[str]:
    """The worst of the cells that say something: against the bound, virtual time, the prediction, `eager`."""
    said = {cell.plan: cell for cell in of_points if cell.is_valid}
    yield f"Of {len(of_points)} cells {len(said)} say something. The worst of `deferred` among these:"
    yield ""
    yield (
        "| deadline | workers | least share of the bound | points below virtual time, median | most "
        "| most points from the prediction |"
    )
    yield "|---:|---:|---|---:|---|---|"
    groups: dict[tuple[int, int], list[Cell]] = {}
    for plan, cell in said.items():
        if plan.policy == "deferred":
            groups.setdefault((plan.point.deadline_ms, plan.point.workers), []).append(cell)
    for (deadline_ms, workers), group in sorted(groups.items()):
        yield f"| {deadline_ms} ms | {workers} | {' | '.join(_worst(group))} |"
    gains = [
        (cell.real - said[eager].real, plan.point.description)
        for plan, cell in said.items()
        if plan.policy == "deferred" and (eager := plan._replace(policy="eager")) in said
    ]
    if gains:
        gain, description = min(gains)
        yield ""
        yield f"Against `eager`: {100 * gain:+.1f} points at worst ({description})."
    yield ""


def _worst(group: Sequence[Cell]) -> Iterator[str]:
    """The columns of a summary of cells, each with the cell that is meant."""
    lowest = min(group, key=lambda cell: cell.real)
    below = max(group, key=lambda cell: cell.below)
    wrong = max(group, key=lambda cell: abs(cell.predicted - cell.real))
    yield f"{lowest.real:.1%} ({_in_group(lowest)})"
    yield f"{100 * median(cell.below for cell in group):.1f}"
    yield f"{100 * below.below:.1f} ({_in_group(below)})"
    yield f"{100 * abs(wrong.predicted - wrong.real):.1f} ({_in_group(wrong)})"


def _in_group(cell: Cell) -> str:
    """A cell among those of a deadline and a number of workers."""
    point = cell.plan.point
    return f"{point.model} ms, {point.arrivals}, {point.load:g}"


def shares(of_points: Sequence[Cell]) -> Iterator[str]:
    """Shares of the bound, all policies of a point side by side."""
    policies = list(dict.fromkeys(cell.plan.policy for cell in of_points))
    columns = "".join(f" `{policy}`, virtual | predicted | transit, ms | real |" for policy in policies)
    yield f"| l(b), ms | workers | deadline | arrivals | load | sent/s | bound/s |{columns} busy | stolen |"
    yield "|---|---:|---:|---|---:|---:|---:|" + "---:|" * (4 * len(policies) + 2)
    by_point: dict[Point, dict[str, Cell]] = {}
    for cell in of_points:
        by_point.setdefault(cell.plan.point, {})[cell.plan.policy] = cell
    for point, by_policy in by_point.items():
        first = next(iter(by_policy.values()))
        figures = "".join(
            _figures(by_policy[policy]) if policy in by_policy else " | | | |" for policy in policies
        )
        busy, stolen = (
            max(getattr(cell, name) for cell in by_policy.values()) for name in ("busy", "stolen")
        )
        yield (
            f"| {_columns(point)} | {first.per_s:,.0f} | {point.bound_name} {first.bound_per_s:,.0f} |"
            f"{figures} {busy:.0%} | {stolen:.0%} |"
        )


def _figures(cell: Cell) -> str:
    """Of one policy, as columns."""
    shares = f" {cell.virtual:.1%} | {cell.predicted:.1%} | {cell.transit_ms} |"
    return f"{shares} **{cell.real:.1%}**{cell.mark} |"


def causes(of_points: Sequence[Cell]) -> Iterator[str]:
    """Missed requests by cause, a row for each cell."""
    yield f"| l(b), ms | workers | deadline | arrivals | load | policy | {' | '.join(CAUSES)} |"
    yield "|---|---:|---:|---|---:|---|" + "---:|" * len(CAUSES)
    for cell in of_points:
        missed = " | ".join(f"{cell.missed[cause]:.1%}" for cause in CAUSES)
        yield f"| {_columns(cell.plan.point)} | {cell.plan.policy}{cell.mark} | {missed} |"


def _columns(point: Point) -> str:
    return f"{point.model} | {point.workers} | {point.deadline_ms} ms | {point.arrivals} | {point.load:g}"


def floods(by_plan: dict[Plan, Cell]) -> Iterator[str]:
    """Goodput of the other requests beside each flood, against that without one."""
    yield f"| load | flood | real | difference, points | {' | '.join(CAUSES)} | busy | stolen |"
    yield "|---:|---|---:|---:|" + "---:|" * (len(CAUSES) + 2)
    for plan, cell in by_plan.items():
        if not plan.flood:
            continue
        name, difference = NO_FLOOD, ""
        alone = by_plan.get(plan._replace(flood=NO_FLOOD))
        if plan.flood != NO_FLOOD:
            name = FLOODS[plan.flood].description
            if alone is not None:
                difference = f"{100 * (cell.real - alone.real):+.1f}{alone.mark or cell.mark}"
        missed = " | ".join(f"{cell.missed[cause]:.1%}" for cause in CAUSES)
        yield (
            f"| {plan.point.load:g} | {name} | **{cell.real:.1%}**{cell.mark} | {difference} | {missed} | "
            f"{cell.busy:.0%} | {cell.stolen:.0%} |"
        )
