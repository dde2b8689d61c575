"""Models that take time but no CPU, as on an accelerator: measurements show only the batching."""

from __future__ import annotations

import time


class Sleeper:
    """Sleeps 50 ms for a batch of up to 16."""

    name = "sleeper"
    max_batch_size = 16
    seconds = 0.05

    def predict(self, batch: list[int]) -> list[int]:
        """Return the batch unchanged."""
        time.sleep(self.seconds)
        return batch


class Linear:
    """Sleeps 5 ms + 0.05 ms for each request, so that larger batches are more efficient."""

    name = "linear"
    max_batch_size = 256

    def predict(self, batch: list[int]) -> list[int]:
        """Return the batch unchanged."""
        time.sleep(0.005 + 0.00005 * len(batch))
        return batch
