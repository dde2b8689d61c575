"""A Redis Cluster of processes on this machine: three primaries, and a replica of each."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from redis import Redis

from carpool.cluster import SLOTS, slot_of
from carpool.store.connection import Link
from carpool_cli.local.embedded import EmbeddedRedis, free_port, is_free
from support.waiting import wait_until

HOST: Final = "127.0.0.1"
PRIMARIES: Final = 3
FORMED_S: Final = 60.0
# After which a node is taken to be dead. Where a replica takes over a test waits for that; else the whole
# cluster is down for everybody because one node was held up.
_TAKE_OVER_MS: Final = 1500
_NODE_TIMEOUT_MS: Final = 60_000
_BUS_ABOVE: Final = 10_000  # Redis 6 has no setting for it


class ClusterNode(EmbeddedRedis):
    """A server with cluster mode. `redis` is a connection to it."""

    def __init__(self, binary: Path, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        super().__init__(binary=binary, port=free_port_of_node())
        self.redis: Any = Redis(HOST, self.port)
        self.id: str = self.cluster("MYID").decode()

    def _options(self, port: int) -> list[str]:
        timeout = ["--cluster-node-timeout", str(self._timeout_ms)]
        return [*super()._options(port), "--cluster-enabled", "yes", *timeout]

    def cluster(self, *command: str | int) -> Any:
        return self.redis.execute_command("CLUSTER", *command)

    def kill(self) -> None:
        """SIGKILL; return once it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.alive, description="the server has ended")

    def stop(self) -> None:
        self.redis.close()
        super().stop()


def free_port_of_node() -> int:
    """A free port; that of the cluster bus, 10000 above, is free too, and not one of outgoing connections."""
    ports = (free_port() - _BUS_ABOVE for _ in range(1_000))
    return next(port for port in ports if is_free(port))


class RedisCluster:
    """A cluster. `url` names all nodes; `with_replicas`: each primary has one."""

    def __init__(self, binary: Path, *, with_replicas: bool = False) -> None:
        self._binary = binary
        self._number = 2 * PRIMARIES if with_replicas else PRIMARIES
        self._timeout_ms = _TAKE_OVER_MS if with_replicas else _NODE_TIMEOUT_MS
        self.nodes: list[ClusterNode] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._number):
                self.nodes.append(ClusterNode(self._binary, self._timeout_ms))
            self._form()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _form(self) -> None:
        for index, node in enumerate(self.primaries):
            slots = range(index * SLOTS // PRIMARIES, (index + 1) * SLOTS // PRIMARIES)
            node.cluster("ADDSLOTS", *slots)
        for number, node in enumerate(self.nodes, 1):
            node.cluster("SET-CONFIG-EPOCH", number)
            if number > 1:
                node.cluster("MEET", HOST, self.nodes[0].port)
        wait_until(self._all_know_all, description="all nodes know each other", timeout_s=FORMED_S)
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.cluster("REPLICATE", primary.id)
        wait_until(self._is_formed, description="the cluster is formed", timeout_s=FORMED_S)

    @property
    def primaries(self) -> list[ClusterNode]:
        """Those that were primaries first."""
        return self.nodes[:PRIMARIES]

    @property
    def replicas(self) -> list[ClusterNode]:
        return self.nodes[PRIMARIES:]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in self.nodes)}"

    def _all_know_all(self) -> bool:
        lists = [node.cluster("NODES") for node in self.nodes]
        ids = [node.id.encode() for node in self.nodes]
        return all(b"handshake" not in known and all(name in known for name in ids) for known in lists)

    def _is_formed(self) -> bool:
        states = [node.redis.execute_command("CLUSTER", "INFO") for node in self.nodes]
        followed = all(
            node.redis.info("replication").get("master_link_status") == "up" for node in self.replicas
        )
        return followed and all(b"cluster_state:ok" in state for state in states)

    def primary_of(self, key: str) -> ClusterNode:
        """The node that has this key, as the first node that lives knows."""
        asked = next(node for node in self.nodes if node.alive)
        for first, last, (_, port, *_), *_ in slot_ranges(asked):
            if first <= slot_of(key) <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"no node has {key}")

    def move(self, key: str) -> ClusterNode:
        """Move the slot of this key to another primary, which is returned, as `redis-cli` does."""
        slot, source = slot_of(key), self.primary_of(key)
        target = next(node for node in self.primaries if node is not source)
        target.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", target.id)
        while keys := source.cluster("GETKEYSINSLOT", slot, 100):
            source.redis.execute_command("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *(node for node in self.primaries if node not in (source, target))):
            node.cluster("SETSLOT", slot, "NODE", target.id)
        return target

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def slot_ranges(node: ClusterNode) -> Sequence[Any]:
    """The node's reply to CLUSTER SLOTS, as Redis sends it."""
    link = Link(node.url, name="test")
    try:
        ranges: Sequence[Any] = link.call("CLUSTER", "SLOTS")
        return ranges
    finally:
        link.close()
