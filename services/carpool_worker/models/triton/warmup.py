"""Requests of `model_warmup`, which a model executes after it is loaded, before it serves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carpool.errors import CarpoolError
from carpool.plugins import UnusableError
from carpool.wire.tensors import Array, from_bytes
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.triton.tensors import Tensor, Tensors, datatype_of


def warm_up(
    samples: Sequence[Mapping[str, Any]], entry: Path, tensors: Tensors, predict: Callable[..., Any]
) -> None:
    """Execute each sample as often as it says. Raises UnusableError for a wrong one, and what the model
    raises, or answers with."""
    if inspect.iscoroutinefunction(predict):
        raise UnusableError("model_warmup: has no counterpart in a model with an async execute; remove it")
    for sample in samples:
        rows = max(1, sample["batch_size"])
        arrays = {one.name: _array(sample, one, entry, rows) for one in tensors.inputs}
        batch = arrays if len(arrays) > 1 else next(iter(arrays.values()))
        infos = [RequestInfo(f"warmup-{row}", "", {}) for row in range(rows)]
        for _ in range(max(1, sample["count"])):
            for result in predict(batch, infos):
                if isinstance(result, CarpoolError):
                    raise result


def _array(sample: Mapping[str, Any], tensor: Tensor, entry: Path, rows: int) -> Array:
    """The rows of an input, all alike."""
    where = f"model_warmup {sample['name']}: input {tensor.name}"
    given = sample["inputs"].get(tensor.name)
    if given is None:
        raise UnusableError(f"{where}: is missing; declare it")
    datatype, shape = datatype_of(given["data_type"]), tensor.shape
    if datatype != tensor.datatype:
        raise UnusableError(f"{where}: data_type: must be that of the input, {tensor.datatype}")
    if -1 in shape:  # Triton has no sizes that vary here
        shape = tuple(given["dims"])
    if "input_data_file" in given:
        file = entry / "warmup" / given["input_data_file"]
        try:
            row = from_bytes(datatype, shape, file.read_bytes())
        except (OSError, ValueError) as error:
            raise UnusableError(f"{where}: {file}: {error}") from None
    elif datatype == "BYTES":
        row = np.full(shape, b"", object)
    elif "random_data" in given:
        row = np.random.default_rng(0).integers(0, 2, shape).astype(_dtype(datatype))
    else:
        row = np.zeros(shape, _dtype(datatype))
    return np.stack([row] * rows)


def _dtype(datatype: str) -> Any:
    return np.dtype(from_bytes(datatype, (0,), b"").dtype)
