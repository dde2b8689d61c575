"""Entries of the request stream <-> requests, withdrawals and refusals.

A producer may send any bytes, so `decode_entry` never raises: a request that cannot be understood becomes a
Refusal whose detail names the field. Everything that is decoded has a limit. The settings `max_body_bytes`
and those of the expiration are applied here. A packed entry has several requests, in its field `requests`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack

from carpool.errors import CarpoolError, InvalidArgumentError, UnimplementedError
from carpool.keys import CORRELATION_ID
from carpool.messages import PRIORITY_DEFAULT, PRIORITY_LEVELS, Entry, Refusal, Request, Withdrawal
from carpool.model_settings import ModelSettings
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    MAX_COST,
    MAX_FIELDS,
    SEQUENCE_FIELDS,
    Fields,
    read_content_type,
    read_extra_fields,
    read_integer,
    read_lane,
    read_name,
    read_valid_content_type,
    read_valid_name,
)

MAX_REQUESTS_PER_ENTRY: Final = 4096
# A batch, or an entry put back, can be several times as large, and must stay below the 512 MiB that Redis
# accepts in one string.
MAX_PACKED_BYTES: Final = 64 * 1024 * 1024
MAX_WITHDRAW_BYTES: Final = 1 << 20
UNCOUNTED_BYTES_MAX: Final = 1 << 20  # up to this size the containers of a packed entry are not counted
MAX_EXPIRATION_MS: Final = 1 << 53

_FIELD_NAMES: Final = {name.encode(): name for name in CARPOOL_FIELDS}
_ID_AND_BODY: Final = frozenset({"correlation_id", "body"})
_TICKET: Final = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}:[0-9]{1,4}")

Decoded = Request | Refusal | Withdrawal


def arrival_of(entry_id: str) -> int:
    """When Redis accepted an entry, in microseconds (to the millisecond)."""
    return int(entry_id.partition("-")[0]) * 1000


def ticket_of(entry_id: str, position: int) -> str:
    """A request's ticket in the order of results: the entry in which it arrived, and its position there."""
    return f"{entry_id}:{position}"


# --- decoding: an entry ------------------------------------------------------------------------------------


def decode_entry(
    entry_id: bytes, flat: Sequence[bytes], settings: ModelSettings, now_us: int = sys.maxsize
) -> tuple[Entry, list[Decoded]]:
    """Decode an entry of the request stream, as Redis returns it. Never raises.

    `flat` is field, value, field, value. Each request that cannot be understood becomes a Refusal. An arrival
    later than `now_us` counts as `now_us`: a producer may choose an entry ID in the future, and the IDs that
    Redis then assigns follow it.
    """
    name = entry_id.decode()
    entry = Entry(name, min(arrival_of(name), now_us))
    raw = {
        _FIELD_NAMES.get(key) or key.decode("utf-8", "replace"): value
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    }
    if "withdraw" in raw:
        return entry, [_decode_withdrawal(entry, raw["withdraw"])]
    packed = raw.pop("requests", None)
    arrival = raw.pop("arrival", None)
    if arrival is not None:
        entry.arrival_us = _arrival_put_back(arrival, entry.arrival_us)
    decoded: list[Decoded]
    if packed is None:
        decoded = [_decode_request(entry, raw, settings, default_id=name)]
    else:
        # Each request of an entry put back carries what all of them shared before, so the entry may be larger
        # than the one that its producer sent. It must not be refused for that.
        limit_bytes = MAX_PACKED_BYTES if arrival is None else 2 * MAX_PACKED_BYTES
        tickets = raw.pop("slots", b"") if arrival is not None else b""
        decoded = _decode_packed(entry, packed, raw, settings, limit_bytes)
        if tickets:
            _restore_tickets(decoded, tickets)
    entry.requests = [item for item in decoded if type(item) is Request]
    return entry, decoded


def _decode_withdrawal(entry: Entry, names: bytes) -> Withdrawal:
    if len(names) > MAX_WITHDRAW_BYTES:  # drop the last name: what is left of it may be another request's ID
        names = names[:MAX_WITHDRAW_BYTES].rpartition(b" ")[0]
    return Withdrawal(entry, frozenset(names.decode("ascii", "replace").split()))


def _arrival_put_back(arrival: bytes, entry_arrival_us: int) -> int:
    """The arrival of requests that were put back, never later than the arrival of the new entry."""
    try:
        return min(int(arrival) * 1000, entry_arrival_us) if arrival.isdigit() else entry_arrival_us
    except ValueError:  # Python limits the digits of an integer
        return entry_arrival_us


def _restore_tickets(decoded: Sequence[Decoded], tickets: bytes) -> None:
    """Give requests that were put back the tickets they had; none if the field is malformed."""
    names = tickets.split()
    if len(names) == len(decoded) and all(map(_TICKET.fullmatch, names)):
        for item, name in zip(decoded, names, strict=True):
            if type(item) is Request:
                item.ticket = name.decode()


# --- decoding: several requests in one entry ---------------------------------------------------------------


def _decode_packed(
    entry: Entry, packed: bytes, shared: Fields, settings: ModelSettings, limit_bytes: int
) -> list[Decoded]:
    """The requests of a packed entry. Its other fields, `shared`, hold for each request without its own.

    Most requests have only a correlation ID and a body. These copy everything else from a template, a request
    made once from the shared fields, which is several times as fast as decoding each on its own.
    """
    try:
        maps = _unpack_maps(packed, shared, limit_bytes)
    except Exception as error:  # msgpack's errors are ValueErrors, but hashing a map's key may raise others
        detail = (
            error.detail
            if isinstance(error, CarpoolError)
            else f"requests: not a msgpack array of maps ({error})"
        )
        return [_refuse(entry, shared, entry.id, InvalidArgumentError(detail))]
    template = _decode_request(entry, {**shared, "body": b""}, settings, default_id=entry.id)
    if type(template) is not Request:  # a shared field is invalid: decode each, since it may have its own
        return [_decode_packed_request(entry, raw, shared, settings) for raw in maps]
    return [
        (
            _from_template(template, raw, settings)
            if type(raw) is dict and raw.keys() == _ID_AND_BODY
            else None
        )
        or _decode_packed_request(entry, raw, shared, settings)
        for raw in maps
    ]


def _unpack_maps(packed: bytes, shared: Fields, limit_bytes: int) -> list[Any]:
    """The elements of a packed entry: an array, not empty, of what should be maps."""
    _check_size(len(packed), limit_bytes)
    maps = _unpack(packed)
    if type(maps) is not list or not maps:
        raise InvalidArgumentError("requests: must be a non-empty msgpack array of maps")
    shared_bytes = sum(len(name) + len(value) for name, value in shared.items())
    _check_size(len(packed) + len(maps) * shared_bytes, limit_bytes)  # if put back, each request carries them
    return maps


def _check_size(packed_bytes: int, limit_bytes: int) -> None:
    if packed_bytes > limit_bytes:
        raise InvalidArgumentError(
            f"requests: {packed_bytes} bytes in all; at most {limit_bytes} are allowed"
        )


def _unpack(packed: bytes) -> Any:
    """The value of a packed entry.

    Nested arrays and maps take 60 times their bytes in memory, so those of a large entry are counted. Those
    of a small one are not: counting costs 70 ns per request.
    """
    containers_left = MAX_REQUESTS_PER_ENTRY + 1

    def count(container: Any) -> Any:
        nonlocal containers_left
        containers_left -= 1
        if containers_left < 0:
            raise InvalidArgumentError("requests: a request must not contain arrays or maps")
        return container

    hook = count if len(packed) > UNCOUNTED_BYTES_MAX else None
    return msgpack.unpackb(
        packed,
        max_array_len=MAX_REQUESTS_PER_ENTRY,
        max_map_len=MAX_FIELDS + len(CARPOOL_FIELDS),
        list_hook=hook,
        object_hook=hook,
    )


def _from_template(template: Request, raw: Fields, settings: ModelSettings) -> Request | None:
    """A request with this correlation ID and body; None if it has to be decoded on its own."""
    correlation_id, body = raw["correlation_id"], raw["body"]
    if type(correlation_id) is not str or type(body) is not bytes:
        return None
    if len(body) > settings.max_body_bytes or not CORRELATION_ID.fullmatch(correlation_id):
        return None
    return Request(
        template.entry,
        correlation_id,
        body,
        template.content_type,
        template.reply_to,
        template.arrival_us,
        template.deadline_us,
        template.priority,
        template.lane,
        template.cost,
        template.extra,
        template.tenant,
    )


def _decode_packed_request(entry: Entry, raw: Any, shared: Fields, settings: ModelSettings) -> Decoded:
    if type(raw) is not dict:
        return _refuse(entry, shared, entry.id, InvalidArgumentError("requests: an element is not a map"))
    if "correlation_id" not in raw:
        error = InvalidArgumentError("correlation_id: missing; each request in a packed entry needs its own")
        return _refuse(entry, shared, entry.id, error)
    return _decode_request(entry, {**shared, **raw} if shared else raw, settings, default_id=entry.id)


# --- decoding: one request ---------------------------------------------------------------------------------


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
            raise InvalidArgumentError(
                f"body: {len(body)} bytes; this model takes at most {settings.max_body_bytes}"
            )
        correlation_id = read_name(raw, "correlation_id", default_id)
        request = Request(entry, correlation_id or default_id, body)
        request.arrival_us = entry.arrival_us
        _decode_properties(request, raw, settings)
        return request
    except CarpoolError as error:
        return _refuse(entry, raw, default_id, error)


def _decode_properties(request: Request, raw: Fields, settings: ModelSettings) -> None:
    """Everything besides the body and the correlation ID."""
    asked_ms = None
    if len(raw) > 1:
        request.content_type = read_content_type(raw)
        request.reply_to = read_name(raw, "reply_to", None)
        request.priority = read_integer(raw, "priority", PRIORITY_DEFAULT, 0, PRIORITY_LEVELS - 1)
        request.cost = read_integer(raw, "cost", 1, 0, MAX_COST)
        request.lane = read_lane(raw)
        if "expiration" in raw:
            asked_ms = read_integer(raw, "expiration", 0, 1, MAX_EXPIRATION_MS)
        if not raw.keys() <= CARPOOL_FIELDS:
            request.tenant = read_name(raw, "tenant", "") or ""
            request.extra = read_extra_fields(raw)
        for field in SEQUENCE_FIELDS:
            if field in raw:
                raise UnimplementedError(f"{field}: stateful sequences are not supported by this version")
    expiration_ms = settings.expiration_ms(request.priority, asked_ms)
    if expiration_ms is not None:
        request.deadline_us = request.arrival_us + expiration_ms * 1000


def _refuse(entry: Entry, raw: Fields, default_id: str, error: CarpoolError) -> Refusal:
    """A Refusal, addressed by the request's own correlation ID and `reply_to` as far as these are valid."""
    return Refusal(
        entry,
        read_valid_name(raw, "correlation_id", default_id) or default_id,
        read_valid_name(raw, "reply_to", None),
        read_valid_content_type(raw),
        error.status,
        "input",
        error.detail,
    )


# --- encoding: requests that are put back ------------------------------------------------------------------


def encode_requests(requests: Iterable[Request]) -> bytes:
    """The `requests` field of an entry put back: only some of its requests were dispatched or refused."""
    return bytes(msgpack.packb([_request_map(request) for request in requests]))


def tickets_of(requests: Iterable[Request]) -> str:
    """The `slots` field of such an entry: its requests' tickets. Either all of them have one, or none has."""
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
