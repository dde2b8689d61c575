"""The waiting runs of one tenant, in the order of arrival, whatever the order in which they begin to wait."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from carpool.messages.requests import Run

OUTDATED_MIN: Final = 64
AnyItem = TypeVar("AnyItem", bound=tuple[Any, ...])


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

    def __iter__(self) -> Iterator[Run]:
        if not self._late:
            return iter(self._in_turn)
        return self._merged()

    def __len__(self) -> int:
        """The number of runs."""
        return len(self._in_turn) + len(self._late)

    def insert(self, run: Run) -> bool:
        """Add a run. Returns whether it is the first one now."""
        if run.arrival_us >= self._latest_us:
            self._latest_us = run.arrival_us
            is_first = not self._in_turn
            self._in_turn[run] = None
            return is_first and not self._late
        self._inserted_late += 1
        item = self._late[run] = run.arrival_us, self._inserted_late, run
        if len(self._heap) > 2 * len(self._late) + OUTDATED_MIN:
            self._heap = list(self._late.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, item)
        return self.first() is run

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
        late = (item for item in ascending(self._heap) if self._is_current(item))
        item = next(late, None)
        for run in self._in_turn:
            while item is not None and item[0] < run.arrival_us:
                yield item[2]
                item = next(late, None)
            yield run
        while item is not None:
            yield item[2]
            item = next(late, None)

    def _is_current(self, item: tuple[int, int, Run]) -> bool:
        return self._late.get(item[2]) is item


def ascending(heap: Sequence[AnyItem]) -> Iterator[AnyItem]:
    """The items of a heap, which must not change meanwhile, from the smallest on: O(log k) for the k-th."""
    nearest = [(heap[0], 0)] if heap else []
    while nearest:
        item, at = heapq.heappop(nearest)
        yield item
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(nearest, (heap[child], child))
