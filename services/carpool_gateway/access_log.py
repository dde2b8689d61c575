"""What was answered: counted, and logged."""

from __future__ import annotations

import time
from typing import Final, Protocol

import structlog

from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.spans import CallTrace, GatewaySpans

GONE: Final = 499  # what nginx logs for a client that went away
_OF_CLIENTS: Final = (501, 505)  # what a client asked for that is not there


class Answered(Protocol):
    """What is told of an answer: see `exchange.Exchange`."""

    method: str
    path: str
    route: str
    request_id: str
    model: str
    key_name: str
    started_s: float
    trace: CallTrace | None


class AccessLog:
    """Counts all answers, and logs those that are to be logged: those with 5xx, or all."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        logs_all: bool,
        logs_debug: bool,
        spans: GatewaySpans | None = None,
    ) -> None:
        """`spans`: records those of calls whose traces are recorded; None if none are exported."""
        self.spans = spans
        self._metrics = metrics
        self._log = structlog.get_logger()
        self._logs_all, self._logs_debug = logs_all, logs_debug

    def add(self, answered: Answered, code: int) -> None:
        """Add an answer with this status code, or GONE."""
        took_us = int((time.monotonic() - answered.started_s) * 1e6)
        trace = answered.trace
        if trace is None or self.spans is None:
            self._metrics.count_answer(answered.route, code, took_us)
        else:
            self._metrics.count_answer(answered.route, code, took_us, trace.context)
            self.spans.ended(trace, answered.route, answered.model, code, took_us)
        if code < 500 and not self._logs_all and not self._logs_debug:
            return
        figures = {
            "method": answered.method,
            "path": answered.path,
            "code": code,
            "took_ms": took_us / 1000,
            "request": answered.request_id,
            "model": answered.model,
            "key": answered.key_name,
            **({} if trace is None else trace.context.logged),
        }
        if code >= 500 and code not in _OF_CLIENTS:
            self._log.warning("answered", **figures)
        elif self._logs_all:
            self._log.info("answered", **figures)
        else:
            self._log.debug("answered", **figures)
