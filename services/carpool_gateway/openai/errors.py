"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`. Pure.

These clients send a request again after 408, 409, 429 and any 5xx. A request that was accepted may have been
executed by then, so its errors say that it must not be sent again (`x-should-retry`).
"""

from __future__ import annotations

import json
import re
from typing import Final

from carpool_gateway.answers import JSON_HEADER, HttpError

_INVALID: Final = "invalid_request_error"
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Final = {401: "invalid_api_key", 413: "content_too_large", 429: "rate_limit_exceeded"}
_RETRY_AFTER: Final = re.compile(rb"retry-after: (\d+)\r\n")
_NO_RETRY: Final = b"x-should-retry: false\r\n"


class RequestError(HttpError):
    """A request does not follow this protocol, or does not suit its model. `param`: the parameter that is
    wrong; `reason`: a word for programs."""

    def __init__(self, detail: str, param: str | None, reason: str | None = None, code: int = 400) -> None:
        super().__init__(code, detail)
        self.param = param
        self.reason = reason


def unknown_model(name: str) -> RequestError:
    """The error of a model that is not registered."""
    return RequestError(f"there is no model {name!r:.130}", "model", "model_not_found", 404)


def error_document(error: HttpError) -> bytes:
    """The document of an error, as JSON."""
    code = error.code
    kind = "server_error" if code >= 500 else _TYPES.get(code, _INVALID)
    param, reason = (error.param, error.reason) if isinstance(error, RequestError) else (None, None)
    if reason is None:
        reason = error.status.lower() if code >= 500 else _CODES.get(code)
    fields = {"message": error.detail, "type": kind, "param": param, "code": reason}
    return json.dumps({"error": fields}, separators=(",", ":")).encode()


def error_answer(error: HttpError) -> tuple[bytes, bytes]:
    """The headers and the body of the answer to a request that failed."""
    headers = JSON_HEADER + error.headers
    if (found := _RETRY_AFTER.search(headers)) is not None:
        headers += b"retry-after-ms: %d000\r\n" % int(found[1])
    if error.correlation_id:
        headers += b"carpool-correlation-id: %b\r\n" % error.correlation_id.encode()
    return headers, error_document(error)


def after_acceptance(error: HttpError) -> HttpError:
    """The error of a request that was accepted: its client is not to send it again by itself. Only one that
    was refused, because of a full queue, was certainly not executed."""
    if error.code == 409 or error.code >= 500:
        error.headers = _RETRY_AFTER.sub(b"", error.headers) + _NO_RETRY
    return error
