"""Envelopes -> answers: the result's bytes with its content type, and figures in headers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from carpool.errors import OK
from carpool.messages.requests import JSON
from carpool.messages.results import Result
from carpool_gateway.answers import HttpError, failure

_HEADERS: Final = (
    b"content-type: %b\r\ncarpool-batch-size: %d\r\ncarpool-queue-us: %d\r\ncarpool-compute-us: %d\r\n"
)
_ID: Final = b"carpool-correlation-id: %b\r\n"
_FIRST: Final = b"carpool-first-us: %d\r\n"
_VERSION: Final = b"carpool-model-version: %b\r\n"
_WARNING: Final = b"carpool-warning: %b\r\n"
_OCTETS: Final = b"application/octet-stream"


def figure_headers(content_type: str, batch_size: int, queue_us: int, compute_us: int) -> bytes:
    """The headers of the answer with a result that all requests of its batch may have."""
    return _HEADERS % (content_type_header(content_type), batch_size, queue_us, compute_us)


def id_header(correlation_id: str) -> bytes:
    """The header with the correlation ID of a result."""
    return _ID % correlation_id.encode()


def further_headers(first_us: int | None, warnings: Iterable[Any], version: str = "") -> bytes:
    """The headers of a result that only some have."""
    headers = b"" if first_us is None else _FIRST % first_us
    headers += _VERSION % _printable(version) if version else b""
    return headers + b"".join([_WARNING % _printable(warning) for warning in warnings])


@lru_cache(maxsize=256)
def content_type_header(content_type: str) -> bytes:
    """The value of Content-Type. What cannot be one is bytes: a line end in it would be a header."""
    is_usable = content_type.isascii() and content_type.isprintable()
    return content_type.encode() if is_usable else _OCTETS


def _printable(text: Any) -> bytes:
    """Text for a header, with a question mark for what cannot be in one."""
    return bytes(byte if 32 <= byte < 127 else 63 for byte in str(text)[:500].encode("ascii", "replace"))


def lines_of(body: bytes) -> Sequence[bytes]:
    """The bodies in a body of JSON lines. Raises HttpError for an empty line, which would have no result."""
    lines = body.removesuffix(b"\n").split(b"\n")
    for at, line in enumerate(lines, 1):
        if not line.strip():
            raise HttpError(400, f"line {at} is empty: each line must be the JSON body of a request")
    return lines


def result_line(result: Result) -> bytes:
    """A result as a line of JSON: `result`, or `error` and `status`. Bytes are in base64."""
    if result.status != OK:
        return error_line(failure(result.status, result.detail or "", result.correlation_id))
    body = result.body or b""
    if result.content_type == JSON:
        # JSON of several lines has no line ends within its texts.
        return b'{"result":%b}\n' % body.replace(b"\n", b" ")
    line = {"result_base64": base64.b64encode(body).decode(), "content_type": result.content_type}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def error_line(error: HttpError) -> bytes:
    """An error as a line of JSON."""
    fields = {"error": error.detail, "status": error.status, "correlation_id": error.correlation_id}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
