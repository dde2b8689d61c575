"""A model that sleeps as long as the one of `goodput.MODELS` that CARPOOL_BENCH_MODEL names."""

from __future__ import annotations

import os
import time
from typing import Final

from goodput import MODELS

MODEL: Final = MODELS[os.environ["CARPOOL_BENCH_MODEL"]]


class Modelled:
    """Sleeps l(b) for a batch of b."""

    max_batch_size = MODEL.max_batch_size

    def predict(self, batch: list[int]) -> list[int]:
        """Return the batch unchanged."""
        time.sleep(MODEL.l_us(len(batch)) / 1e6)
        return batch
