"""The fields of a request, read and checked one by one, with a limit on each.

`raw` maps field names to bytes (from a stream entry) or to any msgpack value (from a packed entry). A field
that is absent has a default; an invalid one raises InvalidArgumentError, whose detail names it. A name that
is no text is bytes: it equals no other name, and `read_extra_fields` refuses it.
"""

from __future__ import annotations

from typing import Any, Final

from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.keys import CORRELATION_ID, MODEL_VERSION
from carpool.messages.requests import JSON
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.content_types import ACCEPT, canonical, checked

MAX_REQUESTS_PER_ENTRY: Final = 4096
# A batch, or an entry put back, can be several times as large, and must stay below the 512 MiB that Redis
# accepts in one string.
MAX_PACKED_BYTES: Final = 64 * 1024 * 1024
MAX_FIELDS: Final = 64
MAX_EXTRA_BYTES: Final = 64 * 1024
MAX_LANE_CHARS: Final = 128
MAX_COST: Final = 1 << 40

MAX_NAMES: Final = 16_384  # of requests that are withdrawn, or of sequences that are ended
MAX_NAMES_BYTES: Final = 1 << 20  # of requests that are withdrawn, or of sequences that are ended

SEQUENCE_FIELDS: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "sequence_index"})
# What a producer may send, but for the fields of columns and of stored bodies.
PRODUCER_FIELDS: Final = frozenset(
    {
        "body",
        "content_type",
        "correlation_id",
        "reply_to",
        "expiration",
        "not_before",
        "priority",
        "lane",
        "cost",
        "reply_columns",
        "stream",
        "version",
        *SEQUENCE_FIELDS,
        "requests",
        "withdraw",
        "end_sequences",
    }
)
# Fields that are not passed on to the model. All others are, and are kept when a request is put back.
# (`tickets` and `sequence_place` are read only in an entry put back: see `wire.put_back`.)
CARPOOL_FIELDS: Final = PRODUCER_FIELDS | {"sequence_place", "arrival"}
CALLED_BY: Final = (
    "called_by"  # the models that wait for the request, the outermost first, separated by spaces
)
# These are passed on, although Carpool defines them, and the batcher reads the first.
PASSED_ON_FIELDS: Final = frozenset({"tenant", TRACEPARENT, TRACESTATE, ACCEPT, CALLED_BY})
# These two sets are read only where there is no `body`. Beside a `body` they are the producer's own fields.
COLUMN_FIELDS: Final = frozenset({"correlation_ids", "row_head", "rows", "bodies"})
STORED_BODY_FIELDS: Final = frozenset({"body_key", "body_bytes"})

Fields = dict[str, Any]


def count_ids(columns: Fields) -> int:
    """How many requests columns have: one more than there are spaces."""
    ids = columns["correlation_ids"]
    return 1 + ids.count(" " if type(ids) is str else b" ") if type(ids) in (str, bytes) else 1


def read_text(raw: Fields, field: str) -> str:
    """A field that must be present, as text."""
    value = raw[field]
    if type(value) is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{field}: not UTF-8") from None
    if type(value) is not str:
        raise InvalidArgumentError(f"{field}: must be text")
    return value


def read_name(raw: Fields, field: str, default: str | None) -> str | None:
    """A field that becomes part of a Redis key, as correlation IDs do."""
    if field not in raw:
        return default
    value = read_text(raw, field)
    if not CORRELATION_ID.fullmatch(value):
        raise InvalidArgumentError(
            f"{field}: must have 1 to 128 characters: letters, digits, '.', '_', ':', '-'"
        )
    return value


def read_valid_name(raw: Fields, field: str, default: str | None) -> str | None:
    """As `read_name`, but returns the default where the value is invalid."""
    try:
        return read_name(raw, field, default)
    except CarpoolError:
        return default


def read_content_type(raw: Fields) -> str:
    """The content type; JSON by default."""
    if "content_type" not in raw:
        return JSON
    return checked("content_type", read_text(raw, "content_type"))


def read_valid_content_type(raw: Fields) -> str:
    """That of an answer, as far as the fields are valid; else JSON."""
    try:
        if ACCEPT in raw:
            return canonical(read_text(raw, ACCEPT) or "") or JSON
        return read_content_type(raw)
    except CarpoolError:
        return JSON


def read_integer(raw: Fields, field: str, default: int, lowest: int, highest: int) -> int:
    """A whole number, as a msgpack integer or as decimal digits."""
    if field not in raw:
        return default
    value = raw[field]
    if type(value) is not int:
        try:
            text = read_text(raw, field)  # digits only: Python's int() also accepts "1_000" and " 5"
            value = int(text) if len(text) <= 20 and text.isascii() and text.isdigit() else None
        except CarpoolError:
            value = None
    if value is None or not lowest <= value <= highest:
        raise InvalidArgumentError(f"{field}: must be a whole number from {lowest} to {highest}")
    return int(value)


def read_lane(raw: Fields) -> str:
    """The lane; empty by default."""
    if "lane" not in raw:
        return ""
    value = read_text(raw, "lane")
    if len(value) > MAX_LANE_CHARS:
        raise InvalidArgumentError(f"lane: {len(value)} characters; at most {MAX_LANE_CHARS} are allowed")
    return value


def read_version(raw: Fields) -> str:
    """The version of the model that is asked for; the field must be present."""
    value = read_text(raw, "version")
    if not MODEL_VERSION.fullmatch(value):
        raise InvalidArgumentError(
            "version: must have 1 to 128 characters: letters, digits, '.', '_', ':', '+', '-'"
        )
    return value


def read_extra_fields(raw: Fields) -> dict[str, bytes]:
    """The fields that are not in CARPOOL_FIELDS. They travel with the request, for the model to read."""
    extra: dict[str, bytes] = {}
    for field in raw.keys() - CARPOOL_FIELDS:
        if type(field) is not str:
            first = next(name for name in raw if type(name) is not str)
            raise InvalidArgumentError(f"{first!r:.60}: the name of a field must be text, in UTF-8")
        value = raw[field]
        if type(value) is not bytes:
            if type(value) not in (str, int, float):
                raise InvalidArgumentError(f"{field!r:.60}: must be bytes, text or a number")
            value = str(value).encode()
        extra[field] = value
    if ACCEPT in extra:
        checked(ACCEPT, extra[ACCEPT].decode("ascii", "replace"))
    if len(extra) > MAX_FIELDS:
        raise InvalidArgumentError(
            f"fields: {len(extra)} besides Carpool's own; at most {MAX_FIELDS} are allowed"
        )
    if sum(len(field) + len(value) for field, value in extra.items()) > MAX_EXTRA_BYTES:
        raise InvalidArgumentError(
            f"fields: those besides Carpool's own take more than {MAX_EXTRA_BYTES} bytes"
        )
    return extra
