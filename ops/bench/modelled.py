"""A model that sleeps as long as the one of `deadlines.points.MODELS` that CARPOOL_BENCH_MODEL names."""

from __future__ import annotations

import os
import time
from typing import Final

from deadlines.points import MODELS

MODEL: Final = MODELS[os.environ["CARPOOL_BENCH_MODEL"]]


class Modelled:
    """Sleeps l(b) for a batch of b. Rejects the body "refuse", and raises on a batch that has a "raise"."""

    max_batch_size = MODEL.max_batch_size

    def validate(self, body: object) -> None:
        """Raise for the body "refuse"."""
        if body == "refuse":
            raise ValueError("refused")

    def predict(self, batch: list[object]) -> list[object]:
        """Return the batch unchanged."""
        if "raise" in batch:
            raise ValueError("raised")
        time.sleep(MODEL.l_us(len(batch)) / 1e6)
        return batch
