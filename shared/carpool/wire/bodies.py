"""The body of a request or a result: bytes of its content type <-> Python values.

Decoding limits depth, length and count. `decode_body` and `decode_result` raise only InvalidArgumentError,
whose detail names the field; `encode_body` raises only InternalError.

JSON goes through the standard library, because integers of any size must survive and NaN must be an error.
(orjson reads integers beyond 64 bits as floats, and writes NaN as null.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import CarpoolError, InternalError, InvalidArgumentError
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.wire.content_types import ACCEPT, is_value, other_charset
from carpool.wire.json_rules import (
    LONE_SURROGATE,
    MAX_DEPTH,
    TOO_MANY_DIGITS,
    UnclearError,
    finite,
    has_lone_surrogate,
    with_unique_names,
)
from carpool.wire.tensors import (
    TENSOR_FIELDS,
    Array,
    datatype_of,
    decode_tensor,
    is_tensor,
    keeps_shape_as_lists,
    tensor_json,
    tensor_map,
    to_bytes,
    unmasked,
)
from carpool.wire.values import NOT_CONTIGUOUS, plain

MAX_CONTAINERS: Final = 100_000
MAX_JSON_ITEMS: Final = 1_000_000

_TENSOR_FIELDS_AS_BYTES: Final = frozenset(name.encode() for name in TENSOR_FIELDS)
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_SCALAR_PACKER: Final = msgpack.Packer()  # shared by threads, so not for what calls back into Python
_BYTES: Final = (bytes, bytearray, memoryview)
_DecodeTensor = Callable[[Mapping[str, Any], str], Any]
_Path = tuple[Any, Any] | None  # of a value within a body: the path of its container, then its key or index


def decode_body(content_type: str, body: bytes, *, declared: bool = False) -> Any:
    """The body of a request as Python values: numpy arrays for tensors of numbers, nested lists for those of
    texts, the plain value for those without dimensions, bytes for octet-stream. Raises InvalidArgumentError.

    `declared`: for a model that declares its tensors. All of them are arrays, which keep datatype and shape.

    Depth, length and count are checked before anything large is built. The names in maps are text or bytes:
    with integers, a producer could choose names that collide in a dict.
    """
    return _decode(content_type, body, _tensors_as_arrays if declared else _PlainTensors, strict_names=True)


class NotJSONError(InvalidArgumentError):
    """A body is no JSON at all. Other errors are about JSON that is refused."""


def decode_json(body: bytes) -> Any:
    """As `decode_body`, for JSON: but a tensor remains a map, and NotJSONError says that there is no JSON."""
    value = _decode_json(body)
    _replace_tensors(value, None, 0, decode_tensor)  # for its errors
    return value


def decode_result(content_type: str, body: bytes) -> Any:
    """As `decode_body`, for the body of a result: names in maps may be anything that a dict can have, because
    the model chose them and not a producer. Arrays may be written to. Numbers without dimensions are arrays,
    and so are texts of a shape that lists do not keep."""
    return _decode(content_type, body, _ResultTensors, strict_names=False)


def _decode(
    content_type: str, body: bytes, tensors: Callable[[], _DecodeTensor], *, strict_names: bool
) -> Any:
    if not is_value(content_type):
        return body
    value = _decode_json(body) if content_type == JSON else _decode_msgpack(body, strict_names)
    return value if type(value) in _SCALARS else _replace_tensors(value, None, 0, tensors())


def _tensors_as_arrays() -> _DecodeTensor:
    return decode_tensor


class _PlainTensors:
    """Decodes the tensors of one body, for a model that declares none."""

    def __init__(self) -> None:
        self._lists_left = MAX_CONTAINERS

    def __call__(self, value: Mapping[str, Any], field: str) -> Any:
        array = decode_tensor(value, field)
        if array.dtype.kind == "O":
            return self._texts(array, field)
        return array if array.ndim else array.item()

    def _texts(self, array: Array, field: str) -> Any:
        if not keeps_shape_as_lists(array.shape):
            raise InvalidArgumentError(
                f"{field}.shape: {list(array.shape)}, which lists of texts do not keep: this model declares "
                "no tensors, so send a list"
            )
        return self._listed(array, field)

    def _listed(self, array: Array, field: str) -> Any:
        """Texts as nested lists, whose number is limited: with many dimensions each text is in many."""
        self._lists_left -= sum(math.prod(array.shape[:depth]) for depth in range(array.ndim))
        if self._lists_left < 0:
            raise InvalidArgumentError(f"{field}.shape: texts in more than {MAX_CONTAINERS} lists")
        return array.tolist()


class _ResultTensors(_PlainTensors):
    """Decodes the tensors of one result."""

    def __call__(self, value: Mapping[str, Any], field: str) -> Any:
        array = decode_tensor(value, field)
        if array.dtype.kind == "O":
            return self._listed(array, field) if keeps_shape_as_lists(array.shape) else array
        return array if array.flags.writeable else array.copy()


def _decode_json(body: bytes) -> Any:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_JSON_ITEMS:
        raise InvalidArgumentError(
            f"body: more than {MAX_JSON_ITEMS} JSON items; send large tensors as msgpack"
        )
    decoder = _JSON_DECODER if _is_certainly_finite(body) else _CAREFUL_JSON_DECODER
    try:
        value = decoder.decode(body.decode())
        is_lone = has_lone_surrogate(body, value)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is {body[error.start]:02x} hex"
        raise InvalidArgumentError(
            f"body: not UTF-8 ({reason}); msgpack needs a content_type of its own"
        ) from None
    except RecursionError:
        raise InvalidArgumentError(f"body: nested deeper than {MAX_DEPTH}") from None
    except UnclearError as error:
        raise InvalidArgumentError(f"body: {error}") from None
    except json.JSONDecodeError as error:
        raise NotJSONError(f"body: not JSON ({error})") from None
    except ValueError:  # of int()
        raise InvalidArgumentError(f"body: {_TOO_MANY_DIGITS}") from None
    if is_lone:
        raise InvalidArgumentError(f"body: {LONE_SURROGATE}")
    return value


def _is_certainly_finite(body: bytes) -> bool:
    """Whether no number can be outside the range of FP64, so that none needs to be looked at: such a number
    has an exponent of three digits or more, or hundreds of digits."""
    if len(body) < _SHORT_BYTES and b"e" not in body and b"E" not in body:
        return True
    shape = body.translate(_SHAPES_OF_NUMBERS)
    if b"e" in shape and (b"e000" in shape or b"e+000" in shape):  # a single byte is found much faster
        return False
    return _MANY_DIGITS not in shape


_SHAPES_OF_NUMBERS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_SHORT_BYTES: Final = 200  # so many digits and an exponent of two are 10**299 at most
_MANY_DIGITS: Final = b"0" * _SHORT_BYTES


def _reject_constant(name: str) -> Any:
    raise UnclearError(f"not JSON ({name} is not a JSON number)")


_TOO_MANY_DIGITS: Final = f"{TOO_MANY_DIGITS}: send it as a text"

# Not json.loads: from bytes it also accepts UTF-16, UTF-8 with surrogates, and NaN, as few other parsers do.
_JSON_DECODER: Final = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=with_unique_names)
_CAREFUL_JSON_DECODER: Final = json.JSONDecoder(  # several times slower for floats
    parse_constant=_reject_constant, object_pairs_hook=with_unique_names, parse_float=finite
)


def _decode_msgpack(body: bytes, strict_names: bool) -> Any:
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise InvalidArgumentError(f"body: more than {MAX_CONTAINERS} arrays and maps")
        return container

    def count_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        count(pairs)
        named = dict(pairs)
        return named if len(named) == len(pairs) else with_unique_names(pairs)

    try:
        return msgpack.unpackb(
            body, object_pairs_hook=count_map, list_hook=count, strict_map_key=strict_names
        )
    except CarpoolError:
        raise
    except UnclearError as error:
        raise InvalidArgumentError(f"body: {error}") from None
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


def _replace_tensors(value: Any, path: _Path, depth: int, decode: _DecodeTensor) -> Any:
    """`value` with each tensor's map replaced by its array; raises where it is nested too deep."""
    kind = type(value)
    if kind is dict:
        if value.keys() == _TENSOR_FIELDS_AS_BYTES:
            value = _with_str_fields(value)
        if is_tensor(value):
            return decode(value, _field(path))
        _check_depth(depth)
        return {key: _replace_tensors(item, (path, key), depth + 1, decode) for key, item in value.items()}
    if kind is list:
        _check_depth(depth)
        if _SCALARS.issuperset(map(type, value)):
            return value
        return [_replace_tensors(item, (path, index), depth + 1, decode) for index, item in enumerate(value)]
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


def encode_body(content_type: str, value: Any, *, of_request: bool = False) -> bytes:
    """A value as bytes of `content_type`; arrays become tensors. Raises InternalError.

    The names of maps become text in JSON, and two that would be the same text are an error. A result may be
    the bytes of an array. A request is stricter (`of_request`): names are text, as for `decode_body`, and an
    array is bytes only if it consists of these.
    """
    try:
        if not is_value(content_type):
            return _encode_bytes(value, content_type, of_request=of_request)
        if content_type == JSON:
            text = _JSON_ENCODER.encode(value)
            if "{" in text and isinstance(value, _JSON_CONTAINERS):
                _check_json_names(value, of_request)
            return text.encode()
        if type(value) in _SCALARS:
            return bytes(_SCALAR_PACKER.pack(value))
        return bytes(msgpack.packb(value, default=_msgpack_default))
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise InternalError(f"the value cannot be written as {content_type}: {_why(error)}") from None


def encode_result_body(content_type: str, value: Any) -> bytes:
    """As `encode_body`, for a result: `decode_result` certainly reads it."""
    body = encode_body(content_type, value)
    if type(value) not in _SCALARS and is_value(content_type):
        reason = _why_unreadable(content_type, value, body)
        if reason:
            raise InternalError(f"the model's result cannot be read by clients: {reason}")
    return body


def _why_unreadable(content_type: str, value: Any, body: bytes) -> str:
    if content_type == JSON and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_JSON_ITEMS:
        return f"more than {MAX_JSON_ITEMS} JSON items; use application/msgpack"
    try:
        containers = _count_containers(value, None, 0, _ResultTensors())
    except CarpoolError as error:
        return error.detail
    if content_type == MSGPACK and containers > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS} arrays and maps"
    return ""


def _count_containers(value: Any, path: _Path, depth: int, decode: _DecodeTensor) -> int:
    """The arrays and maps in a result, in msgpack. Raises InvalidArgumentError for what cannot be read."""
    kind = type(value)
    if kind is dict:
        if value.keys() == _TENSOR_FIELDS_AS_BYTES or is_tensor(value):
            _replace_tensors(value, path, depth, decode)
            return 3
        _check_depth(depth)
        if _SCALARS.issuperset(map(type, value.values())):
            return 1
        items = value.items()
    elif kind in (list, tuple):
        _check_depth(depth)
        if _SCALARS.issuperset(map(type, value)):
            return 1
        items = enumerate(value)
    elif kind in (msgpack.ExtType, msgpack.Timestamp):
        raise InvalidArgumentError(f"{_field(path)}: msgpack extension types are not supported")
    else:
        return 0 if kind in _SCALARS else 3  # a tensor is a map with a shape, and of texts a list
    return 1 + sum([_count_containers(item, (path, key), depth + 1, decode) for key, item in items])


def _check_json_names(value: Any, strict_names: bool) -> None:
    """Raise ValueError for names of maps that would not survive as text. `value` was encoded, so it has an
    end."""
    containers = [value]
    for container in containers:  # which grows
        items = container
        if isinstance(container, dict):
            if not _TEXT.issuperset(map(type, container)):
                _check_names_as_text(container, strict_names)
            items = container.values()
        containers += [item for item in items if isinstance(item, _JSON_CONTAINERS)]


def _check_names_as_text(named: dict[Any, Any], strict_names: bool) -> None:
    seen: dict[str, Any] = {}
    for name in named:
        if strict_names and not isinstance(name, str):
            raise ValueError(
                f"a name in a map is the {type(name).__name__} {name!r:.40}, and in JSON it would be text: "
                "send a text as its name"
            )
        text = name if isinstance(name, str) else _json_name(name)
        if text in seen:
            raise ValueError(
                f"two names in a map, {seen[text]!r:.40} and {name!r:.40}, are the same text in JSON; use "
                f"{MSGPACK}, or other names"
            )
        seen[text] = name


_TEXT: Final = frozenset({str})
_JSON_CONTAINERS: Final = (dict, list, tuple)


def _json_name(name: Any) -> str:
    """The text that a name in a map becomes."""
    return json.dumps(name) if isinstance(name, int | float | None) else repr(name)


def _why(error: Exception) -> str:
    if isinstance(error, BufferError):
        return NOT_CONTIGUOUS
    if "Out of range float values" in str(error):
        return "JSON has neither NaN nor infinity, and it has one of these; use application/msgpack"
    if "set_int_max_str_digits" in str(error):
        return _TOO_MANY_DIGITS
    return str(error)


def result_type(content_type: str, wanted: str, value: Any, *, has_tensors: bool = False) -> str:
    """The content type of a result: the one that is wanted, or else that of the request. Where that is bytes,
    and the result is not, it is JSON: an image has a label. `has_tensors`: the model declares tensors, so the
    bytes of an array, whose datatype and shape are known then, are octet-stream. Raises InvalidArgumentError
    if the result cannot have the type that is wanted, for which the model is not to blame."""
    if wanted:
        _check_wanted(wanted, value)
        return wanted
    if is_value(content_type) or isinstance(value, _BYTES):
        return content_type
    return RAW if has_tensors and content_type == RAW and _is_numbers(value) else JSON


def _is_numbers(value: Any) -> bool:
    """Whether this is an array that has bytes of its own."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OSTU"


def _check_wanted(wanted: str, value: Any) -> None:
    kind = type(value).__name__
    is_text = isinstance(value, str) and wanted.lower().startswith("text/")
    if is_text and (charset := other_charset(wanted)):
        raise InvalidArgumentError(
            f"{ACCEPT}: {wanted} names charset {charset}, but this model's result is a text, which is "
            "written as UTF-8"
        )
    is_array = wanted == RAW and _is_numbers(value)
    if not (is_value(wanted) or isinstance(value, _BYTES) or is_text or is_array):
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
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("JSON cannot hold bytes; use msgpack")
    value = plain(value)
    return tensor_json(value) if isinstance(value, np.ndarray) else value


_JSON_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default
)


def _encode_bytes(value: Any, content_type: str, *, of_request: bool) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return _array_bytes(unmasked(value), of_request=of_request)
    if isinstance(value, str):
        if charset := other_charset(content_type):
            raise ValueError(f"a text is written as UTF-8: send bytes, text.encode({charset!r:.40})")
        return value.encode()
    kind = type(value).__name__
    raise InternalError(f"a value of type {kind} cannot be written as {content_type}; use bytes")


def _array_bytes(array: Array, *, of_request: bool) -> bytes:
    """The little-endian data of an array. Its datatype and shape are lost: for a result the
    producer has asked for that, but a model would take the bytes of a request for another datatype."""
    datatype = datatype_of(array)
    if of_request and (datatype != "UINT8" or array.ndim != 1):
        raise ValueError(
            f"an array of dtype {array.dtype} and shape {list(array.shape)} is a tensor: leave content_type "
            "out, or send array.tobytes() if the model is to get these bytes"
        )
    if datatype == "BYTES":
        raise ValueError("an array of texts has no bytes of its own")
    return to_bytes(array, datatype)


def _msgpack_default(value: Any) -> Any:
    value = plain(value)
    return tensor_map(value) if isinstance(value, np.ndarray) else value
