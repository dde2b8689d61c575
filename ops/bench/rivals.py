"""How others decide when a batch leaves, for the simulator: what Carpool's policies are compared with.

Triton's policy (preferred sizes, a fixed delay, a free instance) is Carpool's `eager` with those settings.
"""

from __future__ import annotations

from collections import deque

from carpool.messages import Refusal, Request
from carpool_batcher.core.scheduler import Decision, Dispatch, DispatchReason


class CountOrTimeout:
    """A batch leaves when it is full, or so long after its first request, whether a worker is free or not."""

    def __init__(self, max_size: int, timeout_us: int) -> None:
        self._max_size = max_size
        self._timeout_us = timeout_us
        self._waiting: deque[Request] = deque()

    def offer(self, request: Request, _now_us: int) -> Refusal | None:
        """It waits, and there is no limit."""
        self._waiting.append(request)
        return None

    def poll(self, now_us: int) -> list[Decision]:
        """What is full, or due."""
        decisions: list[Decision] = []
        while self._waiting and (len(self._waiting) >= self._max_size or self._due_us() <= now_us):
            size = min(self._max_size, len(self._waiting))
            reason: DispatchReason = "full" if size == self._max_size else "delay"
            decisions.append(Dispatch([self._waiting.popleft() for _ in range(size)], reason, ""))
        return decisions

    def wake_at_us(self) -> int | None:
        """When the first has waited long enough."""
        return self._due_us() if self._waiting else None

    def _due_us(self) -> int:
        return self._waiting[0].arrival_us + self._timeout_us

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """Nothing depends on it."""

    def settle(self, batch_id: str, compute_us: int, now_us: int) -> None:
        """Nor on this."""


class Aimd:
    """Clipper (NSDI 2017): a free worker takes what waits, up to a size that grows by one for each batch that
    kept the objective, and shrinks by a tenth when one did not."""

    def __init__(self, max_size: int, objective_us: int, workers: int) -> None:
        self._max_size = max_size
        self._objective_us = objective_us
        self._free = workers
        self._size = float(max_size)  # from above it is learned sooner
        self._waiting: deque[Request] = deque()

    def offer(self, request: Request, _now_us: int) -> Refusal | None:
        """It waits, and there is no limit."""
        self._waiting.append(request)
        return None

    def poll(self, _now_us: int) -> list[Decision]:
        """A batch for each free worker."""
        decisions: list[Decision] = []
        while self._waiting and self._free:
            size = min(int(self._size), len(self._waiting))
            decisions.append(Dispatch([self._waiting.popleft() for _ in range(size)], "idle", ""))
            self._free -= 1
        return decisions

    def wake_at_us(self) -> int | None:
        """Never by time alone."""
        return None

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """Nothing depends on it."""

    def settle(self, batch_id: str, compute_us: int, now_us: int) -> None:
        """Learn from it."""
        self._free += 1
        if compute_us <= self._objective_us:
            self._size = min(self._max_size, self._size + 1)
        else:
            self._size = max(1.0, 0.9 * self._size)
