"""Models for tests of producers in other languages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from carpool.wire.tensors import TensorSpec


class Transpose:
    """Transposes a matrix: the result differs from the body in shape and data."""

    max_batch_size = 16

    def predict(self, batch: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return [matrix.T for matrix in batch]


class Vectors:
    """Squares the two numbers of each vector."""

    max_batch_size = 16
    inputs = (TensorSpec("numbers", "FP32", (2,)),)
    outputs = (TensorSpec("squares", "FP32", (2,)),)

    def predict(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        squares: np.ndarray[Any, Any] = batch * batch
        return squares


class Away:
    """Registered by a worker that is then stopped, so that its requests wait without a limit."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


STORY = ("Once", " upon", ' a "time"')


def writer(body: str) -> Iterator[str]:
    """Steps through a story that begins with the body."""
    yield body
    yield from STORY[1:]
