"""The elements of tensors, as JSON and as the binary extension write them <-> bytes of numbers, or a list of
bytes.

Numbers are little-endian and row-major, as Carpool's tensors have them. Elements of BYTES are bytes each. An
element that its datatype does not hold is refused by name: nothing is wrapped, cut or rounded, but for
floats, which are rounded once, as `wire.tensors` does for JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.parts import Buffer
from carpool.wire.tensors import MAX_DIMENSIONS, WIDTHS, are_bools, array_of, from_bytes, to_bytes
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.json_text import parse

Data = Buffer | list[bytes]  # of numbers, or the elements of BYTES

# In a request, of JSON and of BYTES: each is an object of some 32 bytes for a moment, and takes up to 1 µs.
OBJECTS_MAX: Final = 1_000_000
NO_JSON: Final = frozenset({"FP16", "BF16"})
_LENGTH: Final = struct.Struct("<I")
_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys(WIDTHS, int),
    **dict.fromkeys(("FP32", "FP64"), float),
    "BOOL": bool,
    "BYTES": str,
}
_DTYPES: Final = {name: from_bytes(name, (0,), b"").dtype for name in WIDTHS}
_EXACT_MAX: Final = 1 << 53  # up to this, an integer becomes an FP32 in one step or two
_SHOWN_CHARS_MAX: Final = 40
_PIECE: Final = 16384  # elements


# --- JSON --------------------------------------------------------------------------------------------------


def from_json(text: bytes, datatype: str, count: int, of: str) -> Data:
    """The elements of a JSON list, flat or nested in any way. `count`: how many there must be. `of`: what the
    tensor is called in errors. Raises ProtocolError."""
    if datatype in NO_JSON:
        raise ProtocolError(f"{of}: {datatype} is not written in JSON: send it as binary data")
    try:
        depth = _depth(text)
        flat = _decoder(_KINDS[datatype], depth).decode(text)
        for _ in range(depth - 1):
            flat = list(chain.from_iterable(flat))
        return _encoded(flat, datatype, count, of)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return from_list(parse(text), datatype, count, of)  # with the names of what is wrong


def from_list(value: Any, datatype: str, count: int, of: str) -> Data:
    """As `from_json`, for a list that was parsed."""
    if datatype in NO_JSON:
        raise ProtocolError(f"{of}: {datatype} is not written in JSON: send it as binary data")
    if type(value) is not list:
        raise ProtocolError(f"{of}: data must be a list, and is {_shown(value)}")
    flat = _flat(value)
    kinds = {int, float} if _KINDS[datatype] is float else {_KINDS[datatype]}
    if not kinds.issuperset(map(type, flat)):
        index = next(index for index, item in enumerate(flat) if type(item) not in kinds)
        raise _no_element(flat, index, datatype, of)
    if datatype == "BYTES":
        return _encoded(flat, datatype, count, of)
    _check_count(len(flat), count, datatype, of)
    try:
        return to_bytes(array_of(flat, datatype), datatype)
    except InvalidArgumentError:
        raise _no_element(flat, _first_lost(flat, datatype), datatype, of) from None


def _encoded(flat: list[Any], datatype: str, count: int, of: str) -> Data:
    """Elements whose Python types are right, as data. Raises OverflowError for a number out of range, or that
    needs care."""
    _check_count(len(flat), count, datatype, of)
    if datatype == "BYTES":
        return [text.encode() for text in flat]
    dtype = _DTYPES[datatype]
    if datatype != "FP32":
        return np.array(flat, dtype).tobytes()
    array = np.array(flat, np.float64)
    if np.abs(array).max(initial=0) > _EXACT_MAX:
        raise OverflowError
    return array.astype(dtype).tobytes()


def _check_count(found: int, count: int, datatype: str, of: str) -> None:
    if found != count:
        raise ProtocolError(f"{of}: data has {found} elements, but its shape has {count} of {datatype}")


def _depth(text: bytes) -> int:
    """With how many brackets a JSON text begins."""
    depth = 0
    for byte in text[: 2 * MAX_DIMENSIONS]:
        if byte == _BRACKET:
            depth += 1
        elif byte not in _BLANKS:
            break
    return max(1, min(depth, MAX_DIMENSIONS))


_BRACKET: Final = ord("[")
_BLANKS: Final = b" \t\r\n"


@lru_cache
def _decoder(kind: type, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = list[kind]  # type: ignore[valid-type]
    for _ in range(depth - 1):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _flat(value: list[Any]) -> list[Any]:
    """The elements of lists in lists, in order."""
    flat, is_nested = value, True
    while is_nested:
        is_nested = list in set(map(type, flat))
        if is_nested:
            flat = list(chain.from_iterable([item if type(item) is list else [item] for item in flat]))
    return flat


def _first_lost(flat: list[Any], datatype: str) -> int:
    """The index of the first of these numbers that the datatype does not hold. There is one."""
    start, stop = 0, len(flat)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            array_of(flat[start:middle], datatype)
        except InvalidArgumentError:
            stop = middle
        else:
            start = middle
    return start


def _no_element(flat: list[Any], index: int, datatype: str, of: str) -> ProtocolError:
    return ProtocolError(f"{of}: element {index} is {_shown(flat[index])}, which is no {datatype}")


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut short; of a list or map, that it is one."""
    if type(value) in (list, dict):
        return "a list" if type(value) is list else "an object"
    try:
        text = json.dumps(value)
    except ValueError:  # a number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


def to_json(data: Data, datatype: str, of: str) -> bytes:
    """A flat JSON list of these elements. Raises ProtocolError for BYTES that are not UTF-8, and for
    datatypes that are not written in JSON."""
    if isinstance(data, list):
        return msgspec.json.encode(texts_of(data, of, ", so it is not written in JSON: ask for binary_data"))
    if datatype in NO_JSON:
        raise ProtocolError(f"{of}: {datatype} is not written in JSON: ask for binary_data")
    array = from_bytes(datatype, (-1,), data)
    encode: Callable[[list[Any]], bytes] = msgspec.json.encode
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        encode = _with_nan
    # Piece by piece, because no other thread can run while one call encodes.
    starts = range(0, len(array), _PIECE)
    return b"[%b]" % b",".join([encode(array[start : start + _PIECE].tolist())[1:-1] for start in starts])


def _with_nan(numbers: list[float]) -> bytes:
    """JSON in which NaN and Infinity are numbers."""
    return json.dumps(numbers, separators=(",", ":")).encode()


def texts_of(elements: Sequence[bytes], of: str, remedy: str) -> list[str]:
    """Elements of BYTES as texts. Raises ProtocolError, which ends with `remedy`, for one that is not
    UTF-8."""
    texts: list[str] = []
    try:
        for element in elements:
            texts.append(element.decode())
    except UnicodeDecodeError:
        raise ProtocolError(f"{of}: element {len(texts)} is not UTF-8{remedy}") from None
    return texts


# --- binary data -------------------------------------------------------------------------------------------


def from_binary(data: memoryview, datatype: str, count: int, of: str) -> Data:
    """The elements of binary data: a view of it, or a list of bytes. Raises ProtocolError."""
    if datatype == "BYTES":
        return _split(data, count, of)
    needed_bytes = WIDTHS[datatype] * count
    if len(data) != needed_bytes:
        raise ProtocolError(
            f"{of}: has {len(data)} bytes of binary data, but its shape takes {needed_bytes} for {count} of "
            f"{datatype}"
        )
    if datatype == "BOOL" and not are_bools(data):
        index = int(np.argmax(np.frombuffer(data, np.uint8) > 1))
        raise ProtocolError(f"{of}: element {index} is {data[index]}, which is no BOOL: neither 0 nor 1")
    return data


def _split(data: memoryview, count: int, of: str) -> list[bytes]:
    """The elements of BYTES: for each its length, 4 bytes, and then as many bytes."""
    if count * _LENGTH.size > len(data):
        raise ProtocolError(
            f"{of}: has {len(data)} bytes of binary data, too few for {count} elements of BYTES"
        )
    elements: list[bytes] = []
    at, end = 0, len(data)
    for index in range(count):
        start = at + _LENGTH.size
        if start > end:
            raise ProtocolError(f"{of}: the binary data ends in the length of element {index} of {count}")
        (length,) = _LENGTH.unpack_from(data, at)
        at = start + length
        if at > end:
            raise ProtocolError(
                f"{of}: element {index} has {length} bytes, but only {end - start} bytes of binary data "
                "are left"
            )
        elements.append(bytes(data[start:at]))
    if at != end:
        raise ProtocolError(f"{of}: {end - at} bytes of binary data are left after its {count} elements")
    return elements


def to_binary(data: Data) -> Buffer:
    """These elements as binary data."""
    if not isinstance(data, list):
        return data
    return b"".join([part for element in data for part in (_LENGTH.pack(len(element)), element)])


def check_json(text: bytes) -> None:
    """Raise TooLargeError if a JSON text has more than OBJECTS_MAX elements, lists and maps."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > OBJECTS_MAX:
        raise TooLargeError(
            f"the JSON has more than {OBJECTS_MAX} elements, lists and objects: send large tensors as binary "
            "data"
        )


def check_texts(count: int) -> None:
    """Raise TooLargeError if a request has more than OBJECTS_MAX elements of BYTES."""
    if count > OBJECTS_MAX:
        raise TooLargeError(f"the request has {count} elements of BYTES, and may have {OBJECTS_MAX}")
