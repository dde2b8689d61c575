"""The page of one model: why requests wait, what failed, what its batches were like, who executes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.figures import Figures, Requests
from carpool.wire.detail import ModelDetail
from carpool.wire.registration import decode_parameters
from carpool.wire.report import VersionReport
from carpool_console.access import RefusedError, console_of, render, viewer
from carpool_console.charts import Curve, Spark, latency_curve, spark
from carpool_console.console import Console
from carpool_console.formats import duration, milliseconds, number, plural, rate
from carpool_console.trouble import Row

CURVE_SCALE: Final = 2
BATCHES_MAX: Final = 16
REASONS: Final[Mapping[str, str]] = {
    "full": "the batch was full",
    "preferred": "it reached one of preferred_batch_sizes",
    "deadline": "a request would have expired",
    "efficient": "waiting would not raise throughput",
    "delay": "max_queue_delay_ms had passed",
    "idle": "a model process was free",
}
CAUSES: Final[Mapping[str, str]] = {
    "early": "refused, because it was not expected to be in time",
    "waiting": "its deadline passed before it was dispatched",
    "dispatched_late": "less than l(n) was left when its batch could begin",
    "computed_long": "the model took longer than was left",
    "delivered_late": "executed in time; its way to the worker and back took too long",
}


class Version(NamedTuple):
    """A version of the model. Times are means since the batcher became active, None without any."""

    name: str
    share: int | None
    report: VersionReport
    latency_s: float | None
    execution_s: float | None


class Count(NamedTuple):
    """Requests that ended in one way."""

    name: str
    meaning: str
    last_minute: int
    total: int


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/models/{model}", _model, methods=["GET"])]


@viewer
def _model(request: Request) -> Response:
    name = request.path_params["model"]
    view = console_of(request).reader.look(name)
    row = view.overview.row(name)
    if row is None:
        if not view.overview.read_at_s:
            raise RefusedError(503, f"Redis has not been read yet. {view.overview.error}")
        raise RefusedError(404, f"No model is registered under the name {name:.128}.")
    details = view.details.get(name)
    detail = details.detail if details is not None else None
    shares = details.shares if details is not None else {}
    return render(
        request,
        "model.html",
        title=name,
        overview=view.overview,
        row=row,
        facts=_facts(row),
        details=details,
        detail=detail,
        batches=detail.batches[:BATCHES_MAX] if detail is not None else (),
        workers=view.workers.get(name, ()),
        curves=_curves(row, view.overview.read_at_s),
        latency=_latency(row.figures, detail),
        learned=_learned(row.figures, detail),
        reasons=REASONS,
        ends=_ends(row),
        lately="Last minute" if row.facts.minute.over_s > 50 else f"Last {duration(row.facts.minute.over_s)}",
        versions=_versions(row.figures, shares),
        parameters=decode_parameters(details.registration) if details is not None else {},
    )


def _facts(row: Row) -> list[tuple[str, str]]:
    """Figures with their names. Those of a stepping model differ."""
    figures = row.figures
    oldest = f", the oldest for {duration(figures.oldest_s)}" if figures.oldest_s else ""
    requests = figures.requests_in_flight
    of_requests = f" with {plural(requests, 'request')}" if requests is not None else ""
    came = f"{rate(row.facts.in_per_s)}/s" if row.facts.in_per_s is not None else "unknown"
    rates = f"{came} in, {rate(figures.requests_per_s)}/s out"
    found = [
        ("Waiting", f"{number(figures.waiting)}{oldest}"),
        ("Requests", rates),
        ("In flight", f"{plural(figures.batches_in_flight, 'batch', 'batches')}{of_requests}"),
        ("Processes", _processes(figures, row.facts.draining)),
    ]
    if figures.fill is not None:
        shares = ", ".join(f"{reason} {share:.0%}" for reason, share in figures.reasons.items())
        found.append(("Batches", f"{rate(figures.batches_per_s)}/s, {figures.fill:.0%} full; {shares}"))
    if figures.p50_ms is not None:
        latency = f"half within {milliseconds(figures.p50_ms)}, 99% within {milliseconds(figures.p99_ms)}"
        found.append(("Latency", f"{latency}, from arrival to result"))
    found += _of_steps(figures)
    found += _of_sequences(figures)
    if figures.withheld:
        found.append(("Withheld", f"{number(figures.withheld)} results, until those before are delivered"))
    if figures.memory is not None:
        found.append(("Memory", f"{figures.memory.total / 2**20:,.0f} MiB in all processes"))
    if figures.policy:
        found.append(("Policy", figures.policy))
    if figures.active_s is not None:
        since = f"active for {duration(figures.active_s)}; totals count since then"
        found.append(("Batcher", since))
    return found


def _processes(figures: Figures, draining: int) -> str:
    parts = [number(figures.model_processes)]
    parts += [f"{draining} drain"] if draining else []
    parts += ["a worker is loading the model"] if figures.loading else []
    return ", ".join(parts)


def _of_steps(figures: Figures) -> list[tuple[str, str]]:
    stepping = figures.stepping
    if stepping is None:
        return []
    first = f"half within {milliseconds(stepping.first_chunk_p50_ms)}"
    first += f", 99% within {milliseconds(stepping.first_chunk_p99_ms)}"
    gaps = f"half {milliseconds(stepping.chunk_gap_p50_ms)}, 99% {milliseconds(stepping.chunk_gap_p99_ms)}"
    used = f"{number(stepping.slots_in_use)} of {number(stepping.slots)} in use"
    return [
        ("Slots", f"{used}, {number(stepping.prefetched)} requests wait for one at a process"),
        ("Chunks", f"{rate(stepping.chunks_per_s)}/s; between two of a stream: {gaps}"),
        ("First chunk", f"{first}, of streams that ended lately"),
    ]


def _of_sequences(figures: Figures) -> list[tuple[str, str]]:
    sequences = figures.sequences
    if sequences is None:
        return []
    of_slots = f" of {number(sequences.slots)} slots" if sequences.slots is not None else ""
    waiting = f", {number(sequences.waiting_to_start)} wait to start" if sequences.waiting_to_start else ""
    counts = {"started": sequences.started, "ended": sequences.ended, "broken": sequences.broken}
    totals = ", ".join(f"{number(count.total)} {name}" for name, count in counts.items())
    return [("Sequences", f"{number(sequences.kept)}{of_slots} kept{waiting}; {totals}")]


def _curves(row: Row, now_s: float) -> list[tuple[str, str, Spark]]:
    """The last ten minutes: what is shown, its largest value, and the curve."""
    points = row.facts.points
    kinds: list[tuple[str, list[float], Any]] = [
        ("Requests out a second", [point.out_per_s for point in points], rate),
        ("Waiting requests", [float(point.waiting) for point in points], number),
        ("Age of the oldest request", [point.oldest_s for point in points], duration),
        ("Latency, p99", [point.p99_ms or 0.0 for point in points], milliseconds),
    ]
    return [
        (title, shown(max(values, default=0)), spark(points, now_s, values, title, scale=CURVE_SCALE))
        for title, values, shown in kinds
    ]


def _learned(figures: Figures, detail: ModelDetail | None) -> list[tuple[int, float, float]]:
    """l(n): sizes, the time of half of the batches, and that of nine of ten, in seconds. Without a detail
    only the first is known."""
    if detail is not None and detail.learned:
        return [(point.size, point.time_us / 1e6, point.at_most_us / 1e6) for point in detail.learned]
    return [(size, time_ms / 1e3, time_ms / 1e3) for size, time_ms in figures.learned.items()]


def _latency(figures: Figures, detail: ModelDetail | None) -> Curve | None:
    return latency_curve(_learned(figures, detail), duration)


def _ends(row: Row) -> list[tuple[str, str, list[Count]]]:
    """How requests ended that did not succeed in time: heading, what the table is of, and its rows."""
    figures, minute = row.figures, row.facts.minute

    def counts(
        totals: Mapping[str, Requests], lately: Mapping[str, int], meanings: Mapping[str, str]
    ) -> list[Count]:
        return [
            Count(name.replace("_", " "), meanings.get(name, ""), lately.get(name, 0), of.total)
            for name, of in totals.items()
        ]

    tables = [
        ("Missed deadlines", "Cause", counts(figures.missed, minute.missed, CAUSES)),
        ("Refused requests", "Status and reason", counts(figures.refused, minute.refused, {})),
        ("Failed requests", "Status", counts(figures.failed, minute.failed, {})),
    ]
    return [table for table in tables if table[2]]


def _versions(figures: Figures, shares: Mapping[str, int]) -> Sequence[Version]:
    if len(figures.versions) < 2 and not shares:
        return ()
    return [
        Version(
            name,
            shares.get(name),
            report,
            report.total_us / report.requests / 1e6 if report.requests else None,
            report.compute_us / report.batches / 1e6 if report.batches else None,
        )
        for name, report in sorted(figures.versions.items())
    ]
