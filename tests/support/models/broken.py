"""Models whose processes break: all that such a process executes fails, until another one replaces it."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool import StateSpec, Unhealthy

if TYPE_CHECKING:
    from carpool_worker.model_process.model import BoundSequence, RequestInfo
    from carpool_worker.model_process.stepping.requests import StepRequest

ASSERT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect."
)


class AcceleratorError(RuntimeError):
    """As torch raises it."""


AcceleratorError.__module__ = "torch"


def load_driver() -> mmap.mmap:
    """What is in this process's memory is called as the driver of an accelerator, as long as it is kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libcuda.so.1")
        path.write_bytes(b"driver")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Device:
    """An accelerator. The body "assert" breaks it; "assert FILE" only if there is no such file, which it then
    makes."""

    def __init__(self) -> None:
        self._is_broken = False
        self._driver = load_driver()

    def run(self, body: Any) -> Any:
        verb, *files = str(body).split()
        if verb == "assert" and not any(Path(file).exists() for file in files):
            self._is_broken = True
            for file in files:
                Path(file).touch()
        if self._is_broken:
            raise AcceleratorError(ASSERT)
        return body


class OnDevice:
    """Echoes bodies."""

    max_batch_size = 8

    def load(self, device: str) -> None:
        self._device = Device()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self._device.run(body) for body in batch]

    def unload(self) -> None:
        raise RuntimeError(ASSERT)


class StepsOnDevice:
    """Emits the words of the body."""

    max_batch_size = 4

    def load(self, device: str) -> None:
        self._device = Device()

    def begin(self, requests: Sequence[StepRequest]) -> None:
        for request in requests:
            request.state = str(request.body).split()[len(request.chunks) :]

    def step(self, requests: Sequence[StepRequest]) -> None:
        for request in requests:
            request.emit(self._device.run(request.state.pop(0)))
            if not request.state:
                request.finish()


class BoundToDevice(OnDevice):
    """Echoes bodies of sequences."""

    max_batch_size = 2
    binds_sequences = True

    def start(self, sequence: BoundSequence) -> None:
        self._device.run("start")


class SaysSo(OnDevice):
    """Knows by itself that it cannot go on."""

    def predict(self, batch: list[Any]) -> list[Any]:
        try:
            return super().predict(batch)
        except RuntimeError:
            raise Unhealthy("the sensor is gone") from None


class Handle:
    """What models use that fail in a way which nobody knows. The body "break" breaks it, and "bad" fails. To
    others a file may be added, which gets a line each time."""

    def __init__(self) -> None:
        self._is_broken = False

    def use(self, body: Any) -> Any:
        verb, *files = str(body).split()
        self._is_broken |= verb == "break"
        if self._is_broken or verb == "bad":
            raise RuntimeError("handle 17 is not valid")
        for file in files:
            with Path(file).open("a") as lines:
                lines.write(f"{verb}\n")
        return body


class Silent:
    """Echoes bodies."""

    max_batch_size = 2

    def __init__(self) -> None:
        self._handle = Handle()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self._handle.use(body) for body in batch]


class SilentSteps:
    """Emits the body twice."""

    max_batch_size = 2

    def __init__(self) -> None:
        self._handle = Handle()

    def begin(self, requests: Sequence[StepRequest]) -> None:
        for request in requests:
            request.state = 0

    def step(self, requests: Sequence[StepRequest]) -> None:
        for request in requests:
            request.emit(self._handle.use(request.body))
            request.state += 1
            if request.state == 2:
                request.finish()


class SilentStates:
    """Echoes bodies of sequences, whose states are in Redis."""

    max_batch_size = 2
    states = (StateSpec("number", "INT64", (-1,)),)

    def __init__(self) -> None:
        self._handle = Handle()

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo], states: Any) -> Any:
        return [self._handle.use(body) for body in batch], {"number": states["number"] + 1}


class SilentSlots:
    """Echoes bodies of sequences, whose states are in its slots."""

    max_batch_size = 2
    binds_sequences = True

    def __init__(self) -> None:
        self._handle = Handle()

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo | None]) -> list[Any]:
        return [body if body is None else self._handle.use(body) for body in batch]
