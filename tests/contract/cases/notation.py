"""The notation of the vectors, and what many cases share."""

from __future__ import annotations

import json
from typing import Any, Final

import msgpack

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RAW: Final = "application/octet-stream"

Case = dict[str, Any]
Bytes = Any  # bytes in the notation of the vectors: see `as_vector`


def as_vector(data: bytes) -> Bytes:
    """Bytes in the notation of the vectors: text if they are printable UTF-8, else {"hex": ...}."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    return text if text.isprintable() and text.encode() == data else as_hex(data)


def as_hex(data: bytes) -> Bytes:
    return {"hex": data.hex()}


def times(data: bytes, count: int) -> Bytes:
    return {"hex": data.hex(), "times": count}


def fields_of(flat: tuple[Any, ...]) -> list[list[Bytes]]:
    """Field, value, field, value -> pairs, in the notation of the vectors."""
    parts = [
        part if isinstance(part, dict | list) else as_vector(part if type(part) is bytes else part.encode())
        for part in flat
    ]
    return [list(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
