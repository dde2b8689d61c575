"""`generate` and `generate_stream`: plain JSON in; plain JSON out, once or as server-sent events.

    data: {"model_name":"m","model_version":"1","text_output":" upon"}      a response
    data: {"error":...,"status":...}                                        the last, if it fails after one

What is wrong with the request is answered with its status and JSON, as everywhere. If it fails later, and
before the first response, the only event says so, and the answer has the status, as in Triton.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from carpool.errors import CarpoolError, UnimplementedError
from carpool_gateway.answers import JSON_HEADER, error_body, http_error_of
from carpool_gateway.content_encoding import decompress
from carpool_gateway.events import Events
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip.generate import (
    GenerateRequest,
    decode_generate,
    encode_generate,
    encode_text,
    encode_whole,
)
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.requests import InferRequest
from carpool_gateway.openai.pieces import Written
from carpool_gateway.tensor_requests import LARGE_JSON_BYTES, Asked
from carpool_gateway.v2.streams import Outputs, Responses, TensorStreams, is_large_json

_CONTENT_TYPE: Final = b"text/event-stream; charset=utf-8"  # Triton's clients compare all of it
Encode = Callable[[Outputs], bytes]


class Generating:
    """Answers exchanges with responses in plain JSON."""

    def __init__(self, streams: TensorStreams, limits: Limits) -> None:
        self._streams = streams
        self._limits = limits

    async def generate(self, asked: Asked, exchange: Exchange) -> None:
        """Answer with the only response. Raises HttpError and CarpoolErrors."""
        model, (request, is_whole, prompt) = await self._read(exchange)
        if prompt:
            texts = [text async for text in self._texts(asked, model, prompt, request, exchange)]
            exchange.respond(200, JSON_HEADER, encode_text(model, request.id, "".join(texts)))
            return
        # What a model without outputs of its own makes is put end to end.
        is_joined = not model.declares_outputs
        responses = await self._streams.send(
            asked, model, request, exchange.connection.memory, is_joined=is_joined
        )
        async with responses:
            outputs = await _only(model, responses)
        encode = partial(_encode(model, request.id, is_whole=is_whole), outputs)
        is_large = is_large_json(outputs)
        exchange.respond(200, JSON_HEADER, await self._streams.compute(encode) if is_large else encode())

    async def generate_stream(self, asked: Asked, exchange: Exchange) -> None:
        """Answer with an event for each response. Raises HttpError and CarpoolErrors if it cannot be sent."""
        model, (request, is_whole, prompt) = await self._read(exchange)
        if prompt:
            with Events(exchange, _CONTENT_TYPE) as events:
                texts = self._texts(asked, model, prompt, request, exchange)
                await self._write_events(events, texts, partial(encode_text, model, request.id))
            return
        responses = await self._streams.send(asked, model, request, exchange.connection.memory)
        async with responses:
            with Events(exchange, _CONTENT_TYPE) as events:
                await self._write_events(events, responses, _encode(model, request.id, is_whole=is_whole))

    async def _texts(
        self, asked: Asked, model: OfferedModel, prompt: bytes, request: InferRequest, exchange: Exchange
    ) -> AsyncIterator[str]:
        """What a model that speaks completions writes, piece by piece."""
        written, memory = Written(), exchange.connection.memory
        async with await self._streams.send_value(asked, model.name, prompt, request, memory) as chunks:
            async for item in chunks:
                if text := written.add(item.content_type, item.body or b""):
                    yield text

    async def _write_events(
        self, events: Events, responses: AsyncIterator[Any], encode: Callable[[Any], bytes]
    ) -> None:
        """Write responses, each at once."""
        try:
            async for outputs in responses:
                write = partial(encode, outputs)
                is_large = not isinstance(outputs, str) and is_large_json(outputs)
                written = await self._streams.compute(write) if is_large else write()
                await events.write(b"data: %b\n\n" % written)
        except CarpoolError as error:
            failure = http_error_of(error)
            await events.fail(failure, b"data: %b\n" % error_body(failure))
        else:
            events.end()

    async def _read(self, exchange: Exchange) -> tuple[OfferedModel, GenerateRequest]:
        await decompress(exchange, self._limits)
        model = await self._streams.find(exchange.model, exchange.parameters.get("version"))
        body = exchange.body
        decode = partial(decode_generate, model, body)
        request = await self._streams.compute(decode) if len(body) > LARGE_JSON_BYTES else decode()
        exchange.cancel_when_gone()
        return model, request


async def _only(model: OfferedModel, responses: Responses) -> Outputs:
    """The only response. Raises UnimplementedError if there is none, or another."""
    found: Outputs | None = None
    async for outputs in responses:
        if found is not None:
            raise _not_one(model, "another")
        found = outputs
    if found is None:
        raise _not_one(model, "none")
    return found


def _not_one(model: OfferedModel, made: str) -> UnimplementedError:
    return UnimplementedError(
        f"generate expects model to produce exactly 1 response, and {model.name!r} made {made}: use "
        "generate_stream, which has any number"
    )


def _encode(model: OfferedModel, request_id: str, *, is_whole: bool) -> Encode:
    return partial(encode_whole if is_whole else encode_generate, model, request_id)
