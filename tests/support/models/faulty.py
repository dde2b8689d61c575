"""Models that fail in the way that a request's body names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


def raise_error() -> None:
    raise RuntimeError("this one is spoilt")


def kill_process() -> None:
    """Like a fault in native code, or the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_process() -> None:
    """Like a library on an error that it considers fatal."""
    os._exit(3)


def kill_worker() -> None:
    """Like a machine that is out of memory."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)  # the kernel kills this process when its parent dies


FAULTS: Final[dict[object, Callable[[], None]]] = {
    "raise": raise_error,
    "kill": kill_process,
    "quit": exit_process,
    "kill worker": kill_worker,
}
RESULTS: Final[dict[object, Any]] = {
    "nan": float("nan"),
    "odd keys": {(1, 2): "a key that msgpack and JSON cannot represent"},
}


class Faulty:
    """Echoes the bodies of requests that name no fault."""

    max_batch_size = 64

    def validate(self, body: Any) -> None:
        if body == "refuse":
            raise ValueError("spoilt already")

    def predict(self, batch: list[Any]) -> list[Any]:
        texts = [body for body in batch if isinstance(body, str)]
        for body in texts:
            FAULTS.get(body, lambda: None)()
        results = [RESULTS.get(body, body) if isinstance(body, str) else body for body in batch]
        return results[1:] if "too few" in texts else results


class Gated:
    """Writes the size of each batch to the file that its bodies name, and waits until the file that they name
    as gate exists. Then it raises."""

    max_batch_size = 64

    def predict(self, batch: list[Any]) -> list[Any]:
        with Path(batch[0]["calls"]).open("a") as calls:
            calls.write(f"{len(batch)}\n")
        while not Path(batch[0]["gate"]).exists():
            time.sleep(0.005)
        raise RuntimeError("all are spoilt")


class Paced(Faulty):
    """Takes 4 ms, and 2 ms for each request of a batch."""

    max_batch_size = 16

    def predict(self, batch: list[Any]) -> list[Any]:
        results = super().predict(batch)
        time.sleep(0.004 + 0.002 * len(batch))
        return results


class Curable:
    """Ends its process on a body that names a file, as long as the file exists."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        for body in batch:
            if isinstance(body, dict) and Path(body["cause"]).exists():
                kill_process()
        return ["cured" for _ in batch]


class Unsteady:
    """Raises as often as a body says, and then returns how often it was called. It counts in a file."""

    max_batch_size = 1

    def predict(self, batch: list[Any]) -> list[Any]:
        ((path, failures),) = batch
        with Path(path).open("a") as file:
            file.write(".")
        calls = Path(path).stat().st_size
        if calls <= failures:
            raise RuntimeError(f"call {calls} fails")
        return [calls]
