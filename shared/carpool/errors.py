"""How a request can fail: statuses, with gRPC's canonical names, and a Python exception for each.

The status is part of a result's envelope. For Python producers, `error_for` turns it into the exception. A
model raises or returns one of these exceptions to fail a single request with the status of its choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OK: Final = "OK"
INVALID_ARGUMENT: Final = "INVALID_ARGUMENT"
DEADLINE_EXCEEDED: Final = "DEADLINE_EXCEEDED"
RESOURCE_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
CANCELLED: Final = "CANCELLED"
INTERNAL: Final = "INTERNAL"
ABORTED: Final = "ABORTED"
PERMISSION_DENIED: Final = "PERMISSION_DENIED"
UNAVAILABLE: Final = "UNAVAILABLE"
UNIMPLEMENTED: Final = "UNIMPLEMENTED"
NOT_FOUND: Final = "NOT_FOUND"

# Each status in HTTP and in gRPC, as google.rpc.Code has it. For a status that is not here, use INTERNAL's.
_CODES: Final[Mapping[str, tuple[int, int]]] = {
    OK: (200, 0),
    CANCELLED: (499, 1),
    INVALID_ARGUMENT: (400, 3),
    DEADLINE_EXCEEDED: (504, 4),
    NOT_FOUND: (404, 5),
    PERMISSION_DENIED: (403, 7),
    RESOURCE_EXHAUSTED: (429, 8),
    ABORTED: (409, 10),
    UNIMPLEMENTED: (501, 12),
    INTERNAL: (500, 13),
    UNAVAILABLE: (503, 14),
}
HTTP_STATUS: Final[Mapping[str, int]] = {status: http for status, (http, _) in _CODES.items()}
"""The status code of HTTP for each status, as the gateway has it: `HTTP_STATUS.get(error.status, 500)`."""
GRPC_CODE: Final[Mapping[str, int]] = {status: grpc for status, (_, grpc) in _CODES.items()}
"""The code of gRPC for each status, as in google.rpc.Code: `GRPC_CODE.get(error.status, 13)`."""


class CarpoolError(Exception):
    """A request failed: the status of its result is not OK, or no result came.

    `detail`: a sentence for a person, which names the field that is wrong, or says what to do.
    `correlation_id`: that of the request; None if it has none yet.
    `request_index`: of one that a model raises, the only request that it concerns, by its place in the batch
        (from 0); None: it concerns all of them.
    """

    status = INTERNAL
    """The status, a name as in gRPC. A class has one, but for errors of models that call others."""
    request_index: int | None = None

    def __init__(self, detail: str, *, correlation_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.correlation_id = correlation_id

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}"


class InvalidArgumentError(CarpoolError):
    """The request could not be understood, or the model rejected its body."""

    status = INVALID_ARGUMENT


class DeadlineExceededError(CarpoolError, TimeoutError):
    """The request expired, or the client's timeout ended, before there was a result."""

    status = DEADLINE_EXCEEDED


class ResourceExhaustedError(CarpoolError):
    """The model's queue is full, the result is larger than `max_result_bytes`, or Redis is out of memory."""

    status = RESOURCE_EXHAUSTED


class CancelledRequestError(CarpoolError):
    """The request was withdrawn, or nobody read its stream."""

    status = CANCELLED


class InternalError(CarpoolError):
    """The model raised an exception for this request, or returned a value that cannot be sent."""

    status = INTERNAL


class AbortedError(CarpoolError):
    """A model process died twice while it executed the request, or an earlier one of its sequence failed."""

    status = ABORTED


class PermissionDeniedError(CarpoolError, PermissionError):
    """The user with which this program signed in to Redis may not do this."""

    status = PERMISSION_DENIED


class UnavailableError(CarpoolError, ConnectionError):
    """Redis could not be reached, the client was closed, or an operator has paused the model."""

    status = UNAVAILABLE


class UnimplementedError(CarpoolError):
    """The request asks for something that this version does not support."""

    status = UNIMPLEMENTED


class NotFoundError(CarpoolError, LookupError):
    """No worker has registered a model of this name."""

    status = NOT_FOUND


class UnknownOutcomeError(CarpoolError):
    """It is not known what becomes of the request: it may have been accepted, and may be executed.

    Every other error is definite: the request has this result, or was never accepted. After this one it may
    be sent again under the same correlation ID.
    """


class UnconfirmedError(UnknownOutcomeError, UnavailableError):
    """Redis did not confirm the request as was asked for, or the client was closed before its result."""


class NoResultError(UnknownOutcomeError, DeadlineExceededError):
    """The request was sent, and the client's timeout ended before there was a result."""


class Unhealthy(Exception):  # noqa: N818 (it says what the process is)
    """A model raises it when its process cannot go on, with a sentence that says why: for example because its
    accelerator is broken. No request fails of it. Another process replaces this one, and executes again what
    this one had in hand, one request at a time: a request that ends two processes is given up."""


_BY_STATUS: Final[dict[str, type[CarpoolError]]] = {
    kind.status: kind
    for kind in (
        InvalidArgumentError,
        DeadlineExceededError,
        ResourceExhaustedError,
        CancelledRequestError,
        InternalError,
        AbortedError,
        PermissionDeniedError,
        UnavailableError,
        UnimplementedError,
        NotFoundError,
    )
}


def error_for(status: str, detail: str, correlation_id: str | None = None) -> CarpoolError:
    """The exception of a status. One that this version does not know is an InternalError that names it."""
    kind = _BY_STATUS.get(status)
    if kind is None:
        return InternalError(f"unknown status {status}: {detail}", correlation_id=correlation_id)
    return kind(detail, correlation_id=correlation_id)
