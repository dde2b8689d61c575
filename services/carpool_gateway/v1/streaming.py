"""Streams of OpenAI's API: the events of completions and chat, as the model writes.

What a client reads is a prefix of what the model writes. It ends with `data: [DONE]`, or else with an event
that has an `error`, or with the end of the connection. Each event is written by itself, because some clients
take what they receive at a time for whole events. A client that goes away withdraws its requests.

Until the first text is there, an error is an answer with its status: the headers wait for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from carpool.client.entries import Channel, Encoded
from carpool.client.producer import Producer
from carpool.errors import CarpoolError
from carpool.messages.requests import JSON
from carpool_gateway.answers import http_error_of
from carpool_gateway.chunks import Chunks
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.openai.answers import COMMENT, DONE, EVENT_HEADERS, EventFormat, error_event, text_of
from carpool_gateway.openai.errors import after_acceptance
from carpool_gateway.openai.pieces import Written, usage_of
from carpool_gateway.openai.requests import Asked

_COMMENT_INTERVAL_S: Final = 15.0  # a proxy would end a connection on which nothing is written


class Streams:
    """Answers exchanges with events."""

    def __init__(self, producer: Producer, limits: Limits) -> None:
        self._producer = producer
        self._limits = limits

    async def answer(
        self,
        exchange: Exchange,
        interface: str,
        asked: Asked,
        channel: Channel,
        fields: Mapping[str, Any],
        timeout_s: float,
        own_id: str | None,
    ) -> None:
        """Send the prompts, and answer with what is written for them. Raises CarpoolErrors and HttpError
        before the first event."""
        exchange.cancel_when_gone()
        streams: list[Chunks] = []
        try:
            for body in asked.bodies:
                chunks = Chunks(
                    self._producer,
                    channel,
                    Encoded(JSON, b"", body),
                    fields,
                    timeout_s,
                    memory=exchange.connection.memory,
                    unread_bytes_max=self._limits.unread_bytes,
                    correlation_id=own_id,
                )
                streams.append(chunks)
            await _Answer(exchange, interface, asked, streams).write()
        finally:
            for chunks in streams:
                chunks.close()


class _Answer:
    """The events of one exchange. `streams`: of its prompts, each a choice."""

    def __init__(
        self,
        exchange: Exchange,
        interface: str,
        asked: Asked,
        streams: Sequence[Chunks],
    ) -> None:
        self._exchange = exchange
        self._interface = interface
        self._has_usage = asked.has_usage
        self._streams = streams
        self._written = [Written(asked.extras) for _ in streams]
        self._format: EventFormat | None = None  # once the answer has begun
        self._is_quiet = False  # nothing was written for some time
        self._timer: asyncio.TimerHandle | None = None

    async def write(self) -> None:
        """Write all events. Raises HttpError before the first one."""
        try:
            await self._write_choices()
        except CarpoolError as error:
            failure = after_acceptance(http_error_of(error))
            if self._format is None:
                raise failure from None
            await self._exchange.write(error_event(failure))
        else:
            await self._write_end()
        finally:
            if self._timer is not None:
                self._timer.cancel()
        self._exchange.end()

    async def _write_choices(self) -> None:
        """Write what the model writes for each prompt. Raises CarpoolErrors: that of one choice ends all."""
        choices = [self._write_choice(index, chunks) for index, chunks in enumerate(self._streams)]
        if len(choices) == 1:
            await choices[0]
            return
        tasks = [asyncio.ensure_future(choice) for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _write_choice(self, index: int, chunks: Chunks) -> None:
        written = self._written[index]
        async for item in chunks:
            await self._write_piece(index, item.content_type, item.body or b"")
        reply = chunks.reply
        assert reply is not None, "the stream has ended without an error"
        if not chunks.count:  # a model that steps may finish a request without a chunk
            result = reply.value
            await self._write_piece(index, result.content_type, result.body)
        form = await self._begun()
        await self._exchange.write(form.finish(index, written.finish_reason))

    async def _write_piece(self, index: int, content_type: str, body: bytes) -> None:
        written = self._written[index]
        text = text_of(content_type, body, written)
        extras = written.take_extras()
        if text or extras is not None:
            self._is_quiet = False
            form = self._format or await self._begun()
            event = form.text(index, text) if extras is None else form.piece(index, text, extras)
            await self._exchange.write(event)

    async def _begun(self) -> EventFormat:
        """How events are written, of an answer that has begun. A chat has one choice, and begins with its
        role."""
        if self._format is None:
            exchange = self._exchange
            self._format = EventFormat(
                self._interface,
                correlation_id=self._streams[0].correlation_id,
                model=exchange.model,
                created_s=int(time.time()),
                has_usage=self._has_usage,
            )
            exchange.begin(200, EVENT_HEADERS)
            self._comment_later()
            if self._format.has_role:
                await exchange.write(self._format.role(0))
        return self._format

    async def _write_end(self) -> None:
        usage = usage_of(self._written) if self._has_usage else None
        if usage is not None:
            await self._exchange.write((await self._begun()).usage(usage))
        await asyncio.sleep(0)  # what was written is sent, so that this is a packet of its own
        await self._exchange.write(DONE)

    # --- comments ------------------------------------------------------------------------------------------

    def _comment_later(self) -> None:
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(_COMMENT_INTERVAL_S, self._comment_if_quiet)

    def _comment_if_quiet(self) -> None:
        if self._is_quiet:
            self._exchange.write_if_read(COMMENT)
        self._comment_later()
