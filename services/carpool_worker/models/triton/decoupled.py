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
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import CarpoolError
from carpool.wire.tensors import Array, TensorSpec
from carpool_worker.models.triton.backend_utils import InferenceRequest, InferenceResponseSender
from carpool_worker.models.triton.python_model import Described, PythonModel
from carpool_worker.models.triton.requests import Row

# How long a step waits for a response. A new request waits as long, and each step costs some CPU.
WAIT_S: Final = 0.01
QUIET_WAIT_S: Final = 0.05  # if there was none for QUIET_S
QUIET_S: Final = 1.0


class _Running:
    """A request that was begun."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.sender: InferenceResponseSender = request.get_response_sender()
        self.error: BaseException | None = None  # what `execute` raised

    @property
    def has_news(self) -> bool:
        return self.error is not None or self.sender.has_news


def as_texts(result: Row) -> Row:
    """Texts in place of bytes that are UTF-8, so that a stream of them can be written as JSON."""
    if isinstance(result, dict):
        return {name: _text_array(array) for name, array in result.items()}
    return _text_array(result)


def _text_array(array: Array) -> Array:
    if array.dtype.kind not in "OS":
        return array
    try:
        texts = [one.decode() if isinstance(one, bytes) else one for one in array.ravel().tolist()]
    except UnicodeDecodeError:
        return array
    return np.array(texts, object).reshape(array.shape)


def _row(value: Any, spec: TensorSpec) -> Array:
    """An input of one request as the only row of a batch; without dimensions it may be a plain value."""
    if isinstance(value, np.ndarray):
        return value[np.newaxis]
    array = np.empty(1, object)
    array[0] = value
    return array if spec.datatype == "BYTES" else np.array([value])


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
        self._heard_s = 0.0  # when there was a response last
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
            body = one.body if isinstance(one.body, dict) else {self.inputs[0].name: one.body}
            batch = {spec.name: _row(body[spec.name], spec) for spec in self.inputs if spec.name in body}
            (request,) = self._exchange.requests(batch, [one.info], self._changed)
            one.state = _Running(request)
            self._given.put(_Given(one.state))

    def step(self, requests: Sequence[Any]) -> None:
        """Emit what was sent since the last step; wait for something for a moment."""
        is_quiet = time.monotonic() - self._heard_s > QUIET_S
        with self._changed:
            self._changed.wait_for(
                lambda: any(one.state.has_news for one in requests), QUIET_WAIT_S if is_quiet else WAIT_S
            )
        for one in requests:
            if one.state.has_news:
                self._heard_s = time.monotonic()
                self._send_on(one)

    def _send_on(self, one: Any) -> None:
        """Emit what was sent for one request."""
        responses, is_final = one.state.sender.take()
        for response in responses:
            result = self._exchange.result(response)
            if isinstance(result, CarpoolError):
                one.fail(result)
                return
            one.emit(as_texts(result))
        if is_final:
            one.finish()
        elif one.state.error is not None:
            one.fail(one.state.error)

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
