"""What the scripts count of results, also where one is executed twice, because its reply was lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, OK
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import JSON, Entry, Run
from carpool.messages.results import Chunk, Refusal, Result, RunResults
from carpool.messages.settled import Executed, Streamed
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link, Script
from carpool.store.results import Address, Answer, FencedError
from carpool.store.steps import KeptChunk, StepStore, StepWrite
from carpool.store.worker import WorkerStore
from carpool.wire.statistics import Durations, ModelStatistics
from carpool_cli.local.embedded import EmbeddedRedis
from support.redis_client import redis_at

KEYS: Final = Keys("m")
TTL_MS: Final = 60_000
AGE_US: Final = 60_000_000  # of the requests; the clocks of stores may differ by less than half of that
AGE_US_MAX: Final = 10 * AGE_US
EXECUTED: Final = Executed(compute_us=700, requests=4, input_us=50, output_us=30)


class Repeating(Link):
    """A connection on which each script is executed twice, as after a lost reply."""

    def run(self, script: Script, keys: Any, args: Any) -> Any:
        reply = super().run(script, keys, args)
        super().run(script, keys, args)
        return reply


class Model:
    """A model's stores, with repeated scripts."""

    def __init__(self, url: str) -> None:
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()
        self.link, self._plain = Repeating(url, name="repeating"), Link(url, name="plain")
        self.worker, self.batcher = WorkerStore(self.link, KEYS), BatcherStore(self.link, KEYS)
        self._dispatcher, self._fetcher = BatcherStore(self._plain, KEYS), WorkerStore(self._plain, KEYS)
        for store in (self.worker, self._fetcher):
            store.read_clock()
        self.batcher.clock = self._dispatcher.clock = self.worker.clock
        self._fetcher.register({"model": "m"})

    def close(self) -> None:
        self.redis.close()
        self.link.close()
        self._plain.close()

    def entry(self, *names: str) -> Run:
        entry_id = self.redis.xadd(KEYS.requests, {"body": "1"}).decode()
        entry = Entry(entry_id, self.now_us() - AGE_US)
        run = Run(entry, [*names], [b"1"] * len(names), arrival_us=entry.arrival_us)
        entry.runs.append(run)
        return run

    def batch(self, *names: str, kind: ModelKind = ModelKind.PLAIN) -> Batch:
        self._dispatcher.kind = kind
        settings = ModelSettings().for_workers(kind) if kind is ModelKind.STEPPING else ""
        self._dispatcher.dispatch([Dispatch([self.entry(*names)], "full", "")], TTL_MS, (), settings)
        self._fetcher.start_fetch("w", 1000)
        (batch,) = self._fetcher.finish_fetch()
        return batch

    def now_us(self) -> int:
        seconds, us = self.redis.time()
        return int(seconds * 1_000_000 + us)

    def commit(self, batch: Batch, statuses: dict[int, str], executed: Executed = EXECUTED) -> None:
        results = {
            position: (Address(None, None), Result(f"r{position}", status, body=b"1", queue_us=100))
            for position, status in statuses.items()
        }
        self.worker.commit("w", batch, results, [], executed)

    def statistics(self) -> ModelStatistics:
        fields = self.redis.hgetall(KEYS.statistics)
        return ModelStatistics.of({name.decode(): value for name, value in fields.items()})


def times(found: ModelStatistics) -> list[tuple[int, ...]]:
    """Of each size: batches, requests, and the times of batches."""
    return [
        (of.size, of.batches, of.requests, of.input_us, of.infer_us, of.output_us) for of in found.batches
    ]


@pytest.fixture
def model(server: Path) -> Iterator[Model]:
    with EmbeddedRedis(append_only=False, binary=server) as redis:
        model = Model(redis.url)
        yield model
        model.close()


def test_a_commit_counts_its_results_once(model: Model) -> None:
    batch = model.batch("r0", "r1", "r2", "r3")
    model.commit(batch, {0: OK, 1: INTERNAL, 2: OK, 3: OK})
    found = model.statistics()
    assert (found.success.number, found.fail.number, found.queue) == (3, 1, Durations(3, 300))
    assert 3 * AGE_US / 2 < found.success.total_us < 3 * AGE_US_MAX
    assert AGE_US / 2 < found.fail.total_us < AGE_US_MAX
    assert times(found) == [(3, 1, 3, 50, 700, 30)]
    assert found.batches[0].weighted_us(700) == 2100
    assert 0 <= model.now_us() - found.last_us < AGE_US_MAX
    with pytest.raises(FencedError):
        model.commit(batch, {0: OK, 1: OK, 2: OK, 3: OK})
    assert model.statistics() == found


def test_runs_and_single_results_count_alike(model: Model) -> None:
    batch = model.batch(*[f"r{at}" for at in range(200)])
    (run,) = batch.runs
    of_run = RunResults(run, range(200), run.correlation_ids, [b"1"] * 200, None, 200, 7, 700)
    model.worker.commit("w", batch, {}, [], EXECUTED, [of_run])
    found = model.statistics()
    assert (found.success.number, found.queue.total_us, found.executions) == (200, 1400, 1)
    assert times(found) == [(256, 1, 200, 50, 700, 30)]  # exact but for its size
    assert found.batches[0].weighted_us(700) == 200 * 700


def test_results_that_are_answered_ahead_count_once(model: Model) -> None:
    """By a batcher, by a worker, and again by that; the commit counts the rest."""
    batch = model.batch("r0", "r1", "r2", "r3")
    expired = Answer(0, Address(None, None), Result("r0", DEADLINE_EXCEEDED), None, 900)
    model.batcher.answer_in_flight(batch.id, [expired], TTL_MS)
    done = Answer(1, Address(None, None), Result("r1", OK, body=b"1", queue_us=100), None, 800)
    for _ in range(2):
        model.worker.answer("w", batch, [expired, done], None, Executed(400, output_us=20))
    found = model.statistics()
    assert (found.success, found.fail) == (Durations(1, 800), Durations(1, 900))
    assert times(found) == [(1, 1, 1, 0, 400, 20)]
    model.commit(batch, {2: OK, 3: OK}, Executed(700, counted_us=400))
    found = model.statistics()
    assert (found.success.number, found.fail.number) == (3, 1)
    assert [(of.size, of.batches, of.infer_us) for of in found.batches] == [(1, 1, 400), (2, 1, 300)]


def test_refusals_count_once_and_only_where_the_entry_was_there(model: Model) -> None:
    run, gone = model.entry("r0", "r1"), model.entry("r2")
    model.redis.xdel(KEYS.requests, gone.entry.id)
    refusals = [
        Refusal(
            of.entry, of.correlation_ids, None, JSON, INVALID_ARGUMENT, "malformed", "priority: wrong", of
        )
        for of in (run, gone)
    ]
    model.batcher.refuse(model.batcher.prepare_refusal(refusals, [], TTL_MS))
    found = model.statistics()
    assert (found.success.number, found.fail.number, found.batches) == (0, 2, [])
    assert AGE_US < found.fail.total_us < 2 * AGE_US_MAX


def test_streams_count_once(model: Model) -> None:
    steps = StepStore(model.link, KEYS, model.worker.clock)
    batch = model.batch("r0", kind=ModelKind.STEPPING)
    chunks = [KeptChunk(Chunk("r0", JSON, b"1", at), msgpack.packb([1])) for at in range(3)]
    streamed = Streamed(3, 40, 60)
    write = StepWrite(
        batch, 0, chunks, 40, Result("r0", OK, body=b"1", queue_us=5), 700, 6, streamed=streamed
    )
    assert [reply.state for reply in steps.write("w", [write])] == ["WRITTEN"]
    failing = model.batch("r1", kind=ModelKind.STEPPING)
    steps.write("w", [StepWrite(failing, 0, result=Result("r1", INTERNAL, detail="x"))])
    found = model.statistics()
    assert (found.success.number, found.fail.number, found.queue) == (1, 1, Durations(1, 5))
    assert times(found) == [(1, 1, 1, 0, 700, 0)]
    assert (found.first_chunks, found.later_chunks) == (Durations(1, 40), Durations(2, 60))


@pytest.mark.parametrize("field", ["", "batches:1", "fail"])
def test_a_key_that_a_user_spoiled_costs_no_result(model: Model, field: str) -> None:
    if field:
        model.redis.hset(KEYS.statistics, field, "no number")
    else:
        model.redis.set(KEYS.statistics, "no hash")
    model.commit(model.batch("r0", "r1"), {0: OK, 1: INTERNAL})
    assert (model.redis.llen(KEYS.result("r0")), model.redis.llen(KEYS.result("r1"))) == (1, 1)
    if field == "batches:1":
        assert model.statistics().requests == 1
