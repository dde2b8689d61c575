"""Models whose calls wait: async ones, which execute several batches at a time, and those that call others.

An async model runs in the event loop of the client, each batch in a task. A plain one that calls others waits
for them, so it runs in a thread of its own: the event loop goes on with those that it asked.

What a model asks is sent by the client whose models these are.

Why: docs/decisions/0102.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import ref

from carpool.client.aio import AsyncClient
from carpool.client.loop_thread import CLOSED
from carpool.errors import UnavailableError, Unhealthy
from carpool.keys import Keys
from carpool.messages.batches import Batch
from carpool_batcher.core.decisions import Cancel, Expire
from carpool_testing.engine import BatchEngine, Deliver, Executed, show
from carpool_worker.execution import Frame
from carpool_worker.model_process.calls import Calls, FrameCalls
from carpool_worker.model_process.frame_execution import execute_frame, execute_frame_async
from carpool_worker.model_process.loaded import LoadedModel

ENDING_S_MAX: Final = 1.0  # for a model that is called in a thread, when the client is closed


class LocalSender:
    """Sends what models ask of others. For the event loop of the client, which is not kept."""

    def __init__(self) -> None:
        self._client: Callable[[], AsyncClient | None] = lambda: None

    def use(self, client: AsyncClient) -> None:
        """This is the client."""
        self._client = ref(client)

    def submit(self, model: str, body: Any, /, **options: Any) -> asyncio.Future[Any]:
        """As AsyncClient.submit."""
        client = self._client()
        if client is None:
            raise UnavailableError(CLOSED)
        return client.submit(model, body, **options)


class ThreadSender:
    """The same for models that run in other threads."""

    def __init__(self, sender: LocalSender, loop: asyncio.AbstractEventLoop) -> None:
        self._sender = sender
        self._loop = loop
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._is_closed = False

    def submit(self, model: str, body: Any, /, **options: Any) -> Future[Any]:
        """As Client.submit."""

        async def sent() -> Any:
            return await self._sender.submit(model, body, **options)

        with self._lock:
            if self._is_closed:
                raise UnavailableError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(sent(), self._loop)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def close(self) -> None:
        """Whoever waits for a result here waits no more."""
        with self._lock:
            self._is_closed = True
            left = list(self._futures)
        for future in left:
            future.cancel()


class WaitingEngine(BatchEngine):
    """A batch engine that executes in tasks or in a thread. `on_finished` is called when a batch has been
    executed: another turn may be due."""

    def __init__(
        self,
        model: LoadedModel,
        keys: Keys,
        deliver: Deliver,
        bodies: Mapping[str, bytes],
        sender: LocalSender,
        on_finished: Callable[[], object],
    ) -> None:
        super().__init__(model, keys, deliver, bodies)
        self._sender = sender
        self._on_finished = on_finished
        self._batches_max = model.settings.concurrent_batches(self._kind)
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads: set[threading.Thread] = set()
        self._thread_sender: ThreadSender | None = None
        self._calls: Calls | None = None
        self._asking: dict[str, tuple[Frame, FrameCalls]] = {}  # what is executed, by batch

    @property
    def _can_execute(self) -> bool:
        return super()._can_execute and len(self._tasks) < self._batches_max

    def _advance(self) -> None:
        while self._can_execute:
            task = asyncio.get_running_loop().create_task(self._execute_batch(self._batches.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_finished()

    async def _execute_batch(self, batch: Batch) -> None:
        execution = self._prepared(batch)
        for frame in execution.frames:
            try:
                outcome = await self._execute_waiting(batch, frame)
            except Unhealthy as error:
                self._fail(execution, frame, error)
            else:
                self._give_results(execution, frame, outcome)
        self._finish(execution)

    async def _execute_waiting(self, batch: Batch, frame: Frame) -> Executed:
        sent = partial(bytearray().join, frame.payload)
        calls = self._calls_of(frame)
        if calls is not None:
            self._asking[batch.id] = frame, calls
        arguments = (self._model, frame.header, sent(), sent, show, calls)
        try:
            if self._model.is_async:
                return await execute_frame_async(*arguments)
            return await self._in_thread(partial(execute_frame, *arguments))
        finally:
            self._asking.pop(batch.id, None)

    def _calls_of(self, frame: Frame) -> FrameCalls | None:
        model = self._model
        if not model.wants_clients:
            return None
        if self._calls is None:
            if not model.is_async:
                self._thread_sender = ThreadSender(self._sender, asyncio.get_running_loop())
            sender = self._thread_sender or self._sender
            self._calls = Calls(self._keys.model, is_async=model.is_async, sender=sender)
        return self._calls.of_frame(frame.header)

    async def _in_thread(self, function: Callable[[], Executed]) -> Executed:
        """What a function returns or raises in a thread, which does not keep the program from ending."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Executed] = loop.create_future()

        def run() -> None:
            resolve: Callable[[], None]
            try:
                resolve = partial(_resolve, done, function())
            except BaseException as error:
                resolve = partial(_fail, done, error)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(resolve)

        thread = threading.Thread(target=run, name=f"model {self._keys.model}", daemon=True)
        thread.start()
        self._threads.add(thread)
        try:
            return await done
        finally:
            if not done.cancelled():  # else `close` waits for it
                self._threads.discard(thread)

    def _answer(self, answered: Expire | Cancel, status: str, detail: str) -> None:
        """What the model asked for these requests is withdrawn, too."""
        super()._answer(answered, status, detail)
        if answered.batch_id in self._asking:
            frame, calls = self._asking[answered.batch_id]
            end = answered.position + len(answered.run)
            calls.cancel(
                [at for at, position in enumerate(frame.positions) if answered.position <= position < end]
            )

    def cancel(self) -> Sequence[asyncio.Task[None]]:
        """Execute nothing more. What is to be waited for before `close`, if that is possible."""
        for task in self._tasks:
            task.cancel()
        if self._thread_sender is not None:
            self._thread_sender.close()
        return list(self._tasks)

    def close(self) -> None:
        """Unload the model, once it is not called any more."""
        for thread in self._threads:
            thread.join(ENDING_S_MAX)
        super().close()


def _resolve(done: asyncio.Future[Executed], outcome: Executed) -> None:
    if not done.done():
        done.set_result(outcome)


def _fail(done: asyncio.Future[Executed], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
