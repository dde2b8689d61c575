"""Requests and their responses as messages of a WebSocket, several at a time.

    {"id": "1", "inputs": [...]}        a request as infer takes it         {"cancel": "1"}   withdraws it
    {"id": "2", "body": ANY VALUE}      one in Carpool's own form

    {"id": "1", "model_name": ..., "outputs": [...]}    a response          {"id": "2", "chunk": VALUE}
    {"id": "1", "end": {"responses": 3, ...}}           or instead of it    {"id": "2", "error": ...}

A binary message has the length of a JSON document in 4 bytes, big-endian, the document, and then the binary
data of tensors, as the body of an infer request has it. A response with binary data is such a message.

Each request has one end or one error, after which its ID may be used again. docs/http.md has the rest.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from carpool.client.sinks import Reply
from carpool.errors import CarpoolError
from carpool.messages.requests import JSON
from carpool.messages.results import Chunk, Result
from carpool_gateway.answers import HttpError, answer_of
from carpool_gateway.credentials import INFER
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip.elements import check_json
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.requests import decode_request, request_of
from carpool_gateway.oip.responses import encode_response
from carpool_gateway.tensor_requests import LARGE_JSON_BYTES, Asked
from carpool_gateway.v2.streams import Outputs, TensorStreams, is_large_json
from carpool_gateway.websocket import WebSocket

_LENGTH: Final = struct.Struct(">I")
_SCALARS: Final = (bool, int, float, str)
_GOING_AWAY: Final = 1001
_INVALID: Final = 1007


class _Message(NamedTuple):
    """What a message says. `header_length`: as in `decode_request`; None for a text."""

    id: str
    model: str
    cancel: str | None
    has_body: bool
    body: Any
    parameters: Mapping[str, Any]
    document: bytes
    header_length: bytes | None


class Conversation:
    """Requests on one WebSocket: how many there are, what they are counted as, how they end."""

    def __init__(
        self, socket: WebSocket, opened: Exchange, asked: Asked, streams: TensorStreams, limits: Limits
    ) -> None:
        """`opened`: the exchange that was upgraded. `asked`: who opened it, with which options."""
        self.socket = socket
        self.opened = opened
        self.asked = asked
        self.streams = streams
        self._limits = limits
        self._unread: deque[tuple[bytes, bool]] = deque()  # messages behind a large one that is being read
        self._reading: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by ID
        self._is_draining = False

    @property
    def in_flight(self) -> int:
        """Requests without an end."""
        return len(self._tasks)

    def on_message(self, message: bytes, *, is_text: bool) -> None:
        """Read a message. A large one is read beside the event loop, and then those behind it."""
        if self._reading is not None or len(message) > LARGE_JSON_BYTES:
            self._unread.append((message, is_text))
            self.socket.wire.memory.hold(len(message))
            if self._reading is None:
                self.socket.hold_reading()
                self._reading = asyncio.get_running_loop().create_task(self._read_unread())
        else:
            self.on_read(message, _read_or_error(message, is_text=is_text))

    async def _read_unread(self) -> None:
        while self._unread:
            message, is_text = self._unread.popleft()
            read = await self.streams.compute(partial(_read_or_error, message, is_text=is_text))
            self.socket.wire.memory.release(len(message))
            self.on_read(message, read)
        self._reading = None
        self.socket.resume_reading()

    def on_read(self, message: bytes, read: _Message | CarpoolError) -> None:
        """A message was read, or why it cannot be."""
        raise NotImplementedError

    def on_drain(self) -> None:
        """The gateway stops: answer what has begun, and take no more."""
        self._is_draining = True
        self._close_if_drained()

    def on_lost(self) -> None:
        """The client has gone: its requests are withdrawn."""
        for task in self._tasks.values():
            task.cancel()

    def new_exchange(self) -> Exchange:
        """For a request: what is counted, and logged."""
        opened = self.opened
        exchange = Exchange(opened.connection)
        exchange.method, exchange.path, exchange.route = "MESSAGE", opened.path, "websocket_request"
        exchange.model, exchange.key_name = opened.model, opened.key_name
        exchange.request_id = self.socket.wire.next_request_id()
        return exchange

    def start(
        self, exchange: Exchange, request_id: str, size: int, serve: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Serve a request. `size`: of its message. Raises HttpError if there are too many, or if the ID is in
        use."""
        if not self.socket.is_open:  # it was closed while the message was read
            raise HttpError(499, "the client has gone")
        if self._is_draining:
            raise HttpError(503, "the gateway stops: open another WebSocket, and send the request there")
        if request_id in self._tasks:
            raise HttpError(400, f"id: {request_id!r:.60} is that of a request without an end")
        if len(self._tasks) >= self._limits.window:
            raise HttpError(429, f"at most {self._limits.window} requests at a time: wait for an end")
        exchange.take(size)
        task = asyncio.get_running_loop().create_task(serve())
        self._tasks[request_id] = task
        task.add_done_callback(partial(self._on_end, exchange, request_id))

    def cancel(self, request_id: str) -> None:
        """Withdraw a request. One that has ended meanwhile has."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def _on_end(self, exchange: Exchange, request_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[request_id]
        if task.cancelled():  # perhaps before it began
            exchange.is_gone = not self.socket.is_open
            self.fail(exchange, request_id, HttpError(499, "cancelled: the client withdrew the request"))
        elif (error := task.exception()) is not None:
            self.fail(exchange, request_id, error)
        else:
            exchange.code = 200
        self.socket.wire.done(exchange)
        self._close_if_drained()

    def fail(self, exchange: Exchange, request_id: str, error: BaseException) -> None:
        """End a request with an error."""
        answer = answer_of(error, partial(self.socket.wire.failure, request_id=exchange.request_id))
        exchange.code = answer.code
        self.send_error(request_id, answer)

    def send_error(self, request_id: str, error: HttpError) -> None:
        """Tell the client of an error."""
        raise NotImplementedError

    def _close_if_drained(self) -> None:
        if self._is_draining and not self._tasks:
            self.socket.close(_GOING_AWAY, "the gateway stops")


class Requests(Conversation):
    """Requests for one model, each with any number of responses."""

    def on_read(self, message: bytes, read: _Message | CarpoolError) -> None:
        """A request, or the withdrawal of one."""
        if isinstance(read, _Message) and read.cancel is not None:
            self.cancel(read.cancel)
            return
        exchange, request_id = self.new_exchange(), ""
        try:
            if isinstance(read, CarpoolError):
                raise read
            request_id = read.id
            serve = self._serve_value if read.has_body else self._serve_tensors
            self.start(exchange, request_id, len(message), lambda: serve(read))
        except (HttpError, CarpoolError) as error:
            self.fail(exchange, request_id, error)
            self.socket.wire.done(exchange)

    async def _serve_tensors(self, read: _Message) -> None:
        model = await self.streams.find(self.opened.model, self.opened.parameters.get("version"))
        decode = partial(decode_request, read.document, read.header_length)
        is_large = len(read.document) > LARGE_JSON_BYTES
        request = await self.streams.compute(decode) if is_large else decode()
        responses = await self.streams.send(self.asked, model, request, self.socket.wire.memory)
        count = 0
        async with responses:
            async for outputs in responses:
                encode = partial(_response, model, read.id, outputs)
                response = await self.streams.compute(encode) if is_large_json(outputs) else encode()
                await self.socket.wire.until_read()
                self.socket.send(response[0], is_text=response[1])
                count += 1
        self._send_end(read.id, count, responses.reply)

    async def _serve_value(self, read: _Message) -> None:
        body = json.dumps(read.body, separators=(",", ":"), ensure_ascii=False).encode()
        request = request_of(read.id, (), read.parameters)
        memory = self.socket.wire.memory
        version = self.opened.parameters.get("version")
        chunks = await self.streams.send_value(self.asked, self.opened.model, body, request, memory, version)
        async with chunks:
            async for item in chunks:
                await self.socket.wire.until_read()
                for message in _chunk_messages(read.id, item):
                    self.socket.send(message)
        self._send_end(read.id, chunks.values, chunks.reply)

    def _send_end(self, request_id: str, responses: int, reply: Reply | None) -> None:
        end: dict[str, Any] = {"responses": responses}
        if reply is not None:
            end |= {
                "correlation_id": reply.correlation_id,
                "batch_size": reply.batch_size,
                "queue_us": reply.queue_us,
                "compute_us": reply.compute_us,
            }
            if reply.first_us is not None:
                end["first_us"] = reply.first_us
            if reply.version:
                end["version"] = reply.version
        self.socket.send(msgspec.json.encode({"id": request_id, "end": end}))

    def send_error(self, request_id: str, error: HttpError) -> None:
        """As everywhere, with the ID of the request."""
        told = {"error": error.detail, "status": error.status}
        if error.correlation_id:
            told["correlation_id"] = error.correlation_id
        self.socket.send(msgspec.json.encode({"id": request_id, **told}))


class OutputRequests(Conversation):
    """Requests for any model, each of which names it in `model`: as AMD's inference server has them.

    The only answer to a request is its first output: a text, or as bytes in a binary message. An error is a
    text. A message that is no request closes the connection.
    """

    _number = 0  # of its requests, which have no IDs

    def on_read(self, message: bytes, read: _Message | CarpoolError) -> None:
        """A request."""
        if isinstance(read, CarpoolError) or read.header_length is not None or not read.model:
            self.socket.close(_INVALID, "a message must be a request in JSON, which names its model")
            self.on_lost()
            return
        name, exchange = read.model, self.new_exchange()
        exchange.model = name
        self._number += 1
        try:
            self.asked.key.check(INFER, name)
            self.start(exchange, str(self._number), len(message), lambda: self._serve(name, message))
        except (HttpError, CarpoolError) as error:
            self.fail(exchange, "", error)
            self.socket.wire.done(exchange)

    async def _serve(self, name: str, message: bytes) -> None:
        model = await self.streams.find(name)
        decode = partial(decode_request, message)
        request = await self.streams.compute(decode) if len(message) > LARGE_JSON_BYTES else decode()
        responses = await self.streams.send(
            self.asked, model, request, self.socket.wire.memory, is_joined=True
        )
        async with responses:
            async for outputs in responses:
                await self.socket.wire.until_read()
                data = outputs[0].data
                is_text = isinstance(data, list)
                self.socket.send(b"".join(data) if isinstance(data, list) else bytes(data), is_text=is_text)

    def send_error(self, request_id: str, error: HttpError) -> None:
        """A text alone."""
        self.socket.send(error.detail.encode())


def _read_or_error(message: bytes, *, is_text: bool) -> _Message | CarpoolError:
    """What a message says, or why it cannot be read."""
    try:
        return _read(message, is_text=is_text)
    except CarpoolError as error:
        return error.with_traceback(None)


def _read(message: bytes, *, is_text: bool) -> _Message:
    """What a message says. Raises ProtocolError."""
    document, header_length, text = message, None, message
    if not is_text:
        if len(message) < _LENGTH.size:
            raise ProtocolError("a binary message must begin with the length of its JSON, in 4 bytes")
        (size,) = _LENGTH.unpack_from(message)
        document, header_length = message[_LENGTH.size :], str(size).encode()
        if size > len(document):
            raise ProtocolError(
                f"a binary message says that {size} bytes are JSON, and has {len(document)} behind that"
            )
        text = document[:size]
    check_json(text)
    fields = parse(text)
    if type(fields) is not dict:
        raise ProtocolError("a message must be a JSON object")
    names = {}
    for name in ("id", "model", "cancel"):
        names[name] = fields.get(name)
        if names[name] is not None and type(names[name]) is not str:
            raise ProtocolError(f"{name}: must be a text")
    parameters = fields.get("parameters")
    if type(parameters if parameters is not None else {}) is not dict:
        raise ProtocolError("parameters: must be a JSON object")
    for name, value in (parameters or {}).items():
        if type(value) not in _SCALARS:
            raise ProtocolError(f"parameter {name!r:.60} must be a text, a number, true or false")
    return _Message(
        names["id"] or "",
        names["model"] or "",
        names["cancel"],
        "body" in fields,
        fields.get("body"),
        parameters or {},
        document,
        header_length,
    )


def _response(model: OfferedModel, request_id: str, outputs: Outputs) -> tuple[bytes, bool]:
    """The message of a response, and whether it is text."""
    response = encode_response(model.name, request_id, outputs, model.version)
    if response.header_length is None:
        return bytes(response.parts[0]), True
    return b"".join([_LENGTH.pack(response.header_length), *response.parts]), False


def _chunk_messages(request_id: str, item: Chunk | Result) -> list[bytes]:
    """The messages with a chunk, or with the result of a model that does not step."""
    start = b'{"id":%b,' % msgspec.json.encode(request_id)
    body = item.body or b""
    if item.content_type != JSON:
        data = {"chunk_base64": base64.b64encode(body).decode(), "content_type": item.content_type}
        return [start + msgspec.json.encode(data)[1:]]
    if isinstance(item, Chunk) and item.is_list:  # values that could not be put end to end
        values = [json.dumps(value, separators=(",", ":")).encode() for value in json.loads(body)]
    else:
        values = [body]
    return [b'%b"chunk":%b}' % (start, value) for value in values]
