"""Entries of which only some requests are dispatched or refused: the others are put back, in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgpack
import pytest

from carpool.errors import CANCELLED
from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import JSON, Entry, Run
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool.store.batcher import PUT_BACK_ENTRIES_MAX, BatcherStore, EntryChanges
from carpool.store.connection import Link
from carpool.tickets import TicketRange
from carpool.wire.batches import decode_batch
from carpool.wire.requests import decode_entry
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import EntryTable
from carpool_batcher.ordering import issue_tickets
from carpool_cli.local.embedded import EmbeddedRedis
from support.scheduler_harness import settle
from support.wire import DEFAULTS, Single, flat_of, singles

TTL_MS: Final = 60_000


class Waiting:
    """A model's streams, as the batcher's store sees them."""

    def __init__(self, url: str) -> None:
        self.keys = Keys("m")
        self.link = Link(url, name="test")
        self.store = BatcherStore(self.link, self.keys)
        self.link.call("FLUSHALL")

    def add(self, fields: dict[str, Any], *, with_tickets: bool = False) -> Entry:
        """Add an entry and read it."""
        entry_id = self.link.call("XADD", self.keys.requests, "*", *flat_of(fields))
        (entry,) = self.read()
        assert entry.id == entry_id.decode()
        if with_tickets:
            assert issue_tickets(entry)
            self.store.admit([TicketRange(entry.id, 0, sum(map(len, entry.runs)))])
        return entry

    def read(self) -> list[Entry]:
        """What a batcher reads that starts at this moment."""
        return [
            decode_entry(entry_id, flat, DEFAULTS)[0]
            for entry_id, flat in self.link.call("XRANGE", self.keys.requests, "-", "+")
        ]

    def waiting(self) -> list[Single]:
        return [request for entry in self.read() for request in singles(entry.runs)]

    def batches(self) -> list[list[str]]:
        """The correlation IDs of each batch."""
        entries = self.link.call("XRANGE", self.keys.batches, "-", "+")
        batches = [decode_batch(entry_id, flat, 1) for entry_id, flat in entries]
        return [[request.correlation_id for request in batch.requests] for batch in batches]

    def tickets(self) -> dict[str, str]:
        """What is known of the tickets."""
        flat = [part.decode() for part in self.link.call("HGETALL", self.keys.tickets)]
        return dict(zip(flat[::2], flat[1::2], strict=True))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def waiting(server: EmbeddedRedis) -> Iterator[Waiting]:
    waiting = Waiting(server.url)
    yield waiting
    waiting.link.close()


FORMS: Final[dict[str, dict[str, Any]]] = {
    "rows": {"correlation_ids": "a b c d e", "row_head": "[", "rows": "1]2]3]4]5]", "tenant": "blue"},
    "maps": {
        "requests": msgpack.packb([{"correlation_id": name, "body": name.encode()} for name in "abcde"]),
        "priority": 7,
    },
    "own fields named as columns": {
        "requests": msgpack.packb([{"correlation_id": name, "body": b"7"} for name in "abcde"]),
        "rows": "x",
        "body_key": "y",
    },
}


@pytest.mark.parametrize("with_tickets", [False, True])
@pytest.mark.parametrize("fields", FORMS.values(), ids=list(FORMS))
def test_rest_of_a_run_is_put_back(waiting: Waiting, fields: dict[str, Any], with_tickets: bool) -> None:
    entry = waiting.add(fields, with_tickets=with_tickets)
    (run,) = entry.runs
    part = run.cut(2)
    rest = singles([run])
    # When: the first two are dispatched
    outcome = waiting.store.dispatch([Dispatch([part], "full", "")], TTL_MS)
    # Expect: the others wait as before, in an entry of their own
    assert waiting.batches() == [["a", "b"]]
    assert waiting.waiting() == rest
    (again,) = waiting.read()
    assert_put_back(outcome.entries, entry, {again.id: [run]})
    if with_tickets:
        arrived_as = part.tickets.ranges[0].entry_id if part.tickets else ""
        assert waiting.tickets() == {arrived_as: "5 2", f"{arrived_as}:2": f"w 3 {again.id}"}


def assert_put_back(changes: EntryChanges, entry: Entry, parts: dict[str, list[Run]]) -> None:
    (put_back,) = changes.put_back
    assert put_back.entry is entry
    assert dict(put_back.parts) == parts
    assert changes.removed == changes.missing == []


def test_refused_requests_are_answered_and_the_others_put_back(waiting: Waiting) -> None:
    entry = waiting.add(FORMS["rows"])
    (run,) = entry.runs
    first = run.cut(1)
    part = run.take([0, 2])
    refusal = Refusal(entry, part.correlation_ids, None, JSON, CANCELLED, "withdrawn", "withdrawn: why", part)
    changes = waiting.store.refuse(waiting.store.prepare_refusal([refusal], [], TTL_MS))
    # Expect: what is still to be dispatched waits too
    (again,) = waiting.read()
    assert_put_back(changes, entry, {again.id: [first, run]})
    assert [request.correlation_id for request in waiting.waiting()] == ["a", "c", "e"]
    for name in "bd":
        assert b"CANCELLED" in waiting.link.call("LPOP", waiting.keys.result(name))


def test_large_rest_is_put_back_in_a_few_entries_and_in_order(waiting: Waiting) -> None:
    maps = [{"correlation_id": f"n{number}", "body": b"7", "lane": str(number)} for number in range(200)]
    entry = waiting.add({"requests": msgpack.packb(maps)}, with_tickets=True)
    rest = singles(entry.runs[1:])
    outcome = waiting.store.dispatch([Dispatch(entry.runs[:1], "full", "")], TTL_MS)
    (put_back,) = outcome.entries.put_back
    assert len(put_back.parts) == len(waiting.read()) == PUT_BACK_ENTRIES_MAX
    assert waiting.waiting() == rest
    places = waiting.tickets()
    for part_id, runs in put_back.parts:
        tickets = [of_range for run in runs if run.tickets for of_range in run.tickets.ranges]
        entry_id, first, _ = tickets[0]
        assert places[f"{entry_id}:{first}"] == f"w {len(tickets)} {part_id}"


@pytest.mark.parametrize("form", ["rows", "maps"])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_work_for_a_large_entry_is_in_proportion_to_its_size(
    waiting: Waiting, form: str, batch_size: int
) -> None:
    """Each request is put back a few times, however many requests the entry has."""
    few, many = (put_back_bytes(waiting, form, size, batch_size) / size for size in (256, 1024))
    assert many <= few + 1.5 * REQUEST_BYTES  # four times the size: less than one more level
    assert many <= 14 * REQUEST_BYTES


REQUEST_BYTES: Final = 100


def put_back_bytes(waiting: Waiting, form: str, size: int, batch_size: int) -> int:
    """Dispatch an entry of `size` requests batch by batch. Returns the bytes of bodies that were put back."""
    waiting.link.call("FLUSHALL")
    ids, body = [f"n{number:04}" for number in range(size)], bytes(REQUEST_BYTES)
    fields: dict[str, Any] = {"correlation_ids": " ".join(ids), "rows": body * size}
    if form == "maps":
        fields = {"requests": msgpack.packb([{"correlation_id": name, "body": body} for name in ids])}
    waiting.link.call("XADD", waiting.keys.requests, "*", *flat_of(fields))
    ((entry_id, flat),) = waiting.link.call("XRANGE", waiting.keys.requests, "-", "+")
    settings = ModelSettings(max_batch_size=batch_size)
    entry, decoded = decode_entry(entry_id, flat, settings)
    scheduler, entries = Scheduler(settings, model_processes=1), EntryTable()
    entries[entry.id] = entry
    for run in decoded:
        assert isinstance(run, Run)
        assert not scheduler.offer(run, 0)
    put_back_bytes = dispatched = 0
    while entries:
        dispatches = [decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch)]
        batches, changes, _ = waiting.store.dispatch(dispatches, TTL_MS)
        entries.update_from(changes)
        for batch in batches:
            assert batch is not None
            dispatched += batch.dispatch.size
            scheduler.in_flight.launch(batch.batch_id, batch.dispatch, 0)
            settle(scheduler, batch.batch_id, 1000, 0)
        parts = [runs for put_back in changes.put_back for _, runs in put_back.parts]
        put_back_bytes += REQUEST_BYTES * sum(len(run) for runs in parts for run in runs)
    assert dispatched == size
    assert not waiting.read()
    return put_back_bytes


def test_requests_of_a_missing_entry_are_neither_dispatched_nor_put_back(waiting: Waiting) -> None:
    entry = waiting.add(FORMS["rows"])
    part = entry.runs[0].cut(2)
    waiting.link.call("XDEL", waiting.keys.requests, entry.id)
    outcome = waiting.store.dispatch([Dispatch([part], "full", "")], TTL_MS)
    assert outcome.batches == [None]
    assert outcome.entries.missing == [entry]
    assert not outcome.entries.put_back
    assert not outcome.entries.removed
    assert not waiting.batches()
    assert not waiting.waiting()
