"""A model for which autoscaling is fast enough for a test."""

from __future__ import annotations

import time


class Scaled:
    """Takes 0.2 s for a batch of up to 4: a process serves 20 requests/s."""

    max_batch_size = 4
    min_workers = 0
    max_workers = 3
    scale_down_ms = 5000
    scale_idle_ms = 1500
    result_ttl_ms = 3_600_000  # results are read at the end, on a busy machine after minutes
    max_queue_size = 1_000_000

    def predict(self, batch: list[object]) -> list[object]:
        time.sleep(0.2)
        return batch
