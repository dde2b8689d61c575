"""A decoupled `TritonPythonModel`: any number of responses to each request, as a stepping model.

`execute` is called in a thread of its own, as it may take as long as all of its responses, which are sent
meanwhile. Responses come from any thread; a step sends on what has come. Between the steps new requests are
begun, which wait for that thread; it takes several if the model batches dynamically.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.errors import CarpoolError
from carpool_worker.models.triton.backend_utils import InferenceRequest, InferenceResponseSender
from carpool_worker.models.triton.python_model import Described, PythonModel

WAIT_S: Final = 0.01  # of a step, for a response: new requests wait as long


class _Running:
    """A request that was begun."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.sender: InferenceResponseSender = request.get_response_sender()
        self.error: BaseException | None = None  # what `execute` raised

    @property
    def has_news(self) -> bool:
        return self.error is not None or self.sender.has_news


class _Given(NamedTuple):
    """What reaches the thread that executes: a request, or the end."""

    running: _Running | None


class DecoupledModel(PythonModel):
    """Each response is a value that is emitted. It cannot go on from values that another process emitted."""

    continues = False

    def __init__(self, described: Described) -> None:
        super().__init__(described)
        has_batches = "dynamic_batching" in described.config
        self._together = described.translated.rows if has_batches else 1
        self._given: queue.SimpleQueue[_Given] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="execute", daemon=True)

    def _load(self, device: str, parameters: Mapping[str, str]) -> None:
        super()._load(device, parameters)
        self._thread.start()

    def unload(self) -> None:
        """End the thread, and then the model. What it executes meanwhile has no reader any more."""
        self._given.put(_Given(None))
        self._thread.join()
        super().unload()

    def begin(self, requests: Sequence[Any]) -> None:
        """Pass requests on to the thread."""
        for one in requests:
            names = [spec.name for spec in self.inputs]
            body = one.body if isinstance(one.body, dict) else {names[0]: one.body}
            batch = {name: array[None] for name, array in body.items()}
            (request,) = self._exchange.requests(batch, [one.info], self._changed)
            one.state = _Running(request)
            self._given.put(_Given(one.state))

    def step(self, requests: Sequence[Any]) -> None:
        """Emit what was sent since the last step; wait for something for a moment."""
        with self._changed:
            self._changed.wait_for(lambda: any(one.state.has_news for one in requests), WAIT_S)
        for one in requests:
            responses, is_final = one.state.sender.take()
            for response in responses:
                result = self._exchange.result(response)
                if isinstance(result, CarpoolError):
                    one.fail(result)
                    break
                one.emit(result)
            if not one.has_ended:
                if one.state.error is not None and not is_final:
                    one.fail(one.state.error)
                elif is_final:
                    one.finish()

    def end(self, request: Any) -> None:
        """Nobody waits for responses any more."""
        if request.state is not None:
            request.state.sender.was_cancelled = True

    # --- the thread that executes ---------------------------------------------------------------------------

    def _run(self) -> None:
        if inspect.iscoroutinefunction(self._model.execute):
            asyncio.run(self._execute_all_async())
            return
        while (batch := self._next_batch()) is not None:
            try:
                self._model.execute([one.request for one in batch])
            except BaseException as error:  # it is theirs alone
                self._fail(batch, error)

    async def _execute_all_async(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while (batch := await asyncio.to_thread(self._next_batch)) is not None:
            task = asyncio.create_task(self._execute_async(batch))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()

    async def _execute_async(self, batch: list[_Running]) -> None:
        executing: Coroutine[Any, Any, None] = self._model.execute([one.request for one in batch])
        try:
            await executing
        except BaseException as error:
            self._fail(batch, error)

    def _next_batch(self) -> list[_Running] | None:
        """The requests of the next call, without those that nobody waits for; None at the end."""
        while True:
            found = [self._given.get()]
            while len(found) < self._together and not self._given.empty():
                found.append(self._given.get())
            if any(one.running is None for one in found):
                return None
            batch = [one.running for one in found if one.running and not one.running.sender.was_cancelled]
            if batch:
                return batch

    def _fail(self, batch: Sequence[_Running], error: BaseException) -> None:
        with self._changed:
            for one in batch:
                one.error = error
            self._changed.notify_all()
