"""Streams of results as server-sent events: `Accept: text/event-stream`.

    data: " upon"                            a chunk, as JSON; bytes of another type are in base64
    event: result
    data: {"chunks":7,"queue_us":402,...}    the end, with the figures that other answers have in headers
    event: error
    data: {"error":...,"status":...}         or this, if the request fails after the first event

A model that does not step has one chunk, its result. A client that goes away withdraws its request, which a
stepping model then stops to execute.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, Final

from carpool.client.entries import Encoded
from carpool.client.envelopes import EnvelopeStreamSink
from carpool.client.producer import Producer
from carpool.client.streams import AsyncStream, StreamTarget
from carpool.errors import CarpoolError
from carpool.messages.requests import JSON
from carpool.messages.results import Chunk
from carpool_gateway.answers import http_error_of
from carpool_gateway.content_encoding import decompress
from carpool_gateway.credentials import Key, now_s
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.native.infer import Asked, cancel, find
from carpool_gateway.native.results import error_line

_HEADERS: Final = b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
_COMMENT: Final = b":\n\n"  # a proxy would end a connection on which nothing is written
_COMMENT_INTERVAL_S: Final = 15.0


class Streaming:
    """Answers exchanges with the chunks of their requests."""

    def __init__(self, producer: Producer, limits: Limits) -> None:
        self._producer = producer
        self._limits = limits
        self._sink = EnvelopeStreamSink()

    async def infer(self, asked: Asked, key: Key, exchange: Exchange) -> None:
        """Send the body; answer with an event for each chunk. Raises CarpoolErrors before the first event."""
        key.count(1, now_s())
        await decompress(exchange, self._limits)
        channel, asked = await find(self._producer, asked)
        task, packer = asyncio.current_task(), self._producer.packer
        assert task is not None
        exchange.on_gone = lambda _: cancel(task)
        if exchange.is_gone:
            return
        target = StreamTarget(asyncio.Queue())
        body = Encoded(asked.content_type, b"", exchange.body)
        target.correlation_id = packer.add(
            channel, body, asked.fields, asked.timeout_s, self._sink, target, asked.correlation_id
        )
        async with AsyncStream(target, packer.close_stream, packer.loop) as stream:
            await _write_events(exchange, stream)


async def _write_events(exchange: Exchange, stream: AsyncStream) -> None:
    """Write what a stream yields, each event at once, and its end. Raises what it raises first."""
    chunks = 0
    while True:
        next_item = asyncio.ensure_future(anext(stream))
        try:
            while not (await asyncio.wait((next_item,), timeout=_COMMENT_INTERVAL_S))[0]:
                if chunks:
                    await exchange.write(_COMMENT)
            item = next_item.result()
        except StopAsyncIteration:
            break
        except CarpoolError as error:
            if not chunks:
                raise
            await exchange.write(b"event: error\ndata: %b\n" % error_line(http_error_of(error)))
            exchange.end()
            return
        finally:
            next_item.cancel()
        if not chunks:
            exchange.begin(200, _HEADERS)
        chunks += 1
        await exchange.write(_event_of(item))
    if not chunks:
        exchange.begin(200, _HEADERS)
    await exchange.write(_last_event(stream, chunks))
    exchange.end()


def _event_of(item: Any) -> bytes:
    """The events of a chunk, or of the result of a model that does not step."""
    if type(item) is not Chunk or not item.is_list:
        return _data(item.content_type, item.body or b"")
    if item.content_type == JSON:  # values that could not be put end to end
        values = json.loads(item.body)
        return b"".join([_data(JSON, json.dumps(value, separators=(",", ":")).encode()) for value in values])
    return _data(item.content_type, item.body)


def _data(content_type: str, body: bytes) -> bytes:
    text = body.replace(b"\n", b" ") if content_type == JSON else base64.b64encode(body)
    return b"data: %b\n\n" % text


def _last_event(stream: AsyncStream, chunks: int) -> bytes:
    reply = stream.reply
    assert reply is not None, "the stream has ended without an error"
    figures = {
        "correlation_id": reply.correlation_id,
        "chunks": chunks,
        "batch_size": reply.batch_size,
        "queue_us": reply.queue_us,
        "compute_us": reply.compute_us,
        "first_us": reply.first_us,
        **({"version": reply.version} if reply.version else {}),
    }
    return b"event: result\ndata: %b\n\n" % json.dumps(figures, separators=(",", ":")).encode()
