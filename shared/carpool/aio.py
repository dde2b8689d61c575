"""The asyncio producer: thousands of requests in flight over one pipelined writer and one reader.

    infer --> outbox --writer--> XADD (several requests in one entry) ... replies stream --reader--> futures

Requests made in one turn of the event loop share entries. Results of a whole batch come back in one entry
of this client's own reply stream. When a connection is lost, both are opened again: entries whose acceptance
is not known are sent again (the same correlation ID: a second result is dropped here), and reading goes on where
it stopped, so results that were written meanwhile are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgpack
import numpy as np

from carpool.bodies import decode_body, encode_body
from carpool.errors import (
    OK,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    error_for,
)
from carpool.keys import DEFAULT_PREFIX, Keys, models_key
from carpool.link import AsyncLink, Command, CommandError, LinkError
from carpool.messages import MSGPACK, RAW
from carpool.tensors import HeadMemo, datatype_of, from_bytes, tensor_head, to_bytes
from carpool.wire import decode_results

DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
DEFAULT_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 1024
MAX_ENTRY_BYTES: Final = 1024 * 1024
MAX_ENTRY_REQUESTS: Final = 256
BLOCK_MS: Final = 2000
SILENCE_S: Final = 10.0
TICK_S: Final = 0.01
_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Reply(NamedTuple):
    """A result, and how it was served."""

    value: Any
    correlation_id: str
    batch_size: int
    queue_us: int
    compute_us: int


@dataclass(slots=True, eq=False)
class _Channel:
    """One model, as this client uses it."""

    keys: Keys
    replies: str
    entry_requests: int
    last_id: str = "0-0"
    trim_to: str | None = None
    withdrawn: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Pending:
    """One request that has no result yet."""

    channel: _Channel
    future: asyncio.Future[Any]
    raw: dict[str, Any]
    shared: tuple[str, int | None]  # content type and expiration (ms): the same for all in one entry
    whole: bool  # resolve with a Reply, not with its value
    tick: _Tick | None = None
    timeout_s: float = 0.0
    sent: bool = False


@dataclass(slots=True, eq=False)
class _Tick:
    """Requests that time out together."""

    timer: asyncio.TimerHandle
    pending: set[_Pending] = field(default_factory=set)


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
        self._url = url or os.environ.get("CARPOOL_REDIS_URL") or DEFAULT_URL
        self._prefix = prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX
        self._timeout_s = timeout
        self._name = f"py-{secrets.token_hex(8)}"
        self._numbers = count()
        self._channels: dict[str, _Channel] = {}
        self._pending: dict[str, _Pending] = {}
        self._outbox: dict[tuple[_Channel, str, int | None], list[_Pending]] = {}
        self._commands: list[tuple[Command, asyncio.Future[Any] | list[_Pending] | None]] = []
        self._unanswered: deque[asyncio.Future[Any] | list[_Pending] | None] = deque()
        self._heads: dict[tuple[Any, tuple[int, ...]], tuple[str, bytes]] = {}
        self._memo = HeadMemo()
        self._ticks: dict[int, _Tick] = {}
        self._reading: tuple[_Channel, ...] = ()
        self._connecting: asyncio.Future[None] | None = None
        self._reconnecting: asyncio.Future[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._trouble: LinkError | None = None
        self._heard_at_s = 0.0
        self._flushing = False
        self._connected = False
        self._closed = False

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
        if self._connecting is None:
            self._loop = asyncio.get_running_loop()
            self._connecting = asyncio.ensure_future(self._open_links())
        connecting = self._connecting
        try:
            await asyncio.shield(connecting)
        except LinkError:
            if self._connecting is connecting:
                self._connecting = None  # the next call tries again
            raise
        if self._watching is None:
            self._heard_at_s = self._loop.time()
            self._watch()

    async def close(self) -> None:
        """Hang up. What has no result yet fails with UnavailableError; what waits is not withdrawn."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._connected:
            self._connected = False
            self._writer.close()
            self._reader.close()
        error = UnavailableError("the client was closed before there was a result")
        for pending in list(self._pending.values()):
            self._fail(pending, error)
        for timer in self._ticks.values():
            timer.timer.cancel()
        self._ticks.clear()
        await asyncio.sleep(0)  # the transports close in the next turn

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        body: Any,
        *,
        timeout: float | None = -1,
        priority: int | None = None,
        lane: str | None = None,
        cost: int | None = None,
        content_type: str | None = None,
        correlation_id: str | None = None,
        fields: Mapping[str, bytes | str] | None = None,
    ) -> Any:
        """The model's result for `body`. Raises the CarpoolError of its status where there is none.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model as such.
        `timeout`: seconds; it travels with the request, which costs no compute once it has passed.
        Cancelling withdraws the request if it still waits.
        """
        channel = self._channels.get(model) or await self._open(model)
        options = _options(priority, lane, cost, fields)
        pending = self._enqueue(channel, body, timeout, content_type, correlation_id, options, whole=False)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._withdraw(pending)
            raise

    async def request(
        self,
        model: str,
        body: Any,
        *,
        timeout: float | None = -1,
        priority: int | None = None,
        lane: str | None = None,
        cost: int | None = None,
        content_type: str | None = None,
        correlation_id: str | None = None,
        fields: Mapping[str, bytes | str] | None = None,
    ) -> Reply:
        """As `infer`, and how the request was served."""
        channel = self._channels.get(model) or await self._open(model)
        options = _options(priority, lane, cost, fields)
        pending = self._enqueue(channel, body, timeout, content_type, correlation_id, options, whole=True)
        try:
            reply: Reply = await pending.future
        except asyncio.CancelledError:
            self._withdraw(pending)
            raise
        return reply

    def submit(self, model: str, body: Any, **options: Any) -> asyncio.Future[Any]:
        """`infer` as a future, begun at once. Cancelling the future withdraws the request."""
        channel = self._channels.get(model)
        if channel is None:
            return asyncio.ensure_future(self.infer(model, body, **options))
        timeout = options.pop("timeout", -1)
        content_type, correlation_id = options.pop("content_type", None), options.pop("correlation_id", None)
        pending = self._enqueue(
            channel, body, timeout, content_type, correlation_id, _options(**options), whole=False
        )
        pending.future.add_done_callback(
            lambda future: self._withdraw(pending) if future.cancelled() else None
        )
        return pending.future

    async def map(
        self,
        model: str,
        bodies: Iterable[Any] | AsyncIterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Results in the order of `bodies`, however many, with at most `in_flight` at a time.

        An error is raised in its place, or yielded with `return_exceptions`; leaving early withdraws the rest.
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

    # --- enqueueing: everything here runs once for each request -------------------------------------------

    async def _open(self, model: str) -> _Channel:
        """Learn of a model. Raises NotFoundError."""
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            raise NotFoundError(str(error)) from None
        await self.connect()
        size = await self._ask("HGET", keys.registration, "max_batch_size")
        if size is None:
            known = ", ".join(await self.models()) or "none"
            raise NotFoundError(f"no worker has registered a model {model!r}; registered: {known}")
        channel = self._channels.get(model)
        if channel is None:
            limit = max(1, min(int(size), MAX_ENTRY_REQUESTS))
            channel = self._channels[model] = _Channel(keys, keys.replies(self._name), limit)
            self._follow()
        return channel

    def _follow(self) -> None:
        """There is a reply stream more to read."""
        if self._connected and not self._reading:
            self._read_on()
        elif self._reader.identity is not None:  # it is blocked on the others: have it look up
            self._commands.append((("CLIENT", "UNBLOCK", self._reader.identity), None))
            self._flush_soon()

    def _enqueue(
        self,
        channel: _Channel,
        body: Any,
        timeout_s: float | None,
        content_type: str | None,
        correlation_id: str | None,
        options: dict[str, Any] | None,
        *,
        whole: bool,
    ) -> _Pending:
        if self._closed:
            raise UnavailableError("this client is closed")
        if correlation_id is None:
            correlation_id = f"{self._name}-{next(self._numbers)}"
        elif correlation_id in self._pending:
            raise InvalidArgumentError(f"correlation_id: {correlation_id!r} is in flight already")
        content_type, data = self._encode(body, content_type)
        raw = {"correlation_id": correlation_id, "body": data}
        if options:
            raw |= options
        if timeout_s == -1:
            timeout_s = self._timeout_s
        expiration_ms = None if timeout_s is None else max(1, int(timeout_s * 1000))
        future = self._loop.create_future()
        pending = _Pending(channel, future, raw, (content_type, expiration_ms), whole)
        if timeout_s is not None:
            self._set_timer(pending, timeout_s)
        self._pending[correlation_id] = pending
        self._put_out(pending)
        return pending

    def _encode(self, body: Any, content_type: str | None) -> tuple[str, bytes]:
        if type(body) is np.ndarray and content_type in (None, MSGPACK):
            layout = (body.dtype, body.shape)
            known = self._heads.get(layout)
            if known is None:
                if len(self._heads) > 1000:
                    self._heads.clear()
                datatype = datatype_of(body)
                if datatype == "BYTES":
                    return MSGPACK, encode_body(MSGPACK, body)
                known = self._heads[layout] = (datatype, tensor_head(datatype, body.shape, body.nbytes))
            return MSGPACK, known[1] + to_bytes(body, known[0])
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, encode_body(content_type, body)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def _put_out(self, pending: _Pending) -> None:
        group = (pending.channel, *pending.shared)
        waiting = self._outbox.get(group)
        if waiting is None:
            self._outbox[group] = [pending]
        else:
            waiting.append(pending)
        if not self._flushing:
            self._flush_soon()

    # --- endings -------------------------------------------------------------------------------------------

    def _set_timer(self, pending: _Pending, timeout_s: float) -> None:
        """Time out within TICK_S of the time. One timer for all in a tick: a timer each costs more than all
        else that is done here for a request, and nearly none of them rings."""
        at_s = self._loop.time() + timeout_s
        number = int(at_s / TICK_S) + 1
        tick = self._ticks.get(number)
        if tick is None:
            timer = self._loop.call_at(number * TICK_S, self._ring, number)
            tick = self._ticks[number] = _Tick(timer)
        tick.pending.add(pending)
        pending.tick = tick
        pending.timeout_s = timeout_s

    def _ring(self, number: int) -> None:
        for pending in list(self._ticks.pop(number).pending):
            self._time_out(pending, pending.timeout_s)

    def _time_out(self, pending: _Pending, timeout_s: float) -> None:
        trouble = f" (and {self._trouble.detail})" if self._trouble else ""
        correlation_id = pending.raw["correlation_id"]
        detail = f"no result within {timeout_s:g} s{trouble}"
        self._fail(pending, DeadlineExceededError(detail, correlation_id=correlation_id))

    def _fail(self, pending: _Pending, error: CarpoolError) -> None:
        self._forget(pending)
        if not pending.future.done():
            pending.future.set_exception(error)

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending.raw["correlation_id"], None)
        if pending.tick is not None:
            pending.tick.pending.discard(pending)

    def _withdraw(self, pending: _Pending) -> None:
        """Its producer wants no result any more: tell the batcher, if it may have heard of the request."""
        correlation_id = pending.raw["correlation_id"]
        if self._pending.get(correlation_id) is not pending:
            return
        self._forget(pending)
        if pending.sent and not self._closed:
            pending.channel.withdrawn.append(correlation_id)
            self._flush_soon()

    # --- connections ---------------------------------------------------------------------------------------

    async def _open_links(self) -> None:
        self._writer = AsyncLink(
            self._url, name=f"{self._name}:writer", on_reply=self._hear, on_lost=self._lost_link
        )
        self._reader = AsyncLink(
            self._url, name=f"{self._name}:reader", on_reply=self._take, on_lost=self._lost_link
        )
        await self._writer.connect()
        try:
            await self._reader.connect()
        except LinkError:
            self._writer.close()
            raise
        self._trouble = None
        self._reading = ()
        self._connected = True
        self._read_on()
        self._flush_soon()

    def _lost_link(self, error: LinkError) -> None:
        """One connection is gone: close the other too, and open both anew."""
        if not self._connected:
            return
        self._connected = False
        self._trouble = error
        self._writer.close()
        self._reader.close()
        for about in self._unanswered:  # it may or may not have arrived: say it again
            if isinstance(about, list):
                for pending in about:
                    if not pending.future.done():
                        self._put_out(pending)
            elif about is not None and not about.done():
                about.set_exception(error)
        self._unanswered.clear()
        if not self._closed:
            self._reconnecting = asyncio.ensure_future(self._connect_again())

    async def _connect_again(self) -> None:
        for attempt in count():
            await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            try:
                await self._open_links()
            except LinkError as error:
                self._trouble = error
            else:
                return

    def _watch(self) -> None:
        """Once a second: a connection over which nothing comes, though it should, is lost."""
        self._watching = self._loop.call_later(1.0, self._watch)
        if not self._connected:
            return
        if self._loop.time() - self._heard_at_s > SILENCE_S:
            self._lost_link(LinkError(f"Redis was silent for {SILENCE_S:g} s"))
        elif any(channel.trim_to for channel in self._channels.values()):
            self._flush_soon()

    # --- the writer ----------------------------------------------------------------------------------------

    async def _ask(self, *command: str) -> Any:
        """A command beside the requests, and its reply."""
        await self.connect()
        future = self._loop.create_future()
        self._commands.append((command, future))
        self._flush_soon()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await future
        except TimeoutError:
            raise self._trouble or UnavailableError(f"Redis did not answer {command[0]}") from None
        if isinstance(reply, CommandError):
            raise UnavailableError(f"Redis refused {command[0]}: {reply}")
        return reply

    def _flush_soon(self) -> None:
        """Flush after all that is ready in this turn of the event loop: it shares entries."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._connected:
            return
        if self._writer.congested:
            self._flushing = True
            self._loop.call_later(0.001, self._flush)
            return
        commands = self._collect()
        if commands:
            self._writer.write(commands)

    def _collect(self) -> list[Command]:
        """Everything there is to say, as commands; who awaits their replies is noted in the same order."""
        commands: list[Command] = []
        outbox, self._outbox = self._outbox, {}
        for (channel, content_type, expiration_ms), waiting in outbox.items():
            for some in _split(waiting, channel.entry_requests):
                commands.append(self._entry(channel, content_type, expiration_ms, some))
                self._unanswered.append(some)
        for command, about in self._commands:
            commands.append(command)
            self._unanswered.append(about)
        self._commands.clear()
        for channel in self._channels.values():
            if channel.trim_to is not None:
                commands.append(("XTRIM", channel.replies, "MINID", channel.trim_to))
                self._unanswered.append(None)
                channel.trim_to = None
            if channel.withdrawn:
                commands.append(("XADD", channel.keys.requests, "*", "withdraw", " ".join(channel.withdrawn)))
                self._unanswered.append(None)
                channel.withdrawn = []
        return commands

    def _entry(
        self, channel: _Channel, content_type: str, expiration_ms: int | None, some: list[_Pending]
    ) -> Command:
        """One XADD for some requests that share content type and expiration."""
        for pending in some:
            pending.sent = True
        shared: list[Any] = ["content_type", content_type, "reply_to", self._name]
        if expiration_ms is not None:
            shared += ["expiration", expiration_ms]
        if len(some) == 1:
            own = [part for pair in some[0].raw.items() for part in pair]
            return ("XADD", channel.keys.requests, "*", *shared, *own)
        return (
            "XADD",
            channel.keys.requests,
            "*",
            *shared,
            "requests",
            msgpack.packb([one.raw for one in some]),
        )

    def _hear(self, reply: Any) -> None:
        """Redis's answer to the oldest command that has none."""
        about = self._unanswered.popleft()
        if isinstance(about, list):
            if isinstance(reply, CommandError):
                for pending in about:
                    self._fail(pending, _not_accepted(reply))
        elif about is not None and not about.done():
            about.set_result(reply)

    # --- the reader ----------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Have Redis answer when there are results: of every model that this client uses."""
        channels = tuple(self._channels.values())
        if channels:
            self._reading = channels
            streams = [channel.replies for channel in channels]
            after = [channel.last_id for channel in channels]
            self._reader.write([("XREAD", "COUNT", 64, "BLOCK", BLOCK_MS, "STREAMS", *streams, *after)])

    def _take(self, reply: Any) -> None:
        """Results came, or none did for a while: then the reply is None."""
        self._heard_at_s = self._loop.time()
        if isinstance(reply, CommandError):
            self._lost_link(LinkError(f"the reply stream cannot be read: {reply}"))
            return
        taken: list[dict[str, Any]] = []
        for stream, entries in reply or ():
            channel = next(one for one in self._reading if one.replies.encode() == stream)
            for _, flat in entries:
                taken += decode_results(flat[flat.index(b"results") + 1])
            channel.last_id = entries[-1][0].decode()
            milliseconds, _, number = channel.last_id.partition("-")
            channel.trim_to = f"{milliseconds}-{int(number) + 1}"
        self._read_on()
        for envelope in taken:
            pending = self._pending.get(envelope["correlation_id"])
            if pending is not None:
                self._forget(pending)
                self._resolve(pending, envelope)

    def _resolve(self, pending: _Pending, envelope: dict[str, Any]) -> None:
        future = pending.future
        if future.done():
            return
        try:
            value = self._value(envelope)
        except CarpoolError as error:
            future.set_exception(error)
            return
        if pending.whole:
            served = (envelope["batch_size"], envelope["queue_us"], envelope["compute_us"])
            future.set_result(Reply(value, envelope["correlation_id"], *served))
        else:
            future.set_result(value)

    def _value(self, envelope: dict[str, Any]) -> Any:
        status = envelope["status"]
        if status != OK:
            raise error_for(status, envelope.get("detail", ""), envelope["correlation_id"])
        body, content_type = envelope["body"], envelope["content_type"]
        memo = self._memo
        if content_type == MSGPACK and (data := memo.data_of(body)) is not None:
            return from_bytes(memo.datatype, memo.shape, data)
        value = decode_body(content_type, body)
        if content_type == MSGPACK and type(value) is np.ndarray:
            memo.remember(body, datatype_of(value), value.shape, value.nbytes)
        return value


def _split(waiting: list[_Pending], limit: int) -> Iterable[list[_Pending]]:
    """Entries of at most `limit` requests and about MAX_ENTRY_BYTES each; who was cancelled is left out."""
    some: list[_Pending] = []
    size_bytes = 0
    for pending in waiting:
        if pending.future.done():
            continue
        if len(some) == limit or size_bytes > MAX_ENTRY_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(pending)
        size_bytes += len(pending.raw["body"])
    if some:
        yield some


def _options(
    priority: int | None = None,
    lane: str | None = None,
    cost: int | None = None,
    fields: Mapping[str, bytes | str] | None = None,
) -> dict[str, Any] | None:
    if priority is None and lane is None and cost is None and not fields:
        return None
    named = {"priority": priority, "lane": lane, "cost": cost}
    return {**(fields or {}), **{name: value for name, value in named.items() if value is not None}}


def _not_accepted(reply: CommandError) -> CarpoolError:
    if reply.code == "OOM":
        return ResourceExhaustedError(f"Redis is out of memory: {reply}")
    return UnavailableError(f"Redis did not accept the request: {reply}")


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
