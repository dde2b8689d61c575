"""The blocking producer: `Client`, for programs without an event loop. It runs an `AsyncClient` on a thread.

with Client("redis://127.0.0.1:6379/0") as client:
    print(client.infer("square", 7))                 # 49
    future = client.submit("square", 8)              # a concurrent.futures.Future
    for result in client.map("square", range(1000)): # in order, at most 1,024 in flight
        ...
    squares = client.infer_many("square", np.arange(1000.0))
    for text in client.stream("writer", "Once"):     # as the model writes it
        ...
    with client.sequence("vad") as microphone:       # of a model that keeps a state
        speech = microphone.infer(sound)

The thread runs uvloop where it is installed (the extra `uvloop`), but for programs under gevent or
eventlet: see `loop_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self, Unpack

import numpy as np

from carpool.client.aio import AsyncClient
from carpool.client.encoding import CONSTANT_TYPES, bodies_to_send
from carpool.client.loop_thread import CLOSED, LoopThread, RequestFuture, new_queue
from carpool.client.options import (
    DEFAULT_TIMEOUT_S,
    IN_FLIGHT,
    RequestOptions,
    check_in_flight,
    checked_timeout_s,
)
from carpool.client.sequences import BlockingSequence, SequenceProgress
from carpool.client.sinks import Reply, ThreadFutureSink, fail_future
from carpool.client.spans import begin, together
from carpool.client.streams import Stream, StreamTarget
from carpool.errors import InvalidArgumentError, UnavailableError
from carpool.store.kept import RequestStatus
from carpool.wire.tensors import Array

__all__ = ["AsyncClient", "Client", "Reply", "Stream"]

CLOSING_S_MAX: Final = 10.0
IDLE_CHECK_S: Final = 0.1
_LOG: Final = logging.getLogger("carpool.client")
# In the child of a fork: the threads of the parent's Clients. To destroy them would change what it waits for.
_INHERITED: Final[list[object]] = []


class _Submission(NamedTuple):
    """A request on its way from the caller's thread to the client's."""

    target: Future[Any] | StreamTarget
    model: str
    body: Any
    options: RequestOptions
    sequence: SequenceProgress | None = None
    ends: bool = False  # it is the last request of the sequence

    def fail(self, error: Exception) -> None:
        """The request cannot be sent."""
        target = self.target
        if isinstance(target, StreamTarget):
            target.fail(error)
        else:
            fail_future(target, error)


class _ThreadClient(AsyncClient):
    """AsyncClient with requests of other threads, whose results go to the futures of these threads."""

    def __init__(
        self,
        url: str | None,
        *,
        prefix: str | None,
        timeout: float | None,
        durability: str,
        require_worker: bool,
    ) -> None:
        super().__init__(
            url, prefix=prefix, timeout=timeout, durability=durability, require_worker=require_worker
        )
        # The parent's thread may have held the lock of a future. Waits look at the process.
        self._producer.fails_inherited = False
        self._thread_futures = ThreadFutureSink(self._reader)

    @property
    def is_idle(self) -> bool:
        """Whether no request is to be sent, or has no result."""
        return self._packer.is_idle

    def on_loop_end(self, why: str) -> None:
        """The event loop has stopped, perhaps while requests waited: these fail."""
        self._packer.abandon()
        self._packer.fail_all(why)

    async def send_to_new_model(self, submission: _Submission) -> None:
        """Look the model up, then send the request."""
        try:
            _, options = await self._find(submission.model, submission.options)
        except Exception as error:
            submission.fail(error)
        else:
            self.send(submission._replace(options=options))

    def send(self, submission: _Submission) -> bool:
        """Send a request. Returns False if the model has to be looked up first."""
        target, model, body, options, sequence, ends = submission
        channel = self._channels.get(model)
        if channel is None:
            return False
        if isinstance(target, StreamTarget):
            self._sender.start_stream(channel, target, body, options)
            return True
        sink = self._thread_futures
        on_done: Callable[[Future[Any]], None]
        try:
            if sequence is None:
                on_done = partial(self._on_done, self._sender.add(channel, body, options, sink, target))
            else:
                added = self._sender.add_to_sequence(sequence, body, options, ends, sink, target)
                on_done = partial(self._run_on_loop, added)
        except Exception as error:
            submission.fail(error)
        else:
            target.add_done_callback(on_done)
        return True

    def _run_on_loop(self, on_done: Callable[[Any], None], future: Future[Any]) -> None:
        """A future is done. It has its result on the loop's thread; another thread may have cancelled it."""
        if future.cancelled():
            self._packer.loop.call_soon_threadsafe(on_done, future)
        else:
            on_done(future)

    def snapshot(self, body: Any, options: RequestOptions) -> tuple[Any, RequestOptions]:
        """The body and options of a request as they are now. On any thread."""
        return self._encoder.snapshot(body, options)

    def snapshot_each(self, bodies: Iterable[Any], options: RequestOptions) -> list[Any]:
        """The bodies of requests as they are now. On any thread."""
        return self._encoder.snapshot_each(bodies, options)

    def new_sequence(self, model: str, sequence_id: str | None) -> SequenceProgress:
        """On any thread."""
        return SequenceProgress(self._producer, model, sequence_id)

    def close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more: withdraw its request."""
        self._close_stream(target)

    def _on_done(self, correlation_id: str, future: Future[Any]) -> None:
        """Runs on any thread."""
        if future.cancelled():
            self._packer.loop.call_soon_threadsafe(self._packer.withdraw, correlation_id, future)


class _ClientThread:
    """An `AsyncClient` on a thread of its own, which starts with the first use."""

    def __init__(
        self,
        url: str | None,
        prefix: str | None,
        timeout: float | None,
        durability: str,
        require_worker: bool,
        client: _ThreadClient | None = None,
    ) -> None:
        self.client = client or _ThreadClient(
            url, prefix=prefix, timeout=timeout, durability=durability, require_worker=require_worker
        )
        self._timeout_s = checked_timeout_s(timeout)
        self.thread = LoopThread(self._on_thread_end)
        self._submitted: deque[_Submission] = deque()  # not seen by the loop's thread
        self._submission_scheduled = False
        self._lookups: dict[asyncio.Task[None], _Submission] = {}  # of models, under way
        self._closing: asyncio.Task[None] | None = None

    def new_future(self, options: RequestOptions) -> RequestFuture:
        """The future of a request with these options."""
        return RequestFuture(self.thread, self.timeout_s(options))

    def timeout_s(self, options: RequestOptions) -> float | None:
        """How long a request may take; for options that are wrong, how long it may take to say so."""
        if "timeout" not in options:
            return self._timeout_s
        try:
            return checked_timeout_s(options["timeout"])
        except InvalidArgumentError:
            return self._timeout_s

    def submit(
        self,
        target: Future[Any] | StreamTarget,
        model: str,
        body: Any,
        options: RequestOptions,
        sequence: SequenceProgress | None = None,
        ends: bool = False,
    ) -> None:
        """Send a request soon, as its body and options are now. All that is submitted until the loop wakes is
        sent together."""
        if (sent := begin(model, options)) is not None:  # here: the trace is that of the caller's thread
            options = sent.options
            if isinstance(target, StreamTarget):
                target.on_end = sent.fail
            else:
                sent.follow(target)
        if options or type(body) not in CONSTANT_TYPES:
            body, options = self.client.snapshot(body, options)
        self._submitted.append(_Submission(target, model, body, options, sequence, ends))
        if not self._submission_scheduled:
            self._submission_scheduled = True
            self.thread.call(self._send_submitted)
        if self.thread.why_ended:  # perhaps just now
            self._fail_submitted(self.thread.why_ended)

    def close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more. If the thread has ended, every stream has."""
        self.thread.call(self.client.close_stream, target)

    def calls_s(self, calls: int) -> float | None:
        """How long so many calls of Redis may take."""
        timeout_s = self.timeout_s({})
        return None if timeout_s is None else calls * timeout_s

    def close(self) -> None:
        """Disconnect, and end the thread. Requests without a result fail."""
        thread = self.thread
        if not thread.is_started or thread.why_ended:
            thread.stop()
        elif thread.is_current:  # a callback of a future closes the client
            thread.loop.create_task(self._close_and_stop())
        else:
            closing = thread.run(self._close_and_stop())
            try:
                closing.result(CLOSING_S_MAX)
            except TimeoutError:
                _LOG.warning(
                    "the thread of a client was not closed within %g s: it is blocked", CLOSING_S_MAX
                )
                return
            except UnavailableError:  # the thread has ended meanwhile
                pass
            thread.join(CLOSING_S_MAX)

    def abandon(self) -> None:
        """Nobody has the client any more: close it once all requests have their results. On any thread."""
        self.thread.call(self._close_when_idle)

    # --- on the loop's thread ------------------------------------------------------------------------------

    def _send_submitted(self) -> None:
        self._submission_scheduled = False
        while self._submitted:
            submission = self._submitted.popleft()
            try:
                is_sent = self.client.send(submission)
            except Exception as error:  # such as that of a model's name that is a list
                submission.fail(error)
                continue
            if not is_sent:
                lookup = self.thread.loop.create_task(self.client.send_to_new_model(submission))
                self._lookups[lookup] = submission
                lookup.add_done_callback(self._lookups.pop)

    async def _close_and_stop(self) -> None:
        try:
            await self._close()
        finally:
            self.thread.stop()

    async def _close(self) -> None:
        """Close the client, and let every call in other threads end before the event loop stops."""
        await self.client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1.0)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _close_when_idle(self) -> None:
        loop = self.thread.loop
        if self._submitted or self._lookups or not (self.thread.is_idle and self.client.is_idle):
            loop.call_later(IDLE_CHECK_S, self._close_when_idle)
        else:
            self._closing = loop.create_task(self._close_and_stop())

    def _on_thread_end(self, why: str) -> None:
        """The loop has stopped: all that wait for it fail."""
        for submission in list(self._lookups.values()):
            submission.fail(UnavailableError(why))
        self._fail_submitted(why)
        self.client.on_loop_end(why)

    def _fail_submitted(self, why: str) -> None:
        """Runs on any thread."""
        while self._submitted:
            try:
                submission = self._submitted.popleft()
            except IndexError:  # another thread took the last one
                return
            submission.fail(UnavailableError(why))


class Client:
    """`AsyncClient` on a thread of its own, made with the same arguments. Any number of threads may share
    one.

    Threads do not survive a fork. So in a child process (gunicorn with --preload, Celery, multiprocessing) a
    Client has another thread, with connections of its own: what was sent before belongs to the parent. To
    wait for it is an UnconfirmedError, and sequences that were made before are a RuntimeError.

    The thread ends with `close` or the end of a `with`. A Client that nobody has any more closes itself, with
    a ResourceWarning, once its requests have their results.
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
        self._new_thread: Callable[[], _ClientThread] = partial(
            _ClientThread, url, prefix, timeout, durability, require_worker
        )
        self._threads = {os.getpid(): self._new_thread()}  # by process ID
        self._closed = False

    @property
    def _own(self) -> _ClientThread:
        """The thread of this process, started or not."""
        pid = os.getpid()
        thread = self._threads.get(pid)
        if thread is None:
            thread = self._threads.setdefault(pid, self._new_thread())
            _INHERITED.append(self._threads)
        return thread

    @property
    def _open(self) -> _ClientThread:
        """The thread of this process, started. Raises UnavailableError if this is closed."""
        if self._closed:
            raise UnavailableError(CLOSED)
        thread = self._own
        if not thread.thread.is_started:
            thread.thread.start()
        return thread

    @property
    def _client(self) -> _ThreadClient:
        return self._own.client

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client has connections, so it cannot be pickled into another process: make one in each"
        )

    def __del__(self) -> None:
        threads = getattr(self, "_threads", None)  # None: its URL was refused
        if threads is None or self._closed or sys.is_finalizing():
            return
        thread = threads.get(os.getpid())
        if thread is None:  # that of a parent
            _INHERITED.append(threads)
        elif thread.thread.is_started and not thread.thread.why_ended:
            thread.abandon()
            warnings.warn(
                f"unclosed Client of {thread.client.address}: use it in a `with`, or call close()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def timed_out(self) -> int:
        """As AsyncClient.timed_out."""
        return self._client.timed_out

    @property
    def late_results(self) -> int:
        """As AsyncClient.late_results."""
        return self._client.late_results

    @property
    def malformed_results(self) -> int:
        """As AsyncClient.malformed_results."""
        return self._client.malformed_results

    def connect(self) -> None:
        """Connect now, not with the first request. Raises UnavailableError if Redis cannot be reached."""
        self._wait(self._start(self._client.connect()))

    def flush(self) -> None:
        """As AsyncClient.flush."""
        self._wait(self._start(self._client.flush(), self._own.timeout_s({})))

    def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result; options and errors as for AsyncClient.infer, also the
        timeout of 30 seconds unless another one is given."""
        return self._wait(self.submit(model, body, **options))

    def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        limit_s = self._own.timeout_s(options)
        reply: Reply = self._wait(self._start(self._client.request(model, body, **options), limit_s))
        return reply

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Future[Any]:
        """As `infer`, but return a future at once, which has the result or the error. Cancelling it withdraws
        the request. Its callbacks run on the client's thread: they must not wait for results."""
        if "retries" in options:
            client = self._client
            body, options = client.snapshot(body, options)
            return self._start(client.infer(model, body, **options), self._own.timeout_s(options))
        thread = self._open
        future = thread.new_future(options)
        thread.submit(future, model, body, options)
        return future

    def infer_many(
        self,
        model: str,
        bodies: Array | Iterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Send a request for each row of an array, or for each of `bodies`, and return all results in order.

        Options, results and errors as for AsyncClient.infer_many.
        """
        bodies = bodies_to_send(bodies, "infer_many")
        if not isinstance(bodies, np.ndarray):  # here: an iterator may block, which would delay other threads
            bodies = self._client.snapshot_each(bodies, options)
        return self._wait(
            self._start(
                self._client.infer_many(
                    model, bodies, in_flight=in_flight, return_exceptions=return_exceptions, **options
                )
            )
        )

    def map(
        self,
        model: str,
        bodies: Iterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Any]:
        """Send a request for each of `bodies`, and yield the results in the same order.

        `bodies` may be endless: at most `in_flight` requests have no result at any time. An error is raised
        in its turn, or yielded with `return_exceptions`. Closing the iterator withdraws what still waits.
        """
        check_in_flight(in_flight)
        bodies = bodies_to_send(bodies, "map")
        window: deque[Future[Any]] = deque()
        with together(model, options) as traced:
            try:
                for body in bodies:
                    window.append(self.submit(model, body, **traced))
                    while len(window) >= in_flight or (window and window[0].done()):
                        yield self._outcome(window.popleft(), return_exceptions)
                while window:
                    yield self._outcome(window.popleft(), return_exceptions)
            finally:
                for future in window:
                    future.cancel()

    def stream(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Stream:
        """Send a request, and return an iterator of its chunks; options and errors as for AsyncClient.stream.

        Leaving the iterator early withdraws the request: see Stream.
        """
        thread = self._open
        target = StreamTarget(new_queue())
        thread.submit(target, model, body, options)
        next_item = partial(thread.thread.next_item, limit_s=thread.timeout_s(options))
        return Stream(target, thread.close_stream, next_item)

    def sequence(self, model: str, sequence_id: str | None = None) -> BlockingSequence:
        """A sequence of requests to a model that keeps a state between them, for a `with`; as
        AsyncClient.sequence."""

        def submit(progress: SequenceProgress, body: Any, options: RequestOptions, end: bool) -> Future[Any]:
            thread = self._open
            future = thread.new_future(options)
            thread.submit(future, model, body, options, progress, end)
            return future

        progress, limit_s = self._client.new_sequence(model, sequence_id), self._own.timeout_s({})
        return BlockingSequence(
            progress,
            lambda: self._wait(self._start(progress.enter(), limit_s)),
            submit,
            lambda function: self._wait(self._start(_called(function))),
        )

    def wait_ready(self, model: str, timeout: float | None = None) -> None:
        """Wait until a worker can execute requests of a model, also if no worker has registered it yet.

        Raises DeadlineExceededError after `timeout` seconds, and says what is missing; by default it waits
        without limit.
        """
        limit_s = checked_timeout_s(timeout)
        self._wait(self._start(self._client.wait_ready(model, timeout), limit_s))

    def models(self) -> list[str]:
        """As AsyncClient.models."""
        names: list[str] = self._wait(self._start(self._client.models(), self._own.timeout_s({})))
        return names

    def enqueue(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> str:
        """Send a request whose result any process may read, and return its ID; as AsyncClient.enqueue."""
        found: str = self._wait(
            self._start(self._client.enqueue(model, body, **options), self._own.calls_s(3))
        )
        return found

    def result(self, request_id: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """The result of a request that was enqueued, by any process; as AsyncClient.result."""
        reading_s = self._own.calls_s(3)
        limit_s = None if timeout is None or reading_s is None else timeout + reading_s
        return self._wait(self._start(self._client.result(request_id, timeout), limit_s))

    def status(self, request_id: str) -> RequestStatus:
        """What became of a request that was enqueued; as AsyncClient.status."""
        found: RequestStatus = self._wait(self._start(self._client.status(request_id), self._own.calls_s(2)))
        return found

    def cancel(self, request_id: str) -> None:
        """Withdraw a request that was enqueued; as AsyncClient.cancel."""
        self._wait(self._start(self._client.cancel(request_id), self._own.calls_s(3)))

    def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError."""
        if not self._closed:
            self._closed = True
            thread = self._threads.get(os.getpid())
            if thread is not None:
                thread.close()

    def _start(self, coroutine: Coroutine[Any, Any, Any], limit_s: float | None = None) -> RequestFuture:
        """Run a coroutine of the client, which itself takes no longer than `limit_s`."""
        try:
            thread = self._open.thread
        except UnavailableError:
            coroutine.close()
            raise
        return thread.run(coroutine, limit_s)

    @staticmethod
    def _wait(future: Future[Any]) -> Any:
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C while waiting: the result is no longer wanted
            future.cancel()
            raise

    def _outcome(self, future: Future[Any], return_exceptions: bool) -> Any:
        if not return_exceptions:
            return self._wait(future)
        error = future.exception()
        return future.result() if error is None else error


async def _called(function: Callable[[], None]) -> None:
    function()
