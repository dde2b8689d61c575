"""Results and chunks <-> envelopes: a JSON object or a msgpack map each; on a reply stream, an array of maps.

A producer that asked for it (`reply_columns`) reads results that differ only in correlation ID and row as
columns: one map for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgpack

from carpool.errors import OK, InvalidArgumentError
from carpool.messages.requests import JSON
from carpool.messages.results import Chunk, Result, ResultColumns
from carpool.rows import Rows

MAX_DETAIL_CHARS: Final = 1000

Fields = dict[str, Any]


def encode_result(result: Result) -> bytes:
    """The envelope on a result's own list: JSON where the result is JSON, else msgpack."""
    return _json_envelope(result) if result.content_type == JSON else encode_envelope(result)


def encode_envelope(result: Result) -> bytes:
    """The envelope as a msgpack map: one element of a `results` field."""
    return bytes(msgpack.packb(_envelope(result)))


def encode_results(results: Iterable[Result]) -> bytes:
    """The `results` field of one entry on a reply stream: a msgpack array of envelopes."""
    return bytes(msgpack.packb([_envelope(result) for result in results]))


class AlikeEnvelopes(NamedTuple):
    """What the envelopes of several requests have in common: all but the correlation ID, which is between
    `head` and `tail`. In msgpack the ID is a text with its own head; in JSON no character that it may have is
    escaped."""

    is_msgpack: bool
    head: bytes
    tail: bytes


def split_envelope(result: Result, *, as_element: bool) -> AlikeEnvelopes:
    """The envelopes of requests that have this result, each with its own correlation ID.

    `as_element`: as `encode_envelope` does, for a reply stream; else as `encode_result`.
    """
    result = result._replace(correlation_id="")
    if not as_element and result.content_type == JSON:
        return AlikeEnvelopes(False, _JSON_HEAD, _json_envelope(result)[len(_JSON_HEAD) :])
    envelope, head = encode_envelope(result), _MSGPACK_HEAD_BYTES
    return AlikeEnvelopes(True, envelope[:head], envelope[head + 1 :])  # an empty text is one byte


def encode_alike(result: Result, correlation_ids: Sequence[str]) -> list[bytes]:
    """The elements of a `results` field for requests that have this result, each with its correlation ID."""
    _, head, tail = split_envelope(result, as_element=True)
    pack = msgpack.packb
    return [head + pack(name) + tail for name in correlation_ids]


_JSON_HEAD: Final = b'{"correlation_id":"'
_MSGPACK_HEAD_BYTES: Final = len(msgpack.packb({"correlation_id": None})) - 1


def encode_array_head(size: int) -> bytes:
    """What a msgpack array of `size` elements begins with; the encoded elements follow it."""
    return bytes(_PACKER.pack_array_header(size))


_PACKER: Final = msgpack.Packer()


def _envelope(result: Result) -> Fields:
    (
        correlation_id,
        status,
        content_type,
        body,
        detail,
        batch_size,
        queue_us,
        compute_us,
        index,
        first_us,
        warnings,
        version,
    ) = result
    envelope: Fields
    if status == OK:
        envelope = {
            "correlation_id": correlation_id,
            "status": status,
            "content_type": content_type,
            "body": body,
            "final": True,
            "batch_size": batch_size,
            "queue_us": queue_us,
            "compute_us": compute_us,
        }
        if index is not None:
            envelope["index"] = index
        if first_us is not None:
            envelope["first_us"] = first_us
        if warnings:
            envelope["warnings"] = list(warnings)
        if version:
            envelope["version"] = version
        return envelope
    envelope = {
        "correlation_id": correlation_id,
        "status": status,
        # A detail may quote a lone surrogate (JSON's "\ud800"), which UTF-8 cannot encode.
        "detail": (detail or "")[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode(),
        "final": True,
        "batch_size": batch_size,
        "queue_us": queue_us,
        "compute_us": compute_us,
    }
    if warnings:
        envelope["warnings"] = list(warnings)
    if version:
        envelope["version"] = version
    return envelope


def _json_envelope(result: Result) -> bytes:
    (
        correlation_id, status, _, body, _, batch_size, queue_us, compute_us, index, first_us, warnings,
        version,
    ) = result  # fmt: skip
    if status != OK:
        return _JSON_ENCODER.encode(_envelope(result)).encode()
    # The body is JSON already, and no character that a correlation ID may have is escaped in JSON.
    envelope = _JSON_ENVELOPE % (correlation_id.encode(), body, batch_size, queue_us, compute_us)
    if index is None and first_us is None and not warnings and not version:
        return envelope
    of_stream = _JSON_FIELD % (b"index", index) if index is not None else b""
    of_stream += _JSON_FIELD % (b"first_us", first_us) if first_us is not None else b""
    warned = b',"warnings":' + _JSON_ENCODER.encode(warnings).encode() if warnings else b""
    of_version = b',"version":"%b"' % version.encode() if version else b""  # nothing in it is escaped
    return envelope[:-1] + of_stream + warned + of_version + b"}"


_JSON_FIELD: Final = b',"%b":%d'
_JSON_ENVELOPE: Final = (
    b'{"correlation_id":"%b","status":"OK","content_type":"application/json","body":%b,"final":true,'
    b'"batch_size":%d,"queue_us":%d,"compute_us":%d}'
)
_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_chunk(chunk: Chunk) -> bytes:
    """The envelope of a chunk on its request's own list: JSON where the chunk is JSON, else msgpack."""
    if chunk.content_type != JSON:
        return encode_chunk_envelope(chunk)
    envelope = _JSON_CHUNK % (chunk.correlation_id.encode(), chunk.body, chunk.index)
    merged = _JSON_FIELD % (_merged_field(chunk).encode(), chunk.merged) if chunk.merged > 1 else b""
    return envelope + merged + b"}"


def _merged_field(chunk: Chunk) -> str:
    """The field that tells how many values are merged, and by its name whether the body is a list of them."""
    return "values" if chunk.is_list else "chunks"


_JSON_CHUNK: Final = (
    b'{"correlation_id":"%b","status":"OK","content_type":"application/json","body":%b,"final":false,'
    b'"index":%d'
)


def encode_chunk_envelope(chunk: Chunk) -> bytes:
    """The envelope of a chunk as a msgpack map: one element of a `results` field."""
    correlation_id, content_type, body, index, merged, _ = chunk
    envelope: Fields = {
        "correlation_id": correlation_id,
        "status": OK,
        "content_type": content_type,
        "body": body,
        "final": False,
        "index": index,
    }
    if merged > 1:
        envelope[_merged_field(chunk)] = merged
    return bytes(_PACKER.pack(envelope))


def decode_results(packed: bytes) -> list[Any]:
    """The envelopes, or the columns, of one entry on a reply stream, which nobody has checked. Raises
    InvalidArgumentError unless they are an array."""
    try:
        envelopes = msgpack.unpackb(packed)
    except ValueError as error:
        raise InvalidArgumentError(f"results: not msgpack ({str(error) or 'unexpected end'})") from None
    if type(envelopes) is not list:
        raise InvalidArgumentError("results: must be a msgpack array")
    return envelopes


_Types = tuple[tuple[str, type], ...]
_TYPES: Final[_Types] = (("correlation_id", str), ("status", str), ("final", bool))
_TYPES_OF_FINAL: Final[_Types] = (("batch_size", int), ("queue_us", int), ("compute_us", int))
_TYPES_OF_CHUNK: Final[_Types] = (("index", int),)
_TYPES_OF_OK: Final[_Types] = (("content_type", str), ("body", bytes))
_TYPES_OF_ERROR: Final[_Types] = (("detail", str),)


def check_envelope(envelope: Any) -> None:
    """Check that an envelope has what a reader needs. Raises InvalidArgumentError."""
    if type(envelope) is not dict:
        raise InvalidArgumentError("envelope: must be a map")
    _check_types(envelope, _TYPES)
    _check_types(envelope, _TYPES_OF_FINAL if envelope["final"] else _TYPES_OF_CHUNK)
    _check_types(envelope, _TYPES_OF_OK if envelope["status"] == OK else _TYPES_OF_ERROR)


def _check_types(fields: Fields, types: _Types) -> None:
    for name, kind in types:
        if type(fields.get(name)) is not kind:
            raise InvalidArgumentError(f"{name}: must be {kind.__name__}")


def encode_columns(columns: Iterable[ResultColumns]) -> bytes:
    """The `columns` field of one entry on a reply stream: a msgpack array of maps."""
    return bytes(msgpack.packb([_columns_map(results) for results in columns]))


def encode_columns_map(results: ResultColumns) -> bytes:
    """One element of a `columns` field."""
    return bytes(msgpack.packb(_columns_map(results)))


def _columns_map(results: ResultColumns) -> Fields:
    correlation_ids, content_type, rows, batch_size, queue_us, compute_us, version = results
    columns: Fields = {
        "correlation_ids": " ".join(correlation_ids),
        "status": OK,
        "content_type": content_type,
        "row_head": rows.head,
        "rows": rows.data,
        "final": True,
        "batch_size": batch_size,
        "queue_us": queue_us,
        "compute_us": compute_us,
    }
    if version:
        columns["version"] = version
    return columns


def decode_columns(packed: bytes) -> list[ResultColumns]:
    """The columns of one entry on a reply stream. Raises InvalidArgumentError unless they are well formed."""
    try:
        maps = msgpack.unpackb(packed)
    except ValueError as error:
        raise InvalidArgumentError(f"columns: not msgpack ({str(error) or 'unexpected end'})") from None
    if type(maps) is not list:
        raise InvalidArgumentError("columns: must be a msgpack array")
    return [columns_of(raw) for raw in maps]


_COLUMN_TYPES: Final = {
    "correlation_ids": str, "content_type": str, "row_head": bytes, "rows": bytes,
    "batch_size": int, "queue_us": int, "compute_us": int,
}  # fmt: skip


def columns_of(raw: Any) -> ResultColumns:
    """One element of a `columns` field. Raises InvalidArgumentError unless it is well formed."""
    if type(raw) is not dict:
        raise InvalidArgumentError("columns: an element is not a map")
    for name, kind in _COLUMN_TYPES.items():
        if type(raw.get(name)) is not kind:
            raise InvalidArgumentError(f"columns: {name} must be {kind.__name__}")
    correlation_ids = raw["correlation_ids"].split(" ")
    data = raw["rows"]
    width, left_over = divmod(len(data), len(correlation_ids))
    if left_over or not width:
        raise InvalidArgumentError(
            f"columns: {len(data)} bytes are not {len(correlation_ids)} rows of equal length"
        )
    return ResultColumns(
        correlation_ids,
        raw["content_type"],
        Rows(raw["row_head"], data, width),
        raw["batch_size"],
        raw["queue_us"],
        raw["compute_us"],
        str(raw.get("version", "")),
    )
