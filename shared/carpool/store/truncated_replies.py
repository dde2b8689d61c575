"""Replies of Redis of which only a limited number of bytes is kept.

hiredis keeps a whole reply, and most of it twice. Here a large string is received in place, or not kept.

Why: docs/decisions/0067.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final, NamedTuple

LARGE_BYTES: Final = 16 * 1024  # smaller strings are kept in any case
_DROPPED_BYTES: Final = 256 * 1024  # at a time


class Omitted(NamedTuple):
    """In place of a string that was not kept."""

    size_bytes: int


class TruncatedReplies:
    """Parses replies, of whose large strings `kept_bytes_max` are kept in all: the first that fit.

    An error reply is what `reply_error` makes of its text. Raises OSError.
    """

    def __init__(self, sock: Any, reply_error: Callable[[str], Exception], kept_bytes_max: int) -> None:
        self._received = io.BufferedReader(_Received(sock))
        self._reply_error = reply_error
        self._left_bytes = kept_bytes_max

    def receive(self) -> Any:
        """The next reply."""
        line = self._received.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"*":
            return None if rest == b"-1" else [self.receive() for _ in range(int(rest))]
        if kind == b"$":
            return None if rest == b"-1" else self._string(int(rest))
        if kind == b":":
            return int(rest)
        text = rest.decode("utf-8", "replace")
        return self._reply_error(text) if kind == b"-" else rest

    def _string(self, size_bytes: int) -> bytes | Omitted:
        value: bytes | Omitted
        if size_bytes < LARGE_BYTES:
            value = self._received.read(size_bytes)
        elif size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            value = self._received.read(size_bytes)
        else:
            value = Omitted(size_bytes)
            while size_bytes:
                size_bytes -= len(self._received.read1(min(size_bytes, _DROPPED_BYTES)))
        self._received.read(2)
        return value


class _Received(io.RawIOBase):
    """What arrives at a socket."""

    def __init__(self, sock: Any) -> None:
        super().__init__()
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        received_bytes: int = self._sock.recv_into(buffer)
        if received_bytes == 0:
            raise ConnectionError("connection closed by server")
        return received_bytes
