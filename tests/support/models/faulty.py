"""A model that fails, in each of the ways in which models do, where a request's body names one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final


def spoilt() -> None:
    raise RuntimeError("this one is spoilt")


def end_process() -> None:
    """As a fault in native code or the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def quit_process() -> None:
    """As some libraries do on an error that they think is fatal."""
    os._exit(3)


def end_worker() -> None:
    """As a machine does that is full."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)  # this process ends with its parent


FAULTS: Final[dict[object, Callable[[], None]]] = {
    "raise": spoilt,
    "kill": end_process,
    "quit": quit_process,
    "kill worker": end_worker,
}
RESULTS: Final[dict[object, Any]] = {
    "nan": float("nan"),
    "odd keys": {(1, 2): "a map that Python can hold and no message"},
}


class Faulty:
    """Answers as many good requests as you like beside a bad one."""

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
