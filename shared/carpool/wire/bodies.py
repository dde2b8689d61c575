"""The body of a request or a result: bytes of its content type <-> Python values.

Decoding limits depth, length and count. `decode_body` and `decode_result` raise only InvalidArgumentError,
whose detail names the field; `encode_body` raises only InternalError.

JSON goes through the standard library, because integers of any size must survive and NaN must be an error.
(orjson reads integers beyond 64 bits as floats, and writes NaN as null.)
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import CarpoolError, InternalError, InvalidArgumentError
from carpool.messages import JSON, MSGPACK, RAW
from carpool.wire.content_types import ACCEPT, is_value
from carpool.wire.tensors import TENSOR_FIELDS, decode_tensor, is_tensor, tensor_json, tensor_map

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 100_000
MAX_JSON_ITEMS: Final = 1_000_000

_TENSOR_FIELDS_AS_BYTES: Final = frozenset(name.encode() for name in TENSOR_FIELDS)
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_SCALAR_PACKER: Final = msgpack.Packer()  # shared by threads, so not for what calls back into Python
_BYTES: Final = (bytes, bytearray, memoryview)
_Path = tuple[Any, Any] | None  # of a value within a body: the path of its container, then its key or index


def decode_body(content_type: str, body: bytes) -> Any:
    """The body of a request as Python values: numpy arrays for tensors, bytes for octet-stream. Raises
    InvalidArgumentError.

    Depth, length and count are checked before anything large is built. The names in maps are text or bytes:
    with integers, a producer could choose names that collide in a dict.
    """
    return _decode(content_type, body, strict_names=True)


def decode_result(content_type: str, body: bytes) -> Any:
    """As `decode_body`, for the body of a result: names in maps may be anything that a dict can have, because
    the model chose them and not a producer."""
    return _decode(content_type, body, strict_names=False)


def _decode(content_type: str, body: bytes, *, strict_names: bool) -> Any:
    if not is_value(content_type):
        return body
    value = _decode_json(body) if content_type == JSON else _decode_msgpack(body, strict_names)
    return _replace_tensors(value, None, 0)


def _decode_json(body: bytes) -> Any:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_JSON_ITEMS:
        raise InvalidArgumentError(
            f"body: more than {MAX_JSON_ITEMS} JSON items; send large tensors as msgpack"
        )
    try:
        return _JSON_DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is {body[error.start]:02x} hex"
        raise InvalidArgumentError(
            f"body: not UTF-8 ({reason}); msgpack needs a content_type of its own"
        ) from None
    except RecursionError:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"body: not JSON ({error})") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


# Not json.loads: from bytes it also accepts UTF-16, UTF-8 with surrogates, and NaN, as few other parsers do.
_JSON_DECODER: Final = json.JSONDecoder(parse_constant=_reject_constant)


def _decode_msgpack(body: bytes, strict_names: bool) -> Any:
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise InvalidArgumentError(f"body: more than {MAX_CONTAINERS} arrays and maps")
        return container

    try:
        return msgpack.unpackb(body, object_hook=count, list_hook=count, strict_map_key=strict_names)
    except CarpoolError:
        raise
    except msgpack.StackError:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            "body: contains a str that is not UTF-8; send bytes, such as a tensor's data, as msgpack's bin"
        ) from None
    except Exception as error:  # msgpack's errors are ValueErrors, but hashing a map's key may raise others
        raise InvalidArgumentError(f"body: {_why_not_msgpack(body, error)}") from None


def _why_not_msgpack(body: bytes, error: Exception) -> str:
    if isinstance(error, msgpack.ExtraData):
        reason = f"a value ends after {len(body) - len(error.extra)} of {len(body)} bytes"
        if body[:1] in (b"{", b"[", b'"'):
            reason += f": is it JSON? Then content_type must be {JSON}"
    elif isinstance(error, msgpack.FormatError):
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        unpacker.feed(body)
        with suppress(msgpack.FormatError):
            unpacker.skip()
        reason = f"byte {unpacker.tell()} is {body[unpacker.tell()]:02x} hex, with which no value begins"
    elif (name := _WRONG_NAME.match(str(error))) is not None:
        return f"a name in a map is an {name[1]}; send text or bytes"
    else:
        reason = "unexpected end" if isinstance(error, ValueError) else str(error)
    return f"not msgpack ({reason})"


# How msgpack reports a name in a map that is neither text nor bytes.
_WRONG_NAME: Final = re.compile(r"(\w+) is not allowed for map key")


def _replace_tensors(value: Any, path: _Path, depth: int) -> Any:
    """`value` with each tensor's map replaced by its array; raises where it is nested too deep."""
    kind = type(value)
    if kind is dict:
        if value.keys() == _TENSOR_FIELDS_AS_BYTES:
            value = _with_str_fields(value)
        if is_tensor(value):
            return decode_tensor(value, _field(path))
        _check_depth(depth)
        return {key: _replace_tensors(item, (path, key), depth + 1) for key, item in value.items()}
    if kind is list:
        _check_depth(depth)
        if _SCALARS.issuperset(map(type, value)):
            return value
        return [_replace_tensors(item, (path, index), depth + 1) for index, item in enumerate(value)]
    if kind in (msgpack.ExtType, msgpack.Timestamp):
        raise InvalidArgumentError(f"{_field(path)}: msgpack extension types are not supported")
    return value


def _with_str_fields(value: dict[bytes, Any]) -> dict[str, Any]:
    """A tensor whose sender has only one type of string, and writes it as bin (as Perl's msgpack does)."""
    named = {name.decode(): item for name, item in value.items()}
    if type(named["datatype"]) is bytes:
        named["datatype"] = named["datatype"].decode("ascii", "replace")
    return named


def _field(path: _Path) -> str:
    """A path as text, such as `body.rows[2]`, for an error message.

    Built only for errors. Keys are cut short, because a key may be as long as the body.
    """
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part!s:.40}")
    return "".join(("body", *reversed(parts)))


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}")


def encode_body(content_type: str, value: Any) -> bytes:
    """A value as bytes of `content_type`; arrays become tensors. Raises InternalError."""
    try:
        if not is_value(content_type):
            return _encode_bytes(value, content_type)
        if content_type == JSON:
            return _JSON_ENCODER.encode(value).encode()
        if type(value) in _SCALARS:
            return bytes(_SCALAR_PACKER.pack(value))
        return bytes(msgpack.packb(value, default=_msgpack_default))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InternalError(f"the value cannot be written as {content_type}: {_why(error)}") from None


def _why(error: Exception) -> str:
    if "Out of range float values" in str(error):
        return "JSON has neither NaN nor infinity, and it has one of these; use application/msgpack"
    return str(error)


def result_type(content_type: str, wanted: str, value: Any) -> str:
    """The content type of a result: the one that is wanted, or else that of the request. Where that is bytes,
    and the result is not, it is JSON: an image has a label. Raises InvalidArgumentError if the result cannot
    have the one that is wanted, for which the model is not to blame."""
    if wanted:
        _check_wanted(wanted, value)
        return wanted
    return content_type if is_value(content_type) or _is_of(content_type, value) else JSON


def _is_of(content_type: str, value: Any) -> bool:
    """Whether a value can be the bytes of such a type: any bytes can, an array only those of octet-stream."""
    return isinstance(value, _BYTES) or (content_type == RAW and isinstance(value, np.ndarray))


def _check_wanted(wanted: str, value: Any) -> None:
    kind = type(value).__name__
    is_text = isinstance(value, str) and wanted.startswith("text/")
    if not (is_value(wanted) or is_text or _is_of(wanted, value)):
        raise InvalidArgumentError(
            f"{ACCEPT}: {wanted} is bytes, but this model's result is of type {kind}: "
            f"leave {ACCEPT} out, or name {JSON} or {MSGPACK}"
        )
    if wanted == JSON and isinstance(value, bytes | bytearray | memoryview):
        raise InvalidArgumentError(
            f"{ACCEPT}: {JSON} cannot hold bytes, but this model's result is of type {kind}: "
            f"name the type of these bytes, or {MSGPACK}"
        )


def _json_default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_json(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        raise ValueError("JSON cannot hold bytes; use msgpack")
    raise TypeError(f"a {type(value).__name__} cannot be sent")


_JSON_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default
)


def _encode_bytes(value: Any, content_type: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, str):
        return value.encode()
    kind = type(value).__name__
    raise InternalError(f"a value of type {kind} cannot be written as {content_type}; use bytes")


def _msgpack_default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_map(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent")
