"""Delayed requests (`not_before`) on a real Redis: never early, and also not after a batcher died."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, Final

import pytest

from carpool import AsyncClient, Client
from carpool.errors import InvalidArgumentError
from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.worker import WorkerStore
from carpool_cli.local.embedded import EmbeddedRedis
from conftest import SERVERS
from support.command import carpool
from support.proxy import Proxy
from support.redis_client import redis_at
from support.stack import Stack
from support.waiting import Stopwatch, wait_until

MODEL = "square"
KEYS = Keys(MODEL)
PATIENT_S: Final = 60  # longer than a server takes to be replaced


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module."""
    stack = stacks(SERVERS[0])
    stack.serve(MODEL)
    return stack


def answered_after_ms(stack: Stack, correlation_id: str, entry_id: str) -> int:
    """How long after its acceptance a request was answered, by Redis's clock."""
    result = stack.result(MODEL, correlation_id)
    assert result["status"] == "OK", result
    return since_ms(stack, entry_id)


def since_ms(stack: Stack, entry_id: str) -> int:
    """How long ago a request was accepted, by Redis's clock."""
    seconds, microseconds = stack.redis.time()
    return int(seconds * 1000 + microseconds // 1000) - int(entry_id.partition("-")[0])


def test_delayed_request_waits_while_others_are_served(stack: Stack) -> None:
    delayed = stack.send(MODEL, body="3", not_before=1500)
    stack.send(MODEL, body="3", correlation_id="waits", not_before=3_600_000)
    for number in range(5):
        prompt = stack.send(MODEL, body=number)
        assert stack.result(MODEL, prompt)["body"] == number * number
    assert answered_after_ms(stack, delayed, delayed) >= 1500
    assert stack.redis.xlen(KEYS.requests) == 1
    stack.send(MODEL, withdraw="waits")
    assert stack.result(MODEL, "waits")["status"] == "CANCELLED"


def test_time_before_that_is_not_a_wait(stack: Stack) -> None:
    entry_id = stack.send(MODEL, body="3", not_before=1000)
    result = stack.result(MODEL, entry_id)
    assert result["body"] == 9
    assert 1000 + result["queue_us"] // 1000 <= since_ms(stack, entry_id)


def test_next_batcher_keeps_the_time(stack: Stack) -> None:
    """Given one that dispatched a part of an entry, and so put the delayed rest back."""
    packed: list[dict[str, Any]] = [
        {"correlation_id": "prompt", "body": b"2"},
        {"correlation_id": "delayed", "body": b"3", "not_before": 4000, "expiration": 60_000},
    ]
    entry_id = stack.send_packed(MODEL, packed)
    assert stack.result(MODEL, "prompt")["body"] == 4
    ((_, fields),) = stack.redis.xrange(KEYS.requests)
    assert fields[b"arrival"] == entry_id.partition("-")[0].encode()
    stack.active_batcher(MODEL).kill()
    stack.batcher()
    assert answered_after_ms(stack, "delayed", entry_id) >= 4000


def test_delayed_request_can_be_withdrawn(stack: Stack) -> None:
    stack.send(MODEL, body="3", correlation_id="unwanted", not_before=3_600_000)
    removed = stack.send(MODEL, body="3", not_before=3_600_000)
    stack.send(MODEL, withdraw="unwanted")
    assert stack.result(MODEL, "unwanted")["status"] == "CANCELLED"
    assert stack.redis.xdel(KEYS.requests, removed) == 1
    wait_until(lambda: not stack.redis.xlen(KEYS.requests), description="nothing waits")


def test_delayed_requests_leave_space_for_others(stack: Stack) -> None:
    """Given as many as the queue takes, expect those over their share to be refused, and others to be served.
    Commands count requests, and not the entries that hold them."""
    stack.configure(MODEL, max_queue_size="10")
    ids = " ".join(f"late-{number}" for number in range(10))
    stack.send(MODEL, correlation_ids=ids, rows=b"1" * 10, not_before=3_600_000, reply_to="late")
    wait_until(lambda: len(stack.replies(MODEL, "late")) == 5, description="those over the share are refused")
    for reply in stack.replies(MODEL, "late"):
        assert reply["status"] == "RESOURCE_EXHAUSTED"
        assert "max_delayed_share" in reply["detail"]
    for priority in (4, 9):
        prompt = stack.send(MODEL, body="3", priority=priority)
        assert stack.result(MODEL, prompt)["status"] == "OK"

    def listed() -> tuple[int, int]:
        (row,) = json.loads(carpool(stack.url, "models", "--json").stdout)
        return row["waiting"], row["delayed"]

    wait_until(lambda: listed() == (5, 5), description="they are listed")
    assert "5, 5 delayed" in carpool(stack.url, "models").stdout
    stack.send(MODEL, withdraw=ids)
    wait_until(lambda: not stack.redis.xlen(KEYS.requests), description="nothing waits")
    stack.configure(MODEL, max_queue_size="10000")


def test_request_that_expires_before_its_time_is_served_behind_all_others(stack: Stack) -> None:
    """Where expired requests are executed. Only who writes `arrival`, as batchers do, can send one."""
    stack.configure(MODEL, expiration_action="delay")
    early = stack.send(MODEL, body="3", arrival=1, not_before=1000, expiration=2000)
    assert answered_after_ms(stack, early, early) >= 1000
    assert not stack.events("batcher failed, starting over")
    stack.configure(MODEL, expiration_action="reject")


async def test_clients_delay_requests(stack: Stack) -> None:
    async with AsyncClient(stack.url, timeout=15) as client:
        started_s = time.monotonic()
        assert await client.infer(MODEL, 7, not_before=0.5) == 49
        assert time.monotonic() - started_s >= 0.5
        assert await client.infer(MODEL, 7, not_before=0) == 49
        for not_before in (15, 60.0, -1, float("nan"), "soon"):
            with pytest.raises(InvalidArgumentError, match="not_before: "):
                await client.infer(MODEL, 7, not_before=not_before)  # type: ignore[arg-type]


async def test_request_that_is_sent_again_has_what_is_left(server: Path) -> None:
    """Given a server that was replaced by another one, which lacks the request, expect it there with the rest
    of its delay and of its timeout: otherwise it could be delayed until after its producer gave up."""
    with EmbeddedRedis(binary=server) as before, EmbeddedRedis(binary=server) as after:
        redis: list[Any] = [redis_at(one.url, protocol=2) for one in (before, after)]
        for one in (before, after):
            link = Link(one.url, name="test")
            WorkerStore(link, KEYS).register(ModelSettings().as_text())
            link.close()
        with Proxy(before.port) as proxy:
            async with AsyncClient(proxy.url) as client:
                stopwatch = Stopwatch()
                waiting = client.submit(MODEL, 7, not_before=PATIENT_S - 5, timeout=PATIENT_S)
                await asyncio.to_thread(
                    wait_until, lambda: redis[0].xlen(KEYS.requests), description="it waits"
                )
                elapsed_ms = ceil(1000 * stopwatch.elapsed_s)
                proxy.port = after.port
                redis[0].client_kill_filter(_type="normal", skipme=True)
                await asyncio.to_thread(
                    wait_until, lambda: redis[1].xlen(KEYS.requests), description="it waits"
                )
                waiting.cancel()
        (first,), (second,) = [one.xrange(KEYS.requests, count=1) for one in redis]
        times = [
            [int(fields[name]) for name in (b"expiration", b"not_before")] for _, fields in (first, second)
        ]
    assert [expiration - not_before for expiration, not_before in times] == [5000, 5000]
    assert 1000 * PATIENT_S - elapsed_ms <= times[0][0] <= 1000 * PATIENT_S  # it may wait for its model
    assert times[1][0] < times[0][0]


def test_blocking_client_delays_requests(stack: Stack) -> None:
    with Client(stack.url, timeout=15) as client:
        started_s = time.monotonic()
        assert client.infer(MODEL, 7, not_before=0.3) == 49
        assert time.monotonic() - started_s >= 0.3
