"""What the values that a request emitted are together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np


def join(values: Sequence[Any]) -> Any:
    """The values as one: the output of a request, or the body of chunks that are merged.

    Texts, bytes and lists are concatenated, and arrays of one dtype and equal trailing dimensions along their
    first axis. Anything else is a list of the values, also a single one. None if there are no values.
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
    return None


def _all_are(values: Sequence[Any], kind: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


def _have_one_layout(arrays: Sequence[Any]) -> bool:
    first = arrays[0]
    return first.ndim > 0 and all(
        array.ndim > 0 and array.dtype == first.dtype and array.shape[1:] == first.shape[1:]
        for array in arrays
    )
