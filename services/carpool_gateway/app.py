"""The routes of the gateway: which handler answers a path and a method, and which scope that needs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from carpool.client.producer import Producer
from carpool.errors import CarpoolError
from carpool.keys import MODEL_NAME
from carpool.prometheus import choose_encoder
from carpool_gateway.answers import JSON_HEADER, HttpError, allow, http_error_of, method_not_allowed
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.inference import Inference, check_encoding
from carpool_gateway.kept import IDEMPOTENCY, KeptRequests, is_later
from carpool_gateway.keys import INFER, METRICS, Key, KeyRing
from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.native.options import wants_stream
from carpool_gateway.oip.documents import check_version, health
from carpool_gateway.open_inference import OpenInference
from carpool_gateway.streaming import Streaming

_TEXT_HEADER: Final = b"content-type: text/plain; charset=utf-8\r\n"
_GONE: Final = 499  # what nginx logs for a client that went away
_OF_CLIENTS: Final = (501, 505)  # what a client asked for that is not there


class Health(Protocol):
    """The health of the gateway: see `carpool.health.Service`."""

    def unhealthy(self) -> Sequence[str]: ...
    def unready(self) -> Sequence[str]: ...
    def warnings(self) -> Sequence[str]: ...


class Gateway:
    """The routes. Raises HttpError, which the server answers, wherever a request cannot be served."""

    def __init__(
        self,
        producer: Producer,
        inference: Inference,
        streaming: Streaming,
        open_inference: OpenInference,
        kept: KeptRequests,
        keys: KeyRing,
        metrics: GatewayMetrics,
        health: Health,
        *,
        logs_all: bool,
        logs_debug: bool,
    ) -> None:
        self._producer = producer
        self._inference = inference
        self._kept = kept
        self._streaming = streaming
        self._v2 = open_inference
        self._keys = keys
        self._metrics = metrics
        self._health = health
        self._log = structlog.get_logger()
        self._logs_all, self._logs_debug = logs_all, logs_debug
        self._fixed: Mapping[str, Callable[[Exchange], Handler]] = {
            "/healthz": self._accept_healthz,
            "/readyz": self._accept_readyz,
            "/metrics": self._accept_metrics,
            "/carpool/v1/models": self._accept_models,
        }

    # --- called by the server ------------------------------------------------------------------------------

    def accept(self, exchange: Exchange) -> None:
        """The headers are complete: find the handler, and whether its caller may use it."""
        try:
            exchange.handler = self._route(exchange)
        except CarpoolError as error:
            raise http_error_of(error) from None

    def on_done(self, exchange: Exchange) -> None:
        """Count and log an answer."""
        code = exchange.code if exchange.code and not exchange.is_gone else _GONE
        took_us = int((time.monotonic() - exchange.started_s) * 1e6)
        self._metrics.count_answer(exchange.route, code, took_us)
        if code < 500 and not self._logs_all and not self._logs_debug:
            return
        figures = {
            "method": exchange.method,
            "path": exchange.path,
            "code": code,
            "took_ms": took_us / 1000,
            "request": exchange.request_id,
            "model": exchange.model,
            "key": exchange.key_name,
        }
        if code >= 500 and code not in _OF_CLIENTS:
            self._log.warning("answered", **figures)
        elif self._logs_all:
            self._log.info("answered", **figures)
        else:
            self._log.debug("answered", **figures)

    # --- routes --------------------------------------------------------------------------------------------

    def _route(self, exchange: Exchange) -> Handler:
        fixed = self._fixed.get(exchange.path)
        if fixed is not None:
            _check_method(exchange, "GET, HEAD")
            return _options if exchange.method == "OPTIONS" else fixed(exchange)
        if exchange.path == "*":
            if exchange.method == "OPTIONS":
                return _options
            raise HttpError(400 if exchange.method != "CONNECT" else 501, "there is no such target")
        match exchange.segments():
            case ["carpool", "v1", "models", model, ("infer" | "infer_many") as call]:
                _check_method(exchange, "POST")
                return _options if exchange.method == "OPTIONS" else self._accept_infer(exchange, model, call)
            case ["v2"] | ["v2", ""]:
                return self._document(exchange, "v2", self._v2.server_metadata)
            case ["v2", "health", ("live" | "ready") as which]:
                return self._document(
                    exchange, "v2_health", self._answer_live if which == "live" else self._answer_ready
                )
            case ["v2", "models", "stats"]:
                handler = self._document(exchange, "v2_stats", self._v2.all_statistics)
                exchange.extra = exchange.extra or self._key_for(exchange, INFER)
                return handler
            case ["v2", "repository", "index"]:
                return self._accept_index(exchange)
            case ["v2", "models", model, *rest]:
                return self._route_v2(exchange, model, rest)
            case ["carpool", "v1", "models", model, "requests", name]:
                _check_method(exchange, "GET, HEAD, DELETE")
                return _options if exchange.method == "OPTIONS" else self._accept_kept(exchange, model, name)
            case _:
                raise HttpError(404, "there is nothing here; docs/http.md lists what there is")

    def _accept_infer(self, exchange: Exchange, model: str, call: str) -> Handler:
        exchange.route = call
        key = self._key_for(exchange, INFER, model)
        later, is_once = is_later(exchange), IDEMPOTENCY in exchange.headers
        exchange.extra = self._inference.accept(exchange, model, key, is_later=later)
        is_stream = wants_stream(exchange.headers)
        if (later or is_once) and (is_stream or call != "infer"):
            raise HttpError(400, "Idempotency-Key and Prefer: respond-async are for a single result")
        if call != "infer":
            return self._inference.infer_many
        if is_stream:
            exchange.route = "stream"
            return self._streaming.infer
        return self._kept.infer if later or is_once else self._inference.infer

    def _route_v2(self, exchange: Exchange, model: str, rest: list[str]) -> Handler:
        match rest:
            case ["versions", version, *rest]:
                check_version(model, version)
        match rest:
            case [] | [""]:
                return self._document(exchange, "v2_model", self._v2.model_metadata, model)
            case ["config"]:
                return self._document(exchange, "v2_config", self._v2.model_config, model)
            case ["ready"]:
                return self._document(exchange, "v2_ready", self._v2.model_ready, model)
            case ["stats"]:
                return self._document(exchange, "v2_stats", self._v2.model_statistics, model)
            case ["infer"]:
                _check_method(exchange, "POST")
                if exchange.method == "OPTIONS":
                    return _options
                exchange.route = "v2_infer"
                self._v2.accept(exchange, self._key_for(exchange, INFER, model))
                return self._v2.infer
            case _:
                raise HttpError(404, "there is nothing here; docs/http.md lists what there is")

    def _accept_index(self, exchange: Exchange) -> Handler:
        _check_method(exchange, "POST")
        if exchange.method == "OPTIONS":
            return _options
        check_encoding(exchange)
        exchange.route = "v2_index"
        exchange.extra = self._key_for(exchange, INFER)
        return self._v2.repository_index

    def _document(self, exchange: Exchange, route: str, handler: Handler, model: str = "") -> Handler:
        """A document to GET: of a model for whoever may use it, others for everybody."""
        _check_method(exchange, "GET, HEAD")
        if exchange.method == "OPTIONS":
            return _options
        exchange.route = route
        if model:
            self._key_for(exchange, INFER, model)
        return handler

    def _answer_live(self, exchange: Exchange) -> None:
        self._answer_health(exchange, is_ready=not self._health.unready(), is_asked_for_ready=False)

    def _answer_ready(self, exchange: Exchange) -> None:
        self._answer_health(exchange, is_ready=not self._health.unready(), is_asked_for_ready=True)

    def _answer_health(self, exchange: Exchange, *, is_ready: bool, is_asked_for_ready: bool) -> None:
        is_live = not self._health.unhealthy()
        is_well = is_ready if is_asked_for_ready else is_live
        exchange.respond(200 if is_well else 503, JSON_HEADER, health(live=is_live, ready=is_ready))

    def _accept_kept(self, exchange: Exchange, model: str, name: str) -> Handler:
        exchange.route = "requests"
        exchange.extra = (name, self._key_for(exchange, INFER, model))
        return self._kept.withdraw if exchange.method == "DELETE" else self._kept.get

    def _key_for(self, exchange: Exchange, scope: str, model: str = "") -> Key:
        """The key that a request presents, if it may do this. Raises HttpError."""
        key = self._keys.find(exchange.headers)
        exchange.key_name = key.name
        if model and not MODEL_NAME.fullmatch(model):
            raise HttpError(404, "there is no model of such a name")
        exchange.model = model
        key.check(scope, model)
        return key

    # --- health, metrics, models ---------------------------------------------------------------------------

    def _accept_healthz(self, exchange: Exchange) -> Handler:
        exchange.route = "healthz"
        return lambda exchange: _answer_probe(exchange, self._health.unhealthy(), ())

    def _accept_readyz(self, exchange: Exchange) -> Handler:
        exchange.route = "readyz"
        return lambda exchange: _answer_probe(exchange, self._health.unready(), self._health.warnings())

    def _accept_metrics(self, exchange: Exchange) -> Handler:
        exchange.route = "metrics"
        self._key_for(exchange, METRICS)
        return self._answer_metrics

    def _answer_metrics(self, exchange: Exchange) -> None:
        encode, content_type = choose_encoder(exchange.header(b"accept"))
        exchange.respond(200, f"content-type: {content_type}\r\n".encode(), encode(self._metrics.registry))

    def _accept_models(self, exchange: Exchange) -> Handler:
        exchange.route = "models"
        exchange.extra = self._key_for(exchange, INFER)
        return self._answer_models

    async def _answer_models(self, exchange: Exchange) -> None:
        names = [name for name in await self._producer.models() if exchange.extra.is_for(name)]
        exchange.respond(200, JSON_HEADER, json.dumps({"models": names}).encode() + b"\n")


def _check_method(exchange: Exchange, allowed: str) -> None:
    """Raise HttpError (405) unless the path has the method, or OPTIONS, which asks for them."""
    if exchange.method == "OPTIONS":
        exchange.extra = f"{allowed}, OPTIONS"
    elif exchange.method not in allowed.split(", "):
        raise method_not_allowed(exchange.method, allowed)


def _options(exchange: Exchange) -> Coroutine[Any, Any, None] | None:
    exchange.respond(204, allow(exchange.extra or "GET, HEAD, POST, DELETE, OPTIONS"), b"")
    return None


def _answer_probe(exchange: Exchange, problems: Sequence[str], warnings: Sequence[str]) -> None:
    lines = problems or ["ok", *(f"warning: {warning}" for warning in warnings)]
    exchange.respond(503 if problems else 200, _TEXT_HEADER, "\n".join([*lines, ""]).encode())
