"""The OpenAPI document of the gateway, and its table of routes."""

from __future__ import annotations

import json
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from carpool_gateway.app import routes_of
from carpool_gateway.credentials import METRICS
from carpool_gateway.openapi import CONTENTS, document
from carpool_gateway.routes import NO_SCOPE

TABLE = routes_of(*[cast(Any, MagicMock())] * 4)
DOCUMENT = json.loads(document(TABLE, "0.1.0"))
OPERATIONS = {
    (method, path): operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_document_and_table_have_the_same_routes() -> None:
    assert set(OPERATIONS) == {(route.method.lower(), route.path) for route in TABLE}
    assert set(CONTENTS) == {(route.method, route.name) for route in TABLE}


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    names = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) == names


@pytest.mark.parametrize("route", TABLE, ids=lambda route: f"{route.method} {route.path}")
def test_an_operation_says_what_its_route_is(route: Any) -> None:
    operation = OPERATIONS[route.method.lower(), route.path]
    assert operation["summary"] == route.about
    assert bool(operation["security"]) == (route.scope != NO_SCOPE)
    assert (METRICS in operation.get("description", "")) == (route.scope == METRICS)
    given = {parameter["name"] for parameter in operation.get("parameters", ())}
    assert given == {part[1:-1] for part in route.path.split("/") if part[:1] == "{"}
    error = "OpenAIError" if route.path.startswith("/v1/") else "Error"
    assert operation["responses"]["default"]["content"]["application/json"]["schema"] == {
        "$ref": f"#/components/schemas/{error}"
    }
    assert ("requestBody" in operation) == (route.method == "POST")


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)
