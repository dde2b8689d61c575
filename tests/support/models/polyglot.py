"""Models for tests of producers in other languages."""

from __future__ import annotations

from typing import Any

import numpy as np


class Transpose:
    """Transposes a matrix: the result differs from the body in shape and data."""

    max_batch_size = 16

    def predict(self, batch: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return [matrix.T for matrix in batch]


class Away:
    """Registered by a worker that is then stopped, so that its requests wait without a limit."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch
