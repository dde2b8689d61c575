"""Headers -> options of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from carpool.client.options import RequestOptions
from carpool.errors import InvalidArgumentError
from carpool.messages.requests import JSON
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.content_types import checked

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_PREFIX: Final = b"carpool-"
_FIELD: Final = b"carpool-field-"
_FORM: Final = "application/x-www-form-urlencoded"
STREAM: Final = b"text/event-stream"


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise InvalidArgumentError(f"{name}: {value!r:.60} must be a whole number")
    return int(value[:20])


def _seconds(name: str, value: str) -> float:
    return _whole(name, value) / 1000


def _text(name: str, value: str) -> str:
    return value


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgumentError(f"{name}: {value!r:.60} must be true or false")
    return value.lower() in ("true", "1")


_OPTIONS: Final[Mapping[bytes, tuple[str, Callable[[str, str], Any]]]] = {
    b"carpool-timeout-ms": ("timeout", _seconds),
    b"carpool-not-before-ms": ("not_before", _seconds),
    b"carpool-result-ttl-ms": ("result_ttl", _seconds),
    b"carpool-priority": ("priority", _whole),
    b"carpool-lane": ("lane", _text),
    b"carpool-version": ("version", _text),
    b"carpool-cost": ("cost", _whole),
    b"carpool-tenant": ("tenant", _text),
    b"carpool-correlation-id": ("correlation_id", _text),
    b"carpool-sequence-id": ("sequence_id", _text),
    b"carpool-sequence-start": ("sequence_start", _flag),
    b"carpool-sequence-end": ("sequence_end", _flag),
    b"carpool-sequence-index": ("sequence_index", _whole),
}


def options_of(headers: Mapping[bytes, bytes], *, reads_accept: bool = True) -> RequestOptions:
    """The options in the headers `Carpool-*`, `traceparent` with `tracestate` and, if `reads_accept`,
    `Accept`. Raises InvalidArgumentError, which names the header, also for one of an unknown name: it is
    probably misspelt."""
    options: dict[str, Any] = {}
    fields: dict[str, str | bytes] = {}
    for name in headers:
        if not name.startswith(_PREFIX):
            continue
        value = headers[name]
        if name in _OPTIONS:
            option, read = _OPTIONS[name]
            options[option] = read(_shown(name), _decoded(name, value))
        elif name.startswith(_FIELD) and len(name) > len(_FIELD):
            fields[name[len(_FIELD) :].decode("latin-1")] = value
        else:
            raise InvalidArgumentError(
                f"{_shown(name)}: there is no such header; there are "
                f"{', '.join(map(_shown, _OPTIONS))}, and Carpool-Field-NAME"
            )
    if (trace := headers.get(b"traceparent")) is not None:
        fields[TRACEPARENT] = trace
        if (state := headers.get(b"tracestate")) is not None:
            fields[TRACESTATE] = state
    if fields:
        options["fields"] = fields
    if reads_accept and (accept := headers.get(b"accept")) is not None and (wanted := accepted(accept)):
        options["accept"] = wanted
    return options  # type: ignore[return-value]


def given_request_id(headers: Mapping[bytes, bytes]) -> str:
    """The ID that a client gives to its request in `X-Request-Id`; empty without one that can be used."""
    given = headers.get(b"x-request-id")
    return given.decode("ascii") if given and _REQUEST_ID.fullmatch(given) else ""


def _decoded(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{_shown(name)}: must be UTF-8") from None


def _shown(name: bytes) -> str:
    return "-".join(part.capitalize() for part in name.decode("latin-1").split("-"))[:60]


@lru_cache(maxsize=256)
def accepted(accept: bytes) -> str:
    """The content type that a client wants; empty if it takes any. Of several, the one that it prefers most.

    Raises InvalidArgumentError for what cannot be a content type. A range such as `image/*` wants nothing in
    particular, because a model cannot be asked for it.
    """
    best, best_quality = "", 0.0
    for part in accept.decode("latin-1").split(","):
        essence, quality = _quality_of(part.strip())
        if essence == "*/*" and quality > 0:
            return ""
        if essence and "*" not in essence and quality > best_quality:
            best, best_quality = essence, quality
    return checked("Accept", best) if best and best != STREAM.decode() else ""


def _quality_of(part: str) -> tuple[str, float]:
    """A media range without its parameter q, and what that says."""
    pieces = [piece.strip() for piece in part.split(";")]
    quality = 1.0
    for piece in pieces[1:]:
        if piece[:2].lower() == "q=":
            try:
                quality = float(piece[2:])
            except ValueError:
                quality = 0.0
    kept = [piece for piece in pieces if piece[:2].lower() != "q="]
    return "; ".join(kept), quality


def wants_async(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a client wants an answer before there is a result (`Prefer: respond-async`)."""
    prefer = headers.get(b"prefer")
    return prefer is not None and "respond-async" in preferences(prefer)


def wants_stream(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a client wants events."""
    accept = headers.get(b"accept")
    return accept is not None and STREAM in accept


@lru_cache(maxsize=256)
def content_type_of(header: bytes | None) -> str:
    """The content type of a body. Without one it is JSON, and so is what `curl -d` calls a form: no model
    reads forms. Raises InvalidArgumentError."""
    if not header:
        return JSON
    content_type = header.decode("latin-1").strip()
    if content_type.partition(";")[0].strip().lower() == _FORM:
        return JSON
    return checked("Content-Type", content_type)


@lru_cache(maxsize=256)
def preferences(prefer: bytes) -> Mapping[str, str]:
    """The preferences in `Prefer`: by name in small letters, with values, which may be empty."""
    found: dict[str, str] = {}
    for part in prefer.decode("latin-1").split(","):
        name, _, value = part.partition(";")[0].partition("=")
        found.setdefault(name.strip().lower(), value.strip().strip('"'))
    return found
