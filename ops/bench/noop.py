"""A model that does nothing, on float32[128]: all that is measured with it is the cost of Carpool."""

from __future__ import annotations

import os

from carpool.wire.tensors import Array, TensorSpec


class Noop:
    """Returns the batch unchanged."""

    name = "noop"
    max_batch_size = int(os.environ.get("BENCH_BATCH_SIZE", "256"))
    inputs = (TensorSpec("x", "FP32", (128,)),)
    outputs = (TensorSpec("y", "FP32", (128,)),)

    def predict(self, batch: Array) -> Array:
        """float32 (n, 128) -> the same."""
        return batch
