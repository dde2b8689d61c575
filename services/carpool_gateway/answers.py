"""Answers of HTTP as bytes, and errors as answers. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    HTTP_STATUS,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    CarpoolError,
)

JSON_HEADER: Final = b"content-type: application/json\r\n"
RETRY_AFTER: Final = b"retry-after: 1\r\n"
_UNAUTHENTICATED: Final = "UNAUTHENTICATED"
# The status in the body of an error that HTTP alone knows, beside those that HTTP_STATUS has.
_STATUS_OF: Final = {
    400: INVALID_ARGUMENT,
    401: _UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: NOT_FOUND,
    405: UNIMPLEMENTED,
    408: DEADLINE_EXCEEDED,
    409: ABORTED,
    410: NOT_FOUND,
    413: INVALID_ARGUMENT,
    415: INVALID_ARGUMENT,
    417: INVALID_ARGUMENT,
    422: INVALID_ARGUMENT,
    426: INVALID_ARGUMENT,
    429: RESOURCE_EXHAUSTED,
    431: INVALID_ARGUMENT,
    499: CANCELLED,
    500: INTERNAL,
    501: UNIMPLEMENTED,
    503: UNAVAILABLE,
    504: DEADLINE_EXCEEDED,
    505: UNIMPLEMENTED,
}
_TOO_LARGE_RESULT: Final = "max_result_bytes"


def _line(code: int) -> bytes:
    phrase = "Client Closed Request" if code == 499 else HTTPStatus(code).phrase
    return f"HTTP/1.1 {code} {phrase}\r\n".encode()


STATUS_LINES: Final = {code: _line(code) for code in (*map(int, HTTPStatus), 499)}


class HttpError(Exception):
    """A request is answered with this status code and this sentence. `headers`: lines with their ends."""

    def __init__(
        self, code: int, detail: str, *, status: str = "", headers: bytes = b"", correlation_id: str = ""
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status or _STATUS_OF[code]
        self.headers = headers
        self.correlation_id = correlation_id


def http_error_of(error: CarpoolError) -> HttpError:
    """The answer to a request that failed. It may be tried again where that can help."""
    answer = failure(error.status, error.detail, error.correlation_id or "")
    answer.code = getattr(error, "http_status", answer.code)  # of errors that know better
    return answer


def answer_of(error: BaseException, of_mistake: Callable[[BaseException], HttpError]) -> HttpError:
    """The answer that an exception means. One that is neither HttpError nor CarpoolError is a mistake of the
    gateway's own, for `of_mistake`."""
    if isinstance(error, HttpError):
        return error
    return http_error_of(error) if isinstance(error, CarpoolError) else of_mistake(error)


def failure(status: str, detail: str, correlation_id: str) -> HttpError:
    """The answer to a request whose result has this status."""
    code = HTTP_STATUS.get(status, 500)
    headers = b""
    if status == RESOURCE_EXHAUSTED and _TOO_LARGE_RESULT in detail:
        code = 500  # sending it again will not help
    elif code in (429, 503):
        headers = RETRY_AFTER
    return HttpError(code, detail, status=status, headers=headers, correlation_id=correlation_id)


def error_body(error: HttpError) -> bytes:
    """The body of an error: `error`, `status`, and `correlation_id` if the request has one."""
    fields = {"error": error.detail, "status": error.status}
    if error.correlation_id:
        fields["correlation_id"] = error.correlation_id
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def error_answer(error: HttpError) -> tuple[bytes, bytes]:
    """The headers and the body of the answer to a request that failed."""
    return JSON_HEADER + error.headers, error_body(error)


def method_not_allowed(method: str, allowed: str) -> HttpError:
    """The error of a method that a path does not have. `allowed`: those that it has."""
    return HttpError(405, f"{method:.20} is not possible here; use {allowed}", headers=allow(allowed))


def allow(allowed: str) -> bytes:
    """The header that lists the methods of a path."""
    return f"allow: {allowed}\r\n".encode()
