"""Streams: the chunks of one request, from the event loop to their reader.

    AwaitedRequests -> StreamSink -> StreamTarget -> queue -> AsyncStream in a task, or Stream in a thread

The queue has no limit: results of all requests of a model are read from one reply stream, so that a reader
that does not take its chunks must not stop the others. A target has at most the whole output in its queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from carpool.client.sinks import DecodingSink, Envelope, Reply, replies_of, reply_of
from carpool.errors import CancelledRequestError, InternalError
from carpool.messages.results import ResultColumns
from carpool.wire.tensors import Array


class _End(NamedTuple):
    """The last item of a queue: how the request ended."""

    reply: Reply | None
    error: Exception | None


_CLOSED: Final = _End(None, None)


def _ignore(_error: Exception | None) -> None:
    """Nobody waits for the end but the reader."""


class StreamTarget:
    """Takes the chunks of one request, each once and in order, and its end. Used on the event loop's thread.

    `index` is that of the next chunk. Once it has `ended`, whatever else arrives is ignored.
    """

    __slots__ = ("correlation_id", "ended", "index", "on_end", "queue")

    def __init__(self, queue: asyncio.Queue[Any] | SimpleQueue[Any]) -> None:
        self.queue = queue
        self.correlation_id: str | None = None  # once it is sent
        self.index = 0
        self.ended = False
        self.on_end: Callable[[Exception | None], None] = _ignore  # is told the error, if there was one

    def put_chunk(self, index: int, values: Sequence[Any]) -> None:
        """Take the values of a chunk, unless it was here before. Raises InternalError if some before it are
        missing."""
        if self.ended or index < self.index:
            return
        if index > self.index:
            raise self._missing(index)
        self.index += 1
        for value in values:
            self.queue.put_nowait(value)

    def put_output(self, reply: Reply, chunks: int | None) -> None:
        """Take the final result. `chunks`: how many came before it; None if its model does not step."""
        if chunks is None and not self.index:
            self.queue.put_nowait(reply.value)
        is_whole = chunks is None or chunks <= self.index
        self._end(_End(reply, None if is_whole else self._missing(chunks or 0)))

    def fail(self, error: Exception) -> None:
        """Take an error, which ends the request."""
        self._end(_End(None, error))

    def close(self) -> None:
        """The reader wants no more."""
        self._end(_CLOSED)

    def _end(self, end: _End) -> None:
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(end)
            self.on_end(end.error)

    def _missing(self, index: int) -> InternalError:
        return InternalError(
            f"chunks {self.index} to {index - 1} were not in the reply stream",
            correlation_id=self.correlation_id,
        )


class StreamSink(DecodingSink):
    """A StreamTarget for each request. Requests whose results go to this sink are sent as streams."""

    takes_chunks = True

    def put_chunk(self, target: StreamTarget, envelope: Envelope) -> None:
        """Pass the values of a chunk on. Raises InternalError if some chunks before it are missing."""
        value = self._reader.value(envelope)
        # Values that were merged without being concatenated are as many chunks for the reader.
        target.put_chunk(envelope["index"], value if "values" in envelope else (value,))

    def put_value(self, target: StreamTarget, value: Any, envelope: Envelope) -> None:
        """Pass the final result on."""
        target.put_output(reply_of(value, envelope), envelope.get("index"))

    def put_rows(self, targets: Sequence[StreamTarget], array: Array, columns: ResultColumns) -> None:
        """Pass on each row as a final result. Only models that do not step answer with columns."""
        for target, reply in zip(targets, replies_of(array, columns), strict=True):
            target.put_output(reply, None)

    def fail(self, target: StreamTarget, error: Exception) -> None:
        """Pass an error on."""
        target.fail(error)


class _Reader:
    """What AsyncStream and Stream share: the end, and what happens if the reader stops before it."""

    def __init__(self, target: StreamTarget) -> None:
        self._target = target
        self._is_over = False
        self._was_left = False  # a loop over it, before its end
        self._loops: list[
            object
        ] = []  # one item for each loop that is under way; in several threads, perhaps
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply | None:
        """The whole output and how it was served, once the last chunk was taken; None before, and after an
        error.
        """
        return self._reply

    @property
    def correlation_id(self) -> str | None:
        """The request's; None while its model is looked up."""
        return self._target.correlation_id

    def _close_left(self) -> None:
        """Withdraw the request: the last loop over this was left. On any thread."""
        raise NotImplementedError

    def _on_loop(self) -> None:
        """A loop over this begins. Raises CancelledRequestError if another one was left early."""
        self._check_not_left()
        self._loops.append(self)

    def _on_loop_left(self) -> None:
        """A loop over this has ended, and nobody can continue it."""
        self._loops.pop()
        if not (self._is_over or self._loops):
            self._is_over = self._was_left = True
            self._close_left()

    def _check_not_left(self) -> None:
        if self._was_left:
            raise CancelledRequestError(
                "a loop over this stream was left before its end, which withdraws the request; to read on "
                "after some chunks, take these with next(stream), or with await anext(stream)",
                correlation_id=self.correlation_id,
            )

    def _finish(self, end: _End) -> None:
        """Take the end of the queue. Raises the error with which the request ended."""
        self._target.queue.put_nowait(_CLOSED)  # for others who wait for a chunk of this stream
        if self._is_over:
            return
        self._is_over = True
        self._reply = end.reply
        if end.error is not None:
            raise end.error


class AsyncStream(_Reader):
    """The chunks of one request, as an async iterator. Raises the CarpoolError of the result's status.

    The request is withdrawn if it has no final result when an `async for` over this is left, by `break` or an
    error, also if a variable holds this; when this is closed (`aclose`, or the end of `async with`) or
    dropped; and when a task that waits for a chunk is cancelled. `anext` takes one chunk, and withdraws
    nothing.
    """

    def __init__(
        self,
        target: StreamTarget,
        close: Callable[[StreamTarget], None],  # on the thread of the event loop
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(target)
        self._queue: Any = target.queue
        self._close = close
        self._loop = loop

    def __aiter__(self) -> _AsyncLoop:
        return _AsyncLoop(self)

    async def __anext__(self) -> Any:
        """The next chunk: an emitted value, or several that were merged because they were read slowly."""
        if self._is_over:
            self._check_not_left()
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if type(item) is not _End:
            return item
        self._finish(item)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Take no more chunks. Withdraws the request if it has no final result."""
        self._is_over = True
        if not self._target.ended:
            self._close(self._target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _close_left(self) -> None:
        if not self._target.ended:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._close, self._target)

    def __del__(self) -> None:
        self._close_left()


_ReaderT = TypeVar("_ReaderT", bound=_Reader)


class _LoopOver(Generic[_ReaderT]):
    """One loop over a stream. Only the loop has this, and drops it when it is left. So a `break` is noticed
    at once, whoever holds the stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: _ReaderT) -> None:
        stream._on_loop()
        self._stream = stream

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._stream._on_loop_left()


class _AsyncLoop(_LoopOver[AsyncStream]):
    """An `async for`."""

    __slots__ = ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._stream.__anext__()


class Stream(_Reader):
    """The chunks of one request, as a blocking iterator. Raises the CarpoolError of the result's status.

    The request is withdrawn if it has no final result when a `for` over this is left, by `break` or an error,
    also if a variable holds this, and when this is closed (`close`, or the end of `with`) or dropped. `next`
    takes one chunk, and withdraws nothing.
    """

    def __init__(
        self,
        target: StreamTarget,
        close: Callable[[StreamTarget], None],  # on any thread
        next_item: Callable[[SimpleQueue[Any]], Any],  # waits for an item
    ) -> None:
        super().__init__(target)
        self._queue: Any = target.queue
        self._close = close
        self._next_item = next_item

    def __iter__(self) -> _Loop:
        return _Loop(self)

    def __next__(self) -> Any:
        """The next chunk: an emitted value, or several that were merged because they were read slowly."""
        if self._is_over:
            self._check_not_left()
            raise StopIteration
        try:
            item = self._next_item(self._queue)
        except BaseException:  # such as Ctrl-C
            self.close()
            raise
        if type(item) is not _End:
            return item
        self._finish(item)
        raise StopIteration

    def close(self) -> None:
        """Take no more chunks. Withdraws the request if it has no final result."""
        self._is_over = True
        self._close_left()

    def _close_left(self) -> None:
        if not self._target.ended:
            self._close(self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Loop(_LoopOver[Stream]):
    """A `for`."""

    __slots__ = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._stream.__next__()
