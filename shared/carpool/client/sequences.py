"""Sequences: requests to a model that keeps a state between them.

    async with client.sequence("vad") as microphone:     # with a Client: `with`, and no `await`
        for sound in sounds:
            speech = await microphone.infer(sound)

Redis keeps the state. Here is only how far a sequence has come (SequenceProgress). Each request has an index,
so several may be in flight, and those that are sent again after a lost connection are processed once.

Why: docs/decisions/0060.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from carpool.client.options import SEQUENCE_OPTIONS, RequestOptions, check_sequence_id
from carpool.client.producer import Producer
from carpool.errors import AbortedError, InvalidArgumentError

F = TypeVar("F", asyncio.Future[Any], concurrent.futures.Future[Any])


class SequenceProgress:
    """How far a sequence has come. Used on the event loop's thread.

    `next_options` has the options of the next request. If that can be sent, `on_sent` is called, and with its
    outcome `on_done`.
    """

    def __init__(self, producer: Producer, model: str, sequence_id: str | None) -> None:
        name = f"py-{secrets.token_hex(8)}" if sequence_id is None else sequence_id
        check_sequence_id(name)
        self.model: Final = model
        self.sequence_id: Final = name
        self._producer = producer
        self._why_over = "its block was not entered"  # why no request can be sent; empty if one can
        self._index = 0  # of the next request
        self._unanswered = 0
        self._losses = 0  # how often the producer had lost a connection when it began
        self._has_failed = False
        self._has_ended = False  # with the result of its last request
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one whose sequence it is."""
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        if self.is_inherited:
            raise RuntimeError(
                f"sequence {self.sequence_id}: this process was forked from the one that made it: make one "
                "in each process"
            )

    def check_answered(self) -> None:
        """Raise RuntimeError if requests have no outcome yet."""
        if self._unanswered:
            raise RuntimeError(
                f"sequence {self.sequence_id}: {self._unanswered} of its requests have no result yet; wait "
                "for them before it begins again"
            )

    async def enter(self) -> None:
        """Its block is entered: look its model up. From then on each request is sent when it is submitted."""
        producer = self._producer
        producer.packer.check_open()
        if self.model not in producer.channels:
            await producer.open_channel(self.model, producer.timeout_s)
        self.begin()

    def begin(self) -> None:
        """The next request is the first one. Raises RuntimeError if earlier ones have no outcome yet."""
        self._check_process()
        self.check_answered()
        self._index, self._why_over = 0, ""
        self._has_failed = self._has_ended = False

    def next_options(self, options: RequestOptions, *, end: bool) -> RequestOptions:
        """These options and those of the sequence. Raises AbortedError if no request can follow."""
        self._check_process()
        for name in SEQUENCE_OPTIONS:
            if name in options:
                raise InvalidArgumentError(f"{name}: the sequence sets this option itself; remove it")
        if self._why_over:
            raise AbortedError(f"sequence {self.sequence_id}: {self._why_over}")
        numbered: RequestOptions = {
            "sequence_id": self.sequence_id,
            "sequence_start": self._index == 0,
            "sequence_end": end,
            "sequence_index": self._index,
        }
        return {**options, **numbered}

    def on_sent(self, *, end: bool) -> int:
        """The request was sent. Returns its index."""
        index = self._index
        if index == 0:
            self._losses = self._producer.packer.transport.losses
        if end:
            self._why_over = "it has ended; restart() begins it again"
        self._index += 1
        self._unanswered += 1
        return index

    def on_done(self, index: int, error: BaseException | None, *, end: bool) -> None:
        """A request has its outcome. None can follow on one that failed."""
        self._unanswered -= 1
        if error is None:
            self._has_ended = end
        elif not self._has_failed:
            self._has_failed = True
            self._why_over = f"its request {index} failed ({error}); restart() begins it again"

    def end(self) -> None:
        """No more requests. A sequence that has begun, and has not ended, is ended by force.

        So it is even after its last request if a connection was lost meanwhile: requests that were sent twice
        may be left over, and would wait for a sequence of the same name to begin.
        """
        self._why_over = "its block was left"
        producer, packer = self._producer, self._producer.packer
        has_ended = self._has_ended and packer.transport.losses == self._losses
        if self._index > 0 and not has_ended and not self.is_inherited:
            packer.end_sequence(producer.channels[self.model], self.sequence_id)

    def restart(self) -> None:
        """End it, and begin again. Raises RuntimeError if requests have no outcome yet."""
        self.check_answered()
        self.end()
        self.begin()


class _Sequence(Generic[F]):
    """What AsyncSequence and BlockingSequence share."""

    def __init__(
        self,
        progress: SequenceProgress,
        send: Callable[[SequenceProgress, Any, RequestOptions, bool], F],
    ) -> None:
        self._progress = progress
        self._send: Callable[[SequenceProgress, Any, RequestOptions, bool], F] = send
        self._in_flight: set[F] = set()

    @property
    def sequence_id(self) -> str:
        """Its name. No other producer may use the same one at the same time."""
        return self._progress.sequence_id

    def submit(self, body: Any, *, end: bool = False, **options: Unpack[RequestOptions]) -> F:
        """As `infer`, but return a future at once. The model gets the requests in the order of the calls."""
        future = self._send(self._progress, body, options, end)
        self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        return future


class AsyncSequence(_Sequence[asyncio.Future[Any]]):
    """One sequence, for the time of an `async with`. See AsyncClient.sequence."""

    async def infer(self, body: Any, *, end: bool = False, **options: Unpack[RequestOptions]) -> Any:
        """Send the next request and return the model's result; options and errors as for AsyncClient.infer.

        `end`: it is the last one. After a request that failed or was cancelled, all others raise
        AbortedError, until `restart`.
        """
        return await self.submit(body, end=end, **options)

    def restart(self) -> None:
        """Begin again with the next request. Raises RuntimeError if earlier ones have no result yet."""
        self._progress.restart()

    async def __aenter__(self) -> Self:
        await self._progress.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all results, unless an exception leaves the block. Then end the sequence."""
        try:
            while kind is None and self._in_flight:
                await asyncio.wait(self._in_flight)
        finally:
            self._progress.end()


class BlockingSequence(_Sequence[concurrent.futures.Future[Any]]):
    """One sequence, for the time of a `with`, in which several threads may use it. See Client.sequence.

    `on_loop` calls a function on the event loop's thread, and waits for it.
    """

    def __init__(
        self,
        progress: SequenceProgress,
        enter: Callable[[], None],
        send: Callable[[SequenceProgress, Any, RequestOptions, bool], concurrent.futures.Future[Any]],
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(progress, send)
        self._enter = enter
        self._on_loop = on_loop

    def infer(self, body: Any, *, end: bool = False, **options: Unpack[RequestOptions]) -> Any:
        """Send the next request and return the model's result: see AsyncSequence.infer."""
        future = self.submit(body, end=end, **options)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C while waiting: the result is no longer wanted
            future.cancel()
            raise

    def restart(self) -> None:
        """Begin again with the next request. Raises RuntimeError if earlier ones have no result yet."""
        self._on_loop(self._progress.restart)

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all results, unless an exception leaves the block. Then end the sequence."""
        try:
            while kind is None and self._in_flight and not self._progress.is_inherited:
                concurrent.futures.wait(self._in_flight.copy())
        finally:
            self._on_loop(self._progress.end)
