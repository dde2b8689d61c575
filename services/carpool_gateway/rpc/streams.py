"""ModelStreamInfer: any number of requests on one stream, and their responses.

Responses have the order of their requests; those of models that step come as soon as they are made. A request
that fails is answered with an error on the stream, which goes on; or it ends the stream, if the client asks
for that with `triton_grpc_error: true` in the metadata.

What a client does not read is bounded: nothing more is read of it while REQUESTS_MAX of its requests have no
response, or responses of UNWRITTEN_BYTES_MAX are not written.

    context.read -> _read -> _accept -> rows ... results -> _answer -> _outgoing -> run -> context.write
                                     -> _stream ... responses ------------^
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import grpc

from carpool.model_settings import ModelKind
from carpool_gateway.access_log import GONE
from carpool_gateway.answers import RETRY_AFTER, HttpError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.responses import RowResult
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.infer import MessageInference, Sendable
from carpool_gateway.rpc.requests import SplitRequest, decode_request, split
from carpool_gateway.rpc.responses import (
    empty_final,
    encode_response,
    error_on_stream,
    of_stream,
    with_id,
)
from carpool_gateway.tensor_requests import Asked, SentRows
from carpool_gateway.v2.streams import TensorStreams

REQUESTS_MAX: Final = 1024
UNWRITTEN_BYTES_MAX: Final = 4 * 1024 * 1024
_ROUTE: Final = "grpc_stream_infer"  # of a request; that of the stream is another
_ENDS_WITH_ERRORS: Final = b"triton_grpc_error"


class MessageStreams:
    """The streams of all clients."""

    def __init__(self, inference: MessageInference, streams: TensorStreams) -> None:
        self._inference = inference
        self._streams = streams
        self._open: set[_Stream] = set()
        self.is_draining = False

    async def infer(self, call: Call) -> None:
        """Serve a stream until its client ends it. Raises HttpError if it must end."""
        call.authorize()
        stream = _Stream(self._inference, self._streams, call)
        self._open.add(stream)
        if self.is_draining:
            stream.stop_reading()
        try:
            await stream.run()
        finally:
            self._open.discard(stream)

    def drain(self) -> None:
        """Read no more requests; streams end when those that were read are answered."""
        self.is_draining = True
        for stream in self._open:
            stream.stop_reading()


class _Request:
    """A request of a stream. `answer`: the message that answers it, once there is one."""

    id = b""
    sendable: Sendable
    rows: SentRows | None = None
    answer: bytes | HttpError | None = None

    def __init__(self, call: Call) -> None:
        self.call = call


class _Stream:
    """One stream."""

    def __init__(self, inference: MessageInference, streams: TensorStreams, call: Call) -> None:
        self._inference = inference
        self._streams = streams
        self._call = call
        self._context = call.context
        self._memory = call.calls.memory
        self._ends_with_errors = call.headers.get(_ENDS_WITH_ERRORS, b"").lower() == b"true"
        self._requests: deque[_Request] = deque()  # that are not answered, or some before them are not
        self._streamed: set[_Request] = set()  # to models that step
        self._outgoing: deque[bytes | HttpError] = deque()
        self._unwritten_bytes = 0
        self._changed = asyncio.Event()  # there is something to write, or nothing more to wait for
        self._has_space = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._waits_for_request = self._is_draining = False

    async def run(self) -> None:
        """Write what answers requests until all are answered and no more come. Raises HttpError."""
        reader = self._reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not reader.done() or self._requests or self._streamed or self._outgoing:
                self._changed.clear()
                if self._outgoing:
                    await self._write(self._outgoing.popleft())
                else:
                    await self._changed.wait()
            if not reader.cancelled():
                reader.result()
            if self._is_draining:
                raise HttpError(503, "the gateway stops: open another stream", headers=RETRY_AFTER)
        finally:
            self._close()

    async def _write(self, message: bytes | HttpError) -> None:
        if isinstance(message, HttpError):
            raise message
        write_s = self._call.calls.limits.write_s
        try:
            async with asyncio.timeout(write_s):
                await self._context.write(message)
        except TimeoutError:
            raise HttpError(408, f"the stream was not read for {write_s:g} s") from None
        finally:
            self._hold(-len(message))
        self._has_space.set()

    def _hold(self, size: int) -> None:
        self._unwritten_bytes += size
        self._memory.hold(size)

    def stop_reading(self) -> None:
        """Read no more requests. A client that has sent all of its own notices nothing."""
        if self._reader is not None and self._reader.done():
            return
        self._is_draining = True
        if self._reader is not None and self._waits_for_request:
            self._reader.cancel()

    def _close(self) -> None:
        """The stream has ended. Withdraw what has no result."""
        if self._reader is not None:
            self._reader.cancel()
        for task in self._tasks:
            task.cancel()
        self._hold(-self._unwritten_bytes)
        self._outgoing.clear()
        for request in (*self._requests, *self._streamed):
            if request.rows is not None:
                request.rows.withdraw()
            if request.answer is None:
                request.call.end(GONE)
        self._requests.clear()
        self._streamed.clear()

    # --- requests ------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._is_draining:
            while len(self._requests) + len(self._streamed) >= REQUESTS_MAX:
                await self._wait_for_space()
            while self._unwritten_bytes >= UNWRITTEN_BYTES_MAX:
                await self._wait_for_space()
            self._waits_for_request = True
            message = await self._context.read()
            self._waits_for_request = False
            if message is grpc.aio.EOF:
                self._is_draining = False
                return
            await self._accept(message)

    async def _wait_for_space(self) -> None:
        self._has_space.clear()
        await self._has_space.wait()

    async def _accept(self, message: bytes) -> None:
        """Send a request. It is answered also if it is refused."""
        request = _Request(self._call.of_request(_ROUTE))
        self._requests.append(request)
        inference, call = self._inference, request.call
        try:
            call.take(len(message))
            fields = split(message)
            request.id = fields.id
            model, channel = await inference.find(call, fields)
            if model.kind is ModelKind.STEPPING:
                self._requests.pop()
                self._streamed.add(request)
                self._start(self._stream(request, fields, model))
                return
            request.sendable = await inference.prepare(call, fields, model, channel)
            request.rows = inference.send(request.sendable, partial(self._on_results, request))
        except Exception as error:
            self._fail(request, error)

    def _on_results(self, request: _Request, results: Sequence[RowResult]) -> None:
        encode = partial(request.sendable.encode, results)
        if request.sendable.takes_long(results):
            self._start(self._respond_later(request, encode))
            return
        try:
            response = encode()
        except Exception as error:
            self._fail(request, error)
        else:
            self._answer(request, of_stream(response, is_final=True), 200)

    async def _respond_later(self, request: _Request, encode: Callable[[], bytes]) -> None:
        try:
            response = await self._inference.compute(encode)
        except Exception as error:
            self._fail(request, error)
        else:
            self._answer(request, of_stream(response, is_final=True), 200)

    async def _stream(self, request: _Request, fields: SplitRequest, model: OfferedModel) -> None:
        """Write the responses of a model that steps, as it makes them."""
        try:
            read = partial(decode_request, fields)
            decoded, wants_end = await self._inference.compute(read) if fields.is_large else read()
            asked = Asked(request.call.key, request.call.options())
            async with await self._streams.send(asked, model, decoded, self._memory) as responses:
                async for outputs in responses:
                    response = with_id(encode_response(model.name, "", outputs, model.version), request.id)
                    while self._unwritten_bytes >= UNWRITTEN_BYTES_MAX:
                        await self._wait_for_space()
                    self._put(of_stream(response, is_final=False))
        except Exception as error:
            self._put(self._failed(request, error))
        else:
            if wants_end:
                self._put(empty_final(model.name, model.version, request.id))
            request.call.end(200)
        self._streamed.discard(request)
        self._changed.set()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- answers -------------------------------------------------------------------------------------------

    def _fail(self, request: _Request, error: Exception) -> None:
        self._answer(request, self._failed(request, error), None)

    def _failed(self, request: _Request, error: Exception) -> bytes | HttpError:
        """What answers a request that failed."""
        failure = self._call.calls.failure(error, self._call.request_id)
        request.call.end(failure.code)
        return failure if self._ends_with_errors else error_on_stream(failure.detail, request.id)

    def _answer(self, request: _Request, message: bytes | HttpError, code: int | None) -> None:
        """A request is answered. Write what no earlier request holds back. `code`: None if it is counted."""
        request.answer = message
        if code is not None:
            request.call.end(code)
        while self._requests and (answer := self._requests[0].answer) is not None:
            self._requests.popleft()
            self._put(answer)

    def _put(self, message: bytes | HttpError) -> None:
        """Write a message after those before it; an error ends the stream."""
        self._outgoing.append(message)
        if isinstance(message, bytes):
            self._hold(len(message))
        self._changed.set()
