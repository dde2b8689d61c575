"""The first page: a row for each model, the worst first."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool_console.access import console_of, render, viewer
from carpool_console.charts import spark
from carpool_console.console import Console
from carpool_console.history import thinned
from carpool_console.trouble import Row, Severity, summary_of

ROWS_MAX: Final = 250
_FILTER_CHARS_MAX: Final = 128
_CURVE_POINTS: Final = 40


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/", _overview, methods=["GET"])]


@viewer
def _overview(request: Request) -> Response:
    overview = console_of(request).reader.overview()
    wanted = request.query_params.get("q", "").strip()[:_FILTER_CHARS_MAX]
    rows = [row for row in overview.rows if wanted.lower() in row.model.lower()]
    shown = rows[:ROWS_MAX]
    return render(
        request,
        "overview.html",
        title="Models",
        overview=overview,
        summary=summary_of(overview.rows),
        troubled=sum(row.severity >= Severity.HURTS for row in overview.rows),
        rows=[(row, _curve(row, overview.read_at_s)) for row in shown],
        hidden=len(rows) - len(shown),
        wanted=wanted,
    )


def _curve(row: Row, now_s: float) -> object:
    points = thinned(row.facts.points, _CURVE_POINTS)
    return spark(points, now_s, [point.out_per_s for point in points], f"requests a second of {row.model}")
