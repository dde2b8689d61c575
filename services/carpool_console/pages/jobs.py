"""Jobs: what runs, and what became of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool_console.access import RefusedError, console_of, done, operator, render, viewer
from carpool_console.console import Console
from carpool_console.jobs import Job


def routes(console: Console) -> list[Route]:
    """The pages, and how a job is stopped."""
    return [
        Route("/jobs", _all, methods=["GET"]),
        Route("/jobs/{job}", _one, methods=["GET"]),
        Route("/jobs/{job}/stop", _stop, methods=["POST"]),
    ]


@viewer
def _all(request: Request) -> Response:
    return render(request, "jobs.html", title="Jobs", jobs=console_of(request).jobs.all())


@viewer
def _one(request: Request) -> Response:
    state = _job(request).state
    return render(request, "job.html", title=f"{state.title}, {state.model}", job=state)


@operator
def _stop(request: Request) -> Response:
    job = _job(request)
    if not job.state.is_running:
        return done(request, "The job had ended already.", f"/jobs/{job.id}")
    job.stop()
    return done(request, "The job stops after what it does now.", f"/jobs/{job.id}")


def _job(request: Request) -> Job:
    job = console_of(request).jobs.get(request.path_params["job"])
    if job is None:
        raise RefusedError(404, "There is no such job: jobs end with the process that they run in.")
    return job
