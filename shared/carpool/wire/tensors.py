"""Tensors in requests and results <-> numpy arrays, with the datatype names of the Open Inference Protocol.

In msgpack a tensor is the map `{"datatype": "FP32", "shape": [2, 3], "data": <bin>}` with little-endian,
row-major data; in JSON it is the same with `data` a flat or nested list. The data's length is checked against
shape and datatype before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from carpool.errors import InvalidArgumentError
from carpool.parts import Buffer

Array = NDArray[Any]

MAX_DIMENSIONS: Final = 32
MAX_ITEMS: Final = 1 << 40
_COPIED_BYTES_MAX: Final = 16 * 1024
TENSOR_FIELDS: Final = frozenset({"datatype", "shape", "data"})

# Bytes per number. numpy has no BF16: it is 2 bytes on the wire, and decoded to the upper half of a float32.
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
_DATATYPES_BY_DTYPE: Final[dict[np.dtype[Any], str]] = {dtype: name for name, dtype in _DTYPES.items()}
DATATYPES: Final = frozenset(WIDTHS) | {"BYTES"}
_CONVERTED: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # kinds of dtypes -> from which
_SIGNIFICANT_BITS: Final = {"FP16": 11, "BF16": 8, "FP32": 24, "FP64": 53}
_BF16_BYTES: Final = 2
# BF16 on its way through services, where float32 would be sent as FP32. No model and no client gets it.
BFLOAT16: Final = np.dtype([("carpool:BF16", "<u2")])
_INTEGER: Final = frozenset({int})
_DIRECT_BYTES_MAX: Final = {"BF16": 4, "FP16": 8}  # of floats that are rounded to these in one step
_FLOAT64_INTEGER_MAX: Final = 1 << 53  # up to this FP64 holds all integers
_ELEMENTS: Final = frozenset({str, bytes})
_EACH_NAME: Final = "send a dict with an array for each of its names, {name: array[name]}"
_JSON_TYPES: Final = {  # the Python types of an element in JSON; of all datatypes not named here, int
    "BOOL": frozenset({bool}),
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), frozenset({int, float})),
}


def _integers(declared: Iterable[Any], of: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in declared)
    except TypeError:
        raise ValueError(f"{of}: shape {declared!r} must be a list of integers") from None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One declared input or output of a model. Raises ValueError for a declaration that cannot be meant.

    `name`: that of the input or output, as clients of HTTP and dicts of outputs have it.
    `datatype`: BOOL, UINT8 to UINT64, INT8 to INT64, FP16, BF16, FP32, FP64 or BYTES. BF16 is float32 in
        numpy; elements of BYTES are objects.
    `shape`: that of one request, without the batch dimension; -1 is a dimension that may vary. A batch of n
        is an array of the shape (n, *shape).
    `text`: the elements of BYTES are str, and what is not UTF-8 is refused; else they are bytes, any bytes.
    `labels`: of an output of numbers, the names of its elements, in their order, for classification.
    `optional`: of an input of a model that steps: a request may leave it out.

    Of an input, `buckets` are the sizes to which a dimension that varies is padded, so that requests of other
    sizes share a batch: a list, or for several such dimensions a dict of lists by axis. It is padded with
    `pad`, a number. `lengths`: the name under which the model gets the true sizes, an array of INT64 of shape
    (n), or (n, k) for k padded dimensions.

    Of an output, `cut` is the input whose true sizes the dimensions that vary are cut back to, in order.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    text: bool = False
    labels: tuple[str, ...] = ()
    pad: float = 0
    buckets: Any = ()  # as declared; then pairs of an axis and its sizes, both ascending
    lengths: str = ""
    cut: str = ""
    optional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _integers(self.shape, f"tensor {self.name!r}"))
        if self.datatype not in DATATYPES:
            raise ValueError(
                f"tensor {self.name!r}: datatype {self.datatype!r} is not one of "
                f"{', '.join(sorted(DATATYPES))}"
            )
        if any(size < -1 for size in self.shape):
            raise ValueError(
                f"tensor {self.name!r}: shape {list(self.shape)} has a size below -1 "
                "(-1 is a dimension that varies)"
            )
        if type(self.text) is not bool or (self.text and self.datatype != "BYTES"):
            raise ValueError(f"tensor {self.name!r}: text must be True or False, and True only for BYTES")
        if type(self.optional) is not bool:
            raise ValueError(f"tensor {self.name!r}: optional must be True or False")
        labels = self.labels
        if not isinstance(labels, list | tuple) or any(type(label) is not str for label in labels):
            raise ValueError(f"tensor {self.name!r}: labels must be a list of texts")
        if labels and self.datatype == "BYTES":
            raise ValueError(f"tensor {self.name!r}: labels are for numbers, and BYTES has none")
        object.__setattr__(self, "labels", tuple(labels))
        object.__setattr__(self, "buckets", _buckets(self))
        _check_padding(self)

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether a request's `shape` fits this declaration."""
        return len(shape) == len(self.shape) and all(
            declared in (-1, size) for declared, size in zip(self.shape, shape, strict=True)
        )

    @property
    def fixed_bytes(self) -> int | None:
        """The length of one request's data; None if a dimension varies."""
        if self.datatype == "BYTES" or -1 in self.shape:
            return None
        return WIDTHS[self.datatype] * math.prod(self.shape)

    @property
    def fields(self) -> tuple[Any, ...]:
        """What it is made from, in order."""
        return tuple(getattr(self, spec.name) for spec in fields(self))


def _buckets(spec: TensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The buckets of a TensorSpec as it has them. Raises ValueError."""
    of, given = f"tensor {spec.name!r}: buckets", spec.buckets
    varying = [axis for axis, size in enumerate(spec.shape) if size == -1]
    if not isinstance(given, Mapping | list | tuple):
        raise ValueError(f"{of}: {given!r:.80} must be a list of sizes, or a dict of such lists by axis")
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif all(isinstance(item, tuple | list) and len(item) == 2 for item in given):
        pairs = [(axis, sizes) for axis, sizes in given]
    elif len(varying) == 1:
        pairs = [(varying[0], given)]
    else:
        raise ValueError(
            f"{of} {given!r} are a list, but {len(varying)} dimensions of shape {list(spec.shape)} vary: "
            "write a dict of lists by axis, such as {0: [64, 128]}"
        )
    return tuple(sorted((_axis(axis, varying, of), _sizes(sizes, of)) for axis, sizes in pairs))


def _axis(axis: Any, varying: Sequence[int], of: str) -> int:
    if type(axis) is not int or axis not in varying:
        valid = " or ".join(map(str, varying)) or "none, because all sizes are fixed"
        raise ValueError(f"{of}: {axis!r:.40} is no axis of a dimension that varies (-1); valid is {valid}")
    return axis


def _sizes(sizes: Any, of: str) -> tuple[int, ...]:
    if not isinstance(sizes, list | tuple) or not sizes or any(type(n) is not int or n < 1 for n in sizes):
        raise ValueError(f"{of}: {sizes!r:.80} must be a list of sizes of at least 1, such as [64, 128]")
    return tuple(sorted(set(sizes)))


def _check_padding(spec: TensorSpec) -> None:
    """Raise ValueError unless what a TensorSpec says of padding fits together."""
    of = f"tensor {spec.name!r}"
    if not (isinstance(spec.lengths, str) and isinstance(spec.cut, str)):
        raise ValueError(f"{of}: 'lengths' and 'cut' must be names, as text")
    if spec.buckets and spec.datatype == "BYTES":
        raise ValueError(f"{of}: tensors of BYTES are not padded, so it must have no buckets")
    if spec.lengths and not spec.buckets:
        raise ValueError(f"{of}: 'lengths' names the true sizes of what is padded, but it has no buckets")
    if spec.lengths == spec.name:
        raise ValueError(f"{of}: 'lengths' must be another name than its own")
    if spec.cut and -1 not in spec.shape:
        raise ValueError(f"{of}: 'cut' is for dimensions that vary (-1), and it has none")
    if isinstance(spec.pad, bool) or not isinstance(spec.pad, int | float):
        raise ValueError(f"{of}: pad {spec.pad!r:.40} must be a number")
    if spec.pad and not spec.buckets:
        raise ValueError(f"{of}: 'pad' has no effect without buckets, which are the sizes to pad to")
    if spec.buckets:
        try:
            to_bytes(np.asarray(spec.pad), spec.datatype)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{of}: pad {spec.pad!r:.40} is no {spec.datatype}: {error}") from None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state that a model keeps for each sequence, from one request to the next. Raises ValueError for a
    declaration that cannot be meant.

    The state of one sequence, a *row*, has the shape without the batch. Between two requests it is bytes.

    `name`: by which `predict` gets it, and returns the new one.
    `datatype`: as of TensorSpec, but not BYTES.
    `shape`: that of the states of a batch: -1 at `axis`, where they are stacked, and fixed sizes elsewhere.
    `axis`: the dimension of the batch, from 0.
    `initial`: the row of a sequence that starts, or one number for all of it; zeros by default.
    `output`: the output of an ONNX file that has the new state.
    `row_shape`: that of a row. `row_bytes`: how many bytes a row has.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    axis: int = 0
    initial: Any = field(default=None, compare=False)
    output: str | None = None
    row_shape: tuple[int, ...] = field(init=False, repr=False)
    row_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        of = f"state {self.name!r}"
        if type(self.name) is not str or not self.name:
            raise ValueError(f"{of}: a state needs a name, a str that is not empty")
        object.__setattr__(self, "shape", _integers(self.shape, of))
        if self.datatype not in WIDTHS:
            raise ValueError(f"{of}: datatype {self.datatype!r} is not one of {', '.join(sorted(WIDTHS))}")
        if type(self.axis) is not int or not 0 <= self.axis < len(self.shape) or self.shape[self.axis] != -1:
            raise ValueError(
                f"{of}: shape {list(self.shape)} must have -1, for the batch, at axis {self.axis!r}"
                + (f"; set axis={self.shape.index(-1)}" if -1 in self.shape else "")
            )
        row_shape = (*self.shape[: self.axis], *self.shape[self.axis + 1 :])
        if any(size < 1 for size in row_shape):
            raise ValueError(
                f"{of}: shape {list(self.shape)} must have fixed sizes, 1 or more, except for the batch"
            )
        object.__setattr__(self, "row_shape", row_shape)
        object.__setattr__(self, "row_bytes", WIDTHS[self.datatype] * math.prod(row_shape))
        self.row(self.initial)

    def row(self, value: Any) -> bytes:
        """The bytes of a row: an array of its shape, one number for all of it, or None for zeros.

        Raises ValueError.
        """
        if value is None:
            return bytes(self.row_bytes)
        array = np.asarray(unmasked(for_numpy(value)))
        if array.ndim == 0:
            array = np.broadcast_to(array, self.row_shape)
        if array.shape != self.row_shape:
            raise ValueError(
                f"state {self.name!r}: the initial state has shape {list(array.shape)}, but the state of one "
                f"sequence has {list(self.row_shape)}"
            )
        return self.join(np.expand_dims(array, self.axis), 1).tobytes()

    def split(self, rows: Array) -> Array:
        """States of several sequences, an array of uint8 with a row of `row_bytes` for each, as the model
        gets them: stacked at `axis`. Always a copy, because a model may change what it gets."""
        dtype = _DTYPES["UINT16" if self.datatype == "BF16" else self.datatype]
        stacked = np.moveaxis(rows.view(dtype).reshape(len(rows), *self.row_shape), 0, self.axis)
        if self.datatype == "BF16":
            return from_bytes("BF16", stacked.shape, stacked.tobytes())
        return np.array(stacked, order="C")

    def join(self, states: Any, count: int) -> Array:
        """The inverse of `split`, for what a model returns for `count` sequences.

        Numbers are converted to the declared datatype, but floats not to integers. Raises ValueError, also
        for another shape, and for a number that the datatype cannot hold (see `in_datatype`).
        """
        array = np.asarray(unmasked(for_numpy(states)))
        shape = (*self.shape[: self.axis], count, *self.shape[self.axis + 1 :])
        if array.shape != shape:
            raise ValueError(f"state {self.name!r}: shape {list(array.shape)}, not {list(shape)}")
        dtype = _DTYPES.get(self.datatype, _DTYPES["FP32"])
        kind = "f" if is_bfloat16(array.dtype) else array.dtype.kind
        if array.dtype != dtype and kind not in _CONVERTED[dtype.kind]:
            raise ValueError(f"state {self.name!r}: {array.dtype} is not converted to {self.datatype}")
        try:
            data = to_bytes(np.moveaxis(array, self.axis, 0), self.datatype)
        except ValueError as error:
            raise ValueError(f"state {self.name!r}: {error}") from None
        return np.frombuffer(data, np.uint8).reshape(count, self.row_bytes)


def is_tensor(value: object) -> bool:
    """Whether a decoded body, or a value within one, is a tensor's map."""
    return type(value) is dict and value.keys() == TENSOR_FIELDS


def datatype_of(array: Array) -> str:
    """The datatype of an array; BYTES for texts and bytes. Of those of dtype `S` `wire.values` sends lists.
    Raises ValueError for a dtype that has none, which says what to do."""
    dtype = array.dtype
    kind = dtype.kind
    if kind in "US":
        return "BYTES"
    name = _DATATYPES_BY_DTYPE.get(dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype)
    if name is not None:
        return name
    if is_bfloat16(dtype):
        return "BF16"
    if kind in "OT":
        others = {type(item).__name__ for item in array.ravel().tolist() if not isinstance(item, str | bytes)}
        if not others:
            return "BYTES"
        raise ValueError(
            f"an array of dtype {dtype} cannot be sent unless its elements are text or bytes, and one is of "
            f"type {min(others)}: send array.tolist(), or numbers by array.astype(...)"
        )
    remedy = f"use one of {', '.join(sorted(WIDTHS))}"
    if dtype.names:
        remedy = _EACH_NAME
    elif kind in "mM":
        remedy = "send array.astype(str), or array.astype('int64') with the unit known to the model"
    elif kind == "c":
        remedy = "send array.real and array.imag"
    elif kind == "f":
        remedy = "send array.astype('float64')"
    raise ValueError(f"an array of dtype {dtype} cannot be sent: {remedy}")


def unmasked(array: Array) -> Array:
    """An array without a mask. Raises ValueError if numbers are masked: what is under a mask is not meant."""
    if type(array) is np.ndarray or not isinstance(array, np.ma.MaskedArray):
        return array
    # By bytes, because the mask of a structured array is structured, too, and numpy adds no such elements.
    masked = np.frombuffer(np.ma.getmaskarray(array).tobytes(), np.bool_)
    if masked.any():
        filled = "send array.filled(...) with a number that the model knows, or array.data and array.mask"
        raise ValueError(
            f"a masked array cannot be sent, as {masked.sum()} of its elements are masked: "
            + (_EACH_NAME if array.dtype.names else filled)
        )
    return np.asarray(array.data)


def _invalid(field: str, detail: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field}: {detail}")


def check_header(value: Mapping[str, Any], field: str = "body") -> tuple[str, tuple[int, ...]]:
    """A tensor map's datatype and shape, both checked. Raises InvalidArgumentError."""
    datatype, shape = value["datatype"], value["shape"]
    if type(datatype) is not str or datatype not in DATATYPES:
        raise _invalid(f"{field}.datatype", f"{datatype!r:.40} is not one of {', '.join(sorted(DATATYPES))}")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise _invalid(f"{field}.shape", f"must be a list of at most {MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise _invalid(f"{field}.shape", "every size must be an integer, 0 or more")
    # An empty tensor needs no data, so the check of the data's length would accept sizes of any magnitude.
    if 0 in shape and math.prod(filter(None, shape)) > MAX_ITEMS:
        raise _invalid(f"{field}.shape", f"its sizes other than 0 must have a product of at most {MAX_ITEMS}")
    return datatype, tuple(shape)


def check_length(datatype: str, shape: Sequence[int], data_bytes: int, field: str = "body") -> None:
    """Raise InvalidArgumentError unless `data_bytes` is exactly what the shape needs."""
    needed_bytes = WIDTHS[datatype] * math.prod(shape)
    if data_bytes != needed_bytes:
        raise _invalid(
            f"{field}.data",
            f"{data_bytes} bytes, but shape {list(shape)} of {datatype} takes {needed_bytes}",
        )


def are_bools(data: Buffer) -> bool:
    """Whether every byte is 0 or 1, as in a BOOL tensor: numpy does not say what another one means."""
    return bool(np.frombuffer(data, np.uint8).max(initial=0) <= 1)


def check_bools(datatype: str, data: Buffer, field: str = "body") -> None:
    """Raise InvalidArgumentError if this is the data of a BOOL tensor, and has other bytes than 0 and 1."""
    if datatype == "BOOL" and not are_bools(data):
        raise _invalid(f"{field}.data", "has a byte that is not BOOL: neither 0 nor 1")


def from_bytes(datatype: str, shape: Sequence[int], data: Buffer) -> Array:
    """A read-only array over `data`, not a copy. The caller has checked its length. BF16 becomes float32."""
    if datatype == "BF16":
        return _widened(np.frombuffer(data, "<u2")).reshape(shape)
    return np.frombuffer(data, _DTYPES[datatype]).reshape(shape)


def to_be_sent(datatype: str, shape: Sequence[int], data: Buffer) -> Array:
    """As `from_bytes`, for what is sent on: BF16 stays what it is, an array of BFLOAT16."""
    dtype = BFLOAT16 if datatype == "BF16" else _DTYPES[datatype]
    return np.frombuffer(data, dtype).reshape(shape)


def to_bytes(array: Array, datatype: str) -> bytes:
    """Little-endian, row-major bytes of `array` as `datatype`. BF16 rounds to nearest, ties to even.

    Raises ValueError for a number that does not survive (see `in_datatype`).
    """
    array = unmasked(array)
    if datatype != "BF16" and array.dtype == _DTYPES[datatype]:
        return array.tobytes()
    if datatype == "BF16" and is_bfloat16(array.dtype):
        return np.asarray(array).view(np.uint16).astype("<u2", copy=False).tobytes()
    numbers, lost = in_datatype(array, datatype)
    if lost is not None:
        raise ValueError(why_lost(array, datatype))
    return _bf16_bits(numbers).tobytes() if datatype == "BF16" else numbers.tobytes()


# --- exact conversion --------------------------------------------------------------------------------------


def in_datatype(array: Array, datatype: str) -> tuple[Array, NDArray[np.bool_] | None]:
    """The numbers of `array` in `datatype`, and which of them it cannot hold: an array of bools of the same
    shape, or None if it holds all. Where it is true, the number is another one, and must not be used.

    Integers, BOOL and integers in floats must be exact: 2.0 is an integer, 2.5 and NaN are none. Floats are
    rounded to nearest in narrower floats, once, but none becomes infinite. Those of BF16 are in a float32.
    Raises ValueError for an array without such numbers.
    """
    dtype = _DTYPES.get(datatype, _DTYPES["FP32"])
    array = unmasked(array)
    if array.dtype == dtype and datatype != "BF16":
        return array, None
    if is_bfloat16(array.dtype):
        array = from_bfloat16(array)
        if datatype in ("BF16", "FP32"):
            return array, None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{array.dtype} is not converted to {datatype}")
    if dtype.kind == "f":
        numbers, lost = _in_floats(array, datatype, dtype)
    elif dtype.kind == "b":
        numbers, lost = array.astype(dtype), (array != 0) & (array != 1)
    elif array.dtype.kind == "f":
        numbers, lost = _floats_in_integers(array, dtype)
    else:
        numbers = array.astype(dtype)
        lost = numbers != array
    return numbers, np.asarray(lost) if lost.any() else None


def why_lost(array: Array, datatype: str) -> str:
    """What is wrong with a number of `array` that `datatype` cannot hold, for an error."""
    kind = array.dtype.kind
    if datatype == "BOOL":
        return "a number is neither 0 nor 1, so it is no BOOL"
    if datatype in _SIGNIFICANT_BITS and kind in "iu":
        return f"a whole number is one that {datatype} does not have: it would be rounded, or infinite"
    if datatype not in _SIGNIFICANT_BITS and kind not in "biu":
        return f"a number is not whole, or is outside {datatype}'s range"
    return f"a number is outside {datatype}'s range"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether these are the numbers of BF16, as JAX and ml_dtypes have them, or BFLOAT16. numpy itself has
    none."""
    if dtype.kind != "V" or dtype.itemsize != _BF16_BYTES:
        return False
    return dtype.name == "bfloat16" or dtype == BFLOAT16


def from_bfloat16(array: Array) -> Array:
    """An array of `is_bfloat16` as float32."""
    return _widened(np.asarray(array).view(np.uint16))


def to_bfloat16(array: Array) -> Array:
    """An array of `is_bfloat16`, or of float32 whose numbers are those of BF16, as BFLOAT16."""
    halves = np.asarray(array).view(np.uint16) if is_bfloat16(array.dtype) else _bf16_bits(array)
    return np.asarray(halves, "<u2").view(BFLOAT16)


def for_numpy(value: Any) -> Any:
    """What has `__array__`, so that numpy can read it: a torch tensor of bfloat16, which numpy does not have,
    as one of float32, which holds all of its numbers."""
    return value.float() if is_torch_bfloat16(value) else value


def is_torch_bfloat16(value: Any) -> bool:
    """Whether this is a tensor of torch, which is not imported here, with numbers of BF16."""
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


def _in_floats(array: Array, datatype: str, dtype: np.dtype[Any]) -> tuple[Array, NDArray[np.bool_]]:
    # numpy has no BF16, and makes FP16 of a longdouble by way of FP64.
    by_way = array.dtype.kind == "f" and array.dtype.itemsize > _DIRECT_BYTES_MAX.get(datatype, 16)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = (_rounded_to_odd(array) if by_way else array).astype(dtype, copy=False)
    if datatype == "BF16":
        numbers = _widened(_bf16_bits(numbers))
    lost = np.isinf(numbers)
    if array.dtype.kind == "f":
        return numbers, lost & np.isfinite(array)
    if array.dtype.kind in "iu":
        lost = lost | _is_rounded(array, _SIGNIFICANT_BITS[datatype])
    return numbers, lost


def _rounded_to_odd(array: Array) -> Array:
    """Wider floats as float32: what is not exact becomes the one of its two neighbours whose last bit is 1.

    Rounding that to fewer bits gives what rounding the wide number gives. After rounding to nearest it would
    not: what is a little above the middle becomes the middle, and then the even neighbour.
    """
    numbers = array.astype("<f4")
    inexact = (numbers != array) & ~np.isnan(array)
    if not inexact.any():
        return numbers
    is_larger = inexact & (np.abs(numbers) > np.abs(array))
    bits = numbers.view("<u4")
    return np.asarray(np.where(inexact, (bits - is_larger) | 1, bits)).astype("<u4").view("<f4")


def _integer_to_odd(number: int) -> float:
    """As `_rounded_to_odd`, an integer as FP64."""
    nearest = float(number)
    if int(nearest) == number:
        return nearest
    inner = math.nextafter(nearest, 0.0) if abs(int(nearest)) > abs(number) else nearest
    is_odd = int(math.ldexp(math.frexp(inner)[0], _SIGNIFICANT_BITS["FP64"])) % 2
    return inner if is_odd else math.nextafter(inner, math.copysign(math.inf, inner))


def _is_rounded(integers: Array, bits: int) -> NDArray[np.bool_]:
    """Which integers have more significant bits than these. Counted, because conversion to a float and back
    may give the same integer: the largest one of 64 bits becomes 2**63, and that is no integer of 64 bits."""
    if integers.size and -(1 << bits) <= integers.min() and integers.max() <= 1 << bits:
        return np.zeros(integers.shape, np.bool_)
    size = integers.astype(np.uint64)
    size = np.where(integers < 0, np.uint64(0) - size, size)
    lowest = size & (np.uint64(0) - size)
    rounded: NDArray[np.bool_] = size // np.maximum(lowest, 1) >= np.uint64(1 << bits)
    return rounded


def _floats_in_integers(array: Array, dtype: np.dtype[Any]) -> tuple[Array, NDArray[np.bool_]]:
    wide = array.astype(np.result_type(array.dtype, np.float64), copy=False)
    least, above = float(np.iinfo(dtype).min), float(int(np.iinfo(dtype).max) + 1)
    lost = ~((wide >= least) & (wide < above) & (wide == np.trunc(wide)))  # true for NaN
    return np.where(lost, 0, wide).astype(dtype), lost


def _bf16_bits(array: Array) -> Array:
    """The upper halves of float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4").reshape(array.shape)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # Rounding up a NaN's payload could turn it into an infinity: write a quiet NaN instead.
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def _widened(upper: Array) -> Array:
    """The float32 of which these are the upper halves."""
    return np.asarray(upper.astype("<u4") << 16).view("<f4")


# --- lists and maps ----------------------------------------------------------------------------------------


def decode_tensor(value: Mapping[str, Any], field: str = "body") -> Array:
    """The array of a tensor's map from msgpack or JSON; for BYTES one of str and bytes objects, as they were
    sent, because numpy's own strings are padded to the longest and lose trailing zeros.

    Raises InvalidArgumentError, whose detail names the field.
    """
    datatype, shape = check_header(value, field)
    data = value["data"]
    if datatype == "BYTES":
        return _decode_elements(data, shape, field)
    if type(data) is bytes:
        check_length(datatype, shape, len(data), field)
        check_bools(datatype, data, field)
        return from_bytes(datatype, shape, data)
    if type(data) is not list:
        raise _invalid(f"{field}.data", "must be bin in msgpack, or a list in JSON")
    return array_of(data, datatype, field, shape)


def array_of(data: object, datatype: str, field: str = "body", shape: tuple[int, ...] | None = None) -> Array:
    """The array of a flat or nested list of numbers, each in the datatype's range.

    With `shape`, the list must hold exactly as many numbers, either flat or nested to that shape.
    """
    _check_elements(data, datatype, field, 0)
    try:
        array = _cast(data, datatype)
    except OverflowError:
        raise _invalid(f"{field}.data", f"a number is outside {datatype}'s range") from None
    except ValueError:
        raise _invalid(f"{field}.data", "has rows of unequal length") from None
    if shape is None:
        return array
    if array.size != math.prod(shape) or (array.ndim != 1 and array.shape != shape):
        raise _invalid(
            f"{field}.data",
            f"has {array.size} numbers in shape {list(array.shape)}, but shape is {list(shape)}",
        )
    return array.reshape(shape)


def converted(array: Array, datatype: str, field: str = "body") -> Array:
    """An array whose numbers are those of `datatype`, converted where a list of them would be: floats to
    narrower ones and integers to floats, but not floats to integers. Raises InvalidArgumentError, also for a
    number that does not survive (see `in_datatype`)."""
    dtype = _DTYPES.get(datatype, _DTYPES["FP32"])
    if array.dtype == dtype and datatype != "BF16":
        return array
    if array.dtype.kind not in _CONVERTED[dtype.kind]:
        raise _invalid(f"{field}.datatype", f"{datatype_of(array)}, but this model takes {datatype}")
    numbers, lost = in_datatype(array, datatype)
    if lost is not None:
        raise _invalid(f"{field}.data", why_lost(array, datatype))
    return numbers


def _cast(data: object, datatype: str) -> Array:
    """Numbers of a list as an array. Raises OverflowError for one out of range.

    Whole numbers are rounded as other numbers are, where floats are meant: JSON has one kind of number, and
    JavaScript writes 16777217.0 without the point.
    """
    dtype = _DTYPES.get(datatype, _DTYPES["FP32"])
    if dtype.kind != "f":
        return np.asarray(data, dtype)
    array = np.asarray(data, np.float64)
    if datatype != "FP64" and not (np.abs(array) <= _FLOAT64_INTEGER_MAX).all():  # true for NaN
        for index, number in np.ndenumerate(np.asarray(data, object)):
            if type(number) is int:
                array[index] = _integer_to_odd(number)
    array, lost = in_datatype(array, datatype)
    if lost is not None:
        raise OverflowError
    return array


def _check_elements(data: object, datatype: str, field: str, depth: int) -> None:
    """Raise unless every element is a number: of strings, numpy makes an array as wide as the longest."""
    types = set(map(type, data)) if isinstance(data, list) else {type(data)}
    if list in types and depth < MAX_DIMENSIONS:
        for row in data if isinstance(data, list) else ():
            _check_elements(row, datatype, field, depth + 1)
    elif not types <= _JSON_TYPES.get(datatype, _INTEGER):
        raise _invalid(f"{field}.data", f"has an element that is not {datatype}")


def _decode_elements(data: object, shape: tuple[int, ...], field: str) -> Array:
    if type(data) is not list or not _ELEMENTS.issuperset(map(type, data)):
        raise _invalid(f"{field}.data", "must be a flat list of strings for BYTES, or of bytes in msgpack")
    if len(data) != math.prod(shape):
        raise _invalid(f"{field}.data", f"{len(data)} strings, but shape is {list(shape)}")
    array = np.empty(len(data), object)
    array[:] = data
    return array.reshape(shape)


def keeps_shape_as_lists(shape: Sequence[int]) -> bool:
    """Whether nested lists of the elements tell the shape: not of (0, 3), which is an empty list."""
    return 0 not in shape[:-1]


def text_of(item: object) -> str:
    """An element of BYTES as a text: bytes are the text that they are in UTF-8. Raises ValueError."""
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes):
        raise ValueError(f"{type(item).__name__} is no text")
    try:
        return item.decode()
    except UnicodeDecodeError:
        raise ValueError(f"the bytes {item!r:.40} are no text in UTF-8") from None


def bytes_of(item: object) -> bytes:
    """An element of BYTES as bytes: a text is its UTF-8. Raises ValueError."""
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"{type(item).__name__} is neither text nor bytes")
    return item.encode()


def tensor_head(datatype: str, shape: Sequence[int], data_bytes: int) -> bytes:
    """The msgpack bytes of a tensor's map up to its data: `head + data` is the complete map.

    All rows of a batch share one head, so each row's body costs one concatenation.
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
    """A tensor's map for msgpack. Raises ValueError."""
    datatype = datatype_of(array)
    if datatype == "BYTES":
        return {"datatype": "BYTES", "shape": list(array.shape), "data": _elements(array)}
    return {"datatype": datatype, "shape": list(array.shape), "data": to_bytes(array, datatype)}


def tensor_json(array: Array) -> dict[str, Any]:
    """A tensor's map for JSON, `data` flat. Raises ValueError, also for bytes that are not UTF-8."""
    array = unmasked(array)
    datatype = datatype_of(array)
    if datatype == "BF16":
        array = from_bfloat16(array)
    flat = np.asarray(array).ravel().tolist()
    if datatype == "BYTES":
        flat = [text_of(item) for item in _elements(array)]
    return {"datatype": datatype, "shape": list(array.shape), "data": flat}


def _elements(array: Array) -> list[str | bytes]:
    """Those of BYTES, without the classes of their own that some have."""
    items = np.asarray(array).ravel().tolist()
    return [str.__str__(item) if isinstance(item, str) else bytes(item) for item in items]


class HeadMemo:
    """The head of the last tensor body, so that further bodies of the same layout need no decoding.

    A head determines the layout: a body of the same length with the same head has the same datatype and
    shape.
    """

    __slots__ = ("_body_bytes", "_head", "datatype", "shape")

    def __init__(self) -> None:
        self._head = b""
        self._body_bytes = -1
        self.datatype = ""
        self.shape: tuple[int, ...] = ()

    def data_of(self, body: bytes) -> bytes | memoryview | None:
        """The data of `body`, not copied if it is large. None unless the body has the layout remembered."""
        if len(body) == self._body_bytes and body.startswith(self._head):
            head_bytes = len(self._head)
            return body[head_bytes:] if len(body) < _COPIED_BYTES_MAX else memoryview(body)[head_bytes:]
        return None

    def remember(self, body: bytes, datatype: str, shape: tuple[int, ...], data_bytes: int) -> None:
        """Remember the layout of a body that was decoded, if it is written as `tensor_head` writes it."""
        head = tensor_head(datatype, shape, data_bytes)
        if len(body) == len(head) + data_bytes and body.startswith(head):
            self._head, self._body_bytes = head, len(body)
            self.datatype, self.shape = datatype, shape
