"""Runs that must not be dispatched yet, the time at which each of them may be, and how many may wait for it.

A delayed request takes a place in the queue for as long as its producer says, up to a day, and no worker can
shorten that. So of each limit of the queue delayed requests take only a share (`max_delayed_share`): there is
always space for others.

Why: docs/decisions/0071.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

from carpool.messages.requests import PRIORITY_LEVELS, Run
from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.waiting.batch_space import bytes_of


class DelayedRuns:
    """The waiting runs whose arrival, which a producer put off (`not_before`), is to come.

    O(log n) to add and to release one. One that is removed stays in the heap until its time, or until most
    of the heap is such. `requests`: how many these runs have; `bytes`: those of these.
    """

    def __init__(self, applied: AppliedSettings) -> None:
        self._applied = applied
        self.requests = 0
        self.bytes = 0
        self._by_priority = [0] * PRIORITY_LEVELS
        self._number = 0  # of these runs
        self._heap: list[tuple[int, int, Run]] = []
        self._numbers = count()

    def __iter__(self) -> Iterator[Run]:
        return (run for _, _, run in self._heap if run.waits_in is self)

    def add(self, run: Run) -> None:
        """Hold this run until `run.arrival_us`."""
        run.waits_in = self
        self._number += 1
        self._count(run, 1)
        heapq.heappush(self._heap, (run.arrival_us, next(self._numbers), run))

    def remove(self, run: Run) -> None:
        """Hold this run no longer. It must be held."""
        self._release(run)
        if len(self._heap) > 2 * self._number + 64:
            self._heap = [item for item in self._heap if item[2].waits_in is self]
            heapq.heapify(self._heap)

    def take(self, run: Run, indexes: Sequence[int]) -> Run:
        """Remove the requests of a run at these indexes, not all of them, and return them as a run."""
        taken = run.take(indexes)
        self._count(taken, -1)
        return taken

    def due(self, now_us: int) -> list[Run]:
        """Remove and return the runs whose time has come."""
        released: list[Run] = []
        while self._heap and self._heap[0][0] <= now_us:
            run = heapq.heappop(self._heap)[2]
            if run.waits_in is self:
                self._release(run)
                released.append(run)
        return released

    def wake_at_us(self) -> int | None:
        """When the next run is due; None if none is held. It may have been removed meanwhile."""
        return self._heap[0][0] if self._number else None

    def _release(self, run: Run) -> None:
        run.waits_in = None
        self._number -= 1
        self._count(run, -1)

    def _count(self, run: Run, sign: int) -> None:
        self.requests += sign * len(run)
        self.bytes += sign * bytes_of(run)
        self._by_priority[run.priority] += sign * len(run)

    # --- their share of the limits -------------------------------------------------------------------------

    def have_space(self, run: Run, size_bytes: int) -> bool:
        """Whether a run that has this many bytes may be held, too."""
        number, space_bytes = self.space(run.priority)
        return len(run) <= number and size_bytes <= space_bytes

    def space(self, priority: int) -> tuple[int, int]:
        """How many more requests of this priority may be held, and of how many bytes."""
        applied = self._applied
        number = applied.delayed_size - self.requests
        if priority in applied.delayed_size_of_priority:
            number = min(number, applied.delayed_size_of_priority[priority] - self._by_priority[priority])
        return number, applied.delayed_bytes - self.bytes

    def full(self) -> str:
        """Why no more may be held, for a producer."""
        return (
            f"not_before: delayed requests have their share of the queue (max_delayed_share "
            f"{self._applied.delayed_share:g}): {self.requests} of {self.bytes} bytes wait; try again later, "
            "or without a delay"
        )
