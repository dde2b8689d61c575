"""The models, the same for every system: functions from a list of arrays to a list of arrays. They need only
numpy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
_DATATYPES: Final = {"float32": "FP32", "uint8": "UINT8", "int64": "INT64"}


def _noop(batch: Sequence[Array]) -> list[Array]:
    return list(batch)


def _sleeper(batch: Sequence[Array]) -> list[Array]:
    time.sleep(0.005 + 0.00005 * len(batch))
    return list(batch)


def _image(batch: Sequence[Array]) -> list[Array]:
    return [image[:8] for image in batch]


def _square(batch: Sequence[Array]) -> list[Array]:
    """The model of the articles: it sleeps for a logarithm of the size of the batch."""
    time.sleep(0.001 * math.log(len(batch) + 1))
    return [value * value for value in batch]


@dataclass(frozen=True)
class Model:
    """A model, and what its requests look like."""

    dtype: str
    shape: tuple[int, ...]
    predict: Callable[[Sequence[Array]], list[Array]]
    result_shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """As the Open Inference Protocol calls it."""
        return _DATATYPES[self.dtype]

    def body(self, number: int) -> Array:
        """A request's body; it depends on the number."""
        if self.dtype == "int64":
            return np.array([number], self.dtype)
        noise = np.random.default_rng(number).random(self.shape, dtype=np.float32)
        return (noise * 255).astype(self.dtype) if self.dtype == "uint8" else noise.astype(self.dtype)

    def expected(self, body: Array) -> Array:
        """The right result, computed here."""
        return self.predict([body])[0]

    def decode_body(self, data: bytes | bytearray | memoryview) -> Array:
        """The array of a body that was sent as raw bytes."""
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def decode_result(self, data: bytes | bytearray | memoryview) -> Array:
        """The array of a result that was sent as raw bytes."""
        return np.frombuffer(data, self.dtype).reshape(self.result_shape)


MODELS: Final = {
    "noop": Model("float32", (128,), _noop, (128,)),
    "sleeper": Model("float32", (128,), _sleeper, (128,)),
    "image": Model("uint8", (150_000,), _image, (8,)),
    "picture": Model("uint8", (50_000,), _image, (8,)),
    "square": Model("int64", (1,), _square, (1,)),
}
