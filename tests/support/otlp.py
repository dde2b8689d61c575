"""A collector for tests: takes OTLP over HTTP, and decodes the spans that it gets.

    with Collector() as collector:
        ... CARPOOL_OTLP_ENDPOINT=collector.url ...
        collector.wait_for("process Echo", 3)

One that is made with `answers_after` keeps each request until that event is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.waiting import EVENTUALLY_S, wait_until

Ids = tuple[str, str]  # of a trace and of a span


class SeenLink(NamedTuple):
    to: Ids
    attributes: dict[str, Any]


class SeenSpan(NamedTuple):
    """A span as it was exported. `kind`: as OTLP numbers it. Times in nanoseconds."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[SeenLink]
    events: list[tuple[str, int, dict[str, Any]]]
    is_error: bool
    message: str
    state: str
    schema_url: str

    @property
    def ids(self) -> Ids:
        return self.trace_id, self.span_id

    @property
    def conversation(self) -> str:
        """The correlation ID of its request."""
        return str(self.attributes.get("messaging.message.conversation_id", ""))


class Collector:
    """Its `url` is what --otlp-endpoint takes."""

    def __init__(self, answers_after: threading.Event | None = None) -> None:
        self.spans: list[SeenSpan] = []
        self.bodies = bytearray()  # all that was sent, as it was
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                if answers_after is not None:
                    answers_after.wait()
                collector.bodies += body
                collector.spans += _spans_in(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, *roles: str) -> dict[str, dict[str, str]]:
        """What a Stack gives to services of these roles, or to all."""
        return {
            role: {"CARPOOL_OTLP_ENDPOINT": self.url} for role in roles or ("batcher", "worker", "gateway")
        }

    def of(self, trace_id: str) -> list[SeenSpan]:
        """The spans of a trace so far."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def wait_for(
        self, name: str, number: int = 1, matches: Callable[[SeenSpan], bool] = lambda span: True
    ) -> list[SeenSpan]:
        """Wait for so many spans of this name for which `matches` is true; return all of them."""

        def found() -> list[SeenSpan]:
            return [span for span in list(self.spans) if span.name == name and matches(span)]

        wait_until(
            lambda: len(found()) >= number,
            description=f"{number} spans {name!r}; there are {sorted({span.name for span in self.spans})}",
            timeout_s=EVENTUALLY_S,
        )
        return found()


def _spans_in(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    return [
        _seen(span, _plain(of_resource.resource.attributes).get("service.name", ""), of_scope.schema_url)
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _seen(span: Any, service: str, schema_url: str) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        [SeenLink((link.trace_id.hex(), link.span_id.hex()), _plain(link.attributes)) for link in span.links],
        [(event.name, event.time_unix_nano, _plain(event.attributes)) for event in span.events],
        span.status.code == 2,
        span.status.message,
        span.trace_state,
        schema_url,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
