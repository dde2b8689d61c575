"""The application: all routes, style sheet and script, and pages for what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from carpool_console import sign_in
from carpool_console.access import RefusedError, render
from carpool_console.console import Console
from carpool_console.meter import NO_ROUTE, ConsoleMetrics
from carpool_console.pages import MODEL_LINKS, NAVIGATION, PAGES
from carpool_console.security import MISTAKE, Guard

STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_EVER: Final = "public, max-age=31536000, immutable"  # its address has a hash of its contents


def make_app(console: Console, metrics: ConsoleMetrics | None = None) -> ASGIApp:
    """The application, with what holds for each answer around it. `metrics` count the answers."""
    files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in _TYPES}
    console.static_version = sha256(b"".join(files.values())).hexdigest()[:12]
    console.navigation, console.model_links = NAVIGATION, MODEL_LINKS

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        kind = _TYPES[Path(name).suffix]
        return Response(files[name], media_type=kind, headers={"cache-control": _FOR_EVER})

    routes = [
        Route("/static/{name}", static, methods=["GET"]),
        *sign_in.routes(console),
        *(route for page in PAGES for route in page.routes(console)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={RefusedError: _refused, HTTPException: _not_found, Exception: _failed},
    )
    app.state.console = console
    return Guard(app) if metrics is None else Guard(app, _counter(metrics, routes))


def _counter(metrics: ConsoleMetrics, routes: list[Route]) -> Callable[[Scope, int, int], None]:
    patterns = {route.endpoint: route.path for route in routes}

    def count(scope: Scope, status: int, took_us: int) -> None:
        endpoint = scope.get("endpoint")
        route = NO_ROUTE if endpoint is None else patterns[endpoint]
        metrics.count_answer(route, status, took_us)

    return count


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    response = render(
        request, "problem.html", title=_titles(error.status), status=error.status, sentence=error.sentence
    )
    if error.status == 413:
        response.headers["connection"] = "close"  # what is left of the form is not read
    return response


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = "There is no such page." if error.status_code == 404 else f"{error.detail}."
    title = _titles(error.status_code)
    response = render(request, "problem.html", title=title, status=error.status_code, sentence=sentence)
    response.headers.update(error.headers or {})
    return response


def _failed(request: Request, _: Exception) -> Response:
    """The exception goes on to `Guard`, which logs it."""
    return render(request, "problem.html", title=_titles(500), status=500, sentence=MISTAKE)


def _titles(status: int) -> str:
    return {
        401: "Signed out",
        403: "Not allowed",
        404: "Not found",
        500: "A mistake",
        503: "Redis is away",
    }.get(status, "Not done")
