"""The loop of a process whose model binds sequences: execute frames, and hear of sequences that ended."""

from __future__ import annotations

import contextlib
import socket
import time

from carpool_worker.model_process import frames
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.bound_frames import End, read_worker_message
from carpool_worker.model_process.executor import decode_items
from carpool_worker.model_process.model import BoundModel, RequestInfo
from carpool_worker.model_process.outcomes import encode_outcome
from carpool_worker.model_process.raised import RaisedLog


class BoundLoop:
    """Takes what the worker sends, in order."""

    def __init__(self, sock: socket.socket, model: BoundModel, raised: RaisedLog) -> None:
        self._sock = sock
        self._reader = frames.MessageReader(sock)
        self._raised = raised
        self._model = model
        self._executor = BoundExecutor(model, self._raised.observe)

    def run(self) -> None:
        """Serve until the worker closes the connection; then end all sequences."""
        with contextlib.suppress(frames.ProcessGoneError):
            while True:
                self.run_once()
        self._executor.close()

    def run_once(self) -> None:
        """Take one message. Raises ProcessGoneError."""
        fields, payload = self._reader.receive()
        message = read_worker_message(fields)
        if isinstance(message, End):
            self._executor.end(message.sequence_ids)
            return
        items, requests = decode_items(message, payload), [RequestInfo(*info) for info in message.requests]
        started_ns = time.perf_counter_ns()
        outcome = self._executor.execute(items, requests)
        compute_us = (time.perf_counter_ns() - started_ns) // 1000
        header, data = encode_outcome(self._model, message, outcome, compute_us)
        frames.send_message(self._sock, self._raised.named(header), data)
