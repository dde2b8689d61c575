"""Connections of the reading thread: one, or for a cluster one to the node of each hash slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from carpool.cluster import is_cluster, slot_of
from carpool.keys import Keys
from carpool.store.connection import Command, Link

KEPT_BYTES: Final = 4096  # of a string: bodies are read off the socket and not kept
_TIMEOUT_S: Final = 3.0
_Name = TypeVar("_Name")  # of a command: what it asks


class Links:
    """Connections to Redis. Not for two threads. All methods raise LinkError."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._is_cluster = is_cluster(url)
        self._links: dict[int, Link] = {}

    def of(self, key: str) -> Link:
        """The connection to the server that has this key."""
        slot = slot_of(key) if self._is_cluster else -1
        if slot not in self._links:
            self._links[slot] = Link(self._url, name=self._name, timeout_s=_TIMEOUT_S, key=key)
        return self._links[slot]

    def call_all(self, commands: Sequence[tuple[str, Command]], *, cuts: bool = True) -> list[Any]:
        """Replies to commands, each with a key that it is for, in one round trip to each server.

        A CommandError is in the place of its reply. With `cuts`, an Omitted is in place of a large string.
        """
        by_link: dict[Link, list[int]] = {}
        for at, (key, _) in enumerate(commands):
            by_link.setdefault(self.of(key), []).append(at)
        replies: list[Any] = [None] * len(commands)
        for link, places in by_link.items():
            link.send_many([commands[at][1] for at in places])
            number = len(places)
            found = link.receive_truncated(number, KEPT_BYTES) if cuts else link.receive_many(number)
            for at, reply in zip(places, found, strict=True):
                replies[at] = reply
        return replies

    def ask(
        self, asked: Mapping[Keys, Mapping[_Name, Command]], *, cuts: bool = True
    ) -> dict[Keys, dict[_Name, Any]]:
        """Replies to what is asked of each model, by what the command asks, as `call_all`; no trip for
        nothing."""
        commands = [(keys.requests, command) for keys, of in asked.items() for command in of.values()]
        replies = iter(self.call_all(commands, cuts=cuts) if commands else ())
        return {keys: {what: next(replies) for what in of} for keys, of in asked.items()}

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
