"""Blocking connections to Redis. Only this module and `async_link` import redis-py.

redis-py connects, sets up TLS and signs in; `carpool.redis_url` reads the URL. From then on commands and
replies pass directly through hiredis. The rest of redis-py is not used:

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

Why: docs/decisions/0008.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from carpool.address import without_password
from carpool.cluster import Cluster
from carpool.descriptor_wait import wait_until_ready
from carpool.redis_url import parse
from carpool.sentinel import Sentinels
from carpool.store.link_errors import LINK_ERROR_CODES, command_error, link_error
from carpool.store.link_errors import CommandError as CommandError  # noqa: PLC0414  (exported, as all such)
from carpool.store.link_errors import LinkError as LinkError  # noqa: PLC0414
from carpool.store.link_errors import SignInError as SignInError  # noqa: PLC0414
from carpool.store.link_errors import UnsupportedServerError as UnsupportedServerError  # noqa: PLC0414
from carpool.store.redis_socket import Argument as Argument  # noqa: PLC0414
from carpool.store.redis_socket import RedisSocket, ReplyTooLargeError, pack
from carpool.store.server_version import NEEDED, ServerVersion, of_hello, of_info

Command = Sequence[Argument]

TIMEOUT_S: Final = 5.0
ASKING_TIMEOUT_S: Final = 1.0  # then the next sentinel or node is asked
_TIMEVAL: Final = struct.Struct("@ll")

# How the kernel finds out that the other host is gone: after 5 s without a word it asks every 2 s, and gives
# up after 3 questions, or once something that was sent is not acknowledged for 10 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


_CLASSES: Final = {
    "redis": redis.Connection,
    "rediss": redis.SSLConnection,
    "unix": redis.UnixDomainSocketConnection,
}


def connection_arguments(url: str, name: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """The scheme of a server's URL, and the arguments of redis-py's class for it but `retry`.

    Raises LinkError, which says what is wrong with the URL.
    """
    try:
        checked = parse(url)
    except ValueError as error:
        raise LinkError(f"Redis at {without_password(url)}: {error}") from None
    return checked.scheme, {
        **checked.arguments(),
        "protocol": 2,
        "client_name": name,
        "driver_info": None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **_keepalive(checked.scheme),
    }


def _keepalive(scheme: str) -> dict[str, Any]:
    """Options that detect a host which is down; Unix sockets have none."""
    if scheme == "unix":
        return {}
    known = {name: value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}  # not on each system
    options = {getattr(socket, name): value for name, value in known.items()}
    return {"socket_keepalive": True, "socket_keepalive_options": options}


_NOT_FOR_PRODUCERS: Final = "redis.call('ECHO', '')\n"


def lua_source(file: str) -> str:
    """The text of a file in `store/lua`."""
    return (resources.files("carpool.store") / "lua" / f"{file}.lua").read_text("utf-8")


class Script:
    """A Lua script in `store/lua`. Redis knows it by its hash, once it has run.

    `after` names the files with the functions that it uses, each after those that it depends on. The script
    is all these files and its own, concatenated, because scripts in Redis cannot import.

    Whoever has EVALSHA, as producers have, may run any script that Redis knows, with arguments of their own.
    So each begins with a command that they may not use, unless it is `for_producers`: else arguments could
    keep it busy for hours.
    """

    def __init__(self, name: str, *, after: Sequence[str] = (), for_producers: bool = False) -> None:
        self.name: Final = name.rpartition("/")[2]
        self.files: Final = (*after, name)
        guard = "" if for_producers else _NOT_FOR_PRODUCERS
        self.source: Final = guard + "".join(map(lua_source, self.files))
        self.sha: Final = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Link:
    """One blocking connection. Connects when first used, and again after it failed. Not for two threads.

    With `reply_bytes_max` a larger reply closes the connection, and `receive` raises ReplyTooLargeError.
    `key`: of a cluster, the connection leads to the node that has this key. Without it, it cannot be opened.
    `asks`: it is only for asking where the server is, perhaps a sentinel, whose version does not matter.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        timeout_s: float = TIMEOUT_S,
        reply_bytes_max: int | None = None,
        key: str = "",
        asks: bool = False,
    ) -> None:
        self._url = url
        self._name = name
        self._asks = asks
        self._limits = () if reply_bytes_max is None else (reply_bytes_max,)
        self._timeout_s = timeout_s
        self._servers = servers_of(url, key)
        self._connection: Any = None if self._servers else self._connection_to(url)
        self._socket: RedisSocket | None = None
        self._overdue_at_s = 0.0

    def _connection_to(self, url: str) -> Any:
        """A connection of redis-py to a server, not opened yet."""
        scheme, arguments = connection_arguments(url, self._name, self._timeout_s)
        return _CLASSES[scheme](**arguments, retry=Retry(NoBackoff(), 0))

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply. Raises LinkError or CommandError."""
        self.send(*command)
        return self.receive()

    def call_truncated(self, kept_bytes_max: int, *command: Argument) -> Any:
        """As `call`. Of large strings in the reply only so many bytes are kept: see `receive_truncated`."""
        self.send(*command)
        (reply,) = self.receive_truncated(1, kept_bytes_max)
        if isinstance(reply, CommandError):
            raise reply
        return reply

    def call_at(self, key: str, *command: Argument) -> Any:
        """As `call`, for a command on a key that another node of a cluster may have.

        There it connects to that node for this command.
        """
        if not isinstance(self._servers, Cluster):
            return self.call(*command)
        link = Link(self._url, name=self._name, timeout_s=self._timeout_s, key=key)
        try:
            return link.call(*command)
        finally:
            link.close()

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
            raise link_error(self._url, error) from error

    def _connect(self) -> RedisSocket:
        """Connect, and set timeouts in the kernel: Python's cost a system call for each read and write."""
        if self._servers is not None:
            self._connection = self._connection_to(server_url(self._servers, self._url))
        try:
            self._connection.connect()
            server = None if self._asks else _server_version(self._connection)
        except (redis.RedisError, OSError) as error:
            self.close()
            raise link_error(self._url, error, connecting=True) from error
        try:
            refuse_if_too_old(server, self._url)
        except UnsupportedServerError:
            self.close()
            raise
        sock = self._connection._sock
        if not isinstance(sock, ssl.SSLSocket):
            sock.settimeout(None)
            timeout = _TIMEVAL.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = RedisSocket(sock, command_error, *self._limits)
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
            raise link_error(self._url, error) from error
        except ReplyTooLargeError:
            self.close()
            raise
        if type(reply) is not CommandError:
            return reply
        self._raise_if_of_link(reply)
        raise reply

    def _raise_if_of_link(self, error: CommandError) -> None:
        if error.code in LINK_ERROR_CODES:
            self.close()
            raise link_error(self._url, error)

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

    def receive_truncated(self, count: int, kept_bytes_max: int) -> list[Any]:
        """As `receive_many`, for all replies that are to come. Of their large strings only `kept_bytes_max`
        are kept: an Omitted is in place of those that do not fit."""
        try:
            if self._socket is None:
                raise ConnectionError("connection closed")
            replies = self._socket.receive_truncated(count, kept_bytes_max)
        except OSError as error:
            self.close()
            raise link_error(self._url, error) from error
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
            raise link_error(self._url, TimeoutError())

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


def _server_version(connection: Any) -> ServerVersion | None:
    """Which server redis-py's connection leads to; None if it does not tell."""
    return of_hello(_reply(connection, "HELLO")) or of_info(_reply(connection, "INFO", "server"))


def _reply(connection: Any, *command: str) -> Any:
    """Redis's reply to a command; None if it is an error: it does not know it, or the role may not use it."""
    connection.send_command(*command)
    try:
        return connection.read_response()
    except redis.ResponseError:
        return None


def refuse_if_too_old(server: ServerVersion | None, url: str) -> None:
    """Raises UnsupportedServerError if Carpool cannot use this server. None is one that does not tell."""
    if server is not None and server.too_old:
        raise UnsupportedServerError(
            f"Redis at {without_password(url)}: this is {server}, which is too old; {NEEDED}"
        )


def servers_of(url: str, key: str) -> Sentinels | Cluster | None:
    """Who is to be asked for the server; None if the URL names it. `key`: see Link. Raises LinkError."""
    try:
        return Sentinels.of(url) or Cluster.of(url, key)
    except ValueError as error:
        raise LinkError(f"Redis at {without_password(url)}: {error}") from None


def server_url(servers: Sentinels | Cluster, url: str) -> str:
    """The URL of the server, as the sentinels or nodes that `url` names know it. Raises LinkError."""
    try:
        return servers.server_url(_ask)
    except LookupError as error:
        raise LinkError(f"Redis at {without_password(url)}: {error}") from None


def _ask(url: str, command: tuple[str, ...]) -> Any:
    link = Link(url, name="carpool-asking", timeout_s=ASKING_TIMEOUT_S, asks=True)
    try:
        return link.call(*command)
    except LinkError as error:
        raise LookupError(error.detail) from None
    except CommandError as error:
        raise LookupError(f"{without_password(url)}: {error}") from None
    finally:
        link.close()
