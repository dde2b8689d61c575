"""The log of what a batcher answers itself: a summary a second, because a flood is refused one by one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from carpool.errors import DEADLINE_EXCEEDED
from carpool_batcher.core.missed import Cause

SUMMARY_INTERVAL_S: Final = 1.0


class AnswerLog:
    """Counts the answers of one model's batcher. `summarize_if_due` is called a few times a second."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._refused: Counter[str] = Counter()
        self._expired_requests = 0
        self._expired_batches = 0
        self._cancelled_requests = 0
        self._missed: Counter[str] = Counter()
        self._summarized_at_s = time.monotonic()

    def refused(self, statuses: Mapping[str, int]) -> None:
        """Requests were refused; `statuses` counts them by status."""
        self._refused.update(statuses)

    def answered_in_flight(self, status: str, requests: int) -> None:
        """That many requests of one batch in flight were answered: expired or withdrawn."""
        if status == DEADLINE_EXCEEDED:
            self._expired_requests += requests
            self._expired_batches += 1
        else:
            self._cancelled_requests += requests

    def missed(self, causes: Mapping[Cause, int]) -> None:
        """Requests missed their deadlines: how many for each cause (`core.missed`)."""
        self._missed.update(causes)

    def summarize_if_due(self) -> None:
        """Log a summary, if the last was a second ago."""
        if time.monotonic() - self._summarized_at_s >= SUMMARY_INTERVAL_S:
            self.summarize()

    def summarize(self) -> None:
        """Log what was answered since the last summary; nothing if nothing was."""
        self._summarized_at_s = time.monotonic()
        if self._refused:
            self._log.info("requests refused", **self._refused)
            self._refused = Counter()
        if self._expired_batches:
            self._log.info(
                "requests expired in flight", requests=self._expired_requests, batches=self._expired_batches
            )
            self._expired_requests = self._expired_batches = 0
        if self._cancelled_requests:
            self._log.info("requests cancelled in flight", requests=self._cancelled_requests)
            self._cancelled_requests = 0
        if self._missed:
            self._log.info("deadlines missed", **self._missed)
            self._missed = Counter()
