"""Whether the results of a request are the same, but for the rounding of numbers."""

from __future__ import annotations

from math import isclose, isnan
from typing import Any, Final

import numpy as np

from carpool.errors import OK
from carpool.messages.requests import RAW
from carpool.messages.results import Result
from carpool.wire.bodies import decode_result
from carpool.wire.tensors import WIDTHS, from_bytes

RELATIVE_MAX: Final = 1e-3  # by which numbers may differ: sums in another order are rounded otherwise
ABSOLUTE_MAX: Final = 1e-5


def are_same(result: Result, expected: Result, datatype: str = "") -> bool:
    """Whether two results are. `datatype`: of the numbers in octet-stream, if it is known."""
    if OK not in (result.status, expected.status):
        return result.status == expected.status  # the words may name a place in the batch
    if result.status != expected.status or result.body is None or expected.body is None:
        return False
    if datatype in WIDTHS and result.content_type == expected.content_type == RAW:
        return are_close(*[from_bytes(datatype, (-1,), body) for body in (result.body, expected.body)])
    return are_close(value_of(result), value_of(expected))


def are_close(one: Any, other: Any) -> bool:
    """Whether two values are the same but for the rounding of numbers."""
    if isinstance(one, np.ndarray) is not isinstance(other, np.ndarray):
        return False
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype:
            return False
        first, second = np.asarray(one), np.asarray(other)
        if first.shape != second.shape or first.dtype.kind not in "fc":
            return first.shape == second.shape and bool(np.array_equal(first, second))
        return bool(np.allclose(first, second, RELATIVE_MAX, ABSOLUTE_MAX, equal_nan=True))
    if isinstance(one, float) or isinstance(other, float):
        return _are_close_numbers(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_close(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_close, one, other))
    return bool(one == other)


def _are_close_numbers(one: Any, other: Any) -> bool:
    if not (isinstance(one, float | int) and isinstance(other, float | int)):
        return False
    return isclose(one, other, rel_tol=RELATIVE_MAX, abs_tol=ABSOLUTE_MAX) or (isnan(one) and isnan(other))


def value_of(result: Result) -> Any:
    """What a producer reads of a result."""
    return decode_result(result.content_type, result.body or b"")
