"""Entries of the request stream <-> runs of requests, withdrawals and refusals.

A producer may send any bytes, so `decode_entry` never raises: a request that cannot be understood becomes a
Refusal whose detail names the field. Everything that is decoded has a limit. The settings `max_body_bytes`
and those of the expiration are applied here.

An entry has one request (`body`), columns (`correlation_ids` and `rows`), or several of both (`requests`).
Requests that differ only in their correlation IDs and bodies become one run. What a run needs is decoded
once, and its IDs and bodies are checked all at once, so that a request costs almost nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgpack

from carpool.errors import CarpoolError, InvalidArgumentError, UnimplementedError
from carpool.keys import CORRELATION_ID, CORRELATION_ID_CHARS_MAX, CORRELATION_ID_LETTERS
from carpool.messages import PRIORITY_DEFAULT, PRIORITY_LEVELS, Entry, Refusal, Run, Withdrawal
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Body, Rows, StoredBody
from carpool.tickets import TicketRange, Tickets
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    COLUMN_FIELDS,
    MAX_COST,
    MAX_FIELDS,
    SEQUENCE_FIELDS,
    STORED_BODY_FIELDS,
    Fields,
    read_content_type,
    read_extra_fields,
    read_integer,
    read_lane,
    read_name,
    read_text,
    read_valid_content_type,
    read_valid_name,
)

MAX_REQUESTS_PER_ENTRY: Final = 4096
# A batch, or an entry put back, can be several times as large, and must stay below the 512 MiB that Redis
# accepts in one string.
MAX_PACKED_BYTES: Final = 64 * 1024 * 1024
RUN_REQUESTS_MAX: Final = 8  # or the model's `max_batch_size`: longer runs are divided
MAX_WITHDRAW_BYTES: Final = 1 << 20
UNCOUNTED_BYTES_MAX: Final = 1 << 20  # up to this size the containers of a packed entry are not counted
MAX_EXPIRATION_MS: Final = 1 << 53

_FIELD_NAMES: Final = {name.encode(): name for name in CARPOOL_FIELDS | COLUMN_FIELDS}
_ID_LETTERS: Final = CORRELATION_ID_LETTERS.encode()
_TICKET_RANGE: Final = re.compile(r"([0-9]{1,20}-[0-9]{1,20}):([0-9]{1,4})\+([0-9]{1,4})")

Decoded = Run | Refusal | Withdrawal


def arrival_of(entry_id: str) -> int:
    """When Redis accepted an entry, in microseconds (to the millisecond)."""
    return int(entry_id.partition("-")[0]) * 1000


# --- decoding: an entry ------------------------------------------------------------------------------------


def decode_entry(
    entry_id: bytes, flat: Sequence[bytes], settings: ModelSettings, now_us: int = sys.maxsize
) -> tuple[Entry, list[Decoded]]:
    """Decode an entry of the request stream, as Redis returns it. Never raises.

    `flat` is field, value, field, value. Requests that cannot be understood become Refusals. An arrival later
    than `now_us` counts as `now_us`: a producer may choose an entry ID in the future, and the IDs that Redis
    then assigns follow it.
    """
    name = entry_id.decode()
    entry = Entry(name, min(arrival_of(name), now_us))
    raw: Fields = {
        _FIELD_NAMES.get(key) or key.decode("utf-8", "replace"): value
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    }
    if "withdraw" in raw:
        return entry, [_decode_withdrawal(entry, raw["withdraw"])]
    packed = raw.pop("requests", None)
    arrival = raw.pop("arrival", None)
    if arrival is not None:
        entry.arrival_us = _arrival_put_back(arrival, entry.arrival_us)
    if packed is not None:
        tickets = raw.pop("slots", b"") if arrival is not None else b""
        # Each run of an entry put back carries what all of them shared before, so the entry may be larger
        # than the one that its producer sent. It must not be refused for that.
        limit_bytes = MAX_PACKED_BYTES if arrival is None else 2 * MAX_PACKED_BYTES
        decoded = _decode_packed(entry, packed, raw, settings, limit_bytes)
        if tickets:
            _restore_tickets(entry, decoded, tickets)
    elif _is_columns(raw):
        decoded = _decode_columns(entry, raw, settings)
    else:
        request = _decode_request(entry, raw, settings, default_id=name)
        if type(request) is Run:
            entry.runs.append(request)
        return entry, [request]
    decoded = _divide_long_runs(decoded, settings)
    entry.runs = [item for item in decoded if type(item) is Run]
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


def _restore_tickets(entry: Entry, decoded: Sequence[Decoded], slots: bytes) -> None:
    """Give requests that were put back the tickets they had; none if the field is malformed.

    Those that are refused, since the model's limits became lower meanwhile, had a ticket each too.
    """
    ranges: list[TicketRange] = []
    for text in slots.decode("ascii", "replace").split():
        match = _TICKET_RANGE.fullmatch(text)
        if match is None:
            return
        ranges.append(TicketRange(match[1], int(match[2]), int(match[3])))
    tickets = Tickets(tuple(ranges))
    counts = [len(item.correlation_ids) for item in decoded if type(item) is not Withdrawal]
    if tickets.size != sum(counts) or not all(of_range.size for of_range in ranges):
        return
    entry.claimed_tickets = tickets
    start = 0
    for item, count in zip(decoded, counts, strict=True):
        if type(item) is Run:
            item.tickets = tickets.slice(start, start + count)
        start += count


# --- decoding: several requests in one entry ---------------------------------------------------------------


def _decode_packed(
    entry: Entry, packed: bytes, shared: Fields, settings: ModelSettings, limit_bytes: int
) -> list[Decoded]:
    """The requests of a packed entry. Its other fields, `shared`, hold for each request without its own."""
    try:
        elements = _unpack_elements(packed, shared, limit_bytes)
    except Exception as error:  # msgpack's errors are ValueErrors, but hashing a map's key may raise others
        detail = (
            error.detail
            if isinstance(error, CarpoolError)
            else f"requests: not a msgpack array of maps ({error})"
        )
        return [_refuse(entry, shared, entry.id, InvalidArgumentError(detail))]
    decoded: list[Decoded] = []
    for others, group in _similar_elements(elements):
        if others is None:
            decoded += _decode_element(entry, group[0], shared, settings)
        else:
            decoded += _decode_similar(entry, others, group, shared, settings)
    return decoded


def _unpack_elements(packed: bytes, shared: Fields, limit_bytes: int) -> list[Any]:
    """The elements of a packed entry: an array, not empty, of what should be maps."""
    _check_size(len(packed), limit_bytes)
    elements = _unpack(packed)
    if type(elements) is not list or not elements:
        raise InvalidArgumentError("requests: must be a non-empty msgpack array of maps")
    columns = [element for element in elements if _is_columns(element)]
    size = len(elements) - len(columns) + sum(map(_count_ids, columns))
    if size > MAX_REQUESTS_PER_ENTRY:
        raise InvalidArgumentError(f"requests: {size}; at most {MAX_REQUESTS_PER_ENTRY} are allowed")
    # If put back, each run carries the shared fields. Bodies that are rows have their head each.
    shared_bytes = len(elements) * sum(len(name) + len(value) for name, value in shared.items())
    heads_bytes = sum(_count_ids(raw) * _head_bytes(raw, shared) for raw in columns)
    _check_size(len(packed) + shared_bytes + heads_bytes, limit_bytes)
    return elements


def _count_ids(columns: Fields) -> int:
    """How many requests columns have: one more than there are spaces."""
    ids = columns["correlation_ids"]
    return 1 + ids.count(" " if type(ids) is str else b" ") if type(ids) in (str, bytes) else 1


def _head_bytes(columns: Fields, shared: Fields) -> int:
    head = columns.get("row_head", shared.get("row_head"))
    return len(head) if type(head) is bytes else 0


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

    An element that is not one request with its body in it comes alone, with None.
    """
    group: list[Any] = []
    group_others: Fields | None = None
    for element in elements:
        others = _other_fields(element)
        if group and (others is None or others != group_others):
            yield group_others, group
            group = []
        group.append(element)
        group_others = others
    yield group_others, group


def _other_fields(element: Any) -> Fields | None:
    if type(element) is not dict or "correlation_id" not in element or "body" not in element:
        return None
    if len(element) == 2:
        return _NO_FIELDS
    others = {name: value for name, value in element.items() if name not in ("correlation_id", "body")}
    return others if _COMPARABLE.issuperset(map(type, others.values())) else None


_NO_FIELDS: Final[Fields] = {}
_COMPARABLE: Final = frozenset({int, str, bytes})  # in Python, True and 1.0 equal 1, but mean something else


def _decode_similar(
    entry: Entry, others: Fields, group: Sequence[Fields], shared: Fields, settings: ModelSettings
) -> list[Decoded]:
    """Requests that have the same fields besides `correlation_id` and `body`: one run, if all are valid."""
    run = Run(entry, [raw["correlation_id"] for raw in group], [raw["body"] for raw in group])
    attributes = {**shared, **others}
    try:
        _decode_properties(run, attributes, settings)
    except CarpoolError:  # each is refused, perhaps for another reason
        return [_decode_request(entry, {**shared, **raw}, settings, default_id=entry.id) for raw in group]
    return _check_requests(run, attributes, settings, _body_field)


def _check_requests(
    run: Run, attributes: Fields, settings: ModelSettings, fields_of: Callable[[Any], Fields]
) -> list[Decoded]:
    """A run whose IDs and bodies are still unchecked: the run, if all are valid.

    Otherwise, in their order, runs of the valid requests, and a refusal of each other one. `fields_of` makes
    the fields of a request of a body.
    """
    ids, bodies = run.correlation_ids, run.bodies
    if _are_ids(ids) and (isinstance(bodies, Rows) or _are_bodies(bodies, settings)):
        return [run]
    decoded: list[Decoded] = []
    part_ids: list[str] = []
    part_bodies: list[Body] = []
    for at, name in enumerate(ids):
        raw = {"correlation_id": name, **fields_of(bodies[at])}
        try:
            body = _read_body(raw, settings)
            correlation_id = read_name(raw, "correlation_id", "") or ""
        except CarpoolError as error:
            decoded.append(_refuse(run.entry, {**attributes, **raw}, run.entry.id, error))
            continue
        if not decoded or type(decoded[-1]) is not Run:
            part_ids, part_bodies = [], []
            decoded.append(replace(run, correlation_ids=part_ids, bodies=part_bodies))
        part_ids.append(correlation_id)
        part_bodies.append(body)
    return decoded


def _are_ids(ids: Sequence[Any]) -> bool:
    """Whether these are all valid correlation IDs."""
    try:
        joined = "".join(ids).encode("ascii")
    except (TypeError, UnicodeEncodeError):
        return False
    lengths = set(map(len, ids))
    return (
        not joined.translate(None, _ID_LETTERS)
        and 0 not in lengths
        and max(lengths) <= CORRELATION_ID_CHARS_MAX
    )


def _are_bodies(bodies: Sequence[Any], settings: ModelSettings) -> bool:
    """Whether these are all bytes of an allowed length."""
    return set(map(type, bodies)) == {bytes} and max(map(len, bodies)) <= settings.max_body_bytes


# --- decoding: one request, or columns ---------------------------------------------------------------------


def _is_columns(raw: Any) -> bool:
    return type(raw) is dict and "correlation_ids" in raw and "body" not in raw and "body_key" not in raw


def _decode_element(entry: Entry, raw: Any, shared: Fields, settings: ModelSettings) -> list[Decoded]:
    """An element of a packed entry: one request, which needs an ID of its own, or columns."""
    if type(raw) is not dict:
        return [_refuse(entry, shared, entry.id, InvalidArgumentError("requests: an element is not a map"))]
    if _is_columns(raw):
        return _decode_columns(entry, {**shared, **raw}, settings)
    if "correlation_id" not in raw:
        error = InvalidArgumentError("correlation_id: missing; each request in a packed entry needs its own")
        return [_refuse(entry, shared, entry.id, error)]
    return [_decode_request(entry, {**shared, **raw}, settings, default_id=entry.id)]


def _decode_columns(entry: Entry, raw: Fields, settings: ModelSettings) -> list[Decoded]:
    """Requests as columns: their IDs, and their bodies as rows of equal length or as a list."""
    attributes = {name: value for name, value in raw.items() if name not in _COLUMNS_ONLY}
    try:
        ids = _read_ids(raw)
    except CarpoolError as error:
        return [_refuse(entry, raw, entry.id, error)]
    try:
        run = Run(entry, ids, _read_columns(raw, len(ids), settings))
        _decode_properties(run, attributes, settings)
        decoded = _check_requests(run, attributes, settings, _column_body_fields)
        _check_attributes_put_back(decoded)
        return decoded
    except CarpoolError as error:
        names = [name if CORRELATION_ID.fullmatch(name) else entry.id for name in ids]
        return [_refuse(entry, raw, entry.id, error)._replace(correlation_ids=names)]


# In columns no field of a producer's own has one of these names.
_COLUMNS_ONLY: Final = COLUMN_FIELDS | STORED_BODY_FIELDS


def _check_attributes_put_back(decoded: Sequence[Decoded]) -> None:
    """If put back, each run carries the fields that all of them shared: limit their bytes in all."""
    extra = next((item.extra for item in decoded if type(item) is Run), None)
    if extra and len(decoded) > 1:
        size_bytes = len(decoded) * sum(len(name) + len(extra[name]) for name in extra)
        if size_bytes > MAX_PACKED_BYTES:
            raise InvalidArgumentError(
                f"fields: {size_bytes} bytes if each request has them; at most {MAX_PACKED_BYTES} are allowed"
            )


def _read_ids(raw: Fields) -> list[str]:
    count = _count_ids(raw)  # before they are split: many spaces would take 8 times their bytes
    if count > MAX_REQUESTS_PER_ENTRY:
        raise InvalidArgumentError(
            f"correlation_ids: {count}; at most {MAX_REQUESTS_PER_ENTRY} are allowed in an entry"
        )
    return read_text(raw, "correlation_ids").split(" ")


def _read_columns(raw: Fields, count: int, settings: ModelSettings) -> Bodies:
    """The bodies of columns. Those in a list are not checked yet."""
    if ("rows" in raw) == ("bodies" in raw):
        raise InvalidArgumentError("rows: columns have either rows or an array of bodies")
    if "rows" in raw:
        return _read_rows(raw, count, settings)
    bodies = raw["bodies"]
    if type(bodies) is not list:
        raise InvalidArgumentError("bodies: must be an array")
    if len(bodies) != count:
        raise InvalidArgumentError(f"bodies: {len(bodies)} for {count} correlation IDs")
    return bodies


def _read_rows(raw: Fields, count: int, settings: ModelSettings) -> Rows:
    head, data = raw.get("row_head", b""), raw["rows"]
    if type(head) is not bytes or type(data) is not bytes:
        raise InvalidArgumentError("rows: rows and row_head must be bytes")
    width, left_over = divmod(len(data), count)
    if left_over or not width:
        raise InvalidArgumentError(f"rows: {len(data)} bytes are not {count} rows of equal length")
    _check_body_size(len(head) + width, settings)
    size_bytes = count * (len(head) + width)
    if size_bytes > MAX_PACKED_BYTES:
        raise InvalidArgumentError(
            f"rows: {size_bytes} bytes, each with row_head; at most {MAX_PACKED_BYTES} are allowed"
        )
    return Rows(head, data, width)


def _column_body_fields(element: Any) -> Fields:
    """The fields of a request whose body is this element of `bodies`: its bytes, or where it is stored."""
    if type(element) is dict and element.keys() <= STORED_BODY_FIELDS:
        return element
    return _body_field(element)


def _body_field(body: Any) -> Fields:
    return {"body": body}


def _decode_request(entry: Entry, raw: Fields, settings: ModelSettings, default_id: str) -> Run | Refusal:
    try:
        body = _read_body(raw, settings)
        if type(body) is StoredBody:
            others = {name: value for name, value in raw.items() if name not in STORED_BODY_FIELDS}
        else:
            others = raw
        correlation_id = read_name(raw, "correlation_id", default_id)
        run = Run(entry, [correlation_id or default_id], [body])
        _decode_properties(run, others, settings)
        return run
    except CarpoolError as error:
        return _refuse(entry, raw, default_id, error)


def _read_body(raw: Fields, settings: ModelSettings) -> Body:
    body = raw.get("body")
    if body is None:
        if "body_key" not in raw:
            raise InvalidArgumentError("body: missing")
        name = read_name(raw, "body_key", None)
        if "body_bytes" not in raw:
            raise InvalidArgumentError("body_bytes: missing; a body under a key of its own needs its length")
        size_bytes = read_integer(raw, "body_bytes", 0, 0, 1 << 53)
        _check_body_size(size_bytes, settings)
        return StoredBody(name or "", size_bytes)
    if type(body) is str:
        body = body.encode()
    if type(body) is not bytes:
        raise InvalidArgumentError("body: must be bytes")
    _check_body_size(len(body), settings)
    return body


def _check_body_size(size_bytes: int, settings: ModelSettings) -> None:
    if size_bytes > settings.max_body_bytes:
        raise InvalidArgumentError(
            f"body: {size_bytes} bytes; this model takes at most {settings.max_body_bytes}"
        )


def _decode_properties(run: Run, raw: Fields, settings: ModelSettings) -> None:
    """Everything besides the bodies and the correlation IDs."""
    run.arrival_us = run.entry.arrival_us
    asked_ms = None
    if raw:
        run.content_type = read_content_type(raw)
        run.reply_to = read_name(raw, "reply_to", None)
        if "reply_columns" in raw:
            run.reply_columns = read_integer(raw, "reply_columns", 0, 0, 1) == 1
        run.priority = read_integer(raw, "priority", PRIORITY_DEFAULT, 0, PRIORITY_LEVELS - 1)
        run.cost = read_integer(raw, "cost", 1, 0, MAX_COST)
        run.lane = read_lane(raw)
        if "expiration" in raw:
            asked_ms = read_integer(raw, "expiration", 0, 1, MAX_EXPIRATION_MS)
        if not raw.keys() <= CARPOOL_FIELDS:
            run.tenant = read_name(raw, "tenant", "") or ""
            run.extra = read_extra_fields(raw)
        for field in SEQUENCE_FIELDS:
            if field in raw:
                raise UnimplementedError(f"{field}: stateful sequences are not supported by this version")
    expiration_ms = settings.expiration_ms(run.priority, asked_ms)
    if expiration_ms is not None:
        run.deadline_us = run.arrival_us + expiration_ms * 1000


def _refuse(entry: Entry, raw: Fields, default_id: str, error: CarpoolError) -> Refusal:
    """A Refusal, addressed by the request's own correlation ID and `reply_to` as far as these are valid."""
    return Refusal(
        entry,
        [read_valid_name(raw, "correlation_id", default_id) or default_id],
        read_valid_name(raw, "reply_to", None),
        read_valid_content_type(raw),
        error.status,
        "input",
        error.detail,
        body_names=_stored_names_in(raw),
    )


def _stored_names_in(raw: Fields) -> list[str]:
    """The names of stored bodies in the fields of a request or of columns, as far as these are valid."""
    if raw.get("body") is not None:
        return []
    bodies = raw.get("bodies")
    elements = bodies if type(bodies) is list else [raw]
    names = [read_valid_name(element, "body_key", None) for element in elements if type(element) is dict]
    return [name for name in names if name is not None]


# --- encoding: requests that are put back ------------------------------------------------------------------


def encode_runs(runs: Iterable[Run]) -> bytes:
    """The `requests` field of an entry put back: only some of its requests were dispatched or refused."""
    return bytes(msgpack.packb([element for run in runs for element in _elements_of(run)]))


def tickets_of(runs: Iterable[Run]) -> str:
    """The `slots` field of such an entry: its requests' tickets. Either all of them have one, or none has."""
    ranges = [of_range for run in runs if run.tickets for of_range in run.tickets.ranges]
    return " ".join(map(str, Tickets.join(ranges).ranges))


def _elements_of(run: Run) -> list[Fields]:
    """A run as columns; as single requests if a field of its producer's own has a name that columns use."""
    attributes = _attributes_of(run)
    ids, bodies = run.correlation_ids, run.bodies
    if _COLUMNS_ONLY.isdisjoint(attributes):
        if isinstance(bodies, Rows):
            columns: Fields = {"row_head": bodies.head, "rows": bodies.data}
        else:
            columns = {"bodies": [_body_element(body) for body in bodies]}
        return [{"correlation_ids": " ".join(ids), **columns, **attributes}]
    return [
        {"correlation_id": name, **_column_body_fields(_body_element(bodies[at])), **attributes}
        for at, name in enumerate(ids)
    ]


def _body_element(body: Body) -> Any:
    return {"body_key": body.name, "body_bytes": body.size_bytes} if type(body) is StoredBody else body


def _attributes_of(run: Run) -> Fields:
    attributes: Fields = {
        "content_type": run.content_type,
        "priority": run.priority,
        "cost": run.cost,
        **(run.extra or {}),
    }
    if run.reply_to is not None:
        attributes["reply_to"] = run.reply_to
    if run.reply_columns:
        attributes["reply_columns"] = 1
    if run.lane:
        attributes["lane"] = run.lane
    if run.deadline_us is not None:
        attributes["expiration"] = max(1, (run.deadline_us - run.arrival_us) // 1000)
    return attributes
