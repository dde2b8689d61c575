"""Runs that must not be dispatched yet, and the time at which each of them may be."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

from carpool.messages import Run


class DelayedRuns:
    """The waiting runs whose arrival, which a producer put off (`not_before`), is to come.

    O(log n) to add and to release one. One that is removed stays in the heap until its time, or until most
    of the heap is such. `requests`: how many these runs have.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._runs: set[Run] = set()
        self._heap: list[tuple[int, int, Run]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def add(self, run: Run) -> None:
        """Hold this run until `run.arrival_us`."""
        self._runs.add(run)
        self.requests += len(run)
        heapq.heappush(self._heap, (run.arrival_us, next(self._numbers), run))

    def remove(self, run: Run) -> None:
        """Hold this run no longer. It must be held."""
        self._runs.remove(run)
        self.requests -= len(run)
        if len(self._heap) > 2 * len(self._runs) + 64:
            self._heap = [item for item in self._heap if item[2] in self._runs]
            heapq.heapify(self._heap)

    def take(self, run: Run, indexes: Sequence[int]) -> Run:
        """Remove the requests of a run at these indexes, not all of them, and return them as a run."""
        taken = run.take(indexes)
        self.requests -= len(taken)
        return taken

    def due(self, now_us: int) -> list[Run]:
        """Remove and return the runs whose time has come."""
        released: list[Run] = []
        while self._heap and self._heap[0][0] <= now_us:
            run = heapq.heappop(self._heap)[2]
            if run in self._runs:
                self._runs.remove(run)
                self.requests -= len(run)
                released.append(run)
        return released

    def wake_at_us(self) -> int | None:
        """When the next run is due; None if none is held. It may have been removed meanwhile."""
        return self._heap[0][0] if self._runs else None
