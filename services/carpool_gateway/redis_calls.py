"""Commands to Redis beside requests and results, which may wait there, on connections of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from carpool.backoff import Backoff
from carpool.cluster import is_cluster
from carpool.errors import ResourceExhaustedError, UnavailableError
from carpool.store.async_link import AsyncLink, encoded
from carpool.store.connection import Command, CommandError, LinkError

CONNECTIONS_MAX: Final = 64
REPLY_S_MAX: Final = 5.0  # of Redis, beyond the time that it is to wait


class _Connection:
    """A connection on which one call at a time is made, of one or several commands."""

    def __init__(self, url: str, key: str) -> None:
        self._future: asyncio.Future[list[Any]] | None = None
        self._replies: list[Any] = []
        self._expected = 0
        self.is_lost = True  # until it is connected
        self._link = AsyncLink(url, name="gateway:calls", on_reply=self._set, on_lost=self._on_lost, key=key)

    async def connect(self) -> None:
        """Connect. Raises LinkError."""
        await self._link.connect()
        self.is_lost = False

    async def call(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Redis's replies. Raises LinkError, also if they do not come in time."""
        self._future = asyncio.get_running_loop().create_future()
        self._replies, self._expected = [], len(commands)
        self._link.write(encoded(commands))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._future
        except TimeoutError:
            raise LinkError(f"Redis did not reply within {timeout_s:g} s") from None
        finally:
            if not self._future.done() or self._future.cancelled():
                self.close()  # a reply that comes later would be taken for that of the next command

    def close(self) -> None:
        """Close the connection."""
        self.is_lost = True
        self._link.close()

    def _set(self, reply: Any) -> None:
        self._replies.append(reply)
        if len(self._replies) == self._expected and self._future is not None and not self._future.done():
            self._future.set_result(self._replies)

    def _on_lost(self, error: LinkError) -> None:
        self.is_lost = True
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)


class RedisCalls:
    """Calls commands that may wait in Redis, and that may be repeated, on at most CONNECTIONS_MAX
    connections."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_cluster = is_cluster(url)
        self._idle: list[tuple[str, _Connection]] = []  # by key; the last used is last
        self._all: set[_Connection] = set()
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._all:
            connection.close()

    async def call(self, key: str, command: Command, timeout_s: float = REPLY_S_MAX) -> Any:
        """Redis's reply to a command on a key. It is repeated if a connection is lost, for `timeout_s` and at
        least once. Raises CarpoolErrors."""
        (reply,) = await self.call_many(key, [command], timeout_s)
        return reply

    async def call_many(
        self, key: str, commands: Sequence[Command], timeout_s: float = REPLY_S_MAX
    ) -> list[Any]:
        """Redis's replies to commands on a key, or on others with its hash tag, which are sent together."""
        end_s, backoff = time.monotonic() + timeout_s, Backoff()
        while True:
            try:
                replies = await self._call_once(key, commands, timeout_s)
            except LinkError as error:
                if time.monotonic() >= end_s:
                    raise UnavailableError(error.detail) from None
                await asyncio.sleep(backoff.next_s())
                continue
            for command, reply in zip(commands, replies, strict=True):
                if isinstance(reply, CommandError):
                    if reply.code == "OOM":
                        raise ResourceExhaustedError("the memory of Redis is full")
                    raise UnavailableError(f"Redis rejected {command[0]!r}: {reply}")
            return replies

    async def _call_once(self, key: str, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        key = key if self._is_cluster else ""
        async with self._free:
            connection = self._pop_idle(key)
            try:
                if connection.is_lost:
                    await connection.connect()
                return await connection.call(commands, timeout_s)
            finally:
                if connection.is_lost:
                    self._all.discard(connection)
                else:
                    self._idle.append((key, connection))

    def _pop_idle(self, key: str) -> _Connection:
        """A connection to the node of a key. In a cluster keys are many, and names that clients made up are
        among them: if there are CONNECTIONS_MAX, a new one takes the place of the one that was used longest
        ago."""
        for at in range(len(self._idle) - 1, -1, -1):
            if self._idle[at][0] == key:
                return self._idle.pop(at)[1]
        if len(self._all) >= CONNECTIONS_MAX:
            _, unused = self._idle.pop(0)  # fewer than CONNECTIONS_MAX are in use
            unused.close()
            self._all.discard(unused)
        connection = _Connection(self._url, key)
        self._all.add(connection)
        return connection
