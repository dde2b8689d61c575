"""A model that does nothing, on float32[128]: what is left is what Carpool costs."""

from __future__ import annotations

from carpool.wire.tensors import Array, TensorSpec


class Noop:
    """The batch is its own result."""

    name = "noop"
    max_batch_size = 256
    inputs = (TensorSpec("x", "FP32", (128,)),)
    outputs = (TensorSpec("y", "FP32", (128,)),)

    def predict(self, batch: Array) -> Array:
        """float32 (n, 128) -> the same."""
        return batch
