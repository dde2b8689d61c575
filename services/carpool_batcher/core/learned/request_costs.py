"""What requests cost, as their model tells it, and how many of them usually cost what a batch may.

A batcher knows what producers say of a request, and a model tells what its body costs only when it executes
it. So the mean cost is learned of batches that settled, and batches get as many requests as usually cost
`max_batch_cost`. One that costs more nevertheless is executed in parts.

Lanes may be made by cost, of short and of long texts for example. The lane whose requests cost least decides:
a number that is too high for another lane only divides more of its batches.

Why: docs/decisions/0096.
"""

from __future__ import annotations

from typing import Final

LANES_MAX: Final = 64  # of which the mean is kept: those observed last
WEIGHT: Final = 1 / 8  # of the latest batch


class RequestCosts:
    """The mean cost of a request in each lane. It is false while nothing is known."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}  # by lane, that observed last at the end

    def __bool__(self) -> bool:
        return bool(self._means)

    def observe(self, lane: str, requests: int, cost: int) -> None:
        """A number of requests of a lane, at least one, were executed together: what they cost. O(1)."""
        mean = cost / requests
        before = self._means.pop(lane, mean)
        self._means[lane] = before + WEIGHT * (mean - before)
        if len(self._means) > LANES_MAX:
            del self._means[next(iter(self._means))]

    def usual_size(self, cost_max: int | None) -> int | None:
        """How many requests usually cost `cost_max`, at least 1; None if that is not limited, or not known.
        O(LANES_MAX)."""
        lowest = min(self._means.values(), default=0.0)
        if cost_max is None or lowest <= 0:
            return None
        return max(1, int(cost_max / lowest))
