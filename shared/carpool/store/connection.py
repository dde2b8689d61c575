"""Connections to Redis, the only module that imports redis-py.

redis-py does what it is good at: addresses, TLS, authentication, the parser. Its command layer is left aside:
no response callbacks (they cost more than Redis does), no pool, and no retries, because only the caller knows
whether saying a thing twice is safe. After any doubt about what was heard the connection is closed. Nor does
it introduce itself (`driver_info`): roles need not be allowed to, and two trips are saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from carpool.address import without_password
from carpool.errors import UnavailableError

Argument = str | bytes | int | float
Command = Sequence[Argument]

TIMEOUT_S: Final = 5.0
_READ_BYTES: Final = 256 * 1024
_TIMEVAL: Final = struct.Struct("@ll")
_MORE: Final = object()
_SELECTABLE: Final = 1024  # FD_SETSIZE


class LinkError(UnavailableError):
    """The connection to Redis is down, or was lost half-way: whether the command took effect is not known."""


class CommandError(Exception):
    """Redis answered with an error. `code` is its first word: NOSCRIPT, OOM, NOGROUP, WRONGTYPE, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# redis-py strips the code from the messages of errors that have a class of their own.
_CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (redis.exceptions.NoScriptError, "NOSCRIPT"),
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
)


def _command_error(error: Exception) -> CommandError:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return CommandError(code, str(error))
    return CommandError(str(error).split(" ", 1)[0], str(error))


# Scheme, what is heard where nobody is let in, and what to do about it; the first that fits.
_REMEDIES: Final = (
    ("rediss:", "mismatch", "connect by a name that is in its certificate"),
    (
        "rediss:",
        "CERTIFICATE_VERIFY_FAILED",
        "name who vouches for it by CARPOOL_REDIS_CA_FILE, or by ?ssl_ca_certs=FILE in the URL",
    ),
    ("rediss:", "Timeout connecting", "if it does not speak TLS there, the URL begins with redis://"),
    (
        "rediss:",
        "CERTIFICATE_REQUIRED|EOF occurred|Broken pipe|reset by peer|closed by server",
        "if it wants a certificate of ours, name it by CARPOOL_REDIS_CERT_FILE and CARPOOL_REDIS_KEY_FILE, "
        "or by ?ssl_certfile=FILE&ssl_keyfile=FILE in the URL",
    ),
    ("redis:", "reset by peer|closed by server", "if it speaks TLS there, the URL begins with rediss://"),
    (
        "",
        "Authentication required",
        "sign in by CARPOOL_REDIS_USER and CARPOOL_REDIS_PASSWORD_FILE, or by a URL with USER:PASSWORD@",
    ),
    ("", "'select'", "with `carpool acl` there is database 0 only: installations differ by their prefix"),
)  # fmt: skip


def _link_error(url: str, error: Exception, *, greeting: bool = False) -> LinkError:
    """`greeting`: while connecting, when it may be our settings that are wrong."""
    said = "no answer in time" if isinstance(error.__context__, BlockingIOError) else str(error)
    for scheme, words, remedy in _REMEDIES if greeting else ():
        if url.startswith(scheme) and re.search(words, said):
            said = f"{said.rstrip('.')}; {remedy}"
            break
    return LinkError(f"Redis at {without_password(url)}: {said}")


def _keepalive(url: str) -> dict[str, Any]:
    """A host that vanished is noticed; a socket of this machine has no such option."""
    return {} if url.startswith("unix:") else {"socket_keepalive": True}


def _pack(command: tuple[Argument, ...]) -> bytes:
    # hiredis's stub allows tuples of one only
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


class Script:
    """A Lua script of `store/lua`, known by its hash. `after` names files of functions that it calls."""

    def __init__(self, name: str, *, after: Sequence[str] = ()) -> None:
        self.name: Final = name.rpartition("/")[2]
        folder = resources.files("carpool.store") / "lua"
        self.source: Final = "".join((folder / f"{one}.lua").read_text() for one in (*after, name))
        self.sha: Final = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def _understanding(url: str) -> Iterator[None]:
    """redis-py takes settings of its own from the URL's query, and finds late that it has none so named."""
    try:
        yield
    except (TypeError, ValueError):
        raise LinkError(
            f"Redis at {without_password(url)}: what follows the ? of the URL, or the number behind its last "
            "/, means nothing to redis-py"
        ) from None


class Link:
    """One blocking connection. Connects when first used, and again after it was lost. Not for two threads."""

    def __init__(self, url: str, *, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s
        with _understanding(url):
            pool = redis.ConnectionPool.from_url(
                url,
                protocol=2,
                client_name=name,
                driver_info=None,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                **_keepalive(url),
            )
            self._connection: Any = pool.make_connection()
        self._poller: tuple[int, select.poll] | None = None

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply. Raises LinkError or CommandError."""
        self.send(*command)
        return self.receive()

    def send(self, *command: Argument) -> None:
        """Send one command without waiting for its reply."""
        try:
            if self._connection._sock is None:
                self._connect()
            self._connection.send_packed_command((_pack(command),), check_health=False)
        except (redis.RedisError, OSError) as error:  # a wrong password is found while connecting
            greeting = self._connection._sock is None
            self.close()
            raise _link_error(self._url, error, greeting=greeting) from error

    def _connect(self) -> None:
        """Connect, and leave timeouts to the kernel: Python's cost a system call for each read and write."""
        self._connection.connect()
        sock = self._connection._sock
        if not isinstance(sock, ssl.SSLSocket):
            sock.settimeout(None)
            patience = _TIMEVAL.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def receive(self) -> Any:
        """The next reply, which must begin to come within the link's timeout."""
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            raise _command_error(error) from error
        except (redis.RedisError, OSError) as error:
            self.close()
            raise _link_error(self._url, error) from error

    def call_many(self, *commands: Command) -> list[Any]:
        """Send several commands at once. A command's error is returned in its place, not raised."""
        for command in commands:
            self.send(*command)
        return [self._receive_or_error() for _ in commands]

    def _receive_or_error(self) -> Any:
        try:
            return self.receive()
        except CommandError as error:
            return error

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script by its hash, and by its source where Redis does not know it (yet, or any more)."""
        try:
            return self.call("EVALSHA", script.sha, len(keys), *keys, *args)
        except CommandError as error:
            if error.code != "NOSCRIPT":
                raise
        return self.call("EVAL", script.source, len(keys), *keys, *args)

    def readable(self, timeout_s: float) -> bool:
        """Whether a reply begins to arrive within `timeout_s`. True too when the other side hung up."""
        sock = self._connection._sock  # no public way to wait on it together with a timer
        if sock is None:
            return True
        if getattr(sock, "pending", None) and sock.pending():  # TLS may hold bytes the kernel no longer has
            return True
        descriptor = sock.fileno()
        if descriptor < _SELECTABLE:  # to the microsecond, where poll rounds up to whole milliseconds
            return bool(select.select((descriptor,), (), (), max(0.0, timeout_s))[0])
        if self._poller is None or self._poller[0] != descriptor:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            self._poller = (descriptor, poller)
        return bool(self._poller[1].poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        """Hang up. The next call connects anew."""
        self._poller = None
        self._connection.disconnect()


class AsyncLink(asyncio.Protocol):
    """One asyncio connection for pipelining: `write` waits for nothing, replies come to `on_reply` in order.

    redis-py opens the connection and signs in; then its stream is set aside and the transport talks to this
    protocol directly. A reply costs a callback, not a task switch: that is most of a lone request's latency.
    `on_lost` is called once, with the reason, when the connection is gone.
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
        with _understanding(url):
            pool = redis.asyncio.ConnectionPool.from_url(
                url,
                protocol=2,
                client_name=name,
                driver_info=None,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=AsyncRetry(NoBackoff(), 0),
                **_keepalive(url),
            )
            self._connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._transport: Any = None
        self.congested = False
        self.identity: int | None = None

    async def connect(self) -> None:
        """Connect and authenticate. Raises LinkError."""
        connection = self._connection
        try:
            await connection.connect()
            await connection.send_command("CLIENT", "ID")
            try:
                self.identity = await connection.read_response()
            except redis.ResponseError:  # not allowed to: nothing depends on it
                self.identity = None
        except (redis.RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            raise _link_error(self._url, error, greeting=True) from error
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)

    def write(self, commands: Iterable[Command]) -> None:
        """Send commands in one piece. What cannot be sent is reported by `on_lost`."""
        if self._transport is not None:
            self._transport.write(b"".join([_pack(tuple(command)) for command in commands]))

    def close(self) -> None:
        """Hang up at once; `on_lost` is not called any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
            self._let_go()

    # --- asyncio's side ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, and hand on every reply that is complete; errors as CommandError."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _MORE:
            if isinstance(reply, hiredis.ReplyError):
                reply = CommandError(str(reply).split(" ", 1)[0], str(reply))
            self._on_reply(reply)

    def pause_writing(self) -> None:
        """Redis does not keep up."""
        self.congested = True

    def resume_writing(self) -> None:
        """It does again."""
        self.congested = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        if self._transport is not None:
            self._transport = None
            self._let_go()
            self._on_lost(_link_error(self._url, exc or ConnectionError("connection closed by the server")))

    def _let_go(self) -> None:
        """redis-py did not see its connection end, and would complain that nobody closed it."""
        self._connection._reader = self._connection._writer = None
