"""Scheduling policies of other systems, for the simulator: Carpool's policies are compared with these.

Triton's policy (preferred sizes, a fixed delay, an idle instance) is Carpool's `eager` with those settings.
"""

from __future__ import annotations

from collections import deque

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool_batcher.core.scheduler import Decision, Dispatch, DispatchReason


class CountOrTimeout:
    """Dispatches a batch when it is full, or a fixed time after its first request, even to a busy worker."""

    def __init__(self, max_size: int, timeout_us: int) -> None:
        self._max_size = max_size
        self._timeout_us = timeout_us
        self.in_flight = self  # it has no other part for these
        self._waiting: deque[Run] = deque()

    def offer(self, run: Run, _now_us: int) -> list[Refusal]:
        """Append a request, which is a run of one, to the queue, which has no limit."""
        self._waiting.append(run)
        return []

    def poll(self, now_us: int) -> list[Decision]:
        """Dispatch full batches, and those that are due."""
        decisions: list[Decision] = []
        while self._waiting and (len(self._waiting) >= self._max_size or self._due_us() <= now_us):
            size = min(self._max_size, len(self._waiting))
            reason: DispatchReason = "full" if size == self._max_size else "delay"
            decisions.append(Dispatch([self._waiting.popleft() for _ in range(size)], reason, ""))
        return decisions

    def wake_at_us(self) -> int | None:
        """When the first request is due."""
        return self._due_us() if self._waiting else None

    def _due_us(self) -> int:
        return self._waiting[0].arrival_us + self._timeout_us

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """Nothing to do: this policy does not track batches in flight."""

    def settle(self, event: BatchSettled) -> None:
        """Nothing to do."""


class Aimd:
    """The policy of Clipper (NSDI 2017): an idle worker gets all waiting requests, up to a size.

    The size grows by one after each batch that met the objective, and shrinks by a tenth after one that did
    not.
    """

    def __init__(self, max_size: int, objective_us: int, workers: int) -> None:
        self._max_size = max_size
        self._objective_us = objective_us
        self._idle_workers = workers
        self.in_flight = self  # it has no other part for these
        self._size = float(max_size)  # starting at the largest size, it converges sooner
        self._waiting: deque[Run] = deque()

    def offer(self, run: Run, _now_us: int) -> list[Refusal]:
        """Append a request, which is a run of one, to the queue, which has no limit."""
        self._waiting.append(run)
        return []

    def poll(self, _now_us: int) -> list[Decision]:
        """Dispatch a batch to each idle worker."""
        decisions: list[Decision] = []
        while self._waiting and self._idle_workers:
            size = min(int(self._size), len(self._waiting))
            decisions.append(Dispatch([self._waiting.popleft() for _ in range(size)], "idle", ""))
            self._idle_workers -= 1
        return decisions

    def wake_at_us(self) -> int | None:
        """Never: only events of requests and batches matter."""
        return None

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """Nothing to do: `poll` has counted the batch."""

    def settle(self, event: BatchSettled) -> None:
        """Adapt the size."""
        self._idle_workers += 1
        if event.compute_us <= self._objective_us:
            self._size = min(self._max_size, self._size + 1)
        else:
            self._size = max(1.0, 0.9 * self._size)
