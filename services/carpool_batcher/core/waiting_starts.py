"""The starts of sequences that wait for space (`core.space`), in the order of the request stream."""

from __future__ import annotations

import heapq
from typing import Final

from carpool_batcher.core.sequence import Sequence, place_of

OUTDATED_MIN: Final = 100  # starts that wait no more, and are still in the order


class WaitingStarts:
    """The sequences whose starts wait. `Sequence.waits_for_space` is set here only."""

    def __init__(self) -> None:
        self._heap: list[tuple[str, str]] = []  # of (place of a start, sequence ID); some wait no more
        self._waiting: dict[str, Sequence] = {}  # by ID

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def is_first(self, place: str) -> bool:
        """Whether no other start stands before this place."""
        return not self._heap or place <= self._heap[0][0]

    def add(self, sequence: Sequence, place: str) -> None:
        """The start at this place waits, unless it does already."""
        if not sequence.waits_for_space:
            sequence.waits_for_space = True
            self._waiting[sequence.sequence_id] = sequence
            heapq.heappush(self._heap, (place, sequence.sequence_id))
            if len(self._heap) > 2 * len(self._waiting) + OUTDATED_MIN:
                self._heap = [item for item in self._heap if self._sequence_at(*item) is not None]
                heapq.heapify(self._heap)

    def discard(self, sequence: Sequence) -> None:
        """The start of a sequence does not wait for space any more, if it did."""
        if sequence.waits_for_space:
            sequence.waits_for_space = False
            del self._waiting[sequence.sequence_id]

    def pop(self) -> Sequence | None:
        """Take the first one out of the order, although its start still waits. None if it does not wait."""
        return self._sequence_at(*heapq.heappop(self._heap))

    def _sequence_at(self, place: str, sequence_id: str) -> Sequence | None:
        """The sequence whose start at this place waits; None if it does not any more."""
        sequence = self._waiting.get(sequence_id)
        start = None if sequence is None else sequence.current.start
        return sequence if start is not None and place_of(start) == place else None
