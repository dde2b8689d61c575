"""States of sequences on each real Redis: written exactly when the results are, and loaded again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from carpool.clock import RedisClock
from carpool.errors import ABORTED, DEADLINE_EXCEEDED, INTERNAL, OK
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import JSON, Entry, Run, SequencePart
from carpool.messages.results import DeadLetter, Result
from carpool.messages.sequences import SequenceChange
from carpool.messages.settled import BatchSettled, Executed
from carpool.store.batcher import BatcherStore
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.results import Address, Answer, FencedError, Start
from carpool.store.worker import WorkerStore
from carpool.wire.batches import decode_settled, encode_batch
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker import committer as committing
from carpool_worker import process_handle
from carpool_worker.batch_log import BatchLog
from carpool_worker.batch_sources import Fetcher
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import EXPIRED, Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.serial_replica import SerialReplica
from support.forking import forked_children
from support.redis_client import redis_at

LEASE_MS: Final = 60_000  # longer than a test
KEYS: Final = Keys("m")
HERE: Final = Address(None, None)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[Path], EmbeddedRedis]]:
    started: dict[Path, EmbeddedRedis] = {}

    def server_of(binary: Path) -> EmbeddedRedis:
        if binary not in started:
            started[binary] = EmbeddedRedis(binary=binary, append_only=False)
        return started[binary]

    yield server_of
    for server in started.values():
        server.stop()


class Model:
    """A model on an empty Redis; its batcher is played by the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()
        self.redis.script_flush()
        self.link = Link(url, name="test")
        self.batcher = BatcherStore(self.link, KEYS)
        self.worker = WorkerStore(self.link, KEYS)
        self.worker.register({"max_batch_size": 8})
        self.numbers = itertools.count(1)

    def close(self) -> None:
        self.redis.config_set("maxmemory", 0)
        self.redis.close()
        self.link.close()

    def run(self, sequence_id: str, body: int = 1, *, starts: bool = False, ends: bool = False) -> Run:
        """A request of a sequence. Each stands behind the one before."""
        entry_id = f"{1_700_000_000_000 + next(self.numbers)}-0"
        part = SequencePart(sequence_id, starts, ends, None, SequencePart.place_of(entry_id, 0))
        entry = Entry(entry_id, 1000)
        return Run(entry, [f"{entry_id}:{sequence_id}"], [b"%d" % body], arrival_us=1000, sequence=part)

    def dispatch(self, *runs: Run) -> str:
        fields = {"runs": encode_batch(Dispatch(list(runs), "full", "")), "dispatched_us": 1}
        batch_id: bytes = self.redis.xadd(KEYS.batches, fields)
        return batch_id.decode()

    def batch(self, *runs: Run, consumer: str = "w") -> Batch:
        """These requests, dispatched and fetched."""
        self.dispatch(*runs)
        self.worker.start_fetch(consumer, 1000)
        (batch,) = self.worker.finish_fetch()
        return batch

    def commit(
        self, batch: Batch, changes: Sequence[SequenceChange], consumer: str = "w", **others: Any
    ) -> set[int]:
        results = {
            at: (
                HERE,
                failed(run.correlation_ids[0]) if change.outcome == "broken" else ok(run.correlation_ids[0]),
            )
            for at, (run, change) in enumerate(zip(batch.runs, changes, strict=True))
        }
        arguments: dict[str, Any] = {
            "results": results,
            "dead": [],
            "executed": Executed(1),
            "changes": changes,
        } | others
        return self.worker.commit(consumer, batch, **arguments)

    def sequence(self, sequence_id: str) -> dict[str, Any]:
        """What is kept of a sequence, without `first`; whether it has a TTL and is listed is verified."""
        key = KEYS.sequence(sequence_id)
        found = self.redis.hgetall(key)
        found.pop(b"first", None)
        assert (self.redis.pttl(key) > 0) == bool(found)
        assert (self.redis.zscore(KEYS.sequences, sequence_id) is not None) == bool(found)
        return {name.decode(): value if name == b"state" else value.decode() for name, value in found.items()}

    def settled(self) -> list[tuple[str, ...]]:
        """The broken sequences that each settled batch names."""
        events = [
            decode_settled([part for pair in fields.items() for part in pair])
            for _, fields in self.redis.xrange(KEYS.settled)
        ]
        return [tuple(event.broken) for event in events if isinstance(event, BatchSettled)]

    def expire_lease(self, batch_id: str, consumer: str) -> None:
        self.redis.xclaim(KEYS.batches, "workers", consumer, 0, [batch_id], idle=2 * LEASE_MS, justid=True)

    def everything(self) -> dict[bytes, Any]:
        return {key: self.redis.dump(key) for key in self.redis.scan_iter("*")}


@pytest.fixture
def model(servers: Callable[[Path], EmbeddedRedis], server: Path) -> Iterator[Model]:
    model = Model(servers(server).url)
    yield model
    model.close()


def change(run: Run, outcome: Any, content: bytes | str = b"") -> SequenceChange:
    assert run.sequence is not None
    return SequenceChange(run.sequence, run.correlation_ids[0], outcome, content)


def of(run: Run) -> str:
    return run.correlation_ids[0]


def ok(correlation_id: str) -> Result:
    return Result(correlation_id, OK, JSON, b"1")


def failed(correlation_id: str) -> Result:
    return Result(correlation_id, INTERNAL, JSON, detail="it raised")


def place(run: Run) -> str:
    assert run.sequence is not None
    return run.sequence.place


# --- what is kept ------------------------------------------------------------------------------------------


def test_state_is_written_with_the_result_until_the_sequence_ends(model: Model) -> None:
    runs = [model.run("a", starts=True), model.run("a"), model.run("a", ends=True)]
    model.commit(model.batch(runs[0]), [change(runs[0], "kept", b"\0one")])
    assert model.sequence("a") == {"state": b"\0one", "next": "1", "last": of(runs[0])}
    second = model.batch(runs[1])
    assert model.worker.load(second).states == {0: b"\0one"}
    model.commit(second, [change(runs[1], "kept", b"two")])
    assert model.sequence("a") == {"state": b"two", "next": "2", "last": of(runs[1])}
    assert model.redis.hget(KEYS.sequence("a"), "first") == of(runs[0]).encode()
    model.commit(model.batch(runs[2]), [change(runs[2], "ended")])
    assert model.sequence("a") == {}
    assert model.settled() == [(), (), ()]


def test_sequences_of_one_batch_are_changed_together(model: Model) -> None:
    old = model.run("old", starts=True)
    model.commit(model.batch(old), [change(old, "kept", b"x")])
    runs = [model.run("a", starts=True), model.run("b", starts=True, ends=True), model.run("old")]
    runs.append(model.run("c", starts=True))
    batch = model.batch(*runs)
    outcomes = ("kept", "ended", "broken", "broken")
    contents: list[bytes | str] = [b"1", b"", "it raised", "it raised"]
    model.commit(batch, list(map(change, runs, outcomes, contents)))
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(runs[0])}
    assert model.sequence("b") == {}
    broken = {"broken": "it raised", "broken_at": place(runs[2])}
    assert model.sequence("old") == {"state": b"x", "next": "1", "last": of(old), **broken}
    assert model.sequence("c") == {"broken": "it raised", "broken_at": place(runs[3])}
    assert model.settled() == [(), ("old", "c")]


def test_more_sequences_than_one_command_takes(model: Model) -> None:
    runs = [model.run(f"s{at}", starts=True, ends=at % 3 == 2) for at in range(1201)]
    batch = model.batch(*runs)
    changes = [change(run, *(("ended",) if at % 3 == 2 else ("kept", b"1"))) for at, run in enumerate(runs)]
    assert model.commit(batch, changes) == set()
    kept = {f"s{at}".encode() for at in range(1201) if at % 3 < 2}
    assert set(model.redis.zrange(KEYS.sequences, 0, -1)) == kept
    assert model.redis.exists(*[KEYS.sequence(f"s{at}") for at in range(1201)]) == len(kept)


def test_start_makes_a_broken_sequence_anew(model: Model) -> None:
    first, again = model.run("a", starts=True), model.run("a", starts=True)
    model.commit(model.batch(first), [change(first, "broken", "it raised")])
    batch = model.batch(again)
    assert model.worker.load(batch).states == {}, "one that starts needs none"
    model.commit(batch, [change(again, "kept", b"1")])
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(again)}


@pytest.mark.parametrize(
    ("starts", "outcome", "left"), [(False, "kept", 2), (True, "kept", 1), (False, "ended", 0)]
)
def test_break_at_a_later_place_survives_an_earlier_result(
    model: Model, starts: bool, outcome: str, left: int
) -> None:
    """Given a request refused behind one in flight, expect the sequence broken from the later place on."""
    begin, flying, refused = model.run("a", starts=True), model.run("a", starts=starts), model.run("a")
    model.commit(model.batch(begin), [change(begin, "kept", b"0")])
    batch = model.batch(flying)
    late = model.batch(refused, consumer="other")
    model.commit(late, [change(refused, "broken", "expired")], consumer="other")
    model.commit(batch, [change(flying, outcome, b"1")])
    found = model.sequence("a")
    assert (found.pop("broken"), found.pop("broken_at")) == ("expired", place(refused))
    assert found == ({"state": b"1", "next": str(left), "last": of(flying)} if left else {})
    # That it is broken earlier, too, does not move the mark to the front. The state stays.
    model.commit(model.batch(flying), [change(flying, "broken", "raised")])
    found = model.sequence("a")
    found = {name: found.get(name) for name in ("broken", "broken_at", "failed_at", "state")}
    assert found == {
        "broken": "expired",
        "broken_at": place(refused),
        "failed_at": place(flying),
        "state": b"1" if left else None,
    }


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_requests_before_all_that_were_refused_have_their_state(model: Model, order: tuple[int, ...]) -> None:
    """Given requests refused in any order behind one in flight, with a start between them, expect the first
    and the last of their places."""
    begin, flying = model.run("a", starts=True), model.run("a")
    refused = [model.run("a"), model.run("a", starts=True), model.run("a")]
    model.commit(model.batch(begin), [change(begin, "kept", b"0")])
    batch = model.batch(flying)
    for at in order:
        late = model.batch(refused[at], consumer="other")
        model.commit(late, [change(refused[at], "broken", f"it is {at}")], consumer="other")
    broken = {"broken": "it is 2", "broken_at": place(refused[2]), "failed_at": place(refused[0])}
    assert model.sequence("a") == {"state": b"0", "next": "1", "last": of(begin), **broken}
    assert model.worker.load(batch).states == {0: b"0"}
    model.commit(batch, [change(flying, "kept", b"1")])
    assert model.sequence("a") == {"state": b"1", "next": "2", "last": of(flying), **broken}


def test_a_start_drops_what_was_broken_before_it(model: Model) -> None:
    """Given requests refused before a start and behind it, expect that it is broken behind it only."""
    runs = [model.run("a", starts=at in (0, 2)) for at in range(5)]
    for at in (1, 4, 3):
        model.commit(model.batch(runs[at]), [change(runs[at], "broken", "full")])
    assert model.sequence("a")["failed_at"] == place(runs[1])
    model.commit(model.batch(runs[2]), [change(runs[2], "kept", b"1")])
    broken = {"broken": "full", "broken_at": place(runs[4])}
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(runs[2]), **broken}


def test_batch_without_sequences_uses_none_of_their_keys(model: Model) -> None:
    run = Run(Entry("1-0", 1000), ["plain"], [b"1"], arrival_us=1000)
    batch = model.batch(run)
    assert model.worker.load(batch) == ({}, {})
    assert model.worker.commit("w", batch, {0: (HERE, ok("plain"))}, [], Executed(1)) == set()
    keys = set(model.redis.scan_iter("*"))
    assert not [key for key in keys if b"sequence" in key]
    assert model.settled() == [()]


# --- exactly when the result is ----------------------------------------------------------------------------


def test_fenced_commit_and_answer_change_nothing(model: Model) -> None:
    run = model.run("a", starts=True)
    batch = model.batch(run)
    model.expire_lease(batch.id, "w")
    reclaimed = model.worker.reclaim("other", LEASE_MS)
    assert reclaimed is not None and reclaimed.batch.runs[0].sequence == run.sequence
    before = model.everything()
    with pytest.raises(FencedError):
        model.commit(batch, [change(run, "kept", b"late")])
    answer = Answer(0, HERE, ok(of(run)), change(run, "kept", b"late"))
    with pytest.raises(FencedError):
        model.worker.answer("w", batch, [answer], None)
    assert model.everything() == before
    model.commit(reclaimed.batch, [change(run, "kept", b"1")], consumer="other")
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(run)}


def test_commit_whose_reply_was_lost_has_changed_it_once(model: Model) -> None:
    run = model.run("a", starts=True)
    begun = model.batch(run)
    model.commit(begun, [change(run, "kept", b"1")])
    with pytest.raises(FencedError):  # so is a repetition: the batch is gone
        model.commit(begun, [change(run, "kept", b"2")])
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(run)}


def test_answer_whose_reply_was_lost_has_changed_it_once(model: Model) -> None:
    runs = [model.run("a", starts=True), model.run("b", starts=True)]
    batch = model.batch(*runs)
    answers = [
        Answer(0, HERE, ok(of(runs[0])), change(runs[0], "kept", b"1")),
        Answer(1, HERE, failed(of(runs[1])), change(runs[1], "broken", "it raised")),
    ]
    assert model.worker.answer("w", batch, answers, None) == {0, 1}
    # When the first call is repeated, or another worker has other results
    assert model.worker.answer("w", batch, answers, None) == set()
    others = [
        Answer(0, HERE, failed(of(runs[0])), change(runs[0], "broken", "other")),
        Answer(1, HERE, ok(of(runs[1])), change(runs[1], "kept", b"other")),
    ]
    assert model.worker.answer("w", batch, others, None) == set()
    # Expect: as written first
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(runs[0])}
    assert model.sequence("b") == {"broken": "it raised", "broken_at": place(runs[1])}
    assert [model.redis.llen(KEYS.result(of(run))) for run in runs] == [1, 1]
    # And the settled entry names what was broken ahead, though who commits does not say so
    assert model.worker.commit("w", batch, {}, [], Executed(1)) == set()
    assert model.settled() == [("b",)]


def test_changes_of_positions_that_a_batcher_answered_are_left_out(model: Model) -> None:
    """Given a request that expired in flight, expect its sequence broken, and no effect of its result."""
    runs = [model.run("a", starts=True), model.run("b", starts=True)]
    batch = model.batch(*runs)
    expired = Result(of(runs[1]), DEADLINE_EXCEEDED)
    answers = [Answer(1, HERE, expired, change(runs[1], "broken", "expired"))]
    assert model.batcher.answer_in_flight(batch.id, answers, 60_000) == {1}
    changes = [change(runs[0], "kept", b"1"), change(runs[1], "kept", b"2")]
    before = model.everything()
    assert model.commit(batch, changes) == {1}, "and nothing is written"
    assert model.everything() == before
    result = {0: (HERE, ok(of(runs[0])))}
    assert model.worker.commit("w", batch, result, [], Executed(1), changes=changes[:1]) == set()
    assert model.sequence("a") == {"state": b"1", "next": "1", "last": of(runs[0])}
    assert model.sequence("b") == {"broken": "expired", "broken_at": place(runs[1])}
    assert model.settled() == [("b",)]


def test_dead_letter_breaks_its_sequence(model: Model) -> None:
    run = model.run("a", starts=True)
    batch = model.batch(run)
    letter = DeadLetter(batch.requests[0], "it died", 2)
    model.commit(batch, [change(run, "broken", "it died")], dead=[letter])
    assert model.sequence("a") == {"broken": "it died", "broken_at": place(run)}
    ((_, fields),) = model.redis.xrange(KEYS.dead)
    assert (fields[b"sequence_id"], fields[b"sequence_start"]) == (b"a", b"1")


# --- a Redis in trouble ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_when_memory_is_full_states_are_written_all_the_same(model: Model, is_ahead: bool) -> None:
    """As results are: what is accepted is served, which frees memory."""
    run = model.run("a", starts=True)
    batch = model.batch(run)
    model.redis.config_set("maxmemory", 1)
    kept = change(run, "kept", b"1" * 10_000)
    if is_ahead:
        model.worker.answer("w", batch, [Answer(0, HERE, ok(of(run)), kept)], None)
    else:
        model.commit(batch, [kept])
    assert model.sequence("a") == {"state": b"1" * 10_000, "next": "1", "last": of(run)}


def test_keys_of_other_types_cost_a_sequence_its_state_and_nothing_else(model: Model) -> None:
    """Given keys that a user made something else, expect all results, and the other sequences' states."""
    begun = [model.run(name, starts=True) for name in "abc"]
    model.commit(model.batch(*begun), [change(run, "kept", b"0") for run in begun])
    model.redis.set(KEYS.sequence("a"), "mine")
    model.redis.hset(KEYS.sequence("b"), "next", "many")
    runs = [model.run(name) for name in "abc"]
    batch = model.batch(*runs)
    assert model.worker.load(batch).states == {1: b"0", 2: b"0"}
    assert model.commit(batch, [change(run, "kept", b"1") for run in runs]) == set()
    assert [model.redis.llen(KEYS.result(of(run))) for run in runs] == [1, 1, 1]
    assert model.redis.get(KEYS.sequence("a")) == b"mine"
    assert model.redis.hget(KEYS.sequence("b"), "state") == b"1"
    assert model.sequence("c") == {"state": b"1", "next": "2", "last": of(runs[2])}
    # A break is still announced, and a start makes the key its own
    late, again = model.run("a"), model.run("a", starts=True)
    model.commit(model.batch(late), [change(late, "broken", "no state")])
    assert model.settled()[-1] == ("a",)
    model.commit(model.batch(again), [change(again, "kept", b"2")])
    assert model.sequence("a") == {"state": b"2", "next": "1", "last": of(again)}
    # And so it is with the index
    model.redis.set(KEYS.sequences, "mine")
    more = model.run("c")
    assert model.commit(model.batch(more), [change(more, "kept", b"3")]) == set()
    assert model.redis.hget(KEYS.sequence("c"), "state") == b"3"


def test_state_of_another_error_is_not_taken_for_a_lost_one(model: Model) -> None:
    run = model.run("a")
    batch = model.batch(run)
    model.redis.execute_command("ACL", "SETUSER", "default", "-hget")
    try:
        with pytest.raises(CommandError) as raised:
            model.worker.load(batch)
    finally:
        model.redis.execute_command("ACL", "SETUSER", "default", "+hget")
    assert raised.value.code == "NOPERM"


def test_scripts_that_redis_forgot_are_sent_again(model: Model) -> None:
    run = model.run("a", starts=True)
    batch = model.batch(run)
    model.redis.script_flush()
    model.commit(batch, [change(run, "kept", b"1")])
    model.redis.script_flush()
    more = model.run("a")
    batch = model.batch(more)
    model.worker.answer("w", batch, [Answer(0, HERE, ok(of(more)), change(more, "kept", b"2"))], None)
    assert model.sequence("a") == {"state": b"2", "next": "2", "last": of(more)}


# --- a replica ---------------------------------------------------------------------------------------------

SUMS: Final = """
import os
from pathlib import Path
from carpool import StateSpec

HERE = Path(__file__).parent

class Sums:
    max_batch_size = 8
    states = [StateSpec("sum", "INT64", (-1,))]

    def predict(self, batch, states):
        with open(HERE / "log", "a") as log:
            print(*states["sum"].tolist(), file=log)
        if "die" in batch:
            os._exit(1)
        sums = states["sum"] + [0 if body == "raise" else body for body in batch]
        if "raise" in batch:
            raise ValueError("told to")
        return sums.tolist(), {"sum": sums}
"""


class Service:
    """A replica on a real Redis with a real model process, whose loop runs step by step."""

    def __init__(self, model: Model, folder: Path, consumer: str = "w") -> None:
        (folder / "sums.py").write_text(SUMS)
        self.folder, self.model = folder, model
        self.links = [Link(model.url, name=f"{consumer}:{role}") for role in ("fetch", "commit")]
        self.stores = [WorkerStore(link, KEYS, RedisClock()) for link in self.links]
        for store in self.stores:
            store.read_clock()
        self.process = ProcessHandle(f"{folder / 'sums.py'}:Sums", "cpu")
        self.metrics = WorkerMetrics("m")
        member = Member(consumer)
        self.fetcher = Fetcher(member, self.stores[0], LEASE_MS, lambda store: None, self.metrics)
        self.committer = Committer(member, self.stores[1], self.metrics, BatchLog("m", consumer))
        codec = Codec(self.process.start())
        self.replica = SerialReplica(
            member, self.process, codec, self.fetcher, self.committer, self.stores[0].clock, self.metrics
        )

    def serve(self) -> None:
        """Until nothing is in flight."""
        while self.model.redis.xlen(KEYS.batches):
            self.replica.run_once()

    def close(self) -> None:
        self.process.close(wait_s=0)
        for link in self.links:
            link.close()

    @property
    def log(self) -> list[str]:
        """The states that each call of the model got."""
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def service(model: Model, tmp_path: Path) -> Iterator[Service]:
    with forked_children(process_handle):
        service = Service(model, tmp_path)
        yield service
        service.close()


def sums(value: int) -> bytes:
    return np.array([value], "<i8").tobytes()


def answered(model: Model, run: Run) -> list[Any]:
    """The results of a request: the body, or the status."""
    results = [json.loads(data) for data in model.redis.lrange(KEYS.result(of(run)), 0, -1)]
    return [result["body"] if result["status"] == OK else result["status"] for result in results]


def test_replica_loads_and_writes_states(model: Model, service: Service) -> None:
    first = [model.run("a", 1, starts=True), model.run("b", 2, starts=True)]
    model.dispatch(*first)
    service.serve()
    second = [model.run("b", 20, ends=True), model.run("c", 3, starts=True), model.run("a", 10)]
    model.dispatch(*second)
    service.serve()
    assert [answered(model, run) for run in first + second] == [[1], [2], [22], [3], [11]]
    assert service.log == ["0 0", "2 0 1"]
    assert model.sequence("a") == {"state": sums(11), "next": "2", "last": of(second[2])}
    assert model.sequence("b") == {}
    assert model.sequence("c")["state"] == sums(3)


def test_expired_request_breaks_its_sequence_at_the_worker(model: Model, service: Service) -> None:
    run = model.run("a", 1, starts=True)
    run.deadline_us = 1
    model.dispatch(run)
    service.serve()
    (result,) = [json.loads(data) for data in model.redis.lrange(KEYS.result(of(run)), 0, -1)]
    assert (result["status"], result["detail"]) == (DEADLINE_EXCEEDED, EXPIRED)
    why = f"its request {of(run)} ended with DEADLINE_EXCEEDED"
    assert model.sequence("a") == {"broken": why, "broken_at": place(run)}
    assert model.settled() == [("a",)]


def test_reclaimed_batch_loads_states_again_and_not_those_of_answered_requests(
    model: Model, service: Service
) -> None:
    """Given a worker that answered one of three ahead and died, expect the others executed again."""
    begun = [model.run(name, 10 * at, starts=True) for at, name in enumerate("abc")]
    model.commit(model.batch(*begun), [change(run, "kept", sums(10 * at)) for at, run in enumerate(begun)])
    runs = [model.run(name, 1) for name in "abc"]
    batch = model.batch(*runs, consumer="dead")
    assert model.worker.load(batch).states == {0: sums(0), 1: sums(10), 2: sums(20)}
    assert model.worker.load(batch, {0}).states == {1: sums(10), 2: sums(20)}
    answer = Answer(0, HERE, Result(of(runs[0]), OK, JSON, b"1"), change(runs[0], "kept", sums(1)))
    assert model.worker.answer("dead", batch, [answer], Start(1, 1)) == {0}
    model.expire_lease(batch.id, "dead")
    service.serve()
    assert [answered(model, run) for run in runs] == [[1], [11], [21]]
    assert service.log == ["10", "20"], "one at a time, and not the first again"
    assert [model.sequence(name)["state"] for name in "abc"] == [sums(1), sums(11), sums(21)]
    assert [model.sequence(name)["next"] for name in "abc"] == ["2"] * 3
    with pytest.raises(FencedError):
        model.commit(batch, [change(run, "kept", b"late") for run in runs], consumer="dead")


def test_request_that_ends_processes_breaks_its_sequence_only(model: Model, service: Service) -> None:
    runs = [model.run("a", 1, starts=True), model.run("b", 2, starts=True), model.run("c", 3, starts=True)]
    runs[1].bodies = [b'"die"']
    model.dispatch(*runs)
    service.serve()
    assert [answered(model, run) for run in runs] == [[1], [ABORTED], [3]]
    assert service.log == ["0 0 0", "0", "0", "0"]
    assert [model.sequence(name).get("state") for name in "abc"] == [sums(1), None, sums(3)]
    assert model.settled() == [("b",)], "though its result was written ahead of the commit"
    ((_, fields),) = model.redis.xrange(KEYS.dead)
    assert fields[b"sequence_id"] == b"b"


def test_request_on_which_the_model_raises_breaks_its_sequence_only(model: Model, service: Service) -> None:
    runs = [model.run(name, 1, starts=True) for name in "abcd"]
    runs[2].bodies = [b'"raise"']
    model.dispatch(*runs)
    service.serve()
    assert [answered(model, run) for run in runs] == [[1], [1], [INTERNAL], [1]]
    assert model.settled() == [("c",)]


def test_states_of_large_results_are_written_ahead_of_the_commit(
    model: Model, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "COMMIT_BYTES_MAX", 20)  # three states are more
    runs = [model.run(name, at, starts=True) for at, name in enumerate("abcd")]
    runs[1].bodies = [b'"raise"']
    model.dispatch(*runs)
    service.serve()
    assert [answered(model, run) for run in runs] == [[0], [INTERNAL], [2], [3]]
    assert [model.sequence(name).get("state") for name in "abcd"] == [sums(0), None, sums(2), sums(3)]
    assert model.settled() == [("b",)]


def test_states_are_loaded_when_redis_answers_again(model: Model, service: Service) -> None:
    """Given a fetch whose states could not be loaded, expect the next start to load them."""
    begun = model.run("a", 1, starts=True)
    model.commit(model.batch(begun), [change(begun, "kept", sums(1))])
    run = model.run("a", 1)
    model.dispatch(run)
    store = service.stores[0]
    load = store.load
    calls: list[str] = []

    def flaky(batch: Batch, answered: Any = ()) -> Any:
        calls.append(batch.id)
        if len(calls) == 1:
            raise LinkError("planted")
        return load(batch, answered)

    store.load = flaky  # type: ignore[method-assign]
    assert service.fetcher.start() == []
    with pytest.raises(LinkError):
        service.fetcher.finish()
    (execution,) = service.fetcher.start()
    assert isinstance(execution, Execution)
    assert execution.states == {0: sums(1)}
