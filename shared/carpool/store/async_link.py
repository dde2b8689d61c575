"""The connections of asyncio producers. See `connection` for what is used of redis-py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from carpool.parts import PARTS_MAX, Buffer, drop_sent
from carpool.store.connection import (
    TIMEOUT_S,
    Command,
    connection_arguments,
    refuse_if_too_old,
    server_url,
    servers_of,
)
from carpool.store.link_errors import (
    LINK_ERROR_CODES,
    CommandError,
    LinkError,
    UnsupportedServerError,
    command_error,
    link_error,
)
from carpool.store.redis_socket import LARGE_BYTES, pack
from carpool.store.server_version import of_hello, of_info

_INCOMPLETE: Final = object()
_CLASSES: Final = {
    "redis": redis.asyncio.Connection,
    "rediss": redis.asyncio.SSLConnection,
    "unix": redis.asyncio.UnixDomainSocketConnection,
}


class AsyncLink(asyncio.Protocol):
    """One asyncio connection for pipelining: `write` does not wait, and `on_reply` gets the replies in order.

    redis-py opens the connection and signs in. Then this protocol replaces its stream on the transport: a
    reply costs a callback and not a task switch, which is most of the latency of a single request.
    `on_lost` is called once, with the reason, when the connection is lost. `key`: see Link.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[LinkError], None],
        key: str = "",
    ) -> None:
        self._url = url
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._name = name
        self._servers = servers_of(url, key)
        self._connection: Any = None if self._servers else self._connection_to(url)
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE, replyError=command_error)
        self._transport: Any = None
        self._descriptor: int | None = None  # of the socket; None: only the transport can send (TLS)
        self._unsent: deque[Buffer] = deque()  # what is to be sent when the transport's buffer is empty
        self._is_paused = False
        self.identity: int | None = None
        self.server_run: str | None = None  # another one after each start of the server; None if unknown
        self.heard_s = 0.0  # when something was received last, by the event loop's clock

    def _connection_to(self, url: str) -> Any:
        """A connection of redis-py to a server, not opened yet."""
        scheme, arguments = connection_arguments(url, self._name, TIMEOUT_S)
        return _CLASSES[scheme](**arguments, retry=AsyncRetry(NoBackoff(), 0))

    async def connect(self) -> None:
        """Connect and authenticate. Raises LinkError."""
        if self._servers is not None:
            url = await asyncio.to_thread(server_url, self._servers, self._url)
            self._connection = self._connection_to(url)
        connection = self._connection
        try:
            await connection.connect()
            self.identity = await _ask(connection, "CLIENT", "ID")
            info = await _ask(connection, "INFO", "server")
            self.server_run = _run_id(info)
            refuse_if_too_old(of_info(info) or of_hello(await _ask(connection, "HELLO")), self._url)
        except UnsupportedServerError:
            await connection.disconnect(nowait=True)
            raise
        except (redis.RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            raise link_error(self._url, error, connecting=True) from error
        except BaseException:  # above all if this is cancelled
            await connection.disconnect(nowait=True)
            raise
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)
        if self._transport.get_extra_info("sslcontext") is None:
            self._descriptor = self._transport.get_extra_info("socket").fileno()
            self._transport.set_write_buffer_limits(high=0)

    def write(self, parts: Sequence[bytes]) -> None:
        """Send commands that are `encoded`, together. If the connection is lost meanwhile, `on_lost` reports
        it."""
        if self._transport is None:
            return
        if self.congested or (
            self._descriptor is not None and max(map(len, parts), default=0) >= LARGE_BYTES
        ):
            self._unsent += map(memoryview, parts)
            self._send_unsent()
        else:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def _send_unsent(self) -> None:
        """Send as much as the socket takes, without copying it as the transport would.

        The transport is only given a little of the rest. It calls `resume_writing` when it has sent that.
        """
        unsent = self._unsent
        # A transport that is closing may have closed the descriptor, which then may be another file's.
        while unsent and not (self._is_paused or self._transport.is_closing()):
            if self._descriptor is not None:
                with contextlib.suppress(OSError):  # the transport reports it
                    drop_sent(unsent, os.writev(self._descriptor, list(islice(unsent, PARTS_MAX))))
            if unsent:
                part = unsent.popleft()
                if len(part) > LARGE_BYTES:
                    unsent.appendleft(part[LARGE_BYTES:])
                self._transport.write(part[:LARGE_BYTES])

    @property
    def congested(self) -> bool:
        """Whether something is unsent, because Redis does not keep up."""
        return self._is_paused or bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        """What was written and is not in the kernel yet."""
        buffered: int = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return buffered + sum(map(len, self._unsent))

    def close(self) -> None:
        """Close the connection at once; `on_lost` is not called any more."""
        transport, self._transport = self._transport, None
        self._unsent.clear()
        if transport is not None:
            transport.abort()
            self._detach()

    def disown(self) -> None:
        """In the child of a fork: use the socket no more, which is its parent's. `close` may follow.

        Both processes have it, and share what polls it, if the child goes on with the parent's event loop. So
        the child must neither read from it nor take it from the poll.
        """
        if self._transport is None:
            return
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, self._transport.get_extra_info("socket").fileno(), inheritable=False)
        os.close(nothing)

    # --- called by asyncio ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the data, and pass on every complete reply; errors as CommandError.

        After an error of the connection itself, it is closed, and `on_lost` reports it.
        """
        self.heard_s = self._loop.time()
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _INCOMPLETE:
            if type(reply) is CommandError and reply.code in LINK_ERROR_CODES:
                self.close()
                self._on_lost(link_error(self._url, reply))
                return
            self._on_reply(reply)

    def pause_writing(self) -> None:
        """The transport's buffer is not empty (with TLS: full)."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The transport's buffer is empty (with TLS: has room) again."""
        self._is_paused = False
        if self._transport is not None:
            self._send_unsent()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport was closed, by Redis or by an error."""
        if self._transport is not None:
            self._transport = None
            self._unsent.clear()
            self._detach()
            self._on_lost(link_error(self._url, exc or ConnectionError("connection closed by the server")))

    def _detach(self) -> None:
        """Keep redis-py from warning that its connection was not closed: it did not see that."""
        self._connection._reader = self._connection._writer = None


def encoded(commands: Iterable[Command]) -> list[bytes]:
    """Commands in Redis's protocol, in parts. Raises TypeError or ValueError for what cannot be encoded."""
    return [part for command in commands for part in pack(tuple(command))]


async def _ask(connection: Any, *command: str) -> Any:
    """Redis's reply to a command; None if the role may not use it: then do without."""
    await connection.send_command(*command)
    try:
        return await connection.read_response()
    except redis.ResponseError as error:
        if command_error(str(error)).code in LINK_ERROR_CODES:
            raise
        return None


def _run_id(info: bytes | None) -> str | None:
    """The field `run_id` in Redis's reply to INFO."""
    found = re.search(rb"^run_id:(\w+)", info or b"", re.MULTILINE)
    return None if found is None else found[1].decode()
