"""A socket that is connected to Redis: commands in, replies out, with as few copies as possible."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import hiredis

from carpool.parts import PARTS_MAX, Buffer, drop_sent
from carpool.store.truncated_replies import TruncatedReplies

Argument = str | bytes | int | float

LARGE_BYTES: Final = (
    16 * 1024
)  # an argument of this size costs more to copy than to send as a part of its own
_READ_BYTES: Final = 256 * 1024  # received at a time, once a reply has filled the first buffer
_READ_BYTES_AT_FIRST: Final = 16 * 1024  # the first buffer: most replies are small, and connections are many
_INCOMPLETE: Final = object()
_NO_LIMIT: Final = 1 << 62


class ReplyTooLargeError(Exception):
    """A reply is larger than the socket's limit. Only a part of it was received."""


def pack(command: tuple[Argument, ...]) -> list[bytes]:
    """A command in Redis's protocol, in parts. A large argument is a part of its own, and is not copied."""
    large = [
        at for at, argument in enumerate(command) if type(argument) is bytes and len(argument) >= LARGE_BYTES
    ]
    if not large:
        return [_packed(command)]
    parts: list[bytes] = []
    head, begin = b"*%d\r\n" % len(command), 0
    for at in large:
        argument = command[at]
        assert type(argument) is bytes
        parts += (b"%b%b$%d\r\n" % (head, _arguments(command[begin:at]), len(argument)), argument)
        head, begin = b"\r\n", at + 1
    parts.append(head + _arguments(command[begin:]))
    return parts


def _arguments(arguments: tuple[Argument, ...]) -> bytes:
    """Arguments as they are within a command: packed, without the line with their number."""
    if not arguments:
        return b""
    packed = _packed(arguments)
    return packed[packed.index(b"\n") + 1 :]


def _packed(command: tuple[Argument, ...]) -> bytes:
    # hiredis's type stub only allows tuples of one element
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


class RedisSocket:
    """Sends commands and receives replies, in order. Raises OSError, and hiredis.ProtocolError.

    An error reply, also one inside of a reply, is what `reply_error` makes of its text. `receive` raises
    ReplyTooLargeError for a reply of more than about `reply_bytes_max`.
    """

    def __init__(
        self,
        sock: socket.socket,
        reply_error: Callable[[str], Exception],
        reply_bytes_max: int = _NO_LIMIT,
    ) -> None:
        self._sock: Any = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._descriptor = sock.fileno()
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE, replyError=reply_error)
        self._buffer = bytearray(_READ_BYTES_AT_FIRST)
        self._reply_error = reply_error
        self._reply_bytes_max = reply_bytes_max

    def send(self, parts: Sequence[bytes]) -> None:
        """Send these parts, one after another."""
        if len(parts) == 1:
            self._sock.sendall(parts[0])
        elif sum(map(len, parts)) < LARGE_BYTES:
            self._sock.sendall(b"".join(parts))
        elif self._is_tls:  # has no sendmsg
            for part in parts:
                self._sock.sendall(part)
        else:
            self._send_together(parts)

    def _send_together(self, parts: Sequence[bytes]) -> None:
        """Send parts with few system calls, each of which may end in the middle of a part."""
        rest: deque[Buffer] = deque(parts)
        while rest:
            drop_sent(rest, self._sock.sendmsg(islice(rest, PARTS_MAX)))

    def receive(self, expected_bytes: int = 0) -> Any:
        """The next reply. Waits for it as long as the socket's timeout permits, for each part anew.

        A large string of `expected_bytes` is received in place; hiredis would copy it twice.
        """
        if expected_bytes >= LARGE_BYTES and self._receive_header(b"$%d\r\n" % expected_bytes):
            text = self._receive_exactly(expected_bytes)
            self._receive_exactly(2)
            return text
        reader = self._reader
        reply = reader.gets()
        left_bytes = self._reply_bytes_max
        while reply is _INCOMPLETE:
            received_bytes = self._sock.recv_into(self._buffer)
            if received_bytes == 0:
                raise ConnectionError("connection closed by server")
            left_bytes -= received_bytes
            if left_bytes < 0:
                raise ReplyTooLargeError
            reader.feed(self._buffer, 0, received_bytes)  # type: ignore[arg-type]  # the stub lacks it
            if received_bytes == len(self._buffer) < _READ_BYTES:
                self._buffer = bytearray(_READ_BYTES)
            reply = reader.gets()
        return reply

    def receive_truncated(self, count: int, kept_bytes_max: int) -> list[Any]:
        """The next replies, which must be all that are to come. Of their large strings `kept_bytes_max` are
        kept; in place of the others there is an Omitted."""
        replies = TruncatedReplies(self._sock, self._reply_error, kept_bytes_max)
        return [replies.receive() for _ in range(count)]

    def _receive_header(self, header: bytes) -> bool:
        """Whether the next reply has this header, which then is received. If not, hiredis has its bytes."""
        if self._reader.has_data() or self._is_tls:
            return False
        received = b""
        while received != header and header.startswith(received):
            part = self._sock.recv(len(header) - len(received))
            if not part:
                raise ConnectionError("connection closed by server")
            received += part
        if received == header:
            return True
        self._reader.feed(received)
        return False

    def _receive_exactly(self, size_bytes: int) -> bytes:
        parts: list[bytes] = []
        while size_bytes:
            part = self._sock.recv(size_bytes, socket.MSG_WAITALL)
            if not part:
                raise ConnectionError("connection closed by server")
            parts.append(part)
            size_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def descriptor(self) -> int | None:
        """What to wait on for a reply. None if more was received than the replies that were returned: then a
        wait may be in vain."""
        is_buffered = self._reader.has_data() or (self._is_tls and self._sock.pending() > 0)
        return None if is_buffered else self._descriptor
