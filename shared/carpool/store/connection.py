"""Connections to Redis. The only module that imports redis-py.

redis-py parses the URL, connects, sets up TLS and signs in. From then on commands and replies pass directly
through hiredis. The rest of redis-py is not used:

- no response callbacks, which cost more time than Redis itself;
- no connection pool;
- no retries, because only the caller knows whether a command may be repeated. After any error that makes it
  unclear which replies are still to come, the connection is closed;
- no `driver_info`: so roles need no permission to send it, and connecting takes two round trips less.

Three private attributes of redis-py's connections are used, which have no public equivalent. Because of them
pyproject.toml limits its version.

- `Connection._sock` (Link), the socket: to set kernel timeouts, and to send and receive.
- `asyncio.Connection._writer` (AsyncLink), its stream: to take over the transport.
- `asyncio.Connection._reader` (AsyncLink): set to None with `_writer` at the end, since redis-py does not see
  that the connection was closed, and would warn.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.parts import PARTS_MAX, Buffer, drop_sent
from carpool.readiness import wait_until_ready
from carpool.sentinel import Sentinels
from carpool.store.redis_socket import LARGE_BYTES, RedisSocket, ReplyTooLargeError, pack
from carpool.store.redis_socket import Argument as Argument  # noqa: PLC0414  (exported)

Command = Sequence[Argument]

TIMEOUT_S: Final = 5.0
SENTINEL_TIMEOUT_S: Final = 1.0  # then the next one is asked
_TIMEVAL: Final = struct.Struct("@ll")
_INCOMPLETE: Final = object()


class LinkError(UnavailableError):
    """The connection to Redis failed. It is not known whether a command that was sent took effect."""


class SignInError(LinkError):
    """Redis does not accept the user name and password, or there are none and it wants them."""


class CommandError(Exception):
    """Redis replied with an error. `code` is its first word: NOSCRIPT, OOM, NOGROUP, WRONGTYPE, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# Errors of the connection and not of the command: Redis loads its data, is (now) a replica, has lost its
# cluster or is about to give a slot away, or the user's password was changed. To connect again, perhaps to
# another server under this name, and to repeat the command is right for all of them.
_LINK_ERROR_CODES: Final = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOAUTH", "WRONGPASS")
)
_SIGN_IN_ERROR_CODES: Final = frozenset(("NOAUTH", "WRONGPASS"))


# How Redis 6 reports an error of a command in a script; later ones begin with the command's own code.
_ERROR_IN_SCRIPT: Final = re.compile(
    r"ERR Error running script \(call to f_\w+\): @user_script:\d+: (?:@user_script: \d+: )?-?([A-Z]+) "
)


def _command_error(text: str) -> CommandError:
    in_script = _ERROR_IN_SCRIPT.match(text)
    return CommandError(text.split(" ", 1)[0] if in_script is None else in_script[1], text)


# Scheme of the URL, pattern of the error, what to do about it. The first that matches is used.
_REMEDIES: Final = (
    ("rediss:", "mismatch", "connect by a host name that is in its certificate"),
    (
        "rediss:",
        "CERTIFICATE_VERIFY_FAILED",
        "set CARPOOL_REDIS_CA_FILE to the certificate of the CA that signed it, or add ?ssl_ca_certs=FILE",
    ),
    ("rediss:", "Timeout connecting", "if this port does not use TLS, the URL must begin with redis://"),
    (
        "rediss:",
        "CERTIFICATE_REQUIRED|EOF occurred|Broken pipe|reset by peer|closed by server",
        "if it requires a client certificate, set CARPOOL_REDIS_CERT_FILE and CARPOOL_REDIS_KEY_FILE, "
        "or add ?ssl_certfile=FILE&ssl_keyfile=FILE to the URL",
    ),
    ("redis:", "reset by peer|closed by server", "if this port uses TLS, the URL must begin with rediss://"),
    (
        "",
        "Authentication required",
        "set CARPOOL_REDIS_USER and CARPOOL_REDIS_PASSWORD_FILE, or use a URL with USER:PASSWORD@ (a client "
        "that is given a URL reads no settings)",
    ),
    (
        "",
        "invalid username-password|invalid password|WRONGPASS",
        "the user name or the password is wrong: see CARPOOL_REDIS_USER and CARPOOL_REDIS_PASSWORD_FILE, or "
        "the URL",
    ),
    ("", "'select'", "`carpool acl` allows database 0 only: give each installation its own prefix instead"),
)  # fmt: skip


def _link_error(url: str, error: Exception, *, connecting: bool = False) -> LinkError:
    """`connecting`: the connection was not established yet, so the settings may be wrong: add a remedy."""
    is_signed_out = isinstance(error, redis.AuthenticationError) or (
        isinstance(error, CommandError) and error.code in _SIGN_IN_ERROR_CODES
    )
    is_late = isinstance(error, BlockingIOError) or (isinstance(error, TimeoutError) and not connecting)
    reason = "no answer in time" if is_late else str(error)
    for scheme, pattern, remedy in _REMEDIES if connecting else ():
        if url.startswith(scheme) and re.search(pattern, reason):
            reason = f"{reason.rstrip('.')}; {remedy}"
            break
    kind = SignInError if is_signed_out else LinkError
    return kind(f"Redis at {without_password(url)}: {reason}")


# How the kernel finds out that the other host is gone: after 5 s without a word it asks every 2 s, and gives
# up after 3 questions, or once something that was sent is not acknowledged for 10 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


def _keepalive(url: str) -> dict[str, Any]:
    """Options that detect a host which is down; Unix sockets have none."""
    if url.startswith("unix:"):
        return {}
    known = {name: value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}  # not on each system
    options = {getattr(socket, name): value for name, value in known.items()}
    return {"socket_keepalive": True, "socket_keepalive_options": options}


class Script:
    """A Lua script in `store/lua`. Redis knows it by its hash, once it has run.

    `after` names the files with the functions that it uses, each after those that it depends on. The script
    is all these files and its own, concatenated, because scripts in Redis cannot import.
    """

    def __init__(self, name: str, *, after: Sequence[str] = ()) -> None:
        self.name: Final = name.rpartition("/")[2]
        folder = resources.files("carpool.store") / "lua"
        self.source: Final = "".join((folder / f"{file}.lua").read_text() for file in (*after, name))
        self.sha: Final = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def _url_errors(url: str) -> Iterator[None]:
    """Report what redis-py rejects in a URL. Its query may hold any of redis-py's own connection settings."""
    try:
        yield
    except (TypeError, ValueError):
        raise LinkError(
            f"Redis at {without_password(url)}: redis-py rejects the options (after the ?) or the database "
            "(the number after the last /) in this URL"
        ) from None


class Link:
    """One blocking connection. Connects when first used, and again after it failed. Not for two threads.

    With `reply_bytes_max` a larger reply closes the connection, and `receive` raises ReplyTooLargeError.
    """

    def __init__(
        self, url: str, *, name: str, timeout_s: float = TIMEOUT_S, reply_bytes_max: int | None = None
    ) -> None:
        self._url = url
        self._name = name
        self._limits = () if reply_bytes_max is None else (reply_bytes_max,)
        self._timeout_s = timeout_s
        self._sentinels = _sentinels(url)
        self._connection: Any = None if self._sentinels else self._connection_to(url)
        self._socket: RedisSocket | None = None
        self._overdue_at_s = 0.0

    def _connection_to(self, url: str) -> Any:
        """A connection of redis-py to a server, not opened yet."""
        with _url_errors(url):
            pool = redis.ConnectionPool.from_url(
                url,
                protocol=2,
                client_name=self._name,
                driver_info=None,
                socket_timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),
                **_keepalive(url),
            )
            return pool.make_connection()

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply. Raises LinkError or CommandError."""
        self.send(*command)
        return self.receive()

    def call_bounded(self, kept_bytes_max: int, *command: Argument) -> Any:
        """As `call`. Of large strings in the reply only so many bytes are kept: see `receive_bounded`."""
        self.send(*command)
        (reply,) = self.receive_bounded(1, kept_bytes_max)
        if isinstance(reply, CommandError):
            raise reply
        return reply

    def send(self, *command: Argument) -> None:
        """Send one command without waiting for its reply."""
        self._send_parts(pack(command))

    def send_many(self, commands: Sequence[Command]) -> None:
        """Send several commands in one write, without waiting for their replies."""
        self._send_parts([part for command in commands for part in pack(tuple(command))])

    def _send_parts(self, parts: Sequence[bytes]) -> None:
        redis_socket = self._socket or self._connect()
        try:
            redis_socket.send(parts)
        except OSError as error:
            self.close()
            raise _link_error(self._url, error) from error

    def _connect(self) -> RedisSocket:
        """Connect, and set timeouts in the kernel: Python's cost a system call for each read and write."""
        if self._sentinels is not None:
            self._connection = self._connection_to(_server_url(self._sentinels, self._url))
        try:
            self._connection.connect()
        except (redis.RedisError, OSError) as error:
            self.close()
            raise _link_error(self._url, error, connecting=True) from error
        sock = self._connection._sock
        if not isinstance(sock, ssl.SSLSocket):
            sock.settimeout(None)
            timeout = _TIMEVAL.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = RedisSocket(sock, _command_error, *self._limits)
        return self._socket

    def receive(self, expected_bytes: int = 0) -> Any:
        """The next reply, of which the first bytes must arrive within the link's timeout.

        If it is a large string of `expected_bytes`, it is received without a copy.
        """
        try:
            if self._socket is None:
                raise ConnectionError("connection closed")
            reply = self._socket.receive(expected_bytes)
        except (hiredis.ProtocolError, OSError) as error:
            self.close()
            raise _link_error(self._url, error) from error
        except ReplyTooLargeError:
            self.close()
            raise
        if type(reply) is not CommandError:
            return reply
        self._raise_if_of_link(reply)
        raise reply

    def _raise_if_of_link(self, error: CommandError) -> None:
        if error.code in _LINK_ERROR_CODES:
            self.close()
            raise _link_error(self._url, error)

    def call_many(self, *commands: Command) -> list[Any]:
        """Send several commands in one write, then receive all replies. A CommandError is returned in its
        place."""
        return self.call_strings([(command, 0) for command in commands])

    def call_strings(self, commands: Sequence[tuple[Command, int]]) -> list[Any]:
        """As `call_many`, each command with the length of the string that is expected in reply."""
        self.send_many([command for command, _ in commands])
        return [self._receive_or_error(expected_bytes) for _, expected_bytes in commands]

    def receive_many(self, count: int) -> list[Any]:
        """The next replies. A CommandError is returned in its place."""
        return [self._receive_or_error(0) for _ in range(count)]

    def receive_bounded(self, count: int, kept_bytes_max: int) -> list[Any]:
        """As `receive_many`, for all replies that are to come. Of their large strings only `kept_bytes_max`
        are kept: an Omitted is in place of those that do not fit."""
        try:
            if self._socket is None:
                raise ConnectionError("connection closed")
            replies = self._socket.receive_bounded(count, kept_bytes_max)
        except OSError as error:
            self.close()
            raise _link_error(self._url, error) from error
        for reply in replies:
            if type(reply) is CommandError:
                self._raise_if_of_link(reply)
        return replies

    def _receive_or_error(self, expected_bytes: int) -> Any:
        try:
            return self.receive(expected_bytes)
        except CommandError as error:
            return error

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script by its hash, or by its source if Redis does not know the hash (yet, or any more)."""
        try:
            return self.call("EVALSHA", script.sha, len(keys), *keys, *args)
        except CommandError as error:
            if error.code != "NOSCRIPT":
                raise
        return self.call("EVAL", script.source, len(keys), *keys, *args)

    @property
    def descriptor(self) -> int | None:
        """The socket to wait on, together with others, until a reply arrives.

        None if `receive` would return at once: Redis closed the connection, or TLS has read bytes already.
        """
        return None if self._socket is None else self._socket.descriptor

    def expect_reply(self, block_s: float) -> None:
        """What was just sent is answered after `block_s` at the latest, and is waited for with others."""
        self._overdue_at_s = time.monotonic() + block_s + self._timeout_s

    def check_overdue(self) -> None:
        """Close the connection if the reply that is expected did not arrive in time. Raises LinkError then.

        The kernel does not notice it where the other side is still connected, but says nothing.
        """
        if time.monotonic() > self._overdue_at_s:
            self.close()
            raise _link_error(self._url, TimeoutError())

    def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Run a script once for each of these keys and arguments, in one round trip.

        A CommandError is returned in its place.
        """
        replies = self.call_many(*[("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls])
        for at, reply in enumerate(replies):
            if isinstance(reply, CommandError) and reply.code == "NOSCRIPT":
                try:
                    replies[at] = self.run(script, *calls[at])
                except CommandError as error:
                    replies[at] = error
        return replies

    def readable(self, timeout_s: float) -> bool:
        """Whether a reply begins to arrive within `timeout_s`. Also True when Redis closed the connection."""
        return bool(readable_links((self,), timeout_s))

    def close(self) -> None:
        """Close the connection. The next call connects again."""
        self._socket = None
        if self._connection is not None:
            self._connection.disconnect()


def readable_links(links: Sequence[Link], timeout_s: float) -> list[Link]:
    """Those of these links on which a reply begins to arrive; waits for the first one up to `timeout_s`.

    Also those whose connection was closed.
    """
    by_descriptor: dict[int, Link] = {}
    for link in links:
        if (descriptor := link.descriptor) is None:
            return [link for link in links if link.descriptor is None]
        by_descriptor[descriptor] = link
    readable, _ = wait_until_ready([*by_descriptor], (), timeout_s)
    return [by_descriptor[descriptor] for descriptor in readable]


def _sentinels(url: str) -> Sentinels | None:
    try:
        return Sentinels.of(url)
    except ValueError as error:
        raise LinkError(f"Redis at {without_password(url)}: {error}") from None


def _server_url(sentinels: Sentinels, url: str) -> str:
    """The URL of the primary, as the sentinels of `url` know it. Raises LinkError."""
    try:
        return sentinels.server_url(_ask_sentinel)
    except LookupError as error:
        raise LinkError(f"Redis at {without_password(url)}: no sentinel names a primary: {error}") from None


def _ask_sentinel(url: str, command: tuple[str, ...]) -> Any:
    link = Link(url, name="carpool-sentinel", timeout_s=SENTINEL_TIMEOUT_S)
    try:
        return link.call(*command)
    except LinkError as error:
        raise LookupError(error.detail) from None
    except CommandError as error:
        raise LookupError(f"{without_password(url)}: {error}") from None
    finally:
        link.close()


class AsyncLink(asyncio.Protocol):
    """One asyncio connection for pipelining: `write` does not wait, and `on_reply` gets the replies in order.

    redis-py opens the connection and signs in. Then this protocol replaces its stream on the transport: a
    reply costs a callback and not a task switch, which is most of the latency of a single request.
    `on_lost` is called once, with the reason, when the connection is lost.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[LinkError], None],
    ) -> None:
        self._url = url
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._name = name
        self._sentinels = _sentinels(url)
        self._connection: Any = None if self._sentinels else self._connection_to(url)
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE, replyError=_command_error)
        self._transport: Any = None
        self._descriptor: int | None = None  # of the socket; None: only the transport can send (TLS)
        self._unsent: deque[Buffer] = deque()  # what is to be sent when the transport's buffer is empty
        self._is_paused = False
        self.identity: int | None = None
        self.server_run: str | None = None  # another one after each start of the server; None if unknown
        self.heard_s = 0.0  # when something was received last, by the event loop's clock

    def _connection_to(self, url: str) -> Any:
        """A connection of redis-py to a server, not opened yet."""
        with _url_errors(url):
            pool = redis.asyncio.ConnectionPool.from_url(
                url,
                protocol=2,
                client_name=self._name,
                driver_info=None,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=AsyncRetry(NoBackoff(), 0),
                **_keepalive(url),
            )
            return pool.make_connection()  # type: ignore[no-untyped-call]

    async def connect(self) -> None:
        """Connect and authenticate. Raises LinkError."""
        if self._sentinels is not None:
            server_url = await asyncio.to_thread(_server_url, self._sentinels, self._url)
            self._connection = self._connection_to(server_url)
        connection = self._connection
        try:
            await connection.connect()
            self.identity = await _ask(connection, "CLIENT", "ID")
            self.server_run = _run_id(await _ask(connection, "INFO", "server"))
        except (redis.RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            raise _link_error(self._url, error, connecting=True) from error
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)
        if self._transport.get_extra_info("sslcontext") is None:
            self._descriptor = self._transport.get_extra_info("socket").fileno()
            self._transport.set_write_buffer_limits(high=0)

    def write(self, commands: Iterable[Command]) -> None:
        """Send commands together. If the connection is lost meanwhile, `on_lost` reports it."""
        if self._transport is None:
            return
        parts = [part for command in commands for part in pack(tuple(command))]
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

    # --- called by asyncio ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the data, and pass on every complete reply; errors as CommandError.

        After an error of the connection itself, it is closed, and `on_lost` reports it.
        """
        self.heard_s = self._loop.time()
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _INCOMPLETE:
            if type(reply) is CommandError and reply.code in _LINK_ERROR_CODES:
                self.close()
                self._on_lost(_link_error(self._url, reply))
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
            self._on_lost(_link_error(self._url, exc or ConnectionError("connection closed by the server")))

    def _detach(self) -> None:
        """Keep redis-py from warning that its connection was not closed: it did not see that."""
        self._connection._reader = self._connection._writer = None


async def _ask(connection: Any, *command: str) -> Any:
    """Redis's reply to a command; None if the role may not use it: then do without."""
    await connection.send_command(*command)
    try:
        return await connection.read_response()
    except redis.ResponseError:
        return None


def _run_id(info: bytes | None) -> str | None:
    """The field `run_id` in Redis's reply to INFO."""
    found = re.search(rb"^run_id:(\w+)", info or b"", re.MULTILINE)
    return None if found is None else found[1].decode()
