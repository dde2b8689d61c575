"""The loop of a process whose model is async: as many frames at a time as the worker sends, each in a task.

There is one event loop, so what the model does between two `await`s is done alone. Outcomes are sent as they
come. The worker has one frame for each batch here, and no more batches than `max_concurrent_batches`.

Why: docs/decisions/0100.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.calls import Calls, FrameCalls
from carpool_worker.model_process.frame_execution import execute_frame_async
from carpool_worker.model_process.frames import FrameHeader, WithdrawCalls
from carpool_worker.model_process.loaded import LoadedModel
from carpool_worker.model_process.measured import MeasuredSender
from carpool_worker.model_process.raised import RaisedLog


class AsyncFrameLoop:
    """Receives frames, executes each in a task of its event loop, and sends their outcomes as they come."""

    def __init__(
        self, sock: socket.socket, model: LoadedModel, raised: RaisedLog, calls: Calls | None = None
    ) -> None:
        """`calls`: of a model that calls others."""
        self._sock = sock
        self._reader = frames.MessageReader(sock)
        self._model = model
        self._raised = raised
        self._measured = MeasuredSender(sock)
        self._measuring: asyncio.TimerHandle | None = None  # will send what was measured last
        self._calls = calls
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, FrameCalls] = {}  # of the frames that are executed, by number

    def run(self) -> None:
        """Serve until the worker closes the connection. Raises Unhealthy."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._sock.fileno(), self._take_arrived)
        try:
            await self._ended
        finally:
            loop.remove_reader(self._sock.fileno())
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._calls is not None:
                await self._calls.close()

    def _take_arrived(self) -> None:
        """Take all messages that have arrived."""
        try:
            while (message := self._reader.receive_arrived()) is not None:
                fields, payload = message
                self._take(frames.read_async_request(fields), payload)
        except frames.ProcessGoneError:
            self._end()
        except Exception as error:  # the process ends with it
            self._end(error)

    def _take(self, message: FrameHeader | WithdrawCalls, payload: Buffer) -> None:
        if isinstance(message, WithdrawCalls):
            calls = self._open.get(message.number)
            if calls is not None:
                calls.cancel(message.indexes)
            return
        task = asyncio.create_task(self._execute(message, payload))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def _execute(self, frame: FrameHeader, payload: Buffer) -> None:
        raised = self._raised.apart()
        calls = None if self._calls is None else self._calls.of_frame(frame)
        if calls is not None:
            self._open[frame.number] = calls
        # The model may write into the payload. To ask the worker for it again would delay all other frames.
        again = partial(bytearray, bytes(payload) if frame.layouts else b"")
        try:
            header, data = await execute_frame_async(
                self._model, frame, payload, again, raised.observe, calls
            )
        finally:
            self._open.pop(frame.number, None)
        self._send_measured()
        frames.send_message(self._sock, raised.named(header), *data)

    def _send_measured(self) -> None:
        """Send what the model has measured, now or soon: there may be no outcome for a while."""
        wait_s = self._measured.send_if_due()
        if wait_s is not None and self._measuring is None:
            self._measuring = asyncio.get_running_loop().call_later(wait_s, self._send_measured_last)

    def _send_measured_last(self) -> None:
        self._measuring = None
        self._send_measured()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, frames.ProcessGoneError):
            self._end()
        elif error is not None:  # Unhealthy, or an unforeseen one: the process ends with it
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
