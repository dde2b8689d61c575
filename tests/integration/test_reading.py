"""While no process can take a batch, the batcher reads requests together, and not each when it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from redis import Redis

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.worker import WorkerStore
from carpool_batcher import batcher as batcher_module
from carpool_batcher.meter import BatcherMetrics
from carpool_batcher.service import BatcherService
from carpool_cli.local.embedded import EmbeddedRedis
from support.waiting import wait_until

KEYS: Final = Keys("m")
ARRIVED: Final = 5
NEVER_US: Final = 600_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


class Served:
    """A batcher whose loop the test runs, and its model, of which no process is alive: one request waits."""

    def __init__(self, url: str) -> None:
        self.redis: Any = Redis.from_url(url, protocol=2)
        self.redis.flushall()
        link = Link(url, name="test")
        WorkerStore(link, KEYS).register(ModelSettings(max_batch_size=16).as_text())
        link.close()
        self.service = BatcherService(url, DEFAULT_PREFIX, "batcher-under-test", BatcherMetrics(), {})
        self.send()
        self.run_until_waiting(1)

    def send(self) -> None:
        self.redis.xadd(KEYS.requests, {"body": "1"})

    def run_until_waiting(self, count: int) -> None:
        def ran() -> bool:
            self.service.run_once()
            return self.waiting() == count

        wait_until(ran, description=f"{count} requests wait")

    def waiting(self) -> int:
        model = self.service._models.get("m")
        session = None if model is None else model.batcher._session
        return 0 if session is None else session.scheduler.waiting

    def close(self) -> None:
        self.service.stop()
        self.redis.close()


@pytest.fixture
def served(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(batcher_module, "READ_INTERVAL_US_MAX", NEVER_US)
    served = Served(server.url)
    yield served
    served.close()


def test_requests_do_not_wake_the_batcher_while_no_process_can_take_a_batch(served: Served) -> None:
    for _ in range(ARRIVED):
        served.send()
        served.service.run_once()
    assert served.waiting() == 1
    # What arrived is read with the next entry of the stream of what settled
    reading = served.service._models["m"].meter._reading
    times_us = list(reading._times_us)
    served.redis.xadd(KEYS.settled, {"workers": ""})
    served.run_until_waiting(1 + ARRIVED)
    assert list(reading._times_us) == times_us, "what it left unread counts as the time that reading takes"


def test_requests_are_read_together_now_and_then(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have to be refused."""
    monkeypatch.setattr(batcher_module, "READ_INTERVAL_US_MAX", 1000)
    served.run_until_waiting(1)
    for _ in range(ARRIVED):
        served.send()
    served.run_until_waiting(1 + ARRIVED)


def test_requests_are_read_once_a_process_can_take_a_batch(served: Served) -> None:
    served.send()
    link = Link(served.service._url, name="test")
    WorkerStore(link, KEYS).join("worker", 600_000)
    link.close()
    served.run_until_waiting(0)
    assert served.redis.xlen(KEYS.batches) >= 1


def test_entries_that_do_not_fit_into_one_reply_are_read_at_once(server: EmbeddedRedis) -> None:
    """Given a long queue, expect that the batcher does not pause while it reads that."""
    served = Served(server.url)
    waiting = 1000
    for _ in range(waiting):
        served.send()
    batcher = served.service._models["m"].batcher

    def has_more() -> bool:
        served.service.run_once()
        return batcher.subscription.has_more

    wait_until(has_more, description="there is more")
    assert batcher.reads_at_us == 0
    served.run_until_waiting(1 + waiting)
    served.close()
