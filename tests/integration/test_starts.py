"""Starts of requests that are executed alone: each is counted once, whatever happens to replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final
from unittest.mock import Mock

import pytest

from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.model_settings import ModelSettings
from carpool.store import results
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link, LinkError
from carpool.store.worker import WorkerStore
from carpool.wire.requests import decode_entry
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker.batch_sources import Reclaimer
from carpool_worker.committer import Committer
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.model_process.frames import DEATHS_MAX
from support.flaky_link import FlakyLink
from support.redis_client import redis_at
from support.wire import flat_of

KEYS: Final = Keys("m")


class Worker:
    """Takes the batch of a dead worker, and starts its requests."""

    def __init__(self, url: str, name: str) -> None:
        self.link = FlakyLink(url, name=name)
        store = WorkerStore(self.link, KEYS)
        member = Member(name)
        self.committer = Committer(member, store, Mock(), Mock())
        self._reclaimer = Reclaimer(member, store, 0, Mock(), 0)

    def reclaim(self) -> Execution:
        execution = self._reclaimer.reclaim_if_due()
        assert execution is not None
        return execution

    def record_start(self, execution: Execution, position: int = 0, *, lost_replies: int = 0) -> None:
        """As its loop does, which repeats what failed."""
        for _ in range(lost_replies):
            self.link.fails_in, self.link.is_carried_out = 0, True
            with pytest.raises(LinkError):
                self.committer.record_start(execution, position)
        self.committer.record_start(execution, position)


@pytest.fixture
def url() -> Iterator[str]:
    with EmbeddedRedis(append_only=False) as server:
        redis = redis_at(server.url, protocol=2)
        link = Link(server.url, name="test")
        worker, batcher = WorkerStore(link, KEYS), BatcherStore(link, KEYS)
        worker.register({"max_batch_size": 8})
        runs: list[Run] = []
        for name in ("r", "s"):
            fields = {"correlation_id": name, "body": json.dumps(1)}
            _, (run,) = decode_entry(redis.xadd(KEYS.requests, fields), flat_of(fields), ModelSettings())
            assert isinstance(run, Run)
            runs.append(run)
        batcher.dispatch([Dispatch(runs, "full", "")], 60_000)
        worker.start_fetch("dead", 1000)
        assert len(worker.finish_fetch()) == 1
        redis.script_load(results._ANSWER.source)  # else the reply that is lost would be that it is unknown
        link.close()
        redis.close()
        yield server.url


def started(url: str, execution: Execution) -> int:
    with redis_at(url, protocol=2) as redis:
        return int(redis.hget(KEYS.progress(execution.batch.id), "started:0") or 0)


def test_a_start_whose_reply_was_lost_counts_once(url: str) -> None:
    """Else a request that ended no process would be given up one death early."""
    worker = Worker(url, "w1")
    execution = worker.reclaim()
    worker.record_start(execution, lost_replies=2)
    assert started(url, execution) == 1
    # Given that this worker dies, too: a worker may die for reasons of its own
    execution = Worker(url, "w2").reclaim()
    assert execution.deaths == {} and not execution.is_given_up(0)


def test_starts_of_several_workers_add_up(url: str) -> None:
    """Also if replies are lost, and if the process of a worker dies of it."""
    for number in range(1, DEATHS_MAX + 2):
        worker = Worker(url, f"w{number}")
        execution = worker.reclaim()
        assert not execution.is_given_up(0)
        worker.record_start(execution, lost_replies=number % 2)
        assert started(url, execution) == number
    execution = Worker(url, "last").reclaim()
    assert execution.is_given_up(0)


def test_each_start_of_one_worker_counts(url: str) -> None:
    """Its processes died of it."""
    worker = Worker(url, "w1")
    execution = worker.reclaim()
    for number in (1, 2):
        worker.record_start(execution, lost_replies=1)
        assert started(url, execution) == number


def test_a_request_is_given_up_and_kept_together(url: str) -> None:
    """Given a worker that gives up a request, and dies of the next one, expect the dead letter all the same:
    its producer must not be told of one that nobody writes."""
    worker = Worker(url, "w1")
    execution = worker.reclaim()
    for _ in range(DEATHS_MAX + 1):
        worker.record_start(execution)
    execution.dead_letter(0)
    worker.record_start(execution, 1)
    with redis_at(url, protocol=2) as redis:
        assert not redis.exists(KEYS.result("r"))
        # Given that this worker dies, too
        worker = Worker(url, "w2")
        execution = worker.reclaim()
        assert execution.is_given_up(0)
        execution.dead_letter(0)
        execution.fail(1, "INTERNAL", "no")
        worker.committer.commit(execution)
        assert redis.exists(KEYS.result("r"))
        assert redis.xlen(KEYS.dead) == 1
