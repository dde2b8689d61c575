"""A model that takes 4 ms and 2 ms for each request of a batch, and fails in the way that a body names."""

from __future__ import annotations

import os
import signal
import time


class Paced:
    """Echoes its requests."""

    max_batch_size = 16

    def validate(self, body: str) -> None:
        if body == "refuse":
            raise ValueError("refused")

    def predict(self, batch: list[str]) -> list[str]:
        if "raise" in batch:
            raise RuntimeError("raised at once")
        if "kill" in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.004 + 0.002 * len(batch))
        return batch
