"""EntryTable: the batcher's table of entries follows what a script did in Redis."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from carpool.keys import Keys
from carpool.messages.requests import Entry, Run
from carpool.rows import Body
from carpool.store.batcher import EntryChanges, PutBack
from carpool_batcher.entries import UNREAD_US, EntryTable, IdsSetBackError, LowestUnread


def table_of(**sizes: int) -> EntryTable:
    """A table of entries with this many runs, each of one request."""
    table = EntryTable()
    for entry_id, size in sizes.items():
        entry = table[entry_id] = Entry(entry_id, 7)
        bodies: list[Body] = [b""]
        entry.runs = [Run(entry, [f"{entry_id}.{position}"], bodies) for position in range(size)]
    return table


def offered(table: EntryTable, *entry_ids: str) -> list[str]:
    """Those of these entries, which are read in this order, that are offered to the scheduler."""
    return [entry_id for entry_id in entry_ids if not table.was_put_back(entry_id.encode())]


def put_back(table: EntryTable, entry: Entry, *new_ids: str) -> None:
    """Replace an entry by as many as there are IDs, each with the next run of the entry."""
    parts = [(new_id, [run]) for new_id, run in zip(new_ids, entry.runs, strict=True)]
    table.update_from(EntryChanges([], [PutBack(entry, parts)], []))


def test_removed_entry_leaves_the_table_without_runs() -> None:
    table = table_of(a=2, b=1)
    removed, kept = table.values()
    assert table.update_from(EntryChanges([removed], [], [])) == []
    assert (removed.runs, list(table.values()), len(kept.runs)) == ([], [kept], 1)


def test_entry_that_was_put_back_is_known_by_its_new_id() -> None:
    table = table_of(a=3, b=1)
    entry = table["a"]
    waiting = entry.runs[1:]
    assert table.update_from(EntryChanges([], [PutBack(entry, [("9-0", waiting)])], [])) == []
    assert (entry.id, entry.runs) == ("9-0", waiting)
    assert set(table) == {"b", "9-0"}
    assert all(run.entry is table["9-0"] for run in waiting)


def test_entry_that_was_put_back_in_several_is_divided() -> None:
    """Expect each run to know its entry, and the bodies of the one that was dispatched to be released."""
    table = table_of(a=4)
    entry = table["a"]
    first, second, third, fourth = entry.runs
    parts = [("9-0", [second]), ("9-1", [third]), ("9-2", [fourth])]
    assert table.update_from(EntryChanges([], [PutBack(entry, parts)], [])) == []
    assert [run.bodies for run in (first, second, third, fourth)] == [[], [b""], [b""], [b""]]
    assert {name: one.runs for name, one in table.items()} == dict(parts)
    assert [run.entry.id for run in (second, third, fourth)] == ["9-0", "9-1", "9-2"]
    assert {one.arrival_us for one in table.values()} == {7}
    assert table["9-0"] is entry


def test_runs_of_a_missing_entry_are_returned() -> None:
    table = table_of(a=2, b=1)
    missing = table["a"]
    runs = missing.runs
    assert table.update_from(EntryChanges([], [], [missing])) == runs
    assert missing.runs == []
    assert list(table) == ["b"]


def test_entry_that_is_not_in_the_table_any_more_is_no_error() -> None:
    table = table_of(a=1)
    entry = table.pop("a")
    assert table.update_from(EntryChanges([entry], [], [])) == []
    assert not table


def test_what_was_put_back_is_not_offered_again() -> None:
    """Given entries that were put back, expect them to be left out when they are read, in whatever reads."""
    table = table_of(a=3)
    put_back(table, table["a"], "5-0", "9-0", "10-0")
    assert offered(table, "3-0", "5-0", "7-0", "9-0", "10-0", "11-0") == ["3-0", "7-0", "11-0"]


def test_what_was_put_back_and_removed_since_is_not_offered_either() -> None:
    """Given a read that was under way when the rest of the entry was dispatched, expect it to be left out."""
    table = table_of(a=1)
    put_back(table, table["a"], "5-0")
    table.update_from(EntryChanges([table["5-0"]], [], []))
    assert not table
    assert offered(table, "5-0", "6-0") == ["6-0"]


def test_ids_are_remembered_until_they_were_read() -> None:
    """An entry that was put back and removed may never be read. Expect no growing list of IDs."""
    table = table_of(a=2)
    put_back(table, table["a"], "5-0", "9-0")
    assert offered(table, "9-0") == []
    assert not table._put_back_ids


# --- IDs that were set back --------------------------------------------------------------------------------


def store_of(last_id: bytes | None) -> Any:
    """The store of a model whose last waiting entry has this ID."""
    store = Mock()
    store.keys, store.last_waiting_id.return_value = Keys("m"), last_id
    return cast(Any, store)


def test_entries_below_the_last_one_that_was_read_are_noticed() -> None:
    store, unread = store_of(b"7-1"), LowestUnread()
    unread.verify(store, 3, 2, b"8-0", 0)
    unread.verify(store, 3, 2, b"8-0", UNREAD_US - 1)
    assert not store.last_waiting_id.called
    with pytest.raises(IdsSetBackError, match=r"carpool:\{m\}:requests were set back from 8-0 to 7-1"):
        unread.verify(store, 3, 2, b"8-0", UNREAD_US)


def test_nothing_is_looked_up_while_entries_are_read_or_none_waits() -> None:
    store, unread = store_of(b"7-1"), LowestUnread()
    for number in range(20):
        unread.verify(store, 3, 2, b"8-%d" % number, number * UNREAD_US)
    for number in range(20, 40):
        unread.verify(store, 2, 2, b"8-20", number * UNREAD_US)
        unread.verify(store, 0, 2, b"8-20", number * UNREAD_US)
    assert not store.last_waiting_id.called


def test_entries_that_can_be_read_are_looked_up_seldom() -> None:
    """The batcher may be slow, or they were removed in between."""
    for last_id in (b"8-1", b"10-0", None):
        store, unread = store_of(last_id), LowestUnread()
        for tenth in range(41):
            unread.verify(store, 3, 2, b"8-0", tenth * UNREAD_US // 10)
        assert store.last_waiting_id.call_count == 4
