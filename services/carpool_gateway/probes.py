"""Health and metrics: what probes of an orchestrator, Prometheus and clients ask of the gateway itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from carpool.prometheus import choose_encoder
from carpool_gateway.answers import JSON_HEADER
from carpool_gateway.exchange import Exchange
from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.oip.documents import health

_TEXT_HEADER: Final = b"content-type: text/plain; charset=utf-8\r\n"


class Health(Protocol):
    """The health of the gateway: see `carpool.health_server.Service`."""

    def unhealthy(self) -> Sequence[str]: ...
    def unready(self) -> Sequence[str]: ...
    def warnings(self) -> Sequence[str]: ...


class Probes:
    """Answers exchanges about the gateway itself."""

    def __init__(self, service: Health, metrics: GatewayMetrics) -> None:
        self._service = service
        self._metrics = metrics

    def healthz(self, exchange: Exchange) -> None:
        """Whether the process works, as text."""
        _answer(exchange, self._service.unhealthy(), ())

    def readyz(self, exchange: Exchange) -> None:
        """Whether it can serve, as text."""
        _answer(exchange, self._service.unready(), self._service.warnings())

    def v2_live(self, exchange: Exchange) -> None:
        """Whether the process works, as `/v2` says it."""
        self._answer_v2(exchange, self._service.unhealthy())

    def v2_ready(self, exchange: Exchange) -> None:
        """Whether it can serve, as `/v2` says it."""
        self._answer_v2(exchange, self._service.unready())

    def _answer_v2(self, exchange: Exchange, problems: Sequence[str]) -> None:
        document = health(live=not self._service.unhealthy(), ready=not self._service.unready())
        exchange.respond(503 if problems else 200, JSON_HEADER, document)

    def metrics(self, exchange: Exchange) -> None:
        """The metrics, in the format that is asked for."""
        encode, content_type = choose_encoder(exchange.header(b"accept"))
        exchange.respond(200, f"content-type: {content_type}\r\n".encode(), encode(self._metrics.registry))


def _answer(exchange: Exchange, problems: Sequence[str], warnings: Sequence[str]) -> None:
    lines = problems or ["ok", *(f"warning: {warning}" for warning in warnings)]
    exchange.respond(503 if problems else 200, _TEXT_HEADER, "\n".join([*lines, ""]).encode())
