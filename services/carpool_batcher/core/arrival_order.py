"""The waiting runs of one tenant, in the order of arrival, whatever the order in which they begin to wait."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from carpool.messages import Run

OUTDATED_MIN: Final = 64


class ArrivalOrder:
    """Runs by arrival; of those that arrived together, the one that was inserted first comes first.

    O(1) for a run that arrived after all others, as most do. One that arrived before some of them was put
    back, is the head of a sequence, or has expired: O(log of the number of these).
    """

    __slots__ = ("_heap", "_in_turn", "_inserted_late", "_late", "_latest_us")

    def __init__(self) -> None:
        # Those that were inserted in order. An OrderedDict and not a deque: runs are removed anywhere.
        self._in_turn: OrderedDict[Run, None] = OrderedDict()
        self._latest_us = 0
        self._late: dict[Run, tuple[int, int, Run]] = {}  # the others, with their items in the heap
        self._heap: list[tuple[int, int, Run]] = []  # outdated items in it are skipped
        self._inserted_late = 0

    def __contains__(self, run: Run) -> bool:
        return run in self._in_turn or run in self._late

    def __iter__(self) -> Iterator[Run]:
        if not self._late:
            return iter(self._in_turn)
        return self._merged()

    def insert(self, run: Run) -> None:
        """Add a run."""
        if run.arrival_us >= self._latest_us:
            self._latest_us = run.arrival_us
            self._in_turn[run] = None
            return
        self._inserted_late += 1
        item = self._late[run] = run.arrival_us, self._inserted_late, run
        if len(self._heap) > 2 * len(self._late) + OUTDATED_MIN:
            self._heap = list(self._late.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, item)

    def first(self) -> Run:
        """The run that arrived first. There must be one."""
        if not self._late:
            return next(iter(self._in_turn))
        heap = self._heap
        while not self._is_current(heap[0]):
            heapq.heappop(heap)
        in_turn = next(iter(self._in_turn), None)
        return heap[0][2] if in_turn is None or heap[0][0] < in_turn.arrival_us else in_turn

    def remove(self, run: Run) -> bool:
        """Remove a run from any position. Returns whether any is left."""
        if run in self._in_turn:
            del self._in_turn[run]
        else:
            del self._late[run]
            if not self._late:
                self._heap.clear()
        return bool(self._in_turn or self._late)

    def _merged(self) -> Iterator[Run]:
        heap = self._heap.copy()
        for run in self._in_turn:
            while heap and heap[0][0] < run.arrival_us:
                yield from self._if_current(heapq.heappop(heap))
            yield run
        while heap:
            yield from self._if_current(heapq.heappop(heap))

    def _if_current(self, item: tuple[int, int, Run]) -> list[Run]:
        return [item[2]] if self._is_current(item) else []

    def _is_current(self, item: tuple[int, int, Run]) -> bool:
        return self._late.get(item[2]) is item
