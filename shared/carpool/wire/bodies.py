"""A request's or result's body: bytes of its content type <-> values, with limits on depth, length and count.

`decode_body` raises nothing but InvalidArgumentError, whose detail names the field; `encode_body` nothing but
InternalError.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import CarpoolError, InternalError, InvalidArgumentError
from carpool.messages import JSON, RAW
from carpool.wire.tensors import TENSOR_FIELDS, decode_tensor, is_tensor, tensor_json, tensor_map

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 100_000
MAX_JSON_ITEMS: Final = 1_000_000

_BINARY_TENSOR: Final = frozenset(name.encode() for name in TENSOR_FIELDS)
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_Path = tuple[Any, Any] | None  # the way to a value: the way to what it is in, and its name or number there


def decode_body(content_type: str, body: bytes) -> Any:
    """A request's body as the model gets it: plain Python values, arrays for tensors, bytes for octet-stream.

    Raises InvalidArgumentError; depth, length and count are limited before anything large is built.
    """
    if content_type == RAW:
        return body
    value = _decode_json(body) if content_type == JSON else _decode_msgpack(body)
    return _with_arrays(value, None, 0)


def _decode_json(body: bytes) -> Any:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_JSON_ITEMS:
        raise InvalidArgumentError(
            f"body: more than {MAX_JSON_ITEMS} items of JSON; send a tensor as msgpack"
        )
    try:
        return _FROM_JSON.decode(body.decode())
    except UnicodeDecodeError:
        raise InvalidArgumentError("body: not UTF-8") from None
    except RecursionError:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"body: not JSON ({error})") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


# Not json.loads, which would take UTF-16, half a surrogate pair and NaN, and no other language's parser does.
_FROM_JSON: Final = json.JSONDecoder(parse_constant=_no_constant)


def _decode_msgpack(body: bytes) -> Any:
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise InvalidArgumentError(f"body: more than {MAX_CONTAINERS} arrays and maps")
        return container

    try:
        return msgpack.unpackb(body, object_hook=count, list_hook=count)
    except CarpoolError:
        raise
    except msgpack.StackError:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            "body: a text in it is not UTF-8; bytes, as in a tensor's data, are msgpack's bin"
        ) from None
    except (
        Exception
    ) as error:  # msgpack's own errors share no base but ValueError, and hashing a key may raise
        raise InvalidArgumentError(f"body: not msgpack ({str(error) or 'it ends too early'})") from None


def _with_arrays(value: Any, path: _Path, depth: int) -> Any:
    """`value` with each tensor's map made an array, its depth looked at on the way."""
    kind = type(value)
    if kind is dict:
        if value.keys() == _BINARY_TENSOR:
            value = _with_text_names(value)
        if is_tensor(value):
            return decode_tensor(value, _field(path))
        _check_depth(depth)
        return {key: _with_arrays(item, (path, key), depth + 1) for key, item in value.items()}
    if kind is list:
        _check_depth(depth)
        if _PLAIN.issuperset(map(type, value)):
            return value
        return [_with_arrays(item, (path, index), depth + 1) for index, item in enumerate(value)]
    if kind in (msgpack.ExtType, msgpack.Timestamp):
        raise InvalidArgumentError(f"{_field(path)}: msgpack extension types are not understood")
    return value


def _with_text_names(value: dict[bytes, Any]) -> dict[str, Any]:
    """A tensor of a language that has one kind of string, and writes all of them as bin (Perl does)."""
    named = {name.decode(): item for name, item in value.items()}
    if type(named["datatype"]) is bytes:
        named["datatype"] = named["datatype"].decode("ascii", "replace")
    return named


def _field(path: _Path) -> str:
    """The way to a value as a person would write it: `body.rows[2]`. Made only where it is needed, and of
    the beginnings of names: a name may be as long as the body."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part[:40]!s}")
    return "".join(("body", *reversed(parts)))


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}")


def encode_body(content_type: str, value: Any) -> bytes:
    """A value as bytes of `content_type`; arrays become tensors. Raises InternalError if it cannot be."""
    try:
        if content_type == RAW:
            return _encode_raw(value)
        if content_type == JSON:
            return _JSON.encode(value).encode()
        return bytes(msgpack.packb(value, default=_msgpack_default))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InternalError(f"the value cannot be written as {content_type}: {error}") from None


def _json_default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_json(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        raise ValueError("bytes have no place in JSON; use msgpack")
    raise TypeError(f"a {type(value).__name__} cannot be sent")


_JSON: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default
)


def _encode_raw(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, str):
        return value.encode()
    raise InternalError(f"a {type(value).__name__} cannot be written as {RAW}; use bytes")


def _msgpack_default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_map(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent")
