"""Entries of the request stream <-> runs of requests, withdrawals and refusals.

A producer may send any bytes, so `decode_entry` never raises: a request that cannot be understood becomes a
Refusal whose detail names the field. Everything that is decoded has a limit. The settings `max_body_bytes`
and those of the expiration are applied here.

An entry has one request (`body`), columns (`correlation_ids` and `rows`), or several of both (`requests`).
Requests that differ only in their correlation IDs and bodies become one run (`runs`), as do columns
(`columns`). The batcher writes entries itself: those of requests that it puts back (`put_back`).

Why: docs/decisions/0005.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import msgpack

from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.keys import CORRELATION_ID
from carpool.messages.requests import Entry, Run, Withdrawal
from carpool.model_settings import ModelSettings
from carpool.wire.columns import decode_columns, head_bytes, is_columns
from carpool.wire.field_hints import NAMES_LOOKED_AT_MAX
from carpool.wire.put_back import arrival_put_back, encode_runs, restore_tickets, tickets_of
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    COLUMN_FIELDS,
    MAX_FIELDS,
    MAX_PACKED_BYTES,
    MAX_REQUESTS_PER_ENTRY,
    Fields,
    count_ids,
)
from carpool.wire.runs import (
    body_field,
    check_requests,
    decode_attributes,
    decode_request,
    decode_without_bodies,
    delay_from,
    refuse,
    refuse_all,
)
from carpool.wire.sequence_fields import (
    Decoded,
    divide_sequences,
    has_sequences,
    place_in_sequence,
    read_end_sequences,
    split_names,
)

__all__ = [
    "Decoded",
    "arrival_of",
    "decode_entry",
    "decode_in_pieces",
    "encode_runs",
    "refuse_oversized",
    "tickets_of",
    "was_perhaps_put_back",
]

PIECE_REQUESTS: Final = 256  # that differ in their fields; each takes about 10 us
RUN_REQUESTS_MAX: Final = 8  # or the model's `max_batch_size`: longer runs are divided
_TOO_LONG: Final = "max_array_len"  # in the message of msgpack's error
UNCOUNTED_BYTES_MAX: Final = 1 << 20  # up to this size the containers of a packed entry are not counted

_FIELD_NAMES: Final = {name.encode(): name for name in CARPOOL_FIELDS | COLUMN_FIELDS}


def arrival_of(entry_id: str) -> int:
    """When Redis accepted an entry, in microseconds (to the millisecond)."""
    return int(entry_id.partition("-")[0]) * 1000


def was_perhaps_put_back(flat: Sequence[bytes]) -> bool:
    """Whether these fields of an entry say that a batcher put it back; any producer may say so, too."""
    return b"arrival" in flat[::2]


# --- an entry ----------------------------------------------------------------------------------------------


def decode_entry(
    entry_id: bytes,
    flat: Sequence[bytes],
    settings: ModelSettings,
    now_us: int = sys.maxsize,
    may_be_put_back: Callable[[bytes], bool] = lambda entry_id: True,
) -> tuple[Entry, list[Decoded]]:
    """Decode an entry of the request stream, as Redis returns it. Never raises.

    `flat` is field, value, field, value. Requests that cannot be understood become Refusals. An arrival later
    than `now_us` counts as `now_us`: a producer may choose an entry ID in the future, and the IDs that Redis
    then assigns follow it.
    """
    pieces = decode_in_pieces(entry_id, flat, settings, now_us, may_be_put_back)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            decoded: tuple[Entry, list[Decoded]] = end.value
            return decoded


def decode_in_pieces(
    entry_id: bytes,
    flat: Sequence[bytes],
    settings: ModelSettings,
    now_us: int = sys.maxsize,
    may_be_put_back: Callable[[bytes], bool] = lambda entry_id: True,
) -> Generator[None, None, tuple[Entry, list[Decoded]]]:
    """As `decode_entry`, in pieces of about PIECE_REQUESTS requests, so that the caller can do other things
    between them. Nothing is changed before the last one."""
    name = entry_id.decode()
    entry = Entry(name, min(arrival_of(name), now_us))
    raw: Fields = {
        _FIELD_NAMES.get(key) or _field_name(key): value
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    }
    if "withdraw" in raw:
        return entry, [_decode_withdrawal(entry, raw)]
    if "end_sequences" in raw:
        return entry, [read_end_sequences(entry, raw["end_sequences"])]
    packed = raw.pop("requests", None)
    arrival = raw.pop("arrival", None)
    arrived_us, is_put_back = entry.arrival_us, False
    if arrival is not None:
        entry.arrival_us = arrival_put_back(arrival, arrived_us)
        is_put_back = may_be_put_back(entry_id)
    if packed is not None:
        tickets = raw.pop("tickets", b"") if arrival is not None else b""
        # Each run of an entry put back carries what all of them shared before, so the entry may be larger
        # than the one that its producer sent. It must not be refused for that.
        limit_bytes = MAX_PACKED_BYTES if arrival is None else 2 * MAX_PACKED_BYTES
        decoded = yield from _decode_packed(entry, packed, raw, settings, limit_bytes)
        if tickets:
            restore_tickets(entry, decoded, tickets)
    elif is_columns(raw):
        decoded = decode_columns(entry, raw, settings)
    else:
        request = decode_request(entry, raw, settings, default_id=name)
        if type(request) is Run and request.sequence is None and arrival is None:
            entry.runs.append(request)
            return entry, [request]
        decoded = [request]
    if has_sequences(decoded):
        decoded = yield from divide_sequences(decoded, were_put_back=is_put_back)
    decoded = _divide_long_runs(decoded, settings)
    entry.runs = [item for item in decoded if type(item) is Run]
    if arrival is not None and not is_put_back:
        entry.arrival_us = arrived_us
        for run in entry.runs:
            delay_from(run, arrived_us)
    return entry, decoded


def _field_name(key: bytes) -> Any:
    """The name of a field. One that is no text stays bytes, as in a packed entry: then it is equal to no
    other, and `read_extra_fields` refuses it."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


def _decode_withdrawal(entry: Entry, raw: Fields) -> Decoded:
    """Names that cannot be correlation IDs withdraw nothing. If the first ones are, all of it is refused."""
    names = split_names(raw["withdraw"])
    looked_at = names[:NAMES_LOOKED_AT_MAX]
    if looked_at and not any(map(CORRELATION_ID.fullmatch, looked_at)):
        detail = f"withdraw: {looked_at[0]!r:.140} is no correlation ID; these are separated by spaces"
        return refuse(entry, raw, entry.id, InvalidArgumentError(detail))
    return Withdrawal(entry, frozenset(names))


def refuse_oversized(
    entry_id: bytes, flat: Sequence[bytes], field: bytes, size_bytes: int, now_us: int = sys.maxsize
) -> tuple[Entry, list[Decoded]]:
    """An entry of which only the small fields were read: one refusal, for all of its requests.

    `field` is the largest of its fields, and `size_bytes` what all of them have.
    """
    name = entry_id.decode()
    entry = Entry(name, min(arrival_of(name), now_us))
    raw: Fields = {_field_name(key): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
    detail = (
        f"{field.decode('utf-8', 'replace')}: the entry has {size_bytes} bytes; at most {MAX_PACKED_BYTES} "
        "are allowed"
    )
    decoded: list[Decoded] = []
    refused = refuse(entry, raw, name, InvalidArgumentError(detail))
    place_in_sequence(refused, 0, decoded, were_put_back=False)
    return entry, decoded


def _divide_long_runs(decoded: list[Decoded], settings: ModelSettings) -> list[Decoded]:
    """Divide runs that are longer than a batch: a run is the least that can be put back in an entry. O(n)."""
    limit = max(RUN_REQUESTS_MAX, settings.max_batch_size)
    for item in decoded:
        if type(item) is Run and len(item.correlation_ids) > limit:
            break
    else:
        return decoded
    divided: list[Decoded] = []
    for item in decoded:
        if type(item) is Run and len(item.correlation_ids) > limit:
            divided += item.divide(limit)
        else:
            divided.append(item)
    return divided


# --- several requests in one entry -------------------------------------------------------------------------


def _decode_packed(
    entry: Entry, packed: bytes, shared: Fields, settings: ModelSettings, limit_bytes: int
) -> Generator[None, None, list[Decoded]]:
    """The requests of a packed entry. Its other fields, `shared`, hold for each request without its own."""
    try:
        elements = _unpack_elements(packed, shared, limit_bytes)
    except Exception as error:  # msgpack's errors are ValueErrors, but hashing a map's key may raise others
        detail = error.detail if isinstance(error, CarpoolError) else _why_not_unpacked(packed, error)
        return [refuse(entry, shared, entry.id, InvalidArgumentError(detail))]
    decoded: list[Decoded] = []
    piece_ends = PIECE_REQUESTS
    for others, group in _similar_elements(elements):
        if len(decoded) >= piece_ends:
            piece_ends = len(decoded) + PIECE_REQUESTS
            yield
        if others is None:
            decoded += _decode_element(entry, group[0], shared, settings)
        else:
            decoded += _decode_similar(entry, others, group, shared, settings)
    return decoded


def _why_not_unpacked(packed: bytes, error: Exception) -> str:
    if _TOO_LONG in str(error):
        return f"requests: an array in it is longer than the {MAX_REQUESTS_PER_ENTRY} requests of an entry"
    if packed[:1] in (b"[", b"{"):
        return "requests: not a msgpack array of maps; is it JSON?"
    reason = f" ({error})" if str(error) else ""
    return f"requests: not a msgpack array of maps{reason}"


def _unpack_elements(packed: bytes, shared: Fields, limit_bytes: int) -> list[Any]:
    """The elements of a packed entry: an array, not empty, of what should be maps."""
    _check_size(len(packed), limit_bytes)
    elements = _unpack(packed)
    if type(elements) is not list or not elements:
        raise InvalidArgumentError("requests: must be a non-empty msgpack array of maps")
    columns = [element for element in elements if is_columns(element)]
    size = len(elements) - len(columns) + sum(map(count_ids, columns))
    if size > MAX_REQUESTS_PER_ENTRY:
        raise InvalidArgumentError(f"requests: {size}; at most {MAX_REQUESTS_PER_ENTRY} are allowed")
    # If put back, each run carries the shared fields. Bodies that are rows have their head each.
    shared_bytes = len(elements) * sum(len(name) + len(value) for name, value in shared.items())
    heads_bytes = sum(count_ids(raw) * head_bytes(raw, shared) for raw in columns)
    _check_size(len(packed) + shared_bytes + heads_bytes, limit_bytes)
    return elements


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
    # Columns with one request are a map, its list of bodies, and a map for a body stored elsewhere.
    containers_left = 3 * MAX_REQUESTS_PER_ENTRY + 1

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


def _similar_elements(elements: Sequence[Any]) -> Iterator[tuple[Fields | None, list[Any]]]:
    """Consecutive elements that have the same fields besides `correlation_id` and `body`, with these fields.
    All of them have a body, or none.

    An element that is not one request with its body in it, or without any, comes alone, with None.
    """
    group: list[Any] = []
    group_others: Fields | None = None
    for element in elements:
        others = _other_fields(element)
        if group and (
            others is None or others != group_others or ("body" in element) is not ("body" in group[0])
        ):
            yield group_others, group
            group = []
        group.append(element)
        group_others = others
    yield group_others, group


def _other_fields(element: Any) -> Fields | None:
    if type(element) is not dict or "correlation_id" not in element:
        return None
    if "body" not in element:
        if len(element) == 1:
            return _NO_FIELDS
        if "body_key" in element or "correlation_ids" in element:
            return None
    elif len(element) == 2:
        return _NO_FIELDS
    others = {name: value for name, value in element.items() if name not in ("correlation_id", "body")}
    return others if _COMPARABLE.issuperset(map(type, others.values())) else None


_NO_FIELDS: Final[Fields] = {}
_COMPARABLE: Final = frozenset({int, str, bytes})  # in Python, True and 1.0 equal 1, but mean something else


def _decode_similar(
    entry: Entry, others: Fields, group: Sequence[Fields], shared: Fields, settings: ModelSettings
) -> list[Decoded]:
    """Requests that have the same fields besides `correlation_id` and `body`: one run, if all are valid."""
    attributes = {**shared, **others}
    if "body" not in group[0] and "body" not in shared:
        return decode_without_bodies(entry, [raw["correlation_id"] for raw in group], attributes, settings)
    if "body" not in group[0]:
        group = [{**raw, "body": shared["body"]} for raw in group]
    run = Run(entry, [raw["correlation_id"] for raw in group], [raw["body"] for raw in group])
    try:
        decode_attributes(run, attributes, settings)
    except CarpoolError as error:
        return refuse_all(entry, group, attributes, settings, error)
    return check_requests(run, attributes, settings, body_field)


def _decode_element(entry: Entry, raw: Any, shared: Fields, settings: ModelSettings) -> list[Decoded]:
    """An element of a packed entry: one request, which needs an ID of its own, or columns."""
    if type(raw) is not dict:
        return [refuse(entry, shared, entry.id, InvalidArgumentError("requests: an element is not a map"))]
    if is_columns(raw):
        return decode_columns(entry, {**shared, **raw}, settings)
    if "correlation_id" not in raw:
        error = InvalidArgumentError("correlation_id: missing; each request in a packed entry needs its own")
        return [refuse(entry, shared, entry.id, error)]
    return [decode_request(entry, {**shared, **raw}, settings, default_id=entry.id)]
