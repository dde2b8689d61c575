"""Tensors as requests and results carry them (Open Inference Protocol names).

In msgpack a tensor is the map `{"datatype": "FP32", "shape": [2, 3], "data": <bin>}` with little-endian,
row-major data; in JSON the same with `data` a flat or nested list. Shape times width must equal the data's
length before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from carpool.errors import InvalidArgumentError

Array = NDArray[Any]

MAX_DIMENSIONS: Final = 32
MAX_ITEMS: Final = 1 << 40
TENSOR_FIELDS: Final = frozenset({"datatype", "shape", "data"})

# BF16 has no numpy type: it travels as 2 bytes and is float32 (its upper half) once decoded.
WIDTHS: Final[dict[str, int]] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES: Final[dict[np.dtype[Any], str]] = {dtype: name for name, dtype in _DTYPES.items()}
DATATYPES: Final = frozenset(WIDTHS) | {"BYTES"}
_WHOLE: Final = frozenset({int})
_LEAVES: Final = {  # what may stand for a number in JSON; of all others, a whole number
    "BOOL": frozenset({bool}),
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), frozenset({int, float})),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One declared input or output of a model.

    `shape` is one request's, without the batch dimension; -1 is a dimension that may vary.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        except TypeError:
            raise ValueError(f"tensor {self.name!r}: shape {self.shape!r} must be a list of sizes") from None
        if self.datatype not in DATATYPES:
            raise ValueError(
                f"tensor {self.name!r}: datatype {self.datatype!r} is none of {', '.join(sorted(DATATYPES))}"
            )
        if any(size < -1 for size in self.shape):
            raise ValueError(
                f"tensor {self.name!r}: shape {list(self.shape)} has a size below -1 (-1 means: varies)"
            )

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether a request's `shape` fits this declaration."""
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, shape, strict=True)
        )

    @property
    def fixed_bytes(self) -> int | None:
        """The length of one request's data, or None where a dimension varies."""
        if self.datatype == "BYTES" or -1 in self.shape:
            return None
        return WIDTHS[self.datatype] * math.prod(self.shape)


def is_tensor(value: object) -> bool:
    """Whether a decoded body, or a part of one, is a tensor's map."""
    return type(value) is dict and value.keys() == TENSOR_FIELDS


def datatype_of(array: Array) -> str:
    """The datatype's name of an array; BYTES for strings. Raises ValueError for a type that cannot travel."""
    if array.dtype.kind in "US":
        return "BYTES"
    name = _NAMES.get(array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype)
    if name is None:
        raise ValueError(
            f"an array of dtype {array.dtype} cannot be sent; use one of {', '.join(sorted(WIDTHS))}"
        )
    return name


def _bad(field: str, detail: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field}: {detail}")


def check_header(value: Mapping[str, Any], field: str = "body") -> tuple[str, tuple[int, ...]]:
    """A tensor map's datatype and shape, after looking that both make sense."""
    datatype, shape = value["datatype"], value["shape"]
    if type(datatype) is not str or datatype not in DATATYPES:
        raise _bad(f"{field}.datatype", f"{datatype!r:.40} is not one of {', '.join(sorted(DATATYPES))}")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise _bad(f"{field}.shape", f"must be a list of at most {MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise _bad(f"{field}.shape", "every size must be a whole number, 0 or more")
    if 0 in shape and math.prod(filter(None, shape)) > MAX_ITEMS:  # without a 0 the data's length tells
        raise _bad(f"{field}.shape", f"must come to at most {MAX_ITEMS} numbers, the 0 aside")
    return datatype, tuple(shape)


def check_length(datatype: str, shape: Sequence[int], data_bytes: int, field: str = "body") -> None:
    """Raise unless `data_bytes` is exactly what the shape asks for."""
    wanted = WIDTHS[datatype] * math.prod(shape)
    if data_bytes != wanted:
        raise _bad(
            f"{field}.data",
            f"{data_bytes} bytes, but shape {list(shape)} of {datatype} takes {wanted}",
        )


def from_bytes(datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Array:
    """The array over `data` (not copied; read-only), whose length has been checked. BF16 becomes float32."""
    if datatype == "BF16":
        upper = np.frombuffer(data, "<u2").astype("<u4") << 16
        return upper.view("<f4").reshape(shape)
    return np.frombuffer(data, _DTYPES[datatype]).reshape(shape)


def to_bytes(array: Array, datatype: str) -> bytes:
    """Little-endian, row-major bytes of `array` as `datatype`; BF16 rounds float32 to nearest even."""
    if datatype == "BF16":
        bits = np.ascontiguousarray(array, "<f4").view("<u4")
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        # Rounding a NaN's payload up could make an infinity of it; keep it a quiet NaN.
        rounded = np.where(np.isnan(np.asarray(array)), np.uint16(0x7FC0), rounded)
        return rounded.tobytes()
    return array.astype(_DTYPES[datatype], copy=False).tobytes()


def decode_tensor(value: Mapping[str, Any], field: str = "body") -> Array | list[str]:
    """The array of a tensor's map from msgpack or JSON; BYTES gives the list of strings as it came.

    Raises InvalidArgumentError naming the field.
    """
    datatype, shape = check_header(value, field)
    data = value["data"]
    if datatype == "BYTES":
        return _decode_strings(data, shape, field)
    if type(data) is bytes:
        check_length(datatype, shape, len(data), field)
        return from_bytes(datatype, shape, data)
    if type(data) is not list:
        raise _bad(f"{field}.data", "must be bytes in msgpack, a list in JSON")
    return array_of(data, datatype, field, shape)


def array_of(data: object, datatype: str, field: str = "body", shape: tuple[int, ...] | None = None) -> Array:
    """The array of a flat or nested list of numbers, checked against the datatype's range.

    `shape`, where given, is what the header claims: as many numbers as that, flat or nested to it.
    """
    _check_leaves(data, datatype, field, 0)
    try:
        array = _cast(data, datatype)
    except OverflowError:
        raise _bad(f"{field}.data", f"a number is outside {datatype}'s range") from None
    except ValueError:
        raise _bad(f"{field}.data", "rows of unequal length") from None
    if shape is None:
        return array
    if array.size != math.prod(shape) or (array.ndim != 1 and array.shape != shape):
        raise _bad(
            f"{field}.data", f"holds {array.size} numbers as {list(array.shape)}, but shape is {list(shape)}"
        )
    return array.reshape(shape)


def _cast(data: object, datatype: str) -> Array:
    """Numbers as an array. Raises OverflowError for one out of range, which numpy alone makes infinite."""
    dtype = _DTYPES.get(datatype, _DTYPES["FP32"])
    if dtype.kind != "f":
        return np.asarray(data, dtype)
    wide = np.asarray(data, np.float64)
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    if np.isinf(array).sum() > np.isinf(wide).sum():
        raise OverflowError
    return array


def _check_leaves(data: object, datatype: str, field: str, depth: int) -> None:
    """Raise unless there are numbers only: of texts numpy would make an array as wide as the longest."""
    kinds = set(map(type, data)) if isinstance(data, list) else {type(data)}
    if list in kinds and depth < MAX_DIMENSIONS:
        for row in data if isinstance(data, list) else ():
            _check_leaves(row, datatype, field, depth + 1)
    elif not kinds <= _LEAVES.get(datatype, _WHOLE):
        raise _bad(f"{field}.data", f"holds what is not {datatype}")


def _decode_strings(data: object, shape: tuple[int, ...], field: str) -> list[str]:
    if type(data) is not list or any(type(item) is not str for item in data):
        raise _bad(f"{field}.data", "must be a flat list of strings for BYTES")
    if len(data) != math.prod(shape):
        raise _bad(f"{field}.data", f"{len(data)} strings, but shape is {list(shape)}")
    return data


def tensor_head(datatype: str, shape: Sequence[int], data_bytes: int) -> bytes:
    """The msgpack bytes of a tensor's map up to its data, so that `head + data` is the whole map.

    The same for every row of a batch: made once, it makes a body in one concatenation.
    """
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(3)
    packer.pack("datatype")
    packer.pack(datatype)
    packer.pack("shape")
    packer.pack(list(shape))
    packer.pack("data")
    if data_bytes < 1 << 8:
        bin_header = b"\xc4" + data_bytes.to_bytes(1, "big")
    elif data_bytes < 1 << 16:
        bin_header = b"\xc5" + data_bytes.to_bytes(2, "big")
    else:
        bin_header = b"\xc6" + data_bytes.to_bytes(4, "big")
    return bytes(packer.bytes()) + bin_header


def tensor_map(array: Array) -> dict[str, Any]:
    """A tensor's map for msgpack."""
    datatype = datatype_of(array)
    if datatype == "BYTES":
        return {
            "datatype": "BYTES",
            "shape": list(array.shape),
            "data": [str(s) for s in array.ravel().astype(str)],
        }
    return {"datatype": datatype, "shape": list(array.shape), "data": to_bytes(array, datatype)}


def tensor_json(array: Array) -> dict[str, Any]:
    """A tensor's map for JSON, `data` flat."""
    datatype = datatype_of(array)
    flat = [str(s) for s in array.ravel().astype(str)] if datatype == "BYTES" else array.ravel().tolist()
    return {"datatype": datatype, "shape": list(array.shape), "data": flat}


class HeadMemo:
    """Knows a tensor's body again by its head, so that the next of the same shape is not decoded.

    A head tells the whole layout: what begins with the same bytes, and is as long, is the same kind.
    """

    __slots__ = ("_body_bytes", "_head", "datatype", "shape")

    def __init__(self) -> None:
        self._head = b""
        self._body_bytes = -1
        self.datatype = ""
        self.shape: tuple[int, ...] = ()

    def data_of(self, body: bytes) -> bytes | None:
        """The data of `body`, if it is a tensor like the one remembered."""
        if len(body) == self._body_bytes and body.startswith(self._head):
            return body[len(self._head) :]
        return None

    def remember(self, body: bytes, datatype: str, shape: tuple[int, ...], data_bytes: int) -> None:
        """Remember the layout of a body that was decoded and found good, if it ends with its data."""
        head = tensor_head(datatype, shape, data_bytes)
        if len(body) == len(head) + data_bytes and body.startswith(head):
            self._head, self._body_bytes = head, len(body)
            self.datatype, self.shape = datatype, shape
