"""What a turn refuses is divided into parts of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import carpool_batcher.refusals as refusals_module
from carpool.errors import RESOURCE_EXHAUSTED
from carpool.messages.requests import Entry, Run, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.rows import StoredBody
from carpool_batcher.core.decisions import refusal
from carpool_batcher.refusals import PART_BYTES, PART_KEYS, Part, divide, without_earlier_breaks


def refused(entry_id: int, count: int = 1, sequence: str = "", waiting_bytes: int = 0) -> Refusal:
    """The refusal of a run of an entry, in which another run of `waiting_bytes` still waits."""
    entry = Entry(f"{entry_id}-0", 0)
    part = _part(sequence, entry_id) if sequence else None
    run = Run(entry, [f"r{entry_id}.{at}" for at in range(count)], [b""] * count, sequence=part)
    entry.runs = [run, Run(entry, ["w"], [b"x" * waiting_bytes])] if waiting_bytes else [run]
    return refusal(run, RESOURCE_EXHAUSTED, "queue_size", "full")


def _part(sequence: str, place: int) -> SequencePart:
    return SequencePart(sequence, False, False, None, SequencePart.place_of(f"{place}-0", 0))


def broken(sequence: str, place: int) -> SequenceChange:
    return SequenceChange(_part(sequence, place), f"r{place}.0", "broken", f"at {place}")


def parts_of(
    refusals: Sequence[Refusal],
    emptied: Sequence[Entry],
    changes: Sequence[SequenceChange],
    freed: Sequence[SlotFreed],
) -> list[Part]:
    return [part for part in divide(refusals, emptied, changes, freed) if part is not None]


def entries(parts: Sequence[Part]) -> list[list[str]]:
    return [[one.entry.id for one in part.refusals] for part in parts]


def test_a_small_turn_is_one_part_in_its_own_order() -> None:
    refusals, emptied = [refused(2), refused(1)], [Entry("3-0", 0)]
    change, freed = broken("s", 1), SlotFreed("p", "s")
    assert parts_of(refusals, emptied, [change], [freed]) == [Part(refusals, emptied, [change], [freed])]


def test_entries_share_parts_of_bounded_keys() -> None:
    refusals = [refused(at, PART_KEYS // 2) for at in (3, 1, 2)]
    assert entries(parts_of(refusals, (), (), ())) == [["1-0", "2-0"], ["3-0"]]


def test_the_refusals_of_an_entry_are_in_one_part() -> None:
    entry = Entry("2-0", 0)
    of_one = [refused(2, PART_KEYS)._replace(entry=entry) for _ in range(3)]
    parts = parts_of([refused(1), *of_one], (), (), ())
    assert [len(part.refusals) for part in parts] == [1, 3]


def test_stored_bodies_are_keys() -> None:
    refusals = [refused(at, PART_KEYS // 2) for at in (1, 2)]
    for one in refusals:
        assert one.run is not None
        one.run.bodies = [StoredBody(name, 1) for name in one.correlation_ids]
    assert entries(parts_of(refusals, (), (), ())) == [["1-0"], ["2-0"]]


def test_entries_share_parts_of_bounded_bytes() -> None:
    refusals = [refused(at, waiting_bytes=PART_BYTES // 2) for at in (1, 2, 3)]
    assert entries(parts_of(refusals, (), (), ())) == [["1-0", "2-0"], ["3-0"]]


def test_entries_without_requests_come_last() -> None:
    emptied = [Entry(f"0-{at}", 0) for at in range(PART_KEYS + 1)]
    first, *others = parts_of([refused(1)], emptied, [broken("s", 1)], ())
    assert entries([first]) == [["1-0"]]
    assert [entry for part in others for entry in part.emptied] == emptied
    assert max(len(part.emptied) for part in others) == PART_KEYS


def test_what_breaks_a_sequence_goes_with_its_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals_module, "PART_KEYS", 2)
    refusals = [refused(at, sequence="s") for at in (1, 2, 3)]
    changes = [broken("s", 0), broken("s", 1), broken("s", 3), broken("other", 1)]
    parts = parts_of(refusals, (), changes, [SlotFreed("p", "s"), SlotFreed("p", "other")])
    assert [[change.content for change in part.changes] for part in parts] == [
        ["at 1"],
        [],
        ["at 3"],
        ["at 1"],
    ]
    assert [[slot.sequence_id for slot in part.freed] for part in parts] == [["s"], [], [], ["other"]]


def test_what_breaks_very_many_sequences_goes_before_their_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals_module, "PART_KEYS", 4)
    entry = Entry("2-0", 0)
    refusals = [refused(at, sequence=f"s{at}")._replace(entry=entry) for at in range(6)]
    changes = [broken(f"s{at}", at) for at in range(6)]
    parts = parts_of([*refusals, refused(7)], (), [*changes, broken("s", 9)], [SlotFreed("p", "s1")])
    assert [len(part.refusals) for part in parts] == [0, 0, 6, 1, 0]
    assert [[change.part.sequence_id for change in part.changes] for part in parts] == [
        ["s0", "s1", "s2"],
        ["s3", "s4", "s5"],
        [],
        [],
        ["s"],
    ]
    assert [slot.sequence_id for part in parts[:1] for slot in part.freed] == ["s1"]


def test_many_changes_alone_are_divided_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals_module, "PART_KEYS", 2)
    changes = [broken(name, place) for name in "abc" for place in (1, 2)]
    parts = parts_of((), (), changes, ())
    assert [[change.part.sequence_id for change in part.changes] for part in parts] == [["a", "b"], ["c"]]


def test_of_successive_breaks_the_last_one_counts() -> None:
    ended = SequenceChange(_part("s", 2), "", "ended")
    changes = [broken("s", 1), broken("t", 1), broken("s", 2), ended, broken("s", 3), broken("t", 4)]
    assert without_earlier_breaks(changes) == [broken("s", 2), ended, broken("s", 3), broken("t", 4)]
