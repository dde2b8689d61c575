"""The options of requests, checked before anything is sent.

Requests of many callers share entries and connections. So what could not be encoded, or what would make an
entry something else than a request, is refused here, where its caller gets the error.

Why: docs/decisions/0079.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypedDict

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.keys import CORRELATION_ID, MODEL_VERSION
from carpool.messages.requests import PRIORITY_LEVELS
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.content_types import ACCEPT, checked
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    COLUMN_FIELDS,
    MAX_COST,
    MAX_EXTRA_BYTES,
    PASSED_ON_FIELDS,
    STORED_BODY_FIELDS,
)
from carpool.wire.sequence_fields import MAX_INDEX
from carpool.wire.values import plain

DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
RETRIES_MAX: Final = 1000
TIMEOUT_MAX_S: Final = 366 * 24 * 3600
TIMEOUT_S_MIN: Final = 0.001  # of what is left of a timeout: the request is sent, and fails
NO_FIELDS: Final[Mapping[str, Any]] = {}
_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 64) - 1

# What each option takes, also where it is among the further fields. A value of numpy and a member of an Enum
# is what it holds; True and False are no numbers.
_WHOLE_NUMBERS: Final = {  # from which to which; no floats, and no text
    "priority": (0, PRIORITY_LEVELS - 1),
    "cost": (0, MAX_COST),
    "retries": (0, RETRIES_MAX),
    "sequence_index": (0, MAX_INDEX),
}
_WHOLE_FIELDS: Final = _WHOLE_NUMBERS.keys() & CARPOOL_FIELDS
_TEXTS: Final = frozenset(
    {"lane", "tenant", TRACEPARENT, TRACESTATE, "version", ACCEPT}
)  # a number becomes its digits
# Beside these: seconds, int or float (`timeout`, `not_before`); a content type (`content_type`, `accept`); an
# ID, a plain str (`correlation_id`, `sequence_id`); True or False (`sequence_start`, `sequence_end`).

# They are options, too, but have a meaning only together, so they may not be among the further fields.
SEQUENCE_OPTIONS: Final = ("sequence_id", "sequence_start", "sequence_end", "sequence_index")
_OWN_OPTIONS: Final = frozenset({*SEQUENCE_OPTIONS, "not_before"})  # have checks of their own
# What Carpool gives a meaning, and only this client sets: where a result goes, what kind of entry it is.
_RESERVED_FIELDS: Final = (CARPOOL_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | {"tickets"}) - {
    "priority",
    "lane",
    "cost",
    "version",
    *_OWN_OPTIONS,
}


class RequestOptions(TypedDict, total=False):
    """Options of a request. They mean the same in whatever entry the request is sent.

    `timeout`: seconds until the request fails, None for no limit; by default the client's, which is 30 unless
        the client was made with another. It is sent with the request as its expiration; the model's settings
        may override that.
    `priority`: 0 to 9, higher first; by default 4.
    `lane`: only requests of the same lane share a batch.
    `version`: the version of the model that must execute the request; by default any may. NotFoundError if no
        worker has it.
    `cost`: what the request counts towards the model's `max_batch_cost`; by default 1.
    `tenant`: tenants share the model by its `tenant_weights`.
    `content_type`: how to encode the body; by default its type decides. Bytes may have any, such as
        `image/png`.
    `accept`: the content type of the result; by default that of the request, or JSON for a result that is no
        bytes of a request that was.
    `correlation_id`: your own ID, such as the one of a request that you send again.
    `fields`: further fields, for the model to read: bytes, text, or numbers of at most 64 bits, of 64 KiB in
        all. Not those that Carpool gives a meaning.
    `not_before`: seconds in which the request is not dispatched; less than `timeout`.
    `retries`: how often the request is sent again if it ends with RESOURCE_EXHAUSTED, UNAVAILABLE or
        INTERNAL, after a pause that doubles each time; 0 by default. `timeout` is for all of it. Of `infer`,
        `request`, `submit` and `map`.
    `result_ttl`: of `enqueue`, seconds for which the result is kept once it is there; by default the model's
        `result_ttl_ms`. More than its `max_result_ttl_ms` counts as that.
    `sequence_id`, `sequence_start`, `sequence_end`, `sequence_index`: the sequence to which the request
        belongs, whether it is the first and the last one of it, and its number there, from 0. For programs
        in which each request of a sequence is sent by another process; `sequence()` sets them by itself.
    """

    timeout: float | None
    priority: int | None
    lane: str | None
    version: str | None
    cost: int | None
    tenant: str | None
    content_type: str | None
    accept: str | None
    correlation_id: str | None
    fields: Mapping[str, bytes | str] | None
    not_before: float | None
    retries: int
    result_ttl: float | None
    sequence_id: str | None
    sequence_start: bool
    sequence_end: bool
    sequence_index: int | None


def result_ttl_ms(result_ttl_s: float | None) -> int | None:
    """The option `result_ttl` in milliseconds; None if the model's setting decides. Raises
    InvalidArgumentError."""
    if result_ttl_s is None:
        return None
    number = seconds(result_ttl_s)
    if number is not None and 0 < number <= TIMEOUT_MAX_S:  # false for NaN
        return max(1, round(number * 1000))
    raise InvalidArgumentError(
        f"result_ttl: {_shown(result_ttl_s)} must be a number of seconds, more than 0 and at most "
        f"{TIMEOUT_MAX_S}"
    )


def expiration_ms(timeout_s: float) -> int:
    """A timeout in milliseconds, as the field `expiration` has it."""
    return max(1, round(timeout_s * 1000))


def left_of(options: RequestOptions, timeout_s: float | None, elapsed_s: float) -> RequestOptions:
    """The options of a call with this timeout, as they are so long after it began: with what is left of the
    timeout, and of `not_before`."""
    left: RequestOptions = {**options}
    if timeout_s is not None:
        left["timeout"] = max(TIMEOUT_S_MIN, timeout_s - elapsed_s)
    not_before_s = seconds(options.get("not_before"))
    if not_before_s is not None and not_before_s > 0:
        left["not_before"] = max(0, not_before_s - elapsed_s)
    return left


def checked_timeout_s(timeout_s: float | None) -> float | None:
    """A valid timeout; infinity becomes None. Raises InvalidArgumentError: with 0 or less, the request could
    only expire."""
    if timeout_s is None:
        return None
    number = seconds(timeout_s)
    if number == math.inf:
        return None
    if number is not None and 0 < number <= TIMEOUT_MAX_S:  # false for NaN
        return number
    raise InvalidArgumentError(
        f"timeout: {_shown(timeout_s)} must be a number of seconds, more than 0 and at most {TIMEOUT_MAX_S}, "
        "or None for no limit"
    )


def read_options(
    options: RequestOptions, default_timeout_s: float | None
) -> tuple[float | None, Mapping[str, Any]]:
    """The timeout of a request, and the options that are sent as its fields. Raises InvalidArgumentError."""
    if not options:
        return default_timeout_s, NO_FIELDS
    timeout_s = checked_timeout_s(options.get("timeout", default_timeout_s))
    return timeout_s, optional_fields(options, timeout_s)


def optional_fields(options: RequestOptions, timeout_s: float | None) -> dict[str, Any]:
    """The options that are sent as fields of a request with this timeout: bytes, text, and whole numbers.

    Raises InvalidArgumentError, which names the option or field, and TypeError for an option that is none.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    check_no_retries(options)
    if "result_ttl" in options:
        raise InvalidArgumentError(
            "result_ttl: is an option of enqueue; other results are for the client that waits"
        )
    fields: dict[str, Any] = {name: _sendable(name, value) for name, value in _given_fields(options)}
    if sum([len(name) + len(value) for name, value in fields.items() if type(value) is not int]) > (
        MAX_EXTRA_BYTES
    ):
        raise InvalidArgumentError(
            f"fields: they take more than {MAX_EXTRA_BYTES} bytes; put what is large into the body"
        )
    if (content_type := options.get("content_type")) is not None:
        _check_content_type(content_type)
    if "version" in fields:
        _check_version(fields["version"])
    if ACCEPT in fields:
        accept = fields[ACCEPT]
        checked(ACCEPT, accept if type(accept) is str else accept.decode("ascii", "replace"))
    if (not_before_s := options.get("not_before")) is not None and (
        not_before_ms := _not_before_ms(not_before_s, timeout_s)
    ):
        fields["not_before"] = not_before_ms
    if not options.keys().isdisjoint(SEQUENCE_OPTIONS):
        fields |= _sequence_fields(options)
    return fields


def _given_fields(options: RequestOptions) -> Iterator[tuple[str, Any]]:
    """What a caller wants to be sent as fields. Raises InvalidArgumentError for names that cannot be used."""
    given = options.get("fields")
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgumentError(f"fields: must be a dict of names and values, not {_shown(given)}")
    for name, value in (given or {}).items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"fields: the name {_shown(name)} must be text")
        text = _encodable(f"fields: the name {name!r:.60}", name)
        if text in _RESERVED_FIELDS:
            raise InvalidArgumentError(
                f"{text!r:.60}: the client sets this field itself, as Carpool gives it a meaning; remove it "
                "from `fields`"
            )
        if text in _OWN_OPTIONS:
            raise InvalidArgumentError(f"{text}: is an option of its own; remove it from `fields`")
        yield text, value
    for name in ("priority", "lane", "version", "cost", "tenant", "accept"):
        if (option := options.get(name)) is not None:
            yield name, option


def _sendable(name: str, value: Any) -> bytes | str | int:
    """The value of a field as it is sent. Raises InvalidArgumentError.

    A member of an Enum and a value of numpy become the text or number that they are. True and False are 1 and
    0, as `stream` is, but not in a field with a meaning of its own. A float becomes text: 1.0 equals 1, so
    requests with either would share their fields.
    """
    if name in _WHOLE_FIELDS:
        return _whole_number(name, value)
    if type(value) is bytes or (type(value) is str and value.isascii()):
        return value
    if isinstance(value, str):
        return _encodable(f"{name!r:.60}", value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, np.generic):
        with suppress(TypeError, ValueError, OverflowError):  # of a value that is no number
            value = plain(value)
    if isinstance(value, float):
        return float.__repr__(value)
    is_flag = isinstance(value, bool)
    if is_flag and name not in CARPOOL_FIELDS | PASSED_ON_FIELDS:
        return int(value)
    number = None if is_flag else _index(value)
    if number is None:
        raise InvalidArgumentError(f"{name!r:.60}: must be bytes, text or a number, not {_shown(value)}")
    if not _INT_MIN <= number <= _INT_MAX:
        raise InvalidArgumentError(f"{name!r:.60}: a whole number must have at most 64 bits")
    return str(number) if name in _TEXTS else number


def _index(value: Any) -> int | None:
    """The whole number that a value is; None if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _whole_number(name: str, value: Any) -> int:
    """The number that an option has. Raises InvalidArgumentError."""
    lowest, highest = _WHOLE_NUMBERS[name]
    number = value if type(value) is int else None if isinstance(value, bool | np.bool_) else _index(value)
    if number is None or not lowest <= number <= highest:
        raise InvalidArgumentError(
            f"{name}: {_shown(value)} must be a whole number from {lowest} to {highest}"
        )
    return number


def seconds(value: Any) -> float | None:
    """The number that a value is; None if it is none."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.integer):
        return int(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _encodable(what: str, text: str) -> str:
    """Text as a plain str. Raises InvalidArgumentError if UTF-8 cannot encode it."""
    text = str.__str__(text)  # of a subclass, what it holds and not what it prints
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{what}: {text!r:.60} is no valid text: UTF-8 cannot encode the surrogate at {error.start}"
            ) from None
    return text


def _check_content_type(content_type: Any) -> None:
    if not isinstance(content_type, str):
        raise InvalidArgumentError(f"content_type: {_shown(content_type)} must be text, such as image/png")
    checked("content_type", _encodable("content_type", content_type))


def _check_version(version: bytes | str | int) -> None:
    text = version.decode("ascii", "replace") if type(version) is bytes else version
    if type(text) is not str or not MODEL_VERSION.fullmatch(text):
        raise InvalidArgumentError(
            f"version: {_shown(version)} must have 1 to 128 characters: letters, digits, "
            "'.', '_', ':', '+', '-'"
        )


def _shown(value: Any) -> str:
    """The beginning of a value for an error's text. Not every value has one, such as 10**5000."""
    try:
        return f"{value!r:.60}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def _not_before_ms(not_before_s: float | None, timeout_s: float | None) -> int:
    """Milliseconds; 0 for no delay. Raises InvalidArgumentError."""
    number = seconds(not_before_s)
    if number is None or not 0 <= number <= TIMEOUT_MAX_S:  # true for NaN
        raise InvalidArgumentError(
            f"not_before: {_shown(not_before_s)} must be a number of seconds, 0 or more"
        )
    if timeout_s is not None and number >= timeout_s:
        raise InvalidArgumentError(
            f"not_before: {number:g} s must be less than the timeout, which is {timeout_s:g} s"
        )
    return max(1, round(number * 1000)) if number else 0


def check_no_retries(options: RequestOptions) -> None:
    """Reject `retries` in a call that sends each request once."""
    if "retries" in options:
        raise InvalidArgumentError(
            "retries: is an option of infer, request, submit and map, outside of a sequence"
        )


def check_retries(retries: Any) -> int:
    """How often a request may be sent again. Raises InvalidArgumentError."""
    return _whole_number("retries", retries)


def _sequence_fields(options: RequestOptions) -> dict[str, Any]:
    """The fields of a request of a sequence; none if its options say nothing."""
    fields: dict[str, Any] = {}
    for name in ("sequence_start", "sequence_end"):
        value = options.get(name, False)
        if not isinstance(value, bool | np.bool_):
            raise InvalidArgumentError(f"{name}: {_shown(value)} must be True or False")
        if value:
            fields[name] = 1
    index, sequence_id = options.get("sequence_index"), options.get("sequence_id")
    if index is not None:
        index = _whole_number("sequence_index", index)
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
            f"sequence_id: {_shown(sequence_id)} must have 1 to 128 characters: letters, digits, "
            "'.', '_', ':', '-'; as a plain str"
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
            f"correlation_id: {_shown(correlation_id)} must have 1 to 128 characters: letters, digits, "
            "'.', '_', ':', '-'; as a plain str"
        )
    if correlation_id in in_flight:
        raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is already in flight")
