"""The HTTP status of a response for each status of a request, in every protocol of the gateway."""

from __future__ import annotations

from typing import Final

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)

HTTP_STATUSES: Final = {
    OK: 200,
    INVALID_ARGUMENT: 400,
    PERMISSION_DENIED: 403,
    NOT_FOUND: 404,
    RESOURCE_EXHAUSTED: 429,  # with Retry-After
    CANCELLED: 499,  # it was withdrawn, so that nobody reads this; nginx's number for a client that is gone
    INTERNAL: 500,
    # A request that ended its model process twice, or the next of a sequence that broke: nothing that a
    # program should send again as it is, which 409 would suggest.
    ABORTED: 500,
    UNIMPLEMENTED: 501,
    UNAVAILABLE: 503,  # with Retry-After
    DEADLINE_EXCEEDED: 504,
}


def http_status(status: str) -> int:
    """The HTTP status for the status of a result. One that is not known counts as INTERNAL."""
    return HTTP_STATUSES.get(status, HTTP_STATUSES[INTERNAL])
