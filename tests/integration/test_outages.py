"""What may happen to Redis under load, on every server: nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError

from carpool import AsyncClient
from carpool.errors import ResourceExhaustedError
from support.checker import Checker
from support.load import Load, settled
from support.stack import Stack, fixed_keys
from support.waiting import wait_until

MODEL = "Hashing"
ECHO = "Echo"
LEASE = ("--lease-ms", "600")


@pytest.fixture
def stack(stack_on: Stack) -> Stack:
    """A batcher and a worker, on every server in turn."""
    stack_on.batcher()
    stack_on.worker("hashing.py:Hashing", *LEASE)
    stack_on.wait_for_model(MODEL)
    return stack_on


def kill_connections(stack: Stack) -> int:
    """CLIENT KILL of every connection but the one that says it; how many there were."""
    killed: int = stack.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return killed


def assert_at_rest(stack: Stack) -> None:
    assert stack.pending(MODEL) == 0
    assert stack.keys_without_ttl() <= fixed_keys(MODEL)
    assert all(service.alive for service in stack.services)


def test_every_connection_is_cut_again_and_again(stack: Stack) -> None:
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        for _ in range(5):
            assert kill_connections(stack) >= 4
            load.wait_for_more(60)

    report = settled(stack, MODEL, checker)

    assert report.faultless, report
    assert report.error == 0
    assert_at_rest(stack)


async def test_a_client_whose_connections_are_cut_gets_every_result(stack: Stack) -> None:
    """Given a client with 64 requests in flight, when it is cut off again and again, every result comes."""
    results: list[str] = []
    stop = threading.Event()

    def cut() -> int:
        cuts = 0
        while not stop.is_set():
            seen = len(results)
            wait_until(lambda: len(results) > seen + 40 or stop.is_set(), description="more results came")  # noqa: B023
            kill_connections(stack)
            cuts += 1
        return cuts

    bodies = [f"body {number}" for number in range(1500)]
    stack.worker("plain.py:Echo", *LEASE)
    async with AsyncClient(stack.url, timeout=20) as client:
        cutting = asyncio.ensure_future(asyncio.to_thread(cut))
        try:
            async for result in client.map(ECHO, bodies, in_flight=64):
                results.append(result)
        finally:
            stop.set()
        cuts = await cutting
    assert results == bodies
    assert cuts > 10


def test_scripts_are_flushed_under_load(stack: Stack) -> None:
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        for _ in range(10):
            stack.redis.script_flush()
            load.wait_for_more(30)

    report = settled(stack, MODEL, checker)

    assert report.faultless, report
    assert report.error == 0
    assert not stack.events("loop failed, retrying"), "an unknown script is sent again at once"
    assert_at_rest(stack)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_redis_restarts_from_its_append_only_file(stack: Stack, end: signal.Signals) -> None:
    """Given Redis under load, when it is shut down or killed, and comes back, expect no loss.

    Against SIGKILL it is told to write before it answers; what `everysec` may lose is in the promise.
    """
    stack.redis.config_set("appendfsync", "always" if end == signal.SIGKILL else "everysec")
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        load.wait_for_more(100)
        os.kill(stack.server.pid, end)
        wait_until(lambda: not stack.server.alive, description="Redis is gone")
        stack.server.restart()
        restarted_s = time.monotonic()
        load.wait_for_more(50)
        asker = stack.send(MODEL, body='"are you there?"')
        stack.result(MODEL, asker)
        print(f"a new request was served {time.monotonic() - restarted_s:.2f} s after the restart")

    report = settled(stack, MODEL, checker)

    assert report.faultless, report
    assert (report.ok > 200, report.error) == (True, 0)
    assert_at_rest(stack)


def test_redis_is_emptied_and_the_stack_serves_again(stack: Stack) -> None:
    """Given load, when somebody empties Redis, expect that only what was in it then is lost."""
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        load.wait_for_more(100)
        stack.redis.flushall()
        emptied_s = time.monotonic()
        load.wait_for_more(50)  # the producer knows by now of all that was accepted before
        before = set(checker.unsettled())
        load.wait_for_more(100)
        asker = stack.send(MODEL, body='"are you there?"')
        stack.result(MODEL, asker)
        print(f"a new request was served {time.monotonic() - emptied_s:.2f} s after FLUSHALL")

    report = settled(stack, MODEL, checker)

    assert before.issuperset(report.lost), set(report.lost) - before
    assert not (report.duplicated or report.misrouted or report.unexpected), report
    assert report.ok > 100
    assert_at_rest(stack)


async def test_a_full_redis_is_emptied(stack: Stack, tmp_path: Path) -> None:
    """Given requests in flight and waiting, when memory is full, all are answered, and no more accepted."""
    gate = tmp_path / "gate"
    stack.worker("plain.py:Single", *LEASE)
    stack.wait_for_model("Single")
    plug = stack.send("Single", body=json.dumps({"gate": str(gate)}), expiration=500)
    names = [stack.send("Single", body=str(number)) for number in range(20)]
    late = stack.send("Single", body="0", expiration=500)

    async with AsyncClient(stack.url) as client:
        await client.models()
        stack.redis.config_set("maxmemory", 1)
        with pytest.raises(ResourceExhaustedError, match="out of memory"):
            await client.infer(MODEL, "more")
        with pytest.raises(OutOfMemoryError):
            stack.send(MODEL, body='"more"')
        for name in (plug, late):  # one in flight, one that waits
            assert stack.result("Single", name)["status"] == "DEADLINE_EXCEEDED"
        gate.touch()
        assert [stack.result("Single", name)["body"] for name in names] == list(range(20))

        stack.redis.config_set("maxmemory", 0)
        assert await client.infer("Single", "again") == "again"
    for sign in ("loop failed, retrying", "batcher starts over", "batch reclaimed", "lease lost"):
        assert not stack.events(sign)
    stack.wait_until_idle("Single")
