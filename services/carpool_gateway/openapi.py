"""The OpenAPI document of the gateway, made of its table of routes. Pure.

The table says which paths and methods there are; CONTENTS what each takes and returns, by the name that it
has in metrics. A route without an entry there is an error at the start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from carpool.keys import MODEL_NAME, MODEL_VERSION
from carpool_gateway.credentials import LOAD, METRICS
from carpool_gateway.routes import NO_SCOPE, Route
from carpool_gateway.schemas import (
    Accepted,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    Error,
    GenerateRequest,
    GenerateResponse,
    Health,
    IndexEntry,
    IndexRequest,
    InferRequest,
    InferResponse,
    LoadRequest,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    Models,
    OpenAIError,
    OpenAIModel,
    OpenAIModels,
    Scalar,
    Scale,
    ServerMetadata,
    Statistics,
    UnloadRequest,
)

JSON: Final = "application/json"
TEXT: Final = "text/plain"
BYTES: Final = "application/octet-stream"
LINES: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"
ANY: Final = "*/*"
_COMPONENT: Final = "#/components/schemas/{name}"
_NAMED: Final = re.compile(r"{(\w+)}")


class Content(NamedTuple):
    """What a route takes and returns: media types, each with the type of its document, or None if it may be
    anything. `responses`: by status code; one without media types has no body."""

    responses: Mapping[int, Mapping[str, Any]]
    request: Mapping[str, Any] | None = None
    needs_body: bool = True


def _json(kind: Any) -> Mapping[int, Mapping[str, Any]]:
    return {200: {JSON: kind}}


_PROBE: Final = Content({200: {TEXT: None}, 503: {TEXT: None}})
_RESULT: Final = {ANY: None}
CONTENTS: Final[Mapping[tuple[str, str], Content]] = {
    ("POST", "infer"): Content(
        {200: {ANY: None, EVENTS: None}, 202: {JSON: Accepted}}, {ANY: None}, needs_body=False
    ),
    ("POST", "infer_many"): Content({200: {LINES: None}}, {ANY: None}, needs_body=False),
    ("GET", "requests"): Content({200: _RESULT, 202: {JSON: Accepted}}),
    ("DELETE", "requests"): Content({204: {}}),
    ("GET", "models"): Content(_json(Models)),
    ("GET", "scale"): Content(_json(Scale)),
    ("GET", "v2"): Content(_json(ServerMetadata)),
    ("GET", "v2_health"): Content({200: {JSON: Health}, 503: {JSON: Health}}),
    ("GET", "v2_model"): Content(_json(ModelMetadata)),
    ("GET", "v2_config"): Content(_json(ModelConfig)),
    ("GET", "v2_ready"): Content(_json(ModelReady)),
    ("GET", "v2_stats"): Content(_json(Statistics)),
    ("POST", "v2_infer"): Content(
        {200: {JSON: InferResponse, BYTES: None}}, {JSON: InferRequest, BYTES: None}
    ),
    ("POST", "v2_generate"): Content({200: {JSON: GenerateResponse}}, {JSON: GenerateRequest}),
    ("POST", "v2_generate_stream"): Content({200: {EVENTS: None}}, {JSON: GenerateRequest}),
    ("POST", "v2_index"): Content(_json(list[IndexEntry]), {JSON: IndexRequest}, needs_body=False),
    ("POST", "v2_load"): Content({200: {}}, {JSON: LoadRequest}, needs_body=False),
    ("POST", "v2_unload"): Content({200: {}}, {JSON: UnloadRequest}, needs_body=False),
    ("POST", "v2_worker_load"): Content({200: {TEXT: None}}, {JSON: dict[str, Scalar]}, needs_body=False),
    ("POST", "v2_worker_unload"): Content({200: {}}, {JSON: None}, needs_body=False),
    ("GET", "v2_models"): Content(_json(Models)),
    ("GET", "v1_models"): Content(_json(OpenAIModels)),
    ("GET", "v1_model"): Content(_json(OpenAIModel)),
    ("POST", "v1_completions"): Content({200: {JSON: Completion, EVENTS: None}}, {JSON: CompletionRequest}),
    ("POST", "v1_chat"): Content({200: {JSON: ChatCompletion, EVENTS: None}}, {JSON: ChatRequest}),
    ("POST", "v1_embeddings"): Content(_json(Embeddings), {JSON: EmbeddingRequest}),
    ("GET", "websocket"): Content({101: {}, 426: {JSON: Error}}),
    ("GET", "websocket_outputs"): Content({101: {}, 426: {JSON: Error}}),
    ("GET", "healthz"): _PROBE,
    ("GET", "readyz"): _PROBE,
    ("GET", "metrics"): Content({200: {TEXT: None, "application/openmetrics-text": None}}),
    ("GET", "openapi"): Content({200: {JSON: None}}),
}
_PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {"type": "string", "pattern": f"^{MODEL_NAME.pattern}$"},
    "version": {"type": "string", "pattern": f"^{MODEL_VERSION.pattern}$"},
    "id": {"type": "string"},
    "repository": {"type": "string"},
}
_SECURITY: Final[Sequence[Mapping[str, Sequence[str]]]] = [{"bearer": []}, {"key": []}]


def document(routes: Sequence[Route], version: str) -> bytes:
    """The document of these routes, in JSON. `version`: Carpool's."""
    types = [kind for content in CONTENTS.values() for kind in _types_of(content)]
    types += [Error, OpenAIError]
    schemas, components = msgspec.json.schema_components(types, ref_template=_COMPONENT)
    schema_of = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Carpool", "version": version, "license": {"name": "Apache-2.0"}},
            "servers": [{"url": "/"}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                },
            },
        }
    )


def _operation(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    content = CONTENTS[route.method, route.name]
    responses: dict[str, Any] = {
        str(code): _body(media, schema_of, "the answer") for code, media in content.responses.items()
    }
    error = OpenAIError if route.path.startswith("/v1/") else Error
    responses["default"] = _body({JSON: error}, schema_of, "an error")
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.about,
        "responses": responses,
        "security": [] if route.scope == NO_SCOPE else [*_SECURITY, {}],
    }
    if route.scope in (LOAD, METRICS):
        operation["description"] = f"The key needs the scope `{route.scope}`."
    if names := _NAMED.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]} for name in names
        ]
    if content.request is not None:
        body = _body(content.request, schema_of, "")["content"]
        operation["requestBody"] = {"content": body, "required": content.needs_body}
    return operation


def _operation_id(route: Route) -> str:
    """A name that no other operation has: of its method and path."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+", route.path) if word]
    return "_".join([route.method.lower(), *words])


def _body(media: Mapping[str, Any], schema_of: Mapping[str, Any], about: str) -> dict[str, Any]:
    described: dict[str, Any] = {"description": about}
    if media:
        described["content"] = {
            name: {} if kind is None else {"schema": schema_of[_key(kind)]} for name, kind in media.items()
        }
    return described


def _types_of(content: Content) -> list[Any]:
    media = [*content.responses.values(), *([content.request] if content.request is not None else [])]
    return [kind for one in media for kind in one.values() if kind is not None]


def _key(kind: Any) -> str:
    return str(kind)
