"""A model that takes time but no CPU, and is scaled soon: for `scaling.py`."""

from __future__ import annotations

import time


class Scaled:
    """300 ms + 60 ms for each request of a batch of up to 16: a process serves 13 requests/s in full ones."""

    name = "scaled"
    max_batch_size = 16
    max_workers = 5
    scale_down_ms = 20_000

    def predict(self, batch: list[int]) -> list[int]:
        """Return the batch unchanged."""
        time.sleep(0.3 + 0.06 * len(batch))
        return batch
