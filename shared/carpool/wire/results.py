"""Results <-> envelopes: a JSON object or a msgpack map each; on a reply stream, a msgpack array of maps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgpack

from carpool.errors import OK, InvalidArgumentError
from carpool.messages import JSON, Result

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


def _envelope(result: Result) -> Fields:
    correlation_id, status, content_type, body, detail, batch_size, queue_us, compute_us = result
    if status == OK:
        return {
            "correlation_id": correlation_id,
            "status": status,
            "content_type": content_type,
            "body": body,
            "final": True,
            "batch_size": batch_size,
            "queue_us": queue_us,
            "compute_us": compute_us,
        }
    return {
        "correlation_id": correlation_id,
        "status": status,
        # A detail may quote a lone surrogate (JSON's "\ud800"), which UTF-8 cannot encode.
        "detail": (detail or "")[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode(),
        "final": True,
        "batch_size": batch_size,
        "queue_us": queue_us,
        "compute_us": compute_us,
    }


def _json_envelope(result: Result) -> bytes:
    envelope = _envelope(result)
    if result.body is not None:
        # The body is JSON already: insert its bytes instead of parsing and serialising them again.
        envelope["body"] = None
        head, tail = _compact(envelope).split(b'"body":null', 1)
        return b"".join((head, b'"body":', result.body, tail))
    return _compact(envelope)


def _compact(value: Fields) -> bytes:
    return _JSON_ENCODER.encode(value).encode()


_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def decode_results(packed: bytes) -> list[Fields]:
    """The envelopes of one entry on a reply stream. Raises InvalidArgumentError unless they are an array."""
    envelopes = msgpack.unpackb(packed)
    if type(envelopes) is not list:
        raise InvalidArgumentError("results: must be a msgpack array")
    return envelopes
