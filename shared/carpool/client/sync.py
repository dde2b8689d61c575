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

The thread runs uvloop where it is installed (`pip install carpool[uvloop]`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, Unpack

import numpy as np

from carpool.client.aio import AsyncClient
from carpool.client.encoding import CONSTANT_TYPES, bodies_to_send
from carpool.client.options import (
    DEFAULT_TIMEOUT_S,
    IN_FLIGHT,
    RequestOptions,
    check_in_flight,
)
from carpool.client.sequences import BlockingSequence, SequenceProgress
from carpool.client.sinks import Reply, ThreadFutureSink
from carpool.client.streams import Stream, StreamTarget
from carpool.errors import UnavailableError
from carpool.wire.tensors import Array

__all__ = ["AsyncClient", "Client", "Reply", "Stream"]

T = TypeVar("T")


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
        elif target.set_running_or_notify_cancel():
            target.set_exception(error)


class _ThreadClient(AsyncClient):
    """AsyncClient with requests of other threads, whose results go to the futures of these threads."""

    _thread_futures = ThreadFutureSink()

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
            self._start_stream(channel, target, body, options)
            return True
        sink = self._thread_futures
        on_done: Callable[[Future[Any]], None]
        try:
            if sequence is None:
                on_done = partial(self._on_done, self._add(channel, body, options, sink, target))
            else:
                added = self._add_to_sequence(sequence, body, options, ends, sink, target)
                on_done = partial(self._run_on_loop, added)
        except Exception as error:
            submission.fail(error)
        else:
            target.add_done_callback(on_done)
        return True

    def _run_on_loop(self, on_done: Callable[[Any], None], future: Future[Any]) -> None:
        """A future is done. It has its result on the loop's thread; another thread may have cancelled it."""
        if future.cancelled():
            self._loop.call_soon_threadsafe(on_done, future)
        else:
            on_done(future)

    def take(self, body: Any, options: RequestOptions) -> tuple[Any, RequestOptions]:
        """The body and options of a request as they are now. On any thread."""
        return self._encoder.take(body, options)

    def take_each(self, bodies: Iterable[Any], options: RequestOptions) -> list[Any]:
        """The bodies of requests as they are now. On any thread."""
        return self._encoder.take_each(bodies, options)

    def new_sequence(self, model: str, sequence_id: str | None) -> SequenceProgress:
        """On any thread."""
        return self._sequence_progress(model, sequence_id)

    async def enter_sequence(self, sequence: SequenceProgress) -> None:
        """Its block is entered."""
        await self._enter_sequence(sequence)

    async def restart_sequence(self, sequence: SequenceProgress) -> None:
        """It begins again. Raises RuntimeError if requests have no result yet."""
        sequence.check_answered()
        self._end_sequence(sequence)
        sequence.begin()

    async def end_sequence(self, sequence: SequenceProgress) -> None:
        """Its block is left."""
        self._end_sequence(sequence)

    def close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more: withdraw its request."""
        self._close_stream(target)

    def _on_done(self, correlation_id: str, future: Future[Any]) -> None:
        """Runs on any thread."""
        if future.cancelled():
            self._loop.call_soon_threadsafe(self._withdraw, correlation_id, future)


class _ClientThread:
    """An `AsyncClient` on a thread of its own, which starts with the first use."""

    def __init__(self, url: str | None, prefix: str | None, timeout: float | None, durability: str) -> None:
        self.client = _ThreadClient(url, prefix=prefix, timeout=timeout, durability=durability)
        self._loop = _new_event_loop()
        self._submitted: deque[_Submission] = deque()  # not seen by the loop's thread
        self._submission_scheduled = False
        self._lookups: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="carpool client", daemon=True)
        self._starting = threading.Lock()
        self.is_started = False

    def ensure_started(self) -> None:
        """Start the thread, if no other thread did."""
        with self._starting:
            if not self.is_started:
                self.is_started = True
                self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of the client."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def submit(self, submission: _Submission) -> None:
        """Send a request. All that is submitted until the loop wakes is sent together."""
        self._submitted.append(submission)
        if not self._submission_scheduled:
            self._submission_scheduled = True
            self._loop.call_soon_threadsafe(self._send_submitted)

    def close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more."""
        with suppress(RuntimeError):  # the event loop is closed, and every stream has ended
            self._loop.call_soon_threadsafe(self.client.close_stream, target)

    def close(self) -> None:
        """Disconnect, and end the thread. Requests without a result fail."""
        self.start(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        while self._submitted:  # by other threads, too late for the loop
            self._submitted.popleft().fail(UnavailableError("this client is closed"))

    def _send_submitted(self) -> None:
        """Runs on the loop's thread."""
        self._submission_scheduled = False
        while self._submitted:
            submission = self._submitted.popleft()
            try:
                is_sent = self.client.send(submission)
            except Exception as error:  # such as that of a model's name that is a list
                submission.fail(error)
                continue
            if not is_sent:
                lookup = self._loop.create_task(self.client.send_to_new_model(submission))
                self._lookups.add(lookup)
                lookup.add_done_callback(self._lookups.discard)

    async def _close(self) -> None:
        """Close the client, and let every call in other threads end before the event loop stops."""
        await self.client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1.0)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Client:
    """`AsyncClient` on a thread of its own. Any number of threads may share one Client.

    Threads do not survive a fork. So in a child process (gunicorn with --preload, Celery, multiprocessing) a
    Client has another thread, with connections of its own: what was sent before belongs to the parent.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        durability: str = "none",
    ) -> None:
        self._new_thread = partial(_ClientThread, url, prefix, timeout, durability)
        # By process ID. That of a parent is kept: to destroy it would change what the parent waits for.
        self._threads = {os.getpid(): self._new_thread()}
        self._closed = False

    @property
    def _thread(self) -> _ClientThread:
        """The thread of this process."""
        pid = os.getpid()
        thread = self._threads.get(pid)
        if thread is None:
            thread = self._threads.setdefault(pid, self._new_thread())
        if not thread.is_started:
            thread.ensure_started()
        return thread

    @property
    def _client(self) -> _ThreadClient:
        return self._thread.client

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client has connections, so it cannot be pickled into another process: make one in each"
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
        self._start(self._client.connect()).result()

    def flush(self) -> None:
        """As AsyncClient.flush."""
        self._start(self._client.flush()).result()

    def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result; options and errors as for AsyncClient.infer."""
        return self._wait(self.submit(model, body, **options))

    def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        return self._wait(self._start(self._client.request(model, body, **options)))

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Future[Any]:
        """As `infer`, but return a future at once. Cancelling it withdraws the request."""
        if "retries" in options:
            client = self._client
            body, options = client.take(body, options)
            return self._start(client.infer(model, body, **options))
        future: Future[Any] = Future()
        self._submit(future, model, body, options)
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
        if not isinstance(
            bodies, np.ndarray
        ):  # here, because an iterator may block: that delays other threads
            bodies = self._client.take_each(bodies, options)
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
        try:
            for body in bodies:
                window.append(self.submit(model, body, **options))
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
        target = StreamTarget(SimpleQueue())
        self._submit(target, model, body, options)
        return Stream(target, self._thread.close_stream)

    def sequence(self, model: str, sequence_id: str | None = None) -> BlockingSequence:
        """A sequence of requests to a model that keeps a state between them, for a `with`; as
        AsyncClient.sequence."""

        def submit(progress: SequenceProgress, body: Any, options: RequestOptions, end: bool) -> Future[Any]:
            future: Future[Any] = Future()
            self._submit(future, model, body, options, progress, end)
            return future

        client = self._client
        return BlockingSequence(
            client.new_sequence(model, sequence_id),
            lambda progress: self._wait(self._start(client.enter_sequence(progress))),
            submit,
            lambda progress: self._wait(self._start(client.restart_sequence(progress))),
            lambda progress: self._wait(self._start(client.end_sequence(progress))),
        )

    def wait_ready(self, model: str, timeout: float | None = None) -> None:
        """Wait until a worker can execute requests of a model, also if no worker has registered it yet.

        Raises DeadlineExceededError after `timeout` seconds, and says what is missing; None: never.
        """
        self._wait(self._start(self._client.wait_ready(model, timeout)))

    def models(self) -> list[str]:
        """Names of the registered models."""
        return self._wait(self._start(self._client.models()))

    def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError."""
        if not self._closed:
            self._closed = True
            self._thread.close()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise UnavailableError("this client is closed")
        return self._thread.start(coroutine)

    def _submit(
        self,
        target: Future[Any] | StreamTarget,
        model: str,
        body: Any,
        options: RequestOptions,
        sequence: SequenceProgress | None = None,
        ends: bool = False,
    ) -> None:
        """Send a request soon, as its body and options are now."""
        if self._closed:
            raise UnavailableError("this client is closed")
        thread = self._thread
        if options or type(body) not in CONSTANT_TYPES:
            body, options = thread.client.take(body, options)
        thread.submit(_Submission(target, model, body, options, sequence, ends))

    @staticmethod
    def _wait(future: Future[T]) -> T:
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


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop where it is installed: a request costs less of the processor."""
    try:
        import uvloop  # noqa: PLC0415 (an optional dependency)
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
