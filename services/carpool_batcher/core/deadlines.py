"""Deadlines: timers for requests that wait and for batches in flight, and what happens when one is due.

Timers are never cancelled. One whose requests no longer wait, or whose batch has settled, has no effect; such
timers are dropped from time to time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import Final, NamedTuple

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages import Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import Decision, Expire, refusal
from carpool_batcher.core.lane import bytes_of
from carpool_batcher.core.queue import MAX_BATCH_BYTES, Queue

REQUEST_BYTES: Final = 1000  # the memory of a request, without its body
TURNAROUND_LEAD_RATIO: Final = 1.5  # urgent: this many turnarounds (dispatch to settled) before the deadline,
LEAD_US_MIN: Final = 2000  # and this much more


class RequestTimer(NamedTuple):
    """Look at these requests. There is one timer for the requests of an entry with the same deadline, so that
    a deadline costs a request almost nothing."""

    at_us: int
    requests: list[Request]


class BatchTimer(NamedTuple):
    """Look at this batch in flight."""

    at_us: int
    batch_id: str


class Deadlines:
    """The timers of all requests with a deadline. Whether a request still waits is up to the Queue."""

    def __init__(self, queue: Queue, capacity: Capacity) -> None:
        self._queue = queue
        self._capacity = capacity
        self._timers: list[tuple[int, int, RequestTimer | BatchTimer]] = []  # a heap
        self._numbers = count()
        self._latest: RequestTimer | None = None  # the next request of the same entry may join it
        self._timer_bytes = 0  # of the requests in timers, whether or not they still wait; an upper bound

    def wake_at_us(self) -> int | None:
        """When the next timer is due; None if there is none."""
        return self._timers[0][0] if self._timers else None

    # --- setting timers ------------------------------------------------------------------------------------

    def watch(self, request: Request, deadline_us: int, settings: ModelSettings, now_us: int) -> None:
        """Set a timer for a waiting request: for its deadline, or, if batches are delayed, for when it is
        urgent."""
        at_us = deadline_us
        if settings.max_queue_delay_ms:
            at_us = max(now_us, self._urgent_at_us(request.lane, deadline_us))
        self._timer_bytes += bytes_of(request) + REQUEST_BYTES
        latest = self._latest
        if latest is not None and latest.at_us == at_us and latest.requests[0].entry is request.entry:
            latest.requests.append(request)
        else:
            self._latest = RequestTimer(at_us, [request])
            self._set(self._latest)

    def watch_again(self, settings: ModelSettings) -> None:
        """Set the timers of all waiting requests anew, because from now on batches are delayed."""
        self._timers = [item for item in self._timers if type(item[2]) is BatchTimer]
        heapq.heapify(self._timers)
        self._latest, self._timer_bytes = None, 0
        for lane in self._queue.lanes.values():
            for request in lane:
                if request.deadline_us is not None and request not in lane.expired:
                    self.watch(request, request.deadline_us, settings, 0)

    def watch_batch(self, batch_id: str, expiring: Mapping[int, Request]) -> None:
        """Set a timer for a batch in flight, at the earliest deadline of these requests."""
        if expiring:
            self._set(BatchTimer(min(request.deadline_us or 0 for request in expiring.values()), batch_id))

    def _urgent_at_us(self, lane: str, deadline_us: int) -> int:
        return deadline_us - int(TURNAROUND_LEAD_RATIO * self._capacity.turnaround_us(lane)) - LEAD_US_MIN

    def _set(self, timer: RequestTimer | BatchTimer) -> None:
        heapq.heappush(self._timers, (timer.at_us, next(self._numbers), timer))
        waiting_bytes = self._queue.bytes + REQUEST_BYTES * self._queue.count
        if (
            len(self._timers) > 4 * (self._queue.count + len(self._capacity.in_flight)) + 1000
            or self._timer_bytes > 2 * waiting_bytes + MAX_BATCH_BYTES
        ):
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Drop timers and requests that have no effect any more, to bound memory. O(1) amortised."""
        kept: list[tuple[int, int, RequestTimer | BatchTimer]] = []
        self._timer_bytes = 0
        for item in self._timers:
            timer = item[2]
            if type(timer) is RequestTimer:
                timer.requests[:] = [request for request in timer.requests if request in self._queue]
                self._timer_bytes += sum(bytes_of(request) + REQUEST_BYTES for request in timer.requests)
                if timer.requests:
                    kept.append(item)
            elif type(timer) is BatchTimer and timer.batch_id in self._capacity.in_flight:
                kept.append(item)
        heapq.heapify(kept)
        self._timers = kept
        self._latest = None

    # --- timers that are due -------------------------------------------------------------------------------

    def run_due(self, settings: ModelSettings, now_us: int) -> list[Decision]:
        """Handle the timers that are due by now."""
        decisions: list[Decision] = []
        while self._timers and self._timers[0][0] <= now_us:
            timer = heapq.heappop(self._timers)[2]
            if type(timer) is BatchTimer:
                decisions += self._check_batch(timer.batch_id, now_us)
            elif type(timer) is RequestTimer:
                if timer is self._latest:
                    self._latest = None
                for request in timer.requests:
                    if request in self._queue:
                        decisions += self._check_request(request, settings, now_us)
        return decisions

    def _check_batch(self, batch_id: str, now_us: int) -> list[Decision]:
        """Expire the requests of a batch in flight that are past their deadlines."""
        batch = self._capacity.in_flight.get(batch_id)
        if batch is None:
            return []
        past = [at for at, request in batch.expiring.items() if (request.deadline_us or 0) <= now_us]
        expired: list[Decision] = [Expire(batch_id, at, batch.expiring.pop(at)) for at in past]
        self.watch_batch(batch_id, batch.expiring)
        return expired

    def _check_request(self, request: Request, settings: ModelSettings, now_us: int) -> list[Decision]:
        """Mark a waiting request as urgent, or expire it if it is past its deadline."""
        deadline_us = request.deadline_us or 0
        lane = self._queue.lanes[request.lane]
        if deadline_us > now_us:
            lane.urgent.add(request)
            self._set(RequestTimer(deadline_us, [request]))
            return []
        if settings.delays_expired(request.priority):
            lane.move_expired(request)
            return []
        self._queue.remove(request)
        expiration_ms = (deadline_us - request.arrival_us) // 1000
        detail = f"expired: still waiting {expiration_ms} ms after its arrival"
        return [refusal(request, DEADLINE_EXCEEDED, "waiting", detail)]
