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

import base64
import json
from typing import Final

from carpool.client.entries import Encoded
from carpool.client.producer import Producer
from carpool.errors import CarpoolError
from carpool.messages.requests import JSON
from carpool.messages.results import Chunk, Result
from carpool_gateway.answers import http_error_of
from carpool_gateway.chunks import Chunks
from carpool_gateway.content_encoding import decompress
from carpool_gateway.credentials import Key, now_s
from carpool_gateway.events import Events
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.native.infer import Asked, find
from carpool_gateway.native.results import error_line

_CONTENT_TYPE: Final = b"text/event-stream"


class Streaming:
    """Answers exchanges with the chunks of their requests."""

    def __init__(self, producer: Producer, limits: Limits) -> None:
        self._producer = producer
        self._limits = limits

    async def infer(self, asked: Asked, key: Key, exchange: Exchange) -> None:
        """Send the body; answer with an event for each chunk. Raises CarpoolErrors before the first event."""
        key.count(1, now_s())
        await decompress(exchange, self._limits)
        channel, asked = await find(self._producer, asked)
        exchange.cancel_when_gone()
        chunks = Chunks(
            self._producer,
            channel,
            Encoded(asked.content_type, b"", exchange.body),
            asked.fields,
            asked.timeout_s,
            memory=exchange.connection.memory,
            unread_bytes_max=self._limits.unread_bytes,
            correlation_id=asked.correlation_id,
        )
        async with chunks:
            with Events(exchange, _CONTENT_TYPE) as events:
                await _write_events(events, chunks)


async def _write_events(events: Events, chunks: Chunks) -> None:
    """Write chunks, each at once, and the end. Raises what is raised first."""
    try:
        async for item in chunks:
            await events.write(_event_of(item))
    except CarpoolError as error:
        if not events.has_begun:
            raise
        failure = http_error_of(error)
        await events.fail(failure, b"event: error\ndata: %b\n" % error_line(failure))
    else:
        await events.write(_last_event(chunks))
        events.end()


def _event_of(item: Chunk | Result) -> bytes:
    """The events of a chunk, or of the result of a model that does not step."""
    if not isinstance(item, Chunk) or not item.is_list:
        return _data(item.content_type, item.body or b"")
    if item.content_type == JSON:  # values that could not be put end to end
        values = json.loads(item.body)
        return b"".join([_data(JSON, json.dumps(value, separators=(",", ":")).encode()) for value in values])
    return _data(item.content_type, item.body)


def _data(content_type: str, body: bytes) -> bytes:
    if content_type != JSON:
        body = base64.b64encode(body)
    elif b"\n" in body or b"\r" in body:  # both end a line of an event; in JSON they are blanks
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return b"data: %b\n\n" % body


def _last_event(chunks: Chunks) -> bytes:
    reply = chunks.reply
    assert reply is not None, "the stream has ended without an error"
    figures = {
        "correlation_id": reply.correlation_id,
        "chunks": chunks.count,
        "batch_size": reply.batch_size,
        "queue_us": reply.queue_us,
        "compute_us": reply.compute_us,
        "first_us": reply.first_us,
        **({"version": reply.version} if reply.version else {}),
    }
    return b"event: result\ndata: %b\n\n" % json.dumps(figures, separators=(",", ":")).encode()
