"""Exports spans with OTLP over HTTP, from a thread of its own.

    record (any thread, never waits) ──▶ a bounded queue ──▶ the thread ──▶ collector

A collector that is slow, dead or full costs nobody anything: what does not fit into the queue is dropped and
counted, and so is what the collector did not take in time. OpenTelemetry's packages are imported when the
export starts, so a process without the setting neither needs nor loads them.

Why: docs/decisions/0119.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import structlog

from carpool.address import without_password
from carpool.service_metrics import VERSION, CommonMetrics
from carpool.settings import CommonSettings
from carpool.tracing import SCHEMA_URL, Context, Link, Span

QUEUE_MAX: Final = 16_384  # links count as well: a batch of 1,024 requests takes 2,049
EXPORTED_TOGETHER: Final = 512  # spans and links in one request to the collector, about
INTERVAL_S: Final = 1.0  # after which what there is, is exported
STOP_S: Final = 2.0  # for what is left at the end
_TRACES_PATH: Final = "/v1/traces"
QUEUE_FULL: Final = "queue_full"
NOT_TAKEN: Final = "not_taken"
REASONS: Final = (QUEUE_FULL, NOT_TAKEN)


class Sink(Protocol):
    """Where spans go, such as OpenTelemetry's exporter. `send` may wait; it returns whether they were taken.
    `close`, from another thread, lets it return soon."""

    def send(self, spans: Sequence[Span]) -> bool: ...
    def close(self) -> None: ...


class SpanExport:
    """The queue and its thread. `on_dropped` is told why and how many spans were dropped, `on_exported` how
    many were taken."""

    def __init__(
        self,
        new_sink: Callable[[], Sink],
        on_exported: Callable[[int], None],
        on_dropped: Callable[[str, int], None],
        *,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._new_sink = new_sink
        self._sink: Sink | None = None
        self._on_exported, self._on_dropped = on_exported, on_dropped
        self._queue: deque[Span] = deque()
        self._queue_max = queue_max
        self._size = 0  # of the queue: spans and links
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._log = structlog.get_logger()
        self._is_failing = False

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def record(self, spans: Sequence[Span]) -> None:
        """Take spans, on any thread. Those that are too many are dropped."""
        size = sum(map(_size_of, spans))
        with self._lock:
            is_full = self._size + size > self._queue_max or self._stopping.is_set()
            if not is_full:
                self._size += size
                self._queue.extend(spans)
        if is_full:
            self._on_dropped(QUEUE_FULL, len(spans))
        elif self._size >= EXPORTED_TOGETHER:
            self._wake.set()

    def stop(self) -> None:
        """Export what is left, for STOP_S at most. What cannot be exported by then is dropped."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            return
        with self._lock:
            left = len(self._queue)
            self._queue.clear()
        if left:
            self._on_dropped(NOT_TAKEN, left)
        if self._sink is not None:
            self._sink.close()
        self._log.warning("spans not exported, the collector takes too long", spans=left)

    def _run(self) -> None:
        sink = self._sink = self._new_sink()
        while True:
            is_last = self._stopping.is_set()
            self._export_all(sink)
            if is_last:
                break
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
        sink.close()

    def _export_all(self, sink: Sink) -> None:
        while spans := self._next():
            try:
                is_taken = sink.send(spans)
            except Exception as error:  # of a library: the next ones may succeed
                self._log.error("spans cannot be exported", kind=type(error).__name__)
                is_taken = False
            if is_taken:
                self._on_exported(len(spans))
            else:
                self._on_dropped(NOT_TAKEN, len(spans))
            if is_taken == self._is_failing:
                self._is_failing = not is_taken
                if self._is_failing:
                    self._log.warning("spans dropped, the collector does not take them")
                else:
                    self._log.info("the collector takes spans again")

    def _next(self) -> list[Span]:
        """The spans of the next request to the collector; none if there are none."""
        spans: list[Span] = []
        size = 0
        with self._lock:
            while self._queue and size < EXPORTED_TOGETHER:
                spans.append(self._queue.popleft())
                size += _size_of(spans[-1])
            self._size -= size
        return spans


def _size_of(span: Span) -> int:
    return 1 + len(span.links)


def start_span_export(settings: CommonSettings, metrics: CommonMetrics, service: str) -> SpanExport | None:
    """Export what is given to `metrics.record_spans` from now on, if the settings name a collector.
    `service`: its name in traces. Raises ValueError if a package is missing."""
    if not settings.otlp_endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-endpoint: the package {error.name} is missing; install Carpool with it: pip install "
            "'PATH[otel]'"
        ) from None
    endpoint = settings.otlp_endpoint.rstrip("/") + _TRACES_PATH
    export = SpanExport(lambda: _OtlpSink(endpoint, service), metrics.spans_exported, metrics.spans_dropped)
    export.start()
    metrics.record_spans = export.record
    structlog.get_logger().info("exporting spans", url=without_password(endpoint))
    return export


class _OtlpSink:
    """OpenTelemetry's exporter. The standard variables OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _COMPRESSION,
    _CERTIFICATE and so on are its own; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are read here."""

    def __init__(self, endpoint: str, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415

        logging.getLogger("opentelemetry").setLevel(
            logging.CRITICAL
        )  # what fails is counted, and logged once
        resource = Resource.create({"service.instance.id": f"{platform.node()}-{os.getpid()}"})
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._translate = _Translation(resource)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._success = SpanExportResult.SUCCESS

    def send(self, spans: Sequence[Span]) -> bool:
        return bool(self._exporter.export([self._translate.span(span) for span in spans]) is self._success)

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Translation:
    """Spans as OpenTelemetry's exporter takes them. They are complete, so that no limit of its SDK, such as
    that of 128 links, applies."""

    def __init__(self, resource: Any) -> None:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.sdk import trace as sdk  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        self._trace, self._sdk, self._resource = trace, sdk, resource
        self._scope = InstrumentationScope("carpool", VERSION, SCHEMA_URL)
        self._flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)

    def span(self, span: Span) -> Any:
        """One span."""
        trace, attributes = self._trace, dict(span.attributes)
        status = trace.Status()
        if span.error:
            attributes["error.type"] = span.error
            status = trace.Status(trace.StatusCode.ERROR)
        return self._sdk.ReadableSpan(
            span.name,
            self._context(span.context),
            None if span.parent is None else self._context(span.parent),
            self._resource,
            attributes,
            [self._sdk.Event(event.name, event.attributes, event.at_us * 1000) for event in span.events],
            [self._link(link) for link in span.links],
            trace.SpanKind[span.kind.upper()],
            status=status,
            start_time=span.start_us * 1000,
            end_time=max(span.start_us, span.end_us) * 1000,
            instrumentation_scope=self._scope,
        )

    def _link(self, link: Link) -> Any:
        return self._trace.Link(self._context(link.context), link.attributes)

    def _context(self, context: Context) -> Any:
        trace = self._trace
        state = trace.TraceState.from_header([context.state]) if context.state else None
        trace_id, span_id = int.from_bytes(context.trace_id), int.from_bytes(context.span_id)
        return trace.SpanContext(trace_id, span_id, False, self._flags, state)
