"""Messages <-> stream fields and bytes, with the limits on everything that is decoded.

Nothing here raises on a producer's input but InvalidArgumentError, and its detail names the field.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack

from carpool.errors import (
    CarpoolError,
    InvalidArgumentError,
    UnimplementedError,
)
from carpool.keys import CORRELATION_ID
from carpool.messages import (
    CONTENT_TYPES,
    JSON,
    PRIORITY_DEFAULT,
    PRIORITY_LEVELS,
    Entry,
    Refusal,
    Request,
    Withdrawal,
)
from carpool.model_settings import ModelSettings

MAX_FIELDS: Final = 64
MAX_REQUESTS_PER_ENTRY: Final = 4096
# What a batch or an entry put back may come to must stay below the 512 MiB that Redis takes in one string.
MAX_PACKED_BYTES: Final = 64 * 1024 * 1024
MAX_EXTRA_BYTES: Final = 64 * 1024
MAX_LANE_CHARS: Final = 128
MAX_COST: Final = 1 << 40
MAX_WITHDRAW_BYTES: Final = 1 << 20
UNCOUNTED_BYTES: Final = 1 << 20

_KNOWN: Final = frozenset(
    {
        "body",
        "content_type",
        "correlation_id",
        "reply_to",
        "expiration",
        "priority",
        "lane",
        "cost",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "requests",
        "arrival",
        "withdraw",
    }
)
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")
_TICKET: Final = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}:[0-9]{1,4}")
_NAMES: Final = {name.encode(): name for name in _KNOWN}
_PLAIN: Final = frozenset({"correlation_id", "body"})

Fields = dict[str, Any]
Decoded = Request | Refusal | Withdrawal


# --- requests: entry -> messages ---------------------------------------------------------------------------


def arrival_of(entry_id: str) -> int:
    """When Redis accepted an entry, in microseconds (to the millisecond)."""
    return int(entry_id.partition("-")[0]) * 1000


def ticket_of(entry_id: str, position: int) -> str:
    """The name of a request's ticket in the order of results: the entry in which it arrived, its place."""
    return f"{entry_id}:{position}"


def decode_entry(
    entry_id: bytes, flat: Sequence[bytes], settings: ModelSettings, now_us: int = sys.maxsize
) -> tuple[Entry, list[Decoded]]:
    """An entry of the request stream, as Redis returns it, into its requests, withdrawals and refusals.

    `flat` is field, value, field, value. What cannot be understood becomes a Refusal; this never raises.
    """
    name = entry_id.decode()
    # An ID that a producer chose may lie in the future, and those that Redis makes after it too: nobody
    # arrived later than now.
    entry = Entry(name, min(arrival_of(name), now_us))
    raw = {
        _NAMES.get(key) or key.decode("utf-8", "replace"): value
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    }
    if "withdraw" in raw:
        return entry, [_withdrawal(entry, raw["withdraw"])]
    packed = raw.pop("requests", None)
    arrival = raw.pop("arrival", None)
    if arrival is not None:
        entry.arrival_us = _kept_arrival(arrival, entry.arrival_us)
    decoded: list[Decoded]
    if packed is None:
        decoded = [_decode_request(entry, raw, settings, default_id=name)]
    else:
        # What was put back says more than it did at first: it may be larger, and so is never refused for it.
        limit = MAX_PACKED_BYTES if arrival is None else 2 * MAX_PACKED_BYTES
        tickets = raw.pop("slots", b"") if arrival is not None else b""
        decoded = _decode_packed(entry, packed, raw, settings, limit)
        if tickets:
            _keep_tickets(decoded, tickets)
    entry.requests = [one for one in decoded if type(one) is Request]
    return entry, decoded


def _kept_arrival(value: bytes, entry_arrival_us: int) -> int:
    """The arrival of requests that were put back. It can only be earlier than the new entry's own."""
    try:
        return min(int(value) * 1000, entry_arrival_us) if value.isdigit() else entry_arrival_us
    except ValueError:  # Python reads no more than a few thousand digits
        return entry_arrival_us


def _keep_tickets(decoded: Sequence[Decoded], tickets: bytes) -> None:
    """Requests that were put back keep their tickets. Who wrote something else there has none."""
    names = tickets.split()
    if len(names) == len(decoded) and all(map(_TICKET.fullmatch, names)):
        for one, name in zip(decoded, names, strict=True):
            if type(one) is Request:
                one.ticket = name.decode()


def _withdrawal(entry: Entry, names: bytes) -> Withdrawal:
    if len(names) > MAX_WITHDRAW_BYTES:  # never the beginning of a name, which may be another's
        names = names[:MAX_WITHDRAW_BYTES].rpartition(b" ")[0]
    return Withdrawal(entry, frozenset(names.decode("ascii", "replace").split()))


def _decode_packed(
    entry: Entry, packed: bytes, shared: Fields, settings: ModelSettings, limit: int
) -> list[Decoded]:
    """Several requests in one entry; the entry's other fields hold for all that do not say otherwise."""
    try:
        _check_size(len(packed), limit)
        maps = _unpack_maps(packed)
        if type(maps) is not list or not maps:
            raise InvalidArgumentError("requests: must be a msgpack array of maps, at least one")
        of_each = sum(len(name) + len(value) for name, value in shared.items())
        _check_size(len(packed) + len(maps) * of_each, limit)  # put back, each has them as its own
    except Exception as error:
        detail = (
            error.detail
            if isinstance(error, CarpoolError)
            else f"requests: not a msgpack array of maps ({error})"
        )
        return [_refusal(entry, shared, entry.id, InvalidArgumentError(detail))]
    model = _model_of(entry, shared, settings)
    return [
        (
            _like(model, one, settings)
            if model is not None and type(one) is dict and one.keys() == _PLAIN
            else None
        )
        or _decode_one_of(entry, one, shared, settings)
        for one in maps
    ]


def _check_size(packed_bytes: int, limit: int) -> None:
    if packed_bytes > limit:
        raise InvalidArgumentError(f"requests: {packed_bytes} bytes in all; at most {limit}")


def _unpack_maps(packed: bytes) -> Any:
    """The array of maps. Nested arrays and maps take 60 times their bytes: of a large entry they are counted.

    (Not of a small one: to count costs each request 70 ns.)
    """
    left = MAX_REQUESTS_PER_ENTRY + 1

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise InvalidArgumentError("requests: arrays or maps within a request")
        return container

    hook = count if len(packed) > UNCOUNTED_BYTES else None
    return msgpack.unpackb(
        packed,
        max_array_len=MAX_REQUESTS_PER_ENTRY,
        max_map_len=MAX_FIELDS + len(_KNOWN),
        list_hook=hook,
        object_hook=hook,
    )


def _model_of(entry: Entry, shared: Fields, settings: ModelSettings) -> Request | None:
    """What the requests of an entry have in common, decoded once, if it can be."""
    decoded = _decode_request(entry, {**shared, "body": b""}, settings, default_id=entry.id)
    return decoded if type(decoded) is Request else None


def _like(model: Request, one: Fields, settings: ModelSettings) -> Request | None:
    """A request that adds an ID and a body to its entry's fields; None if it needs a closer look."""
    correlation_id, body = one["correlation_id"], one["body"]
    if type(correlation_id) is not str or type(body) is not bytes:
        return None
    if len(body) > settings.max_body_bytes or not CORRELATION_ID.fullmatch(correlation_id):
        return None
    return Request(
        model.entry,
        correlation_id,
        body,
        model.content_type,
        model.reply_to,
        model.arrival_us,
        model.deadline_us,
        model.priority,
        model.lane,
        model.cost,
        model.extra,
        model.tenant,
    )


def _decode_one_of(entry: Entry, one: Any, shared: Fields, settings: ModelSettings) -> Decoded:
    if type(one) is not dict:
        return _refusal(entry, shared, entry.id, InvalidArgumentError("requests: an element is not a map"))
    if "correlation_id" not in one:
        return _refusal(
            entry,
            shared,
            entry.id,
            InvalidArgumentError("correlation_id: each of several requests needs its own"),
        )
    return _decode_request(entry, {**shared, **one} if shared else one, settings, default_id=entry.id)


def _decode_request(entry: Entry, raw: Fields, settings: ModelSettings, default_id: str) -> Request | Refusal:
    try:
        body = raw.get("body")
        if body is None:
            raise InvalidArgumentError("body: missing")
        if type(body) is str:
            body = body.encode()
        if type(body) is not bytes:
            raise InvalidArgumentError("body: must be bytes")
        if len(body) > settings.max_body_bytes:
            raise InvalidArgumentError(f"body: {len(body)} bytes; this model takes {settings.max_body_bytes}")
        correlation_id = _name(raw, "correlation_id", default_id)
        request = Request(entry, correlation_id or default_id, body)
        request.arrival_us = entry.arrival_us
        _decode_properties(request, raw, settings)
        return request
    except CarpoolError as error:
        return _refusal(entry, raw, default_id, error)


def _decode_properties(request: Request, raw: Fields, settings: ModelSettings) -> None:
    """Everything beside the body and the correlation ID, each only where it was sent."""
    asked_ms = None
    if len(raw) > 1:
        request.content_type = _content_type(raw)
        request.reply_to = _name(raw, "reply_to", None)
        request.priority = _integer(raw, "priority", PRIORITY_DEFAULT, 0, PRIORITY_LEVELS - 1)
        request.cost = _integer(raw, "cost", 1, 0, MAX_COST)
        request.lane = _lane(raw)
        if "expiration" in raw:
            asked_ms = _integer(raw, "expiration", 0, 1, 1 << 53)
        if not raw.keys() <= _KNOWN:
            request.tenant = _name(raw, "tenant", "") or ""
            request.extra = _extra(raw)
        for name in _SEQUENCE:
            if name in raw:
                raise UnimplementedError(f"{name}: stateful sequences are not served by this version")
    expiration_ms = settings.expiration_ms(request.priority, asked_ms)
    if expiration_ms is not None:
        request.deadline_us = request.arrival_us + expiration_ms * 1000


def _text(raw: Fields, name: str) -> str:
    value = raw[name]
    if type(value) is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{name}: not UTF-8") from None
    if type(value) is not str:
        raise InvalidArgumentError(f"{name}: must be text")
    return value


def _name(raw: Fields, name: str, default: str | None) -> str | None:
    if name not in raw:
        return default
    value = _text(raw, name)
    if not CORRELATION_ID.fullmatch(value):
        raise InvalidArgumentError(f"{name}: must be 1 to 128 of letters, digits, '.', '_', ':', '-'")
    return value


def _content_type(raw: Fields) -> str:
    if "content_type" not in raw:
        return JSON
    value = _text(raw, "content_type")
    for known in CONTENT_TYPES:  # the constant, so that a million requests do not carry a million strings
        if value == known:
            return known
    raise InvalidArgumentError(f"content_type: {value!r:.60} is not one of {', '.join(CONTENT_TYPES)}")


def _integer(raw: Fields, name: str, default: int, lowest: int, highest: int) -> int:
    if name not in raw:
        return default
    value = raw[name]
    if type(value) is not int:
        try:
            text = _text(raw, name)  # digits only: Python's int() takes 1_000, and a space before it
            value = int(text) if len(text) <= 20 and text.isascii() and text.isdigit() else None
        except CarpoolError:
            value = None
    if value is None or not lowest <= value <= highest:
        raise InvalidArgumentError(f"{name}: must be a whole number from {lowest} to {highest}")
    return int(value)


def _lane(raw: Fields) -> str:
    if "lane" not in raw:
        return ""
    value = _text(raw, "lane")
    if len(value) > MAX_LANE_CHARS:
        raise InvalidArgumentError(f"lane: {len(value)} characters; at most {MAX_LANE_CHARS}")
    return value


def _extra(raw: Fields) -> dict[str, bytes]:
    """The fields that Carpool does not know. They travel with the request, for the model to read."""
    extra: dict[str, bytes] = {}
    for name in raw.keys() - _KNOWN:
        value = raw[name]
        if type(value) is not bytes:
            if type(value) not in (str, int, float):
                raise InvalidArgumentError(f"{name!r:.60}: must be bytes, text or a number")
            value = str(value).encode()
        extra[str(name)] = value
    if len(extra) > MAX_FIELDS:
        raise InvalidArgumentError(f"fields: {len(extra)} beside Carpool's own; at most {MAX_FIELDS}")
    if sum(len(name) + len(value) for name, value in extra.items()) > MAX_EXTRA_BYTES:
        raise InvalidArgumentError(f"fields: those beside Carpool's own take over {MAX_EXTRA_BYTES} bytes")
    return extra


def _refusal(entry: Entry, raw: Fields, default_id: str, error: CarpoolError) -> Refusal:
    """Answer what could not be understood at its own names where those are valid, else at the entry's ID."""

    def valid(name: str, default: str | None) -> str | None:
        try:
            return _name(raw, name, default)
        except CarpoolError:
            return default

    try:
        content_type = _content_type(raw)
    except CarpoolError:
        content_type = JSON
    return Refusal(
        entry,
        valid("correlation_id", default_id) or default_id,
        valid("reply_to", None),
        content_type,
        error.status,
        "input",
        error.detail,
    )


# --- requests: messages -> entry ---------------------------------------------------------------------------


def encode_requests(requests: Iterable[Request]) -> bytes:
    """The `requests` field for what goes back to the stream after a dispatch took only some."""
    return bytes(msgpack.packb([_request_map(request) for request in requests]))


def tickets_of(requests: Iterable[Request]) -> str:
    """The `tickets` field that goes with it, in which all requests of an entry have one, or none."""
    return " ".join(request.ticket for request in requests if request.ticket is not None)


def _request_map(request: Request) -> Fields:
    raw: Fields = {
        "correlation_id": request.correlation_id,
        "body": request.body,
        "content_type": request.content_type,
        "priority": request.priority,
        "cost": request.cost,
        **(request.extra or {}),
    }
    if request.reply_to is not None:
        raw["reply_to"] = request.reply_to
    if request.lane:
        raw["lane"] = request.lane
    if request.deadline_us is not None:
        raw["expiration"] = max(1, (request.deadline_us - request.arrival_us) // 1000)
    return raw
