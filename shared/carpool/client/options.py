"""The options of requests, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, Final, TypedDict

from carpool.errors import InvalidArgumentError
from carpool.keys import CORRELATION_ID

DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
RETRIES_MAX: Final = 1000
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


# They are options, too, but have a meaning only together, so they may not be among the further fields.
SEQUENCE_OPTIONS: Final = ("sequence_id", "sequence_start", "sequence_end", "sequence_index")


class RequestOptions(TypedDict, total=False):
    """Options of a request.

    `timeout`: seconds until the request fails, None for no limit; by default the client's. It is sent with
        the request as its expiration; the model's settings may override that.
    `priority`: 0 to 9, higher first; by default 4.
    `lane`: only requests of the same lane share a batch.
    `cost`: what the request counts towards the model's `max_batch_cost`; by default 1.
    `tenant`: tenants share the model by its `tenant_weights`.
    `content_type`: how to encode the body; by default its type decides. Bytes may have any, such as
        `image/png`.
    `accept`: the content type of the result; by default that of the request, or JSON for a result that is no
        bytes of a request that was.
    `correlation_id`: your own ID, such as the one of a request that you send again.
    `fields`: further fields, for the model to read.
    `not_before`: seconds in which the request is not dispatched; less than `timeout`.
    `retries`: how often the request is sent again if it ends with RESOURCE_EXHAUSTED, UNAVAILABLE or
        INTERNAL, after a pause that doubles each time; `timeout` is for all of it. Of `infer`, `request` and
        `submit`.
    `sequence_id`, `sequence_start`, `sequence_end`, `sequence_index`: the sequence to which the request
        belongs, whether it is the first and the last one of it, and its number there, from 0. For programs
        in which each request of a sequence is sent by another process; `sequence()` sets them by itself.
    """

    timeout: float | None
    priority: int | None
    lane: str | None
    cost: int | None
    tenant: str | None
    content_type: str | None
    accept: str | None
    correlation_id: str | None
    fields: Mapping[str, bytes | str] | None
    not_before: float | None
    retries: int
    sequence_id: str | None
    sequence_start: bool
    sequence_end: bool
    sequence_index: int | None


def checked_timeout_s(timeout_s: float | None) -> float | None:
    """A valid timeout; infinity becomes None. Raises InvalidArgumentError: with 0 or less, the request could
    only expire."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float) and 0 < timeout_s <= TIMEOUT_MAX_S:  # false for NaN
        return timeout_s
    raise InvalidArgumentError(
        f"timeout: {timeout_s!r:.60} must be a number of seconds, more than 0 and at most {TIMEOUT_MAX_S}, "
        "or None for no limit"
    )


def optional_fields(options: RequestOptions, timeout_s: float | None) -> dict[str, Any]:
    """The options that are sent as fields of a request with this timeout."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    check_no_retries(options)
    fields: dict[str, Any] = dict(options.get("fields") or {})
    for name in ("priority", "lane", "cost", "tenant", "accept"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    if options.get("not_before"):
        fields["not_before"] = _not_before_ms(options["not_before"], timeout_s)
    for name, value in fields.items():
        if name in _RESERVED_FIELDS:
            raise InvalidArgumentError(
                f"{name!r:.60}: the client sets this field itself; remove it from `fields`"
            )
        if name in SEQUENCE_OPTIONS:
            raise InvalidArgumentError(f"{name}: is an option of its own; remove it from `fields`")
        if not isinstance(value, bytes | str | int | float):
            raise InvalidArgumentError(f"{name!r:.60}: must be bytes, text or a number, not {value!r:.60}")
    if not options.keys().isdisjoint(SEQUENCE_OPTIONS):
        fields |= _sequence_fields(options)
    return fields


def _not_before_ms(not_before_s: float | None, timeout_s: float | None) -> int:
    """Raises InvalidArgumentError."""
    if not isinstance(not_before_s, int | float) or not 0 < not_before_s <= TIMEOUT_MAX_S:
        raise InvalidArgumentError(f"not_before: {not_before_s!r:.60} must be a number of seconds, 0 or more")
    if timeout_s is not None and not_before_s >= timeout_s:
        raise InvalidArgumentError(
            f"not_before: {not_before_s:g} s must be less than the timeout, which is {timeout_s:g} s"
        )
    return max(1, round(not_before_s * 1000))


def check_no_retries(options: RequestOptions) -> None:
    """Reject `retries` in a call that sends each request once."""
    if "retries" in options:
        raise InvalidArgumentError(
            "retries: is an option of infer, request, submit and map, outside of a sequence"
        )


def check_retries(retries: Any) -> int:
    """How often a request may be sent again. Raises InvalidArgumentError."""
    if type(retries) is not int or not 0 <= retries <= RETRIES_MAX:
        raise InvalidArgumentError(f"retries: {retries!r:.60} must be a whole number from 0 to {RETRIES_MAX}")
    return retries


def _sequence_fields(options: RequestOptions) -> dict[str, Any]:
    """The fields of a request of a sequence; none if its options say nothing."""
    fields: dict[str, Any] = {}
    for name in ("sequence_start", "sequence_end"):
        value = options.get(name, False)
        if type(value) is not bool:
            raise InvalidArgumentError(f"{name}: {value!r:.60} must be True or False")
        if value:
            fields[name] = 1
    index, sequence_id = options.get("sequence_index"), options.get("sequence_id")
    if index is not None:
        if type(index) is not int or index < 0:
            raise InvalidArgumentError(f"sequence_index: {index!r:.60} must be a whole number of at least 0")
        if ("sequence_start" in fields) != (index == 0):
            raise InvalidArgumentError("sequence_index: must be 0 with sequence_start, and only there")
        fields["sequence_index"] = index
    if sequence_id is not None:
        check_sequence_id(sequence_id)
        fields["sequence_id"] = sequence_id
    elif fields:
        raise InvalidArgumentError(f"{', '.join(fields)}: only together with sequence_id")
    return fields


def check_sequence_id(sequence_id: str) -> None:
    """Reject an ID that could not be part of a key."""
    if type(sequence_id) is not str or not CORRELATION_ID.fullmatch(sequence_id):
        raise InvalidArgumentError(
            f"sequence_id: {sequence_id!r:.140} must have 1 to 128 characters: letters, digits, "
            "'.', '_', ':', '-'"
        )


def check_no_sequence(options: RequestOptions, call: str) -> None:
    """Reject the options of a sequence in a call for which they have no meaning."""
    for name in SEQUENCE_OPTIONS:
        if (value := options.get(name)) is not None and value is not False:
            raise InvalidArgumentError(
                f"{name}: is no option of {call}; `sequence` sends the requests of a sequence"
            )


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
