"""The asyncio producer: `AsyncClient`. The connections to Redis are in `transport`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from carpool.client.transport import MAX_ENTRY_REQUESTS, Channel, OutgoingRequest, Transport
from carpool.errors import (
    OK,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    error_for,
)
from carpool.keys import CORRELATION_ID, DEFAULT_PREFIX, Keys, models_key
from carpool.messages import MSGPACK, RAW
from carpool.store.connection import CommandError, LinkError
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import HeadMemo, datatype_of, from_bytes, tensor_head, to_bytes

DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
TIMEOUT_MAX_S: Final = 366 * 24 * 3600
TIMER_RESOLUTION_S: Final = 0.01
_CACHED_HEADS_MAX: Final = 1000
# Fields that only this client sets. With others' values, the result would be written where it does not read.
_RESERVED_FIELDS: Final = frozenset(
    {"arrival", "body", "content_type", "correlation_id", "expiration", "reply_to", "requests", "withdraw"}
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


class Reply(NamedTuple):
    """A result, with the size and the times of the batch it was in."""

    value: Any
    correlation_id: str
    batch_size: int
    queue_us: int
    compute_us: int


@dataclass(slots=True, eq=False)
class _AwaitedRequest(OutgoingRequest):
    """A request without a result so far, with what only this module needs."""

    wants_reply: bool = False  # its future gets a Reply instead of the value alone
    timeout_s: float = 0.0
    timeout: _Timeout | None = None


@dataclass(slots=True, eq=False)
class _Timeout:
    """One timer, for all requests whose timeout ends in the same TIMER_RESOLUTION_S."""

    timer: asyncio.TimerHandle
    requests: set[_AwaitedRequest] = field(default_factory=set)


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
        self._awaited: dict[str, _AwaitedRequest] = {}  # by correlation ID
        self._timeouts: dict[int, _Timeout] = {}  # by the end of the timeout, in TIMER_RESOLUTION_S
        self._heads: dict[tuple[Any, tuple[int, ...]], tuple[str, bytes]] = {}  # by dtype and shape
        self._last_head = HeadMemo()  # of the results
        self._opening: asyncio.Future[None] | None = None
        self._closed = False
        url = url or os.environ.get("CARPOOL_REDIS_URL") or DEFAULT_URL
        self._transport = Transport(url, self._name, self._on_envelope, self._fail)

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
        for request in list(self._awaited.values()):
            self._fail(request, error)
        for timeout in self._timeouts.values():
            timeout.timer.cancel()
        self._timeouts.clear()

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result. Raises the CarpoolError of the result's status.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model unchanged.
        Cancelling withdraws the request if it is still waiting.
        """
        channel = self._channels.get(model) or await self._open_channel(model)
        request = self._enqueue(channel, body, options)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._withdraw(request)
            raise

    async def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        channel = self._channels.get(model) or await self._open_channel(model)
        request = self._enqueue(channel, body, options)
        request.wants_reply = True
        try:
            reply: Reply = await request.future
        except asyncio.CancelledError:
            self._withdraw(request)
            raise
        return reply

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> asyncio.Future[Any]:
        """As `infer`, but return a future at once. Cancelling it withdraws the request."""
        channel = self._channels.get(model)
        if channel is None:
            return asyncio.ensure_future(self.infer(model, body, **options))
        request = self._enqueue(channel, body, options)
        request.future.add_done_callback(lambda done: self._withdraw(request) if done.cancelled() else None)
        return request.future

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
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: must be 1 or more")
        if model not in self._channels:
            await self._open_channel(model)
        window: deque[asyncio.Future[Any]] = deque()
        try:
            async for body in _iterate(bodies):
                window.append(self.submit(model, body, **options))
                while len(window) >= in_flight or (window and window[0].done()):
                    yield await _outcome(window.popleft(), return_exceptions)
            while window:
                yield await _outcome(window.popleft(), return_exceptions)
        finally:
            for future in window:
                future.cancel()

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

    # --- sending: runs once for each request ---------------------------------------------------------------

    def _enqueue(self, channel: Channel, body: Any, options: RequestOptions) -> _AwaitedRequest:
        if self._closed:
            raise UnavailableError("this client is closed")
        timeout_s = self._timeout_s
        correlation_id = content_type = None
        if options:
            timeout_s = options.get("timeout", timeout_s)
            correlation_id, content_type = options.get("correlation_id"), options.get("content_type")
        if correlation_id is None:
            correlation_id = f"{self._name}-{next(self._numbers)}"
        else:
            self._check_correlation_id(correlation_id)
        content_type, data = self._encode(body, content_type)
        fields = {"correlation_id": correlation_id, "body": data}
        if options:
            fields |= _optional_fields(options)
            timeout_s = _checked_timeout_s(timeout_s)
        expiration_ms = None if timeout_s is None else max(1, int(timeout_s * 1000))
        request = _AwaitedRequest(channel, self._loop.create_future(), fields, content_type, expiration_ms)
        if timeout_s is not None:
            self._set_timeout(request, timeout_s)
        self._awaited[correlation_id] = request
        self._transport.send(request)
        return request

    def _check_correlation_id(self, correlation_id: str) -> None:
        """Reject an unusable ID: the error for it would be written under another ID, which nothing reads."""
        if correlation_id in self._awaited:
            raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is already in flight")
        if type(correlation_id) is not str or not CORRELATION_ID.fullmatch(correlation_id):
            raise InvalidArgumentError(
                f"correlation_id: {correlation_id!r:.140} must have 1 to 128 characters: letters, digits, "
                "'.', '_', ':', '-'"
            )

    def _encode(self, body: Any, content_type: str | None) -> tuple[str, bytes]:
        """The content type and the bytes of a body. Arrays of the same dtype and shape share their head."""
        if type(body) is np.ndarray and content_type in (None, MSGPACK):
            head = self._heads.get((body.dtype, body.shape)) or self._make_head(body)
            if head is not None:
                return MSGPACK, head[1] + to_bytes(body, head[0])
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, encode_body(content_type, body)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def _make_head(self, array: np.ndarray[Any, Any]) -> tuple[str, bytes] | None:
        """The datatype and the head of an array, kept for the next; None for an array of strings."""
        try:
            datatype = datatype_of(array)
        except ValueError as error:
            raise InvalidArgumentError(f"body: {error}") from None
        if datatype == "BYTES":
            return None
        if len(self._heads) >= _CACHED_HEADS_MAX:
            self._heads.clear()
        head = (datatype, tensor_head(datatype, array.shape, array.nbytes))
        self._heads[array.dtype, array.shape] = head
        return head

    # --- results, errors, timeouts and withdrawals ---------------------------------------------------------

    def _on_envelope(self, envelope: dict[str, Any]) -> None:
        """Resolve the future of a result's request. A result that is no longer wanted is ignored."""
        request = self._awaited.get(envelope["correlation_id"])
        if request is None:
            return
        self._forget(request)
        future = request.future
        if future.done():
            return
        try:
            value = self._decode(envelope)
        except CarpoolError as error:
            future.set_exception(error)
            return
        if request.wants_reply:
            served = (envelope["batch_size"], envelope["queue_us"], envelope["compute_us"])
            value = Reply(value, envelope["correlation_id"], *served)
        future.set_result(value)

    def _decode(self, envelope: dict[str, Any]) -> Any:
        """The value in an envelope. Raises the CarpoolError of its status."""
        status = envelope["status"]
        if status != OK:
            raise error_for(status, envelope.get("detail", ""), envelope["correlation_id"])
        body, content_type = envelope["body"], envelope["content_type"]
        if content_type != MSGPACK:
            return decode_body(content_type, body)
        head = self._last_head
        data = head.data_of(body)
        if data is not None:
            return from_bytes(head.datatype, head.shape, data)
        value = decode_body(content_type, body)
        if type(value) is np.ndarray:
            head.remember(body, datatype_of(value), value.shape, value.nbytes)
        return value

    def _set_timeout(self, request: _AwaitedRequest, timeout_s: float) -> None:
        """Fail the request after `timeout_s`, at most TIMER_RESOLUTION_S late.

        Requests share timers. One timer each would cost more than everything else done here for a request,
        and hardly any timer ever fires.
        """
        number = int((self._loop.time() + timeout_s) / TIMER_RESOLUTION_S) + 1
        timeout = self._timeouts.get(number)
        if timeout is None:
            timer = self._loop.call_at(number * TIMER_RESOLUTION_S, self._on_timeout, number)
            timeout = self._timeouts[number] = _Timeout(timer)
        timeout.requests.add(request)
        request.timeout = timeout
        request.timeout_s = timeout_s

    def _on_timeout(self, number: int) -> None:
        error = self._transport.connection_error
        cause = f" ({error.detail})" if error else ""
        for request in list(self._timeouts.pop(number).requests):
            detail = f"no result within {request.timeout_s:g} s{cause}"
            correlation_id = request.fields["correlation_id"]
            self._fail(request, DeadlineExceededError(detail, correlation_id=correlation_id))

    def _fail(self, request: OutgoingRequest, error: CarpoolError) -> None:
        awaited = self._awaited.get(request.fields["correlation_id"])
        if awaited is request:
            self._forget(awaited)
            if not awaited.future.done():
                awaited.future.set_exception(error)

    def _withdraw(self, request: _AwaitedRequest) -> None:
        """Withdraw a request whose caller was cancelled."""
        if self._awaited.get(request.fields["correlation_id"]) is request:
            self._forget(request)
            self._transport.withdraw(request)

    def _forget(self, request: _AwaitedRequest) -> None:
        del self._awaited[request.fields["correlation_id"]]
        if request.timeout is not None:
            request.timeout.requests.discard(request)


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


async def _iterate(bodies: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(bodies, AsyncIterable):
        async for body in bodies:
            yield body
    else:
        for body in bodies:
            yield body


async def _outcome(future: asyncio.Future[Any], return_exceptions: bool) -> Any:
    with contextlib.suppress(CarpoolError) if return_exceptions else contextlib.nullcontext():
        return await future
    return future.exception()
