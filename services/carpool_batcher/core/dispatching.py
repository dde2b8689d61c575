"""When a batch leaves, why, and who rides: rules 1 to 3 at the top of `core.scheduler`.

Nothing is remembered here but what follows from the settings. Who waits is for `core.waiting` to say, where
there is room for `core.capacity`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from typing import Final

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL
from carpool.messages import Dispatch, DispatchReason, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.decisions import Decision, refusal
from carpool_batcher.core.deferred import Outlook, efficient_size, latest_start_us, plan
from carpool_batcher.core.lane import NEVER, Lane
from carpool_batcher.core.queue import Queue

LOOK_AHEAD: Final = 4  # batches: so many waiting requests are looked at before any is given up


class Dispatcher:
    """Which batches leave now, and when to ask again."""

    def __init__(self, waiting: Queue, capacity: Capacity, settings: ModelSettings) -> None:
        self._queue = waiting
        self._capacity = capacity
        self.custom: CustomPolicy | None = None  # a user's own, which says who may join a batch
        self.follow(settings)

    def follow(self, settings: ModelSettings) -> None:
        """These hold from now on."""
        self._settings = settings
        self._objective = _objective(settings)

    def due(self, now_us: int) -> list[Decision]:
        """The batches that leave now, those with the best claim first, and who is given up for them."""
        decisions: list[Decision] = []
        if not self._queue.count or not self._capacity.has_room():
            return decisions
        lanes = self._queue.lanes
        ready = [one for lane in lanes.values() if (one := self._ready(lane, now_us)) is not None]
        heapq.heapify(ready)
        while ready and self._capacity.has_room():
            _, _, name, reason = heapq.heappop(ready)
            if not self._may_leave(reason, now_us):
                continue
            lane = lanes[name]
            decisions += self._form(lane, reason, now_us)
            if (again := self._ready(lane, now_us)) is not None:
                heapq.heappush(ready, again)
        return decisions

    def next_us(self) -> int | None:
        """When a batch may leave by time alone; None: not before something happens."""
        room_at_us = self._capacity.room_at_us() if self._queue.count else None
        if room_at_us is None:
            return None
        lanes = self._queue.lanes.values()
        return max(room_at_us, min(self._leaves_at_us(lane)[0] for lane in lanes if lane.count))

    # --- whether, and why ----------------------------------------------------------------------------------

    def _may_leave(self, reason: DispatchReason, now_us: int) -> bool:
        """Whether there is room; a full batch may go ahead of a busy process, unless it could become late."""
        if reason == "full" and self._settings.policy != "deferred":
            return True
        room_at_us = self._capacity.room_at_us()
        return room_at_us is not None and room_at_us <= now_us

    def _ready(self, lane: Lane, now_us: int) -> tuple[int, int, str, DispatchReason] | None:
        """A lane of which a batch may leave, by rank: priority, arrival, name; and the reason."""
        if not lane.count:
            return None
        leaves_at_us, reason = self._leaves_at_us(lane)
        if now_us < leaves_at_us:
            return None
        priority, arrival_us = lane.head()
        return -priority, arrival_us, lane.name, reason

    def _leaves_at_us(self, lane: Lane) -> tuple[int, DispatchReason]:
        """When a batch of a lane leaves, if there is room, and why; 0: it is ready. Somebody must wait."""
        settings = self._settings
        if self._queue.fills_batch(lane, settings):
            return 0, "full"
        if settings.preferred_batch_sizes and self._preferred(lane):
            return 0, "preferred"
        if lane.urgent:
            return 0, "deadline"
        delay_ends_us = lane.head()[1] + int(settings.max_queue_delay_ms * 1000)
        if not self._defers(lane):
            if settings.max_queue_delay_ms:
                return delay_ends_us, "delay"
            return max(delay_ends_us, self._capacity.evenly_us()), "idle"
        outlook = self._outlook(lane)
        if lane.count >= efficient_size(outlook.latency, settings.max_batch_size):
            return 0, "efficient"
        start_us = latest_start_us(outlook, lane.earliest_us(self._objective), lane.count)
        if settings.max_queue_delay_ms and delay_ends_us < start_us:
            return delay_ends_us, "delay"
        return start_us, "deadline"

    def _preferred(self, lane: Lane) -> int:
        """The largest preferred size that a lane can fill; 0 if none."""
        return max((size for size in self._settings.preferred_batch_sizes if size <= lane.count), default=0)

    def _defers(self, lane: Lane) -> bool:
        """Whether the policy is deferred, and has something to go by."""
        if self._settings.policy != "deferred" or not self._capacity.latency.known:
            return False
        return lane.earliest_us(self._objective) != NEVER

    # --- who rides -----------------------------------------------------------------------------------------

    def _form(self, lane: Lane, reason: DispatchReason, now_us: int) -> list[Decision]:
        """A batch of a lane that is ready; under `deferred` those are given up first that cannot be met, and
        the lane is to be looked at anew: the others may have time left, and turns have changed."""
        size = self._preferred(lane) if reason == "preferred" else self._settings.max_batch_size
        if self.custom is not None:
            return self._form_custom(lane, reason, self.custom)
        if not self._defers(lane):
            return [self._dispatch(lane, reason, size)]
        outlook = self._outlook(lane)
        most = min(lane.count, self._settings.max_batch_size)
        if outlook.done_us(now_us, most) <= lane.earliest_us(self._objective):
            return [self._dispatch(lane, reason, size)]  # nobody could be late, and so nobody is looked at
        in_order = list(islice(lane.in_order(self._settings.tenant_weights), LOOK_AHEAD * size))
        outlook = outlook._replace(frees_us=self._capacity.frees_us(now_us))
        planned = plan(outlook, [self._must_be_done_us(lane, one) for one in in_order], now_us)
        if not planned.leave and self._capacity.begin_trial(lane.name, now_us):
            return [self._dispatch(lane, reason, size)]
        if planned.given_up:
            return [self._give_up(in_order[at], now_us) for at in planned.given_up]
        return [self._dispatch(lane, reason, min(size, planned.leave))]

    def _outlook(self, lane: Lane) -> Outlook:
        """What is known of a lane's batches, whenever a process is free."""
        capacity = self._capacity
        return Outlook(capacity.latency_of(lane.name), self._settings.max_batch_size, capacity.trip_us, ())

    def _form_custom(self, lane: Lane, reason: DispatchReason, custom: CustomPolicy) -> list[Decision]:
        """A batch of those that a user's policy lets join it."""
        formed = custom.form(self._queue.fitting(lane, self._settings))
        decisions: list[Decision] = []
        for request, said in formed.failed:
            self._queue.remove(request)
            decisions.append(refusal(request, INTERNAL, "policy", said))
        if formed.leave:
            decisions.append(self._dispatch(lane, reason, len(formed.leave)))
        return decisions

    def _must_be_done_us(self, lane: Lane, request: Request) -> int:
        """A request's deadline. Nobody is given up for what it only aims at, or who is to be served late."""
        if request.deadline_us is None or request in lane.late:
            return NEVER
        if self._settings.delays_expired(request.priority):
            return NEVER
        return request.deadline_us

    def _give_up(self, request: Request, now_us: int) -> Refusal:
        self._queue.remove(request)
        left_ms = ((request.deadline_us or 0) - now_us) / 1000
        detail = f"expired: it could not have been computed in the {left_ms:.0f} ms that were left"
        return refusal(request, DEADLINE_EXCEEDED, "early", detail)

    def _outlives_its_deadline(self, request: Request) -> bool:
        """Whether a request is to be served even if it expires (`expiration_action` is delay)."""
        return request.deadline_us is not None and self._settings.delays_expired(request.priority)

    def _dispatch(self, lane: Lane, reason: DispatchReason, size: int) -> Dispatch:
        late = frozenset(lane.late)
        taken = self._queue.take(lane, size, self._settings)
        undated = frozenset(one for one in taken if one in late or self._outlives_its_deadline(one))
        self._capacity.reserve()
        return Dispatch(taken, reason, lane.name, undated)


def _objective(settings: ModelSettings) -> Callable[[Request], int]:
    """By when a request should be done: its deadline, or what the model aims at."""
    target_us = None if settings.target_latency_ms is None else int(settings.target_latency_ms * 1000)

    def objective(request: Request) -> int:
        if request.deadline_us is not None:
            return request.deadline_us
        return NEVER if target_us is None else request.arrival_us + target_us

    return objective
