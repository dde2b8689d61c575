"""Columns -> runs: the correlation IDs of several requests, and their bodies as rows or as a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.keys import CORRELATION_ID
from carpool.messages.requests import Entry, Run
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Rows
from carpool.wire.request_fields import (
    COLUMN_FIELDS,
    MAX_PACKED_BYTES,
    MAX_REQUESTS_PER_ENTRY,
    STORED_BODY_FIELDS,
    Fields,
    count_ids,
    read_text,
)
from carpool.wire.runs import body_field, check_body_size, check_requests, decode_attributes, refuse
from carpool.wire.sequence_fields import Decoded

# In columns no field of a producer's own has one of these names.
COLUMNS_ONLY: Final = COLUMN_FIELDS | STORED_BODY_FIELDS


def is_columns(raw: Any) -> bool:
    """Whether these fields are several requests as columns."""
    return type(raw) is dict and "correlation_ids" in raw and "body" not in raw and "body_key" not in raw


def decode_columns(entry: Entry, raw: Fields, settings: ModelSettings) -> list[Decoded]:
    """Requests as columns: their IDs, and their bodies as rows of equal length or as a list."""
    attributes = {name: value for name, value in raw.items() if name not in COLUMNS_ONLY}
    try:
        ids = _read_ids(raw)
    except CarpoolError as error:
        return [refuse(entry, raw, entry.id, error)]
    try:
        run = Run(entry, ids, _read_columns(raw, len(ids), settings))
        decode_attributes(run, attributes, settings)
        decoded = check_requests(run, attributes, settings, column_body_fields)
        _check_attributes_put_back(decoded)
        return decoded
    except CarpoolError as error:
        names = [name if CORRELATION_ID.fullmatch(name) else entry.id for name in ids]
        return [refuse(entry, raw, entry.id, error)._replace(correlation_ids=names)]


def _check_attributes_put_back(decoded: Sequence[Decoded]) -> None:
    """If put back, each run carries the fields that all of them shared: limit their bytes in all."""
    extra = next((item.extra for item in decoded if type(item) is Run), None)
    if extra and len(decoded) > 1:
        size_bytes = len(decoded) * sum(len(name) + len(extra[name]) for name in extra)
        if size_bytes > MAX_PACKED_BYTES:
            raise InvalidArgumentError(
                f"fields: {size_bytes} bytes if each request has them; at most {MAX_PACKED_BYTES} are allowed"
            )


def head_bytes(columns: Fields, shared: Fields) -> int:
    """The size of the head of these rows, which may be a field that all elements of the entry share."""
    head = columns.get("row_head", shared.get("row_head"))
    return len(head) if type(head) is bytes else 0


def _read_ids(raw: Fields) -> list[str]:
    count = count_ids(raw)  # before they are split: many spaces would take 8 times their bytes
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
    check_body_size(len(head) + width, settings)
    size_bytes = count * (len(head) + width)
    if size_bytes > MAX_PACKED_BYTES:
        raise InvalidArgumentError(
            f"rows: {size_bytes} bytes, each with row_head; at most {MAX_PACKED_BYTES} are allowed"
        )
    return Rows(head, data, width)


def column_body_fields(element: Any) -> Fields:
    """The fields of a request whose body is this element of `bodies`: its bytes, or where it is stored."""
    if type(element) is dict and element.keys() <= STORED_BODY_FIELDS:
        return element
    return body_field(element)
