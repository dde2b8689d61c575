"""A model to be measured: it waits, fails and dies on demand, and loads when it is let."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

GATE_S: Final = 30.0
LOAD_GATE: Final = "METERED_LOAD_GATE"  # in the environment: the file that `load` waits for


class Metered:
    """Returns what it was given, once the file that a body names under "gate" is there."""

    max_batch_size = 8
    max_queue_size = 16
    max_batch_cost = 1000
    seconds = 0.0

    def load(self, _device: str) -> None:
        if LOAD_GATE in os.environ:
            wait_for(Path(os.environ[LOAD_GATE]))

    def validate(self, body: Any) -> None:
        if body == "refuse":
            raise ValueError("not this one")

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(self.seconds)
        for body in batch:
            if body == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif body == "raise":
                raise RuntimeError("not that one")
            elif isinstance(body, dict) and "gate" in body:
                wait_for(Path(body["gate"]))
        return batch


class Plotted(Metered):
    """Takes a little while, so that there is something to plot."""

    max_queue_delay_ms = 5
    seconds = 0.005


def wait_for(gate: Path) -> None:
    """Return once the file is there; raise if it never comes."""
    until_s = time.monotonic() + GATE_S
    while not gate.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the gate was not opened")
        time.sleep(0.002)
