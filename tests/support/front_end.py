"""A front end: HTTP/1.1 over what a producer offers to other protocols, with the standard library only.

    POST /MODEL                  the body goes to the model as it is, and its result comes back as it is
    Accept: text/event-stream    its chunks come as events
    Carpool-Timeout-Ms: 500      in place of TIMEOUT_S

Requests may be pipelined. A client that closes its connection withdraws what has no answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from carpool.client.encoding import encoded
from carpool.client.envelopes import EnvelopeSink, EnvelopeStreamSink
from carpool.client.options import RequestOptions, read_options
from carpool.client.producer import Producer
from carpool.client.streams import AsyncStream, StreamTarget
from carpool.errors import HTTP_STATUS, OK, CarpoolError
from carpool.messages.results import Result

TIMEOUT_S: Final = 60.0
EVENTS: Final = "text/event-stream"
_Answer = bytes | AsyncStream


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[tuple[Producer, int]]:
    """Serve all models on a port, which is yielded with the producer."""
    producer = Producer(url, None, TIMEOUT_S, "none")
    front_end = FrontEnd(producer)
    try:
        await producer.connect()
        async with await asyncio.start_server(front_end.serve, "127.0.0.1", 0) as server:
            yield producer, server.sockets[0].getsockname()[1]
    finally:
        await producer.close()


class FrontEnd:
    """Passes requests to models, and results back."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._results, self._streams = EnvelopeSink(), EnvelopeStreamSink()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until its client closes it."""
        answers: asyncio.Queue[asyncio.Task[_Answer]] = asyncio.Queue()
        tasks: set[asyncio.Task[Any]] = {asyncio.ensure_future(_write(answers, writer))}
        try:
            while True:
                answer = asyncio.ensure_future(self._answer(*await _read(reader)))
                answers.put_nowait(answer)
                tasks.add(answer)
                answer.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for task in tasks:
                task.cancel()
            writer.close()

    async def _answer(self, model: str, headers: dict[str, str], body: bytes) -> _Answer:
        try:
            return await self._infer(model, headers, body)
        except CarpoolError as error:
            return _response(error.status, "application/json", _sentence(error.status, error.detail))

    async def _infer(self, model: str, headers: dict[str, str], body: bytes) -> _Answer:
        packer, options = self._producer.packer, RequestOptions()
        if (timeout_ms := headers.get("carpool-timeout-ms")) is not None:
            options["timeout"] = int(timeout_ms) / 1000
        timeout_s, fields = read_options(options, TIMEOUT_S)
        channel = self._producer.channels.get(model)
        if channel is None:
            channel = await self._producer.open_channel(model, timeout_s)
        content_type = headers.get("content-type", "application/octet-stream")
        add = partial(packer.add, channel, encoded(content_type, body), fields, timeout_s)
        if headers.get("accept") == EVENTS:
            target = StreamTarget(asyncio.Queue())
            target.correlation_id = add(self._streams, target)
            return AsyncStream(target, packer.close_stream, packer.loop)
        future: asyncio.Future[Result] = packer.loop.create_future()
        correlation_id = add(self._results, future)
        try:
            result = await future
        except asyncio.CancelledError:
            packer.withdraw(correlation_id, future)
            raise
        if result.status == OK:
            return _response(OK, result.content_type, result.body or b"")
        return _response(result.status, "application/json", _sentence(result.status, result.detail))


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """The model, the headers and the body of the next request. Raises IncompleteReadError at the end."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.split(":", 1) for line in lines if line]
    headers = {name.lower(): value.strip() for name, value in pairs}
    return first.split(" ")[1][1:], headers, await reader.readexactly(int(headers["content-length"]))


async def _write(answers: asyncio.Queue[asyncio.Task[_Answer]], writer: asyncio.StreamWriter) -> None:
    """Write the answers in the order of the requests."""
    with suppress(ConnectionError):
        while True:
            answer = await (await answers.get())
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await _write_events(answer, writer)
            await writer.drain()


async def _write_events(stream: AsyncStream, writer: asyncio.StreamWriter) -> None:
    """Write chunks as they come. The end of the connection is that of the events."""
    writer.write(f"HTTP/1.1 200 \r\nContent-Type: {EVENTS}\r\nConnection: close\r\n\r\n".encode())
    try:
        async for chunk in stream:
            writer.write(b"data: " + chunk.body + b"\n\n")
            await writer.drain()
    except CarpoolError as error:
        writer.write(b"event: error\ndata: " + _sentence(error.status, error.detail) + b"\n\n")
    writer.write_eof()


def _sentence(status: str, detail: str | None) -> bytes:
    return json.dumps({"error": detail, "status": status}).encode()


def _response(status: str, content_type: str, body: bytes) -> bytes:
    code = HTTP_STATUS.get(status, 500)
    head = f"HTTP/1.1 {code} \r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body
