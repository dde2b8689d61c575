"""When a batch of a lane is ready, when there is capacity for it, and which requests can be in time.

All of it is computed from single requests, each time anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool_batcher.core.learned.transit import magnitude
from carpool_batcher.core.waiting.lane import NEVER_US
from support.scheduler_reference.bookkeeping import Bookkeeping
from support.scheduler_reference.drawn import MAX_BATCH_BYTES, Item


class Expectations(Bookkeeping):
    """What may be dispatched now, and what must be."""

    # --- lanes ---------------------------------------------------------------------------------------------

    def _in_lane(self, lane: str) -> list[Item]:
        """The waiting requests of a lane, in the order of dispatch if all were of one tenant."""
        return sorted(
            (r for r in self.waiting if r.lane == lane),
            key=lambda r: (-self._rank_of(r), r.arrival_us, self.waiting[r]),
        )

    def _oldest_us(self, lane: str) -> int:
        queue = self._in_lane(lane)
        return min(r.arrival_us for r in [r for r in queue if r not in self.delayed] or queue)

    def _is_full(self, lane: str) -> bool:
        queue, settings = self._in_lane(lane), self.scheduler.settings
        return (
            len(queue) >= settings.max_batch_size
            or sum(r.bytes for r in queue) >= MAX_BATCH_BYTES
            or (settings.max_batch_cost is not None and sum(r.cost for r in queue) >= settings.max_batch_cost)
        )

    def _over(self, batch: list[Item]) -> bool:
        settings = self.scheduler.settings
        return sum(r.bytes for r in batch) > MAX_BATCH_BYTES or (
            settings.max_batch_cost is not None and sum(r.cost for r in batch) > settings.max_batch_cost
        )

    def _preferred_size(self, lane: str) -> int:
        sizes = self.scheduler.settings.preferred_batch_sizes
        return max((size for size in sizes if size <= len(self._in_lane(lane))), default=0)

    def _delay_ends_us(self, lane: str) -> int:
        return self._oldest_us(lane) + int(self.scheduler.settings.max_queue_delay_ms * 1000)

    def _ready_at_us(self, lane: str) -> int:
        """By when a batch of a lane is ready by time alone; 0 if it is ready now.

        Under the policy `deferred` it may be ready before: see `is_efficient`, which depends on arrivals.
        """
        settings = self.scheduler.settings
        if self._is_full(lane) or self._preferred_size(lane):
            return 0
        if not self._is_deferred(lane):
            if settings.max_queue_delay_ms:
                return self._delay_ends_us(lane)
            return max(self._delay_ends_us(lane), self.scheduler.capacity.spacing_ends_us())
        ends_us = self._delay_ends_us(lane) if settings.max_queue_delay_ms else NEVER_US
        return min(ends_us, self._latest_start_us(lane))

    def _claim(self, lane: str) -> tuple[int, int]:
        """The highest rank, and the oldest request of that."""
        rank = max(map(self._rank_of, self._in_lane(lane)))
        return -rank, min(r.arrival_us for r in self._in_lane(lane) if self._rank_of(r) == rank)

    def _has_one_tenant(self, minus_rank: int) -> bool:
        return len({r.tenant for r in self.waiting if self._rank_of(r) == -minus_rank}) == 1

    # --- deadlines, and the policy deferred ----------------------------------------------------------------

    @property
    def _policy(self) -> str:
        """A custom policy decides only which requests are in a batch."""
        return "eager" if self.custom else self.scheduler.settings.policy

    def _is_deferred(self, lane: str) -> bool:
        deferred = self._policy == "deferred" and self.scheduler.learned.latency.known
        return deferred and self._earliest_due_us(lane) < NEVER_US

    def _past_deadline(self, requests: Iterable[Item]) -> set[Item]:
        return {
            r
            for r in requests
            if r not in self.undated and r.deadline_us is not None and r.deadline_us <= self.now_us
        }

    def _strict_deadline_us(self, request: Item) -> int:
        deadline_us = request.deadline_us
        is_soft = request in self.delayed or self.scheduler.settings.delays_expired(request.priority)
        return NEVER_US if deadline_us is None or is_soft else deadline_us

    def _due_us(self, request: Item) -> int:
        target_ms = self.scheduler.settings.target_latency_ms
        if request.deadline_us is not None:
            return request.deadline_us
        return NEVER_US if target_ms is None else request.arrival_us + int(target_ms * 1000)

    def _earliest_due_us(self, lane: str) -> int:
        return min((self._due_us(r) for r in self._in_lane(lane) if r not in self.delayed), default=NEVER_US)

    def _planned(self, lane: str) -> list[Item]:
        """The requests of a lane that the model is expected to execute."""
        return [r for r in self._in_lane(lane) if not r.is_doubtful]

    def _latest_start_us(self, lane: str) -> int:
        more = min(max(1, len(self._planned(lane))) + 1, self.scheduler.settings.max_batch_size)
        return self._earliest_due_us(lane) - self._takes_us(lane, more)

    def _takes_us(self, lane: str, size: int, transit_us: Sequence[int] | None = None) -> int:
        """How long a batch takes at most until its results arrive."""
        learned = self.scheduler.learned
        transit_us = learned.transit_by_size.at_most_us if transit_us is None else transit_us
        return transit_us[magnitude(size)] + learned.times_of(lane).at_most(size)

    def _starts_us(self, taken: int) -> int:
        """A batch that is dispatched now settles as if it were dispatched at this time."""
        if taken < self.scheduler.model_processes:
            return self.now_us
        free_us = self._free_us(taken)
        return (
            self.now_us
            if free_us is None
            else max(self.now_us, free_us - self.scheduler.learned.round_trip_us)
        )

    def _is_one_batch(self, requests: list[Item], starts_us: int) -> bool:
        """Whether a lane's requests are in time as one batch dispatched now with a long transit."""
        arrives_us = starts_us + self._takes_us(requests[0].lane, len(requests))
        is_in_time = arrives_us <= min(map(self._strict_deadline_us, requests))
        return is_in_time and len(requests) <= self.scheduler.settings.max_batch_size

    def _is_possible(self, request: Item, starts_us: int) -> bool:
        """Whether a request is in time as a batch of one with a long transit."""
        return starts_us + self._takes_us(request.lane, 1) <= self._strict_deadline_us(request)

    # --- capacity ------------------------------------------------------------------------------------------

    def _free_us(self, taken: int) -> int | None:
        """When a process is expected to be free for another batch, if none is idle; None if it is unknown."""
        capacity, processes = self.scheduler.capacity, self.scheduler.model_processes
        executing = capacity._executing
        if taken - processes < len(executing):
            return executing[taken - processes][0]
        if taken > len(self.in_flight) or not processes or len(executing) < processes:
            return None
        free_us = [settles_us for settles_us, _ in executing[:processes]]
        for batch_id in capacity._ahead:
            free_us = sorted([free_us[0] + capacity._execution_us(batch_id), *free_us[1:]])
        return free_us[0]

    def _has_capacity(self, lane: str, taken: int, *, is_early: bool = False) -> bool:
        """`is_early`: whether to count that a full batch may be dispatched early, which it need not be."""
        capacity, processes = self.scheduler.capacity, self.scheduler.model_processes
        if taken < processes:
            return True
        if taken >= 2 * processes:
            return is_early and taken < 3 * processes and self._may_be_second_ahead(lane, taken)
        if self._is_full(lane) and self._policy != "deferred":
            return True
        executing = capacity._executing[taken - processes :]
        if not self.scheduler.learned.latency.known or not executing:
            return False
        settles_us, batch_id = executing[0]
        # A batch that takes longer than expected may take any time.
        latest_us = settles_us + capacity._tolerance_us(batch_id)
        lead_us = self.scheduler.learned.lead_us * (2 if is_early and self._is_full(lane) else 1)
        return settles_us - lead_us <= self.now_us <= latest_us

    def _may_be_second_ahead(self, lane: str, taken: int) -> bool:
        """Whether a full batch may be dispatched although each process has one ahead."""
        capacity, free_us = self.scheduler.capacity, self._free_us(taken)
        if free_us is None or not self.scheduler.learned.latency.known or not self._is_full(lane):
            return False
        ahead = taken - self.scheduler.model_processes  # of these, some execute if processes are gone
        settles_us, batch_id = capacity._executing[ahead if ahead < len(capacity._executing) else 0]
        latest_us = settles_us + capacity._tolerance_us(batch_id)
        return (
            self._policy == "deferred"
            and free_us - 2 * self.scheduler.learned.lead_us <= self.now_us <= latest_us
        )

    def _can_dispatch(self, lane: str, taken: int, *, is_early: bool = False) -> bool:
        if not self._in_lane(lane) or not self._has_capacity(lane, taken, is_early=is_early):
            return False
        return self.now_us >= self._ready_at_us(lane)
