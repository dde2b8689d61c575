"""Redis Cluster: models on different nodes, slots that are moved under load, and nodes that die."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from carpool import AsyncClient, Client
from carpool.cluster import slot_of
from carpool.errors import UnavailableError
from carpool.keys import Keys, models_key
from carpool.store.connection import Link, LinkError
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.roles import rules
from conftest import SERVERS, name_of
from support.cluster import PRIMARIES, RedisCluster
from support.command import carpool
from support.configured import major
from support.http import call
from support.stack import Stack
from support.waiting import wait_until

RESULTS_S: Final = 120.0
PASSWORD: Final = "p-ss"  # noqa: S105


@pytest.fixture(params=SERVERS, ids=name_of)
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    with RedisCluster(request.param) as formed:
        yield formed


def models_on_all_nodes(cluster: RedisCluster) -> list[str]:
    """The name of a model for each primary."""
    names: dict[int, str] = {}
    for number in range(100):
        names.setdefault(cluster.primary_of(Keys(f"Hashing-{number}").requests).port, f"Hashing-{number}")
    assert len(names) == PRIMARIES
    return list(names.values())


def serve(
    cluster: RedisCluster, home: Path, models: Sequence[str], users: Mapping[str, str] | None = None
) -> Stack:
    """A stack with a batcher, and a worker for each of these models. `users`: the URLs of these roles."""
    urls = users or dict.fromkeys(("batcher", "worker"), cluster.url)
    environment = {role: {"CARPOOL_REDIS_URL": url} for role, url in urls.items()}
    stack = Stack(home, server=EmbeddedRedis(), environment=environment)
    stack.batcher()
    for model in models:
        stack.worker(f"{model}=hashing.py:Hashing", "--lease-ms", "1000", ready=False)
    for service in stack.services[1:]:
        service.wait_for("worker ready")
    return stack


def in_flight(cluster: RedisCluster, models: Sequence[str]) -> int:
    """The number of batches of these models in flight."""
    keys = [Keys(model).batches for model in models]
    return sum(cluster.primary_of(key).redis.xlen(key) for key in keys)


def pause_and_resume(cluster: RedisCluster, model: str) -> None:
    for command, printed in (("pause", "is paused"), ("resume", "is resumed"), ("audit", "mode: wait")):
        done = carpool(cluster.url, command, model)
        assert done.returncode == 0 and printed in done.stdout, done.stderr


class Load:
    """Requests to models, whose results are counted while they are sent."""

    def __init__(self, client: AsyncClient, models: Sequence[str], requests: int) -> None:
        self.results: dict[str, list[Any]] = {model: [] for model in models}
        self._requests = requests
        self._tasks = [asyncio.ensure_future(self._send(client, model)) for model in models]

    async def _send(self, client: AsyncClient, model: str) -> None:
        bodies = [f"{model} {number}" for number in range(self._requests)]
        async for result in client.map(model, bodies, in_flight=32):
            self.results[model].append(result)

    async def wait_until_under_way(self) -> None:
        await asyncio.to_thread(
            wait_until, lambda: all(len(found) > 50 for found in self.results.values()), description="results"
        )

    async def check(self) -> None:
        """Wait for all results: one for each request, and none twice."""
        await asyncio.gather(*self._tasks)
        for found in self.results.values():
            assert len(set(found)) == len(found) == self._requests


async def test_models_on_different_nodes(cluster: RedisCluster, tmp_path: Path) -> None:
    """Given a model on each node, expect one batcher and one client to serve all of them."""
    models = models_on_all_nodes(cluster)
    with serve(cluster, tmp_path, models):
        async with AsyncClient(cluster.url, timeout=RESULTS_S) as client:
            await Load(client, models, 200).check()
            assert await client.models() == sorted(models)
            await client.wait_ready(models[0], timeout=RESULTS_S)
            await client.flush()
            await asyncio.to_thread(pause_and_resume, cluster, models[1])
            await client.infer(models[1], "resumed")
        await asyncio.to_thread(
            wait_until, lambda: not in_flight(cluster, models), description="nothing is in flight"
        )


async def test_roles_have_the_permissions_that_they_need(cluster: RedisCluster, tmp_path: Path) -> None:
    """Given users with the permissions of `carpool acl` on each node, expect that nothing is denied."""
    models = models_on_all_nodes(cluster)
    roles = ("producer", "batcher", "worker", "gateway")
    has_selectors = major(cluster.nodes[0].binary) >= 7
    users: dict[str, str] = {}
    for role in roles:
        permissions = rules(role, selectors=has_selectors).split()
        for node in cluster.nodes:
            node.redis.execute_command("ACL", "SETUSER", role, "on", f">{PASSWORD}", *permissions)
        users[role] = cluster.url.replace("://", f"://{role}:{PASSWORD}@")
    with serve(cluster, tmp_path, models, users) as stack:
        async with AsyncClient(users["producer"], timeout=RESULTS_S) as client:
            await Load(client, models, 200).check()
            sent = [client.enqueue(model, "text", correlation_id="same") for model in models]
            ids = await asyncio.gather(*sent)
            results = await asyncio.gather(*[client.result(request_id, RESULTS_S) for request_id in ids])
            assert len(ids) == len(results) and len(set(results)) == 1  # a hash of ID and body
            assert [await client.status(request_id) for request_id in ids] == ["done"] * len(models)
            await client.cancel(ids[0])
        gateway = await asyncio.to_thread(stack.gateway)
        for model in models:
            path = f"/carpool/v1/models/{model}/infer"
            for body in (b'"text"', b'"%b"' % (b"x" * 20_000)):
                for headers in ({}, {"Idempotency_Key": f"of-{len(body)}"}):
                    answer = await asyncio.to_thread(call, gateway.url, "POST", path, body, **headers)
                    assert answer.code == 200, answer
    assert [node.redis.acl_log() for node in cluster.nodes] == [[]] * len(cluster.nodes)


async def test_slot_is_moved_under_load(cluster: RedisCluster, tmp_path: Path) -> None:
    """Given load, when the slot of a model is moved, expect the result of each request."""
    models = models_on_all_nodes(cluster)[:2]
    with serve(cluster, tmp_path, models):
        async with AsyncClient(cluster.url, timeout=RESULTS_S) as client:
            load = Load(client, models, 2000)
            await load.wait_until_under_way()
            target = await asyncio.to_thread(cluster.move, Keys(models[0]).requests)
            await load.check()
            assert target.redis.exists(Keys(models[0]).registration)


async def test_slot_of_the_names_is_moved(cluster: RedisCluster, tmp_path: Path) -> None:
    """When the set of all models moves, expect a model that is registered later to be found."""
    first, second, _ = models_on_all_nodes(cluster)
    with serve(cluster, tmp_path, [first]) as stack:
        async with AsyncClient(cluster.url, timeout=RESULTS_S) as client:
            await client.infer(first, "a")
            await asyncio.to_thread(cluster.move, models_key())
            stack.worker(f"{second}=hashing.py:Hashing")
            await client.infer(second, "b")


@pytest.mark.parametrize("binary", SERVERS, ids=name_of)
async def test_load_goes_on_after_a_primary_was_killed(binary: Path, tmp_path: Path) -> None:
    """Given load on all nodes, when one is killed and its replica takes over, expect each result."""
    with RedisCluster(binary, with_replicas=True) as cluster:
        models = models_on_all_nodes(cluster)
        with serve(cluster, tmp_path, models):
            async with AsyncClient(cluster.url, timeout=RESULTS_S) as client:
                load = Load(client, models, 2000)
                await load.wait_until_under_way()
                killed = cluster.primary_of(Keys(models[0]).requests)
                killed.kill()
                await load.check()
                await asyncio.to_thread(
                    wait_until,  # all results may have been there before
                    lambda: cluster.primary_of(Keys(models[0]).requests) in cluster.replicas,
                    description="a replica took over",
                )


def test_slots_are_those_of_redis(cluster: RedisCluster) -> None:
    for key in ("carpool:{a}:requests", "carpool:models", "{}a", "a{b}{c}", "a}b{c}", "a{b"):
        assert slot_of(key) == cluster.nodes[0].cluster("KEYSLOT", key)


def test_connection_without_a_key_is_refused(cluster: RedisCluster) -> None:
    with pytest.raises(LinkError, match="cannot be used with Redis Cluster"):
        Link(cluster.url, name="test").call("PING")


@pytest.mark.parametrize(
    "command", [["models"], ["top", "--once"], ["config", "a"], ["dead", "list"], ["up", "square"]]
)
def test_commands_that_cannot_use_a_cluster_say_so(command: list[str]) -> None:
    done = carpool("redis+cluster://nobody.example", *command)
    assert done.returncode == 1
    assert "this command cannot be used with Redis Cluster" in done.stderr


def test_error_says_what_the_nodes_answered() -> None:
    with socket.socket() as silent:  # no other program takes its port, and it does not listen
        silent.bind(("127.0.0.1", 0))
        with (
            pytest.raises(UnavailableError, match=r"no node of the cluster .*refused"),
            Client(f"redis+cluster://127.0.0.1:{silent.getsockname()[1]}") as client,
        ):
            client.infer("any", 1)
