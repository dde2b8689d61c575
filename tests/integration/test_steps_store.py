"""What a worker of a stepping model writes, on each real Redis: each chunk once, while it is the owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.clock import RedisClock
from carpool.errors import CANCELLED, OK
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import JSON, Run
from carpool.messages.results import Chunk, DeadLetter, Result
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.batcher import BatcherStore
from carpool.store.connection import CommandError, Link
from carpool.store.results import Address, Answer, FencedError
from carpool.store.steps import KeptChunk, StepStore, StepWrite
from carpool.store.worker import Reclaimed, WorkerStore
from carpool.wire.requests import decode_entry
from carpool_cli.local.embedded import EmbeddedRedis
from support.redis_client import redis_at
from support.wire import flat_of

LEASE_MS: Final = 60_000  # longer than a test
KEYS: Final = Keys("m")


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
    """A model on an empty Redis, with a connection for each role. Each fetch takes what was sent before."""

    def __init__(self, url: str) -> None:
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()
        self.link = Link(url, name="test")
        self.batcher = BatcherStore(self.link, KEYS)
        self.batcher.kind = ModelKind.STEPPING
        self.worker = WorkerStore(self.link, KEYS)
        self.steps = StepStore(self.link, KEYS, RedisClock())
        self.worker.register({"max_batch_size": 8})

    def close(self) -> None:
        self.redis.config_set("maxmemory", 0)
        self.redis.close()
        self.link.close()

    def dispatched(self, name: str = "r", *, ttl_ms: int = 60_000, **fields: Any) -> None:
        """A request is dispatched, as the batch of a stepping model."""
        body = {} if "body_key" in fields else {"body": "1"}
        fields = {"correlation_id": name, "stream": 1, **body, **fields}
        entry_id = self.redis.xadd(KEYS.requests, fields)
        _, (run,) = decode_entry(entry_id, flat_of(fields), ModelSettings())
        assert isinstance(run, Run)
        self.batcher.dispatch(
            [Dispatch([run], "full", "")], ttl_ms, (), ModelSettings().for_workers(ModelKind.STEPPING)
        )

    def fetched(self, consumer: str = "w") -> Batch:
        self.worker.start_fetch(consumer, 1000)
        (batch,) = self.worker.finish_fetch()
        return batch

    def batch(self, name: str = "r", **fields: Any) -> Batch:
        self.dispatched(name, **fields)
        return self.fetched()

    def write(self, *writes: StepWrite, consumer: str = "w") -> list[tuple[str, int]]:
        return [(state, unread) for state, unread in self.steps.write(consumer, writes)]

    def listed(self, name: str = "r") -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.redis.lrange(KEYS.result(name), 0, -1)]

    def replies(self, name: str) -> list[list[dict[str, Any]]]:
        """What each entry of a reply stream has."""
        entries = self.redis.xrange(KEYS.replies(name))
        return [msgpack.unpackb(fields[b"results"]) for _, fields in entries]

    def progress(self, batch: Batch) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.redis.hgetall(KEYS.progress(batch.id))
        return found

    def reclaimed(self, consumer: str = "other", lease_ms: int = 0) -> Reclaimed | None:
        return self.worker.reclaim(consumer, lease_ms)

    def state(self) -> dict[bytes, Any]:
        """Everything in Redis."""
        return {key: self.redis.dump(key) for key in self.redis.scan_iter("*")}


@pytest.fixture
def model(servers: Callable[[Path], EmbeddedRedis], server: Path) -> Iterator[Model]:
    model = Model(servers(server).url)
    yield model
    model.close()


def chunk(index: int, text: str, name: str = "r") -> KeptChunk:
    return KeptChunk(Chunk(name, JSON, json.dumps(text).encode(), index), msgpack.packb([text]))


def chunks(written: int, *texts: str, name: str = "r") -> list[KeptChunk]:
    return [chunk(written + at, text, name) for at, text in enumerate(texts)]


def result(name: str = "r", index: int | None = None, text: str = "whole") -> Result:
    return Result(name, OK, JSON, json.dumps(text).encode(), index=index)


def of_list(found: list[dict[str, Any]]) -> list[tuple[bool, Any, Any]]:
    return [(each["final"], each.get("index"), each.get("body")) for each in found]


# --- chunks, once ------------------------------------------------------------------------------------------


def test_chunks_and_result_are_written_and_nothing_else_is_left(model: Model) -> None:
    batch = model.batch()
    assert model.write(StepWrite(batch, 0, chunks(0, "a", "b"), first_us=70)) == [("WRITTEN", 2)]
    assert model.progress(batch) == {
        b"chunks": b"2",
        b"first_us": b"70",
        b"chunk:0": msgpack.packb(["a"]),
        b"chunk:1": msgpack.packb(["b"]),
    }
    assert model.write(StepWrite(batch, 2)) == [("WRITTEN", 2)]
    write = StepWrite(batch, 2, chunks(2, "c"), result=result(index=3), compute_us=5, waited_us=6)
    assert model.write(write) == [("WRITTEN", 4)]
    assert of_list(model.listed()) == [
        (False, 0, "a"),
        (False, 1, "b"),
        (False, 2, "c"),
        (True, 3, "whole"),
    ]
    ((_, settled),) = [entry for entry in model.redis.xrange(KEYS.settled) if b"batch" in entry[1]]
    assert (settled[b"batch"], settled[b"size"], settled[b"compute_us"]) == (batch.id.encode(), b"1", b"5")
    assert model.redis.xlen(KEYS.batches) == model.redis.exists(KEYS.progress(batch.id)) == 0
    assert 0 < model.redis.pttl(KEYS.result("r")) <= 60_000


def test_repeated_call_changes_nothing(model: Model) -> None:
    """As after a lost reply: of chunks, and of a result, after which the batch is gone."""
    batch = model.batch()
    write = StepWrite(batch, 0, chunks(0, "a", "b"), first_us=70)
    model.write(write)
    before = model.state()
    for _ in range(3):
        assert model.write(write) == [("WRITTEN", 2)]
    assert model.state() == before
    last = StepWrite(batch, 2, chunks(2, "c"), result=result(index=3))
    model.write(last)
    before = model.state()
    assert model.write(last) == [("FENCED", 4)]
    assert model.state() == before


def test_result_after_chunks_whose_reply_was_lost_writes_these_once(model: Model) -> None:
    batch = model.batch()
    model.write(StepWrite(batch, 0, chunks(0, "a")))
    assert model.write(StepWrite(batch, 0, chunks(0, "a"), result=result(index=1))) == [("WRITTEN", 2)]
    assert of_list(model.listed()) == [(False, 0, "a"), (True, 1, "whole")]


@pytest.mark.parametrize("written", [0, 1, 3, 4])
def test_another_number_of_chunks_is_a_mismatch(model: Model, written: int) -> None:
    """Two chunks are written. The caller believes otherwise, because Redis lost some, or has another's."""
    batch = model.batch()
    model.write(StepWrite(batch, 0, chunks(0, "a", "b")))
    before = model.state()
    write = StepWrite(batch, written, chunks(written, *"cdefg"), result=result(index=9))
    assert model.write(write)[0][0] == "MISMATCH"
    assert model.state() == before
    assert model.steps.chunks([batch.id]) == [[msgpack.packb(["a"]), msgpack.packb(["b"])]]


def test_batcher_counts_the_chunks_of_streams_in_flight(model: Model) -> None:
    """Also if a user made the progress of one something else."""
    first, second, third = model.batch("a"), model.batch("b"), model.batch("c")
    model.write(StepWrite(first, 0, chunks(0, "a", "b")))
    model.redis.set(KEYS.progress(third.id), "chunks")
    assert model.batcher.chunks_written([first.id, second.id, third.id, "1-0"]) == {first.id: 2}
    model.redis.hset(KEYS.progress(second.id), "chunks", "many")
    assert model.batcher.chunks_written([first.id, second.id]) == {first.id: 2}


def test_many_chunks_are_kept_in_their_order(model: Model) -> None:
    batch = model.batch()
    for written in range(0, 300, 60):
        model.write(StepWrite(batch, written, chunks(written, *map(str, range(written, written + 60)))))
    (kept,) = model.steps.chunks([batch.id])
    assert [msgpack.unpackb(each)[0] for each in kept] == list(map(str, range(300)))
    assert [each["index"] for each in model.listed()] == list(range(300))


def test_one_request_does_not_disturb_the_others(model: Model) -> None:
    """In one call: written, fenced, answered, mismatched and ended."""
    batches = {name: model.batch(name) for name in ("goes_on", "fenced", "answered", "mismatch", "ends")}
    fenced = batches["fenced"]
    model.redis.xclaim(KEYS.batches, "workers", "other", 0, [fenced.id])
    answer(model, batches["answered"])
    replies = model.write(
        *(
            StepWrite(
                batch,
                int(name == "mismatch"),
                chunks(0, "a", name=name),
                result=result(name, 1) if name in ("ends", "fenced", "answered") else None,
            )
            for name, batch in batches.items()
        )
    )
    assert replies == [("WRITTEN", 1), ("FENCED", 0), ("ANSWERED", 1), ("MISMATCH", 0), ("WRITTEN", 2)]
    assert [entry_id.decode() for entry_id, _ in model.redis.xrange(KEYS.batches)] == [
        batches[name].id for name in ("goes_on", "fenced", "mismatch")
    ]


# --- owners ------------------------------------------------------------------------------------------------


def test_only_the_owner_of_this_epoch_writes(model: Model) -> None:
    batch = model.batch()
    model.write(StepWrite(batch, 0, chunks(0, "a")))
    reclaimed = model.reclaimed()
    assert reclaimed is not None
    assert (reclaimed.batch.epoch, reclaimed.progress.chunks) == (2, [msgpack.packb(["a"])])
    before = model.state()
    for consumer, each in (("w", batch), ("w", reclaimed.batch), ("other", batch)):
        write = StepWrite(each, 1, chunks(1, "b"), result=result(index=2))
        assert model.write(write, consumer=consumer) == [("FENCED", 1)]
        with pytest.raises(FencedError):
            model.steps.record_start(consumer, each, 1)
    assert model.state() == before
    assert model.write(StepWrite(reclaimed.batch, 1, chunks(1, "b")), consumer="other") == [("WRITTEN", 2)]


def test_after_redis_was_emptied_the_group_is_missing(model: Model) -> None:
    batch = model.batch()
    model.redis.flushall()
    with pytest.raises(CommandError) as raised:
        model.write(StepWrite(batch, 0, chunks(0, "a")))
    assert raised.value.code == "NOGROUP"
    model.worker.register({"max_batch_size": 8})
    assert model.write(StepWrite(batch, 0, chunks(0, "a"))) == [("FENCED", 0)]
    assert model.listed() == []


def answer(model: Model, batch: Batch) -> None:
    """A batcher answers it, as it does when it was withdrawn."""
    (run,) = batch.runs
    cancelled = Result(run.correlation_ids[0], CANCELLED, JSON, detail="withdrawn")
    assert model.batcher.answer_in_flight(batch.id, [Answer(0, Address(None, None), cancelled)], 60_000) == {
        0
    }


def test_answered_request_is_removed_and_gets_no_second_result(model: Model) -> None:
    body = b'"' + b"x" * 99 + b'"'
    model.redis.set(KEYS.body("stored"), body)
    batch = model.batch(body_key="stored", body_bytes=len(body))
    assert model.worker.load(batch).failures == {}
    model.write(StepWrite(batch, 0, chunks(0, "a")))
    answer(model, batch)
    assert model.write(StepWrite(batch, 1, chunks(1, "b"), result=result(index=2))) == [("ANSWERED", 2)]
    assert [each["status"] for each in model.listed()] == [OK, CANCELLED]
    assert not model.redis.exists(KEYS.progress(batch.id), KEYS.body("stored"), "never")
    assert model.redis.xlen(KEYS.batches) == 0


def test_dead_letter_is_written_with_the_result(model: Model) -> None:
    batch = model.batch()
    letter = DeadLetter(batch.requests[0], "it died", 2)
    model.write(StepWrite(batch, 0, result=Result("r", "ABORTED", detail="it died"), dead_letter=letter))
    ((_, fields),) = model.redis.xrange(KEYS.dead)
    assert (fields[b"correlation_id"], fields[b"attempts"]) == (b"r", b"2")


# --- starts ------------------------------------------------------------------------------------------------


def test_starts_count_until_one_is_survived(model: Model) -> None:
    """So a request that goes on for days is not blamed for the deaths of many workers."""
    batch = model.batch()
    for starts in (1, 1, 2):  # the reply to the first one was lost
        model.steps.record_start("w", batch, starts)
        assert model.progress(batch)[b"started:0"] == b"%d" % starts
    assert model.write(StepWrite(batch, 0, chunks(0, "a"), has_passed=True)) == [("WRITTEN", 1)]
    assert b"started:0" not in model.progress(batch)
    model.steps.record_start("w", batch, 1)
    assert model.write(StepWrite(batch, 1, has_passed=True)) == [("WRITTEN", 1)]
    reclaimed = model.reclaimed()
    assert reclaimed is not None and reclaimed.progress.started == {}


# --- full memory -------------------------------------------------------------------------------------------


def test_when_memory_is_full_chunks_are_rejected_and_nothing_else_is_written(model: Model) -> None:
    going, ending = model.batch("going"), model.batch("ending")
    model.write(StepWrite(ending, 0, chunks(0, "a", name="ending")))
    model.redis.config_set("maxmemory", 1)
    before = model.state()
    end = StepWrite(ending, 1, chunks(1, "b", name="ending"), result=result("ending", 2))
    with pytest.raises(CommandError) as raised:
        model.write(end, StepWrite(going, 0, chunks(0, "a", name="going"), has_passed=True))
    assert raised.value.code == "OOM"
    assert model.state() == before
    # Then what ends is accepted, with its last chunks
    assert model.write(end, StepWrite(going, 0)) == [("WRITTEN", 3), ("WRITTEN", 0)]
    assert of_list(model.listed("ending")) == [(False, 0, "a"), (False, 1, "b"), (True, 2, "whole")]
    model.steps.record_start("w", going, 1)
    assert model.steps.hand_over("w", [(going.id, going.epoch)]) == 1
    assert model.reclaimed() is not None


# --- readers -----------------------------------------------------------------------------------------------


def test_one_entry_carries_the_chunks_of_all_requests_of_a_reply_stream(model: Model) -> None:
    names = [f"r{number}" for number in range(40)]
    batches = [model.batch(name, reply_to="near" if at % 2 else "far") for at, name in enumerate(names)]
    writes = [
        StepWrite(batch, 0, chunks(0, "a", "b", name=name))
        for name, batch in zip(names, batches, strict=True)
    ]
    writes[1] = writes[1]._replace(result=result("r1", 2))
    assert model.write(*writes) == [("WRITTEN", 1)] * 40
    for stream, first in (("far", 0), ("near", 1)):
        (entry,) = model.replies(stream)
        expected = [(name, index) for name in names[first::2] for index in (0, 1)]
        found = [(each["correlation_id"], each["index"]) for each in entry if not each["final"]]
        assert sorted(found) == sorted(expected)
        for name in names[first::2]:
            assert [each["index"] for each in entry if each["correlation_id"] == name][:2] == [0, 1]
    assert entry[-1]["final"], "the result comes after its chunks"
    assert 0 < model.redis.pttl(KEYS.replies("near")) <= 60_000


def test_unread_is_what_the_list_and_the_stream_hold(model: Model) -> None:
    listed, streamed = model.batch("listed"), model.batch("streamed", reply_to="near")
    for written in range(3):
        model.write(
            StepWrite(listed, written, chunks(written, "a", name="listed")),
            StepWrite(streamed, written, chunks(written, "a", name="streamed")),
        )
    model.redis.lpop(KEYS.result("listed"))
    assert model.write(StepWrite(listed, 3), StepWrite(streamed, 3)) == [("WRITTEN", 2), ("WRITTEN", 3)]
    model.redis.xtrim(KEYS.replies("near"), maxlen=0, approximate=False)
    assert model.write(StepWrite(streamed, 3)) == [("WRITTEN", 0)]


@pytest.mark.parametrize("reply_to", [None, "near"])
def test_key_of_another_type_costs_only_its_own_producer(model: Model, reply_to: str | None) -> None:
    fields = {} if reply_to is None else {"reply_to": reply_to}
    broken, other = model.batch("broken", **fields), model.batch("other")
    key = KEYS.result("broken") if reply_to is None else KEYS.replies(reply_to)
    model.redis.set(key, "mine")
    replies = model.write(
        StepWrite(broken, 0, chunks(0, "a", name="broken")),
        StepWrite(other, 0, chunks(0, "a", name="other")),
    )
    assert replies == [("WRITTEN", 0), ("WRITTEN", 1)]
    assert model.write(StepWrite(broken, 1, result=result("broken", 1))) == [("WRITTEN", 0)]
    assert (model.redis.get(key), len(model.listed("other"))) == (b"mine", 1)


def test_each_chunk_renews_the_list(model: Model) -> None:
    batch = model.batch(ttl_ms=40_000)
    model.write(StepWrite(batch, 0, chunks(0, "a")))
    model.redis.pexpire(KEYS.result("r"), 5000)
    model.write(StepWrite(batch, 1, chunks(1, "b")))
    assert 5000 < model.redis.pttl(KEYS.result("r")) <= 40_000


def test_script_is_sent_again_where_redis_has_forgotten_it(model: Model) -> None:
    batch = model.batch()
    for written in range(3):
        model.redis.script_flush()
        assert model.write(StepWrite(batch, written, chunks(written, "a"))) == [("WRITTEN", written + 1)]


# --- hand over ---------------------------------------------------------------------------------------------


def test_handed_over_batch_is_reclaimed_at_once_at_its_epoch(model: Model) -> None:
    """So often that its delivery count would have made it a suspect, and whatever its epoch is."""
    batch = model.batch()
    model.write(StepWrite(batch, 0, chunks(0, "a"), first_us=70))
    owner = "w"
    for turn in range(5):
        assert model.reclaimed(lease_ms=LEASE_MS) is None
        assert model.steps.hand_over(owner, [(batch.id, batch.epoch)]) == 1
        owner = f"other{turn}"
        reclaimed = model.reclaimed(owner, LEASE_MS)
        assert reclaimed is not None
        assert (reclaimed.batch.epoch, reclaimed.progress.started) == (1, {})
        assert (len(reclaimed.progress.chunks), reclaimed.progress.first_us) == (1, 70)
    assert model.write(StepWrite(batch, 1, chunks(1, "b")), consumer="w") == [("FENCED", 1)]
    second = model.reclaimed("last", 0)
    assert second is not None and second.batch.epoch == 2
    model.steps.hand_over("last", [(batch.id, 2)])
    third = model.reclaimed("other", LEASE_MS)
    assert third is not None and third.batch.epoch == 2


def test_only_what_is_owned_is_handed_over(model: Model) -> None:
    mine, theirs, gone = model.batch("mine"), model.batch("theirs"), model.batch("gone")
    model.redis.xclaim(KEYS.batches, "workers", "other", 0, [theirs.id])
    model.write(StepWrite(gone, 0, result=result("gone", 0)))
    batches = [(batch.id, batch.epoch) for batch in (mine, theirs, gone)]
    assert model.steps.hand_over("w", batches) == 1
    assert model.steps.hand_over("w", batches) == 0, "repeated after a lost reply"
    (first,) = model.redis.xpending_range(KEYS.batches, "workers", "-", "+", 9, consumername="other")
    assert first["message_id"].decode() == theirs.id


def test_handed_over_batch_whose_entry_was_deleted_is_forgotten(model: Model) -> None:
    batch = model.batch()
    model.redis.xdel(KEYS.batches, batch.id)
    model.steps.hand_over("w", [(batch.id, batch.epoch)])
    assert model.reclaimed("other", LEASE_MS) is None
    assert model.redis.xpending(KEYS.batches, "workers")["pending"] == 0
