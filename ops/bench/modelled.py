"""A model that takes as long as the one of `deadlines.points.MODELS` that CARPOOL_BENCH_MODEL names.

It sleeps, and so takes no CPU time but for its end: a sleep lasts about 0.1 ms too long, by which batches of
2 ms would take longer than virtual time and the bounds assume. So it is ended early, and the rest is waited
for.
"""

from __future__ import annotations

import os
import time
from typing import Final

from deadlines.points import MODELS

AWAKE_S: Final = 150e-6  # before its end
MODEL: Final = MODELS[os.environ["CARPOOL_BENCH_MODEL"]]


class Modelled:
    """Takes l(b) for a batch of b. Rejects the body "refuse", and raises on a batch that has a "raise"."""

    max_batch_size = MODEL.max_batch_size

    def validate(self, body: object) -> None:
        """Raise for the body "refuse"."""
        if body == "refuse":
            raise ValueError("refused")

    def predict(self, batch: list[object]) -> list[object]:
        """Return the batch unchanged."""
        if "raise" in batch:
            raise ValueError("raised")
        ends_s = time.perf_counter() + MODEL.l_us(len(batch)) / 1e6
        time.sleep(max(0.0, ends_s - AWAKE_S - time.perf_counter()))
        while time.perf_counter() < ends_s:
            pass
        return batch
