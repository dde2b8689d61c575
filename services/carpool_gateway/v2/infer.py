"""Requests of tensors: tensors in, tensors out.

Each row of a request's batch is a request of the model, and all rows share a packed entry. The response is
made by the callback that reads the last result: a request has no task, if its model was used lately. If one
row fails, the response is its error, and the other rows are withdrawn; so are all if the client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from carpool.client.entries import Channel, Encoded
from carpool.client.options import RequestOptions, read_options
from carpool.client.producer import Producer
from carpool.client.sinks import Envelope, Sink
from carpool.errors import OK, CarpoolError, InvalidArgumentError, NotFoundError
from carpool.messages.results import ResultColumns
from carpool.rows import Rows
from carpool_gateway.answers import JSON_HEADER
from carpool_gateway.catalog import Catalog
from carpool_gateway.compression import COMPRESSED_BYTES_MIN, chosen_coding, compress
from carpool_gateway.content_encoding import decompress
from carpool_gateway.credentials import Key, now_s
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip import documents
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import Plan
from carpool_gateway.oip.prepared import Prepared, Preparer
from carpool_gateway.oip.requests import HEADER_LENGTH, InferRequest
from carpool_gateway.oip.responses import RowResult

_LENGTH: Final = HEADER_LENGTH.lower().encode()
_BINARY_HEADERS: Final = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
LARGE_JSON_BYTES: Final = 64 * 1024  # decoding takes 0.4 ms
_LARGE_TEXTS_BYTES: Final = 256 * 1024  # of BYTES in binary data: with 4 bytes each, decoding takes 9 ms
_LARGE_COMPRESSED_BYTES: Final = 16 * 1024  # takes 0.2 ms
_T = TypeVar("_T")
_ENTRY_ROWS_MIN: Final = 8  # of a request; fewer share an entry with those of other requests


class Asked(NamedTuple):
    """Who asks, and for what in headers."""

    key: Key
    options: RequestOptions


class TensorInference:
    """Answers exchanges with the outputs of their rows. `default_timeout_s`: of requests that name none."""

    def __init__(
        self,
        *,
        producer: Producer,
        catalog: Catalog,
        limits: Limits,
        default_timeout_s: float,
    ) -> None:
        self._producer = producer
        self._catalog = catalog
        self._limits = limits
        self._default_timeout_s = default_timeout_s
        self._preparer = Preparer()
        self._sink = _RowSink()
        self._pool = ThreadPoolExecutor(1, "large-tensors")
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, asked: Asked, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Send the rows; answer with their outputs. Raises HttpError and CarpoolErrors."""
        model = self._catalog.known(exchange.model)
        channel = self._producer.channels.get(exchange.model)
        length = exchange.headers.get(_LENGTH)
        is_plain = b"content-encoding" not in exchange.headers and not _is_large(exchange.body, length)
        if model is None or channel is None or not is_plain:
            return self._prepare(asked, exchange)
        check_version(exchange, model)
        self._send(asked, exchange, channel, *self._preparer.prepare(model, exchange.body, length))
        return None

    async def _prepare(self, asked: Asked, exchange: Exchange) -> None:
        await decompress(exchange, self._limits)
        model = await self._catalog.model(exchange.model)
        check_version(exchange, model)
        channel = self._producer.channels.get(exchange.model) or await self._open_channel(exchange.model)
        if exchange.is_gone:
            return
        body, length = exchange.body, exchange.headers.get(_LENGTH)
        read = partial(self._preparer.prepare, model, body, length)
        prepared, bodies = await self.compute(read) if _is_large(body, length) else read()
        if not exchange.is_gone:
            self._send(asked, exchange, channel, prepared, bodies)

    async def _open_channel(self, name: str) -> Channel:
        try:
            return await self._producer.open_channel(name, self._default_timeout_s)
        except NotFoundError:
            raise documents.unknown_model(name) from None

    async def compute(self, work: Callable[[], _T]) -> _T:
        """The result of what takes long, from the other thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self._tasks.discard)

    def _send(
        self,
        asked: Asked,
        exchange: Exchange,
        channel: Channel,
        prepared: Prepared,
        bodies: Rows | list[bytes],
    ) -> None:
        count = len(bodies)
        asked.key.count(count or 1, now_s())
        timeout_s, fields = row_options(
            asked.options,
            prepared.request,
            prepared.plan.accept,
            prepared.plan.fields,
            self._limits,
            self._default_timeout_s,
        )
        rows = _Rows(exchange, prepared, count, self)
        try:
            self._add(channel, prepared.plan.content_type, bodies, fields, timeout_s, rows)
        except BaseException:
            rows.withdraw()
            raise
        exchange.on_gone = rows.withdraw_for
        if not rows.targets:
            rows.finish()

    def _add(
        self,
        channel: Channel,
        content_type: str,
        bodies: Rows | list[bytes],
        fields: Mapping[str, Any],
        timeout_s: float,
        rows: _Rows,
    ) -> None:
        """Add each row to an entry."""
        packer = self._producer.packer
        if not isinstance(bodies, Rows):
            for element, target in zip(bodies, rows.targets, strict=True):
                body = (content_type, b"", element)
                rows.names.append(packer.add(channel, body, fields, timeout_s, self._sink, target))
            return
        head, data, width = bodies.head, bodies.data, bodies.width
        count = len(rows.targets)
        if count < _ENTRY_ROWS_MIN:
            for at, target in enumerate(rows.targets):
                body = (content_type, head, bytes(data[at * width : (at + 1) * width]))
                rows.names.append(packer.add(channel, body, fields, timeout_s, self._sink, target))
            return
        step = channel.rows_max(len(head) + width)
        for start in range(0, count, step):
            targets = rows.targets[start : start + step]
            part = bytes(data[start * width : (start + len(targets)) * width])
            encoded = Encoded(content_type, head, part)
            rows.names += packer.add_rows(channel, encoded, fields, timeout_s, self._sink, targets)

    def withdraw(self, name: str, target: Any) -> None:
        """Withdraw a row."""
        self._producer.packer.withdraw(name, target)


def row_options(
    options: RequestOptions,
    request: InferRequest,
    accept: str,
    fields_of_model: Mapping[str, Any],
    limits: Limits,
    default_timeout_s: float,
) -> tuple[float, Any]:
    """The timeout and the fields of each row: parameters of the request, then headers. `accept`: the content
    type that is wanted of results. Raises InvalidArgumentError."""
    asked: dict[str, Any] = dict(options)
    if request.timeout_us is not None:
        asked["timeout"] = request.timeout_us / 1e6
    if request.priority is not None:
        asked["priority"] = request.priority
    if request.sequence_id:
        asked["sequence_id"] = request.sequence_id
        asked["sequence_start"], asked["sequence_end"] = request.sequence_start, request.sequence_end
    if accept:
        asked["accept"] = accept
    if fields_of_model:
        asked["fields"] = {**asked.get("fields", {}), **fields_of_model}
    if "correlation_id" in asked:
        raise InvalidArgumentError("Carpool-Correlation-Id: each row is a request, with an ID of its own")
    timeout_s, fields = read_options(asked, default_timeout_s)  # type: ignore[arg-type]
    if timeout_s is None or timeout_s > limits.timeout_s:
        raise ProtocolError(f"timeout: at most {limits.timeout_s * 1e6:.0f} microseconds")
    return timeout_s, fields


def check_version(exchange: Exchange, model: OfferedModel) -> None:
    """Raise NotFoundError if the path names a version that the model does not have."""
    version = exchange.parameters.get("version")
    if version is not None:
        documents.check_version(exchange.model, version, model.version)


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
    return binary_bytes > _LARGE_TEXTS_BYTES and b"BYTES" in body[:json_bytes]


_Target = tuple["_Rows", int]


class _Rows:
    """The rows of one request, until all have a result or one has failed."""

    def __init__(
        self,
        exchange: Exchange,
        prepared: Prepared,
        count: int,
        owner: TensorInference,
    ) -> None:
        self._exchange = exchange
        self._prepared = prepared
        self._owner = owner
        self.targets: list[_Target] = [
            (self, at) for at in range(count)
        ]  # none once it is over: see `_close`
        self.names: list[str] = []  # correlation IDs of those that were sent
        self._results: list[RowResult | None] = [None] * count
        self._missing = count
        self._is_over = False  # it is answered, or nobody wants the answer

    def put(self, at: int, result: RowResult) -> None:
        """Take the result of a row."""
        if self._is_over or self._results[at] is not None:
            return
        self._results[at] = result
        self._missing -= 1
        if result.status != OK:
            self._end(at, result)
        elif not self._missing:
            self.finish()

    def fail(self, at: int, error: CarpoolError) -> None:
        """There will be no result of a row."""
        self.put(at, RowResult(error.status, detail=error.detail))

    def _end(self, failed: int, result: RowResult) -> None:
        """Answer with the error of a row, and withdraw the others."""
        if len(self.targets) > 1:
            result = result._replace(detail=f"row {failed}: {result.detail}")
        self.withdraw()
        self._respond([result])

    def finish(self) -> None:
        """All results are here: answer with their outputs."""
        self._close()
        self._respond(cast(list[RowResult], self._results))

    def _respond(self, results: Sequence[RowResult]) -> None:
        exchange, prepared = self._exchange, self._prepared
        accepted = exchange.headers.get(b"accept-encoding")
        coding = chosen_coding(accepted) if accepted is not None else ""
        if _is_long(prepared.plan, results, coding):
            self._owner.start(self._respond_later(partial(_response_of, prepared, results, coding)))
            return
        try:
            answer = _response_of(prepared, results, coding)
        except Exception as error:
            exchange.fail_with(error)
        else:
            exchange.respond(200, *answer)

    async def _respond_later(self, work: Callable[[], tuple[bytes, bytes]]) -> None:
        try:
            answer = await self._owner.compute(work)
        except Exception as error:
            self._exchange.fail_with(error)
        else:
            self._exchange.respond(200, *answer)

    def withdraw(self) -> None:
        """Withdraw what has no result."""
        for name, target in zip(self.names, self._close(), strict=False):  # not all may be sent
            self._owner.withdraw(name, target)

    def _close(self) -> list[_Target]:
        """It is over. Returns the targets, which lead back here: such cycles would be left to the garbage
        collector, which runs rarely, and then holds up all requests."""
        self._is_over = True
        targets, self.targets = self.targets, []
        return targets

    def withdraw_for(self, _: Exchange) -> None:
        """The client has gone."""
        self.withdraw()


class _RowSink(Sink):
    """Gives each row its result."""

    def put(self, target: _Target, envelope: Envelope) -> None:
        """Take a result of any status."""
        rows, at = target
        status = envelope["status"]
        if status == OK:
            rows.put(at, RowResult(status, envelope["content_type"], envelope["body"]))
        else:
            rows.put(at, RowResult(status, detail=envelope["detail"]))

    def put_columns(self, targets: Sequence[_Target], columns: ResultColumns) -> None:
        """Take results that are alike."""
        content_type, bodies = columns.content_type, columns.rows
        for number, (rows, at) in enumerate(targets):
            rows.put(at, RowResult(OK, content_type, bodies[number]))

    def fail(self, target: _Target, error: CarpoolError) -> None:
        """Take an error."""
        rows, at = target
        rows.fail(at, error)


def _is_long(planned: Plan, results: Sequence[RowResult], coding: str) -> bool:
    """Whether `_response_of` takes long."""
    size = sum([len(result.body) for result in results])
    if size <= _LARGE_COMPRESSED_BYTES:
        return False
    if coding:
        return True
    if all(output.binary and not output.classes for output in planned.outputs):
        return size > _LARGE_TEXTS_BYTES and any(
            output.spec.datatype == "BYTES" for output in planned.outputs
        )
    return size > LARGE_JSON_BYTES


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
