"""The articles' model: it sleeps 1 ms x log(n + 1) for a batch of n, and squares."""

from __future__ import annotations

import math
import time

from carpool.errors import InvalidArgumentError


class Square:
    """Numbers in, their squares out. A batch of 100 takes seven times as long as one, not a hundred."""

    max_batch_size = 200

    def validate(self, body: object) -> None:
        """A body must be a number."""
        if isinstance(body, bool) or not isinstance(body, int | float):
            raise InvalidArgumentError("body: must be a number")

    def predict(self, batch: list[float]) -> list[float]:
        """The squares, in order."""
        time.sleep(0.001 * math.log(len(batch) + 1))
        return [number * number for number in batch]
