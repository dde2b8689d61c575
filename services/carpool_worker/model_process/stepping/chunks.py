"""What the values that a request emitted are together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from carpool.wire.tensors import is_tensor


def join(values: Sequence[Any]) -> Any:
    """The values as one: the output of a request, or the body of chunks that are merged.

    Texts, bytes and lists are concatenated, and arrays of one dtype and equal trailing dimensions along their
    first axis; those of texts are the maps that they are packed as. Anything else is a list of the values,
    also a single one. None if there are no values.
    """
    if not values:
        return None
    joined = concatenated(values)
    return list(values) if joined is None else joined


def concatenated(values: Sequence[Any]) -> Any:
    """The values end to end; None if they are not of a kind that can be concatenated."""
    if _all_are(values, str):
        return "".join(values)
    if _all_are(values, bytes):
        return b"".join(values)
    if _all_are(values, list | tuple):
        return list(chain.from_iterable(values))
    if _all_are(values, np.ndarray) and _have_one_layout(values):
        return np.concatenate(values)
    if all(map(_is_text_tensor, values)) and len({tuple(value["shape"][1:]) for value in values}) == 1:
        return {
            "datatype": "BYTES",
            "shape": [sum(value["shape"][0] for value in values), *values[0]["shape"][1:]],
            "data": list(chain.from_iterable(value["data"] for value in values)),
        }
    return None


def text_array(value: Any) -> Any:
    """An array of texts or bytes, if the value is the map that one is packed as; else the value."""
    if not _is_text_tensor(value):
        return value
    return np.array(value["data"], object).reshape(value["shape"])


def _is_text_tensor(value: Any) -> bool:
    """Whether this is an array of texts or bytes with at least one dimension, as it is packed."""
    if not is_tensor(value) or value["datatype"] != "BYTES":
        return False
    shape, data = value["shape"], value["data"]
    return (
        type(shape) is list
        and bool(shape)
        and all(type(size) is int and size >= 0 for size in shape)
        and type(data) is list
        and _all_are(data, str | bytes)
        and len(data) == prod(shape)
    )


def _all_are(values: Sequence[Any], kind: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


def _have_one_layout(arrays: Sequence[Any]) -> bool:
    first = arrays[0]
    return first.ndim > 0 and all(
        array.ndim > 0 and array.dtype == first.dtype and array.shape[1:] == first.shape[1:]
        for array in arrays
    )
