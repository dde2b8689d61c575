"""What the gateway serves over HTTP: the table of its routes, and what is checked for a request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from carpool.errors import CarpoolError
from carpool.service_metrics import VERSION
from carpool.spoken import CHAT, COMPLETIONS, EMBEDDINGS
from carpool_gateway.access_log import GONE, AccessLog
from carpool_gateway.answers import JSON_HEADER, HttpError, allow, http_error_of, method_not_allowed
from carpool_gateway.credentials import ANYBODY, INFER, LOAD, METRICS, Key, KeyRing
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.native.handlers import NativeHandlers
from carpool_gateway.openai.errors import error_answer
from carpool_gateway.openapi import document
from carpool_gateway.probes import Probes
from carpool_gateway.routes import NO_SCOPE, Place, Route, Router
from carpool_gateway.v1.handlers import OpenAIHandlers
from carpool_gateway.v2.control import ControlHandlers
from carpool_gateway.v2.handlers import OpenInferenceHandlers

_MODEL: Final = "/carpool/v1/models/{model}"
_VERSION: Final = "/carpool/v1/models/{model}/versions/{version}"
_V2_MODEL: Final = "/v2/models/{model}"
_V2_VERSION: Final = "/v2/models/{model}/versions/{version}"


def routes_of(
    native: NativeHandlers, v1: OpenAIHandlers, v2: OpenInferenceHandlers, probes: Probes
) -> list[Route]:
    """All routes of the gateway, also that of the OpenAPI document, which describes them."""

    @cache
    def document_of_routes() -> bytes:  # for the first who asks: it takes longer than the rest of the start
        return document(routes, VERSION)

    def describe(exchange: Exchange) -> None:
        exchange.respond(200, JSON_HEADER, document_of_routes())

    routes = [*_routes(native, v2, probes), *_routes_of_openai(v1)]
    routes.append(_get("/openapi.json", "openapi", NO_SCOPE, describe, "This document"))
    return routes


def _routes(native: NativeHandlers, v2: OpenInferenceHandlers, probes: Probes) -> Iterator[Route]:
    for path in (_MODEL, _VERSION):
        post_infer = ("POST", f"{path}/infer", "infer", INFER)
        yield Route(*post_infer, native.handler_for_infer, "A body in, a result out")
        post_many = ("POST", f"{path}/infer_many", "infer_many", INFER)
        yield Route(*post_many, native.handler_for_infer_many, "JSON lines in, a line with each result out")
    kept = (f"{_MODEL}/requests/{{id}}", "requests", INFER)
    yield Route("GET", *kept, native.handler_for_result, "The result of a request that was sent before")
    yield Route("DELETE", *kept, native.handler_for_withdrawal, "Withdraw a request that was sent before")
    models = ("GET", "/carpool/v1/models", "models", INFER)
    yield Route(*models, native.handler_for_models, "The registered models")
    about = "How many workers a model needs now"
    yield _get("/carpool/v1/scale/{model}", "scale", METRICS, native.scaling.answer, about)

    yield _get("/v2", "v2", NO_SCOPE, v2.server_metadata, "What the server is")
    yield _get("/v2/health/live", "v2_health", NO_SCOPE, probes.v2_live, "Whether the gateway works")
    yield _get("/v2/health/ready", "v2_health", NO_SCOPE, probes.v2_ready, "Whether it can serve")
    stats = ("GET", "/v2/models/stats", "v2_stats", INFER)  # before a model of this name
    yield Route(*stats, v2.handler_for_all_statistics, "What became of the requests of all models")
    for path in (_V2_MODEL, _V2_VERSION):
        yield _get(path, "v2_model", INFER, v2.model_metadata, "The inputs and outputs of a model")
        yield _get(f"{path}/config", "v2_config", INFER, v2.model_config, "The settings of a model")
        yield _get(f"{path}/ready", "v2_ready", INFER, v2.model_ready, "Whether a model can be used")
        yield _get(f"{path}/stats", "v2_stats", INFER, v2.model_statistics, "What became of its requests")
        post_infer = ("POST", f"{path}/infer", "v2_infer", INFER)
        yield Route(*post_infer, v2.handler_for_infer, "Tensors in, tensors out")
        generate = ("POST", f"{path}/generate", "v2_generate", INFER)
        yield Route(*generate, v2.handler_for_generate, "Plain JSON in, one response out")
        generate = ("POST", f"{path}/generate_stream", "v2_generate_stream", INFER)
        yield Route(*generate, v2.handler_for_generate_stream, "Plain JSON in, events with responses out")

    yield from _routes_of_control(v2.control)
    stream = (
        "websocket",
        INFER,
        v2.handler_for_stream,
        "A WebSocket: requests of a model, and their responses",
    )
    for path in (_MODEL, _VERSION, _V2_MODEL, _V2_VERSION):
        yield Route("GET", f"{path}/stream", *stream)
    about = "A WebSocket: requests of any model, and their first outputs"
    yield Route("GET", "/models/infer", "websocket_outputs", INFER, v2.handler_for_outputs, about)

    yield _get("/healthz", "healthz", NO_SCOPE, probes.healthz, "Whether the gateway works, as text")
    yield _get("/readyz", "readyz", NO_SCOPE, probes.readyz, "Whether it can serve, as text")
    yield _get("/metrics", "metrics", METRICS, probes.metrics, "Metrics of the gateway, for Prometheus")


def _routes_of_control(control: ControlHandlers) -> Iterator[Route]:
    """To load, unload and list models."""
    models = ("GET", "/v2/models", "v2_models", INFER)
    yield Route(*models, control.handler_for_list, "The names of the models that can be used")
    for repository in ("/v2/repository", "/v2/repository/{repository}"):
        index = ("POST", f"{repository}/index", "v2_index", INFER)
        yield Route(*index, control.handler_for_index, "The states of all models")
        for path in (f"{repository}/models/{{model}}", f"{repository}/models/{{model}}/versions/{{version}}"):
            load = ("POST", f"{path}/load", "v2_load", LOAD)
            yield Route(*load, control.handler_for_load, "Load a model, or another version of it")
            unload = ("POST", f"{path}/unload", "v2_unload", LOAD)
            yield Route(*unload, control.handler_for_unload, "Unload a model")
    load = ("POST", "/v2/workers/{model}/load", "v2_worker_load", LOAD)
    about = "Load a model with parameters; the answer is the name under which it is served"
    yield Route(*load, control.handler_for_worker_load, about)
    unload = ("POST", "/v2/workers/{model}/unload", "v2_worker_unload", LOAD)
    yield Route(*unload, control.handler_for_worker_unload, "Unload one replica of a model")


def _routes_of_openai(v1: OpenAIHandlers) -> Iterator[Route]:
    """The model is in the body of a request, so whether its key is for that is seen later."""
    models = ("GET", "/v1/models", "v1_models", INFER)
    yield Route(*models, v1.handler_for_models, "The models that speak OpenAI's API")
    yield _get("/v1/models/{model}", "v1_model", INFER, v1.model, "A model that speaks OpenAI's API")
    post = ("POST", "/v1/completions", "v1_completions", INFER)
    yield Route(*post, v1.handler_for(COMPLETIONS), "Prompts in, their continuations out")
    post = ("POST", "/v1/chat/completions", "v1_chat", INFER)
    yield Route(*post, v1.handler_for(CHAT), "Messages in, the next one out")
    post = ("POST", "/v1/embeddings", "v1_embeddings", INFER)
    yield Route(*post, v1.handler_for(EMBEDDINGS), "Texts in, vectors out")


def _get(path: str, name: str, scope: str, handler: Handler, about: str) -> Route:
    """A document, for which the headers decide nothing."""
    return Route("GET", path, name, scope, lambda exchange, key: handler, about)


class Gateway:
    """The application of the server. Raises HttpError, which the server answers, wherever a request cannot be
    served."""

    def __init__(self, router: Router, keys: KeyRing, access_log: AccessLog) -> None:
        self._router = router
        self._keys = keys
        self._access_log = access_log

    def on_headers(self, exchange: Exchange) -> None:
        """The headers are complete: find the handler, and whether its caller may use it."""
        path = exchange.path
        if path == "*":
            exchange.handler = _server_wide(exchange)
            return
        if path.startswith("/v1/") or path == "/v1":
            exchange.answer_to_error = error_answer
        place = self._router.find(path)
        route = place.routes.get(exchange.method)
        if route is None:
            exchange.handler = _other_method(exchange, place)
            return
        exchange.route, exchange.parameters = route.name, place.parameters
        key = ANYBODY if route.scope == NO_SCOPE else self._key_for(exchange, route.scope)
        if (spans := self._access_log.spans) is not None:
            exchange.trace = spans.begin(route.name, exchange.headers)
        try:
            exchange.handler = route.handler_for(exchange, key)
        except CarpoolError as error:
            raise http_error_of(error) from None

    def _key_for(self, exchange: Exchange, scope: str) -> Key:
        """The key that a request presents, if it may do this. Raises HttpError."""
        key = self._keys.find(exchange.headers)
        exchange.key_name = key.name
        exchange.model = exchange.parameters.get("model", "")
        key.check(scope, exchange.model)
        return key

    def on_done(self, exchange: Exchange) -> None:
        """Count and log an answer."""
        code = exchange.code if exchange.code and not exchange.is_gone else GONE
        self._access_log.add(exchange, code)


def _other_method(exchange: Exchange, place: Place) -> Handler:
    """The handler of OPTIONS. Raises HttpError (405) for a method that the path does not have."""
    if exchange.method != "OPTIONS":
        raise method_not_allowed(exchange.method, place.allowed)
    return lambda exchange: exchange.respond(204, allow(f"{place.allowed}, OPTIONS"), b"")


def _server_wide(exchange: Exchange) -> Handler:
    """The handler of `OPTIONS *`. Raises HttpError for other methods."""
    if exchange.method == "OPTIONS":
        return lambda exchange: exchange.respond(204, allow("GET, HEAD, POST, DELETE, OPTIONS"), b"")
    raise HttpError(400 if exchange.method != "CONNECT" else 501, "there is no such target")
