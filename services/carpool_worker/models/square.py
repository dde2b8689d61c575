"""The demo model `square`: a batch of n takes 1 ms x log(n + 1): the larger, the cheaper per request."""

from __future__ import annotations

import math
import time

from carpool.errors import InvalidArgumentError


class Square:
    """Squares numbers. A batch of 100 takes seven times as long as a batch of one, not a hundred times."""

    max_batch_size = 200

    def validate(self, body: object) -> None:
        """Reject a body that is not a number."""
        if not isinstance(body, int | float) or isinstance(body, bool):
            raise InvalidArgumentError("body: must be a number")

    def predict(self, batch: list[float]) -> list[float]:
        """The squares, in order."""
        time.sleep(0.001 * math.log(len(batch) + 1))
        return [number * number for number in batch]
