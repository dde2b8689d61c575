"""The waiting queue of a model: all lanes, their totals, and the limits on what may wait.

Requests begin and cease to wait only here, so that the totals are always right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from carpool.errors import CANCELLED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.messages import PRIORITY_LEVELS, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.decisions import refusal
from carpool_batcher.core.lane import Lane, bytes_of

MAX_BATCH_BYTES: Final = 64 * 1024 * 1024  # Redis takes 512 MiB in one string, and copies it a few times


class Queue:
    """The waiting requests of one model.

    `count` and `bytes` are totals over all lanes. `withheld` is the number of results that wait for earlier
    tickets (`preserve_ordering`): they count against `max_queue_size`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.withheld = 0
        self.lanes: dict[str, Lane] = {"": Lane("")}  # only this one, the default, may be empty
        self._count_by_priority = [0] * PRIORITY_LEVELS

    def __contains__(self, request: Request) -> bool:
        lane = self.lanes.get(request.lane)
        return lane is not None and request in lane

    def oldest_arrival_us(self) -> int | None:
        """The arrival of the oldest request; None if none waits. O(lanes)."""
        return min((lane.head()[1] for lane in self.lanes.values() if lane.count), default=None)

    # --- admitting -----------------------------------------------------------------------------------------

    def admit(self, request: Request, settings: ModelSettings) -> Refusal | None:
        """Admit a request, or return the Refusal if a limit is reached."""
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            detail = f"cost: {request.cost} is over this model's max_batch_cost {settings.max_batch_cost}"
            return refusal(request, INVALID_ARGUMENT, "cost", detail)
        if self.count + self.withheld >= settings.max_queue_size:
            content = f"{self.count} requests wait"
            if self.withheld:
                content += f", {self.withheld} results are withheld until earlier ones are done"
            detail = f"the queue is full (max_queue_size): {content}; try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        if settings.priority_policies and self._is_priority_full(request.priority, settings):
            detail = f"the queue is full for priority {request.priority} (priority_policies); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        size_bytes = bytes_of(request)
        if self.bytes + size_bytes > settings.max_queue_bytes:
            detail = (
                f"the queue is full (max_queue_bytes): {self.bytes} bytes wait, and this request has "
                f"{size_bytes}; try again later"
            )
            return refusal(request, RESOURCE_EXHAUSTED, "queue_bytes", detail)
        lane = self.lanes.get(request.lane)
        if lane is None:
            lane = self.lanes[request.lane] = Lane(request.lane)
        lane.insert(request)
        self.count += 1
        self.bytes += size_bytes
        self._count_by_priority[request.priority] += 1
        return None

    def _is_priority_full(self, priority: int, settings: ModelSettings) -> bool:
        policy = settings.priority_policies.get(priority)
        limit = None if policy is None else policy.max_queue_size
        return limit is not None and self._count_by_priority[priority] >= limit

    # --- removing ------------------------------------------------------------------------------------------

    def pop_batch(self, lane: Lane, size: int, settings: ModelSettings) -> list[Request]:
        """Remove and return the next batch of a lane, of at most `size` requests."""
        bytes_before = lane.bytes
        batch = lane.pop_batch(size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights)
        self.bytes -= bytes_before - lane.bytes
        self._count_removed(batch, lane)
        return batch

    def remove(self, request: Request) -> None:
        """Remove a request. It must be waiting."""
        lane = self.lanes[request.lane]
        lane.remove(request)
        self.bytes -= bytes_of(request)
        self._count_removed([request], lane)

    def withdraw(self, correlation_ids: frozenset[str]) -> list[Refusal]:
        """Remove the requests with these correlation IDs, and return their answers. O(all waiting)."""
        withdrawn = [
            request
            for lane in self.lanes.values()
            for request in lane
            if request.correlation_id in correlation_ids
        ]
        self.forget(withdrawn)
        return [
            refusal(request, CANCELLED, "withdrawn", "withdrawn by its producer") for request in withdrawn
        ]

    def forget(self, requests: Iterable[Request]) -> None:
        """Remove those of these requests that wait, without an answer."""
        for request in requests:
            if request in self:
                self.remove(request)

    def _count_removed(self, requests: list[Request], lane: Lane) -> None:
        self.count -= len(requests)
        for request in requests:
            self._count_by_priority[request.priority] -= 1
        if not lane.count and lane.name:
            del self.lanes[lane.name]  # producers choose the names: empty lanes would pile up

    # --- batches -------------------------------------------------------------------------------------------

    @staticmethod
    def has_full_batch(lane: Lane, settings: ModelSettings) -> bool:
        """Whether a lane has a batch that cannot grow: by size, by bytes or by cost."""
        if lane.count >= settings.max_batch_size or lane.bytes >= MAX_BATCH_BYTES:
            return True
        return settings.max_batch_cost is not None and lane.cost >= settings.max_batch_cost

    @staticmethod
    def peek_batch(lane: Lane, settings: ModelSettings) -> list[Request]:
        """The requests that `pop_batch` would return, without removing them."""
        return lane.peek_batch(
            settings.max_batch_size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights
        )
