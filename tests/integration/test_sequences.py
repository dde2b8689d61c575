"""Sequences in the production batcher, on a real redis-server; the test is the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import pytest

from carpool.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, OK
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import SequencePart
from carpool.messages.results import Result
from carpool.messages.sequences import SequenceChange, SequenceOutcome
from carpool.messages.settled import Executed
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.batcher import BatcherStore, NotActiveError
from carpool.store.results import Address
from carpool.store.worker import WorkerStore
from carpool.wire.registration import encode_registration
from carpool.wire.requests import decode_entry
from carpool_batcher import service
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.wire import flat_of

TTL_MS: Final = 60_000
WORKER: Final = "w"


class Served(BatcherLoop):
    """A stateful model with a batcher, which runs when a test waits for something."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url)
        self.keys = Keys("m")
        self.link.call("FLUSHALL")
        self.worker = WorkerStore(self.link, self.keys)
        model = ModelSettings(max_batch_size=8, **settings)
        self.worker.register(encode_registration(model.as_text(), [], [], ModelKind.STATEFUL))
        self.worker.join(WORKER, TTL_MS)

    # --- a producer ----------------------------------------------------------------------------------------

    def send(self, name: str, **fields: Any) -> str:
        """Send a request; `a1` is of the sequence `a`."""
        given = {"sequence_id": name[0], "body": "1", "correlation_id": name, **fields}
        return str(self.link.call("XADD", self.keys.requests, "*", *flat_of(given)).decode())

    def send_packed(self, *requests: dict[str, Any]) -> None:
        packed = msgpack.packb([{"body": b"1", **request} for request in requests])
        self.link.call("XADD", self.keys.requests, "*", "requests", packed)

    def result(self, name: str) -> dict[str, Any]:
        key = self.keys.result(name)
        self.run_until(lambda: self.link.call("EXISTS", key), f"{name} is answered")
        envelope: dict[str, Any] = json.loads(self.link.call("LPOP", key))
        return envelope

    def status(self, name: str) -> str:
        return str(self.result(name)["status"])

    # --- a worker ------------------------------------------------------------------------------------------

    def fetch(self) -> Batch:
        found: list[Batch] = []

        def look() -> Any:
            self.worker.start_fetch(WORKER, None)
            found.extend(self.worker.finish_fetch())
            return found

        self.run_until(look, "a batch is dispatched")
        (batch,) = found
        return batch

    def commit(self, batch: Batch, status: str = OK, state: bytes = b"s") -> None:
        results = {}
        changes: list[SequenceChange] = []
        for position, (run, request) in enumerate(zip(batch.runs, batch.requests, strict=True)):
            results[position] = (
                Address.of(request),
                Result(request.correlation_id, status, body=b"1", detail="x"),
            )
            assert run.sequence is not None
            outcome: SequenceOutcome = "ended" if run.sequence.ends else "kept"
            if status != OK:
                outcome = "broken"
            changes.append(SequenceChange(run.sequence, request.correlation_id, outcome, state))
        self.worker.commit(WORKER, batch, results, [], Executed(1000), changes=changes)

    def serve(self) -> list[str]:
        """Execute the next batch. Returns the correlation IDs of its requests."""
        batch = self.fetch()
        self.commit(batch)
        return [request.correlation_id for request in batch.requests]

    # --- Redis ---------------------------------------------------------------------------------------------

    def stored(self, name: str) -> dict[str, str]:
        flat = [part.decode() for part in self.link.call("HGETALL", self.keys.sequence(name))]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def kept(self) -> list[str]:
        return [name.decode() for name in self.link.call("ZRANGE", self.keys.sequences, 0, -1)]

    def entries(self) -> int:
        return int(self.link.call("XLEN", self.keys.requests))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def served(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Its batcher loses no lease because this process is held up: the next session would not know what was
    removed by hand before."""
    monkeypatch.setattr(service, "LEASE_MS", 600_000)
    served = Served(server.url)
    yield served
    served.close()


def test_a_sequence_is_served_one_request_at_a_time(served: Served) -> None:
    served.send("a0", sequence_start=1)
    served.send("a1")
    served.send("a2", sequence_end=1)
    batch = served.fetch()
    assert [request.correlation_id for request in batch.requests] == ["a0"]
    served.run_until(lambda: served.waiting() == 2, "the others are read")
    assert served.link.call("XLEN", served.keys.batches) == 1
    served.commit(batch)
    assert served.status("a0") == OK
    assert served.serve() == ["a1"]
    assert served.stored("a") == {"state": "s", "first": "a0", "last": "a1", "next": "2"}
    assert served.serve() == ["a2"]
    assert served.kept() == []
    assert served.stored("a") == {}


def test_a_failure_breaks_the_sequence_until_the_next_start(served: Served) -> None:
    served.send("a0", sequence_start=1)
    served.send("a1")
    served.send("a2", sequence_start=1)
    served.commit(served.fetch(), "INTERNAL")
    result = served.result("a1")
    assert (result["status"], "begin it again" in result["detail"]) == (ABORTED, True)
    assert served.serve() == ["a2"]
    served.run_until(lambda: not served.entries(), "nothing waits")


def test_a_withdrawn_request_breaks_the_sequence_in_redis(served: Served) -> None:
    served.send("a0", sequence_start=1)
    batch = served.fetch()
    first = served.send("a1")
    served.send("a2")
    served.link.call("XADD", served.keys.requests, "*", "withdraw", "a1")
    assert served.status("a1") == CANCELLED
    assert served.status("a2") == ABORTED
    assert served.stored("a") == {
        "broken": "its request a1 did not succeed",
        "broken_at": SequencePart.place_of(first, 0),
    }
    served.commit(batch)  # what stands before is served
    assert served.status("a0") == OK
    served.take_over()
    served.send("a3")
    assert served.status("a3") == ABORTED
    served.send("a4", sequence_start=1)
    assert served.serve() == ["a4"]
    assert served.stored("a") == {"state": "s", "first": "a4", "last": "a4", "next": "1"}


def test_a_request_sent_twice_is_removed_without_an_answer(served: Served) -> None:
    served.send("a0", sequence_start=1, sequence_index=0)
    served.send("a1", sequence_index=1)
    served.send("a1", sequence_index=1)
    served.send("other", sequence_id="a", sequence_index=1)
    assert served.status("other") == INVALID_ARGUMENT
    assert served.serve() == ["a0"]
    assert served.serve() == ["a1"]
    served.take_over()
    served.send("a1", sequence_index=1)  # `last` in Redis
    served.run_until(lambda: not served.entries(), "it is dropped")
    assert served.status("a1") == OK
    assert not served.link.call("EXISTS", served.keys.result("a1"))
    assert served.stored("a")["next"] == "2"


def test_requests_put_back_keep_their_places(served: Served) -> None:
    served.send_packed(
        {"correlation_id": "a0", "sequence_id": "a", "sequence_start": 1},
        {"correlation_id": "a1", "sequence_id": "a"},
        {"correlation_id": "a2", "sequence_id": "a"},
    )
    served.send("a3")
    batch = served.fetch()  # a1 and a2 are put back, behind a3
    entries = served.link.call("XRANGE", served.keys.requests, "-", "+")
    decoded = [decode_entry(entry_id, flat, ModelSettings())[0] for entry_id, flat in entries]
    runs = [run for entry in decoded for run in entry.runs]
    assert [run.correlation_ids for run in runs] == [["a3"], ["a1"], ["a2"]]
    places = [run.sequence.place for run in runs if run.sequence is not None]
    assert places[1] < places[2] < places[0]
    served.take_over()
    served.run_until(lambda: served.link.call("EXISTS", served.keys.batcher), "another batcher takes over")
    served.commit(batch)
    assert [served.serve() for _ in range(3)] == [["a1"], ["a2"], ["a3"]]


MANY = 40  # entries: more than a batcher reads at once when it begins


def test_a_refusal_is_not_written_before_all_was_read(served: Served) -> None:
    """Given a batcher that takes over and may be killed before it has read all, expect that no request is
    answered unless its sequence is broken with that."""
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    served.take_over()
    served.send("a1", expiration=1)
    for number in range(MANY):
        served.send(f"b{number}", sequence_start=1)
    served.run_until(lambda: served.link.call("EXISTS", served.keys.result("a1")), "a1 has expired")
    assert served.stored("a")["broken"] == "its request a1 did not succeed"


def test_sequences_are_ended_by_force_once_all_was_read(served: Served) -> None:
    """Given a batcher that takes over, expect that it does not remove the entry before it has carried it
    out."""
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    served.take_over()
    entry_id = served.link.call("XADD", served.keys.requests, "*", "end_sequences", "a")
    for number in range(MANY):
        served.send(f"b{number}", sequence_start=1)
    find = ("XRANGE", served.keys.requests, entry_id, entry_id)
    served.run_until(lambda: not served.link.call(*find), "the entry is removed")
    assert served.stored("a")["broken"] == "it was ended (end_sequences)"


def test_a_place_is_believed_only_in_an_entry_that_was_put_back(served: Served) -> None:
    earlier = SequencePart.place_of("1-0", 0)
    served.send("a0", sequence_start=1, sequence_place=earlier)
    ((entry_id, flat),) = served.link.call("XRANGE", served.keys.requests, "-", "+")
    (run,) = decode_entry(entry_id, flat, ModelSettings())[0].runs
    assert run.sequence is not None
    assert run.sequence.place == SequencePart.place_of(entry_id.decode(), 0)
    assert run.extra is None or "sequence_place" not in run.extra


def test_a_request_that_expires_in_flight_breaks_the_sequence(served: Served) -> None:
    for expiration_ms in (200, 5000, 25_000):  # further ones if this process is held up
        served.send("a0", sequence_start=1, expiration=expiration_ms)
        served.send("a1")
        answered = ("EXISTS", served.keys.result("a0"))
        is_dispatched = served.run_until(
            lambda: served.link.call("XLEN", served.keys.batches) or -served.link.call(*answered),  # noqa: B023
            "it is dispatched or has expired",
        )
        assert served.status("a0") == DEADLINE_EXCEEDED
        assert served.status("a1") == ABORTED
        assert served.stored("a")["broken"] == "its request a0 did not succeed"
        if is_dispatched > 0:
            return
    pytest.fail("it never was in flight")


def test_sequences_are_ended_by_force(served: Served) -> None:
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    served.send("b0", sequence_start=1)
    batch = served.fetch()
    served.send("b1")
    served.link.call("XADD", served.keys.requests, "*", "end_sequences", "a b c")
    assert served.status("b1") == CANCELLED
    assert served.stored("a")["broken"] == "it was ended (end_sequences)"
    assert "state" not in served.stored("a")
    served.commit(batch)
    assert served.status("b0") == OK
    for name in ("a1", "b2"):
        served.send(name)
        assert served.status(name) == ABORTED
    assert served.stored("c") == {}


def test_an_entry_removed_by_hand_breaks_the_sequence(served: Served) -> None:
    served.send("a0", sequence_start=1)
    batch = served.fetch()
    served.link.call("XDEL", served.keys.requests, served.send("a1"))
    served.send("a2")
    removed = served.send("a3")
    served.send("a4")
    served.run_until(served.session, "it is active")
    served.run_until(lambda: served.waiting() == 3, "all are read")
    served.link.call("XDEL", served.keys.requests, removed)
    assert served.status("a4") == ABORTED
    served.commit(batch)
    assert served.serve() == ["a2"]


def test_an_idle_sequence_is_deleted(server: EmbeddedRedis) -> None:
    served = Served(server.url, max_sequence_idle_ms=50)
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    assert served.kept() == ["a"]
    served.run_until(lambda: not served.kept(), "it is ended")
    assert served.stored("a") == {}
    served.send("a1")
    assert served.status("a1") == INVALID_ARGUMENT
    served.close()


def test_only_the_active_batcher_may_dispatch_and_refuse(served: Served) -> None:
    """Planted in the script: without the check, a paused batcher would send a request beside another."""
    store = BatcherStore(served.link, served.keys)
    store.name, store.kind = "paused", ModelKind.STATEFUL
    served.send("a0", sequence_start=1)
    ((entry_id, flat),) = served.link.call("XRANGE", served.keys.requests, "-", "+")
    entry, _ = decode_entry(entry_id, flat, ModelSettings())
    for holder in ("another", None):
        served.link.call("DEL", served.keys.batcher)
        if holder:
            served.link.call("SET", served.keys.batcher, holder)
        with pytest.raises(NotActiveError):
            store.dispatch([Dispatch(entry.runs, "idle", "")], TTL_MS)
        with pytest.raises(NotActiveError):
            store.refuse(store.prepare_refusal([], [entry], TTL_MS))
    assert served.entries() == 1
    assert served.link.call("XLEN", served.keys.batches) == 0
    served.link.call("SET", served.keys.batcher, "paused")
    store.dispatch([Dispatch(entry.runs, "idle", "")], TTL_MS)
    assert served.entries() == 0


def test_a_batcher_that_lost_its_lease_begins_again(served: Served) -> None:
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    served.link.call("SET", served.keys.batcher, "another", "PX", 300)
    served.send("a1")
    assert served.serve() == ["a1"]
    assert served.stored("a")["next"] == "2"


def test_a_full_redis_still_records_what_is_broken(served: Served) -> None:
    served.send("a0", sequence_start=1)
    assert served.serve() == ["a0"]
    served.send("a1")
    batch = served.fetch()
    served.send("a2")
    served.run_until(lambda: served.waiting() == 1, "it waits")
    served.link.call("XADD", served.keys.requests, "*", "withdraw", "a2")
    served.link.call("CONFIG", "SET", "maxmemory", "1")
    try:
        assert served.status("a2") == CANCELLED
    finally:
        served.link.call("CONFIG", "SET", "maxmemory", "0")
    assert served.stored("a")["broken"] == "its request a2 did not succeed"
    served.commit(batch)
