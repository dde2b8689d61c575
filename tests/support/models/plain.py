"""Models that do as they are told: wait at a gate, for one, where a body names the file that opens it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from carpool.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo


GATE: Final = "gate"
GATE_S: Final = 30.0


class Echo:
    """Returns what it was given; to "about", what it is told of the request beside the body."""

    max_batch_size = 16

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> list[Any]:
        for body in batch:
            if isinstance(body, dict) and GATE in body:
                wait_at(Path(body[GATE]))
        return [told(about) if body == "about" else body for body, about in zip(batch, requests, strict=True)]


def told(about: RequestInfo) -> list[Any]:
    fields = {name: value.decode() for name, value in about.fields.items()}
    return [about.correlation_id, about.lane, fields]


def wait_at(gate: Path) -> None:
    """Return once the file is there; raise if it never comes."""
    until_s = time.monotonic() + GATE_S
    while not gate.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the gate was not opened")
        time.sleep(0.002)


class Noop:
    """A declared tensor in, the same out: nothing but the trip."""

    max_batch_size = 64
    inputs = (TensorSpec("numbers", "FP32", (128,)),)
    outputs = (TensorSpec("numbers", "FP32", (128,)),)

    def predict(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return batch


class Ragged:
    """A tensor of any length in, the same out: requests of one batch may not stack."""

    max_batch_size = 32
    inputs = (TensorSpec("numbers", "FP32", (-1,)),)

    def predict(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return batch


class Single(Echo):
    """Executes one request at a time."""

    max_batch_size = 1


class Few(Single):
    """Lets two requests wait."""

    max_queue_size = 2


class Priced(Echo):
    """Counts what requests cost."""

    max_batch_cost = 10
    max_queue_delay_ms = 200
