"""What a run's processes connect to: Redis, alone, behind a network, with a Sentinel, or in a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis import Redis

from carpool_cli.local.embedded import EmbeddedRedis, find_servers
from support.cluster import RedisCluster
from support.proxy import Proxy
from support.redis_client import redis_at
from support.sentinel import HOST, Sentinel
from support.stack import Stack
from support.waiting import wait_until

ROLES: Final = ("batcher", "worker")
FAILOVER_S: Final = 30.0


@dataclass
class Servers:
    """`stack` has no services yet. `proxy`: what is between Redis and those that use it, if anything is.
    `fail_over`: kill the primary and wait until another server is one. `environment`: of services that are
    started from now on, by role."""

    stack: Stack
    producers_url: str
    environment: dict[str, dict[str, str]]
    proxy: Proxy | None = None
    fail_over: Callable[[], None] | None = None

    @property
    def clients_url(self) -> str:
        """What clients of Carpool connect to, which know Sentinels and clusters, as services do."""
        return self.environment["worker"].get("CARPOOL_REDIS_URL", self.producers_url)


ServersOf = Callable[[Path], AbstractContextManager[Servers]]


@contextlib.contextmanager
def alone(home: Path) -> Iterator[Servers]:
    environment: dict[str, dict[str, str]] = {role: {} for role in ROLES}
    with Stack(
        home / "stack", server=EmbeddedRedis(binary=_with_file_limits(home)), environment=environment
    ) as stack:
        yield Servers(stack, stack.url, environment)


def _with_file_limits(home: Path) -> Path:
    """A Redis for which a file that must not grow is an error, as a full disk is, and not a signal."""
    script = home / "redis-server"
    script.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec '{find_servers()[0]}' \"$@\"\n")
    script.chmod(0o755)
    return script


@contextlib.contextmanager
def behind_a_network(home: Path) -> Iterator[Servers]:
    server = EmbeddedRedis()
    with Proxy(server.port) as proxy:
        environment = _environment(proxy.url)
        with Stack(home / "stack", server=server, environment=environment) as stack:
            yield Servers(stack, proxy.url, environment, proxy)


@contextlib.contextmanager
def beside_a_network(home: Path) -> Iterator[Servers]:
    """A network to Redis that nobody uses but those who are told to."""
    server = EmbeddedRedis()
    environment: dict[str, dict[str, str]] = {role: {} for role in ROLES}
    with Proxy(server.port) as proxy, Stack(home / "stack", server=server, environment=environment) as stack:
        yield Servers(stack, stack.url, environment, proxy)


@contextlib.contextmanager
def with_a_sentinel(home: Path) -> Iterator[Servers]:
    """A primary and a replica. Producers, which know nothing of Sentinel, are led to the primary."""
    with ExitStack() as opened:
        primary, replica = (opened.enter_context(EmbeddedRedis()) for _ in range(2))
        follower = redis_at(replica.url)
        follower.replicaof(HOST, primary.port)
        sentinel = Sentinel(primary.binary, home, primary.port)
        opened.callback(sentinel.stop)
        proxy = opened.enter_context(Proxy(primary.port))
        environment = _environment(sentinel.url)
        stack = opened.enter_context(Stack(home / "stack", server=primary, environment=environment))

        def fail_over() -> None:
            os.kill(primary.pid, signal.SIGKILL)
            wait_until(
                lambda: sentinel.primary_port() == replica.port and follower.role()[0] == b"master",
                description="the replica is the primary",
                timeout_s=FAILOVER_S,
            )
            _lead_to(stack, proxy, replica)

        wait_until(sentinel.knows_replicas, description="the sentinel knows the replica")
        wait_until(
            lambda: follower.info("replication")["master_link_status"] == "up",
            description="the replica follows",
        )
        yield Servers(stack, proxy.url, environment, proxy, fail_over)


def in_a_cluster(key: str) -> ServersOf:
    """Three primaries, each with a replica. Producers are led to the one that has this key."""

    @contextlib.contextmanager
    def started(home: Path) -> Iterator[Servers]:
        with ExitStack() as opened:
            cluster = opened.enter_context(RedisCluster(find_servers()[0], with_replicas=True))
            primary = cluster.primary_of(key)
            proxy = opened.enter_context(Proxy(primary.port))
            environment = _environment(cluster.url)
            stack = opened.enter_context(Stack(home / "stack", server=primary, environment=environment))

            def fail_over() -> None:
                cluster.primary_of(key).kill()
                wait_until(
                    lambda: cluster.primary_of(key).alive,
                    description="a replica is the primary",
                    timeout_s=FAILOVER_S,
                )
                _lead_to(stack, proxy, cluster.primary_of(key))

            yield Servers(stack, proxy.url, environment, proxy, fail_over)

    return started


def _environment(url: str) -> dict[str, dict[str, str]]:
    return {role: {"CARPOOL_REDIS_URL": url} for role in ROLES}


def _lead_to(stack: Stack, proxy: Proxy, server: EmbeddedRedis) -> None:
    """From now on this is the server of the producers and of the test."""
    proxy.port = server.port
    stack.redis = Redis.from_url(server.url, protocol=2, socket_timeout=30)
