"""When a batch is dispatched, why, and with which requests: rules 1 to 3 at the top of `core.scheduler`.

Nothing is stored here: time and settings are arguments, `core.queue` holds the waiting requests, and
`core.capacity` knows when processes are free.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import Final

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL
from carpool.messages import Dispatch, DispatchReason, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.decisions import Decision, refusal
from carpool_batcher.core.deferred import Forecast, efficient_size, latest_start_us, plan
from carpool_batcher.core.due_index import NEVER_US
from carpool_batcher.core.lane import Lane
from carpool_batcher.core.queue import Queue

PLANNED_BATCHES_MAX: Final = 4  # how many waiting requests a plan considers, in batches of the largest size


class Dispatcher:
    """Forms the batches that are dispatched now, and says when to ask again."""

    def __init__(self, queue: Queue, capacity: Capacity) -> None:
        self._queue = queue
        self._capacity = capacity

    def dispatch(self, settings: ModelSettings, custom: CustomPolicy | None, now_us: int) -> list[Decision]:
        """The batches to dispatch now, those with the strongest claim first, and the requests to refuse."""
        decisions: list[Decision] = []
        if not self._queue.count or not self._capacity.has_capacity():
            return decisions
        lanes = self._queue.lanes
        claims = [
            claim for lane in lanes.values() if (claim := self._claim(lane, settings, now_us)) is not None
        ]
        heapq.heapify(claims)
        while claims and self._capacity.has_capacity():
            _, _, name, reason = heapq.heappop(claims)
            if not self._can_dispatch(reason, settings, now_us):
                continue
            lane = lanes[name]
            decisions += self._form(lane, reason, settings, custom, now_us)
            if (claim := self._claim(lane, settings, now_us)) is not None:
                heapq.heappush(claims, claim)
        return decisions

    def wake_at_us(self, settings: ModelSettings, now_us: int) -> int | None:
        """When a batch could be dispatched by time alone; None if not before something happens."""
        free_at_us = self._capacity.free_at_us(now_us) if self._queue.count else None
        if free_at_us is None:
            return None
        lanes = self._queue.lanes.values()
        ready_at_us = min(self._ready_at_us(lane, settings, now_us)[0] for lane in lanes if lane.count)
        return max(free_at_us, ready_at_us)

    # --- when, and why -------------------------------------------------------------------------------------

    def _can_dispatch(self, reason: DispatchReason, settings: ModelSettings, now_us: int) -> bool:
        """Whether a process is free. A full batch may be dispatched ahead, unless that could make it late."""
        if reason == "full" and settings.policy != "deferred":
            return True
        free_at_us = self._capacity.free_at_us(now_us)
        return free_at_us is not None and free_at_us <= now_us

    def _claim(
        self, lane: Lane, settings: ModelSettings, now_us: int
    ) -> tuple[int, int, str, DispatchReason] | None:
        """A lane with a batch that is ready, as (-rank, arrival, name, reason): the smallest comes first."""
        if not lane.count:
            return None
        ready_at_us, reason = self._ready_at_us(lane, settings, now_us)
        if now_us < ready_at_us:
            return None
        rank, arrival_us = lane.head()
        return -rank, arrival_us, lane.name, reason

    def _ready_at_us(self, lane: Lane, settings: ModelSettings, now_us: int) -> tuple[int, DispatchReason]:
        """When a batch of a lane is ready, and the reason; `now_us` if it is ready whatever the time.

        The lane must not be empty.
        """
        if self._queue.has_full_batch(lane, settings):
            return now_us, "full"
        if settings.preferred_batch_sizes and _preferred_size(lane, settings):
            return now_us, "preferred"
        if lane.urgent:
            return now_us, "deadline"
        delay_ends_us = lane.head()[1] + int(settings.max_queue_delay_ms * 1000)
        if not self._is_deferred(lane, settings):
            if settings.max_queue_delay_ms:
                return delay_ends_us, "delay"
            return max(delay_ends_us, self._capacity.spacing_ends_us()), "idle"
        forecast = self._forecast(lane, settings)
        if lane.count >= efficient_size(forecast.latency, settings.max_batch_size):
            return now_us, "efficient"
        start_us = latest_start_us(forecast, lane.earliest_due_us(_target_us(settings)), lane.count)
        if settings.max_queue_delay_ms and delay_ends_us < start_us:
            return delay_ends_us, "delay"
        return start_us, "deadline"

    def _is_deferred(self, lane: Lane, settings: ModelSettings) -> bool:
        """Whether the policy is `deferred`, and both l(n) and a due time are known."""
        if settings.policy != "deferred" or not self._capacity.latency.known:
            return False
        return lane.earliest_due_us(_target_us(settings)) != NEVER_US

    def _forecast(self, lane: Lane, settings: ModelSettings) -> Forecast:
        """What is known of a lane's batches, without when processes are free."""
        capacity = self._capacity
        latency = capacity.latency_of(lane.name)
        return Forecast(latency, settings.max_batch_size, capacity.round_trip_us, ())

    # --- forming a batch -----------------------------------------------------------------------------------

    def _form(
        self,
        lane: Lane,
        reason: DispatchReason,
        settings: ModelSettings,
        custom: CustomPolicy | None,
        now_us: int,
    ) -> list[Decision]:
        """Dispatch a batch of a lane that is ready, or refuse requests of it.

        After a refusal no batch is dispatched yet: the lane is looked at again, because the other requests
        may have time to wait, and the fair turns have changed.
        """
        if custom is not None:
            return self._form_custom(lane, reason, settings, custom)
        size = _preferred_size(lane, settings) if reason == "preferred" else settings.max_batch_size
        if not self._is_deferred(lane, settings):
            return [self._dispatch_from(lane, reason, size, settings)]
        forecast = self._forecast(lane, settings)
        size_max = min(lane.count, settings.max_batch_size)
        if forecast.settles_us(now_us, size_max) <= lane.earliest_due_us(_target_us(settings)):
            return [self._dispatch_from(lane, reason, size, settings)]  # all are in time: no plan is needed
        in_order = list(islice(lane.in_order(settings.tenant_weights), PLANNED_BATCHES_MAX * size))
        forecast = forecast._replace(free_times_us=self._capacity.free_times_us(now_us))
        planned = plan(
            forecast, [_strict_deadline_us(request, lane, settings) for request in in_order], now_us
        )
        if not planned.size and self._capacity.begin_trial(lane.name, now_us):
            return [self._dispatch_from(lane, reason, size, settings)]
        if planned.refused:
            return [self._refuse_early(in_order[at], now_us) for at in planned.refused]
        return [self._dispatch_from(lane, reason, min(size, planned.size), settings)]

    def _form_custom(
        self, lane: Lane, reason: DispatchReason, settings: ModelSettings, custom: CustomPolicy
    ) -> list[Decision]:
        """Dispatch the requests that a user's policy includes, or refuse those for which it raised."""
        formed = custom.form(self._queue.peek_batch(lane, settings))
        decisions: list[Decision] = []
        for request, detail in formed.failed:
            self._queue.remove(request)
            decisions.append(refusal(request, INTERNAL, "policy", detail))
        if formed.requests:
            decisions.append(self._dispatch_from(lane, reason, len(formed.requests), settings))
        return decisions

    def _refuse_early(self, request: Request, now_us: int) -> Refusal:
        self._queue.remove(request)
        remaining_ms = ((request.deadline_us or 0) - now_us) / 1000
        detail = f"refused early: the {remaining_ms:.0f} ms before its deadline are not enough to execute it"
        return refusal(request, DEADLINE_EXCEEDED, "early", detail)

    def _dispatch_from(
        self, lane: Lane, reason: DispatchReason, size: int, settings: ModelSettings
    ) -> Dispatch:
        """Take the next batch of a lane, of at most `size` requests, and reserve capacity for it."""
        expired = frozenset(lane.expired)
        batch = self._queue.pop_batch(lane, size, settings)
        undated = frozenset(
            request for request in batch if request in expired or _outlives_deadline(request, settings)
        )
        self._capacity.reserve()
        return Dispatch(batch, reason, lane.name, undated)


def _preferred_size(lane: Lane, settings: ModelSettings) -> int:
    """The largest preferred size that a lane can fill; 0 if none."""
    return max((size for size in settings.preferred_batch_sizes if size <= lane.count), default=0)


def _target_us(settings: ModelSettings) -> int | None:
    """How long after its arrival a request without a deadline should be answered; None: at any time."""
    return None if settings.target_latency_ms is None else int(settings.target_latency_ms * 1000)


def _strict_deadline_us(request: Request, lane: Lane, settings: ModelSettings) -> int:
    """The deadline for which a request may be refused early: NEVER_US if it has only a target, or is served
    even after its deadline."""
    if request.deadline_us is None or request in lane.expired:
        return NEVER_US
    return NEVER_US if settings.delays_expired(request.priority) else request.deadline_us


def _outlives_deadline(request: Request, settings: ModelSettings) -> bool:
    """Whether a request is served even after its deadline (`expiration_action` is delay)."""
    return request.deadline_us is not None and settings.delays_expired(request.priority)
