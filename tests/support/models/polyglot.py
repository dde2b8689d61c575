"""Models that a producer in any language is tried on."""

from __future__ import annotations

from typing import Any

import numpy as np


class Transpose:
    """A matrix in, its transpose out: neither shape nor data come back as they were sent."""

    max_batch_size = 16

    def predict(self, batch: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return [matrix.T for matrix in batch]


class Away:
    """To be registered by a worker that is stopped then: what is sent to it waits for as long as need be."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch
