"""A model that takes time and no CPU, as one on an accelerator does: what is left to see is the batching."""

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
