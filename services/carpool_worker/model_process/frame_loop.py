"""The loop of a process that executes frames: receive one, execute it, send the outcome."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from functools import partial

from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.calls import Calls
from carpool_worker.model_process.frame_execution import execute_bound_frame, execute_frame
from carpool_worker.model_process.frames import EndSequences, FrameHeader
from carpool_worker.model_process.loaded import BoundModel, LoadedModel
from carpool_worker.model_process.measured import MeasuredSender
from carpool_worker.model_process.raised import RaisedLog


class FrameLoop:
    """Takes what the worker sends, in order: frames, and for a model that binds sequences, their ends."""

    def __init__(
        self, sock: socket.socket, model: LoadedModel, raised: RaisedLog, calls: Calls | None = None
    ) -> None:
        """`calls`: of a model that calls others."""
        self._sock = sock
        self._calls = calls
        self._reader = frames.MessageReader(sock)
        self._sent_ahead: deque[tuple[FrameHeader | EndSequences, Buffer]] = (
            deque()
        )  # before one that was wanted again
        self._model = model
        self._raised = raised
        self._measured = MeasuredSender(sock)
        self._bound = BoundExecutor(model, raised.observe) if isinstance(model, BoundModel) else None

    def run(self) -> None:
        """Serve until the worker closes the connection; then end all sequences. Raises Unhealthy."""
        with contextlib.suppress(frames.ProcessGoneError):
            while True:
                self.run_once()
        if self._bound is not None:
            self._bound.close()
        if self._calls is not None:
            self._calls.close_now()

    def run_once(self) -> None:
        """Take one message. Raises ProcessGoneError."""
        message, payload = self._sent_ahead.popleft() if self._sent_ahead else self._receive()
        if isinstance(message, EndSequences):
            if self._bound is not None:
                self._bound.end(message.sequence_ids)
            return
        if self._bound is not None:
            header, data = execute_bound_frame(self._bound, message, payload)
        else:
            again = partial(self._again, message.number)
            calls = None if self._calls is None else self._calls.of_frame(message)
            header, data = execute_frame(self._model, message, payload, again, self._raised.observe, calls)
        self._measured.send_if_due()
        frames.send_message(self._sock, self._raised.named(header), *data)

    def _again(self, number: int) -> Buffer:
        """The payload of the frame with this number, whose outcome was not sent yet, once more."""
        frames.send_message(self._sock, frames.Again(number).message())
        while True:
            message, payload = self._receive()
            if isinstance(message, FrameHeader) and message.number == number:
                return payload
            self._sent_ahead.append((message, payload))

    def _receive(self) -> tuple[FrameHeader | EndSequences, Buffer]:
        self._measured.wait(self._reader)
        fields, payload = self._reader.receive()
        return frames.read_request(fields), payload
