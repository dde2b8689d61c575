"""Models that take time and no CPU, as one on an accelerator does: what is left to see is the batching."""

from __future__ import annotations

import time


class Sleeper:
    """50 ms for a batch of up to 16."""

    name = "sleeper"
    max_batch_size = 16
    seconds = 0.05

    def predict(self, batch: list[int]) -> list[int]:
        """The batch is its own result."""
        time.sleep(self.seconds)
        return batch


class Linear:
    """5 ms and 0.05 ms for each request: fuller batches pay."""

    name = "linear"
    max_batch_size = 256

    def predict(self, batch: list[int]) -> list[int]:
        """The batch is its own result."""
        time.sleep(0.005 + 0.00005 * len(batch))
        return batch
