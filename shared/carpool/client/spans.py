"""Spans of what a program sends, in OpenTelemetry, if the program has set that up.

A request continues the trace that is current where it is sent. Its span `send MODEL` lasts until there is a
result, and is exported by the program. Requests that are not recorded carry no trace: so those that differ in
nothing else still share entries, and cost nothing more.

Nothing is imported here. A program that has not imported OpenTelemetry's API has no current trace.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from carpool.client.options import RequestOptions
from carpool.errors import CANCELLED, CarpoolError
from carpool.tracing import SCHEMA_URL, TRACEPARENT, TRACESTATE, operation

_API: Final = "opentelemetry.trace"
_CONVERSATION: Final = "messaging.message.conversation_id"


class Sent:
    """A span of one call. `options`: those of the call, with the span as the parent of its requests."""

    def __init__(
        self, span: Any, options: RequestOptions, fields: Mapping[str, bytes | str], api: Any
    ) -> None:
        self.options: RequestOptions = {**options, "fields": {**(options.get("fields") or {}), **fields}}
        self._span = span
        self._error_status = api.StatusCode.ERROR

    def follow(self, future: Any, correlation_id: str | None = None) -> None:
        """It lasts until this future is done, which is that of the request with this ID."""
        if correlation_id is not None:
            self._span.set_attribute(_CONVERSATION, correlation_id)
        future.add_done_callback(self.on_done)

    def on_done(self, future: Any) -> None:
        """The future is done."""
        if future.cancelled():
            self.end(CANCELLED)
        else:
            self.fail(future.exception())

    def fail(self, error: BaseException | None) -> None:
        """It ends with this error; None: there was none. The text of an error, which may quote a body, is not
        recorded."""
        if error is None:
            self.end()
        else:
            self.end(error.status if isinstance(error, CarpoolError) else type(error).__name__)

    def end(self, error: str = "") -> None:
        """It ends, with this status if it failed."""
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(self._error_status)
        self._span.end()


def begin(model: str, options: RequestOptions) -> Sent | None:
    """The span of a request, or of several that are sent together; None if it is not recorded, or if the
    caller names a trace."""
    api = sys.modules.get(_API)
    # What nobody set up is in this private name, and the public function takes longer than all else here.
    if api is None or getattr(api, "_TRACER_PROVIDER", api) is None:
        return None
    fields = options.get("fields")
    if isinstance(fields, Mapping) and TRACEPARENT in fields:
        return None
    tracer = _tracer_of(api.get_tracer_provider())
    attributes = operation("send", model, "send")
    span = tracer.start_span(f"send {model}", kind=api.SpanKind.PRODUCER, attributes=attributes)
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    carried = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}
    if context.trace_state:
        carried[TRACESTATE] = context.trace_state.to_header()
    return Sent(span, options, carried, api)


@lru_cache(maxsize=4)
def _tracer_of(provider: Any) -> Any:
    """Making one takes longer than a span."""
    return provider.get_tracer("carpool", schema_url=SCHEMA_URL)


@contextmanager
def together(model: str, options: RequestOptions) -> Generator[RequestOptions]:
    """One span for all requests of a block, and their options. They have the same trace, so they can share
    entries as before."""
    sent = begin(model, options)
    if sent is None:
        yield options
        return
    try:
        yield sent.options
    except GeneratorExit:
        sent.end()
        raise
    except BaseException as error:
        sent.fail(error)
        raise
    sent.end()
