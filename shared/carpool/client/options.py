"""The options of requests, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, Final, TypedDict

from carpool.errors import InvalidArgumentError
from carpool.keys import CORRELATION_ID

DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
TIMEOUT_MAX_S: Final = 366 * 24 * 3600
# Fields that only this client sets. With others' values, the result would be written where it does not read.
_RESERVED_FIELDS: Final = frozenset(
    {
        "arrival",
        "bodies",
        "body",
        "body_bytes",
        "body_key",
        "content_type",
        "correlation_id",
        "correlation_ids",
        "expiration",
        "reply_columns",
        "reply_to",
        "requests",
        "row_head",
        "rows",
        "stream",
        "withdraw",
    }
)


class RequestOptions(TypedDict, total=False):
    """Options of a request.

    `timeout`: seconds until the request fails, None for no limit; by default the client's. It is sent with
        the request as its expiration; the model's settings may override that.
    `priority`: 0 to 9, higher first; by default 4.
    `lane`: only requests of the same lane share a batch.
    `cost`: what the request counts towards the model's `max_batch_cost`; by default 1.
    `tenant`: tenants share the model by its `tenant_weights`.
    `content_type`: how to encode the body; by default its type decides.
    `correlation_id`: your own ID, such as the one of a request that you send again.
    `fields`: further fields, for the model to read.
    """

    timeout: float | None
    priority: int | None
    lane: str | None
    cost: int | None
    tenant: str | None
    content_type: str | None
    correlation_id: str | None
    fields: Mapping[str, bytes | str] | None


def checked_timeout_s(timeout_s: float | None) -> float | None:
    """A valid timeout. Infinity becomes None; a negative one becomes 0. Raises InvalidArgumentError."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float) and -TIMEOUT_MAX_S <= timeout_s <= TIMEOUT_MAX_S:  # false for NaN
        return max(0.0, timeout_s)
    raise InvalidArgumentError(
        f"timeout: {timeout_s!r:.60} must be a number of seconds, at most {TIMEOUT_MAX_S}, or None"
    )


def optional_fields(options: RequestOptions) -> dict[str, Any]:
    """The options that are sent as fields of the request."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = dict(options.get("fields") or {})
    for name in ("priority", "lane", "cost", "tenant"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    for name, value in fields.items():
        if name in _RESERVED_FIELDS:
            raise InvalidArgumentError(
                f"{name!r:.60}: the client sets this field itself; remove it from `fields`"
            )
        if not isinstance(value, bytes | str | int | float):
            raise InvalidArgumentError(f"{name!r:.60}: must be bytes, text or a number, not {value!r:.60}")
    return fields


def check_in_flight(in_flight: int) -> None:
    """Reject a limit with which nothing could be sent."""
    if in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}: must be 1 or more")


def check_correlation_id(correlation_id: str, in_flight: Container[str]) -> None:
    """Reject an unusable ID: the error for it would be written under another ID, which nothing reads."""
    if type(correlation_id) is not str or not CORRELATION_ID.fullmatch(correlation_id):
        raise InvalidArgumentError(
            f"correlation_id: {correlation_id!r:.140} must have 1 to 128 characters: letters, digits, "
            "'.', '_', ':', '-'"
        )
    if correlation_id in in_flight:
        raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is already in flight")
