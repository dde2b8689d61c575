"""The asyncio producer: `AsyncClient`. The connections to Redis are in `transport`.

Requests of one iteration of the event loop share entries, so what is done for each request is little: its
body is encoded, it gets a correlation ID and a target for its result, and it is added to an entry. All else,
timeouts among it, is done for an entry.

Why: docs/decisions/0045.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from concurrent.futures import Future
from contextlib import aclosing, suppress
from itertools import count, islice
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar, Unpack
from weakref import WeakMethod, WeakSet

import numpy as np

from carpool.address import without_password
from carpool.client.awaited import AwaitedRequests
from carpool.client.cluster import ClusterTransport
from carpool.client.durability import Durability
from carpool.client.encoding import BodyEncoder, TensorHead, bodies_to_send
from carpool.client.entries import (
    LARGE_BODY_BYTES,
    MAX_ENDED_SEQUENCES,
    MAX_ENTRY_BYTES,
    MAX_ENTRY_REQUESTS,
    NO_FIELDS,
    Channel,
    OutgoingEntry,
    OutgoingRun,
    SequencesEnded,
)
from carpool.client.environment import connection
from carpool.client.lookup import POLL_S, ModelLookup
from carpool.client.options import (
    DEFAULT_TIMEOUT_S,
    IN_FLIGHT,
    RequestOptions,
    check_correlation_id,
    check_in_flight,
    check_no_sequence,
    checked_timeout_s,
    optional_fields,
)
from carpool.client.retries import each_with_retries, left_of, with_retries
from carpool.client.sequences import AsyncSequence, SequenceProgress
from carpool.client.sinks import FutureSink, Gathering, Reply, ReplySink, Sink, Window
from carpool.client.streams import AsyncStream, StreamSink, StreamTarget
from carpool.client.timeouts import Timeouts
from carpool.client.transport import Transport, failure
from carpool.cluster import is_cluster
from carpool.errors import (
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    InvalidArgumentError,
    NoResultError,
    UnavailableError,
    UnconfirmedError,
)
from carpool.keys import Keys, models_key
from carpool.messages.requests import MSGPACK
from carpool.store.connection import CommandError, LinkError
from carpool.wire.tensors import Array, to_bytes

__all__ = ["AsyncClient", "Reply", "RequestOptions"]

T = TypeVar("T")

WRITTEN_TOGETHER_MIN: Final = 64  # requests in full entries that are sent before the others
# Of a body. At a larger string, a Redis as ops/redis configures it closes the connection, each time anew.
STRING_BYTES_MAX: Final = 256 * 1024 * 1024
_FORKED: Final = "this process was forked from the one that sent the request"


class AsyncClient:
    """A producer. Use it as `async with AsyncClient(url) as client:`; one per event loop is enough.

    `url`: the address of Redis, with all that it takes to sign in. Without it, the settings of services and
        commands are used: CARPOOL_REDIS_URL, CARPOOL_REDIS_USER, CARPOOL_REDIS_PASSWORD_FILE, ...
    `timeout`: seconds until a request fails, for requests without their own `timeout`; None for no limit.
    `durability`: when a request counts as accepted. "none": when Redis has it in memory; "replicas=N": when N
        replicas have it, too; "fsync": when it is on the disk of Redis. See `flush`.
    `timed_out`: how many requests failed because no result came within their timeout.

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
    ) -> None:
        self._url, self._prefix = connection(url, prefix)
        self._timeout_s = checked_timeout_s(timeout)
        self.timed_out = 0
        self._name = ""  # of the reply stream, and of what is sent: see `connect`
        self._numbers = count()
        self._channels: dict[str, Channel] = {}  # by model
        self._awaited = AwaitedRequests(_weakly(self._withdraw))
        # Entries to be sent after this iteration of the event loop, and those that take more requests.
        self._in_full = 0  # requests in those of `_collected` that are full
        self._collected: list[OutgoingEntry | SequencesEnded] = []
        self._open: dict[tuple[Channel, str, float | None, Sink], OutgoingEntry] = {}
        self._encoder = BodyEncoder()
        self._lookup = ModelLookup(_weakly(self._call), self._prefix)
        self._values, self._replies, self._streams = FutureSink(), ReplySink(), StreamSink()
        self._lookups: set[asyncio.Task[None]] = set()  # of models, for streams
        self._timeouts = Timeouts(_weakly(self._on_timeout))
        self._opening: asyncio.Future[None] | None = None
        self._closed = False
        self._is_inherited = False  # this process was forked from the one that has the connections
        self._transport = self._new_transport(self._url, Durability.of(durability))
        self._model_lookups: set[asyncio.Future[None]] = set()  # under way

    def _new_transport(self, url: str, durability: Durability) -> Transport | ClusterTransport:
        on_results, on_rejected = self._awaited.on_results, self._awaited.fail
        parts = (url, on_results, on_rejected, _weakly(self._on_unconfirmed))
        unanswered = self._awaited.of_entries
        if not is_cluster(url):
            return Transport(*parts, unanswered, durability)
        return ClusterTransport(
            models_key(self._prefix),
            lambda key, of_node: Transport(*parts, of_node, durability, key),
            unanswered,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AsyncClient has connections, so it cannot be pickled into another process: make one in each"
        )

    @property
    def address(self) -> str:
        """The URL without user name and password."""
        return without_password(self._url)

    @property
    def late_results(self) -> int:
        """How many results of successful requests came after their timeout, or after they were cancelled;
        after a failover also those that are read again."""
        return self._awaited.late_results

    @property
    def malformed_results(self) -> int:
        """How many results could not be understood. The requests that they name fail."""
        return self._awaited.malformed_results

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
        """Connect now, not with the first request. Raises UnavailableError if Redis cannot be reached, and
        UnimplementedError if it cannot give the `durability`."""
        self._check_open()
        if self._opening is None:
            self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
            # Not before: each process that is forked from one with this client needs a name of its own.
            self._name = f"py-{secrets.token_hex(8)}"
            self._opening = asyncio.ensure_future(self._transport.open(self._name))
            _CONNECTED.add(self)
        self._check_loop()
        opening = self._opening
        try:
            await asyncio.shield(opening)
        except LinkError:
            if self._opening is opening:
                self._opening = None  # the next call tries again
            raise

    async def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError, but are not withdrawn: those that
        were sent with UnconfirmedError."""
        if self._closed:
            return
        if self._opening is not None:
            self._check_loop()
        self._closed = True
        self._transport.send([entry for entry in self._collected if isinstance(entry, SequencesEnded)])
        await self._transport.close()
        self._awaited.fail_all("the client was closed before there was a result")
        self._timeouts.close()

    def __del__(self) -> None:
        opening = getattr(self, "_opening", None)  # None: no connection was begun
        if opening is None or self._closed or sys.is_finalizing() or self._pid != os.getpid():
            return
        with suppress(RuntimeError):  # the event loop is closed: then nothing of it is open
            self._loop.call_soon_threadsafe(_abandon, self._transport, self._timeouts)
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
        self._check_open()
        await asyncio.sleep(0)  # requests to models that were not used before begin with a look-up
        while self._model_lookups:
            await asyncio.wait(self._model_lookups)
            await asyncio.sleep(0)
        self._send_collected()
        await self._call("PING")  # replied to after all that was written before

    def _check_open(self) -> None:
        """Raise UnavailableError if this is closed, and RuntimeError if it is a parent process's."""
        if self._is_inherited:
            raise RuntimeError(
                "this client was connected before a fork, so it is the parent process's: make a client in "
                "each process, or use it first after the fork"
            )
        if self._closed:
            raise UnavailableError("this client is closed")

    def _check_loop(self) -> None:
        """Raise RuntimeError in another event loop than that of the connections. Done for each entry."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "this AsyncClient is connected in another event loop (each asyncio.run has its own): make a "
                "client in each event loop, or use Client, which any number of threads may share"
            )

    # --- requests ------------------------------------------------------------------------------------------

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result. Raises the CarpoolError of the result's status.

        `body`: numbers, text, lists, maps, numpy arrays (tensors), or bytes, which reach the model unchanged.
        Cancelling withdraws the request if it is still waiting.
        """
        if "retries" in options:
            return await self._retry(self.infer, model, body, options)
        channel = self._channels.get(model)
        if channel is None:
            body, options = self._encoder.take(body, options)
            channel, options = await self._find(model, options)
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._values, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(correlation_id, future)
            raise

    async def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        if "retries" in options:
            retried: Reply = await self._retry(self.request, model, body, options)
            return retried
        channel = self._channels.get(model)
        if channel is None:
            body, options = self._encoder.take(body, options)
            channel, options = await self._find(model, options)
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._replies, future)
        try:
            reply: Reply = await future
        except asyncio.CancelledError:
            self._withdraw(correlation_id, future)
            raise
        return reply

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> asyncio.Future[Any]:
        """As `infer`, but return a future at once. Cancelling it withdraws the request.

        The body is sent as it is now: what is done to an array or a dict afterwards changes nothing.
        """
        channel = self._channels.get(model)
        if channel is None or "retries" in options:
            body, options = self._encoder.take(body, options)
            return asyncio.ensure_future(self.infer(model, body, **options))
        future = self._loop.create_future()
        correlation_id = self._add(channel, body, options, self._values, future)
        future.add_done_callback(
            lambda done: self._withdraw(correlation_id, done) if done.cancelled() else None
        )
        return future

    async def _retry(
        self, call: Callable[..., Awaitable[Any]], model: str, body: Any, options: RequestOptions
    ) -> Any:
        body, options = self._encoder.take(body, options)

        def send(others: RequestOptions) -> Awaitable[Any]:
            return call(model, body, **others)

        return await with_retries(send, options, self._timeout_s, lambda: self._closed)

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
        check_in_flight(in_flight)
        check_no_sequence(options, "infer_many")
        bodies = bodies_to_send(bodies, "infer_many")
        channel = self._channels.get(model)
        if channel is None:
            channel, options = await self._find(model, options)
        size = (
            len(bodies) if isinstance(bodies, np.ndarray) and bodies.ndim and not return_exceptions else None
        )
        gathering = Gathering(self._loop, size=size, keep_errors=return_exceptions)
        try:
            if isinstance(bodies, np.ndarray) and (head := self._encoder.head_of_rows(bodies, options)):
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
        window = Window(self._loop)
        try:
            async for body in source:
                self._add_or_fail(channel, body, options, window)
                while len(window) >= in_flight or window.ready:
                    yield _checked(await window.take(), return_exceptions)
            while len(window):
                yield _checked(await window.take(), return_exceptions)
        finally:
            self._withdraw_all(window)

    def stream(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> AsyncStream:
        """Send a request at once, and return an async iterator of its chunks.

        Options are those of `infer`; `timeout` is for the whole answer. Errors are raised by the iterator.
        After the last chunk its `reply` has the whole output. A model that does not step has one chunk.
        Leaving the iterator early withdraws the request: see AsyncStream.
        """
        loop = asyncio.get_running_loop()
        target = StreamTarget(asyncio.Queue())
        channel = self._channels.get(model)
        if channel is not None:
            self._start_stream(channel, target, body, options)
        else:
            body, options = self._encoder.take(body, options)
            lookup = loop.create_task(self._start_first_stream(model, target, body, options))
            self._lookups.add(lookup)
            lookup.add_done_callback(self._lookups.discard)
        return AsyncStream(target, self._close_stream, loop)

    def sequence(self, model: str, sequence_id: str | None = None) -> AsyncSequence:
        """A sequence of requests to a model that keeps a state between them, for an `async with`.

        Its `infer` and `submit` send the requests, several of which may be in flight. At the end of the block
        the sequence ends. `sequence_id`: your own name for it; no other producer may use the same one.
        """
        progress = self._sequence_progress(model, sequence_id)
        return AsyncSequence(progress, self._enter_sequence, self._send_in_sequence, self._end_sequence)

    async def models(self) -> list[str]:
        """Names of the registered models."""
        return await self._lookup.models()

    async def wait_ready(self, model: str, timeout: float | None = None) -> None:
        """Wait until a worker can execute requests of a model, also if no worker has registered it yet.

        Raises DeadlineExceededError after `timeout` seconds, and says what is missing; None: never.
        """
        timeout_s = checked_timeout_s(timeout)
        await self._in_time(self._lookup.wait_ready(model, timeout_s), timeout_s)

    # --- commands beside the requests ----------------------------------------------------------------------

    async def _open_channel(self, model: str, timeout_s: float | None) -> Channel:
        """Look up a model, and read its results from now on. Raises CarpoolErrors."""
        lookup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._model_lookups.add(lookup)
        try:
            return await self._in_time(self._look_up(model, timeout_s), timeout_s)
        finally:
            self._model_lookups.discard(lookup)
            lookup.cancel()

    async def _look_up(self, model: str, timeout_s: float | None) -> Channel:
        size = await self._lookup.batch_size(model, timeout_s)
        channel = self._channels.get(model)
        if channel is None:
            keys, requests_max = Keys(model, self._prefix), max(1, min(size, MAX_ENTRY_REQUESTS))
            channel = self._channels[model] = Channel(keys, keys.replies(self._name).encode(), requests_max)
            self._transport.add_channel(channel)
        return channel

    async def _in_time(self, lookup: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """The result of a look-up, which itself takes no longer than `timeout_s` as long as Redis replies."""
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + 2 * POLL_S):
                return await lookup
        except TimeoutError as late:
            if isinstance(late, CarpoolError):
                raise
            error = self._transport.connection_error
            cause = f" ({error.detail})" if error else ""
            raise DeadlineExceededError(f"Redis did not reply within {timeout_s:g} s{cause}") from None

    async def _find(self, model: str, options: RequestOptions) -> tuple[Channel, RequestOptions]:
        """The channel of a model that is new to this client. If a worker is loading it, that is waited for,
        and the options have what is left of the timeout, and of `not_before`."""
        timeout_s, started_s = self._read_options(options)[0], time.monotonic()
        channel = await self._open_channel(model, timeout_s)
        waited_s = time.monotonic() - started_s
        return channel, left_of(options, timeout_s, waited_s) if waited_s > POLL_S else options

    async def _call(self, *command: str) -> Any:
        """Redis's reply to a command, which is repeated if a connection is lost. Raises UnavailableError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.connect()
                reply = await self._transport.call_again(*command)
        except TimeoutError:
            error = self._transport.connection_error
            raise error or UnavailableError(
                f"Redis did not reply to {command[0]} within {self._timeout_s:g} s"
            ) from None
        if isinstance(reply, CommandError):
            raise failure(f"Redis rejected {command[0]}", reply)
        return reply

    # --- sending -------------------------------------------------------------------------------------------

    def _add(self, channel: Channel, body: Any, options: RequestOptions, sink: Sink, target: Any) -> str:
        """Add a request to an entry; return its correlation ID. Its result goes to the target in the sink."""
        if self._closed:
            self._check_open()
        if self._transport.is_full:
            raise self._transport.full_error()
        timeout_s, fields, correlation_id, content_type = self._timeout_s, NO_FIELDS, None, None
        if options:
            timeout_s, fields = self._read_options(options)
            correlation_id, content_type = options.get("correlation_id"), options.get("content_type")
            if correlation_id is not None:
                check_correlation_id(correlation_id, self._awaited.entries)
        if correlation_id is None:
            correlation_id = f"{self._name}-{next(self._numbers)}"
        content_type, head, rest = self._encoder.encode(body, content_type)
        is_large = len(rest) >= LARGE_BODY_BYTES
        if is_large and len(head) + len(rest) > STRING_BYTES_MAX:
            raise InvalidArgumentError(
                f"body: {len(rest)} bytes; at most {STRING_BYTES_MAX} are allowed: put it into object "
                "storage, and send its name"
            )
        key = (channel, content_type, timeout_s, sink)
        entry = self._open.get(key)
        if entry is None:
            self._check_loop()
            entry = self._open[key] = OutgoingEntry(channel, content_type, timeout_s, sink)
            self._collect(entry)
        if not is_large:
            has_room = entry.add(correlation_id, target, fields, head, rest)
        else:  # the name is this request's own, also if it has the correlation ID of another
            name = f"{self._name}-{next(self._numbers)}" if "correlation_id" in options else correlation_id
            has_room = entry.add_stored(correlation_id, target, fields, head + rest, name)
        self._awaited.entries[correlation_id] = entry
        if not has_room:
            del self._open[key]
            self._on_full(len(entry.awaited))
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

    async def _start_first_stream(
        self, model: str, target: StreamTarget, body: Any, options: RequestOptions
    ) -> None:
        """Look the model up, then send the request."""
        try:
            channel, options = await self._find(model, options)
        except Exception as error:
            target.fail(error)
        else:
            self._start_stream(channel, target, body, options)

    def _start_stream(
        self, channel: Channel, target: StreamTarget, body: Any, options: RequestOptions
    ) -> None:
        if target.ended:  # closed by its reader meanwhile
            return
        try:
            check_no_sequence(options, "stream")
            target.correlation_id = self._add(channel, body, options, self._streams, target)
        except Exception as error:
            target.fail(error)

    def _close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more: withdraw its request."""
        target.close()
        if target.correlation_id is not None:
            self._withdraw(target.correlation_id, target)

    async def _send_rows(
        self,
        channel: Channel,
        array: Array,
        head: TensorHead,
        options: RequestOptions,
        gathering: Gathering,
        in_flight: int,
    ) -> None:
        """Send the rows of an array, in entries of as many requests as the entries of other requests have."""
        self._check_open()
        self._check_loop()
        timeout_s, fields = self._read_options(options)
        width = array.nbytes // len(array)
        step = max(1, min(channel.entry_requests_max, in_flight, MAX_ENTRY_BYTES // width))
        for start in range(0, len(array), step):
            await gathering.wait(in_flight - step)
            self._check_open()
            if self._transport.is_full:
                raise self._transport.full_error()
            rows = array[start : start + step]
            ids = [f"{self._name}-{number}" for number in islice(self._numbers, len(rows))]
            entry = OutgoingEntry(channel, MSGPACK, timeout_s, gathering)
            entry.add_run(
                OutgoingRun(fields, head.encoded, ids, [to_bytes(rows, head.datatype)]),
                gathering.reserve(len(ids)),
            )
            self._awaited.entries.update(dict.fromkeys(ids, entry))
            self._collect(entry)
            self._on_full(len(ids))

    def _collect(self, entry: OutgoingEntry | SequencesEnded) -> None:
        """Send an entry after everything that is ready in this iteration of the event loop has run."""
        if not self._collected:
            self._loop.call_soon(self._send_collected)
        self._collected.append(entry)

    def _on_full(self, requests: int) -> None:
        """An entry of this many requests is full. Send what is collected if that is worth a write of its own:
        then batches are under way while other requests are encoded."""
        self._in_full += requests
        if self._in_full >= WRITTEN_TOGETHER_MIN:
            self._send_collected()

    def _send_collected(self) -> None:
        entries, self._collected = self._collected, []
        self._in_full = 0
        self._open.clear()
        if not self._closed:
            for entry in entries:
                if type(entry) is OutgoingEntry:
                    self._timeouts.start(entry, self._loop)
            self._transport.send(entries)

    def _read_options(self, options: RequestOptions) -> tuple[float | None, Mapping[str, Any]]:
        """The timeout, and the options that are sent as fields of the request."""
        if not options:
            return self._timeout_s, NO_FIELDS
        timeout_s = checked_timeout_s(options.get("timeout", self._timeout_s))
        return timeout_s, optional_fields(options, timeout_s)

    # --- sequences -----------------------------------------------------------------------------------------

    def _sequence_progress(self, model: str, sequence_id: str | None) -> SequenceProgress:
        name = f"py-{secrets.token_hex(8)}" if sequence_id is None else sequence_id
        return SequenceProgress(model, name)

    async def _enter_sequence(self, progress: SequenceProgress) -> None:
        """Look its model up. From then on requests are sent without waiting, in the order of the calls."""
        self._check_open()
        if progress.model not in self._channels:
            await self._open_channel(progress.model, self._timeout_s)
        progress.begin()

    def _send_in_sequence(
        self, progress: SequenceProgress, body: Any, options: RequestOptions, end: bool
    ) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        on_done = self._add_to_sequence(progress, body, options, end, self._values, future)
        future.add_done_callback(on_done)
        return future

    def _add_to_sequence(
        self,
        progress: SequenceProgress,
        body: Any,
        options: RequestOptions,
        end: bool,
        sink: Sink,
        target: Any,
    ) -> Callable[[Any], None]:
        """Add the next request of a sequence. Returns what is to be called once the target is done."""
        options = progress.next_options(options, end=end)
        correlation_id = self._add(self._channels[progress.model], body, options, sink, target)
        index = progress.on_sent(self._transport.losses, end=end)

        def on_done(done: asyncio.Future[Any] | Future[Any]) -> None:
            if done.cancelled():
                self._withdraw(correlation_id, done)
                progress.on_done(index, CancelledRequestError("by its caller"), end=end)
            else:
                progress.on_done(index, done.exception(), end=end)

        return on_done

    def _end_sequence(self, progress: SequenceProgress) -> None:
        """End a sequence whose block was left, unless it has ended. Its requests that wait are withdrawn.

        In the request stream this stands after the requests sent before, and before all others. Sequences
        that end in one iteration of the event loop, with no request in between, share an entry.
        """
        if not progress.leave(self._transport.losses) or self._closed:
            return
        channel, last = self._channels[progress.model], self._collected[-1] if self._collected else None
        if (
            not isinstance(last, SequencesEnded)
            or last.channel is not channel
            or len(last.sequence_ids) >= MAX_ENDED_SEQUENCES
        ):
            last = SequencesEnded(channel)
            self._open.clear()
            self._collect(last)
        last.sequence_ids.append(progress.sequence_id)

    # --- forks ---------------------------------------------------------------------------------------------

    def _on_fork(self) -> None:
        """This is the child of a fork, and the connections are its parent's: use them no more. What awaits
        results on an event loop that the child goes on with fails."""
        if self._opening is None:  # it could not connect, so it may still do so in each process
            return
        self._closed = self._is_inherited = True
        self._transport.disown()
        self._fail_inherited()

    def _fail_inherited(self) -> None:
        self._awaited.fail_all(_FORKED)
        self._timeouts.close()

    # --- timeouts, withdrawals and lost connections --------------------------------------------------------

    def _on_timeout(self, entry: OutgoingEntry) -> None:
        self.timed_out += len(entry.awaited)
        error = self._transport.connection_error
        cause = f" ({error.detail})" if error else ""
        kind = NoResultError if entry.sent else DeadlineExceededError
        self._awaited.fail(entry, kind(f"no result within {entry.timeout_s:g} s{cause}"))
        self._transport.drop_unawaited()

    def _on_unconfirmed(self, entry: OutgoingEntry) -> None:
        """An entry that Redis may have accepted is to be sent again: see to what must not be executed twice.

        Requests of a sequence fail that have no index. Streams begin anew under other correlation IDs, as
        readers would get chunks of both executions.
        """
        for correlation_id in entry.sent_at_most_once():
            target = entry.awaited[correlation_id]
            self._awaited.remove(correlation_id, target)
            entry.sink.fail(target, _unconfirmed(correlation_id))
        if not isinstance(entry.sink, StreamSink):
            return
        unheard = [name for name, target in entry.awaited.items() if not target.index]  # others were accepted
        names: dict[str, str] = {}
        for correlation_id in unheard:
            target = entry.awaited[correlation_id]
            if correlation_id.startswith(f"{self._name}-"):
                target.correlation_id = names[correlation_id] = f"{self._name}-{next(self._numbers)}"
            else:
                self._awaited.remove(correlation_id, target)
                target.fail(_unconfirmed(correlation_id))
        self._awaited.rename(entry, names)
        self._transport.withdraw(entry.channel, unheard)

    def _withdraw(self, correlation_id: str, target: Any) -> None:
        """Withdraw a request whose caller was cancelled."""
        entry = self._awaited.remove(correlation_id, target)
        if entry is not None and entry.sent:
            self._transport.withdraw(entry.channel, [correlation_id])
        self._transport.drop_unawaited()

    def _withdraw_all(self, sink: Sink) -> None:
        """Withdraw all requests without a result whose results go to this sink."""
        for entry, correlation_ids in self._awaited.remove_all(sink):
            if entry.sent:
                self._transport.withdraw(entry.channel, correlation_ids)


def _unconfirmed(correlation_id: str) -> UnconfirmedError:
    return UnconfirmedError(
        "the connection was lost before Redis confirmed the request", correlation_id=correlation_id
    )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object. Once that is gone, a call does nothing."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call


_CONNECTED: Final[WeakSet[AsyncClient]] = WeakSet()


def _on_fork() -> None:
    for client in list(_CONNECTED):
        client._on_fork()


os.register_at_fork(after_in_child=_on_fork)


def _abandon(transport: Transport | ClusterTransport, timeouts: Timeouts) -> None:
    """Disconnect a client that is gone. Runs on the thread of the event loop."""
    transport.abandon()
    timeouts.close()


async def _iterate(bodies: Iterable[Any]) -> AsyncIterator[Any]:
    for body in bodies:
        yield body


def _checked(result: Any, return_exceptions: bool) -> Any:
    """A result of a Window. Raises it if it is an error, unless errors are wanted."""
    if isinstance(result, CarpoolError) and not return_exceptions:
        raise result
    return result
