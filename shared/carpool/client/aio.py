"""The asyncio producer: `AsyncClient`. The connections to Redis are in `transport`.

Requests of one iteration of the event loop share entries, so what is done for each request is little: its
body is encoded, it gets a correlation ID and a target for its result, and it is added to an entry. All else,
timeouts among it, is done for an entry.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from itertools import count, islice
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from carpool.client.entries import (
    LARGE_BODY_BYTES,
    MAX_ENTRY_BYTES,
    MAX_ENTRY_REQUESTS,
    NO_FIELDS,
    Channel,
    OutgoingEntry,
    OutgoingRun,
)
from carpool.client.reading import ResultReader
from carpool.client.sinks import FutureSink, Gathering, Reply, ReplySink, Sink, Window, rows_of
from carpool.client.timeouts import Timeouts
from carpool.client.transport import Transport
from carpool.errors import (
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from carpool.keys import CORRELATION_ID, DEFAULT_PREFIX, Keys, models_key
from carpool.messages import MSGPACK, RAW, ResultColumns
from carpool.store.connection import CommandError, LinkError
from carpool.wire.bodies import encode_body
from carpool.wire.results import decode_columns, decode_results
from carpool.wire.tensors import Array, datatype_of, tensor_head, to_bytes

__all__ = ["AsyncClient", "Reply", "RequestOptions"]

DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
TIMEOUT_MAX_S: Final = 366 * 24 * 3600
_CACHED_HEADS_MAX: Final = 1000
# Fields that only this client sets. With others' values, the result would be written where it does not read.
_RESERVED_FIELDS: Final = frozenset(
    {
        "arrival",
        "bodies",
        "body",
        "body_bytes",
        "body_key",
        "content_type",
        "correlation_id",
        "correlation_ids",
        "expiration",
        "reply_columns",
        "reply_to",
        "requests",
        "row_head",
        "rows",
        "withdraw",
    }
)


class RequestOptions(TypedDict, total=False):
    """Options of a request.

    `timeout`: seconds until the request fails, None for no limit; by default the client's. It is sent with
        the request as its expiration; the model's settings may override that.
    `priority`: 0 to 9, higher first; by default 4.
    `lane`: only requests of the same lane share a batch.
    `cost`: what the request counts towards the model's `max_batch_cost`; by default 1.
    `tenant`: tenants share the model by its `tenant_weights`.
    `content_type`: how to encode the body; by default its type decides.
    `correlation_id`: your own ID, such as the one of a request that you send again.
    `fields`: further fields, for the model to read.
    """

    timeout: float | None
    priority: int | None
    lane: str | None
    cost: int | None
    tenant: str | None
    content_type: str | None
    correlation_id: str | None
    fields: Mapping[str, bytes | str] | None


class _Head(NamedTuple):
    """What the bodies of arrays of one dtype and shape have in common."""

    datatype: str
    encoded: bytes
    exact: bool  # an array's own bytes are the data


_NO_HEAD: Final = b""


class AsyncClient:
    """A producer. Use it as `async with AsyncClient(url) as client:`; one per event loop is enough.

    `timeout`: seconds until a request fails, for requests without their own `timeout`; None for no limit.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._prefix = prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX
        self._timeout_s = _checked_timeout_s(timeout)
        self._name = f"py-{secrets.token_hex(8)}"
        self._numbers = count()
        self._channels: dict[str, Channel] = {}  # by model
        self._awaited: dict[str, OutgoingEntry] = {}  # by the correlation IDs of requests without a result
        # Entries to be sent after this iteration of the event loop, and those that take more requests.
        self._collected: list[OutgoingEntry] = []
        self._open: dict[tuple[Channel, str, float | None, Sink], OutgoingEntry] = {}
        self._heads: dict[tuple[Any, tuple[int, ...]], _Head] = {}  # by dtype and shape
        self._reader = ResultReader()
        self._values, self._replies = FutureSink(), ReplySink()
        self._timeouts = Timeouts(self._on_timeout)
        self._opening: asyncio.Future[None] | None = None
        self._closed = False
        url = url or os.environ.get("CARPOOL_REDIS_URL") or DEFAULT_URL
        self._transport = Transport(url, self._name, self._on_results, self._fail)

    # --- connecting and closing ----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect now, not with the first request. Raises UnavailableError if Redis cannot be reached."""
        if self._closed:
            raise UnavailableError("this client is closed")
        if self._opening is None:
            self._loop = asyncio.get_running_loop()
            self._opening = asyncio.ensure_future(self._transport.open())
        opening = self._opening
        try:
            await asyncio.shield(opening)
        except LinkError:
            if self._opening is opening:
                self._opening = None  # the next call tries again
            raise

    async def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError, but are not withdrawn."""
        if self._closed:
            return
        self._closed = True
        await self._transport.close()
        error = UnavailableError("the client was closed before there was a result")
        for entry in set(self._awaited.values()):
            self._fail(entry, error)
        self._timeouts.close()

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result. Raises the CarpoolError of the result's status.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model unchanged.
        Cancelling withdraws the request if it is still waiting.
        """
        channel = self._channels.get(model) or await self._open_channel(model)
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._values, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(correlation_id, future)
            raise

    async def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        channel = self._channels.get(model) or await self._open_channel(model)
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._replies, future)
        try:
            reply: Reply = await future
        except asyncio.CancelledError:
            self._withdraw(correlation_id, future)
            raise
        return reply

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> asyncio.Future[Any]:
        """As `infer`, but return a future at once. Cancelling it withdraws the request."""
        channel = self._channels.get(model)
        if channel is None:
            return asyncio.ensure_future(self.infer(model, body, **options))
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._values, future)
        future.add_done_callback(
            lambda done: self._withdraw(correlation_id, done) if done.cancelled() else None
        )
        return future

    async def infer_many(
        self,
        model: str,
        bodies: Array | Iterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Send a request for each row of an array, or for each of `bodies`; return all results in this order.

        A row is one step along the first dimension. The results of an array are the rows of one array, or a
        list if they are not arrays of one dtype and shape, or if there are none. Those of other bodies are
        always a list. An array must not be changed until this returns.

        At most `in_flight` requests have no result at any time; the `timeout` of each begins when it is sent.
        The first error is raised, and the other requests are withdrawn, as they are if this is cancelled.
        With `return_exceptions` the results are a list that has each error in its place.
        """
        _check_in_flight(in_flight)
        channel = self._channels.get(model) or await self._open_channel(model)
        size = (
            len(bodies) if isinstance(bodies, np.ndarray) and bodies.ndim and not return_exceptions else None
        )
        gathering = Gathering(self._loop, size=size, keep_errors=return_exceptions)
        try:
            if isinstance(bodies, np.ndarray) and (head := self._head_of_rows(bodies, options)):
                await self._send_rows(channel, bodies, head, options, gathering, in_flight)
            else:
                for body in bodies:
                    self._add_or_fail(channel, body, options, gathering)
                    if gathering.in_flight >= in_flight:
                        await gathering.wait(in_flight - 1)
            await gathering.wait(0)
        finally:
            self._withdraw_all(gathering)
        return gathering.results()

    async def map(
        self,
        model: str,
        bodies: Iterable[Any] | AsyncIterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Any]:
        """Send a request for each of `bodies`, and yield the results in the same order.

        `bodies` may be endless: at most `in_flight` requests have no result at any time. An error is raised
        in its turn, or yielded with `return_exceptions`. Closing the iterator withdraws what still waits.
        """
        _check_in_flight(in_flight)
        channel = self._channels.get(model) or await self._open_channel(model)
        window = Window(self._loop)
        source = bodies if isinstance(bodies, AsyncIterable) else _iterate(bodies)
        try:
            async for body in source:
                self._add_or_fail(channel, body, options, window)
                while len(window) >= in_flight or window.ready:
                    yield _checked(await window.take(), return_exceptions)
            while len(window):
                yield _checked(await window.take(), return_exceptions)
        finally:
            self._withdraw_all(window)

    async def models(self) -> list[str]:
        """Names of the registered models."""
        names = await self._call("SMEMBERS", models_key(self._prefix))
        return sorted(name.decode() for name in names)

    # --- commands beside the requests ----------------------------------------------------------------------

    async def _open_channel(self, model: str) -> Channel:
        """Look up a model, and read its results from now on. Raises NotFoundError."""
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            raise NotFoundError(str(error)) from None
        size = await self._call("HGET", keys.registration, "max_batch_size")
        if size is None:
            names = ", ".join(await self.models()) or "none"
            raise NotFoundError(f"no worker has registered a model {model!r}; registered: {names}")
        channel = self._channels.get(model)
        if channel is None:
            requests_max = max(1, min(int(size), MAX_ENTRY_REQUESTS)) if size.isdigit() else 1
            channel = self._channels[model] = Channel(keys, keys.replies(self._name).encode(), requests_max)
            self._transport.add_channel(channel)
        return channel

    async def _call(self, *command: str) -> Any:
        """Redis's reply to a command. Raises UnavailableError."""
        await self.connect()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._transport.call(*command)
        except TimeoutError:
            error = self._transport.connection_error
            raise error or UnavailableError(
                f"Redis did not reply to {command[0]} within {self._timeout_s:g} s"
            ) from None
        if isinstance(reply, CommandError):
            raise UnavailableError(f"Redis rejected {command[0]}: {reply}")
        return reply

    # --- sending -------------------------------------------------------------------------------------------

    def _add(self, channel: Channel, body: Any, options: RequestOptions, sink: Sink, target: Any) -> str:
        """Add a request to an entry; return its correlation ID. Its result goes to the target in the sink."""
        if self._closed:
            raise UnavailableError("this client is closed")
        timeout_s, fields, correlation_id, content_type = self._timeout_s, NO_FIELDS, None, None
        if options:
            timeout_s, fields = self._read_options(options)
            correlation_id, content_type = options.get("correlation_id"), options.get("content_type")
            if correlation_id is not None:
                self._check_correlation_id(correlation_id)
        if correlation_id is None:
            correlation_id = f"{self._name}-{next(self._numbers)}"
        content_type, head, rest = self._encode(body, content_type)
        key = (channel, content_type, timeout_s, sink)
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = OutgoingEntry(channel, content_type, timeout_s, sink)
            self._collect(entry)
        if len(rest) < LARGE_BODY_BYTES:
            has_room = entry.add(correlation_id, target, fields, head, rest)
        else:  # the name is this request's own, also if it has the correlation ID of another
            name = f"{self._name}-{next(self._numbers)}" if "correlation_id" in options else correlation_id
            has_room = entry.add_stored(correlation_id, target, fields, head + rest, name)
        if not has_room:
            del self._open[key]
        self._awaited[correlation_id] = entry
        return correlation_id

    def _add_or_fail(
        self, channel: Channel, body: Any, options: RequestOptions, sink: Gathering | Window
    ) -> None:
        """As `_add`, but a body that cannot be sent fails in its turn."""
        (target,) = sink.reserve(1)
        try:
            self._add(channel, body, options, sink, target)
        except InvalidArgumentError as error:
            sink.fail(target, error)

    async def _send_rows(
        self,
        channel: Channel,
        array: Array,
        head: _Head,
        options: RequestOptions,
        gathering: Gathering,
        in_flight: int,
    ) -> None:
        """Send the rows of an array, in entries of as many requests as the entries of other requests have."""
        timeout_s, fields = self._read_options(options)
        width = array.nbytes // len(array)
        step = max(1, min(channel.entry_requests_max, in_flight, MAX_ENTRY_BYTES // width))
        for start in range(0, len(array), step):
            await gathering.wait(in_flight - step)
            if self._closed:
                raise UnavailableError("this client is closed")
            rows = array[start : start + step]
            ids = [f"{self._name}-{number}" for number in islice(self._numbers, len(rows))]
            entry = OutgoingEntry(channel, MSGPACK, timeout_s, gathering)
            entry.add_run(
                OutgoingRun(fields, head.encoded, ids, [to_bytes(rows, head.datatype)]),
                gathering.reserve(len(ids)),
            )
            self._awaited.update(dict.fromkeys(ids, entry))
            self._collect(entry)

    def _collect(self, entry: OutgoingEntry) -> None:
        """Send an entry after everything that is ready in this iteration of the event loop has run."""
        if not self._collected:
            self._loop.call_soon(self._send_collected)
        self._collected.append(entry)

    def _send_collected(self) -> None:
        entries, self._collected = self._collected, []
        self._open.clear()
        if not self._closed:
            for entry in entries:
                self._timeouts.start(entry, self._loop)
            self._transport.send(entries)

    def _read_options(self, options: RequestOptions) -> tuple[float | None, Mapping[str, Any]]:
        """The timeout, and the options that are sent as fields of the request."""
        if not options:
            return self._timeout_s, NO_FIELDS
        return _checked_timeout_s(options.get("timeout", self._timeout_s)), _optional_fields(options)

    def _check_correlation_id(self, correlation_id: str) -> None:
        """Reject an unusable ID: the error for it would be written under another ID, which nothing reads."""
        if type(correlation_id) is not str or not CORRELATION_ID.fullmatch(correlation_id):
            raise InvalidArgumentError(
                f"correlation_id: {correlation_id!r:.140} must have 1 to 128 characters: letters, digits, "
                "'.', '_', ':', '-'"
            )
        if correlation_id in self._awaited:
            raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is already in flight")

    def _encode(self, body: Any, content_type: str | None) -> tuple[str, bytes, bytes]:
        """The content type of a body, its head, and what follows the head."""
        if type(body) is np.ndarray and (content_type is None or content_type == MSGPACK):
            head = self._heads.get((body.dtype, body.shape)) or self._make_head(body.dtype, body.shape)
            if head is not None:
                if head.exact and body.nbytes >= LARGE_BODY_BYTES:  # copied once
                    return MSGPACK, _NO_HEAD, b"".join((head.encoded, np.ascontiguousarray(body).data))
                return MSGPACK, head.encoded, body.tobytes() if head.exact else to_bytes(body, head.datatype)
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, _NO_HEAD, encode_body(content_type, body)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def _head_of_rows(self, array: Array, options: RequestOptions) -> _Head | None:
        """The head of the rows of an array; None if they cannot be sent as columns, or are large."""
        if array.ndim == 0:
            raise InvalidArgumentError("body: an array without dimensions has no rows")
        if "correlation_id" in options:
            raise InvalidArgumentError("correlation_id: cannot be the same for several requests")
        if options.get("content_type") not in (None, MSGPACK):
            return None
        if not 0 < array.nbytes < LARGE_BODY_BYTES * len(array):
            return None
        key = (array.dtype, array.shape[1:])
        return self._heads.get(key) or self._make_head(*key)

    def _make_head(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Head | None:
        """The head of arrays of this dtype and shape, kept for the next; None for those of strings."""
        try:
            datatype = datatype_of(np.empty(0, dtype))
        except ValueError as error:
            raise InvalidArgumentError(f"body: {error}") from None
        if datatype == "BYTES":
            return None
        if len(self._heads) >= _CACHED_HEADS_MAX:
            self._heads.clear()
        encoded = tensor_head(datatype, shape, math.prod(shape) * dtype.itemsize)
        head = _Head(datatype, encoded, exact=dtype == dtype.newbyteorder("<"))
        self._heads[dtype, shape] = head
        return head

    # --- results, errors, timeouts and withdrawals ---------------------------------------------------------

    def _on_results(self, flat: Sequence[bytes]) -> None:
        """Results from an entry of a reply stream. Those that are no longer wanted are ignored."""
        for name, packed in zip(flat[::2], flat[1::2], strict=True):
            if name == b"columns":
                for columns in decode_columns(packed):
                    self._on_columns(columns)
            elif name == b"results":
                for envelope in decode_results(packed):
                    self._on_envelope(envelope)

    def _on_columns(self, columns: ResultColumns) -> None:
        try:
            array = self._reader.array(columns)
        except CarpoolError:
            array = None  # each result fails by itself
        if array is None:
            for result in columns.results():
                self._on_envelope(result._asdict())
            return
        ids, served = columns.correlation_ids, (columns.batch_size, columns.queue_us, columns.compute_us)
        pop = self._awaited.pop
        entries = [pop(correlation_id, None) for correlation_id in ids]
        first = entries[0]
        if first is not None and entries.count(first) == len(entries):
            targets = [first.awaited.pop(correlation_id) for correlation_id in ids]
            first.sink.put_rows(ids, targets, array, served)
            if not first.awaited:
                self._timeouts.stop(first)
            return
        for correlation_id, entry, row in zip(ids, entries, rows_of(array), strict=True):
            if entry is not None:
                entry.sink.put(correlation_id, self._take_target(entry, correlation_id), row, served)

    def _on_envelope(self, envelope: dict[str, Any]) -> None:
        correlation_id = envelope["correlation_id"]
        entry = self._awaited.pop(correlation_id, None)
        if entry is None:
            return
        target = self._take_target(entry, correlation_id)
        try:
            value = self._reader.value(envelope)
        except CarpoolError as error:
            entry.sink.fail(target, error)
            return
        served = (envelope["batch_size"], envelope["queue_us"], envelope["compute_us"])
        entry.sink.put(correlation_id, target, value, served)

    def _take_target(self, entry: OutgoingEntry, correlation_id: str) -> Any:
        """Remove a request that has its result from its entry; return its target."""
        target = entry.awaited.pop(correlation_id)
        if not entry.awaited:
            self._timeouts.stop(entry)
        return target

    def _on_timeout(self, entry: OutgoingEntry) -> None:
        error = self._transport.connection_error
        cause = f" ({error.detail})" if error else ""
        self._fail(entry, DeadlineExceededError(f"no result within {entry.timeout_s:g} s{cause}"))

    def _fail(self, entry: OutgoingEntry, error: CarpoolError) -> None:
        """Fail all requests of an entry that have no result."""
        self._timeouts.stop(entry)
        awaited, entry.awaited = entry.awaited, {}
        for correlation_id, target in awaited.items():
            del self._awaited[correlation_id]
            entry.sink.fail(target, type(error)(error.detail, correlation_id=correlation_id))

    def _withdraw(self, correlation_id: str, target: Any) -> None:
        """Withdraw a request whose caller was cancelled."""
        entry = self._awaited.get(correlation_id)
        if entry is not None and entry.awaited[correlation_id] is target:
            del self._awaited[correlation_id]
            self._take_target(entry, correlation_id)
            if entry.sent:
                self._transport.withdraw(entry.channel, [correlation_id])

    def _withdraw_all(self, sink: Sink) -> None:
        """Withdraw all requests without a result whose results go to this sink."""
        for entry in {entry for entry in self._awaited.values() if entry.sink is sink}:
            self._timeouts.stop(entry)
            awaited, entry.awaited = entry.awaited, {}
            for correlation_id in awaited:
                del self._awaited[correlation_id]
            if entry.sent:
                self._transport.withdraw(entry.channel, awaited)


def _checked_timeout_s(timeout_s: float | None) -> float | None:
    """A valid timeout. Infinity becomes None; a negative one becomes 0. Raises InvalidArgumentError."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float) and -TIMEOUT_MAX_S <= timeout_s <= TIMEOUT_MAX_S:  # false for NaN
        return max(0.0, timeout_s)
    raise InvalidArgumentError(
        f"timeout: {timeout_s!r:.60} must be a number of seconds, at most {TIMEOUT_MAX_S}, or None"
    )


def _optional_fields(options: RequestOptions) -> dict[str, Any]:
    """The options that are sent as fields of the request."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = dict(options.get("fields") or {})
    for name in ("priority", "lane", "cost", "tenant"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    for name, value in fields.items():
        if name in _RESERVED_FIELDS:
            raise InvalidArgumentError(
                f"{name!r:.60}: the client sets this field itself; remove it from `fields`"
            )
        if not isinstance(value, bytes | str | int | float):
            raise InvalidArgumentError(f"{name!r:.60}: must be bytes, text or a number, not {value!r:.60}")
    return fields


def _check_in_flight(in_flight: int) -> None:
    if in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}: must be 1 or more")


async def _iterate(bodies: Iterable[Any]) -> AsyncIterator[Any]:
    for body in bodies:
        yield body


def _checked(result: Any, return_exceptions: bool) -> Any:
    """A result of a Window. Raises it if it is an error, unless errors are wanted."""
    if isinstance(result, CarpoolError) and not return_exceptions:
        raise result
    return result
