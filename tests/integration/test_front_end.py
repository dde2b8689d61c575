"""A front end of another protocol (see `support.front_end`), on real Redis servers: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.client.producer import Producer
from carpool.keys import Keys
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.rows import LARGE_BODY_BYTES
from carpool_cli.local.embedded import EmbeddedRedis
from support.echo import EchoService
from support.front_end import EVENTS, serving
from support.models.stepping import text_of
from support.stack import Stack
from support.waiting import wait_until

MODELS: Final = (
    "plain.py:Echo",
    "plain.py:Noting",
    "faulty.py:Faulty",
    "stepping.py:Chain",
    "stepping.py:endless",
)
IN_FLIGHT: Final = 2_000  # in more than a hundred batches
CONNECTIONS: Final = 100
ODD_BODIES: Final = [
    (JSON, b' { "a" :\t[1.0e0 ,  null]\r\n} \n'),
    (JSON, b'"\\u00fc"'),
    (MSGPACK, b"\xcd\x00\x07"),  # 7 in more bytes than it needs
    (RAW, b""),
    ("image/png", b"\x89PNG\r\n\x1a\n\x00"),
    (JSON, b"1" + b" " * LARGE_BODY_BYTES),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("front_end"), append_only=False) as stack:
        stack.serve(*MODELS)
        yield stack


@pytest.fixture
async def served(stack: Stack) -> AsyncIterator[tuple[Producer, int]]:
    async with serving(stack.url) as served:
        yield served


class Connection:
    """An HTTP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def post(self, model: str, body: bytes, content_type: str = JSON, **headers: object) -> None:
        lines = [f"POST /{model} HTTP/1.1", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self) -> tuple[int, str, bytes]:
        """Status, content type and body of the next response."""
        status, headers = await self.head()
        return status, headers["Content-Type"], await self.reader.readexactly(int(headers["Content-Length"]))

    async def head(self) -> tuple[int, Mapping[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        return int(lines[0].split(" ")[1]), dict(line.split(": ", 1) for line in lines[1:] if line)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def connected(served: tuple[Producer, int]) -> Connection:
    return Connection(*await asyncio.open_connection("127.0.0.1", served[1]))


async def wait_for(predicate: Any, description: str) -> None:
    await asyncio.to_thread(wait_until, predicate, description=description)


async def test_bodies_and_results_are_not_touched() -> None:
    """What answers here echoes bytes, some of them in columns, and decodes nothing."""
    with EmbeddedRedis(append_only=False) as server, EchoService(server.url, "Bytes"):
        async with serving(server.url) as served:
            connection = await connected(served)
            for content_type, body in ODD_BODIES * 20:
                connection.post("Bytes", body, content_type)
            for content_type, body in ODD_BODIES * 20:
                assert await connection.answer() == (200, content_type, body)
            await connection.close()


async def test_bytes_reach_a_model_and_come_back_as_they_are(served: tuple[Producer, int]) -> None:
    connection = await connected(served)
    for content_type, body in [("application/vnd.odd+json", b' { "a" :\t1.0e0 }\n'), (RAW, b"\x00\xff")]:
        connection.post("Echo", body, content_type)
        assert await connection.answer() == (200, content_type, body)
    connection.post("Echo", b' [ "\\u00fc" ] ', JSON)  # a value, which its worker reads and writes
    assert await connection.answer() == (200, JSON, '["ü"]'.encode())
    await connection.close()


@pytest.mark.parametrize(
    ("model", "body", "headers", "status", "http"),
    [
        ("Echo", b'{"a":', {}, "INVALID_ARGUMENT", 400),
        ("Missing", b"1", {}, "NOT_FOUND", 404),
        ("Faulty", b'"raise"', {}, "INTERNAL", 500),
        ("Echo", b"1", {"content_type": "no type"}, "INVALID_ARGUMENT", 400),
        ("Echo", b"1", {"Carpool_Timeout_Ms": 0}, "INVALID_ARGUMENT", 400),
    ],
)
async def test_statuses(
    served: tuple[Producer, int], model: str, body: bytes, headers: dict[str, Any], status: str, http: int
) -> None:
    connection = await connected(served)
    connection.post(model, body, **headers)
    code, content_type, answer = await connection.answer()
    assert (code, content_type, json.loads(answer)["status"]) == (http, JSON, status)
    assert json.loads(answer)["error"]
    connection.post("Echo", b"7")  # the connection goes on
    assert await connection.answer() == (200, JSON, b"7")
    await connection.close()


async def test_client_that_goes_away_withdraws_what_waits(
    stack: Stack, served: tuple[Producer, int], tmp_path: Path
) -> None:
    """Its requests are never executed: the model notes each that it executes."""
    keys, gate, notes, packer = Keys("Noting"), tmp_path / "gate", tmp_path / "notes", served[0].packer
    staying, leaving, hasty = [await connected(served) for _ in range(3)]

    def post(connection: Connection, name: str, **headers: Any) -> None:
        body = {"notes": str(notes), "gate": str(gate), "name": name}
        connection.post("Noting", json.dumps(body).encode(), **headers)

    post(staying, "first")
    post(staying, "second")
    await wait_for(lambda: stack.redis.xlen(keys.batches) == 2, "one is executed and one is fetched ahead")
    for number in range(5):
        post(leaving, f"left {number}")
    await wait_for(lambda: len(packer.awaited) == 7, "all are sent")
    post(hasty, "expired", Carpool_Timeout_Ms=300)
    assert (await hasty.answer())[0] == 504
    await leaving.close()
    await wait_for(lambda: stack.redis.xlen(keys.requests) == 0, "those that wait are withdrawn, or expire")
    assert len(packer.awaited) == 2
    gate.touch()
    post(staying, "last")
    assert [(await staying.answer())[0] for _ in range(3)] == [200, 200, 200]
    assert notes.read_text().splitlines() == ["first", "second", "last"]
    assert len(packer.awaited) == 0
    await staying.close()
    await hasty.close()


async def test_chunks_come_as_events(served: tuple[Producer, int]) -> None:
    connection = await connected(served)
    connection.post("Chain", b'{"length": 5, "seed": 1}', Accept=EVENTS)
    status, headers = await connection.head()
    assert (status, headers["Content-Type"]) == (200, EVENTS)
    events = (await connection.reader.read()).split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events.pop() == b""
    text = "".join(json.loads(event.removeprefix(b"data: ")) for event in events)
    assert len(text) == len(text_of("x", 5))
    await connection.close()


async def test_error_of_a_stream_is_its_last_event(served: tuple[Producer, int]) -> None:
    connection = await connected(served)
    connection.post("Chain", b'{"length": 5, "raises_at": 2}', Accept=EVENTS)
    await connection.head()
    *chunks, last, _ = (await connection.reader.read()).split(b"\n\n")
    assert len(chunks) == 2
    assert last.startswith(b'event: error\ndata: {"error":')
    assert json.loads(last.partition(b"data: ")[2])["status"] == "INTERNAL"
    await connection.close()


async def test_stream_of_a_model_that_does_not_step_is_one_event(served: tuple[Producer, int]) -> None:
    connection = await connected(served)
    connection.post("Echo", b"[1,  2]", "text/plain", Accept=EVENTS)
    await connection.head()
    assert await connection.reader.read() == b"data: [1,  2]\n\n"
    await connection.close()


async def test_stream_that_is_left_is_withdrawn(
    stack: Stack, served: tuple[Producer, int], tmp_path: Path
) -> None:
    """The model ends it: otherwise it would have no end."""
    connection, closed = await connected(served), tmp_path / "closed"
    connection.post("endless", json.dumps({"text": "x", "closed": str(closed)}).encode(), Accept=EVENTS)
    await connection.head()
    await connection.reader.readuntil(b"\n\n")
    await connection.close()
    await wait_for(closed.exists, "the model has ended it")
    assert len(served[0].packer.awaited) == 0


async def test_two_thousand_in_flight_get_their_own_results(
    stack: Stack, served: tuple[Producer, int], tmp_path: Path
) -> None:
    connections = [await connected(served) for _ in range(CONNECTIONS)]
    each, gate = IN_FLIGHT // CONNECTIONS, tmp_path / "gate"
    for number, connection in enumerate(connections):
        for at in range(each):
            body = {"gate": str(gate), "number": number * each + at}
            connection.post("Echo", json.dumps(body).encode())
    packer = served[0].packer
    await wait_for(lambda: len(packer.awaited) == IN_FLIGHT, "all are in flight")
    gate.touch()
    for number, connection in enumerate(connections):
        for at in range(each):
            status, _, answer = await connection.answer()
            assert (status, json.loads(answer)["number"]) == (200, number * each + at)
    assert packer.timed_out == 0
    for connection in connections:
        await connection.close()
