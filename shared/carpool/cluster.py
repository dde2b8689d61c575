"""Redis Cluster: URLs that name nodes of one, and which node has a key.

    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][?OPTIONS]

With `rediss+cluster` all nodes are connected to with TLS. USER, PASSWORD and OPTIONS are for all nodes.
Before each connection a node is asked which one has the slot of the key that the connection is for; a node
that is down, or does not know, is passed over. So a connection that is opened after a failover, or after the
slot was moved, leads to the node that has it now. No I/O: the caller asks.

Why: docs/decisions/0076.
"""

from __future__ import annotations

import random
from binascii import crc_hqx
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from carpool.address import bracketed
from carpool.redis_url import parse, split

SCHEMES: Final = ("redis+cluster", "rediss+cluster")
SLOTS: Final = 16_384

# A node's reply to a command; LookupError, which says why, if there is none.
Ask = Callable[[str, tuple[str, ...]], Any]


def is_cluster(url: str) -> bool:
    """Whether a URL names the nodes of a cluster."""
    return url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def slot_of(key: str) -> int:
    """The hash slot of a key: that of its hash tag, the part between its first braces, if it has one."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return crc_hqx((tag if brace and end and tag else key).encode(), 0) % SLOTS


class Cluster(NamedTuple):
    """What such a URL says. `nodes` are those that it names, as HOST:PORT; `scheme`, `credentials` and
    `query` are parts of each node's URL. `slot` is that of the key for which a node is looked for."""

    nodes: list[str]
    scheme: str
    credentials: str
    query: str
    slot: int | None

    @classmethod
    def of(cls, url: str, key: str) -> Self | None:
        """The cluster that a URL names; None if it names none. Raises ValueError, without the URL.

        `key`: what the connection is for. If it is empty, `server_url` refuses.
        """
        if not is_cluster(url):
            return None
        checked, parts = parse(url), split(url)
        nodes = [f"{bracketed(host)}:{port}" for host, port in checked.addresses]
        return cls(nodes, checked.scheme, parts.credentials, parts.query, slot_of(key) if key else None)

    def server_url(self, ask: Ask) -> str:
        """The URL of the node that has the slot. Raises LookupError, which says what each node answered.

        The nodes are asked in any order: one that is cut off from the others goes on naming old nodes.
        """
        if self.slot is None:
            raise LookupError(
                "this command cannot be used with Redis Cluster; batchers, workers, `carpool infer`, Client "
                "and AsyncClient can"
            )
        reasons: list[str] = []
        for node in random.sample(self.nodes, len(self.nodes)):
            try:
                ranges = ask(self._url(node), ("CLUSTER", "SLOTS"))
            except LookupError as error:
                reasons.append(str(error))
                continue
            for first, last, (host, port, *_), *_ in ranges:
                if first <= self.slot <= last:
                    # A node that has no name for itself is where it was asked.
                    name = host.decode() if host else _host(node)
                    return self._url(f"{bracketed(name)}:{port}")
            reasons.append(f"according to {node}, no node has the hash slot {self.slot}")
        raise LookupError(f"no node of the cluster says who has the key: {'; '.join(reasons)}")

    def _url(self, node: str) -> str:
        return f"{self.scheme}://{self.credentials}{node}/0?{self.query}"


def _host(node: str) -> str:
    return node.rpartition(":")[0].strip("[]")
