"""Values of other libraries: what they are on the wire, or an error that names the type and what to do.

Producers and models have values that neither msgpack nor JSON knows. One becomes an array or a plain number
where that is exact, and it is clear which one is meant. All others are refused: a guess would be a wrong
value with the status OK. docs/values.md has a table of them, which tests/unit/test_values.py runs.

Why: docs/decisions/0084.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np

from carpool.wire.tensors import (
    Array,
    datatype_of,
    for_numpy,
    from_bfloat16,
    in_datatype,
    is_bfloat16,
    is_torch_bfloat16,
    keeps_shape_as_lists,
    unmasked,
    why_lost,
)

_FLOATS: Final = ("FP16", "BF16", "FP32", "FP64")
_NUMBERS: Final = frozenset({bool, int, float})
_FLOAT: Final = frozenset({float})
_FLOAT_BYTES_MAX: Final = 8  # of a Python float

# What to do with a value, by the name of its class or of one that it inherits.
_REMEDIES: Final = {
    "Decimal": "send float(value), or str(value) to keep all digits",
    "Fraction": "send float(value), or str(value)",
    "UUID": "send str(value)",
    "PurePath": "send str(value)",
    "datetime": "send value.isoformat() or value.timestamp()",
    "date": "send value.isoformat()",
    "time": "send value.isoformat()",
    "timedelta": "send value.total_seconds()",
    "complex": "send [value.real, value.imag]",
    "set": "it has no order: send a list, such as sorted(value)",
    "frozenset": "it has no order: send a list, such as sorted(value)",
    "BaseModel": 'send value.model_dump(mode="json")',
    "array": "send numpy.asarray(value)",
    "Image": "send numpy.asarray(value), or the bytes of its file",
    "NAType": "send None, or leave it out",
    "NaTType": "send None, or leave it out",
}
NOT_CONTIGUOUS: Final = "a memoryview in it is not contiguous: send bytes(value)"


def plain(value: Any) -> Any:
    """What stands for a value that msgpack and JSON do not know: an array that has a datatype, a plain number
    or text, or bytes, in lists for an array of them. Raises TypeError, ValueError or OverflowError, whose
    text names the type and says what to do."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, int):
        raise OverflowError("it contains an integer of more than 64 bits")
    if isinstance(value, np.generic):
        return _number(value)
    if _is_table(value):
        raise TypeError(why_not(value))
    if hasattr(value, "__array__") and not isinstance(value, type):
        return _array(_as_array(value))
    raise TypeError(why_not(value))


def bodies_of(bodies: Any, call: str) -> Any:
    """What `infer_many` and `map` are given: an array, or an iterable with a body for each request.

    Raises TypeError or ValueError for one body, because its letters or names would become requests, and for a
    set, whose results nobody could tell apart.
    """
    if isinstance(bodies, np.ndarray):
        return unmasked(bodies)
    kind = _name(bodies)
    if isinstance(bodies, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError(f"a {kind} is one body: use infer, or give {call} a list of bodies")
    if isinstance(bodies, set | frozenset):
        raise TypeError(f"a {kind} has no order, so its results could not be told apart: give {call} a list")
    if _is_table(bodies):
        if len(getattr(bodies, "shape", ())) != 1:
            raise TypeError(
                f"a {kind} gives the names of its columns, not its rows: give {call} {_conversions(bodies)}"
            )
        return bodies
    if hasattr(bodies, "__array__") and not isinstance(bodies, type):
        return unmasked(_as_array(bodies))
    if not isinstance(bodies, Iterable) and not hasattr(type(bodies), "__getitem__"):
        raise TypeError(f"a {kind} is one body: use infer, or give {call} a list of bodies")
    return bodies


def why_not(value: Any) -> str:
    """Why a value cannot be sent, and what to do."""
    kind = _name(value)
    if _is_table(value):
        remedy = f"send {_conversions(value)}"
    elif isinstance(value, Enum):
        remedy = "send its .value or .name"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        remedy = "send dataclasses.asdict(value)"
    else:
        names = (parent.__name__ for parent in type(value).__mro__)
        remedy = next((_REMEDIES[name] for name in names if name in _REMEDIES), "")
    if not remedy and isinstance(value, Mapping):
        remedy = "send dict(value)"
    elif not remedy and isinstance(value, Iterable):
        remedy = "send list(value)"
    return f"its type is {kind}: " + (remedy or "send numbers, text, bytes, lists, dicts or numpy arrays")


def _name(value: Any) -> str:
    return type(value).__name__


def _is_table(value: Any) -> bool:
    """Whether this has names beside its numbers, which an array would lose: of pandas, polars, pyarrow. A
    Timestamp of pandas has `to_numpy`, too, but is no array."""
    return hasattr(value, "to_numpy") and hasattr(value, "__array__") and not isinstance(value, type)


def _conversions(table: Any) -> str:
    """Which methods make a body of a table."""
    if len(getattr(table, "shape", ())) == 1:
        names = ("to_numpy", "tolist", "to_list", "to_dict")
        return " or ".join(f"value.{name}()" for name in names if hasattr(table, name))
    if hasattr(table, "to_dicts"):  # of polars
        return "value.to_dicts() or value.to_numpy()"
    return 'value.to_dict("records") or value.to_numpy()'


def _as_array(value: Any) -> Array:
    try:
        return np.asanyarray(for_numpy(value))
    except Exception as error:  # for example a tensor that requires a gradient, or is in a GPU's memory
        is_widened = is_torch_bfloat16(value)
        steps = "detach().cpu().float().numpy()" if is_widened else "detach().cpu().numpy()"
        raise TypeError(
            f"its type is {_name(value)}, which cannot be converted ({error}): send an array, of a torch "
            f"tensor value.{steps}"
        ) from None


def _array(array: Array) -> Any:
    array = unmasked(array)
    if array.dtype.kind == "S":
        if not keeps_shape_as_lists(array.shape):
            raise ValueError(
                f"an array of bytes of shape {list(array.shape)} cannot be sent, because lists of bytes do "
                "not keep that shape: send array.tolist()"
            )
        return array.tolist()
    is_number = datatype_of(array) != "BYTES"
    if array.ndim or is_number:
        return array
    item = array.item()
    return item if isinstance(item, bytes) else str(item)


def _number(value: np.generic) -> Any:
    """A scalar of numpy as a plain value. Not `item` of each: that of a datetime is an integer for some
    units, and that of a structure is a tuple without its names."""
    dtype = value.dtype
    if dtype.kind in "biuf" and dtype.itemsize <= _FLOAT_BYTES_MAX:
        return value.item()
    if is_bfloat16(dtype):
        return from_bfloat16(np.asarray(value)).item()
    datatype_of(np.asarray(value))
    return value.item()


def check_unmasked(value: Any) -> None:
    """Raise ValueError if an array in these nested lists has masked numbers."""
    if isinstance(value, np.ma.MaskedArray):
        unmasked(value)
    elif isinstance(value, list | tuple) and not _NUMBERS.issuperset(map(type, value)):
        for item in value:
            check_unmasked(item)


def check_integers(value: Any, datatype: str) -> None:
    """Raise ValueError unless a datatype of floats holds each integer in these nested lists. In an array of
    them, one float makes floats of all integers, which then cannot be told from those that were floats."""
    if datatype not in _FLOATS:
        return
    found = list(_integers_in(value))
    for dtype, is_negative in (("u8", False), ("i8", True)):
        try:
            array = np.array([integer for integer in found if (integer < 0) == is_negative], dtype)
        except OverflowError:
            raise ValueError("a whole number has more than 64 bits") from None
        if in_datatype(array, datatype)[1] is not None:
            raise ValueError(why_lost(array, datatype))


def _integers_in(value: Any) -> Iterator[int]:
    if isinstance(value, list | tuple):
        if not _FLOAT.issuperset(map(type, value)):
            for item in value:
                yield from _integers_in(item)
    elif isinstance(value, int | np.integer):
        if not isinstance(value, bool):
            yield int(value)
    elif not isinstance(value, float | np.generic) and hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "iuO":
            yield from _integers_in(array.ravel().tolist())
