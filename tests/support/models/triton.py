"""Models that do what those of Triton's examples do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool import StateSpec, TensorSpec

Array = np.ndarray[Any, Any]


class Sum:
    """The sum and the difference of two rows, as `simple` of Triton."""

    max_batch_size = 8
    inputs = (TensorSpec("INPUT0", "INT32", (16,)), TensorSpec("INPUT1", "INT32", (16,)))
    outputs = (TensorSpec("OUTPUT0", "INT32", (16,)), TensorSpec("OUTPUT1", "INT32", (16,)))

    def predict(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        first, second = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": first + second, "OUTPUT1": first - second}


class Identity:
    """Numbers of any length, unchanged."""

    inputs = (TensorSpec("INPUT0", "FP32", (-1,)),)
    outputs = (TensorSpec("OUTPUT0", "FP32", (-1,)),)

    def predict(self, batch: Array) -> Array:
        return batch


class Strings:
    """Elements of BYTES, unchanged, and of which type they are."""

    inputs = (TensorSpec("INPUT0", "BYTES", (-1,)),)
    outputs = (TensorSpec("OUTPUT0", "BYTES", (-1,)), TensorSpec("types", "BYTES", ()))

    def predict(self, batch: Array) -> dict[str, Any]:
        types = [",".join(sorted({type(element).__name__ for element in row})) for row in batch]
        return {"OUTPUT0": batch, "types": types}


class Labelled:
    """Scores of three classes."""

    inputs = outputs = (TensorSpec("scores", "FP32", (3,), labels=("cat", "dog", "bird")),)

    def predict(self, batch: Array) -> Array:
        return batch


class Starting:
    """Adds 1 to the first number of a sequence, as `simple_sequence` of Triton."""

    inputs = (TensorSpec("INPUT", "INT32", (1,)),)
    outputs = (TensorSpec("OUTPUT", "INT32", (1,)),)
    states = (StateSpec("has_started", "INT32", (-1,)),)

    def predict(self, batch: Array, states: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        is_first = states["has_started"] == 0
        return batch + is_first.astype(np.int32)[:, None], {"has_started": np.ones(len(batch), np.int32)}
