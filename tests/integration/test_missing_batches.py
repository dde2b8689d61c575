"""Batches in flight that are missing in a real Redis: deleted, or committed a moment ago."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry, Run
from carpool.model_settings import ModelSettings
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import SETTLED_UNREAD_US, MissingBatches
from carpool_cli.local.embedded import EmbeddedRedis
from support.scheduler_harness import settle

LONG_US: Final = 10 * SETTLED_UNREAD_US  # how long a batch is executed
DELETED: Final = "9-0"
NOTHING_READ: Final = b"0-0"  # of `settled`


@pytest.fixture
def link() -> Iterator[Link]:
    with EmbeddedRedis(append_only=False) as server:
        link = Link(server.url, name="test")
        yield link
        link.close()


@pytest.fixture
def store(link: Link) -> BatcherStore:
    return BatcherStore(link, Keys("m"))


@pytest.fixture
def scheduler(link: Link, store: BatcherStore) -> Scheduler:
    """It knows two batches in flight, of which one is in Redis."""
    scheduler = Scheduler(ModelSettings(), 2)
    kept = link.call("XADD", store.keys.batches, "*", "size", 1).decode()
    for batch_id in (DELETED, kept):
        scheduler.in_flight.adopt(batch_id, Dispatch([Run(Entry("1-1", 0), ["r"], [])], "idle", ""), 0)
    return scheduler


def test_long_batch_that_is_committed_is_settled_by_its_entry(
    store: BatcherStore, scheduler: Scheduler
) -> None:
    """Given a batch that is found to be missing before its entry is read, expect its time to be learned."""
    missing = MissingBatches()
    missing.forget(store, scheduler, 1, NOTHING_READ, LONG_US)
    missing.forget(store, scheduler, 1, NOTHING_READ, LONG_US + SETTLED_UNREAD_US - 1)
    settle(scheduler, DELETED, LONG_US - 1000, LONG_US)
    assert scheduler.learned.latency.of(1) == LONG_US - 1000


def test_deleted_batch_is_forgotten_after_a_second(store: BatcherStore, scheduler: Scheduler) -> None:
    missing = MissingBatches()
    missing.forget(store, scheduler, 1, NOTHING_READ, LONG_US)
    missing.forget(store, scheduler, 1, NOTHING_READ, LONG_US + SETTLED_UNREAD_US)
    assert DELETED not in scheduler.in_flight.batches
    assert len(scheduler.in_flight.batches) == 1
    assert not scheduler.learned.latency.known


def test_batch_that_is_in_redis_again_is_not_missing(store: BatcherStore, scheduler: Scheduler) -> None:
    """Given a look at which as many batches are in Redis as are known, the second begins anew."""
    missing = MissingBatches()
    for batches_in_flight, after_us in ((1, 0), (2, 1), (1, 2)):
        now_us = LONG_US + after_us * SETTLED_UNREAD_US
        missing.forget(store, scheduler, batches_in_flight, NOTHING_READ, now_us)
    assert DELETED in scheduler.in_flight.batches


def test_batch_is_not_missing_as_long_as_its_settled_entry_may_be_unread(
    link: Link, store: BatcherStore, scheduler: Scheduler
) -> None:
    """Given a batcher that stood still for a long time after it found a batch to be missing, expect that it
    reads `settled` first."""
    settled_id = link.call("XADD", store.keys.settled, "*", "batch", DELETED)
    missing = MissingBatches()
    missing.forget(store, scheduler, 1, NOTHING_READ, LONG_US)
    missing.forget(store, scheduler, 1, NOTHING_READ, 2 * LONG_US)
    assert DELETED in scheduler.in_flight.batches
    missing.forget(store, scheduler, 1, settled_id, 2 * LONG_US)
    assert DELETED not in scheduler.in_flight.batches
