"""What happens while a batcher that takes over reads what waits, in the order in which it is replayed."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from carpool.messages.requests import Run, SequencePart
from carpool.messages.sequences import KeptSequence
from carpool_batcher.core.sequences.known import Break
from carpool_batcher.core.sequences.sequence import FAILED_BEFORE

SORTED_AT_ONCE: Final = 4096  # events, in a piece


class ForcedEnd(NamedTuple):
    """Sequences are ended by force, by an entry at this place."""

    sequence_ids: Collection[str]
    place: str


Event: TypeAlias = Run | Break | ForcedEnd


class Takeover:
    """Arrivals, breaks and ends, each at its place, until all that waited was read."""

    def __init__(self, kept: Iterable[KeptSequence]) -> None:
        self._events: list[tuple[str, int, Event]] = []  # the number is there so that no events are compared
        self._sorted: list[list[tuple[str, int, Event]]] = []
        self._kept = {one.sequence_id: one for one in kept}
        self._restarts: dict[str, str] = {}  # the places of starts in flight, by sequence
        for one in self._kept.values():
            if one.failed_at:
                self.record(one.failed_at, _known_break(one, one.failed_at, FAILED_BEFORE))
            if one.broken:
                self.record(one.broken_at, _known_break(one, one.broken_at, one.broken))

    def record(self, place: str, event: Event) -> None:
        """Something happened that takes effect when all was read."""
        self._events.append((place, len(self._events), event))

    def adopt(self, part: SequencePart) -> bool:
        """A request is in flight. Returns whether Redis has broken its sequence because of it."""
        if part.starts:
            self._restarts[part.sequence_id] = part.place
        kept = self._kept.get(part.sequence_id)
        return kept is not None and part.place in (kept.broken_at, kept.failed_at)

    def sort(self) -> Iterator[None]:
        """Sort what was recorded, in pieces. To be called once, at the end."""
        events, self._events = self._events, []
        for at in range(0, len(events), SORTED_AT_ONCE):
            self._sorted.append(sorted(events[at : at + SORTED_AT_ONCE]))
            yield

    def in_order(self) -> Iterator[Event]:
        """What was sorted, in the order of places, without breaks that a start in flight has mended."""
        for _, _, event in heapq.merge(*self._sorted):
            if type(event) is Break and event.part.place < self._restarts.get(event.part.sequence_id, ""):
                continue
            yield event


def _known_break(kept: KeptSequence, place: str, reason: str) -> Break:
    """A break of which Redis knows."""
    return Break(SequencePart(kept.sequence_id, False, False, None, place), "", reason, True)
