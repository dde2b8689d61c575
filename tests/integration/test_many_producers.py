"""Ten thousand requests from fifty producers at once: each gets its own result, and no request remains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

import pytest

from carpool import AsyncClient
from carpool.keys import Keys
from conftest import SERVERS, name_of
from support.checker import Checker
from support.load import collect, decoded, entries
from support.models.hashing import Hashing
from support.redis_client import redis_at
from support.stack import Stack, envelope
from support.waiting import wait_until

MODEL: Final = "Hashing"
PRODUCERS: Final = 25  # of each kind
REQUESTS: Final = 200  # of each producer
ENTRIES_PER_TURN: Final = 20


@pytest.fixture(params=SERVERS, ids=name_of)
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, binary=request.param) as stack:
        stack.batcher()
        workers = [stack.worker("hashing.py:Hashing", ready=False) for _ in range(2)]
        for worker in workers:
            worker.wait_for("worker ready")
        stack.wait_for_model(MODEL, workers=2)
        yield stack


async def produce_with_client(url: str, checker: Checker, name: str) -> None:
    """A producer in Python: one AsyncClient with 50 requests in flight."""
    limit = asyncio.Semaphore(50)

    async def send(number: int) -> None:
        correlation_id, payload = f"{name}-{number}", f"payload {number}"
        async with limit:
            checker.attempt(correlation_id, payload)
            value = await client.infer(MODEL, payload, correlation_id=correlation_id)
            checker.accept(correlation_id)
            checker.envelope(
                correlation_id,
                {"correlation_id": correlation_id, "status": "OK", "body": value, "final": True},
            )

    async with AsyncClient(url, timeout=60) as client:
        await asyncio.gather(*map(send, range(REQUESTS)))


def produce_with_redis_only(url: str, checker: Checker, name: str) -> None:
    """A producer in any language: XADD, then BLPOP or its reply stream, ENTRIES_PER_TURN at a time."""
    keys = Keys(MODEL)
    sent = 0
    redis = redis_at(url, protocol=2)
    with redis:
        source = entries(name)
        while sent < REQUESTS:
            turn = list(islice(source, ENTRIES_PER_TURN))
            pipeline = redis.pipeline(transaction=False)
            for fields, payloads in turn:
                for correlation_id, payload in payloads.items():
                    checker.attempt(correlation_id, payload)
                pipeline.xadd(keys.requests, fields)
            pipeline.execute()
            for fields, payloads in turn:
                sent += len(payloads)
                for correlation_id in payloads:
                    checker.accept(correlation_id)
                    if "reply_to" not in fields:
                        found = redis.blpop([keys.result(correlation_id)], 60)
                        assert found is not None, f"no result for {correlation_id}"
                        checker.envelope(correlation_id, decoded(envelope(found[1])))


async def test_fifty_producers_ten_thousand_requests(stack: Stack) -> None:
    checker = Checker()
    with ThreadPoolExecutor(PRODUCERS) as threads:
        loop = asyncio.get_running_loop()
        plain = [
            loop.run_in_executor(threads, produce_with_redis_only, stack.url, checker, f"plain-{number}")
            for number in range(PRODUCERS)
        ]
        clients = [produce_with_client(stack.url, checker, f"client-{number}") for number in range(PRODUCERS)]
        await asyncio.gather(*plain, *clients)
    stack.wait_until_idle(MODEL)
    collect(stack, MODEL, checker, "plain-*")  # reply streams, and duplicate results if there are any

    report = checker.report()
    assert report.faultless, report
    assert report.attempted >= 2 * PRODUCERS * REQUESTS
    assert report.ok == report.accepted == report.attempted

    # Expect: every batch within the limit, and every request executed once
    wait_until(
        lambda: sum(batch["size"] for batch in stack.events("batch")) >= report.ok,
        description="the workers have logged every request",
    )
    batches = stack.events("batch")
    assert sum(batch["size"] for batch in batches) == report.ok
    assert max(batch["size"] for batch in batches) <= Hashing.max_batch_size
    assert {batch["epoch"] for batch in batches} == {1}
    assert len({batch["replica"] for batch in batches}) == 2
    assert report.ok / len(batches) > 4, "fifty producers share batches"

    # Expect: nothing waits, is in flight or pending, and only the keys that PROTOCOL.md lists have no TTL
    assert stack.redis.xlen("carpool:{Hashing}:requests") == 0
    assert stack.redis.xlen("carpool:{Hashing}:batches") == 0
    assert stack.pending(MODEL) == 0
    assert stack.keys_without_ttl() == {
        "carpool:models",
        "carpool:{Hashing}:model",
        "carpool:{Hashing}:workers",
        "carpool:{Hashing}:requests",
        "carpool:{Hashing}:batches",
        "carpool:{Hashing}:settled",
        "carpool:{Hashing}:stats",
    }
    for service in stack.services:
        assert service.alive
        assert not [event for event in service.events() if event["level"] not in ("info", "debug")]
