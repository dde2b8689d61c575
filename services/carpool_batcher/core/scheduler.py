"""When does which batch leave? The rules, and nothing but the rules: time is an argument, Redis is elsewhere.

1. A batch leaves only when a worker has room: when a model process is idle, or just before a busy one will be
   (`core.fleet`); and at once, one ahead of each busy process, if it is full, since waiting cannot make it
   better. What is held back makes later batches fuller, priorities effective and deadlines keepable.
2. A batch is ready, in this order of reasons:
     full      it reached `max_batch_size` or `max_batch_cost`
     preferred it reached one of `preferred_batch_sizes`, and takes the largest that it can fill
     deadline  a request in its lane would miss its deadline if it waited longer
     efficient (`deferred` only) it is large enough for the model to be nearly as fast as it gets
     delay     its oldest request waited `max_queue_delay_ms`
     idle      a worker is free, or about to be, and the model does not want to wait (`max_queue_delay_ms` 0)
   Under the policy `deferred` the last of these does not hold: a batch leaves as late as deadlines allow
   (`core.deferred`), and who cannot be met is refused before anything is computed.
3. Among ready lanes the one with the highest priority goes first, then the one whose request waited longest.
   Within a batch: higher priority first, tenants in fair turns, then arrival. Lanes never mix, and never
   close each other's batches.
4. A request whose deadline passes is answered at that moment, wherever it is: waiting, or in flight. If its
   `expiration_action` is delay it is never answered so: it goes behind all others if it still waits, and
   from then on nothing hurries for it; once in flight it has no deadline.
5. What would wait beyond `max_queue_size` (the model's, or its priority's) or `max_queue_bytes` is refused on
   arrival: the newest, never the oldest.

A request is in exactly one place:

    offered --> waiting --> in flight --> settled
       |           |            '-------> expired (answered; its batch goes on without it)
       '-> refused '-> refused: expired, withdrawn, or gone from Redis
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Final, Literal, NamedTuple

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.messages import PRIORITY_LEVELS, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.deferred import Outlook, efficient_size, latest_start_us, plan
from carpool_batcher.core.fleet import Fleet, Riding
from carpool_batcher.core.lane import NEVER, Lane, bytes_of

MAX_BATCH_BYTES: Final = 64 * 1024 * 1024  # Redis takes 512 MiB in one string, and copies it a few times
LOOK_AHEAD: Final = 4  # batches: so many waiting requests are looked at before any is given up
REQUEST_BYTES: Final = 1000  # what a request takes in memory beside its body


Reason = Literal["full", "preferred", "deadline", "efficient", "delay", "idle"]


class Dispatch(NamedTuple):
    """Send these together."""

    requests: list[Request]
    reason: Reason
    lane: str


class Expire(NamedTuple):
    """Answer this request, which is at `position` of a batch in flight, DEADLINE_EXCEEDED."""

    batch_id: str
    position: int
    request: Request


Decision = Dispatch | Refusal | Expire


@dataclass(slots=True)
class Alarm:
    """At this time, look at these waiting requests, or at this batch in flight.

    One for all requests that arrived in one entry with one deadline, and one for a batch: so that a deadline
    costs a request next to nothing.
    """

    at_us: int
    requests: list[Request]
    batch_id: str = ""


class Scheduler:
    """The batching of one model. Tell it what happens; `poll` says what to do; `wake_at` says when to ask."""

    def __init__(self, settings: ModelSettings, workers: int = 0) -> None:
        self._settings = settings
        self.fleet = Fleet(workers)
        self.custom: CustomPolicy | None = None  # a user's own, which says who may join a batch
        self.waiting = 0
        self.waiting_bytes = 0
        self.held = 0  # results that are done, and held until those before them are
        self._by_priority = [0] * PRIORITY_LEVELS
        self._lanes: dict[str, Lane] = {"": Lane("")}
        self._alarms: list[tuple[int, int, Alarm]] = []
        self._alarm_number = count()
        self._latest_alarm: Alarm | None = None
        self._objective = _objective(settings)
        self._efficient = (0, 0, 1)  # what is known of the latency, max_batch_size, and so the efficient size
        self._watched_bytes = 0  # of requests that alarms hold on to, at most

    # --- what happens --------------------------------------------------------------------------------------

    @property
    def settings(self) -> ModelSettings:
        """The model's settings. They may change at any time, and hold for whoever waits."""
        return self._settings

    @settings.setter
    def settings(self, settings: ModelSettings) -> None:
        waited = self._settings.max_queue_delay_ms
        self._settings = settings
        self._objective = _objective(settings)
        if settings.max_queue_delay_ms and not waited:
            self._watch_anew()

    @property
    def workers(self) -> int:
        """How many model processes live."""
        return self.fleet.processes

    @workers.setter
    def workers(self, processes: int) -> None:
        self.fleet.resize(processes)

    def offer(self, request: Request, now_us: int) -> Refusal | None:
        """A request arrived. Returns a Refusal if it may not wait."""
        settings = self._settings
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            detail = f"cost: {request.cost} is over this model's max_batch_cost {settings.max_batch_cost}"
            return refusal(request, INVALID_ARGUMENT, "cost", detail)
        if self.waiting + self.held >= settings.max_queue_size:
            who = f"{self.waiting} requests wait"
            if self.held:
                who += f", {self.held} results are held until those before them are done"
            detail = f"the queue is full: {who} (max_queue_size); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        if settings.priority_policies and self._level_is_full(request.priority):
            detail = f"the queue is full for priority {request.priority} (priority_policies); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_size", detail)
        size_bytes = bytes_of(request)
        if self.waiting_bytes + size_bytes > settings.max_queue_bytes:
            detail = f"the queue is full: {self.waiting_bytes} bytes wait (max_queue_bytes); try again later"
            return refusal(request, RESOURCE_EXHAUSTED, "queue_bytes", detail)
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = Lane(request.lane)
        lane.add(request)
        self.waiting += 1
        self._by_priority[request.priority] += 1
        self.waiting_bytes += size_bytes
        if request.deadline_us is not None:
            self._watch(request, request.deadline_us, now_us)
        return None

    def withdraw(self, correlation_ids: frozenset[str]) -> list[Refusal]:
        """A producer takes back what waits. What is in flight rides on."""
        named = [
            request
            for lane in self._lanes.values()
            for request in lane
            if request.correlation_id in correlation_ids
        ]
        self.forget(named)
        return [refusal(request, CANCELLED, "withdrawn", "withdrawn by its producer") for request in named]

    def forget(self, requests: Iterable[Request]) -> None:
        """Waiting requests are gone from Redis: withdrawn by XDEL, or taken by another batcher."""
        for request in requests:
            lane = self._lanes.get(request.lane)
            if lane is not None and request in lane:
                self._remove(lane, request)

    def departed(self, batch_id: str | None, requests: Sequence[Request], now_us: int) -> None:
        """A Dispatch was carried out, and these ride; `batch_id` None: nobody was left to ride."""
        self.fleet.departed()
        if batch_id is not None:
            self.ride(batch_id, requests, now_us)

    def ride(self, batch_id: str, requests: Sequence[Request], dispatched_us: int) -> None:
        """A batch is in flight: dispatched now, or found there by a batcher that has just taken over."""
        due = {at: request for at, request in enumerate(requests) if request.deadline_us is not None}
        lane = requests[0].lane if requests else ""
        arrivals_us = [request.arrival_us for request in requests]
        self.fleet.dispatched(batch_id, Riding(dispatched_us, len(requests), lane, due, arrivals_us))
        self._watch_batch(batch_id, due)

    def settle(self, batch_id: str, now_us: int, compute_us: int = 0) -> None:
        """A batch was committed after so long a computation, or is gone (0): its room returns."""
        self.fleet.settled(batch_id, compute_us, now_us)

    def in_flight(self) -> dict[str, Riding]:
        """Batches in flight by ID, in the order in which they were dispatched."""
        return self.fleet.in_flight

    # --- what there is to see ------------------------------------------------------------------------------

    def oldest_arrival_us(self) -> int | None:
        """When the oldest waiting request arrived; None if none waits. O(lanes)."""
        return min((lane.head()[1] for lane in self._lanes.values() if lane.count), default=None)

    def fill_percent(self, requests: Sequence[Request]) -> int:
        """How full a batch of these is, by number or by cost, whichever is nearer to its limit."""
        settings = self._settings
        percent = 100 * len(requests) // settings.max_batch_size
        if settings.max_batch_cost is not None:
            percent = max(percent, 100 * sum(one.cost for one in requests) // settings.max_batch_cost)
        return min(percent, 100)

    # --- what to do ----------------------------------------------------------------------------------------

    def poll(self, now_us: int) -> list[Decision]:
        """Everything that is due by now. A Dispatch must be answered by `departed`."""
        decisions: list[Decision] = self._ring(now_us) if self._alarms else []
        fleet = self.fleet
        fleet.now_us = now_us
        if self.waiting and fleet.has_room():
            ready = [one for lane in self._lanes.values() if (one := self._ready(lane, now_us)) is not None]
            heapq.heapify(ready)
            while ready and fleet.has_room():
                _, _, name, reason = heapq.heappop(ready)
                if not self._may_leave(reason, now_us):
                    continue
                lane = self._lanes[name]
                decisions += self._form(lane, reason, now_us)
                if (again := self._ready(lane, now_us)) is not None:
                    heapq.heappush(ready, again)
        return decisions

    def wake_at(self) -> int | None:
        """The next moment (us) at which `poll` could decide something by time alone, or None."""
        moments = [self._alarms[0][0]] if self._alarms else []
        room_at_us = self.fleet.room_at_us() if self.waiting else None
        if room_at_us is not None:
            moments += [
                max(room_at_us, self._leaves_at_us(lane)[0]) for lane in self._lanes.values() if lane.count
            ]
        return min(moments, default=None)

    # --- inside --------------------------------------------------------------------------------------------

    def _may_leave(self, reason: Reason, now_us: int) -> bool:
        """Whether there is room; a full batch may go ahead of a busy process, unless it could become late."""
        if reason == "full" and self._settings.policy != "deferred":
            return True
        room_at_us = self.fleet.room_at_us()
        return room_at_us is not None and room_at_us <= now_us

    def _ready(self, lane: Lane, now_us: int) -> tuple[int, int, str, Reason] | None:
        """A lane of which a batch may leave, by rank: priority, arrival, name; and the reason."""
        reason = self._reason(lane, now_us)
        if reason is None:
            return None
        priority, arrival_us = lane.head()
        return -priority, arrival_us, lane.name, reason

    def _reason(self, lane: Lane, now_us: int) -> Reason | None:
        if not lane.count:
            return None
        leaves_at_us, reason = self._leaves_at_us(lane)
        return reason if now_us >= leaves_at_us else None

    def _leaves_at_us(self, lane: Lane) -> tuple[int, Reason]:
        """When a batch of a lane leaves, if there is room, and why; 0: it is ready. Somebody must wait."""
        settings = self._settings
        if lane.count >= settings.max_batch_size or lane.bytes >= MAX_BATCH_BYTES:
            return 0, "full"
        if settings.max_batch_cost is not None and lane.cost >= settings.max_batch_cost:
            return 0, "full"
        if settings.preferred_batch_sizes and self._preferred(lane):
            return 0, "preferred"
        if lane.urgent:
            return 0, "deadline"
        delay_ends_us = lane.head()[1] + int(settings.max_queue_delay_ms * 1000)
        if not self._defers(lane):
            return delay_ends_us, "delay" if settings.max_queue_delay_ms else "idle"
        if lane.count >= self._efficient_size():
            return 0, "efficient"
        outlook = Outlook(self.fleet.latency, settings.max_batch_size, self.fleet.trip_us, ())
        start_us = latest_start_us(outlook, lane.earliest_us(self._objective), lane.count)
        if settings.max_queue_delay_ms and delay_ends_us < start_us:
            return delay_ends_us, "delay"
        return start_us, "deadline"

    def _defers(self, lane: Lane) -> bool:
        """Whether the policy is deferred, and has something to go by."""
        if self._settings.policy != "deferred" or not self.fleet.latency.known:
            return False
        return lane.earliest_us(self._objective) != NEVER

    def _outlook(self, now_us: int) -> Outlook:
        fleet = self.fleet
        return Outlook(fleet.latency, self._settings.max_batch_size, fleet.trip_us, fleet.frees_us(now_us))

    def _efficient_size(self) -> int:
        latency, max_size = self.fleet.latency, self._settings.max_batch_size
        if self._efficient[:2] != (latency.version, max_size):
            self._efficient = latency.version, max_size, efficient_size(latency, max_size)
        return self._efficient[2]

    def _preferred(self, lane: Lane) -> int:
        """The largest preferred size that a lane can fill; 0 if none."""
        return max((size for size in self._settings.preferred_batch_sizes if size <= lane.count), default=0)

    def _level_is_full(self, priority: int) -> bool:
        policy = self._settings.priority_policies.get(priority)
        limit = None if policy is None else policy.max_queue_size
        return limit is not None and self._by_priority[priority] >= limit

    def _form(self, lane: Lane, reason: Reason, now_us: int) -> list[Decision]:
        """A batch of a lane that is ready; under `deferred` those are given up first that cannot be met, and
        the lane is to be looked at anew: the others may have time left, and turns have changed."""
        size = self._preferred(lane) if reason == "preferred" else self._settings.max_batch_size
        if self.custom is not None:
            return self._form_custom(lane, reason, self.custom)
        if not self._defers(lane):
            return [self._dispatch(lane, reason, size)]
        in_order = list(islice(lane.in_order(self._settings.tenant_weights), LOOK_AHEAD * size))
        planned = plan(self._outlook(now_us), [self._must_be_done_us(one) for one in in_order], now_us)
        if planned.given_up:
            return [self._give_up(lane, in_order[at], now_us) for at in planned.given_up]
        return [self._dispatch(lane, reason, min(size, planned.leave))]

    def _form_custom(self, lane: Lane, reason: Reason, custom: CustomPolicy) -> list[Decision]:
        """A batch of those that a user's policy lets join it."""
        settings = self._settings
        in_turn = lane.fitting(
            settings.max_batch_size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights
        )
        formed = custom.form(in_turn)
        decisions: list[Decision] = []
        for request, said in formed.failed:
            self._remove(lane, request)
            decisions.append(refusal(request, INTERNAL, "policy", said))
        if formed.leave:
            decisions.append(self._dispatch(lane, reason, len(formed.leave)))
        return decisions

    def _must_be_done_us(self, request: Request) -> int:
        """A request's deadline. What it only aims at is no reason to give it up."""
        if request.deadline_us is None or self._settings.delays_expired(request.priority):
            return NEVER
        return request.deadline_us

    def _give_up(self, lane: Lane, request: Request, now_us: int) -> Refusal:
        self._remove(lane, request)
        left_ms = ((request.deadline_us or 0) - now_us) / 1000
        detail = f"expired: it could not have been computed in the {left_ms:.0f} ms that were left"
        return refusal(request, DEADLINE_EXCEEDED, "early", detail)

    def _dispatch(self, lane: Lane, reason: Reason, size: int) -> Dispatch:
        settings = self._settings
        held_bytes, late = lane.bytes, frozenset(lane.late)
        taken = lane.take(size, settings.max_batch_cost, MAX_BATCH_BYTES, settings.tenant_weights)
        self.waiting -= len(taken)
        for request in taken:
            self._by_priority[request.priority] -= 1
            if request in late or (
                request.deadline_us is not None and settings.delays_expired(request.priority)
            ):
                request.deadline_us = None  # neither a batcher nor a worker is to answer it by the clock
        self.waiting_bytes -= held_bytes - lane.bytes
        self.fleet.departing()
        self._close_if_empty(lane)
        return Dispatch(taken, reason, lane.name)

    def _remove(self, lane: Lane, request: Request) -> None:
        lane.remove(request)
        self.waiting -= 1
        self._by_priority[request.priority] -= 1
        self.waiting_bytes -= bytes_of(request)
        self._close_if_empty(lane)

    def _close_if_empty(self, lane: Lane) -> None:
        """Names of lanes come from producers: an empty one must not stay, but for the one that all know."""
        if not lane.count and lane.name:
            del self._lanes[lane.name]

    # --- deadlines: one heap of alarms; one whose requests have moved on means nothing ----------------------

    def _watch(self, request: Request, deadline_us: int, now_us: int) -> None:
        """Look at a waiting request when it must leave to be in time, then at its deadline."""
        at_us = deadline_us
        if self._settings.max_queue_delay_ms:
            at_us = max(now_us, self._must_leave_us(deadline_us))
        self._watched_bytes += bytes_of(request) + REQUEST_BYTES
        latest = self._latest_alarm
        if latest is not None and latest.at_us == at_us and latest.requests[0].entry is request.entry:
            latest.requests.append(request)
        else:
            self._latest_alarm = Alarm(at_us, [request])
            self._set(self._latest_alarm)

    def _watch_anew(self) -> None:
        """So far nobody was held back, and so nobody had to leave early to be in time. Now they have to."""
        self._alarms = [one for one in self._alarms if one[2].batch_id]
        heapq.heapify(self._alarms)
        self._latest_alarm, self._watched_bytes = None, 0
        for lane in self._lanes.values():
            for request in lane:
                if request.deadline_us is not None and request not in lane.late:
                    self._watch(request, request.deadline_us, 0)

    def _must_leave_us(self, deadline_us: int) -> int:
        return deadline_us - int(1.5 * self.fleet.ride_us()) - 2000

    def _watch_batch(self, batch_id: str, due: dict[int, Request]) -> None:
        if due:
            first_us = min(request.deadline_us or 0 for request in due.values())
            self._set(Alarm(first_us, [], batch_id))

    def _set(self, alarm: Alarm) -> None:
        heapq.heappush(self._alarms, (alarm.at_us, next(self._alarm_number), alarm))
        waiting_bytes = self.waiting_bytes + REQUEST_BYTES * self.waiting
        if (
            len(self._alarms) > 4 * (self.waiting + len(self.fleet.in_flight)) + 1000
            or self._watched_bytes > 2 * waiting_bytes + MAX_BATCH_BYTES
        ):
            self._tidy()

    def _tidy(self) -> None:
        """Most alarms are for requests that have moved on: keep memory bounded, at O(1) amortised."""
        for _, _, alarm in self._alarms:
            alarm.requests = [request for request in alarm.requests if self._waits(request)]
        self._alarms = [
            one for one in self._alarms if one[2].requests or one[2].batch_id in self.fleet.in_flight
        ]
        heapq.heapify(self._alarms)
        self._latest_alarm = None
        watched = [request for _, _, alarm in self._alarms for request in alarm.requests]
        self._watched_bytes = sum(map(bytes_of, watched)) + REQUEST_BYTES * len(watched)

    def _waits(self, request: Request) -> bool:
        lane = self._lanes.get(request.lane)
        return lane is not None and request in lane

    def _ring(self, now_us: int) -> list[Decision]:
        decisions: list[Decision] = []
        while self._alarms and self._alarms[0][0] <= now_us:
            alarm = heapq.heappop(self._alarms)[2]
            if alarm is self._latest_alarm:
                self._latest_alarm = None
            if alarm.batch_id:
                decisions += self._expire_riding(alarm.batch_id, now_us)
            for request in alarm.requests:
                if self._waits(request):
                    decisions += self._expire_waiting(request, now_us)
        return decisions

    def _expire_riding(self, batch_id: str, now_us: int) -> list[Decision]:
        riding = self.fleet.in_flight.get(batch_id)
        if riding is None:
            return []
        past = [at for at, request in riding.due.items() if (request.deadline_us or 0) <= now_us]
        expired: list[Decision] = [Expire(batch_id, at, riding.due.pop(at)) for at in past]
        self._watch_batch(batch_id, riding.due)
        return expired

    def _expire_waiting(self, request: Request, now_us: int) -> list[Decision]:
        deadline_us = request.deadline_us or 0
        lane = self._lanes[request.lane]
        if deadline_us <= now_us and self._settings.delays_expired(request.priority):
            lane.put_behind(request)
            return []
        if deadline_us <= now_us:
            self._remove(lane, request)
            expiration_ms = (deadline_us - request.arrival_us) // 1000
            detail = f"expired: still waiting {expiration_ms} ms after its arrival"
            return [refusal(request, DEADLINE_EXCEEDED, "waiting", detail)]
        lane.urgent.add(request)
        self._set(Alarm(deadline_us, [request]))
        return []


def _objective(settings: ModelSettings) -> Callable[[Request], int]:
    """By when a request should be done: its deadline, or what the model aims at."""
    target_us = None if settings.target_latency_ms is None else int(settings.target_latency_ms * 1000)

    def objective(request: Request) -> int:
        if request.deadline_us is not None:
            return request.deadline_us
        return NEVER if target_us is None else request.arrival_us + target_us

    return objective


def refusal(request: Request, status: str, reason: str, detail: str) -> Refusal:
    """The answer to a request that will not ride."""
    return Refusal(
        request.entry,
        request.correlation_id,
        request.reply_to,
        request.content_type,
        status,
        reason,
        detail,
        request,
    )
