"""Spans of what the gateway sends: `send M` of each call for a result, if its trace is recorded.

The trace of a client that sends `traceparent` with the sampled flag is continued; of calls without a trace a
share is recorded (`--trace-ratio`). The headers of the call then name the gateway's span, and so does the
request that is made of them: nothing else of the gateway knows of traces.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from carpool.tracing import (
    PRODUCER,
    TRACEPARENT,
    TRACESTATE,
    Context,
    Record,
    Span,
    is_chosen,
    new_trace,
    operation,
    read_context,
)

# Routes that send requests. A WebSocket, which may stay open for days, has no span. Its requests have the
# trace that its handshake names.
SENDING: Final = frozenset(
    (
        "infer", "infer_many", "v2_infer", "v2_generate", "v2_generate_stream", "v1_completions", "v1_chat",
        "v1_embeddings", "grpc_infer", "grpc_stream",
    )
)  # fmt: skip
_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()


class CallTrace(NamedTuple):
    """The span of a call, and that of its client, if it named one."""

    context: Context
    parent: Context | None


class GatewaySpans:
    """Begins and records spans. `ratio`: the share of calls without a trace of their own that is recorded."""

    def __init__(self, record: Record, ratio: float) -> None:
        self._record = record
        self._ratio = ratio

    def begin(self, route: str, headers: dict[bytes, bytes]) -> CallTrace | None:
        """The trace of a call with these headers, which then name it; None if it is not recorded. An invalid
        `traceparent` counts as none."""
        given = headers.get(_PARENT)
        if (given is None and not self._ratio) or route not in SENDING:
            return None
        found = None if given is None else read_context(given, headers.get(_STATE))
        if found is not None:
            parent, is_sampled = found
            trace = CallTrace(parent.child(), parent) if is_sampled else None
        else:
            trace = CallTrace(new_trace(), None) if is_chosen(self._ratio) else None
        if trace is not None:
            headers[_PARENT] = trace.context.traceparent.encode()
        return trace

    def ended(self, trace: CallTrace, route: str, model: str, code: int, took_us: int) -> None:
        """The call was answered with this code of HTTP, just now."""
        now_us = time.time_ns() // 1000
        attributes = operation("send", model, "send")
        attributes |= {"carpool.route": route, "http.response.status_code": code}
        error = str(code) if code >= 400 else ""
        context, parent = trace
        name = f"send {model}" if model else "send"
        self._record(
            [Span(name, PRODUCER, context, parent, now_us - took_us, now_us, attributes, error=error)]
        )
