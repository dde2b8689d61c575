"""The asyncio producer: `AsyncClient`.

Here values become bodies, and options fields; `producer` has the rest. For each request little is done: its
body is encoded, and it is added to a Packer.

Why: docs/decisions/0045.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

import numpy as np

from carpool.client.encoding import BodyEncoder, bodies_to_send
from carpool.client.enqueued import EnqueuedRequests
from carpool.client.entries import Channel
from carpool.client.options import (
    DEFAULT_TIMEOUT_S,
    IN_FLIGHT,
    RequestOptions,
    check_in_flight,
    check_no_sequence,
    checked_timeout_s,
    left_of,
    read_options,
)
from carpool.client.producer import Producer, ServedChannels
from carpool.client.reading import ResultReader
from carpool.client.retries import each_with_retries, with_retries
from carpool.client.sending import Sender
from carpool.client.sequences import AsyncSequence, SequenceProgress
from carpool.client.sinks import FutureSink, Gathering, Reply, ReplySink, Window
from carpool.client.spans import begin, together
from carpool.client.streams import AsyncStream, StreamSink, StreamTarget
from carpool.errors import CarpoolError
from carpool.store.kept import RequestStatus
from carpool.wire.tensors import Array

__all__ = ["AsyncClient", "Reply", "RequestOptions"]


class AsyncClient:
    """A producer. Use it as `async with AsyncClient(url) as client:`; one per event loop is enough.

    `url`: the address of Redis, with all that it takes to sign in. Without it, the settings of services and
        commands are used: CARPOOL_REDIS_URL, CARPOOL_REDIS_USER, CARPOOL_REDIS_PASSWORD_FILE, ...
    `prefix`: what the names of all keys in Redis begin with; by default that of CARPOOL_PREFIX, or "carpool".
    `timeout`: seconds until a request fails, for requests without their own `timeout`: 30 by default, None
        for no limit. It begins with the call, and is for all of it: until Redis has the request, it is
        executed, and its result, or the last chunk of its stream, is here.
    `durability`: when a request counts as accepted. "none": when Redis has it in memory; "replicas=N": when N
        replicas have it, too; "fsync": when it is on the disk of Redis. See `flush`.
    `require_worker`: a request to a model that no worker serves fails at once, with UnavailableError, and
        does not wait for one. A worker that was killed counts until its lease has run out. Not for
        `sequence`.

    One that nobody has any more, and whose requests have results, closes itself, with a ResourceWarning. For
    that, what belongs to the event loop (connections, timers) does not keep it.

    One that is made before a fork and connects after it serves each process by itself. One that was connected
    before is the parent's: in the child, its calls raise RuntimeError.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        durability: str = "none",
        require_worker: bool = False,
    ) -> None:
        self._timeout_s = checked_timeout_s(timeout)
        self._producer = self._new_producer(url, prefix, durability)
        self._packer = self._producer.packer
        self._served = ServedChannels(self._producer.channels) if require_worker else None
        self._channels: dict[str, Channel] | ServedChannels = self._served or self._producer.channels
        self._encoder, self._reader = BodyEncoder(), ResultReader()
        self._values, self._replies = FutureSink(self._reader), ReplySink(self._reader)
        streams = StreamSink(self._reader)
        self._sender = Sender(self._packer, self._channels, self._encoder, streams, self._timeout_s)
        self._stream_lookups: set[asyncio.Task[None]] = set()
        self._enqueued = EnqueuedRequests(self._producer, self._encoder, self._reader)

    def _new_producer(self, url: str | None, prefix: str | None, durability: str) -> Producer:
        """What sends its requests; a subclass may have another one."""
        return Producer(url, prefix, self._timeout_s, durability)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AsyncClient has connections, so it cannot be pickled into another process: make one in each"
        )

    @property
    def address(self) -> str:
        """The URL without user name and password."""
        return self._producer.address

    @property
    def timed_out(self) -> int:
        """How many requests failed because no result came within their timeout."""
        return self._packer.timed_out

    @property
    def late_results(self) -> int:
        """How many results of successful requests came after their timeout, or after they were cancelled;
        after a failover also those that are read again."""
        return self._packer.awaited.late_results

    @property
    def malformed_results(self) -> int:
        """How many results could not be understood. The requests that they name fail."""
        return self._packer.awaited.malformed_results

    # --- connecting and closing ----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect now, not with the first request. Raises UnavailableError if Redis cannot be reached, or is
        silent for 5 seconds, and UnimplementedError if it cannot give the `durability`."""
        await self._producer.connect()

    async def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError, but are not withdrawn: those that
        were sent with UnconfirmedError."""
        await self._producer.close()

    def __del__(self) -> None:
        producer: Producer | None = getattr(self, "_producer", None)  # None: its settings were refused
        if producer is None or sys.is_finalizing() or not producer.abandon():
            return
        warnings.warn(
            f"unclosed AsyncClient of {self.address}: use it in an `async with`, or await close()",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    async def flush(self) -> None:
        """Wait until Redis has accepted all requests that were sent before, as `durability` demands.

        From then on they need this program no more: whoever reads their results gets them. Those that Redis
        refused have failed by then, and so have those that it could not confirm, with UnconfirmedError.
        Raises UnavailableError.
        """
        await self._producer.flush()

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result. Raises the CarpoolError of the result's status: after
        `timeout`, which is 30 seconds unless this call or the client has another, DeadlineExceededError.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model unchanged.
        An array has the shape of one request, without a batch dimension, and so has an array that is
        returned. Cancelling withdraws the request if it is still waiting.
        """
        channel = self._channels.get(model)
        if channel is None or "retries" in options:
            return await self._infer(self._values, model, body, options)
        future = (
            self._packer.loop.create_future()
        )  # here, because a coroutine more for each request is slower
        correlation_id = self._sender.add_traced(channel, body, options, self._values, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._packer.withdraw(correlation_id, future)
            raise

    async def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        reply: Reply = await self._infer(self._replies, model, body, options)
        return reply

    async def _infer(self, sink: FutureSink, model: str, body: Any, options: RequestOptions) -> Any:
        if "retries" in options:
            body, options = self._encoder.snapshot(body, options)
            return await with_retries(
                lambda left: self._infer(sink, model, body, left),
                options,
                self._timeout_s,
                lambda: self._packer.is_closed,
            )
        channel = self._channels.get(model)
        if channel is None:
            body, options = self._encoder.snapshot(body, options)
            channel, options = await self._find(model, options)
        future = self._packer.loop.create_future()
        correlation_id = self._sender.add_traced(channel, body, options, sink, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._packer.withdraw(correlation_id, future)
            raise

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> asyncio.Future[Any]:
        """As `infer`, but return a future at once, which has the result or the error. Cancelling it withdraws
        the request.

        The body is sent as it is now: what is done to an array or a dict afterwards changes nothing.
        """
        channel = self._channels.get(model)
        if channel is None or "retries" in options:
            body, options = self._encoder.snapshot(body, options)
            return asyncio.ensure_future(self._infer(self._values, model, body, options))
        future = self._packer.loop.create_future()
        correlation_id = self._sender.add_traced(channel, body, options, self._values, future)
        future.add_done_callback(
            lambda done: self._packer.withdraw(correlation_id, done) if done.cancelled() else None
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

        A row is one step along the first dimension: of an array of the shape (n, 3) a request has (3,), and n
        results of the shape (2,) are returned as one array (n, 2). The results of an array are the rows of
        one array, or a list if they are not arrays of one dtype and shape, or if there are none. Those of
        other bodies are always a list. An array must not be changed until this returns.

        At most `in_flight` requests have no result at any time; the `timeout` of each begins when it is sent.
        The first error is raised, and the other requests are withdrawn, as they are if this is cancelled.
        With `return_exceptions` the results are a list that has each error in its place.
        """
        with together(model, options) as traced:
            return await self._infer_many(model, bodies, in_flight, return_exceptions, traced)

    async def _infer_many(
        self,
        model: str,
        bodies: Array | Iterable[Any],
        in_flight: int,
        return_exceptions: bool,
        options: RequestOptions,
    ) -> Any:
        check_in_flight(in_flight)
        check_no_sequence(options, "infer_many")
        bodies = bodies_to_send(bodies, "infer_many")
        channel = self._channels.get(model)
        if channel is None:
            channel, options = await self._find(model, options)
        size = (
            len(bodies) if isinstance(bodies, np.ndarray) and bodies.ndim and not return_exceptions else None
        )
        gathering = Gathering(self._reader, self._packer.loop, size=size, keep_errors=return_exceptions)
        try:
            if isinstance(bodies, np.ndarray) and (head := self._encoder.head_of_rows(bodies, options)):
                await self._sender.send_rows(channel, bodies, head, options, gathering, in_flight)
            else:
                for body in bodies:
                    self._sender.add_or_fail(channel, body, options, gathering)
                    if gathering.in_flight >= in_flight:
                        await gathering.wait(in_flight - 1)
            await gathering.wait(0)
        finally:
            self._packer.withdraw_all(gathering)
        return gathering.results()

    async def map(
        self,
        model: str,
        bodies: Iterable[Any] | AsyncIterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Any, None]:
        """Send a request for each of `bodies`, and yield the results in the same order.

        `bodies` may be endless: at most `in_flight` requests have no result at any time. An error is raised
        in its turn, or yielded with `return_exceptions`. Closing the iterator withdraws what still waits.
        """
        check_in_flight(in_flight)
        check_no_sequence(options, "map")
        source = bodies if isinstance(bodies, AsyncIterable) else _iterate(bodies_to_send(bodies, "map"))
        if "retries" in options:
            retried = each_with_retries(lambda body: self.submit(model, body, **options), source, in_flight)
            async with aclosing(retried) as outcomes:
                async for outcome in outcomes:
                    yield _checked(outcome, return_exceptions)
            return
        channel = self._channels.get(model)
        if channel is None:
            channel, options = await self._find(model, options)
        window = Window(self._reader, self._packer.loop)
        with together(model, options) as traced:
            try:
                async for body in source:
                    self._sender.add_or_fail(channel, body, traced, window)
                    while len(window) >= in_flight or window.ready:
                        yield _checked(await window.take(), return_exceptions)
                while len(window):
                    yield _checked(await window.take(), return_exceptions)
            finally:
                self._packer.withdraw_all(window)

    def stream(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> AsyncStream:
        """Send a request at once, and return an async iterator of its chunks.

        Options are those of `infer`; `timeout` is for the whole answer, 30 seconds by default. Errors are
        raised by the iterator. After the last chunk its `reply` has the whole output. A model that does not
        step has one chunk. Leaving the iterator early withdraws the request: see AsyncStream.
        """
        loop = asyncio.get_running_loop()
        target = StreamTarget(asyncio.Queue())
        if (sent := begin(model, options)) is not None:
            target.on_end, options = sent.fail, sent.options
        channel = self._channels.get(model)
        if channel is not None:
            self._sender.start_stream(channel, target, body, options)
        else:
            body, options = self._encoder.snapshot(body, options)
            lookup = loop.create_task(self._start_first_stream(model, target, body, options))
            self._stream_lookups.add(lookup)
            lookup.add_done_callback(self._stream_lookups.discard)
        return AsyncStream(target, self._close_stream, loop)

    def sequence(self, model: str, sequence_id: str | None = None) -> AsyncSequence:
        """A sequence of requests to a model that keeps a state between them, for an `async with`.

        Its `infer` and `submit` send the requests, several of which may be in flight. At the end of the block
        the sequence ends. `sequence_id`: your own name for it; no other producer may use the same one.
        """

        def send(
            progress: SequenceProgress, body: Any, options: RequestOptions, end: bool
        ) -> asyncio.Future[Any]:
            future = self._packer.loop.create_future()
            if (sent := begin(model, options)) is not None:
                sent.follow(future)
                options = sent.options
            on_done = self._sender.add_to_sequence(progress, body, options, end, self._values, future)
            future.add_done_callback(on_done)
            return future

        return AsyncSequence(SequenceProgress(self._producer, model, sequence_id), send)

    async def models(self) -> list[str]:
        """Names of the registered models, also of those that no worker serves. Raises UnavailableError."""
        return await self._producer.models()

    async def wait_ready(self, model: str, timeout: float | None = None) -> None:
        """Wait until a worker can execute requests of a model, also if no worker has registered it yet.

        Raises DeadlineExceededError after `timeout` seconds, and says what is missing; by default it waits
        without limit.
        """
        await self._producer.wait_ready(model, checked_timeout_s(timeout))

    # --- results by ID, from any process -------------------------------------------------------------------

    async def enqueue(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> str:
        """Send a request whose result any process may read, and return its ID: MODEL/CORRELATION_ID.

        Once this returns, Redis has the request: this process need not live until the result is read.
        Enqueued again under its `correlation_id`, it is executed once, as long as its result is kept; with
        another body it is an InvalidArgumentError. Options are those of `infer`, but `timeout`, in which it
        must be executed, is an hour by default, and there are no `retries`. `result_ttl`: seconds for which
        the result is kept once it is there; by default the model's `result_ttl_ms`, a minute. The result of a
        model that steps is its whole output; only `stream` has chunks.
        """
        with together(model, options) as traced:
            return await self._enqueued.enqueue(model, body, traced)

    async def result(self, request_id: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """The result of a request that was enqueued, by any process, as soon as it is there.

        `timeout`: seconds; 0: only if it is there already; None: without a limit. It may be read as often as
        wanted, by several at once. Raises the CarpoolError of the result's status, NotFoundError if the
        request is unknown or its result is kept no longer, and NoResultError if it is not there in time.
        """
        return await self._enqueued.result(
            request_id, timeout if timeout == 0 else checked_timeout_s(timeout)
        )

    async def status(self, request_id: str) -> RequestStatus:
        """What became of a request that was enqueued: "waiting", "in flight", "done" (its result is OK),
        "failed" (any other status), "dead" (it was given up), or "unknown" (there is none, or its result is
        kept no longer)."""
        return await self._enqueued.status(request_id)

    async def cancel(self, request_id: str) -> None:
        """Withdraw a request that was enqueued. If it waits, or its model steps or executes several batches
        at a time, its result is soon a CancelledRequestError; else nothing happens. Raises NotFoundError."""
        await self._enqueued.withdraw(request_id)

    # --- sending -------------------------------------------------------------------------------------------

    async def _find(self, model: str, options: RequestOptions) -> tuple[Channel, RequestOptions]:
        """The channel of a model that is new to this client. If a worker is loading it, that is waited for,
        and the options have what is left of the timeout, and of `not_before`."""
        timeout_s = read_options(options, self._timeout_s)[0]
        channel, waited_s = await self._producer.find_channel(model, timeout_s, self._served)
        return channel, left_of(options, timeout_s, waited_s) if waited_s else options

    async def _start_first_stream(
        self, model: str, target: StreamTarget, body: Any, options: RequestOptions
    ) -> None:
        """Look the model up, then send the request."""
        try:
            channel, options = await self._find(model, options)
        except Exception as error:
            target.fail(error)
        else:
            self._sender.start_stream(channel, target, body, options)

    def _close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more: withdraw its request."""
        self._packer.close_stream(target)


async def _iterate(bodies: Iterable[Any]) -> AsyncIterator[Any]:
    for body in bodies:
        yield body


def _checked(result: Any, return_exceptions: bool) -> Any:
    """A result of a Window. Raises it if it is an error, unless errors are wanted."""
    if isinstance(result, CarpoolError) and not return_exceptions:
        raise result
    return result
