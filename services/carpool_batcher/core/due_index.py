"""An index of when waiting requests are due: the earliest time at which one of a lane should be answered."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from carpool.messages import Run

NEVER_US: Final = 1 << 62


class DueIndex:
    """The earliest due time of the runs in it. Those that no longer wait are skipped lazily.

    A request is due at its deadline; without one, `target_us` (`target_latency_ms`) after its arrival;
    without either, never. All requests of a run are due together. Most runs are due no earlier than those
    before them, and are dispatched in that order: they form a sorted row, O(1) each. The others go into a
    heap, O(log of their number).
    """

    __slots__ = ("_heap", "_sorted", "target_us")

    def __init__(self, target_us: int | None, runs: Iterable[Run]) -> None:
        self.target_us = target_us
        self._sorted: deque[tuple[int, Run]] = deque()
        self._heap: list[tuple[int, int, Run]] = []
        for run in runs:
            self.insert(run)

    def __len__(self) -> int:
        return len(self._sorted) + len(self._heap)

    def insert(self, run: Run) -> None:
        """Add a waiting run. One that is never due is not kept."""
        if run.deadline_us is not None:
            due_us = run.deadline_us
        elif self.target_us is not None:
            due_us = run.arrival_us + self.target_us
        else:
            return
        if not self._sorted or due_us >= self._sorted[-1][0]:
            self._sorted.append((due_us, run))
        else:
            heapq.heappush(self._heap, (due_us, id(run), run))

    def earliest_us(self, is_waiting: Callable[[Run], bool]) -> int:
        """The earliest due time of the runs that still wait; NEVER_US if there is none."""
        in_row, heap = self._sorted, self._heap
        while in_row and not is_waiting(in_row[0][1]):
            in_row.popleft()
        while heap and not is_waiting(heap[0][2]):
            heapq.heappop(heap)
        return min(in_row[0][0] if in_row else NEVER_US, heap[0][0] if heap else NEVER_US)
