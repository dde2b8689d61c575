"""Outages of Redis under load, on each server: no accepted request is lost."""

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
from carpool.client import transport
from carpool.client.entries import OutgoingEntry
from carpool.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from support.checker import Checker
from support.load import Load, final_report
from support.stack import Stack, fixed_keys
from support.transport import transport_of
from support.waiting import wait_until

MODEL = "Hashing"
ECHO = "Echo"
LEASE = ("--lease-ms", "600")


@pytest.fixture
def stack(stack_on: Stack) -> Stack:
    """A stack with a batcher and a worker, on each server in turn."""
    stack_on.batcher()
    stack_on.worker("hashing.py:Hashing", *LEASE)
    stack_on.wait_for_model(MODEL)
    return stack_on


def kill_connections(stack: Stack) -> int:
    """Close all connections but our own with CLIENT KILL; return their number."""
    killed: int = stack.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return killed


def assert_at_rest(stack: Stack) -> None:
    assert stack.pending(MODEL) == 0
    assert stack.keys_without_ttl() <= fixed_keys(MODEL)
    assert all(service.alive for service in stack.services)


def test_all_connections_are_closed_repeatedly(stack: Stack) -> None:
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        for _ in range(5):
            wait_until(
                lambda: len(stack.redis.client_list()) > 3, description="services have connected again"
            )
            assert kill_connections(stack) >= 3
            load.wait_for_more(60)

    report = final_report(stack, MODEL, checker)

    assert report.faultless, report
    assert report.error == 0
    assert_at_rest(stack)


async def test_client_whose_connections_are_closed_gets_every_result(stack: Stack) -> None:
    """Given a client with 64 requests in flight, when connections are closed, expect all results."""
    results: list[str] = []
    stop = threading.Event()

    def close_repeatedly() -> int:
        rounds = 0
        while not stop.is_set():
            before = len(results)
            wait_until(lambda: len(results) > before + 40 or stop.is_set(), description="40 more results")  # noqa: B023
            kill_connections(stack)
            rounds += 1
        return rounds

    bodies = [f"body {number}" for number in range(1500)]
    stack.worker("plain.py:Echo", *LEASE)
    async with AsyncClient(stack.url, timeout=20) as client:
        closing = asyncio.ensure_future(asyncio.to_thread(close_repeatedly))
        try:
            async for result in client.map(ECHO, bodies, in_flight=64):
                results.append(result)
        finally:
            stop.set()
        rounds = await closing
    assert results == bodies
    assert rounds > 10


def test_scripts_are_flushed_under_load(stack: Stack) -> None:
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        for _ in range(10):
            stack.redis.script_flush()
            load.wait_for_more(30)

    report = final_report(stack, MODEL, checker)

    assert report.faultless, report
    assert report.error == 0
    assert not stack.events("loop failed, retrying"), "an unknown script must be loaded again at once"
    assert_at_rest(stack)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_redis_restarts_from_its_append_only_file(stack: Stack, end: signal.Signals) -> None:
    """Given Redis under load, when it is shut down or killed, and restarts, expect no loss.

    For SIGKILL, Redis must write to the file before it answers; documented losses of `everysec` are excluded.
    """
    stack.redis.config_set("appendfsync", "always" if end == signal.SIGKILL else "everysec")
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        load.wait_for_more(100)
        os.kill(stack.server.pid, end)
        wait_until(lambda: not stack.server.alive, description="Redis has ended")
        stack.server.restart()
        restarted_s = time.monotonic()
        load.wait_for_more(50)
        entry_id = stack.send(MODEL, body='"ping"')
        stack.result(MODEL, entry_id)
        print(f"a new request was served {time.monotonic() - restarted_s:.2f} s after the restart")

    report = final_report(stack, MODEL, checker)

    assert report.faultless, report
    assert (report.ok > 200, report.error) == (True, 0)
    assert_at_rest(stack)


def test_stack_recovers_after_flushall(stack: Stack) -> None:
    """Given load, when Redis is emptied, expect that only the requests in it are lost."""
    checker = Checker()
    with Load(stack, MODEL, checker) as load:
        load.wait_for_more(100)
        stack.redis.flushall()
        flushed_s = time.monotonic()
        load.wait_for_more(50)  # now the producer has recorded all requests accepted before
        before = set(checker.unsettled())
        load.wait_for_more(100)
        entry_id = stack.send(MODEL, body='"ping"')
        stack.result(MODEL, entry_id)
        print(f"a new request was served {time.monotonic() - flushed_s:.2f} s after FLUSHALL")

    report = final_report(stack, MODEL, checker)

    assert before.issuperset(report.lost), set(report.lost) - before
    assert not (report.duplicated or report.misrouted or report.unexpected), report
    assert report.ok > 100
    assert_at_rest(stack)


async def test_full_redis_still_answers_accepted_requests(stack: Stack, tmp_path: Path) -> None:
    """Given requests in flight and waiting, when memory is full, expect all answered and no more accepted."""
    gate = tmp_path / "gate"
    stack.worker("plain.py:Single", *LEASE)
    stack.wait_for_model("Single")
    blocking = stack.send("Single", body=json.dumps({"gate": str(gate)}), expiration=500)
    names = [stack.send("Single", body=str(number)) for number in range(20)]
    expiring = stack.send("Single", body="0", expiration=500)

    async with AsyncClient(stack.url) as client:
        await client.models()
        stack.redis.config_set("maxmemory", 1)
        with pytest.raises(ResourceExhaustedError, match="out of memory"):
            await client.infer(MODEL, "more")
        with pytest.raises(OutOfMemoryError):
            stack.send(MODEL, body='"more"')
        for name in (blocking, expiring):  # in flight, waiting
            assert stack.result("Single", name)["status"] == "DEADLINE_EXCEEDED"
        gate.touch()
        assert [stack.result("Single", name)["body"] for name in names] == list(range(20))

        stack.redis.config_set("maxmemory", 0)
        assert await client.infer("Single", "again") == "again"
    for event in (
        "loop failed, retrying",
        "batcher failed, starting over",
        "batch reclaimed",
        "batcher no longer active, lease lost",
    ):
        assert not stack.events(event)
    stack.wait_until_idle("Single")


async def test_what_timed_out_while_redis_was_away_is_kept_nowhere(stack: Stack) -> None:
    """A producer's memory does not grow with the length of an outage."""
    async with AsyncClient(stack.url) as client:
        await client.infer(MODEL, "the model is known")
        stack.server.stop()
        for _ in range(40):  # each round's requests have entries of their own
            timed_out = [client.infer(MODEL, bytes(10_000), timeout=0.02) for _ in range(20)]
            assert all(
                isinstance(error, DeadlineExceededError)
                for error in await asyncio.gather(*timed_out, return_exceptions=True)
            )
        for _ in range(1000):
            cancelled = client.submit(MODEL, bytes(10_000))
            await asyncio.sleep(0)  # so that the next one has an entry of its own
            cancelled.cancel()
            await asyncio.sleep(0)
        outbox = transport_of(client)._outbox
        assert len(outbox) <= 300, "entries that nobody awaits pile up"
        assert [entry for entry in outbox if isinstance(entry, OutgoingEntry) and entry.runs] == []


async def test_requests_without_a_timeout_wait_for_redis_up_to_a_bound(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an outage, when more is sent than may wait, expect a clear error, and results for the others."""
    monkeypatch.setattr(transport, "OUTBOX_BYTES_MAX", 1_000_000)
    stack.worker("plain.py:Echo", *LEASE)
    stack.wait_for_model(ECHO)
    async with AsyncClient(stack.url, timeout=None) as client:
        await client.infer(ECHO, "the model is known")
        os.kill(stack.server.pid, signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not stack.server.alive, description="Redis has ended")
        waiting: list[asyncio.Future[str]] = []
        with pytest.raises(UnavailableError, match=r"no connection to Redis .*requests of .*wait to be sent"):
            while True:
                waiting.append(client.submit(ECHO, f"{len(waiting):<10000}"))
                await asyncio.sleep(0)
        assert 90 < len(waiting) < 110
        for cancelled in waiting[50:]:
            cancelled.cancel()
        await asyncio.sleep(0)
        waiting[50:] = [client.submit(ECHO, f"{number:<10000}") for number in range(50, 60)]
        await asyncio.to_thread(stack.server.restart)
        assert [int(answer) for answer in await asyncio.gather(*waiting)] == [*range(len(waiting))]


@pytest.mark.parametrize("may_ask", [True, False])
async def test_client_sends_again_what_a_new_server_may_have_lost(
    server: Path, tmp_path: Path, gate: Path, may_ask: bool
) -> None:
    """Given requests in flight and waiting, when Redis loses all of them, expect their results.

    A client that may not ask which server it is cannot know: its requests time out.
    """
    with Stack(tmp_path, binary=server, append_only=False) as stack:
        stack.batcher()
        stack.worker("plain.py:Single", *LEASE)
        stack.wait_for_model("Single")
        if not may_ask:
            stack.redis.acl_setuser("default", enabled=True, commands=["-info"])
        async with AsyncClient(stack.url, timeout=30 if may_ask else 3) as client:
            held = client.submit("Single", {"gate": str(gate)})
            waiting = [client.submit("Single", number) for number in range(40)]
            large = client.submit("Single", "x" * 100_000)
            await asyncio.to_thread(
                wait_until, lambda: stack.pending("Single") > 0, description="a batch is in flight"
            )
            await asyncio.to_thread(stack.server.restart)
            gate.touch()
            answers = await asyncio.gather(held, *waiting, large, return_exceptions=True)
    if may_ask:
        assert answers[1:] == [*range(40), "x" * 100_000]
    else:
        assert all(isinstance(answer, DeadlineExceededError) for answer in answers)
