"""A worker's log that has a summary a second at info, and single lines at debug."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Final

import structlog

SUMMARY_INTERVAL_S: Final = 1.0


class SummaryLog(ABC):
    """Its replicas add to it under `_lock`. The worker's main thread calls `summarize_if_due`."""

    def __init__(self, model: str, worker: str) -> None:
        self._worker = worker
        self._log = structlog.get_logger().bind(model=model)
        self._is_debug = self._log.is_enabled_for(logging.DEBUG)
        self._lock = threading.Lock()
        self._summarized_at_s = time.monotonic()

    def bind(self, **fields: str) -> None:
        """All lines have these fields from now on."""
        self._log = self._log.bind(**fields)

    def summarize_if_due(self) -> None:
        """Log a summary, if the last was a second ago."""
        if time.monotonic() - self._summarized_at_s >= SUMMARY_INTERVAL_S:
            self.summarize()

    def summarize(self) -> None:
        """Log what was done since the last summary in one line; nothing if nothing was."""
        self._summarized_at_s = time.monotonic()
        self._summarize()

    @abstractmethod
    def _summarize(self) -> None:
        """Log it, and begin anew."""
