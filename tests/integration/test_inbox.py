"""What the batcher of a bound model tells its processes, in a real Redis: see `carpool.wire.inbox`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry
from carpool.messages.sequences import SlotFreed
from carpool.store.batcher import BatcherStore
from carpool.store.bound import BoundStore
from carpool.store.connection import CommandError, Link
from carpool.wire.batches import decode_batch
from carpool.wire.inbox import BatchSent, InboxMessage, SequenceEnded, decode_message
from carpool.wire.requests import decode_entry
from carpool_cli.local.embedded import EmbeddedRedis
from support.wire import DEFAULTS, flat_of

TTL_MS: Final = 60_000


class Bound:
    """A bound model, as its batcher's store sees it."""

    def __init__(self, url: str) -> None:
        self.keys = Keys("m")
        self.link = Link(url, name="test")
        self.store = BatcherStore(self.link, self.keys)
        self.processes = BoundStore(self.link, self.keys, RedisClock())
        self.link.call("FLUSHALL")
        self.link.call("XGROUP", "CREATE", self.keys.batches, "workers", "0", "MKSTREAM")

    def add(self, body: str) -> Entry:
        entry_id = self.link.call("XADD", self.keys.requests, "*", *flat_of({"body": body}))
        flat = self.link.call("XRANGE", self.keys.requests, entry_id, entry_id)[0][1]
        return decode_entry(entry_id, flat, DEFAULTS)[0]

    def dispatch(self, process: str, entry: Entry) -> str | None:
        outcome = self.store.dispatch([Dispatch(entry.runs, "idle", "", process=process)], TTL_MS)
        (batch,) = outcome.batches
        return None if batch is None else batch.batch_id

    def inbox(self, process: str) -> list[InboxMessage]:
        entries = self.link.call("XRANGE", self.keys.inbox(process), "-", "+")
        return [decode_message(flat) for _, flat in entries]

    def pending(self, process: str) -> list[str]:
        """The batches that are in the pending list of a process once one has looked, each delivered once."""
        self.processes.pending("another")
        pending = self.link.call("XPENDING", self.keys.batches, "workers", "-", "+", 10, process)
        assert all(delivered == 1 for *_, delivered in pending)
        return [batch_id.decode() for batch_id, *_ in pending]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def bound(server: EmbeddedRedis) -> Iterator[Bound]:
    bound = Bound(server.url)
    yield bound
    bound.link.close()


def test_a_batch_is_in_the_pending_list_and_the_inbox_of_its_process(bound: Bound) -> None:
    first, second = bound.dispatch("p", bound.add("1")), bound.dispatch("q", bound.add("2"))
    assert first is not None and second is not None
    assert bound.pending("p") == [first] and bound.pending("q") == [second]
    assert bound.inbox("p") == [BatchSent(first)] and bound.inbox("q") == [BatchSent(second)]
    assert bound.link.call("PTTL", bound.keys.inbox("p")) > 0
    (flat,) = [flat for batch_id, flat in bound.link.call("XRANGE", bound.keys.batches, first, first)]
    assert decode_batch(first.encode(), flat, 1).process == "p"


def test_a_batch_for_any_process_is_in_no_inbox(bound: Bound) -> None:
    assert bound.dispatch("", bound.add("1")) is not None
    assert bound.link.call("XPENDING", bound.keys.batches, "workers")[0] == 0
    assert not bound.link.call("KEYS", "*inbox*")


def test_a_process_is_told_nothing_of_a_batch_whose_requests_are_missing(bound: Bound) -> None:
    entry = bound.add("1")
    bound.link.call("XDEL", bound.keys.requests, entry.id)
    assert bound.dispatch("p", entry) is None
    assert bound.inbox("p") == [] and bound.pending("p") == []


def test_a_batch_is_delivered_although_the_group_was_deleted(bound: Bound) -> None:
    bound.link.call("DEL", bound.keys.batches)
    batch_id = bound.dispatch("p", bound.add("1"))
    with pytest.raises(CommandError, match="NOGROUP"):  # whoever gets this registers again
        bound.processes.fetch("p", [str(batch_id)])
    bound.processes.register({"max_batch_size": "1"})
    assert bound.pending("p") == [batch_id]


def test_a_process_gets_its_batch_whoever_looks_first_and_no_other_does(bound: Bound) -> None:
    ids = [str(bound.dispatch(process, bound.add("1"))) for process in ("p", "q", "", "p")]
    assert list(bound.processes.fetch("q", ids)) == [ids[1], ids[2]]  # one is for no process
    assert list(bound.processes.fetch("p", ids)) == [ids[0], ids[3]]
    assert [batch.epoch for batch in bound.processes.pending("p")] == [1, 1]


def test_a_batch_of_a_process_that_died_before_it_looked_is_reclaimed(bound: Bound) -> None:
    batch_id = bound.dispatch("p", bound.add("1"))
    reclaimed = bound.processes.reclaim("q", lease_ms=0)
    assert reclaimed is not None
    assert (reclaimed.batch.id, reclaimed.batch.process, reclaimed.batch.epoch) == (batch_id, "p", 2)


def test_any_number_of_batches_is_assigned_at_once(bound: Bound) -> None:
    ids = [str(bound.dispatch(f"p{number % 3}", bound.add("1"))) for number in range(250)]
    bound.processes.pending("another")
    for number in range(3):
        assert len(bound.processes.fetch(f"p{number}", ids)) == len(ids[number::3])


def test_a_process_is_told_in_order_what_has_no_slot_any_more(bound: Bound) -> None:
    first = bound.dispatch("p", bound.add("1"))
    assert first is not None
    free = bound.store.prepare_refusal([], [], TTL_MS, freed=[SlotFreed("p", "mic1"), SlotFreed("q", "mic2")])
    bound.store.refuse(free)
    second = bound.dispatch("p", bound.add("2"))
    assert second is not None
    assert bound.inbox("p") == [BatchSent(first), SequenceEnded("mic1"), BatchSent(second)]
    assert bound.inbox("q") == [SequenceEnded("mic2")]


def test_an_inbox_of_another_type_costs_no_other_process_its_messages(bound: Bound) -> None:
    bound.link.call("SET", bound.keys.inbox("p"), "text")
    batch_id = bound.dispatch("p", bound.add("1"))
    free = bound.store.prepare_refusal([], [], TTL_MS, freed=[SlotFreed("p", "mic1"), SlotFreed("q", "mic2")])
    bound.store.refuse(free)
    assert bound.pending("p") == [batch_id]
    assert bound.inbox("q") == [SequenceEnded("mic2")]
