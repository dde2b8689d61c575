"""EntryTable: the batcher's table of entries follows what a script did in Redis."""

from __future__ import annotations

from carpool.messages import Entry, Request
from carpool.store.batcher import EntryChanges, PutBack
from carpool_batcher.entries import EntryTable


def table_of(**sizes: int) -> EntryTable:
    table = EntryTable()
    for entry_id, size in sizes.items():
        entry = table[entry_id] = Entry(entry_id, 0)
        entry.requests = [Request(entry, f"{entry_id}.{position}", b"") for position in range(size)]
    return table


def test_removed_entry_leaves_the_table_without_requests() -> None:
    table = table_of(a=2, b=1)
    removed, kept = table.values()
    assert table.update_from(EntryChanges([removed], [], [])) == []
    assert (removed.requests, list(table.values()), len(kept.requests)) == ([], [kept], 1)


def test_entry_that_was_put_back_is_known_by_its_new_id() -> None:
    table = table_of(a=3, b=1)
    entry = table["a"]
    waiting = entry.requests[1:]
    assert table.update_from(EntryChanges([], [PutBack(entry, "c", waiting)], [])) == []
    assert (entry.id, entry.requests) == ("c", waiting)
    assert set(table) == {"b", "c"}
    assert all(request.entry is table["c"] for request in waiting)


def test_requests_of_a_missing_entry_are_returned() -> None:
    table = table_of(a=2, b=1)
    missing = table["a"]
    requests = missing.requests
    assert table.update_from(EntryChanges([], [], [missing])) == requests
    assert missing.requests == []
    assert list(table) == ["b"]


def test_entry_that_is_not_in_the_table_any_more_is_no_error() -> None:
    table = table_of(a=1)
    entry = table.pop("a")
    assert table.update_from(EntryChanges([entry], [], [])) == []
    assert not table
