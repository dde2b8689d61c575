"""Clients of a gateway that go away at a hundred points of a request's life, and more of them than a queue
takes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool.keys import Keys
from support.http import Connection, call, request
from support.stack import Service, Stack, fixed_keys, frozen
from support.waiting import wait_until

ECHO: Final = "/carpool/v1/models/Echo/infer"
NOTING: Final = "/carpool/v1/models/Noting/infer"
BUSY: Final = "/carpool/v1/models/Busy/infer"
POINTS: Final = 25  # of each of the four parts of a request's life
LARGE_BYTES: Final = 2_000_000  # of an answer, more than sockets buffer
QUEUE_SIZE: Final = 20
FLOODING_CLIENTS, REQUESTS_OF_EACH = 100, 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "plain.py:Noting", "hashing.py:Busy")
        yield stack


@pytest.fixture
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def points_in(size: int) -> list[int]:
    """Numbers of bytes, from 1 to less than all, evenly spread."""
    return [1 + at * (size - 2) // (POINTS - 1) for at in range(POINTS)]


def visit(url: str, sent: bytes, at: int) -> None:
    """Send this, and go away: each second time with a reset."""
    connection = Connection(url)
    connection.send(sent)
    (connection.close if at % 2 else connection.reset)()


def assert_forgotten(gateway: Service, shared: Stack, before: set[str]) -> None:
    """Nothing is left of any client: in the memory of the gateway, and in Redis."""
    expected = {"carpool_gateway_body_bytes": 0.0, "carpool_gateway_connections": 1.0}

    def is_empty() -> bool:
        lines = call(gateway.url, "GET", "/metrics").body.decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(values[name]) for name in expected} == expected

    wait_until(is_empty, description="the gateway holds nothing of its clients")
    for model in ("Echo", "Noting"):
        shared.wait_until_idle(model)
        assert shared.pending(model) == 0
    assert shared.keys_without_ttl() <= before | fixed_keys("Echo") | fixed_keys("Noting")
    assert call(gateway.url, "POST", ECHO, b"7").body == b"7"


def test_while_headers_and_bodies_are_sent(gateway: Service, shared: Stack) -> None:
    before = shared.keys_without_ttl()
    body = gzip.compress(os.urandom(40_000))
    data = request("POST", ECHO, body, Content_Encoding="gzip", Content_Type="application/octet-stream")
    head_bytes = len(data) - len(body)
    cuts = [*points_in(head_bytes), *(head_bytes + point for point in points_in(len(body)))]
    for at, cut in enumerate(cuts):
        visit(gateway.url, data[:cut], at)
    assert_forgotten(gateway, shared, before)


def test_while_a_body_is_decompressed(gateway: Service, shared: Stack) -> None:
    """Parts that come after the client has gone do not count, as nobody would take them off again."""
    before = shared.keys_without_ttl()
    body = gzip.compress(bytes(30_000_000))  # in thirty parts
    data = request("POST", ECHO, body, Content_Encoding="gzip", Content_Type="application/octet-stream")
    for at in range(5):
        visit(gateway.url, data, at)
    assert_forgotten(gateway, shared, before)


def test_while_their_requests_wait_or_are_executed(
    gateway: Service, shared: Stack, tmp_path: Path, gate: Path
) -> None:
    """One is executed, in one call of several lines; what waits is executed by nobody."""
    before, notes = shared.keys_without_ttl(), tmp_path / "notes"

    def body(name: str) -> bytes:
        return json.dumps({"name": name, "notes": str(notes), "gate": str(gate)}).encode()

    patient = {"Carpool_Timeout_Ms": "200000"}  # or they would expire meanwhile
    executing = Connection(gateway.url)
    executing.send(request("POST", f"{NOTING}_many", body("first"), **patient))
    wait_until(notes.exists, description="the first is executed")
    waiting = [Connection(gateway.url) for _ in range(POINTS - 1)]
    for at, connection in enumerate(waiting):
        # The first half is on the request stream, and so may be what is still on its way to it.
        path = NOTING if at % 3 else f"{NOTING}_many"
        connection.send(request("POST", path, body(f"gone-{at}"), **patient))
        if at == POINTS // 2:
            wait_until(
                lambda: shared.redis.xlen(Keys("Noting").requests) > 0, description="some of them wait"
            )
    for at, connection in enumerate([*waiting, executing]):
        (connection.close if at % 2 else connection.reset)()
    wait_until(
        lambda: shared.redis.xlen(Keys("Noting").requests) == 0, description="all that waited are withdrawn"
    )
    gate.touch()
    assert_forgotten(gateway, shared, before)
    executed = notes.read_text().split()
    assert executed[0] == "first"
    assert len(executed) <= 2, "a worker has fetched one ahead; the others are not executed"


def test_while_answers_are_written(gateway: Service, shared: Stack) -> None:
    before, body = shared.keys_without_ttl(), os.urandom(LARGE_BYTES)
    data = request("POST", ECHO, body, Content_Type="application/octet-stream")
    for at, taken in enumerate(points_in(LARGE_BYTES)):
        connection = Connection(gateway.url)
        connection.send(data)
        received = 0
        while received < taken:
            received += len(connection.socket.recv(min(taken - received, 65_536)))
        (connection.close if at % 2 else connection.reset)()
    assert_forgotten(gateway, shared, before)


def test_more_than_the_queue_takes_is_refused_and_nothing_lost(gateway: Service, shared: Stack) -> None:
    """Given a worker that stands still until the queue is full, expect a result or a 429 for each request,
    and nothing else."""
    shared.configure("Busy", max_queue_size=str(QUEUE_SIZE))
    host, port = gateway.url.removeprefix("http://").split(":")
    codes: Counter[int] = Counter()
    worker = shared.served_by("Busy")

    async def flood(client: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for at in range(REQUESTS_OF_EACH):
            writer.write(request("POST", BUSY, json.dumps(f"{client}.{at}").encode()))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
            content = json.loads(await reader.readexactly(int(headers["content-length"])))
            code = int(head.split(" ")[1])
            codes[code] += 1
            if code == 429:
                worker.thaw()
                assert (headers["retry-after"], content["status"]) == ("1", "RESOURCE_EXHAUSTED")
            else:
                assert (code, len(content)) == (200, 32), content
        writer.close()

    async def flood_together() -> None:
        await asyncio.gather(*map(flood, range(FLOODING_CLIENTS)))

    with frozen(worker):
        asyncio.run(flood_together())
    assert codes.total() == FLOODING_CLIENTS * REQUESTS_OF_EACH
    assert codes.keys() == {200, 429}, "some are served, and some refused"
    shared.wait_until_idle("Busy")
