"""A model for tests of metrics: it waits, fails and dies on demand, and loading can be delayed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

GATE_S: Final = 240.0  # longer than anything that a test waits for
LOAD_GATE: Final = "METERED_LOAD_GATE"  # in the environment: the file that `load` waits for


class Metered:
    """Echoes the bodies, as soon as the file exists that a body names under "gate"."""

    max_batch_size = 8
    max_queue_size = 16
    max_batch_cost = 1000
    seconds = 0.0

    def load(self, _device: str) -> None:
        if LOAD_GATE in os.environ:
            wait_for(Path(os.environ[LOAD_GATE]))

    def validate(self, body: Any) -> None:
        if body == "refuse":
            raise ValueError("body rejected")

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(self.seconds)
        for body in batch:
            if body == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif body == "raise":
                raise RuntimeError("request failed")
            elif isinstance(body, dict) and "gate" in body:
                wait_for(Path(body["gate"]))
        return batch


class Plotted(Metered):
    """Takes 5 ms a batch, so that plots are not empty."""

    max_queue_delay_ms = 5
    seconds = 0.005


def wait_for(gate: Path) -> None:
    """Return as soon as the file exists; raise after GATE_S."""
    until_s = time.monotonic() + GATE_S
    while not gate.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the gate was not opened")
        time.sleep(0.002)
