"""All workers: which batches their processes have, for how long, and what memory they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.store.workers import WorkerState
from carpool_console.access import console_of, render, viewer
from carpool_console.console import Console

PROCESSES_MAX: Final = 500


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/workers", _workers, methods=["GET"])]


@viewer
def _workers(request: Request) -> Response:
    view = console_of(request).reader.look(workers=True)
    workers = workers_of(view.workers)
    shown, number = [], 0
    for worker in workers:
        if number >= PROCESSES_MAX:
            break
        shown.append(worker)
        number += len(worker.processes)
    return render(
        request,
        "workers.html",
        title="Workers",
        overview=view.overview,
        workers=shown,
        hidden=len(workers) - len(shown),
        without=[row for row in view.overview.rows if not row.figures.model_processes],
    )


def workers_of(workers: Mapping[str, Sequence[WorkerState]]) -> list[WorkerState]:
    """The workers of all models, by model and name: rows that one reads should not move."""
    return [worker for _, of_model in sorted(workers.items()) for worker in of_model]
