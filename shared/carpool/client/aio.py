"""The asyncio producer: what a program calls. `transport` moves its requests and results."""

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

from carpool.client.transport import MAX_ENTRY_REQUESTS, Channel, Pending, Pipeline
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
TICK_S: Final = 0.01
LONGEST_S: Final = 366 * 24 * 3600
_LAYOUTS: Final = 1000
# Fields that this client sets itself: a request with others' would be answered where nobody looks.
_CLIENTS_FIELDS: Final = frozenset(
    {"arrival", "body", "content_type", "correlation_id", "expiration", "reply_to", "requests", "withdraw"}
)


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its model and its body.

    `timeout`: seconds, None for ever, in place of the client's; it travels with the request, which costs no
        compute once it has passed.
    `priority`: 0 to 9, higher first; 4 if not said.
    `lane`: only requests of one lane share a batch.
    `cost`: what it counts for against the model's `max_batch_cost`.
    `tenant`: whose it is; tenants take fair turns, by the model's `tenant_weights`.
    `content_type`: how the body is written, if not as its type suggests.
    `correlation_id`: one's own, to send a request again.
    `fields`: for the model to read.
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
    """A result, and how it was served."""

    value: Any
    correlation_id: str
    batch_size: int
    queue_us: int
    compute_us: int


@dataclass(slots=True, eq=False)
class _Awaited(Pending):
    """A pending request, as the client keeps it."""

    whole: bool = False  # resolve with a Reply, not with its value
    timeout_s: float = 0.0
    tick: _Tick | None = None


@dataclass(slots=True, eq=False)
class _Tick:
    """Requests that time out together."""

    timer: asyncio.TimerHandle
    awaited: set[_Awaited] = field(default_factory=set)


class AsyncClient:
    """A producer. Use it as `async with AsyncClient(url) as client:`; one per event loop is enough.

    `timeout` is the seconds every request may take unless it says otherwise; None waits for ever.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._prefix = prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX
        self._timeout_s = _seconds(timeout)
        self._name = f"py-{secrets.token_hex(8)}"
        self._numbers = count()
        self._channels: dict[str, Channel] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._ticks: dict[int, _Tick] = {}
        self._heads: dict[tuple[Any, tuple[int, ...]], tuple[str, bytes]] = {}
        self._memo = HeadMemo()
        self._opening: asyncio.Future[None] | None = None
        self._closed = False
        url = url or os.environ.get("CARPOOL_REDIS_URL") or DEFAULT_URL
        self._pipeline = Pipeline(url, self._name, self._take, self._fail)

    # --- the life of a client ------------------------------------------------------------------------------

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
            self._opening = asyncio.ensure_future(self._pipeline.open())
        opening = self._opening
        try:
            await asyncio.shield(opening)
        except LinkError:
            if self._opening is opening:
                self._opening = None  # the next call tries again
            raise

    async def close(self) -> None:
        """Hang up. What has no result yet fails with UnavailableError; what waits is not withdrawn."""
        if self._closed:
            return
        self._closed = True
        await self._pipeline.close()
        error = UnavailableError("the client was closed before there was a result")
        for awaited in list(self._awaited.values()):
            self._fail(awaited, error)
        for tick in self._ticks.values():
            tick.timer.cancel()
        self._ticks.clear()

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """The model's result for `body`. Raises the CarpoolError of its status where there is none.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model as such.
        Cancelling withdraws the request if it still waits.
        """
        channel = self._channels.get(model) or await self._open(model)
        awaited = self._enqueue(channel, body, options)
        try:
            return await awaited.future
        except asyncio.CancelledError:
            self._withdraw(awaited)
            raise

    async def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, and how the request was served."""
        channel = self._channels.get(model) or await self._open(model)
        awaited = self._enqueue(channel, body, options)
        awaited.whole = True
        try:
            reply: Reply = await awaited.future
        except asyncio.CancelledError:
            self._withdraw(awaited)
            raise
        return reply

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> asyncio.Future[Any]:
        """`infer` as a future, begun at once. Cancelling the future withdraws the request."""
        channel = self._channels.get(model)
        if channel is None:
            return asyncio.ensure_future(self.infer(model, body, **options))
        awaited = self._enqueue(channel, body, options)
        awaited.future.add_done_callback(lambda done: self._withdraw(awaited) if done.cancelled() else None)
        return awaited.future

    async def map(
        self,
        model: str,
        bodies: Iterable[Any] | AsyncIterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Any]:
        """Results in the order of `bodies`, however many, with at most `in_flight` at a time.

        An error is raised in its place, or yielded with `return_exceptions`. Leaving withdraws the rest.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: must be 1 or more")
        if model not in self._channels:
            await self._open(model)
        window: deque[asyncio.Future[Any]] = deque()
        try:
            async for body in _each(bodies):
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
        names = await self._ask("SMEMBERS", models_key(self._prefix))
        return sorted(name.decode() for name in names)

    # --- learning of a model -------------------------------------------------------------------------------

    async def _open(self, model: str) -> Channel:
        """What there is to know of a model, once. Raises NotFoundError."""
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            raise NotFoundError(str(error)) from None
        size = await self._ask("HGET", keys.registration, "max_batch_size")
        if size is None:
            known = ", ".join(await self.models()) or "none"
            raise NotFoundError(f"no worker has registered a model {model!r}; registered: {known}")
        channel = self._channels.get(model)
        if channel is None:
            limit = max(1, min(int(size), MAX_ENTRY_REQUESTS)) if size.isdigit() else 1
            channel = self._channels[model] = Channel(keys, keys.replies(self._name).encode(), limit)
            self._pipeline.follow(channel)
        return channel

    async def _ask(self, *command: str) -> Any:
        await self.connect()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._pipeline.ask(*command)
        except TimeoutError:
            raise self._pipeline.trouble or UnavailableError(f"Redis did not answer {command[0]}") from None
        if isinstance(reply, CommandError):
            raise UnavailableError(f"Redis refused {command[0]}: {reply}")
        return reply

    # --- requests out: everything here runs once for each --------------------------------------------------

    def _enqueue(self, channel: Channel, body: Any, options: RequestOptions) -> _Awaited:
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
            self._check_own(correlation_id)
        content_type, data = self._encode(body, content_type)
        raw = {"correlation_id": correlation_id, "body": data}
        if options:
            raw |= _own_fields(options)
            timeout_s = _seconds(timeout_s)
        expiration_ms = None if timeout_s is None else max(1, int(timeout_s * 1000))
        awaited = _Awaited(channel, self._loop.create_future(), raw, content_type, expiration_ms)
        if timeout_s is not None:
            self._set_timer(awaited, timeout_s)
        self._awaited[correlation_id] = awaited
        self._pipeline.put(awaited)
        return awaited

    def _check_own(self, correlation_id: str) -> None:
        """A correlation ID of the caller's: one that makes no sense would be answered where nobody looks."""
        if correlation_id in self._awaited:
            raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is in flight already")
        if type(correlation_id) is not str or not CORRELATION_ID.fullmatch(correlation_id):
            raise InvalidArgumentError(
                f"correlation_id: {correlation_id!r:.140} does not match {CORRELATION_ID.pattern}"
            )

    def _encode(self, body: Any, content_type: str | None) -> tuple[str, bytes]:
        """The content type and the bytes of a body. Arrays of one layout share their head."""
        if type(body) is np.ndarray and content_type in (None, MSGPACK):
            layout = (body.dtype, body.shape)
            known = self._heads.get(layout) or self._learn(layout, body)
            if known is not None:
                return MSGPACK, known[1] + to_bytes(body, known[0])
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, encode_body(content_type, body)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def _learn(
        self, layout: tuple[Any, tuple[int, ...]], array: np.ndarray[Any, Any]
    ) -> tuple[str, bytes] | None:
        """The datatype and head of arrays of a layout; None for those that travel as strings."""
        try:
            datatype = datatype_of(array)
        except ValueError as error:
            raise InvalidArgumentError(f"body: {error}") from None
        if datatype == "BYTES":
            return None
        if len(self._heads) >= _LAYOUTS:
            self._heads.clear()
        known = self._heads[layout] = (datatype, tensor_head(datatype, array.shape, array.nbytes))
        return known

    # --- endings -------------------------------------------------------------------------------------------

    def _take(self, envelope: dict[str, Any]) -> None:
        """A result: of a request that is still awaited, or nobody's any more."""
        awaited = self._awaited.get(envelope["correlation_id"])
        if awaited is None:
            return
        self._forget(awaited)
        future = awaited.future
        if future.done():
            return
        try:
            value = self._value(envelope)
        except CarpoolError as error:
            future.set_exception(error)
            return
        if awaited.whole:
            served = (envelope["batch_size"], envelope["queue_us"], envelope["compute_us"])
            value = Reply(value, envelope["correlation_id"], *served)
        future.set_result(value)

    def _value(self, envelope: dict[str, Any]) -> Any:
        status = envelope["status"]
        if status != OK:
            raise error_for(status, envelope.get("detail", ""), envelope["correlation_id"])
        body, content_type = envelope["body"], envelope["content_type"]
        if content_type != MSGPACK:
            return decode_body(content_type, body)
        memo = self._memo
        data = memo.data_of(body)
        if data is not None:
            return from_bytes(memo.datatype, memo.shape, data)
        value = decode_body(content_type, body)
        if type(value) is np.ndarray:
            memo.remember(body, datatype_of(value), value.shape, value.nbytes)
        return value

    def _set_timer(self, awaited: _Awaited, timeout_s: float) -> None:
        """Time out within TICK_S of the time. One timer for all in a tick: a timer each costs more than all
        else that is done here for a request, and nearly none of them rings."""
        number = int((self._loop.time() + timeout_s) / TICK_S) + 1
        tick = self._ticks.get(number)
        if tick is None:
            tick = self._ticks[number] = _Tick(self._loop.call_at(number * TICK_S, self._ring, number))
        tick.awaited.add(awaited)
        awaited.tick = tick
        awaited.timeout_s = timeout_s

    def _ring(self, number: int) -> None:
        trouble = f" (and {self._pipeline.trouble.detail})" if self._pipeline.trouble else ""
        for awaited in list(self._ticks.pop(number).awaited):
            detail = f"no result within {awaited.timeout_s:g} s{trouble}"
            correlation_id = awaited.raw["correlation_id"]
            self._fail(awaited, DeadlineExceededError(detail, correlation_id=correlation_id))

    def _fail(self, pending: Pending, error: CarpoolError) -> None:
        awaited = self._awaited.get(pending.raw["correlation_id"])
        if awaited is pending:
            self._forget(awaited)
            if not awaited.future.done():
                awaited.future.set_exception(error)

    def _withdraw(self, awaited: _Awaited) -> None:
        """Its caller was cancelled."""
        if self._awaited.get(awaited.raw["correlation_id"]) is awaited:
            self._forget(awaited)
            self._pipeline.withdraw(awaited)

    def _forget(self, awaited: _Awaited) -> None:
        del self._awaited[awaited.raw["correlation_id"]]
        if awaited.tick is not None:
            awaited.tick.awaited.discard(awaited)


def _seconds(timeout_s: float | None) -> float | None:
    """A timeout that makes sense. Infinity is None; one that has passed already expires at once."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float) and -LONGEST_S <= timeout_s <= LONGEST_S:  # no NaN is
        return max(0.0, timeout_s)
    raise InvalidArgumentError(f"timeout: {timeout_s!r:.60} must be seconds, at most {LONGEST_S}, or None")


def _own_fields(options: RequestOptions) -> dict[str, Any]:
    """The fields that only this request has."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    own: dict[str, Any] = dict(options.get("fields") or {})
    for name in ("priority", "lane", "cost", "tenant"):
        if options.get(name) is not None:
            own[name] = options.get(name)
    for name, value in own.items():
        if name in _CLIENTS_FIELDS or not isinstance(value, bytes | str | int | float):
            raise InvalidArgumentError(
                f"{name!r:.60}: cannot be sent as a field with the value {value!r:.60}"
            )
    return own


async def _each(bodies: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
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
