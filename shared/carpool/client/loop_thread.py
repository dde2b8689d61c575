"""An event loop on a thread of its own, and waits for what runs there, which end also if the thread does not.

    start      makes the loop and the thread; until then no descriptor is open
    run, call  hand a coroutine or a function to the loop, from any thread
    wait       for a future that the loop resolves; RequestFuture waits so by itself
    stop       ends the loop; then, or if the thread dies, all that wait fail with the reason, at once

Where gevent or eventlet has replaced threads, a thread is a greenlet, and its event loop must wait in a way
that lets the others run.

Why: docs/decisions/0085.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from carpool.client.sinks import fail_future, resolve_future
from carpool.errors import NoResultError, UnavailableError, UnconfirmedError

T = TypeVar("T")

GRACE_S: Final = 5.0  # in which the loop should have ended a request whose timeout has passed
CLOSED: Final = "this client is closed"
_LOG: Final = logging.getLogger("carpool.client")


class LoopThread:
    """`on_end` is called on the thread when the loop has stopped, with the reason: what waits must fail."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.why_ended = ""  # why nothing runs here any more; empty as long as something may
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        # The coroutines that have not ended, by the futures of their results.
        self._calls: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._is_stopping = False
        self._starting = threading.Lock()

    # --- used by other threads -----------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether there is a thread. It may have ended."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, if no other thread did. Raises UnavailableError."""
        with self._starting:
            if self._thread is not None or self.why_ended:
                return
            try:
                self._loop = new_event_loop()
                thread = threading.Thread(target=self._main, name="carpool client", daemon=True)
                thread.start()
            except (OSError, RuntimeError) as error:  # no more descriptors, or no more threads
                if self._loop is not None:
                    self._loop.close()
                    self._loop = None
                raise UnavailableError(f"the client's thread cannot be started: {error}") from None
            self._thread = thread

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function on the thread, soon. Returns False if nothing runs there (any more)."""
        if self._loop is None or self.why_ended or self._pid != os.getpid():
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # it is closed
            return False
        return True

    def run(self, coroutine: Coroutine[Any, Any, Any], limit_s: float | None = None) -> RequestFuture:
        """Run a coroutine on the thread, which by itself takes no longer than `limit_s`.

        Cancelling the future cancels it. Raises UnavailableError if the thread has ended.
        """
        future = RequestFuture(self, limit_s)
        self._calls[future] = coroutine
        if not self.call(self._begin, coroutine, future):
            self._calls.pop(future, None)
            coroutine.close()
            raise UnavailableError(self.why_ended or CLOSED)
        if self.why_ended:  # meanwhile
            self._fail_calls()
        return future

    def wait(
        self, result: Callable[[float | None], T], is_done: Callable[[], bool], limit_s: float | None
    ) -> T:
        """What `result` of a future returns or raises: `Future.result` or `Future.exception`.

        Waits `limit_s` and GRACE_S at most, and then raises NoResultError; None: until there is a result.
        """
        if not is_done():
            self._check_can_wait()
        try:
            return result(None if limit_s is None else limit_s + GRACE_S)
        except TimeoutError:
            if is_done():
                return result(0)  # that of the future itself
            raise self._silent(limit_s) from None

    def wait_at_most(
        self, result: Callable[[float | None], T], is_done: Callable[[], bool], timeout_s: float
    ) -> T:
        """As `wait`, but raises TimeoutError after `timeout_s`."""
        self.check_process()
        return result(timeout_s)

    def next_item(self, source: queue.SimpleQueue[T], limit_s: float | None) -> T:
        """The next item of a queue that the thread fills; waits as `wait` does."""
        if source.empty():
            self._check_can_wait()
        try:
            return source.get(timeout=None if limit_s is None else limit_s + GRACE_S)
        except queue.Empty:
            raise self._silent(limit_s) from None

    def check_process(self) -> None:
        """Raise UnconfirmedError in a process that was forked from that of the thread: nothing runs here."""
        if self._pid != os.getpid():
            raise UnconfirmedError("this process was forked from the one that sent the request")

    def _check_can_wait(self) -> None:
        self.check_process()
        if self.is_current:
            raise RuntimeError(
                "the client's own thread would wait for itself: callbacks of futures run on it, and must not "
                "wait for results; wait in a thread of your own"
            )

    def _silent(self, limit_s: float | None) -> NoResultError:
        """The loop has not ended a request whose timeout has passed."""
        return NoResultError(
            f"no result within {limit_s:g} s, and {GRACE_S:g} s later no word of the client's thread: "
            "something blocks it, such as a callback of a future"
        )

    @property
    def is_current(self) -> bool:
        """Whether this is called on the thread itself."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether no coroutine runs that was given to `run`."""
        return not self._calls

    def stop(self) -> None:
        """End the loop, and the thread with it."""
        with self._starting:
            self._is_stopping = True
            if self._thread is None:
                self.why_ended = self.why_ended or CLOSED
        if self._loop is not None:
            self.call(self._loop.stop)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and not self.is_current:
            self._thread.join(timeout_s)

    # --- on the thread -------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, of a thread that was started."""
        assert self._loop is not None
        return self._loop

    def _main(self) -> None:
        why = "its event loop was stopped by something else than the client"
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit, and what gevent raises
            why = f"{type(error).__name__}: {error}"
        if self._is_stopping:
            self.why_ended = CLOSED
        else:
            self.why_ended = f"the client's thread has ended ({why}); make a new client"
            _LOG.error("%s", self.why_ended)
        self._fail_calls()
        self._on_end(self.why_ended)
        with suppress(BaseException):  # it is tidied up as far as the loop still can
            _cancel_tasks(self.loop)
        with suppress(Exception):
            self.loop.close()

    def _begin(self, coroutine: Coroutine[Any, Any, Any], future: RequestFuture) -> None:
        if future.done():  # cancelled meanwhile
            self._calls.pop(future, None)
            coroutine.close()
            return
        task = self.loop.create_task(_resolve_with(coroutine, future))
        future.add_done_callback(partial(self._on_call_done, task))

    def _on_call_done(self, task: asyncio.Task[None], future: Future[Any]) -> None:
        """Runs on any thread."""
        self._calls.pop(future, None)
        if future.cancelled():
            self.call(task.cancel)

    def _fail_calls(self) -> None:
        calls = list(self._calls.items())
        self._calls.clear()
        for future, coroutine in calls:
            fail_future(future, UnavailableError(self.why_ended))
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()


class RequestFuture(Future[Any]):
    """The future of a request. A wait for it without a limit of its own has that of the request: see
    LoopThread.wait. Callbacks are called on the loop's thread."""

    def __init__(self, thread: LoopThread, timeout_s: float | None) -> None:
        super().__init__()
        self._loop_thread = thread
        self._timeout_s = timeout_s

    def result(self, timeout: float | None = None) -> Any:
        """As Future.result."""
        return self._outcome(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As Future.exception."""
        found: BaseException | None = self._outcome(super().exception, timeout)
        return found

    def _outcome(self, outcome: Callable[[float | None], Any], timeout: float | None) -> Any:
        """What `outcome` returns or raises. Waits for at most `timeout` s; None: for the request's own."""
        if self.done():
            return outcome(timeout)
        if timeout is not None:
            return self._loop_thread.wait_at_most(outcome, self.done, timeout)
        return self._loop_thread.wait(outcome, self.done, self._timeout_s)


async def _resolve_with(coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
    try:
        value = await coroutine
    except asyncio.CancelledError:
        fail_future(future, UnavailableError(CLOSED))  # unless it was cancelled by its caller
    except BaseException as error:
        fail_future(future, error)
    else:
        if not future.done():
            resolve_future(future, value)


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(asyncio.sleep(0))  # sockets are closed in the iteration after


# --- event loops, also where a library has replaced parts of the standard library --------------------------


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a thread that `threading` starts: uvloop's where it is installed, because a request
    then costs less of the processor. It waits in C: while a greenlet does that, no other runs, for ever."""
    if _is_replaced("threading"):
        return _GreenletLoop()
    try:
        import uvloop  # noqa: PLC0415 (an optional dependency)
    except ImportError:
        return _NativeLoop() if _is_replaced("select") else asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def new_queue() -> queue.SimpleQueue[Any]:
    """A queue for threads that `threading` starts, also where a library has replaced only queues."""
    if _is_replaced("threading"):
        return queue.SimpleQueue()
    new: queue.SimpleQueue[Any] = _original("queue", "SimpleQueue")()
    return new


class _GreenletLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop in a greenlet. Others may run in other greenlets of the same thread, of which
    asyncio knows but one running loop: so this is the one only while it calls its callbacks."""

    def __init__(self) -> None:
        eventlet = sys.modules.get("eventlet.green.selectors")
        super().__init__((eventlet or selectors).DefaultSelector())
        self._other: asyncio.AbstractEventLoop | None = None
        selector: Any = self._selector  # type: ignore[attr-defined]
        self._select, selector.select = selector.select, self._select_as_no_loop

    def run_forever(self) -> None:
        """As of every loop."""
        self._other = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            super().run_forever()
        finally:
            asyncio._set_running_loop(self._other)

    def _select_as_no_loop(self, timeout: float | None = None) -> Any:
        """Wait for sockets, while other greenlets run."""
        asyncio._set_running_loop(self._other)
        try:
            return self._select(timeout)
        finally:
            self._other = asyncio._get_running_loop()
            asyncio._set_running_loop(self)


class _NativeLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop on a real thread, where a library has replaced sockets and queues: what it put in
    their place waits in an event loop of its own, and fails on this thread and on those of executors."""

    def __init__(self) -> None:
        super().__init__(_original("selectors", "DefaultSelector")())
        self._getaddrinfo = _original("socket", "getaddrinfo")

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """As of every loop. It occupies the thread, which only connects meanwhile."""
        return self._getaddrinfo(host, port, **options)


_EVENTLET_NAMES: Final = {"threading": "thread", "select": "select"}


def _is_replaced(module: str) -> bool:
    """Whether gevent or eventlet has replaced a module of the standard library. Neither is imported here."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched(module))
        or (eventlet is not None and eventlet.is_monkey_patched(_EVENTLET_NAMES[module]))
    )


def _original(module: str, name: str) -> Any:
    """What the standard library has under a name, also if it was replaced."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None:
        return gevent.get_original(module, name)
    return getattr(sys.modules[module] if eventlet is None else eventlet.original(module), name)
