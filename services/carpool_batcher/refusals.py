"""What a turn refuses: when it is answered, and by how many scripts.

A turn's refusals are divided into parts, each of which is written by one script. Redis serves nobody else
while a script runs. Its Lua keeps strings in chains by their hash, and producers choose correlation IDs: if
all have one hash, the time that a script takes grows with the square of its keys. So a part is bounded, and
these rules make it safe to die between two of them:

1. All refusals of an entry are in one part, because a script removes or replaces the whole entry. It has at
   most MAX_REQUESTS_PER_ENTRY requests.
2. Entries come in the order of the places of their requests. With the requests of a sequence goes what breaks
   it up to the last of them. So Redis is always in a state in which a turn could have left it that knew of no
   later request: the next batcher finds the same as after such a turn.
3. What an entry breaks that is larger than a part is written before it. A batcher that reads such an entry
   again finds these sequences broken, and refuses what continues them. A start it may serve: nothing that
   stands after it was refused.
4. Entries without requests come last: until its entry is removed, a withdrawal is carried out again.

Why: docs/decisions/0066.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from carpool.messages.requests import Entry, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.rows import stored_names
from carpool_batcher.core.waiting.batch_space import bytes_of

POSTPONED_US: Final = 2000  # a producer learns of it still before the deadline, or soon after
POSTPONED_MAX: Final = 64  # then they are answered at once


class EarlyRefusals:
    """Refusals of requests that can no longer be in time, until they are answered together. `due_us`: when
    that is; None if there are none.

    To answer one costs as much as to dispatch a batch. A system that is nearly overloaded refuses many
    requests early, each at another moment. Answered one by one they would take the CPU time of those that
    could be in time, which would then be late, and be refused too (docs/decisions/0062).
    """

    def __init__(self) -> None:
        self.due_us: int | None = None
        self._postponed: list[Refusal] = []

    def postpone(self, refusals: Iterable[Refusal], now_us: int) -> list[Refusal]:
        """Postpone the early ones of these refusals. Returns those to answer now."""
        answered: list[Refusal] = []
        for refusal in refusals:
            # With a request of a sequence more is recorded than its answer, and at the same moment.
            run = refusal.run
            is_postponed = refusal.reason == "early" and run is not None and run.sequence is None
            (self._postponed if is_postponed else answered).append(refusal)
        if not self._postponed:
            return answered
        if self.due_us is None:
            self.due_us = now_us + POSTPONED_US
        if now_us < self.due_us and len(self._postponed) < POSTPONED_MAX:
            return answered
        postponed, self._postponed, self.due_us = self._postponed, [], None
        # Meanwhile the rest of an entry may have been put back in others.
        return answered + [refusal.where_it_is() for refusal in postponed]


PART_KEYS: Final = 500  # of a part that has more than one entry, about
PIECE_REFUSALS: Final = 1024  # or changes, looked at in a piece
PART_BYTES: Final = 8 * 1024 * 1024  # that it puts back, likewise


class Part(NamedTuple):
    """What one script writes: see `BatcherStore.refuse`."""

    refusals: Sequence[Refusal]
    emptied: Sequence[Entry] = ()
    changes: Sequence[SequenceChange] = ()
    freed: Sequence[SlotFreed] = ()


class _EntryRefusals(NamedTuple):
    """The refusals of one entry."""

    refusals: list[Refusal]
    keys: int
    put_back_bytes: int

    def place(self) -> str:
        """Where the first of these requests stood when it arrived."""
        entry = self.refusals[0].entry
        places = [part.place for refusal in self.refusals if (part := sequence_of(refusal)) is not None]
        return min(places, default=SequencePart.place_of(entry.id, 0))


class _SequenceChanges(NamedTuple):
    """What changes in one sequence, in the order of the places; and what its process is told."""

    changes: list[SequenceChange]
    freed: list[SlotFreed]


def divide(
    refusals: Sequence[Refusal],
    emptied: Sequence[Entry],
    changes: Sequence[SequenceChange],
    freed: Sequence[SlotFreed],
) -> Iterator[Part | None]:
    """The parts, in the order in which they are to be written. One, if all of it is small. In pieces: None is
    the end of one in which no part was completed."""
    by_entry = yield from _by_entry(refusals)
    keys = sum([one.keys for one in by_entry]) + len(emptied) + len(changes) + len(freed)
    put_back_bytes = sum([one.put_back_bytes for one in by_entry])
    if keys <= PART_KEYS and put_back_bytes <= PART_BYTES:
        yield Part(refusals, emptied, without_earlier_breaks(changes), freed)
        return
    by_sequence = yield from _by_sequence(changes, freed)
    by_entry.sort(key=_EntryRefusals.place)
    for together in _packed(by_entry):
        part = yield from _part_of(together, by_sequence)
        if sum([one.keys for one in together]) > PART_KEYS:
            yield from _change_parts((yield from _by_sequence(part.changes, part.freed)).values())
            part = Part(part.refusals)
        yield part
    yield from _change_parts(by_sequence.values())
    for start in range(0, len(emptied), PART_KEYS):
        yield Part((), emptied[start : start + PART_KEYS])


def sequence_of(refusal: Refusal) -> SequencePart | None:
    """What makes the refused request a part of a sequence; None if it is none."""
    return refusal.breaks if refusal.run is None else refusal.run.sequence


def without_earlier_breaks(changes: Sequence[SequenceChange]) -> list[SequenceChange]:
    """These changes without those that break a sequence which the next change of it breaks later."""
    kept: dict[int, SequenceChange] = {}
    latest: dict[str, int] = {}  # by sequence, the index of its change before
    for at, change in enumerate(changes):
        sequence_id = change.part.sequence_id
        before = latest.get(sequence_id)
        if before is not None and change.outcome == kept[before].outcome == "broken":
            del kept[before]
        kept[at] = change
        latest[sequence_id] = at
    return list(kept.values())


def _by_entry(refusals: Iterable[Refusal]) -> Generator[None, None, list[_EntryRefusals]]:
    by_entry: dict[Entry, list[Refusal]] = {}
    for number, refusal in enumerate(refusals, 1):
        by_entry.setdefault(refusal.entry, []).append(refusal)
        if not number % PIECE_REFUSALS:
            yield
    entries: list[_EntryRefusals] = []
    refusals_now = 0
    for entry, refused in by_entry.items():
        entries.append(_EntryRefusals(refused, sum(map(_keys_of, refused)), _put_back_bytes(entry, refused)))
        refusals_now += len(refused)
        if refusals_now >= PIECE_REFUSALS:
            refusals_now = 0
            yield
    return entries


def _keys_of(refusal: Refusal) -> int:
    """How many keys a script needs for a refusal, at most."""
    run = refusal.run
    bodies = len(refusal.body_names if run is None else stored_names(run.bodies))
    return len(refusal.correlation_ids) + bodies + (sequence_of(refusal) is not None)


def _put_back_bytes(entry: Entry, refusals: Sequence[Refusal]) -> int:
    """The bytes of the requests of an entry that are not refused."""
    refused = {refusal.run for refusal in refusals}
    return sum([bytes_of(run) for run in entry.runs if run not in refused])


def _packed(by_entry: Iterable[_EntryRefusals]) -> Iterator[list[_EntryRefusals]]:
    """Successive entries for each part. One that is larger than a part is alone in it."""
    together: list[_EntryRefusals] = []
    keys = put_back_bytes = 0
    for one in by_entry:
        keys += one.keys
        put_back_bytes += one.put_back_bytes
        if together and (keys > PART_KEYS or put_back_bytes > PART_BYTES):
            yield together
            together, keys, put_back_bytes = [], one.keys, one.put_back_bytes
        together.append(one)
    if together:
        yield together


def _by_sequence(
    changes: Iterable[SequenceChange], freed: Iterable[SlotFreed]
) -> Generator[None, None, dict[str, _SequenceChanges]]:
    by_sequence: dict[str, _SequenceChanges] = {}
    for number, change in enumerate(changes, 1):
        by_sequence.setdefault(change.part.sequence_id, _SequenceChanges([], [])).changes.append(change)
        if not number % PIECE_REFUSALS:
            yield
    for slot in freed:
        by_sequence.setdefault(slot.sequence_id, _SequenceChanges([], [])).freed.append(slot)
    return by_sequence


def _part_of(
    together: Sequence[_EntryRefusals], by_sequence: dict[str, _SequenceChanges]
) -> Generator[None, None, Part]:
    """These entries, with what is changed in their sequences up to their requests. That is taken out of
    `by_sequence`."""
    refusals = [refusal for one in together for refusal in one.refusals]
    last_places: dict[str, str] = {}
    for number, part in enumerate(map(sequence_of, refusals), 1):
        if part is not None:
            last_places[part.sequence_id] = max(part.place, last_places.get(part.sequence_id, ""))
        if not number % PIECE_REFUSALS:
            yield
    changes: list[SequenceChange] = []
    freed: list[SlotFreed] = []
    for number, (sequence_id, last_place) in enumerate(last_places.items(), 1):
        if not number % PIECE_REFUSALS:
            yield
        changed = by_sequence.get(sequence_id)
        if changed is None:
            continue
        now = [change for change in changed.changes if change.part.place <= last_place]
        later = [change for change in changed.changes if change.part.place > last_place]
        if now:
            changes += now
            freed += changed.freed
            by_sequence[sequence_id] = _SequenceChanges(later, [])
    return Part(refusals, (), without_earlier_breaks(changes), freed)


def _change_parts(by_sequence: Iterable[_SequenceChanges]) -> Iterator[Part]:
    """What is changed in these sequences, without refusals. All of a sequence is in one part."""
    changes: list[SequenceChange] = []
    freed: list[SlotFreed] = []
    for changed in by_sequence:
        changes += without_earlier_breaks(changed.changes)
        freed += changed.freed
        if len(changes) + len(freed) >= PART_KEYS:
            yield Part((), (), changes, freed)
            changes, freed = [], []
    if changes or freed:
        yield Part((), (), changes, freed)
