"""Sends what a model measures of itself (`carpool.metrics`), and spans that it records (`spans`), to the
worker: ahead of outcomes and Steps, a few times a second, and soon after the last one. A model without any
pays for two comparisons."""

from __future__ import annotations

import contextlib
import select
import socket
import time

from carpool.metrics import REGISTRY
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import (
    MEASURED_INTERVAL_S,
    Measured,
    MessageReader,
    MessageSender,
    ModelSpans,
)
from carpool_worker.model_process.spans import SPANS


class MeasuredSender:
    """For the loop of a model process."""

    def __init__(self, sock: socket.socket, sender: MessageSender | None = None) -> None:
        """`sender`: with which several threads send; None: this thread alone does."""
        self._sender = sender or MessageSender(sock)
        self._readable = select.poll()  # the descriptor is too high for select
        self._readable.register(sock, select.POLLIN)
        self._due_s = 0.0

    @property
    def has_news(self) -> bool:
        """Whether something has changed that is not sent."""
        return REGISTRY.has_news or SPANS.has_news

    def send_if_due(self) -> float | None:
        """Send what has changed, unless that was done a moment ago: then after how many seconds to call this
        again."""
        if not self.has_news:
            return None
        now_s = time.monotonic()
        if now_s < self._due_s and not SPANS.has_news:  # these are few, and lost if the process is ended
            return self._due_s - now_s
        self._due_s = now_s + MEASURED_INTERVAL_S
        self.send_all()
        return None

    def send_all(self) -> None:
        """Send all that has changed. That the other process ended shows later."""
        with contextlib.suppress(frames.ProcessGoneError):
            if REGISTRY.has_news:
                for change in REGISTRY.take_changes():
                    self._sender.send(Measured.of(change).message())
            if SPANS.has_news:
                self._sender.send(ModelSpans(*SPANS.take()).message())

    def wait(self, reader: MessageReader) -> None:
        """Before the loop waits for the worker: wait for that here as long as something is to be sent."""
        while self.has_news and not reader.has_buffered:
            left_s = max(0.0, self._due_s - time.monotonic())
            if self._readable.poll(1000 * left_s):
                return
            self.send_if_due()
