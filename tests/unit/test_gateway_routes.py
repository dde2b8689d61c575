"""The table of the gateway's routes, and how paths are found in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from carpool_gateway.answers import HttpError
from carpool_gateway.app import routes_of
from carpool_gateway.meter import ROUTES
from carpool_gateway.routes import Route, Router
from carpool_gateway.rpc.server import GrpcServer

TABLE = [*routes_of(*[cast(Any, MagicMock())] * 4)]
ROUTER = Router(TABLE)
HTTP = Path(__file__).parents[2] / "docs" / "http.md"


def calls() -> list[tuple[str, str]]:
    """The paths and routes of all calls of gRPC."""
    found: list[tuple[str, str]] = []

    class Recording:
        def unary(self, path: str, route: str, work: object) -> None:
            found.append((path, route))

        stream = unary

    others = [cast(Any, MagicMock())] * 5
    GrpcServer(cast(Any, Recording()), *others)
    return found


def written(route: Route) -> str:
    """A path of a route, as a client may write it."""
    return route.path.replace("{model}", "eu%2Dcats").replace("{", "").replace("}", "")


def test_metrics_know_the_names_of_all_routes() -> None:
    names = {route.name for route in TABLE}
    of_http = {route for route in ROUTES if not route.startswith("grpc_")}
    # What `infer` becomes, and a completion; messages of a WebSocket; what is found nowhere.
    assert names | {"stream", "v1_stream", "websocket_request", "none"} == of_http
    assert {route for _, route in calls()} | {"grpc_stream_infer"} == set(ROUTES) - of_http


@pytest.mark.parametrize("route", TABLE, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_found_by_its_own_path(route: Route) -> None:
    place = ROUTER.find(written(route))
    assert place.routes[route.method] is route
    assert set(place.parameters) == set(re.findall(r"{(\w+)}", route.path))
    assert place.parameters.get("model", "eu-cats") == "eu-cats"


def test_head_is_possible_wherever_get_is() -> None:
    for route in TABLE:
        methods = ROUTER.find(written(route)).routes
        assert ("HEAD" in methods) == ("GET" in methods)
    assert ROUTER.find("/carpool/v1/models/m/requests/n").allowed == "GET, HEAD, DELETE"


def test_a_slash_at_the_end_means_nothing() -> None:
    assert ROUTER.find("/v2/") == ROUTER.find("/v2")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/carpool/v1/models//infer",
        "/v2/models/m/versions/1/2",
        "/v2//health/live",
        "/x",
        "/v2/models/a%2Fb",
    ],
)
def test_other_paths_are_not_found(path: str) -> None:
    with pytest.raises(HttpError) as caught:
        ROUTER.find(path)
    assert caught.value.code == 404


def test_a_path_must_be_utf_8() -> None:
    with pytest.raises(HttpError) as caught:
        ROUTER.find("/v2/models/%ff")
    assert caught.value.code == 400


def test_a_route_may_not_be_there_twice() -> None:
    with pytest.raises(AssertionError, match="is there twice"):
        Router([TABLE[0], TABLE[0]])


def test_the_document_lists_all_paths() -> None:
    listed = HTTP.read_text()
    for route in TABLE:
        if not route.path.startswith("/v2/"):
            path = route.path.replace("{model}", "MODEL").replace("{id}", "ID")
            assert all(part in listed for part in path.replace("{version}", "VERSION").split("VERSION/"))
