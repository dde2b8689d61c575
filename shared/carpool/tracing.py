"""Traces: the context that requests carry, and spans that are made of what is known after the fact.

    traceparent of a request ──▶ sampled_context ──▶ Span ──▶ span_export (a thread, in batches)

Only a request whose `traceparent` has the sampled flag costs more than a look at its fields. What a process
knows of such a request when it is done with it becomes spans, whose times are those that were measured
anyway. Nothing here does I/O, and nothing imports OpenTelemetry.

Names and attributes follow OpenTelemetry's conventions for messaging, of the version of SCHEMA_URL. What they
have no name for begins with `carpool.`. No span has bodies or texts of exceptions.

Why: docs/decisions/0119.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
EVENTS_MAX: Final = 128  # of a span; further ones are counted
_STATE_CHARS_MAX: Final = 512  # what W3C wants to be passed on
_MEMBERS_MAX: Final = 32
# What else is in a `tracestate` OpenTelemetry would leave out, with a line in the log for each request.
_MEMBER: Final = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
# Version, trace ID, span ID, flags; later versions may have more behind them.
_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)
_SAMPLED: Final = 1
_FLAGS_END: Final = 55
_ODD_DIGITS: Final = frozenset((b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f"))

Attribute = str | int | float | bool
Attributes = Mapping[str, Attribute]

# Kinds of spans.
INTERNAL: Final = "internal"
CLIENT: Final = "client"
PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"


class Context(NamedTuple):
    """A span of a trace that is recorded, as others refer to it. `state`: the trace's `tracestate`."""

    trace_id: bytes
    span_id: bytes
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The field of a request whose parent this span is."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"

    def child(self) -> Context:
        """A new span of the same trace."""
        return Context(self.trace_id, os.urandom(8), self.state)

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a request whose parent this span is."""
        also = {TRACESTATE: self.state} if self.state else {}
        return {TRACEPARENT: self.traceparent, **also}

    @property
    def headers(self) -> tuple[str, str]:
        """Both headers with which others refer to it, the second perhaps empty."""
        return self.traceparent, self.state

    @property
    def logged(self) -> dict[str, str]:
        """What a line of the log shows of it."""
        return {"trace_id": self.trace_id.hex(), "span_id": self.span_id.hex()}


def new_trace() -> Context:
    """The first span of a new trace."""
    return Context(os.urandom(16), os.urandom(8))


def is_chosen(ratio: float) -> bool:
    """Whether a new trace is recorded, if this share of them is: from 0 to 1."""
    return ratio > 0 and random.random() < ratio  # noqa: S311 (no secret)


def read_context(traceparent: Any, tracestate: Any = None) -> tuple[Context, bool] | None:
    """The context in these values, and whether it is sampled. None if the first is invalid: such a value is
    ignored. `tracestate` is dropped if it is invalid or too long."""
    text = traceparent.encode("latin-1", "replace") if isinstance(traceparent, str) else traceparent
    found = _PARENT.fullmatch(text) if isinstance(text, bytes) else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = bytes.fromhex(trace.decode()), bytes.fromhex(span.decode())
    if version == b"ff" or (version == b"00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate.decode("latin-1") if isinstance(tracestate, bytes) else tracestate
    is_valid = isinstance(state, str) and len(state) <= _STATE_CHARS_MAX and _is_state(state)
    return Context(trace_id, span_id, state if is_valid else ""), bool(int(flags, 16) & _SAMPLED)


def _is_state(state: str) -> bool:
    """Whether this is a `tracestate` as W3C defines it: members KEY=VALUE, of which some may be empty."""
    members = [member for text in state.split(",") if (member := text.strip(" \t"))]
    return len(members) <= _MEMBERS_MAX and all(map(_MEMBER.fullmatch, members))


def sampled_context(fields: Mapping[str, Any] | None) -> Context | None:
    """The context that a request carries among its fields, if its trace is recorded. None otherwise, for
    nearly all requests after one or two comparisons."""
    if fields is None:
        return None
    parent = fields.get(TRACEPARENT)
    if parent is None or (type(parent) is bytes and parent[_FLAGS_END - 1 : _FLAGS_END] not in _ODD_DIGITS):
        return None  # most values are valid and not sampled: one digit tells that
    found = read_context(parent, fields.get(TRACESTATE))
    return found[0] if found is not None and found[1] else None


class Link(NamedTuple):
    """That a span concerns another one, of the same or another trace."""

    context: Context
    attributes: Mapping[str, Attribute] = {}


class Event(NamedTuple):
    """Something that happened during a span. `at_us`: microseconds since the epoch."""

    name: str
    at_us: int
    attributes: Mapping[str, Attribute] = {}


class Span(NamedTuple):
    """What was done from `start_us` to `end_us`, in microseconds since the epoch.

    `error`: the status with which it failed, or another short name; empty if it succeeded.
    """

    name: str
    kind: str
    context: Context
    parent: Context | None
    start_us: int
    end_us: int
    attributes: Mapping[str, Attribute] = {}
    links: Sequence[Link] = ()
    events: Sequence[Event] = ()
    error: str = ""

    def to_fields(self) -> list[Any]:
        """What `of_fields` makes a span of, packed with msgpack in between."""
        parent = None if self.parent is None else list(self.parent)
        links = [[list(link.context), dict(link.attributes)] for link in self.links]
        events = [[name, at_us, dict(attributes)] for name, at_us, attributes in self.events]
        about = (dict(self.attributes), links, events, self.error)
        return [self.name, self.kind, list(self.context), parent, self.start_us, self.end_us, *about]

    @classmethod
    def of_fields(cls, fields: Sequence[Any]) -> Self:
        """Raises ValueError if these are not the fields of a span."""
        name, kind, context, parent, start_us, end_us, attributes, links, events, error = fields
        return cls(
            _checked(name, str),
            _checked(kind, str),
            _context_of(context),
            None if parent is None else _context_of(parent),
            _checked(start_us, int),
            _checked(end_us, int),
            _attributes_of(attributes),
            [Link(_context_of(linked), _attributes_of(about)) for linked, about in links],
            [
                Event(_checked(what, str), _checked(at, int), _attributes_of(about))
                for what, at, about in events
            ],
            _checked(error, str),
        )

    def moved(self, by_us: int) -> Self:
        """This span so much later: another clock shows its times."""
        events = [event._replace(at_us=event.at_us + by_us) for event in self.events]
        return self._replace(start_us=self.start_us + by_us, end_us=self.end_us + by_us, events=events)


Record = Callable[[Sequence[Span]], None]
"""Takes spans to be exported. Never waits; what is too much is dropped."""


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"these are not the fields of a span: {kind.__name__} expected")
    return value


def _context_of(fields: Sequence[Any]) -> Context:
    context = Context(*fields)
    if len(_checked(context.trace_id, bytes)) != 16 or len(_checked(context.span_id, bytes)) != 8:
        raise ValueError("these are not the IDs of a span")
    _checked(context.state, str)
    return context


def _attributes_of(fields: Any) -> Attributes:
    if any(
        type(name) is not str or type(value) not in (str, int, float, bool) for name, value in fields.items()
    ):
        raise ValueError("these are not the attributes of a span")
    attributes: Attributes = fields
    return attributes


# --- messaging ---------------------------------------------------------------------------------------------


def operation(name: str, model: str, kind: str = "") -> dict[str, Attribute]:
    """The attributes of every span: what is done, with the requests of which model. `kind`: of the operations
    that the conventions define; empty for one of Carpool's own."""
    attributes: dict[str, Attribute] = {
        "messaging.system": "carpool",
        "messaging.operation.name": name,
        "messaging.destination.name": model,
    }
    if kind:
        attributes["messaging.operation.type"] = kind
    return attributes


def about_requests(correlation_ids: Sequence[str]) -> dict[str, Attribute]:
    """Which requests these are: the correlation ID of one, else how many share this span."""
    if len(correlation_ids) == 1:
        return {"messaging.message.conversation_id": correlation_ids[0]}
    return {"carpool.requests": len(correlation_ids)}
