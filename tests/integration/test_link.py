"""A link on a real Redis: sizes of arguments and replies, errors, timeouts, and closed connections."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from carpool.store.connection import CommandError, Link, LinkError, Script
from carpool.store.redis_socket import RedisSocket, pack
from carpool_cli.local.embedded import EmbeddedRedis
from support.waiting import EVENTUALLY_S

LARGE = 16 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as redis:
        yield redis


@pytest.fixture
def link(server: EmbeddedRedis) -> Iterator[Link]:
    link = Link(server.url, name="link", timeout_s=EVENTUALLY_S)
    link.call("FLUSHALL")
    yield link
    link.close()


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, LARGE + 1, 300_000, 20_000_000])
def test_arguments_of_any_size_arrive_and_return(link: Link, size: int) -> None:
    body = bytes(range(251)) * (size // 251 + 1)
    assert link.call("ECHO", body[:size]) == body[:size]


def test_large_and_small_arguments_are_mixed_in_any_order(link: Link) -> None:
    """More large ones than one system call takes, and more bytes than the socket's buffer."""
    large = [bytes([number % 256]) * (LARGE + number) for number in range(700)]
    link.call("RPUSH", "list", large[0], large[1], "text", 7, 1.5, large[2], "", large[3])
    expected = [large[0], large[1], b"text", b"7", b"1.5", large[2], b"", large[3]]
    assert link.call("LRANGE", "list", 0, -1) == expected
    link.call("RPUSH", "long list", *large)
    assert link.call("LRANGE", "long list", 0, -1) == large


def test_replies_of_commands_sent_together_are_received_in_order(link: Link) -> None:
    link.call("PING")
    assert link._socket is not None
    commands = [part for number in range(100) for part in pack(("ECHO", f"{number}" * number))]
    link._socket.send([b"".join(commands)])
    assert link.receive() == b""
    assert link.readable(0.0)  # received already, with the first
    assert [link.receive() for _ in range(99)] == [f"{number}".encode() * number for number in range(1, 100)]
    assert not link.readable(0.0)


@pytest.mark.parametrize("seed", range(5))
def test_strings_of_expected_length_and_other_replies_are_mixed_in_any_order(link: Link, seed: int) -> None:
    """Whatever comes in place of what was expected, each reply is that of its command."""
    choice = random.Random(seed)
    link.call("RPUSH", "list", "x")
    calls: list[tuple[tuple[str | int, ...], int]] = []
    expected: list[bytes | str] = []
    for number in range(200):
        size = choice.choice((0, 1, LARGE - 1, LARGE, LARGE + 1, 10 * LARGE))
        text = bytes([number]) * size
        link.call("SET", f"text {number}", text)
        declared = choice.choice((size, size, size, size + 1, max(0, size - 1), LARGE))
        kind = choice.choice(("text", "text", "text", "missing", "list"))
        key = f"text {number}" if kind == "text" else kind
        calls.append((("GETRANGE", key, 0, declared), declared))
        outcomes: dict[str, bytes | str] = {"text": text[: declared + 1], "missing": b"", "list": "WRONGTYPE"}
        expected.append(outcomes[kind])
    replies = link.call_strings(calls)
    assert [reply.code if isinstance(reply, CommandError) else reply for reply in replies] == expected
    assert link.call("PING") == b"PONG"


def test_connection_that_is_closed_within_a_string(link: Link) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        redis_socket = RedisSocket(ours, lambda text: CommandError(text, text))
        theirs.sendall(b"$%d\r\n" % LARGE + b"x" * (LARGE // 2))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="closed"):
            redis_socket.receive(LARGE)


def test_error_replies_have_their_first_word_as_code(link: Link) -> None:
    link.call("SET", "text", "x")
    for command, code in (
        (("LLEN", "text"), "WRONGTYPE"),
        (("NO-SUCH-COMMAND",), "ERR"),
        (("EVALSHA", "0" * 40, 0), "NOSCRIPT"),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">"), "NOGROUP"),
    ):
        with pytest.raises(CommandError) as error:
            link.call(*command)
        assert error.value.code == code
        assert str(error.value).startswith(code + " ")
    replies = link.call_many(("ECHO", "a"), ("LLEN", "text"), ("ECHO", "b"))
    assert replies[::2] == [b"a", b"b"]
    assert isinstance(replies[1], CommandError)


def test_error_inside_of_a_reply_is_a_command_error(link: Link) -> None:
    link.call("SET", "text", "x")
    *_, executed = link.call_many(("MULTI",), ("LLEN", "text"), ("ECHO", "a"), ("EXEC",))
    assert isinstance(executed[0], CommandError)
    assert (executed[0].code, executed[1]) == ("WRONGTYPE", b"a")


def test_script_is_run_by_source_if_redis_does_not_know_it(link: Link) -> None:
    script = Script("lease")
    link.call("SCRIPT", "FLUSH")
    for _ in range(2):
        assert link.run(script, ["lease"], ["me", 5000]) == 1


def test_late_reply_is_an_error_and_the_next_call_connects_again(server: EmbeddedRedis) -> None:
    link = Link(server.url, name="impatient")
    link._timeout_s = 0.05
    with pytest.raises(LinkError, match="no answer in time"):
        link.call("BLPOP", "empty", 0)
    link._timeout_s = EVENTUALLY_S
    assert link.call("ECHO", "a") == b"a"
    link.close()


def test_closed_connection_is_readable_and_an_error_once(link: Link, server: EmbeddedRedis) -> None:
    other = Link(server.url, name="other")
    link.send("BLPOP", "empty", 0)
    assert not link.readable(0.0)
    other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert link.readable(EVENTUALLY_S)
    with pytest.raises(LinkError, match="connection closed by server"):
        link.receive()
    with pytest.raises(LinkError, match="connection closed"):
        link.receive()
    assert link.call("ECHO", "a") == b"a"
    other.close()


def test_link_that_is_no_longer_signed_in_connects_again(link: Link, server: EmbeddedRedis) -> None:
    link.call("CONFIG", "SET", "requirepass", "secret")
    signed_in = Link(f"redis://:secret@127.0.0.1:{server.port}/0", name="signed-in")
    try:
        signed_in.call("RESET")
        with pytest.raises(LinkError, match="NOAUTH"):
            signed_in.call("ECHO", "a")
        assert signed_in.call("ECHO", "a") == b"a"
    finally:
        signed_in.call("CONFIG", "SET", "requirepass", "")
        signed_in.close()
