"""The events of a stream of OpenAI's API, without a model and a connection: comments while nothing comes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carpool.client.entries import Encoded
from carpool.client.sinks import Reply
from carpool.client.streams import StreamTarget
from carpool.errors import InternalError
from carpool.messages.results import Chunk, Result
from carpool_gateway.chunks import Chunks
from carpool_gateway.limits import BodyMemory
from carpool_gateway.openai.requests import Asked
from carpool_gateway.v1 import streaming

JSON = "application/json"


class Exchange:
    """An exchange whose client reads everything at once."""

    model = "m"

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.written = asyncio.Event()
        self.has_ended = False

    def begin(self, code: int, headers: bytes) -> None:
        assert code == 200

    async def write(self, part: bytes) -> None:
        self.parts.append(part)
        self.written.set()

    def write_if_read(self, part: bytes) -> None:
        self.parts.append(part)
        self.written.set()

    def end(self) -> None:
        self.has_ended = True


def answer_of(exchange: Exchange, *chunks: Chunks) -> asyncio.Task[None]:
    asked = Asked([b""] * len(chunks), is_stream=True)
    writer = streaming._Answer(cast(Any, exchange), "completions", asked, chunks)
    return asyncio.ensure_future(writer.write())


def chunks_and_target() -> tuple[Chunks, StreamTarget]:
    """Chunks of a request that is not sent, and where they come."""
    sent: list[StreamTarget] = []

    def add(*arguments: Any) -> str:
        sent.append(arguments[5])
        return "id"

    packer = SimpleNamespace(loop=asyncio.get_running_loop(), close_stream=StreamTarget.close, add=add)
    producer, body = cast(Any, SimpleNamespace(packer=packer)), Encoded(JSON, b"", b"")
    chunks = Chunks(
        producer, cast(Any, None), body, {}, None, memory=BodyMemory(1 << 30), unread_bytes_max=1 << 20
    )
    return chunks, sent[0]


def put(target: StreamTarget, text: str) -> None:
    target.put_chunk(target.index, [Chunk("id", JSON, b'"%b"' % text.encode(), target.index)])


def end(target: StreamTarget) -> None:
    target.put_output(Reply(Result("id", body=b'""'), "id", 1, 0, 0), target.index)


async def test_comments_are_written_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_COMMENT_INTERVAL_S", 0.001)
    exchange, (chunks, target) = Exchange(), chunks_and_target()
    task = answer_of(exchange, chunks)
    put(target, "one")
    while b":\n\n" not in exchange.parts:
        exchange.written.clear()
        await exchange.written.wait()
    put(target, "two")
    end(target)
    await task
    events = [part for part in exchange.parts if part != b":\n\n"]
    assert [b'"text":"one"' in events[0], b'"text":"two"' in events[1], len(events)] == [True, True, 4]
    assert events[-1] == b"data: [DONE]\n\n"
    assert exchange.has_ended


async def test_one_choice_that_fails_ends_all() -> None:
    exchange = Exchange()
    chunks, targets = zip(*[chunks_and_target() for _ in range(3)], strict=True)
    task = answer_of(exchange, *chunks)
    for target in targets:
        put(target, "a")
    while len(exchange.parts) < 3:
        await asyncio.sleep(0)
    targets[1].fail(InternalError("it broke"))
    await task
    put(targets[0], "b")
    await asyncio.sleep(0)
    assert len(exchange.parts) == 4
    assert exchange.parts[-1].startswith(b'data: {"error":{"message":"it broke"')
    assert exchange.has_ended
