"""TruncatedReplies: any reply is parsed as hiredis does, and of large strings only so many bytes are kept."""

from __future__ import annotations

import socket
import threading
from typing import Any

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.store.connection import CommandError
from carpool.store.truncated_replies import LARGE_BYTES, Omitted, TruncatedReplies


def received(replies: list[Any], kept_bytes_max: int) -> list[Any]:
    """What is received of these replies, which the other end of a socket sends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = b"".join(map(encoded, replies))
        sender = threading.Thread(target=theirs.sendall, args=[data])
        sender.start()
        bounded = TruncatedReplies(ours, lambda text: CommandError(text, text), kept_bytes_max)
        found = [bounded.receive() for _ in replies]
        sender.join()
    return found


def encoded(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))


anything = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=100),
    lambda inner: st.lists(inner, max_size=5),
)


@settings(deadline=None)
@given(st.lists(anything, max_size=5))
def test_small_replies_are_parsed_as_hiredis_does(replies: list[Any]) -> None:
    reader = hiredis.Reader()
    reader.feed(b"".join(map(encoded, replies)))
    assert received(replies, 0) == [reader.gets() for _ in replies] == replies


def test_large_strings_are_kept_as_far_as_they_fit() -> None:
    large, larger = b"x" * LARGE_BYTES, b"y" * 3 * LARGE_BYTES
    small = b"z" * (LARGE_BYTES - 1)
    replies = [[b"a", [large, larger, small]], [larger, large, b"b"]]
    assert received(replies, 5 * LARGE_BYTES) == [
        [b"a", [large, larger, small]],
        [Omitted(3 * LARGE_BYTES), large, b"b"],
    ]
    assert received([larger, 7, [large]], 0) == [Omitted(3 * LARGE_BYTES), 7, [Omitted(LARGE_BYTES)]]


def test_errors_are_replies() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"-WRONGTYPE it is not a stream\r\n+OK\r\n*-1\r\n")
        replies = TruncatedReplies(ours, lambda text: CommandError(text.split()[0], text), 0)
        error = replies.receive()
        assert isinstance(error, CommandError)
        assert (error.code, str(error)) == ("WRONGTYPE", "WRONGTYPE it is not a stream")
        assert (replies.receive(), replies.receive()) == (b"OK", None)


@pytest.mark.parametrize("part", [b"", b"*1", b"*1\r\n$5\r\nab", b"$100000\r\nab"])
def test_closed_connection_is_an_error(part: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(part)
        theirs.close()
        with pytest.raises(ConnectionError, match="closed"):
            TruncatedReplies(ours, lambda text: CommandError(text, text), 0).receive()


def test_late_reply_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        theirs.sendall(b"$3\r\nab")
        with pytest.raises(TimeoutError):
            TruncatedReplies(ours, lambda text: CommandError(text, text), 0).receive()
