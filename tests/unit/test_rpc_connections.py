"""How connections of gRPC end: grpcio's own server with the options of the gateway, and clients by hand."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from carpool_gateway.limits import Limits
from carpool_gateway.rpc.server import options_of
from support.waiting import EVENTUALLY_S

WINDOW_BYTES: Final = 65_535  # that a client of HTTP/2 gives to begin with
LARGE: Final = bytes(16 * WINDOW_BYTES)
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACK: Final = 1
END_HEADERS, END_STREAM = 4, 1


@asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[tuple[int, set[str]]]:
    """A server that answers LARGE to what is empty, and else the same. Yields its port, and its peers."""
    peers: set[str] = set()

    async def answer(message: bytes, context: Any) -> bytes:
        peers.add(context.peer())
        return message or LARGE

    class Table(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
        def service(self, handler_call_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server(options=options_of(limits))
    server.add_generic_rpc_handlers((Table(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, peers
    finally:
        await server.stop(0)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(*named: tuple[str, str]) -> bytes:
    """Headers as literals that are not indexed."""
    return b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in named
    )


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """The kinds, flags and payloads of the frames that the server sends, until it closes the connection."""
    buffer = b""
    while data := connection.recv(1 << 20):
        buffer += data
        while len(buffer) >= 9 and len(buffer) >= (end := 9 + int.from_bytes(buffer[:3], "big")):
            yield buffer[3], buffer[4], buffer[9:end]
            buffer = buffer[end:]


def call_without_reading(port: int) -> tuple[int, bool]:
    """Call, answer pings, and let the server send no more than WINDOW_BYTES. Returns how many bytes have come
    until the server closed the connection, and whether it said that this is because of its age."""
    asked = headers(
        (":method", "POST"), (":scheme", "http"), (":path", "/a/b"), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    )  # fmt: skip
    received, is_old = 0, False
    with socket.create_connection(("127.0.0.1", port), timeout=EVENTUALLY_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        connection.sendall(frame(HEADERS, END_HEADERS, 1, asked) + frame(DATA, END_STREAM, 1, bytes(5)))
        for kind, flags, payload in frames(connection):
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            received += len(payload) if kind == DATA else 0
            is_old |= kind == GOAWAY and payload.endswith(b"max_age")
    return received, is_old


async def test_an_answer_that_is_never_read_ends_with_its_connection() -> None:
    limits = Limits(timeout_s=0.1, write_s=0.1, grpc_connection_s=0.2)
    async with serving(limits) as (port, _):
        received, is_old = await asyncio.to_thread(call_without_reading, port)
    assert (received, is_old) == (WINDOW_BYTES, True)


async def test_clients_notice_nothing_of_the_age_of_their_connections() -> None:
    async with (
        serving(Limits(grpc_connection_s=0.1)) as (port, peers),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.unary_unary("/a/b")
        while len(peers) < 4:
            assert await call(b"short", timeout=EVENTUALLY_S) == b"short"
