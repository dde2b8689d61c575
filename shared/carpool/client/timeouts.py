"""Timers of entries that wait for results.

Entries share timers. One each would cost more than all else that is done for a lone request, and hardly any
timer ever fires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from carpool.client.entries import OutgoingEntry

RESOLUTION_S: Final = 0.01


class Timeouts:
    """Calls `on_timeout` with each entry whose timeout has passed, at most RESOLUTION_S late."""

    def __init__(self, on_timeout: Callable[[OutgoingEntry], None]) -> None:
        self._on_timeout = on_timeout
        self._timers: dict[int, tuple[asyncio.TimerHandle, set[OutgoingEntry]]] = {}  # by RESOLUTION_S

    def start(self, entry: OutgoingEntry, loop: asyncio.AbstractEventLoop) -> None:
        """Start the entry's timeout."""
        entry.started_s = time.monotonic()
        if entry.timeout_s is None:
            return
        number = int((loop.time() + entry.timeout_s) / RESOLUTION_S) + 1
        if number not in self._timers:
            self._timers[number] = (loop.call_at(number * RESOLUTION_S, self._end, number), set())
        entry.simultaneous = self._timers[number][1]
        entry.simultaneous.add(entry)

    @staticmethod
    def stop(entry: OutgoingEntry) -> None:
        """End the entry's timeout: all its requests have their results."""
        if entry.simultaneous is not None:
            entry.simultaneous.discard(entry)

    def close(self) -> None:
        """End all timeouts."""
        for timer, _ in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _end(self, number: int) -> None:
        for entry in list(self._timers.pop(number)[1]):
            self._on_timeout(entry)
