"""Padding: tensors of several sizes become tensors of one size, a bucket, and results are cut back. Pure.

A request keeps its true sizes: those of the padded dimensions of each padded tensor, in order.

Why: docs/decisions/0105.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.parts import Buffer
from carpool.wire.tensors import WIDTHS, Array, TensorSpec, to_bytes

Sizes = Sequence[int]


def padded_shape(spec: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape to which a request's tensor is padded. Raises InvalidArgumentError if it is too large."""
    padded = list(shape)
    for axis, buckets in spec.buckets:
        padded[axis] = bucket_of(spec, axis, buckets, shape[axis])
    return tuple(padded)


def bucket_of(spec: TensorSpec, axis: int, buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that has this size. Raises InvalidArgumentError if there is none."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise InvalidArgumentError(
            f"body.{spec.name}.shape: dimension {axis} has the size {size}, but this model takes at most "
            f"{buckets[-1]}, its largest bucket"
        )
    return buckets[at]


def true_sizes(spec: TensorSpec, shape: Sequence[int]) -> list[int]:
    """Those of the padded dimensions."""
    return [shape[axis] for axis, _ in spec.buckets]


def padded_sizes(spec: TensorSpec, sizes: Sizes) -> list[int]:
    """The buckets of these true sizes."""
    pairs = zip(spec.buckets, sizes, strict=True)
    return [bucket_of(spec, axis, buckets, size) for (axis, buckets), size in pairs]


def pad_bytes(spec: TensorSpec, shape: Sequence[int], padded: Sequence[int], data: Buffer) -> Buffer:
    """The data of a tensor of this shape as that of the padded shape."""
    if tuple(shape) == tuple(padded):
        return data
    element = _element(spec.datatype, spec.pad)
    if shape[1:] == padded[1:]:  # the usual case: what is missing is at the end
        return b"".join((data, element * (prod(padded) - prod(shape))))
    dtype = f"<u{WIDTHS[spec.datatype]}"
    array = np.full(padded, np.frombuffer(element, dtype)[0], dtype)
    array[tuple(map(slice, shape))] = np.frombuffer(data, dtype).reshape(shape)
    return array.tobytes()


def pad_array(spec: TensorSpec, array: Array, target: Array) -> None:
    """Write an array into a larger one, and `pad` where that is larger."""
    if array.shape != target.shape:
        target[...] = spec.pad
    target[tuple(map(slice, array.shape))] = array


def lengths_array(sizes: Sequence[Sizes]) -> Array:
    """The true sizes of several requests as a model gets them: INT64 (n), or (n, k)."""
    array = np.array(sizes, np.int64)
    return array[:, 0] if array.shape[1] == 1 else array


@lru_cache(maxsize=64)
def _element(datatype: str, pad: float) -> bytes:
    return to_bytes(np.asarray(pad), datatype)
