"""Durability: accepted means that replicas have a request, or the disk. What is not confirmed is unknown."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool import AsyncClient, Client, UnknownOutcomeError
from carpool.client import durability
from carpool.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NoResultError,
    UnconfirmedError,
    UnimplementedError,
)
from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.kept import KEEP
from carpool.store.worker import WorkerStore
from carpool_cli.local.embedded import EmbeddedRedis
from support.redis_client import redis_at
from support.waiting import EVENTUALLY_S, Stopwatch, ample_ms, growing_s, wait_until

MODEL: Final = "unserved"
KEYS: Final = Keys(MODEL)
REPLICA, DISK = "replicas=1", "fsync"


class Server:
    """A Redis with a model that nobody serves."""

    def __init__(self, binary: Path) -> None:
        self.embedded = EmbeddedRedis(binary=binary)
        self.url = self.embedded.url
        self.redis = redis_at(self.url, protocol=2)
        self.pid: int = self.redis.info("server")["process_id"]

    def register(self) -> None:
        link = Link(self.url, name="test")
        WorkerStore(link, KEYS).register(ModelSettings().as_text())
        link.close()

    def replicate(self, primary: Server) -> None:
        self.redis.replicaof("127.0.0.1", primary.embedded.port)
        wait_until(lambda: primary.redis.wait(1, 100) == 1, description="the replica acknowledges")

    def waiting(self) -> int:
        number: int = self.redis.xlen(KEYS.requests)
        return number

    def stop(self) -> None:
        self.redis.close()
        self.embedded.stop()


@pytest.fixture
def primary(server: Path) -> Iterator[Server]:
    started = Server(server)
    started.register()
    yield started
    started.stop()


@pytest.fixture
def replica(server: Path, primary: Server) -> Iterator[Server]:
    started = Server(server)
    started.replicate(primary)
    yield started
    os.kill(started.pid, signal.SIGCONT)
    started.stop()


@pytest.fixture
def confirm_s(primary: Server, replica: Server, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long Redis waits for the replica: much less than usual, but long enough for one that runs."""
    stopwatch = Stopwatch()
    primary.redis.set("measure", 1)
    primary.redis.wait(1, 0)
    confirm_ms = ample_ms(stopwatch, 300)
    monkeypatch.setattr(durability, "CONFIRM_MS", confirm_ms)
    return confirm_ms / 1000


async def ends_without_result(pending: Awaitable[Any]) -> None:
    """What was sent by a client that is closed now, to a model that nobody serves."""
    with pytest.raises(UnconfirmedError, match="the client was closed before there was a result"):
        await pending


async def test_replicas_have_what_is_accepted(primary: Server, replica: Server) -> None:
    async with AsyncClient(primary.url, durability=REPLICA) as client:
        await client.models()
        os.kill(replica.pid, signal.SIGSTOP)
        pending = client.submit(MODEL, 1)
        flushing = asyncio.ensure_future(client.flush())
        await asyncio.to_thread(wait_until, primary.waiting, description="the primary has it")
        await asyncio.wait([flushing], timeout=0.5)
        assert not flushing.done()
        os.kill(replica.pid, signal.SIGCONT)
        await flushing
        assert replica.waiting() == 1 and not pending.done()
    await ends_without_result(pending)


async def test_what_no_replica_has_is_unconfirmed(
    primary: Server, replica: Server, confirm_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = rf"0 of 1 replicas confirmed the request within {confirm_s:g} s"
    primary.redis.script_load(KEEP.source)  # as a batcher does
    os.kill(replica.pid, signal.SIGSTOP)
    timeout_s = 30 + 3 * confirm_s  # on a busy machine Redis waits long, for one request after the other
    async with AsyncClient(primary.url, durability=REPLICA, timeout=timeout_s) as client:
        large = client.submit(MODEL, b"x" * 100_000)
        small = client.submit(MODEL, 1)
        for pending in (large, small):
            with pytest.raises(UnconfirmedError, match=within):
                await pending
        with pytest.raises(UnconfirmedError, match="0 of 1 replicas confirmed"):
            await client.enqueue(MODEL, 1)
        assert primary.waiting() == 3  # it was accepted all the same
        os.kill(replica.pid, signal.SIGCONT)
        wait_until(lambda: primary.redis.wait(1, 100) == 1, description="the replica is back")
    monkeypatch.setattr(durability, "CONFIRM_MS", int(1000 * EVENTUALLY_S))
    async with AsyncClient(primary.url, durability=REPLICA) as client:
        pending = client.submit(MODEL, 2)
        await client.flush()
        assert replica.waiting() == 4 and not pending.done()
    await ends_without_result(pending)


async def test_entry_without_confirmation_is_sent_again_on_a_new_connection(
    primary: Server, replica: Server
) -> None:
    async with AsyncClient(primary.url, durability=REPLICA) as client:
        await client.models()
        os.kill(replica.pid, signal.SIGSTOP)
        pending = client.submit(MODEL, 1)
        flushing = asyncio.ensure_future(client.flush())
        while not primary.waiting():
            await asyncio.sleep(0.01)
        primary.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        os.kill(replica.pid, signal.SIGCONT)
        await flushing
        assert replica.waiting() == 2 and not pending.done()
    await ends_without_result(pending)


def test_client_on_a_thread(primary: Server, replica: Server) -> None:
    with Client(primary.url, durability=REPLICA) as client:
        pending = client.submit(MODEL, 1)
        client.flush()
        assert replica.waiting() == 1 and not pending.done()


async def test_fsync(primary: Server) -> None:
    """Redis says when the disk has a request; where it cannot, connecting fails."""
    about = primary.redis.info("server")
    can_confirm = "valkey_version" in about or tuple(map(int, about["redis_version"].split("."))) >= (7, 2)
    client = AsyncClient(primary.url, durability=DISK)
    if not can_confirm:
        with pytest.raises(UnimplementedError, match=r"needs Redis 7.2 or Valkey, with appendonly yes"):
            await client.connect()
        await client.close()
        return
    async with client:
        pending = client.submit(MODEL, 1)
        await client.flush()
        assert not pending.done()
        calls = primary.redis.info("commandstats")["cmdstat_waitaof"]["calls"]
        assert calls == 2  # one when it connected
        primary.redis.config_set("appendonly", "no")
        with pytest.raises(UnconfirmedError, match="Redis cannot confirm durability fsync"):
            await client.infer(MODEL, 2)
    await ends_without_result(pending)
    with pytest.raises(UnimplementedError, match="appendonly yes"):
        async with AsyncClient(primary.url, durability=DISK):
            pass


@pytest.mark.parametrize("text", ["", "replicas=0", "replicas", "disk", "replicas=1000"])
def test_other_durabilities_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not none, fsync or replicas=N"):
        AsyncClient(durability=text)


async def test_known_and_unknown_outcomes_are_different_errors(primary: Server) -> None:
    async with AsyncClient(primary.url) as client:
        await client.models()
        for timeout_s in growing_s(0.05):
            with pytest.raises(DeadlineExceededError) as unknown:
                await client.infer(MODEL, 1, timeout=timeout_s)
            if isinstance(unknown.value, NoResultError):  # Redis has accepted it in time
                break
        assert isinstance(unknown.value, UnknownOutcomeError) and unknown.value.status == "DEADLINE_EXCEEDED"
        sent = client.submit(MODEL, 1)
        await client.flush()
        primary.embedded.stop()
        while client._packer.transport.connection_error is None:
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceededError) as known:
            await client.infer(MODEL, 2, timeout=0.05)
        assert not isinstance(known.value, UnknownOutcomeError)
        unsent = client.submit(MODEL, 3)
    assert isinstance(sent.exception(), UnconfirmedError)
    assert not isinstance(unsent.exception(), UnknownOutcomeError)
