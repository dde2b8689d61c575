"""Deadlines: at which moment to look at whom, and what to say of those who are past theirs.

One heap of alarms. Nobody takes an alarm back: one whose requests have moved on means nothing, and now and
then all such are thrown away.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages import Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import Decision, Expire, refusal
from carpool_batcher.core.lane import bytes_of
from carpool_batcher.core.queue import MAX_BATCH_BYTES, Queue

REQUEST_BYTES: Final = 1000  # what a request takes in memory beside its body


@dataclass(slots=True)
class Alarm:
    """At this time, look at these waiting requests, or at this batch in flight.

    One for all requests that arrived in one entry with one deadline, and one for a batch: so that a deadline
    costs a request next to nothing.
    """

    at_us: int
    requests: list[Request]
    batch_id: str = ""


class Deadlines:
    """Whom to look at, and when. Who waits and what is in flight is asked of those who know."""

    def __init__(self, waiting: Queue, capacity: Capacity) -> None:
        self._queue = waiting
        self._capacity = capacity
        self._heap: list[tuple[int, int, Alarm]] = []
        self._number = count()
        self._latest: Alarm | None = None  # of waiting requests: the next of the same entry joins it
        self._watched_bytes = 0  # of requests that alarms hold on to, at most

    def next_us(self) -> int | None:
        """When the next one rings; None if there is none."""
        return self._heap[0][0] if self._heap else None

    # --- whom to watch -------------------------------------------------------------------------------------

    def watch(self, request: Request, deadline_us: int, settings: ModelSettings, now_us: int) -> None:
        """Look at a request that waits when it must leave to be in time, then at its deadline."""
        at_us = deadline_us
        if settings.max_queue_delay_ms:
            at_us = max(now_us, self._must_leave_us(request.lane, deadline_us))
        self._watched_bytes += bytes_of(request) + REQUEST_BYTES
        latest = self._latest
        if latest is not None and latest.at_us == at_us and latest.requests[0].entry is request.entry:
            latest.requests.append(request)
        else:
            self._latest = Alarm(at_us, [request])
            self._set(self._latest)

    def watch_anew(self, settings: ModelSettings) -> None:
        """So far nobody was held back, and so nobody had to leave early to be in time. Now they have to."""
        self._heap = [one for one in self._heap if one[2].batch_id]
        heapq.heapify(self._heap)
        self._latest, self._watched_bytes = None, 0
        for lane in self._queue.lanes.values():
            for request in lane:
                if request.deadline_us is not None and request not in lane.late:
                    self.watch(request, request.deadline_us, settings, 0)

    def watch_batch(self, batch_id: str, due: Mapping[int, Request]) -> None:
        """Look at a batch in flight when the first deadline of these passes."""
        if due:
            first_us = min(request.deadline_us or 0 for request in due.values())
            self._set(Alarm(first_us, [], batch_id))

    def _must_leave_us(self, lane: str, deadline_us: int) -> int:
        return deadline_us - int(1.5 * self._capacity.ride_us(lane)) - 2000

    def _set(self, alarm: Alarm) -> None:
        heapq.heappush(self._heap, (alarm.at_us, next(self._number), alarm))
        waiting_bytes = self._queue.bytes + REQUEST_BYTES * self._queue.count
        if (
            len(self._heap) > 4 * (self._queue.count + len(self._capacity.in_flight)) + 1000
            or self._watched_bytes > 2 * waiting_bytes + MAX_BATCH_BYTES
        ):
            self._tidy()

    def _tidy(self) -> None:
        """Most alarms are for requests that have moved on: keep memory bounded, at O(1) amortised."""
        for _, _, alarm in self._heap:
            alarm.requests = [request for request in alarm.requests if request in self._queue]
        self._heap = [
            one for one in self._heap if one[2].requests or one[2].batch_id in self._capacity.in_flight
        ]
        heapq.heapify(self._heap)
        self._latest = None
        watched = [request for _, _, alarm in self._heap for request in alarm.requests]
        self._watched_bytes = sum(map(bytes_of, watched)) + REQUEST_BYTES * len(watched)

    # --- who is past it ------------------------------------------------------------------------------------

    def ring(self, now_us: int, settings: ModelSettings) -> list[Decision]:
        """Look at everybody whose time it is."""
        decisions: list[Decision] = []
        while self._heap and self._heap[0][0] <= now_us:
            alarm = heapq.heappop(self._heap)[2]
            if alarm is self._latest:
                self._latest = None
            if alarm.batch_id:
                decisions += self._look_at_batch(alarm.batch_id, now_us)
            for request in alarm.requests:
                if request in self._queue:
                    decisions += self._look_at(request, settings, now_us)
        return decisions

    def _look_at_batch(self, batch_id: str, now_us: int) -> list[Decision]:
        riding = self._capacity.in_flight.get(batch_id)
        if riding is None:
            return []
        past = [at for at, request in riding.due.items() if (request.deadline_us or 0) <= now_us]
        expired: list[Decision] = [Expire(batch_id, at, riding.due.pop(at)) for at in past]
        self.watch_batch(batch_id, riding.due)
        return expired

    def _look_at(self, request: Request, settings: ModelSettings, now_us: int) -> list[Decision]:
        deadline_us = request.deadline_us or 0
        lane = self._queue.lanes[request.lane]
        if deadline_us > now_us:
            lane.urgent.add(request)
            self._set(Alarm(deadline_us, [request]))
            return []
        if settings.delays_expired(request.priority):
            lane.put_behind(request)
            return []
        self._queue.remove(request)
        expiration_ms = (deadline_us - request.arrival_us) // 1000
        detail = f"expired: still waiting {expiration_ms} ms after its arrival"
        return [refusal(request, DEADLINE_EXCEEDED, "waiting", detail)]
