"""Models without faults. Some wait at a gate: until the file exists that a body names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from carpool import Client
from carpool.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo


GATE: Final = "gate"
GATE_S: Final = 240.0  # longer than anything that a test waits for


class Rows:
    """The rows of the batch, as one array."""

    inputs = (TensorSpec("row", "FP32", (2,)),)

    def predict(self, batch: Any) -> Any:
        return batch


class Relay:
    """Asks another model, `square`."""

    def load(self, device: str) -> None:
        self.client = Client()

    def predict(self, batch: list[Any]) -> list[Any]:
        return list(self.client.infer_many("square", batch))

    def unload(self) -> None:
        self.client.close()


def label(images: list[bytes]) -> list[dict[str, int]]:
    """Of images, how many bytes they have."""
    return [{"bytes": len(image)} for image in images]


def image(names: list[str]) -> list[bytes]:
    """The other way round."""
    return [b"\x89PNG " + str(name).encode() for name in names]


class Echo:
    """Echoes the bodies; for the body "about" it returns the request's other fields."""

    max_batch_size = 16

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> list[Any]:
        for body in batch:
            if isinstance(body, dict) and GATE in body:
                wait_at(Path(body[GATE]))
        return [
            described(info) if body == "about" else body for body, info in zip(batch, requests, strict=True)
        ]


def described(info: RequestInfo) -> list[Any]:
    fields = {name: value.decode() for name, value in info.fields.items()}
    return [info.correlation_id, info.lane, fields]


def wait_at(gate: Path) -> None:
    """Return as soon as the file exists; raise after GATE_S."""
    until_s = time.monotonic() + GATE_S
    while not gate.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the gate was not opened")
        time.sleep(0.002)


class Noop:
    """Echoes a declared tensor, to measure everything but the model."""

    max_batch_size = 64
    inputs = (TensorSpec("numbers", "FP32", (128,)),)
    outputs = (TensorSpec("numbers", "FP32", (128,)),)

    def predict(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return batch


class Ragged:
    """Echoes a tensor of any length: requests of one batch may differ in shape."""

    max_batch_size = 32
    inputs = (TensorSpec("numbers", "FP32", (-1,)),)

    def predict(self, batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return batch


class Lengths:
    """The length of each body."""

    max_batch_size = 24

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(body) for body in batch]


class Counts:
    """How often each number occurs in a body: a map whose names are whole numbers."""

    def predict(self, batch: list[list[int]]) -> list[dict[int, int]]:
        return [dict(Counter(body)) for body in batch]


class Single(Echo):
    """Executes one request at a time."""

    max_batch_size = 1


class Noting:
    """Executes one request at a time, and notes the `name` of each in the file `notes` that it names."""

    max_batch_size = 1

    def predict(self, batch: list[dict[str, str]]) -> list[str]:
        for body in batch:
            with Path(body["notes"]).open("a") as notes:
                notes.write(body["name"] + "\n")
            if GATE in body:
                wait_at(Path(body[GATE]))
        return [body["name"] for body in batch]


class Few(Single):
    """At most two requests may wait."""

    max_queue_size = 2


class Priced(Echo):
    """Limits a batch by the cost of its requests."""

    max_batch_cost = 10
    max_queue_delay_ms = 200
