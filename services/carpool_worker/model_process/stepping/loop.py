"""The loop of a stepping model's process: take what the worker sent, advance, send what changed.

Why: docs/decisions/0052.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Final

from carpool_worker.model_process import frames
from carpool_worker.model_process.loaded import SteppingModel
from carpool_worker.model_process.measured import MeasuredSender
from carpool_worker.model_process.raised import RaisedLog
from carpool_worker.model_process.stepping.frames import Admit, Configure, Drop, read_worker_message
from carpool_worker.model_process.stepping.stepper import Stepper

SIGN_OF_LIFE_S: Final = 0.25  # a Step is sent that often even if nothing changed, to show that nothing hangs


class StepLoop:
    """Waits for the worker only while there is nothing to generate, or while the worker does not read."""

    def __init__(self, sock: socket.socket, model: SteppingModel, raised: RaisedLog) -> None:
        self._sock = sock
        self._reader = frames.MessageReader(sock)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._raised = raised
        self._measured = MeasuredSender(sock)
        self._stepper = Stepper(model, observe=self._raised.observe)
        self._sent_s = 0.0  # when the last Step was sent

    def run(self) -> None:
        """Serve until the worker closes the connection; then end all requests."""
        with contextlib.suppress(frames.ProcessGoneError):
            while True:
                self.run_once()
        self._stepper.close()

    def run_once(self) -> None:
        """One turn. Raises ProcessGoneError."""
        if not self._stepper.has_next:
            self._measured.wait(self._reader)
            self._receive()
        while self._reader.has_buffered or self._readable.poll(0):
            self._receive()
        if self._stepper.has_next:
            is_due = time.monotonic() - self._sent_s > SIGN_OF_LIFE_S
            step = self._stepper.advance(must_report=is_due or self._raised.has_news)
            self._measured.send_if_due()
            if step is not None:
                frames.send_message(self._sock, self._raised.named(step))
                self._sent_s = time.monotonic()

    def _receive(self) -> None:
        fields, payload = self._reader.receive()
        message = read_worker_message(fields)
        if isinstance(message, Admit):
            self._stepper.admit(message, payload)
        elif isinstance(message, Drop):
            self._stepper.drop(message.keys)
        elif isinstance(message, Configure):
            self._stepper.configure(message)
        else:
            self._stepper.resume()
