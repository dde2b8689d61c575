"""What the core keeps of a batch from its dispatch until it settles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from carpool.messages.requests import Producer, Run


class InFlightBatch(NamedTuple):
    """A batch in flight. `expiring`: its runs with a deadline, by the position of their first request;
    `arrivals`: when the requests arrived, as (us, number of requests). `runs`: of all but plain models, and
    of those whose requests can be cancelled.
    `cost`: only where each request takes a slot (`Capacity.set_slots`). `process`: of a bound model, the one
    that executes it. `doubtful`: how many requests the model is not expected to execute. `producers`: those
    of whom `learned.doubtful_producers` remembers something. `version`, `is_asked`, `reason`: as of its
    Dispatch."""

    dispatched_us: int
    size: int
    lane: str
    expiring: dict[int, Run]
    arrivals: Sequence[tuple[int, int]] = ()
    runs: Sequence[Run] = ()
    cost: int = 0
    process: str = ""
    doubtful: int = 0
    producers: Sequence[Producer] = ()
    version: str = ""
    is_asked: bool = False
    reason: str = ""

    @property
    def executable(self) -> int:
        """The number of requests that the model is expected to execute."""
        return self.size - self.doubtful
