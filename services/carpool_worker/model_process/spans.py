"""Spans of executions, and those that a model makes: from its process to the worker, which exports them.

    from opentelemetry import trace
    with trace.get_tracer(__name__).start_as_current_span("tokenize"): ...

A model's own spans are children of the span `predict MODEL` of their batch, which is current in `predict`;
without one nothing is recorded. A model process exports nothing itself. So no thread of an exporter competes
with the model, none is lost in a fork, and a collector that does not answer cannot keep the process from
ending.

Texts of exceptions, which may quote a body, are left out. A model that sets up OpenTelemetry itself keeps
what it set up, and exports by itself.

Why: docs/decisions/0119.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from carpool.shown import shortened
from carpool.tracing import INTERNAL, Attribute, Context, Event, Link, Span, operation, read_context

WAITING_MAX: Final = 1024  # spans that the worker has not got yet
ATTRIBUTES_MAX: Final = 32  # of a span
ATTRIBUTES_OF_EVENT_MAX: Final = 8  # or of a link
LINKS_MAX: Final = 32
EVENTS_MAX: Final = 32
TEXT_CHARS_MAX: Final = 500
NAME_CHARS_MAX: Final = 100
_TEXTS_OF_EXCEPTIONS: Final = ("exception.message", "exception.stacktrace")


class SpanBuffer:
    """What was recorded and not sent. Any thread may add to it."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._dropped = 0

    @property
    def has_news(self) -> bool:
        """Whether something is to be sent."""
        return bool(self._spans)

    def add(self, span: Span) -> None:
        """Take a span, unless there are too many."""
        if len(self._spans) >= WAITING_MAX:
            self.drop()
        else:
            self._spans.append(span)

    def drop(self) -> None:
        """A span is not recorded."""
        self._dropped += 1

    def take(self) -> tuple[list[Span], int]:
        """All that is to be sent, and how many were dropped since the last time."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        dropped, self._dropped = self._dropped, 0
        return spans, dropped


SPANS: Final = SpanBuffer()


def record_spans_of_model() -> None:
    """Have spans of the model recorded, if its worker exports spans and the model has set up nothing itself.
    To be called once the model is loaded."""
    if not os.environ.get("CARPOOL_MODEL_SPANS"):
        return
    from opentelemetry import trace  # noqa: PLC0415 (only where spans are exported)
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased  # noqa: PLC0415

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return

    class ToBuffer(SpanProcessor):
        def on_end(self, span: Any) -> None:
            try:
                SPANS.add(_span_of(span))
            except Exception:  # an attribute may be of any class: the model must not fail of it
                SPANS.drop()

    sampler, resource = ParentBased(root=ALWAYS_OFF), Resource.get_empty()
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(ToBuffer())
    trace.set_tracer_provider(provider)


@contextmanager
def executing(trace: Sequence[str], size: int) -> Generator[None]:
    """In this block so many requests are executed, with a span of their own that is current. `trace`: that of
    their batch, as in a frame; without one nothing is done."""
    found = read_context(*trace) if trace else None
    if found is None:
        yield
        return
    batch, _ = found
    own, began_us, began_ns = batch.child(), time.time_ns() // 1000, time.perf_counter_ns()
    try:
        with _current(own):
            yield
    finally:
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        model = os.environ.get("CARPOOL_SERVED_MODEL", "")
        about = operation("predict", model) | {"carpool.requests": size}
        SPANS.add(Span(f"predict {model}", INTERNAL, own, batch, began_us, began_us + took_us, about))


async def executed_in_span(trace: Sequence[str], size: int, running: Coroutine[Any, Any, Any]) -> Any:
    """What `running` returns, which executes so many requests: as `executing`."""
    with executing(trace, size):
        return await running


@contextmanager
def _current(context: Context) -> Generator[None]:
    """In this block this span is current for OpenTelemetry, if that is loaded."""
    api, contexts = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if api is None or contexts is None:
        yield
        return
    ids = int.from_bytes(context.trace_id), int.from_bytes(context.span_id)
    state = api.TraceState.from_header([context.state]) if context.state else None
    seen = api.SpanContext(*ids, is_remote=True, trace_flags=api.TraceFlags(1), trace_state=state)
    token = contexts.attach(api.set_span_in_context(api.NonRecordingSpan(seen)))
    try:
        yield
    finally:
        contexts.detach(token)


def _span_of(span: Any) -> Span:
    """A span of OpenTelemetry's SDK that has ended."""
    parent = None if span.parent is None else _context_of(span.parent)
    status = span.status.status_code.name
    attributes = _attributes_of(span.attributes)
    error = str(attributes.pop("error.type", "")) or "error" if status == "ERROR" else ""
    return Span(
        shortened(span.name, NAME_CHARS_MAX),
        span.kind.name.lower() if span.kind is not None else INTERNAL,
        _context_of(span.context),
        parent,
        span.start_time // 1000,
        span.end_time // 1000,
        attributes,
        [
            Link(_context_of(link.context), _attributes_of(link.attributes, ATTRIBUTES_OF_EVENT_MAX))
            for link in span.links[:LINKS_MAX]
        ],
        [_event_of(event) for event in span.events[:EVENTS_MAX]],
        error,
    )


def _event_of(event: Any) -> Event:
    name, about = (
        shortened(event.name, NAME_CHARS_MAX),
        _attributes_of(event.attributes, ATTRIBUTES_OF_EVENT_MAX),
    )
    return Event(name, event.timestamp // 1000, about)


def _context_of(context: Any) -> Context:
    state = context.trace_state.to_header() if context.trace_state else ""
    return Context(context.trace_id.to_bytes(16), context.span_id.to_bytes(8), state)


def _attributes_of(
    attributes: Mapping[str, Any] | None, number: int = ATTRIBUTES_MAX
) -> dict[str, Attribute]:
    """What of these can be handed over: lists become texts."""
    items: Iterable[tuple[str, Any]] = (attributes or {}).items()
    found: dict[str, Attribute] = {}
    for name, value in items:
        if name in _TEXTS_OF_EXCEPTIONS or len(found) >= number:
            continue
        plain = value if type(value) in (bool, float) or _is_small(value) else str(value)
        found[shortened(name, NAME_CHARS_MAX)] = (
            shortened(plain, TEXT_CHARS_MAX) if type(plain) is str else plain
        )
    return found


def _is_small(value: Any) -> bool:
    """Whether it is a whole number that all of msgpack, OTLP and JSON have."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63
