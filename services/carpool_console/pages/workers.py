"""All workers: which batches their processes have, for how long, and what memory they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool_console.access import console_of, render, viewer
from carpool_console.console import Console
from carpool_console.processes import Process

PROCESSES_MAX: Final = 500


class Worker(NamedTuple):
    """A worker and those of its processes that are alive."""

    name: str
    model: str
    processes: Sequence[Process]

    @property
    def since_s(self) -> float | None:
        """For how long it serves; None if it does not tell."""
        return self.processes[0].since_s


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/workers", _workers, methods=["GET"])]


@viewer
def _workers(request: Request) -> Response:
    view = console_of(request).reader.look(processes=True)
    workers = workers_of(view.processes)
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


def workers_of(processes: Mapping[str, Sequence[Process]]) -> list[Worker]:
    """The workers of all models, by model and name: rows that one reads should not move."""
    found = []
    for model, of_model in sorted(processes.items()):
        ordered = sorted(of_model, key=lambda process: (process.worker, process.name))
        for name, of_worker in groupby(ordered, key=lambda process: process.worker):
            found.append(Worker(name, model, list(of_worker)))
    return found
