"""Who waits: the lanes, what is in them altogether, and who may not join.

The only place where a request begins to wait or ceases to, so that what is counted is what is there.
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
    """The waiting requests of one model. `count` and `bytes` are of all lanes together."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.withheld = (
            0  # results that are done, and held until those before them are: they count as waiting
        )
        self.lanes: dict[str, Lane] = {"": Lane("")}  # none is empty, but perhaps this one
        self._by_priority = [0] * PRIORITY_LEVELS

    def __contains__(self, request: Request) -> bool:
        lane = self.lanes.get(request.lane)
        return lane is not None and request in lane

    def oldest_arrival_us(self) -> int | None:
        """When the oldest arrived; None if none waits. O(lanes)."""
        return min((lane.head()[1] for lane in self.lanes.values() if lane.count), default=None)

    # --- who comes -----------------------------------------------------------------------------------------

    def add(self, request: Request, settings: ModelSettings) -> Refusal | None:
        """A request waits from now on, or may not: then this is its answer."""
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            detail = f"cost: {request.cost} is over this model's max_batch_cost {settings.max_batch_cost}"
            return refusal(request, INVALID_ARGUMENT, "cost", detail)
        if self.count + self.withheld >= settings.max_queue_size:
            who = f"{self.count} requests wait"
            if self.withheld:
                who += f", {self.withheld} results are held until those before them are done"
            detail = f"the queue is full: {who} (max_queue_size); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        if settings.priority_policies and self._level_is_full(request.priority, settings):
            detail = f"the queue is full for priority {request.priority} (priority_policies); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        size_bytes = bytes_of(request)
        if self.bytes + size_bytes > settings.max_queue_bytes:
            detail = f"the queue is full: {self.bytes} bytes wait (max_queue_bytes); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_bytes", detail)
        lane = self.lanes.get(request.lane)
        if lane is None:
            lane = self.lanes[request.lane] = Lane(request.lane)
        lane.add(request)
        self.count += 1
        self.bytes += size_bytes
        self._by_priority[request.priority] += 1
        return None

    def _level_is_full(self, priority: int, settings: ModelSettings) -> bool:
        policy = settings.priority_policies.get(priority)
        limit = None if policy is None else policy.max_queue_size
        return limit is not None and self._by_priority[priority] >= limit

    # --- who goes ------------------------------------------------------------------------------------------

    def remove(self, request: Request) -> None:
        """A request that waits does so no longer."""
        lane = self.lanes[request.lane]
        lane.remove(request)
        self.bytes -= bytes_of(request)
        self._gone([request], lane)

    def take(self, lane: Lane, size: int, settings: ModelSettings) -> list[Request]:
        """The next batch of a lane, of so many at most, is out of it."""
        held_bytes = lane.bytes
        taken = lane.take(size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights)
        self.bytes -= held_bytes - lane.bytes
        self._gone(taken, lane)
        return taken

    def withdraw(self, correlation_ids: frozenset[str]) -> list[Refusal]:
        """A producer takes back whom it names: their answers. O(all that wait)."""
        named = [
            request
            for lane in self.lanes.values()
            for request in lane
            if request.correlation_id in correlation_ids
        ]
        self.forget(named)
        return [refusal(request, CANCELLED, "withdrawn", "withdrawn by its producer") for request in named]

    def forget(self, requests: Iterable[Request]) -> None:
        """Those of these that wait do so no longer, and there is nobody to answer."""
        for request in requests:
            if request in self:
                self.remove(request)

    def _gone(self, requests: list[Request], lane: Lane) -> None:
        self.count -= len(requests)
        for request in requests:
            self._by_priority[request.priority] -= 1
        if not lane.count and lane.name:
            del self.lanes[lane.name]  # names come from producers: only the one that all know stays empty

    # --- how much ------------------------------------------------------------------------------------------

    @staticmethod
    def fills_batch(lane: Lane, settings: ModelSettings) -> bool:
        """Whether a lane has a batch that cannot grow: by number, by bytes or by cost."""
        if lane.count >= settings.max_batch_size or lane.bytes >= MAX_BATCH_BYTES:
            return True
        return settings.max_batch_cost is not None and lane.cost >= settings.max_batch_cost

    @staticmethod
    def fitting(lane: Lane, settings: ModelSettings) -> list[Request]:
        """Whom `take` would take, left where they are."""
        return lane.fitting(
            settings.max_batch_size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights
        )
