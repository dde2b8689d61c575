"""The sequences that are known: which of them changed, which broke or ended, and what Redis is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from carpool.messages.requests import Run, SequencePart
from carpool.messages.sequences import SequenceChange
from carpool_batcher.core.sequences.followers import Followers
from carpool_batcher.core.sequences.sequence import (
    ENDED_BY_FORCE,
    OneSequence,
    Segment,
    did_not_succeed,
    ended_by_force,
)

MARKED_AT_ONCE: Final = 512  # sequences, in a piece
_LAST_PLACE: Final = "9"  # after each place, also where the locale of Redis orders other characters


class Break(NamedTuple):
    """A request of a sequence did not succeed, for this reason."""

    part: SequencePart
    correlation_id: str
    reason: str
    is_recorded: bool  # in Redis

    @classmethod
    def by(cls, part: SequencePart, correlation_id: str, *, is_recorded: bool = False) -> Break:
        """This request did not succeed, and no more is known."""
        return cls(part, correlation_id, did_not_succeed(correlation_id), is_recorded)


class KnownSequences:
    """The sequences of one model, `by_id`.

    `changed`: those at which the next decision looks. `started`, `ended` and `broken` are counters.
    """

    def __init__(self, followers: Followers) -> None:
        self.by_id: dict[str, OneSequence] = {}
        self.changed: dict[OneSequence, None] = {}
        self.started = self.ended = self.broken = 0
        self._followers = followers
        self._changes: list[SequenceChange] = []
        self._marks: dict[OneSequence, list[SequenceChange]] = {}  # breaks that Redis does not know of

    def get_or_add(self, sequence_id: str) -> OneSequence:
        """The sequence with this ID; a new one if there is none."""
        sequence = self.by_id.get(sequence_id)
        if sequence is None:
            sequence = self.by_id[sequence_id] = OneSequence(sequence_id)
        return sequence

    def settle(self, sequence: OneSequence) -> None:
        """The request in flight was answered. If it was OK, the sequence goes on, or has ended."""
        part = sequence.settle()
        self.changed[sequence] = None
        if part is not None:
            self.started += part.starts
            self.ended += part.ends

    def break_segment(self, sequence: OneSequence, segment: Segment, event: Break) -> None:
        """What stands after this request in its segment is not served. A request that came before its start,
        in the wrong order, is only missing: that start, and what follows it, stand after the break."""
        self.changed[sequence] = None
        place = event.part.place
        if place < sequence.start_place(segment):
            return
        self.broken += not segment.broken
        segment.broken = event.reason
        self._followers.abort_after(segment, place)
        sequence.broken_at = max(sequence.broken_at, place)
        sequence.is_recorded = True
        if not event.is_recorded:
            mark = SequenceChange(event.part, event.correlation_id, "broken", event.reason)
            self._marks.setdefault(sequence, []).append(mark)

    def end_by_force(self, sequence: OneSequence, place: str) -> Run | None:
        """A sequence is ended by an entry at this place. Returns its head, which the caller refuses."""
        for segment in sequence.segments:
            self._followers.doom(segment.all(), ended_by_force)
        head = sequence.end_by_force(place)
        part = SequencePart(sequence.sequence_id, False, True, None, place)
        self._marks.pop(sequence, None)
        self._changes.append(SequenceChange(part, "", "ended"))
        self._changes.append(SequenceChange(part, "", "broken", ENDED_BY_FORCE))
        self.ended += 1
        self.changed[sequence] = None
        return head

    def end_idle(self, sequence: OneSequence) -> None:
        """A sequence for which nothing waits ends, or is not remembered any more if it is broken."""
        self.ended += sequence.has_state
        del self.by_id[sequence.sequence_id]
        self._marks.pop(sequence, None)
        if sequence.is_recorded:
            part = SequencePart(sequence.sequence_id, False, True, None, _LAST_PLACE)
            self._changes.append(SequenceChange(part, "", "ended"))

    # --- what is decided -----------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether sequences changed since the last decision, or Redis is to be told something."""
        return bool(self.changed or self._changes)

    def mark_breaks(self) -> Iterator[None]:
        """Redis is to be told of the breaks that it does not know: all that are known are, in order. In
        pieces."""
        for number, marks in enumerate(self._marks.values(), 1):
            self._changes.extend(sorted(marks, key=lambda mark: mark.part.place))
            if not number % MARKED_AT_ONCE:
                yield
        self._marks.clear()

    def pop_changes(self) -> list[SequenceChange]:
        """What Redis is to be told since the last call."""
        changes, self._changes = self._changes, []
        return changes
