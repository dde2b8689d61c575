"""LocalAsyncClient and LocalClient: the clients of `carpool`, with models in the process of the test.

Everything above the connections is that of AsyncClient and Client: options, encoding, batches of what is sent
together, timeouts, streams, sequences and errors. LocalClient has no thread: its event loop runs in the
caller's thread, while that waits for a result.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from carpool.client.aio import AsyncClient
from carpool.client.loop_thread import GRACE_S, LoopThread, RequestFuture
from carpool.client.options import DEFAULT_TIMEOUT_S
from carpool.client.producer import Producer
from carpool.client.sequences import BlockingSequence
from carpool.client.sync import Client, _ClientThread, _ThreadClient
from carpool_testing.models import Models
from carpool_testing.transport import LocalProducer
from carpool_testing.waiting_engine import LocalSender

T = TypeVar("T")

IDLE_TURNS: Final = 20  # iterations of the event loop without a result, before it waits for its timers
NAP_S: Final = 0.0005


class LocalAsyncClient(AsyncClient):
    """AsyncClient with models in this process. Use it as `async with LocalAsyncClient({"shout": shout})`.

    `models`: classes, functions or objects, by the names under which they are called. They are loaded here
    (`device` is given to their `load`), and unloaded when this is closed. A model runs in the event loop's
    thread, which waits for it; one that calls others, and is not async, in a thread of its own. `parameters`:
    of models that declare some, by the names of both: {"shout": {"loudness": 11}}. `timeout`: as of
    AsyncClient.

    Raises ValueError for a model that a worker would refuse, and what a model raises while it is loaded.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        device: str = "cpu",
    ) -> None:
        self._models = Models(dict(models), parameters or {}, device, LocalSender())
        super().__init__(timeout=timeout)
        self._models.sender.use(self)

    def _new_producer(self, url: str | None, prefix: str | None, durability: str) -> Producer:
        return LocalProducer(self._models, self._timeout_s)


class LocalClient(Client):
    """Client with models in this process. Use it as `with LocalClient({"shout": shout}) as client:`.

    `models` and options: as of LocalAsyncClient. A model runs while the program waits for a
    result, in the thread that waits. So what is submitted makes progress in `result()` of any future; of
    `concurrent.futures.wait` it does not.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        device: str = "cpu",
    ) -> None:
        given = Models(dict(models), parameters or {}, device, LocalSender())
        self._new_thread: Callable[[], _ClientThread] = partial(_LocalThread, given, timeout)
        self._threads = {os.getpid(): self._new_thread()}
        self._closed = False

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        with suppress(Exception):  # such as another event loop that runs here
            self.close()

    def _start(self, coroutine: Coroutine[Any, Any, Any], limit_s: float | None = None) -> RequestFuture:
        try:
            _check_no_other_loop()
        except RuntimeError:
            coroutine.close()
            raise
        return super()._start(coroutine, limit_s)

    def sequence(self, model: str, sequence_id: str | None = None) -> BlockingSequence:
        """As Client.sequence."""
        made = super().sequence(model, sequence_id)
        return _LocalSequence(made._progress, made._enter, made._send, made._on_loop)


class _LocalSequence(BlockingSequence):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            for future in self._in_flight.copy():
                with suppress(Exception):  # its caller has it, too
                    future.exception()
        super().__exit__(kind, error, trace)


class _LocalThreadClient(_ThreadClient):
    def __init__(self, models: Models, timeout: float | None) -> None:
        self._models = models
        super().__init__(None, prefix=None, timeout=timeout, durability="none", require_worker=False)
        models.sender.use(self)

    def _new_producer(self, url: str | None, prefix: str | None, durability: str) -> Producer:
        return LocalProducer(self._models, self._timeout_s)


class _LocalThread(_ClientThread):
    def __init__(self, models: Models, timeout: float | None) -> None:
        super().__init__(None, None, timeout, "none", False, _LocalThreadClient(models, timeout))
        self.thread = CallersLoop(self._on_thread_end)


class CallersLoop(LoopThread):
    """An event loop that runs in the thread that waits for a result; one thread at a time."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        super().__init__(on_end)
        self._running = threading.RLock()
        self._runs_in: int | None = None  # the thread

    def start(self) -> None:
        """Make the loop. Raises RuntimeError in a coroutine."""
        _check_no_other_loop()
        with self._starting:
            if self._thread is None and not self.why_ended:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.current_thread()

    @property
    def is_current(self) -> bool:
        """Whether the loop runs in this thread now: this is called by a callback, or by a model."""
        return self._runs_in == threading.get_ident()

    def wait(
        self, result: Callable[[float | None], T], is_done: Callable[[], bool], limit_s: float | None
    ) -> T:
        """As LoopThread.wait; the loop runs meanwhile."""
        if not is_done():
            self._check_can_wait()
            if not self._run_until(is_done, None if limit_s is None else limit_s + GRACE_S):
                raise self._silent(limit_s)
        return result(0)

    def wait_at_most(
        self, result: Callable[[float | None], T], is_done: Callable[[], bool], timeout_s: float
    ) -> T:
        """As LoopThread.wait_at_most; the loop runs meanwhile."""
        self._check_can_wait()
        self._run_until(is_done, timeout_s)
        return result(0)

    def next_item(self, source: SimpleQueue[T], limit_s: float | None) -> T:
        """As LoopThread.next_item; the loop runs meanwhile."""
        if source.empty():
            self._check_can_wait()
            self._run_until(lambda: not source.empty(), None if limit_s is None else limit_s + GRACE_S)
        try:
            return source.get_nowait()
        except Empty:
            raise self._silent(limit_s) from None

    def join(self, timeout_s: float) -> None:
        """End the loop."""
        if not self.loop.is_closed():
            self._main()

    def stop(self) -> None:
        """End the loop with the next `join`."""
        with self._starting:
            self._is_stopping = True
            if self._thread is None:
                self.why_ended = self.why_ended or "this client is closed"

    def _main(self) -> None:
        self.loop.call_soon(self.loop.stop)
        super()._main()

    def _run_until(self, is_done: Callable[[], bool], limit_s: float | None) -> bool:
        """Run the loop until this is so. Whether it is, after at most `limit_s`."""
        _check_no_other_loop()
        end_s = None if limit_s is None else time.monotonic() + limit_s
        with self._running:
            self._runs_in = threading.get_ident()
            try:
                turns = 0
                while not is_done() and (end_s is None or time.monotonic() < end_s):
                    turns += 1
                    if turns <= IDLE_TURNS:
                        self.loop.call_soon(self.loop.stop)
                    else:
                        self.loop.call_later(NAP_S, self.loop.stop)
                    self.loop.run_forever()
            finally:
                self._runs_in = None
        return is_done()


def _check_no_other_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "LocalClient blocks, as Client does, and its models run in the thread that waits: in a coroutine use "
        "LocalAsyncClient"
    )
