"""When does which batch leave? The rules, and nothing but the rules: time is an argument, Redis is elsewhere.

1. A batch leaves only when a worker has room: one batch for each model process, and one more for a busy one
   if that batch is full already, since waiting cannot make it better. What is held back makes later batches
   fuller, priorities effective and deadlines keepable. Room returns when a batch settles.
2. A batch is ready, in this order of reasons:
     full      it reached `max_batch_size` or `max_batch_cost`
     deadline  a request in its lane would miss its deadline if it waited longer
     delay     its oldest request waited `max_queue_delay_ms`
     idle      a worker is free, and the model does not want to wait (`max_queue_delay_ms` 0)
3. Among ready lanes the one with the highest priority goes first, then the one whose request waited longest.
   Within a batch: higher priority first, then arrival. Lanes never mix, and never close each other's batches.
4. A request whose deadline passes is answered at that moment, wherever it is: waiting, or in flight.
5. What would wait beyond `max_queue_size` or `max_queue_bytes` is refused on arrival: the newest, never the
   oldest.

A request is in exactly one place:

    offered --> waiting --> in flight --> settled
       |           |            '-------> expired (answered; its batch goes on without it)
       '-> refused '-> refused: expired, withdrawn, or gone from Redis
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.messages import ModelSettings, Refusal, Request
from carpool_batcher.core.lane import Lane, bytes_of

MAX_BATCH_BYTES: Final = 64 * 1024 * 1024  # Redis takes 512 MiB in one string, and copies it a few times
BATCHES_AHEAD: Final = 2  # for each model process: one that it executes, one that it has at hand
REQUEST_BYTES: Final = 1000  # what a request takes in memory beside its body


class Dispatch(NamedTuple):
    """Send these together."""

    requests: list[Request]
    reason: str
    lane: str


class Expire(NamedTuple):
    """Answer this request, which is at `position` of a batch in flight, DEADLINE_EXCEEDED."""

    batch_id: str
    position: int
    request: Request


Decision = Dispatch | Refusal | Expire


class Riding(NamedTuple):
    """A batch in flight, as far as it matters here. `due`: those with a deadline, by position."""

    dispatched_us: int
    size: int
    due: dict[int, Request]


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
        self.workers = workers
        self.waiting = 0
        self.waiting_bytes = 0
        self._lanes: dict[str, Lane] = {"": Lane("")}
        self._departing = 0  # batches decided on, whose IDs are not known yet
        self._in_flight: dict[str, Riding] = {}
        self._alarms: list[tuple[int, int, Alarm]] = []
        self._alarm_number = count()
        self._latest_alarm: Alarm | None = None
        self._watched_bytes = 0  # of requests that alarms hold on to, at most
        self._ride_us = 0.0  # how long a batch takes from dispatch to settled, of late

    # --- what happens --------------------------------------------------------------------------------------

    @property
    def settings(self) -> ModelSettings:
        """The model's settings. They may change at any time, and hold for whoever waits."""
        return self._settings

    @settings.setter
    def settings(self, settings: ModelSettings) -> None:
        waited = self._settings.max_queue_delay_ms
        self._settings = settings
        if settings.max_queue_delay_ms and not waited:
            self._watch_anew()

    def offer(self, request: Request, now_us: int) -> Refusal | None:
        """A request arrived. Returns a Refusal if it may not wait."""
        settings = self._settings
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            detail = f"cost: {request.cost} is over this model's max_batch_cost {settings.max_batch_cost}"
            return refusal(request, INVALID_ARGUMENT, "cost", detail)
        if self.waiting >= settings.max_queue_size:
            detail = f"the queue is full: {self.waiting} requests wait (max_queue_size); try again later"
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
        self._departing -= 1
        if batch_id is not None:
            self.ride(batch_id, requests, now_us)

    def ride(self, batch_id: str, requests: Sequence[Request], dispatched_us: int) -> None:
        """A batch is in flight: dispatched now, or found there by a batcher that has just taken over."""
        due = {at: request for at, request in enumerate(requests) if request.deadline_us is not None}
        self._in_flight[batch_id] = Riding(dispatched_us, len(requests), due)
        self._watch_batch(batch_id, due)

    def settle(self, batch_id: str, now_us: int) -> None:
        """A batch was committed, or is gone: its room returns."""
        riding = self._in_flight.pop(batch_id, None)
        if riding is None:
            return
        took_us = now_us - riding.dispatched_us
        self._ride_us = max(took_us, 0.9 * self._ride_us + 0.1 * took_us)

    def in_flight(self) -> dict[str, Riding]:
        """Batches in flight by ID, in the order in which they were dispatched."""
        return self._in_flight

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
        if self.waiting and self._room(BATCHES_AHEAD) > 0:
            ready = [one for lane in self._lanes.values() if (one := self._ready(lane, now_us)) is not None]
            heapq.heapify(ready)
            while ready and self._room(BATCHES_AHEAD) > 0:
                _, _, name, reason = heapq.heappop(ready)
                if reason != "full" and self._room(1) <= 0:
                    continue
                lane = self._lanes[name]
                decisions.append(self._dispatch(lane, reason))
                if (again := self._ready(lane, now_us)) is not None:
                    heapq.heappush(ready, again)
        return decisions

    def wake_at(self) -> int | None:
        """The next moment (us) at which `poll` could decide something by time alone, or None."""
        moments = [self._alarms[0][0]] if self._alarms else []
        if self.waiting and self._room(1) > 0:
            moments += [self._delay_ends_us(lane) for lane in self._lanes.values() if lane.count]
        return min(moments, default=None)

    # --- inside --------------------------------------------------------------------------------------------

    def _room(self, batches: int) -> int:
        """How many more batches may be in flight, with so many for each model process."""
        return batches * self.workers - len(self._in_flight) - self._departing

    def _ready(self, lane: Lane, now_us: int) -> tuple[int, int, str, str] | None:
        """A lane of which a batch may leave, by rank: priority, arrival, name; and the reason."""
        reason = self._reason(lane, now_us)
        if reason is None:
            return None
        priority, arrival_us = lane.head()
        return -priority, arrival_us, lane.name, reason

    def _reason(self, lane: Lane, now_us: int) -> str | None:
        settings = self._settings
        if lane.count >= settings.max_batch_size or lane.bytes >= MAX_BATCH_BYTES:
            return "full"
        if settings.max_batch_cost is not None and lane.cost >= settings.max_batch_cost:
            return "full"
        if not lane.count:
            return None
        if lane.urgent:
            return "deadline"
        if now_us >= self._delay_ends_us(lane):
            return "delay" if settings.max_queue_delay_ms else "idle"
        return None

    def _delay_ends_us(self, lane: Lane) -> int:
        return lane.head()[1] + int(self._settings.max_queue_delay_ms * 1000)

    def _dispatch(self, lane: Lane, reason: str) -> Dispatch:
        settings = self._settings
        held_bytes = lane.bytes
        taken = lane.take(settings.max_batch_size, settings.max_batch_cost, MAX_BATCH_BYTES)
        self.waiting -= len(taken)
        self.waiting_bytes -= held_bytes - lane.bytes
        self._departing += 1
        self._close_if_empty(lane)
        return Dispatch(taken, reason, lane.name)

    def _remove(self, lane: Lane, request: Request) -> None:
        lane.remove(request)
        self.waiting -= 1
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
                if request.deadline_us is not None:
                    self._watch(request, request.deadline_us, 0)

    def _must_leave_us(self, deadline_us: int) -> int:
        return deadline_us - int(1.5 * self._ride_us) - 2000

    def _watch_batch(self, batch_id: str, due: dict[int, Request]) -> None:
        if due:
            first_us = min(request.deadline_us or 0 for request in due.values())
            self._set(Alarm(first_us, [], batch_id))

    def _set(self, alarm: Alarm) -> None:
        heapq.heappush(self._alarms, (alarm.at_us, next(self._alarm_number), alarm))
        waiting_bytes = self.waiting_bytes + REQUEST_BYTES * self.waiting
        if (
            len(self._alarms) > 4 * (self.waiting + len(self._in_flight)) + 1000
            or self._watched_bytes > 2 * waiting_bytes + MAX_BATCH_BYTES
        ):
            self._tidy()

    def _tidy(self) -> None:
        """Most alarms are for requests that have moved on: keep memory bounded, at O(1) amortised."""
        for _, _, alarm in self._alarms:
            alarm.requests = [request for request in alarm.requests if self._waits(request)]
        self._alarms = [one for one in self._alarms if one[2].requests or one[2].batch_id in self._in_flight]
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
        riding = self._in_flight.get(batch_id)
        if riding is None:
            return []
        past = [at for at, request in riding.due.items() if (request.deadline_us or 0) <= now_us]
        expired: list[Decision] = [Expire(batch_id, at, riding.due.pop(at)) for at in past]
        self._watch_batch(batch_id, riding.due)
        return expired

    def _expire_waiting(self, request: Request, now_us: int) -> list[Decision]:
        deadline_us = request.deadline_us or 0
        lane = self._lanes[request.lane]
        if deadline_us <= now_us:
            self._remove(lane, request)
            expiration_ms = (deadline_us - request.arrival_us) // 1000
            detail = f"expired: still waiting {expiration_ms} ms after its arrival"
            return [refusal(request, DEADLINE_EXCEEDED, "waiting", detail)]
        lane.urgent.add(request)
        self._set(Alarm(deadline_us, [request]))
        return []


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
