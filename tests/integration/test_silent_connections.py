"""Connections that are open and carry nothing, and servers that are there and cannot be written to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool import AsyncClient
from carpool.client import transport
from carpool_cli.local.embedded import EmbeddedRedis
from support.proxy import Proxy
from support.redis_client import redis_at
from support.stack import Stack
from support.waiting import wait_until

ECHO = "Echo"
MODEL = "Hashing"


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Stack, Proxy]]:
    """A stack whose batcher and worker reach Redis by a proxy."""
    server = EmbeddedRedis()
    with Proxy(server.port) as proxy:
        of_services = {"CARPOOL_REDIS_URL": proxy.url}
        environment = {"batcher": of_services, "worker": of_services}
        with Stack(tmp_path, server=server, environment=environment) as stack:
            yield stack, proxy


@pytest.mark.parametrize("role", [":reads", ":fetch", ":moves", ":commit", ":heartbeat"])
def test_service_gives_up_a_connection_that_fell_silent(proxied: tuple[Stack, Proxy], role: str) -> None:
    """Given a service with a connection that says nothing any more, expect that requests are served."""
    stack, proxy = proxied
    stack.serve("plain.py:Echo")
    first = stack.send(ECHO, body='"first"')
    assert stack.result(ECHO, first)["status"] == "OK"

    assert proxy.silence(stack.redis, lambda name: name.endswith(role)) == 1
    second = stack.send(ECHO, body='"second"')

    assert stack.result(ECHO, second)["body"] == "second"


def test_batcher_gives_up_a_connection_for_what_settles_that_fell_silent(
    proxied: tuple[Stack, Proxy],
) -> None:
    """It is used while requests wait and no process can take them."""
    stack, proxy = proxied
    stack.serve("plain.py:Echo")
    first = stack.send(ECHO, body='"first"')
    assert stack.result(ECHO, first)["status"] == "OK"
    stack.served_by(ECHO).terminate()
    names: list[str] = []

    def silence() -> int:
        """One that is held up just after it has read does not wait before it reads the next ones."""
        names.append(stack.send(ECHO, body=str(len(names))))
        return proxy.silence(stack.redis, lambda name: name.endswith(":settled"))

    wait_until(silence, description="requests are read together")
    stack.active_batcher(ECHO).wait_for("batcher failed, starting over")
    stack.worker("plain.py:Echo")
    assert [stack.result(ECHO, name)["body"] for name in names] == list(range(len(names)))


async def test_client_gives_up_a_writer_that_fell_silent(
    proxied: tuple[Stack, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, proxy = proxied
    monkeypatch.setattr(transport, "SILENCE_MAX_S", 1.0)
    monkeypatch.setattr(transport, "SILENCE_CHECK_S", 0.1)
    monkeypatch.setattr(transport, "READ_BLOCK_MS", 200)
    stack.serve("plain.py:Echo")
    async with AsyncClient(proxy.url, timeout=20) as client:
        assert await client.infer(ECHO, "first") == "first"
        assert proxy.silence(stack.redis, lambda name: name.endswith(":w")) == 1
        assert await client.infer(ECHO, "second") == "second"
        assert client._packer.transport.losses >= 1  # more, if Redis stands still for as long


async def test_client_keeps_a_connection_that_has_nothing_to_say(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer without commands hears nothing, and is kept."""
    monkeypatch.setattr(transport, "SILENCE_MAX_S", 2.5)
    monkeypatch.setattr(transport, "SILENCE_CHECK_S", 0.02)
    monkeypatch.setattr(transport, "READ_BLOCK_MS", 50)
    stack.serve("plain.py:Echo")
    async with AsyncClient(stack.url) as client:
        await client.infer(ECHO, "first")
        with pytest.raises(TimeoutError):  # for longer than the longest silence
            await asyncio.wait_for(asyncio.Event().wait(), 3.0)
        assert await client.infer(ECHO, "again") == "again"
        assert client._packer.transport.losses == 0


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


async def test_everybody_follows_a_failover_that_leaves_connections_open(
    proxied: tuple[Stack, Proxy], replica: EmbeddedRedis
) -> None:
    """Given load, when the primary becomes a replica that keeps its connections, expect every result."""
    stack, proxy = proxied
    stack.batcher()
    stack.worker("hashing.py:Hashing", "--lease-ms", "600")
    stack.wait_for_model(MODEL)
    new = redis_at(replica.url)
    new.replicaof("127.0.0.1", stack.server.port)
    wait_until(
        lambda: new.info("replication")["master_link_status"] == "up", description="the replica follows"
    )
    results: list[str] = []
    bodies = [f"body {number}" for number in range(600)]

    async def infer_all() -> None:
        async with AsyncClient(proxy.url, timeout=30) as client:
            async for result in client.map(MODEL, bodies, in_flight=32):
                results.append(result)

    sending = asyncio.ensure_future(infer_all())
    await asyncio.to_thread(wait_until, lambda: len(results) > 100, description="results before the failover")
    proxy.port = replica.port
    # Without a loss of data: the old primary waits until its replica has everything.
    await asyncio.to_thread(stack.redis.execute_command, "FAILOVER", "TO", "127.0.0.1", replica.port)
    await sending

    assert len(results) == len(bodies)
    assert new.info("replication")["role"] == "master"
    wait_until(lambda: new.xlen("carpool:{Hashing}:batches") == 0, description="nothing is in flight")


async def test_requests_wait_while_redis_loads_its_data(server: Path, tmp_path: Path) -> None:
    """Given requests with time left, when Redis restarts and loads for a while, expect every result."""
    slow = tmp_path / "slow"
    binary = tmp_path / "redis-server"
    binary.write_text(f'#!/bin/sh\nexec {server} "$@" $(cat {slow} 2>/dev/null)\n')
    binary.chmod(0o700)
    with Stack(tmp_path, binary=binary) as stack:
        stack.serve("plain.py:Echo")
        stack.redis.config_set("appendfsync", "always")
        with stack.redis.pipeline() as pipeline:
            for number in range(20_000):  # Redis answers LOADING after every 1,000 of them
                pipeline.set(f"other:{number}", "x")
            pipeline.execute()
        slow.write_text("--key-load-delay 100")
        async with AsyncClient(stack.url, timeout=40) as client:
            assert await client.infer(ECHO, "before") == "before"
            restarting = asyncio.ensure_future(asyncio.to_thread(stack.server.restart))
            answers: list[str] = []
            while not restarting.done():
                answers += await asyncio.gather(*[client.infer(ECHO, "meanwhile") for _ in range(8)])
            await restarting
        assert set(answers) == {"meanwhile"}
