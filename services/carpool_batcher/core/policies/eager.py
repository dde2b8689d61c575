"""The policy `eager`: dispatch a batch when a process is free, and a full one ahead of busy processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from carpool.messages.batches import DispatchReason
from carpool.messages.results import Refusal
from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.waiting.lane import Lane
from carpool_batcher.core.waiting.lane_index import ANY_TIME_US, Gate
from carpool_batcher.core.waiting.queue import Queue


class Eager:
    """The policy `eager`, and the interface of all policies.

    `full_gate`: what a full batch has to wait for. `is_full_final`: it is dispatched as it is, and `form` is
    not asked. `may_be_early`: it may be dispatched to a busy process earlier than other batches. `forecasts`:
    when a batch is ready depends on what was learned.
    """

    full_gate: ClassVar[Gate] = Gate.AHEAD  # it cannot grow
    is_full_final: ClassVar[bool] = True
    forecasts: ClassVar[bool] = False
    may_be_early = False

    def __init__(self, applied: AppliedSettings, queue: Queue) -> None:
        self._applied = applied
        self._queue = queue

    def observe(self, now_us: int) -> None:
        """What waits, and who is free, may have changed."""

    def ready(self, lane: Lane, now_us: int) -> tuple[int, DispatchReason]:
        """When a batch of a lane is ready, and the reason. The lane must not be empty."""
        applied = self._applied
        if lane.has_full_batch(applied.batch):
            return ANY_TIME_US, "full"
        if applied.preferred_sizes and self._preferred_size(lane):
            return ANY_TIME_US, "preferred"
        if lane.urgent:
            return ANY_TIME_US, "deadline"
        return lane.front()[1] + applied.queue_delay_us, "delay" if applied.has_queue_delay else "idle"

    def gate(self, reason: DispatchReason) -> Gate:
        """What a batch that is ready for this reason has to wait for."""
        if reason == "full":
            return self.full_gate
        return Gate.SPACED if reason == "idle" else Gate.FREE

    def form(self, lane: Lane, reason: DispatchReason, now_us: int) -> tuple[int, Sequence[Refusal]]:
        """Of a lane that is ready: how many requests to dispatch at most, from the front; and the Refusals of
        others, which were removed. 0: no batch is dispatched yet."""
        return self._size(lane, reason), ()

    def _size(self, lane: Lane, reason: DispatchReason) -> int:
        return self._preferred_size(lane) if reason == "preferred" else self._applied.batch.size

    def _preferred_size(self, lane: Lane) -> int:
        """The largest preferred size that a lane can fill; 0 if none."""
        return max((size for size in self._applied.preferred_sizes if size <= lane.count), default=0)
