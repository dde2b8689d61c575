"""Redis Sentinel: everybody finds the primary, and the next one after its death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool import AsyncClient, Client
from carpool.errors import UnavailableError
from carpool_cli.local.embedded import EmbeddedRedis, free_port
from carpool_cli.roles import rules
from support.configured import major
from support.redis_client import redis_at
from support.sentinel import HOST, Sentinel
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = "Hashing"


@pytest.fixture
def replica(server: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=server) as started:
        redis = redis_at(started.url)
        yield started
        redis.close()


async def test_load_goes_on_after_the_primary_was_killed(
    server: Path, replica: EmbeddedRedis, tmp_path: Path
) -> None:
    """Given load, when the primary is killed and a replica takes over, expect the result of each request."""
    primary = EmbeddedRedis(binary=server)
    follower = redis_at(replica.url)
    follower.replicaof(HOST, primary.port)
    sentinel = Sentinel(server, tmp_path, primary.port, down_after_ms=600_000)  # however busy this machine is
    nobody = free_port()
    url = f"redis+sentinel://{HOST}:{nobody},{HOST}:{sentinel.port}/main"
    environment = {role: {"CARPOOL_REDIS_URL": url} for role in ("batcher", "worker")}
    try:
        with Stack(tmp_path / "stack", server=primary, environment=environment) as stack:
            stack.batcher()
            stack.worker("hashing.py:Hashing", "--lease-ms", "600")
            stack.wait_for_model(MODEL)
            wait_until(sentinel.knows_replicas, description="the sentinel knows the replica")
            wait_until(
                lambda: follower.info("replication")["master_link_status"] == "up",
                description="the replica follows",
            )
            results: list[str] = []

            async def infer_all() -> None:
                bodies = [f"body {number}" for number in range(2000)]
                async with AsyncClient(url, timeout=EVENTUALLY_S) as client:
                    async for result in client.map(MODEL, bodies, in_flight=32):
                        results.append(result)

            sending = asyncio.ensure_future(infer_all())
            await asyncio.to_thread(wait_until, lambda: len(results) > 100, description="results")
            sentinel.take_for_dead_after(500)
            os.kill(primary.pid, signal.SIGKILL)
            await sending
            assert len(results) == 2000
            assert sentinel.primary_port() == replica.port
            wait_until(
                lambda: follower.xlen("carpool:{Hashing}:batches") == 0, description="nothing is in flight"
            )
    finally:
        follower.close()
        sentinel.stop()


async def test_users_sign_in_with_server_and_sentinel(server: Path, tmp_path: Path) -> None:
    """Given a user for each role, and one for the sentinel, expect results, and that nothing is denied."""
    primary = EmbeddedRedis(binary=server)
    sentinel = Sentinel(server, tmp_path, primary.port)
    try:
        environment: dict[str, dict[str, str]] = {}
        with Stack(tmp_path / "stack", server=primary, environment=environment) as stack:
            urls: dict[str, str] = {}
            for role in ("producer", "batcher", "worker"):
                of_role = rules(role, selectors=major(server) >= 7).split()
                stack.redis.execute_command("ACL", "SETUSER", role, "on", ">of-the-server", *of_role)
                urls[role] = (
                    f"redis+sentinel://{role}:of-the-server@{HOST}:{sentinel.port}/main"
                    "?sentinel_username=asker&sentinel_password=of-the-sentinel"
                )
                environment[role] = {"CARPOOL_REDIS_URL": urls[role]}
            wait_until(sentinel.answers, description="the sentinel answers")
            asker = (
                "asker",
                "on",
                ">of-the-sentinel",
                "+sentinel|get-master-addr-by-name",
                "+client|setname",
            )
            sentinel.redis.execute_command("ACL", "SETUSER", *asker)
            sentinel.redis.execute_command("ACL", "SETUSER", "default", "-sentinel")
            stack.batcher()
            stack.worker("hashing.py:Hashing")
            async with AsyncClient(urls["producer"], timeout=40) as client:
                assert len({await client.infer(MODEL, body) for body in "abc"}) == 3
            assert stack.redis.acl_log() == []
    finally:
        sentinel.stop()


def test_error_says_that_no_sentinel_names_a_primary() -> None:
    with (
        pytest.raises(UnavailableError, match=r"no sentinel names a primary: Redis at redis://127.*refused"),
        Client(f"redis+sentinel://{HOST}:{free_port()}/main") as client,
    ):
        client.infer("any", 1)
