"""Requests of tensors over HTTP: tensors in, tensors out.

A request has no task, if its model was used lately: see `tensor_requests`. A client that goes away withdraws
its rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from carpool.client.entries import Channel
from carpool.rows import Rows
from carpool_gateway.answers import JSON_HEADER
from carpool_gateway.compression import COMPRESSED_BYTES_MIN, chosen_coding, compress
from carpool_gateway.content_encoding import decompress
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip.prepared import Prepared, Preparer
from carpool_gateway.oip.requests import HEADER_LENGTH
from carpool_gateway.oip.responses import RowResult
from carpool_gateway.tensor_requests import (
    LARGE_JSON_BYTES,
    LARGE_TEXTS_BYTES,
    Asked,
    TensorRequests,
    takes_long,
)

_LENGTH: Final = HEADER_LENGTH.lower().encode()
_BINARY_HEADERS: Final = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


class TensorInference:
    """Answers exchanges with the outputs of their rows."""

    def __init__(self, requests: TensorRequests, limits: Limits) -> None:
        self._requests = requests
        self._limits = limits
        self._preparer = Preparer()
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, asked: Asked, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Send the rows; answer with their outputs. Raises HttpError and CarpoolErrors."""
        found = self._requests.used_lately(exchange.model, exchange.parameters.get("version"))
        length = exchange.headers.get(_LENGTH)
        is_plain = b"content-encoding" not in exchange.headers and not _is_large(exchange.body, length)
        if found is None or not is_plain:
            return self._prepare(asked, exchange)
        model, channel = found
        self._send(asked, exchange, channel, *self._preparer.prepare(model, exchange.body, length))
        return None

    async def _prepare(self, asked: Asked, exchange: Exchange) -> None:
        await decompress(exchange, self._limits)
        model, channel = await self._requests.find(exchange.model, exchange.parameters.get("version"))
        if exchange.is_gone:
            return
        body, length = exchange.body, exchange.headers.get(_LENGTH)
        read = partial(self._preparer.prepare, model, body, length)
        prepared, bodies = await self._requests.compute(read) if _is_large(body, length) else read()
        if not exchange.is_gone:
            self._send(asked, exchange, channel, prepared, bodies)

    def _send(
        self,
        asked: Asked,
        exchange: Exchange,
        channel: Channel,
        prepared: Prepared,
        bodies: Rows | list[bytes],
    ) -> None:
        answer = partial(self._respond, exchange, prepared)
        rows = self._requests.send(asked, channel, prepared, bodies, answer)
        if rows.targets:  # else it is answered, and this would be a cycle
            exchange.on_gone = rows.withdraw

    def _respond(self, exchange: Exchange, prepared: Prepared, results: Sequence[RowResult]) -> None:
        accepted = exchange.headers.get(b"accept-encoding")
        coding = chosen_coding(accepted) if accepted is not None else ""
        if takes_long(prepared.plan, results, coding):
            self._start(self._respond_later(exchange, partial(_response_of, prepared, results, coding)))
            return
        try:
            answer = _response_of(prepared, results, coding)
        except Exception as error:
            exchange.fail_with(error)
        else:
            exchange.respond(200, *answer)

    async def _respond_later(self, exchange: Exchange, work: Callable[[], tuple[bytes, bytes]]) -> None:
        try:
            answer = await self._requests.compute(work)
        except Exception as error:
            exchange.fail_with(error)
        else:
            exchange.respond(200, *answer)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self._tasks.discard)


def _is_large(body: bytes, length: bytes | None) -> bool:
    """Whether a body takes long to read: because of much JSON, or many elements of BYTES."""
    json_bytes = len(body)
    if json_bytes <= LARGE_JSON_BYTES:
        return False
    if length is not None and length.isdigit() and len(length) < len(b"1000000000"):
        json_bytes = min(int(length), json_bytes)
    if json_bytes > LARGE_JSON_BYTES:
        return True
    binary_bytes = len(body) - json_bytes
    return binary_bytes > LARGE_TEXTS_BYTES and b"BYTES" in body[:json_bytes]


def _response_of(prepared: Prepared, results: Sequence[RowResult], coding: str) -> tuple[bytes, bytes]:
    """The headers and the body of a response. Raises CarpoolErrors."""
    response = prepared.respond(results)
    length, parts = response.header_length, response.parts
    headers = JSON_HEADER if length is None else _BINARY_HEADERS % length
    body = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
    if len(body) < COMPRESSED_BYTES_MIN:
        return headers, body
    compressed = compress(body, coding) if coding else None
    headers += b"vary: accept-encoding\r\n"
    if compressed is None:
        return headers, body
    return headers + b"content-encoding: %b\r\n" % coding.encode(), compressed
