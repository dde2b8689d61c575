"""The scheduler in virtual time, compared with a plain reference model under random events.

The reference records which requests wait, are in flight, or are answered. It checks the rules at the top of
`core/scheduler.py` by looking at every request each time, and knows nothing of the data structures. It takes
from the scheduler how long a batch takes, when a process becomes free, and how dispatches are spaced: these
have unit tests (`test_latency.py`, `test_capacity.py`). For turns between tenants it checks fairness, and not
one order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.messages import Entry, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core import deadlines, queue
from carpool_batcher.core.deadlines import RequestTimer
from carpool_batcher.core.due_index import NEVER_US
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler

MAX_BATCH_BYTES = 40  # small, so that batches reach it
START_US = 1_000_000
LANES = ("", "a", "b")
TENANTS = ("", "gold", "silver")
MAX_COST = 5


@dataclass(frozen=True)
class Traits:
    """The fields of a request. `ago_us` is the time since its arrival; negative if clocks differ."""

    lane: str
    tenant: str
    priority: int
    cost: int
    size_bytes: int
    extra_bytes: int
    expiration_us: int | None
    ago_us: int


traits = st.builds(
    Traits,
    lane=st.sampled_from(LANES),
    tenant=st.sampled_from(TENANTS),
    priority=st.sampled_from((0, 4, 4, 4, 9)),
    cost=st.sampled_from((0, 1, 1, 1, 2, MAX_COST)),
    size_bytes=st.sampled_from((0, 1, 1, 1, 15, 50)),
    extra_bytes=st.sampled_from((0, 0, 0, 20)),
    expiration_us=st.sampled_from((None, None, 1, 1_000, 4_000, 5_000, 20_000, 900_000)),
    ago_us=st.sampled_from((0, 0, 0, 3_000, -500)),
)
model_settings = st.builds(
    ModelSettings,
    max_batch_size=st.sampled_from((1, 2, 3, 8)),
    max_batch_cost=st.sampled_from((None, None, 1, 4)),
    max_queue_delay_ms=st.sampled_from((0, 0, 0.5, 3, 10)),
    max_queue_size=st.sampled_from((1, 5, 100)),
    max_queue_bytes=st.sampled_from((30, 1000)),
    preferred_batch_sizes=st.sampled_from(((), (), (2,), (2, 4, 6), (16,))),
    expiration_action=st.sampled_from(("reject", "reject", "delay")),
    priority_policies=st.sampled_from(
        ({}, {}, {0: {"max_queue_size": 2, "expiration_action": "delay"}, 9: {"expiration_action": "reject"}})
    ),
    tenant_weights=st.sampled_from(({}, {"gold": 4}, {"gold": 2, "silver": 0.5})),
    policy=st.sampled_from(("eager", "eager", "deferred")),
    target_latency_ms=st.sampled_from((None, None, 8)),
)
numbers_of_processes = st.integers(0, 3)
numbers = st.integers(0, 1000)


class SchedulerMachine(RuleBasedStateMachine):
    """The reference is `waiting`, `in_flight` and `answered`: where each admitted request is.

    Of those that wait, `delayed` have expired and are served all the same. `waiting` maps to the order of
    arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limits = [
            mock.patch.object(module, "MAX_BATCH_BYTES", MAX_BATCH_BYTES) for module in (queue, deadlines)
        ]
        for limit in self.limits:
            limit.start()
        self.now_us = START_US
        self.waiting: dict[Request, int] = {}
        self.undated: set[Request] = set()  # in flight, without a deadline there
        self.deadlines_us: dict[Request, int | None] = {}  # on arrival
        self.delayed: set[Request] = set()
        self.leads: dict[tuple[str, int, str, str], tuple[float, float, float]] = {}  # see _check_fairness
        self.in_flight: dict[str, list[Request]] = {}
        self.answered: set[Request] = set()
        self.polled = False  # no event since the last poll, and no time passed
        self.number = 0
        self.turnaround_us_max = 0
        self.processes_max = 0
        self.waiting_bytes_max = 0

    def teardown(self) -> None:
        try:
            self._check_that_all_requests_settle()
        finally:
            for limit in self.limits:
                limit.stop()

    # --- events --------------------------------------------------------------------------------------------

    @initialize(settings=model_settings, processes=numbers_of_processes, found=st.lists(traits, max_size=3))
    def take_over(self, settings: ModelSettings, processes: int, found: list[Traits]) -> None:
        self.scheduler = Scheduler(settings, processes)
        if found:
            requests = [self._request(Entry("0-0", START_US), fields) for fields in found]
            self.in_flight["found"] = requests
            dispatch = Dispatch(requests, "idle", requests[0].lane)
            self.scheduler.adopt("found", dispatch, self.now_us - 1000)

    @rule(of_entry=st.lists(traits, min_size=1, max_size=6))
    def offer(self, of_entry: list[Traits]) -> None:
        entry = Entry(f"{self.number}-0", self.now_us)
        entry.requests = [self._request(entry, fields) for fields in of_entry]
        for request in entry.requests:
            self._offer(request)

    @rule(fields=traits, number=st.integers(2, 12))
    def offer_alike(self, fields: Traits, number: int) -> None:
        self.offer([fields] * number)

    @rule(passes_us=st.sampled_from((0, 1, 500, 2_000, 10_000, 60_000)))
    def time_passes(self, passes_us: int) -> None:
        """As a batcher does, poll at each wake-up time, and at the end."""
        end_us = self.now_us + passes_us
        polls = 0
        while (wake_us := self.scheduler.wake_at_us()) is not None and wake_us <= end_us:
            self._advance(max(self.now_us, wake_us))
            self.poll(fate=None)
            polls += 1
            assert polls <= 100 + 4 * self.number, "wake-up without effect"
        self._advance(end_us)
        self.poll(fate=None)

    @rule(passes_us=st.sampled_from((1, 3_000, 30_000)))
    def time_passes_without_polling(self, passes_us: int) -> None:
        """The batcher is busy, and misses wake-up times."""
        self._advance(self.now_us + passes_us)

    @rule(choice=numbers, compute_us=st.sampled_from((0, 500, 3_000, 3_200, 20_000)))
    @precondition(lambda self: self.in_flight)
    def settle(self, choice: int, compute_us: int) -> None:
        batch_id = list(self.in_flight)[choice % len(self.in_flight)]
        self.answered.update(self.in_flight.pop(batch_id))
        self.turnaround_us_max = max(self.turnaround_us_max, self.now_us - START_US + 1000)
        self.polled = False
        self.scheduler.settle(batch_id, compute_us, self.now_us)
        self.scheduler.settle(batch_id, compute_us, self.now_us)  # twice has no further effect

    @rule(choice=numbers)
    @precondition(lambda self: self.in_flight)
    def lose_batch(self, choice: int) -> None:
        """A batch is no longer in Redis, and the batcher did not see it settle."""
        batch_id = list(self.in_flight)[choice % len(self.in_flight)]
        self.answered.update(self.in_flight.pop(batch_id))
        self.polled = False
        self.scheduler.forget_batch(batch_id, self.now_us)

    @rule(processes=numbers_of_processes)
    def model_processes_change(self, processes: int) -> None:
        self.scheduler.model_processes = processes
        self.polled = False

    @rule(settings=model_settings)
    def settings_change(self, settings: ModelSettings) -> None:
        self.scheduler.settings = settings
        self.leads.clear()
        self.polled = False

    @rule(choices=st.sets(numbers, max_size=4))
    def withdraw(self, choices: set[int]) -> None:
        known = [*self.waiting, *self.answered]
        named = {known[choice % len(known)] for choice in choices if known}
        refusals = self.scheduler.withdraw(frozenset(r.correlation_id for r in named))
        assert [refusal.status for refusal in refusals] == ["CANCELLED"] * len(refusals)
        self._remove([refusal.request for refusal in refusals], expected=named & self.waiting.keys())

    @rule(choices=st.sets(numbers, max_size=4))
    def forget(self, choices: set[int]) -> None:
        """Requests are no longer in Redis, whether they wait here or not."""
        known = [
            *self.waiting,
            *self.answered,
            *(r for batch in self.in_flight.values() for r in batch),
        ]
        named = {known[choice % len(known)] for choice in choices if known}
        self.scheduler.forget(named)
        forgotten = named & self.waiting.keys()
        self._remove(forgotten, expected=forgotten)

    @rule(fate=st.one_of(st.none(), numbers))
    def poll(self, fate: int | None) -> None:
        """Check every decision, and carry it out.

        With a `fate`, some or all requests of the first dispatch are no longer in Redis, because another
        batcher dispatched them.
        """
        past = self._past_deadline(self.waiting) - self.delayed
        delayed = {r for r in past if self.scheduler.settings.delays_expired(r.priority)}
        overdue = {
            (batch_id, position, r)
            for batch_id, batch in self.in_flight.items()
            for position, r in enumerate(batch)
            if r in self._past_deadline(batch) and r not in self.answered
        }
        decisions = self.scheduler.poll(self.now_us)

        refusals = [decision for decision in decisions if isinstance(decision, Refusal)]
        assert {refusal.status for refusal in refusals} <= {"DEADLINE_EXCEEDED"}
        expired_waiting = [refusal.request for refusal in refusals if refusal.reason == "waiting"]
        self._remove(expired_waiting, expected=past - delayed)
        self._delay(delayed, [decision for decision in decisions if isinstance(decision, Dispatch)])
        self._check_that_delayed_requests_wait()

        expired = [tuple(decision) for decision in decisions if isinstance(decision, Expire)]
        assert len(expired) == len(overdue) and set(expired) == overdue
        self.answered.update(r for _, _, r in overdue)

        dispatches: list[Dispatch] = []
        for are_refusals, group in groupby(decisions, key=lambda decision: isinstance(decision, Refusal)):
            if are_refusals:
                self._check_early([r for r in group if isinstance(r, Refusal) and r.reason != "waiting"])
                continue
            for dispatch in (decision for decision in group if isinstance(decision, Dispatch)):
                self._check_dispatch(dispatch, reserved=len(dispatches))
                dispatches.append(dispatch)
        self._check_that_no_batch_was_missed(len(dispatches))
        for number, dispatch in enumerate(dispatches):
            self._apply(dispatch, fate if number == 0 else None)
        self.polled = not dispatches
        if self.polled:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is None or wake_us > self.now_us, "immediate wake-up without effect"

    # --- invariants ----------------------------------------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        in_flight = [r for batch in self.in_flight.values() for r in batch]
        assert len(in_flight) == len(set(in_flight)) and not self.waiting.keys() & set(in_flight)
        assert not self.answered & self.waiting.keys()
        assert list(self.scheduler.in_flight()) == list(self.in_flight)

    @invariant()
    def totals_of_the_queue_are_right(self) -> None:
        assert self.scheduler.waiting == len(self.waiting)
        assert self.scheduler.waiting_bytes == sum(map(bytes_of, self.waiting))
        waiting = [r for lane in self.scheduler._queue.lanes.values() for r in lane]
        assert len(waiting) == len(self.waiting) and set(waiting) == self.waiting.keys()
        delayed = [r for lane in self.scheduler._queue.lanes.values() for r in lane.expired]
        assert self.delayed == set(delayed)

    @invariant()
    def at_most_two_batches_per_process_are_in_flight(self) -> None:
        self.processes_max = max(self.processes_max, self.scheduler.model_processes)
        assert len(self.in_flight.keys() - {"found"}) <= 2 * self.processes_max

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.scheduler._queue.lanes) <= 1 + len({r.lane for r in self.waiting})
        # Outdated timers are dropped from time to time only.
        self.waiting_bytes_max = max(
            self.waiting_bytes_max, self.scheduler.waiting_bytes + 1000 * len(self.waiting)
        )
        timers = [timer for _, _, timer in self.scheduler._deadlines._timers]
        held = [r for timer in timers if isinstance(timer, RequestTimer) for r in timer.requests]
        held_bytes = sum(map(bytes_of, held)) + 1000 * len(held)
        assert held_bytes <= 3 * self.waiting_bytes_max + MAX_BATCH_BYTES

    @invariant()
    def wake_up_is_never_too_late(self) -> None:
        """After a poll. An event is followed by a poll in any case."""
        if not self.polled:
            return
        times_us = [
            r.deadline_us for r in self.waiting if r.deadline_us is not None and r not in self.delayed
        ]
        times_us += [
            r.deadline_us
            for batch in self.in_flight.values()
            for r in batch
            if r.deadline_us is not None and r not in self.answered | self.undated
        ]
        free_at_us = self.scheduler.capacity.free_at_us(self.now_us)
        if self.scheduler.model_processes > len(self.in_flight):
            assert free_at_us == self.now_us
        else:
            capacity = self.scheduler.capacity
            free_us = {settles_us - capacity.round_trip_us for settles_us, _ in capacity._executing}
            assert free_at_us is None or free_at_us in free_us
        if free_at_us is not None:
            times_us += [max(free_at_us, self._ready_at_us(lane)) for lane in LANES if self._in_lane(lane)]
        if times_us:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is not None and wake_us <= min(times_us)

    # --- the reference -------------------------------------------------------------------------------------

    def _request(self, entry: Entry, fields: Traits) -> Request:
        self.number += 1
        arrival_us = self.now_us - fields.ago_us
        request = Request(
            entry,
            f"r{self.number}",
            b"x" * fields.size_bytes,
            arrival_us=arrival_us,
            deadline_us=None if fields.expiration_us is None else arrival_us + fields.expiration_us,
            priority=fields.priority,
            lane=fields.lane,
            tenant=fields.tenant,
            cost=fields.cost,
            extra={"": b"x" * fields.extra_bytes} if fields.extra_bytes else None,
        )
        self.deadlines_us[request] = request.deadline_us
        return request

    def _offer(self, request: Request) -> None:
        settings = self.scheduler.settings
        waiting_bytes = sum(map(bytes_of, self.waiting)) + bytes_of(request)
        expected = None
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            expected = "INVALID_ARGUMENT"
        elif (
            len(self.waiting) >= settings.max_queue_size
            or waiting_bytes > settings.max_queue_bytes
            or self._is_priority_full(request.priority)
        ):
            expected = "RESOURCE_EXHAUSTED"
        refused = self.scheduler.offer(request, self.now_us)
        assert (refused and refused.status) == expected
        if refused is None:
            self.number += 1
            self.waiting[request] = self.number
        self.polled = False

    def _is_priority_full(self, priority: int) -> bool:
        policy = self.scheduler.settings.priority_policies.get(priority)
        same = [r for r in self.waiting if r.priority == priority]
        return policy is not None and policy.max_queue_size is not None and len(same) >= policy.max_queue_size

    def _advance(self, now_us: int) -> None:
        self.polled = self.polled and now_us == self.now_us
        self.now_us = now_us

    def _remove(self, removed: Iterable[Request | None], *, expected: set[Request]) -> None:
        listed = [r for r in removed if r is not None]
        assert len(listed) == len(set(listed)) and set(listed) == expected
        for request in listed:
            del self.waiting[request]
            self.delayed.discard(request)
            self.answered.add(request)
        self._forget_leads()

    def _past_deadline(self, requests: Iterable[Request]) -> set[Request]:
        return {
            r
            for r in requests
            if r not in self.undated and r.deadline_us is not None and r.deadline_us <= self.now_us
        }

    def _in_lane(self, lane: str) -> list[Request]:
        """The waiting requests of a lane, in the order of dispatch if all were of one tenant."""
        return sorted(
            (r for r in self.waiting if r.lane == lane),
            key=lambda r: (-self._rank_of(r), r.arrival_us, self.waiting[r]),
        )

    def _rank_of(self, request: Request) -> int:
        return -1 if request in self.delayed else request.priority

    def _oldest_us(self, lane: str) -> int:
        queue = self._in_lane(lane)
        return min(r.arrival_us for r in [r for r in queue if r not in self.delayed] or queue)

    def _delay_ends_us(self, lane: str) -> int:
        return self._oldest_us(lane) + int(self.scheduler.settings.max_queue_delay_ms * 1000)

    def _ready_at_us(self, lane: str) -> int:
        """When a batch of a lane is ready by time alone; 0 if it is ready now."""
        settings = self.scheduler.settings
        if self._is_full(lane) or self._preferred_size(lane):
            return 0
        if not self._is_deferred(lane):
            if settings.max_queue_delay_ms:
                return self._delay_ends_us(lane)
            return max(self._delay_ends_us(lane), self.scheduler.capacity.spacing_ends_us())
        if len(self._in_lane(lane)) >= self._efficient_size(lane):
            return 0
        ends_us = self._delay_ends_us(lane) if settings.max_queue_delay_ms else NEVER_US
        return min(ends_us, self._latest_start_us(lane))

    def _preferred_size(self, lane: str) -> int:
        sizes = self.scheduler.settings.preferred_batch_sizes
        return max((size for size in sizes if size <= len(self._in_lane(lane))), default=0)

    # --- the policy deferred -------------------------------------------------------------------------------

    def _due_us(self, request: Request) -> int:
        target_ms = self.scheduler.settings.target_latency_ms
        if (deadline_us := self.deadlines_us[request]) is not None:
            return deadline_us
        return NEVER_US if target_ms is None else request.arrival_us + int(target_ms * 1000)

    def _earliest_due_us(self, lane: str) -> int:
        return min((self._due_us(r) for r in self._in_lane(lane) if r not in self.delayed), default=NEVER_US)

    def _is_deferred(self, lane: str) -> bool:
        deferred = self.scheduler.settings.policy == "deferred" and self.scheduler.capacity.latency.known
        return deferred and self._earliest_due_us(lane) < NEVER_US

    def _efficient_size(self, lane: str) -> int:
        latency, most = self.scheduler.capacity.latency_of(lane), self.scheduler.settings.max_batch_size
        rates = {size: size / max(1, latency.of(size)) for size in range(1, most + 1)}
        return min(size for size, rate in rates.items() if rate >= 0.85 * rates[most])

    def _settles_us(self, lane: str, size: int) -> int:
        capacity = self.scheduler.capacity
        return self.now_us + capacity.round_trip_us + capacity.latency_of(lane).at_most(size)

    def _latest_start_us(self, lane: str) -> int:
        more = min(len(self._in_lane(lane)) + 1, self.scheduler.settings.max_batch_size)
        return self._earliest_due_us(lane) - (self._settles_us(lane, more) - self.now_us)

    def _strict_deadline_us(self, request: Request) -> int:
        deadline_us = self.deadlines_us[request]
        is_soft = request in self.delayed or self.scheduler.settings.delays_expired(request.priority)
        return NEVER_US if deadline_us is None or is_soft else deadline_us

    def _check_early(self, refusals: list[Refusal]) -> None:
        """A refused request cannot be in time, or not all of its lane can, as one batch dispatched now."""
        settings = self.scheduler.settings
        refused = [refusal.request for refusal in refusals if refusal.request is not None]
        assert settings.policy == "deferred" or not refused
        assert {refusal.reason for refusal in refusals} <= {"early"}
        assert all(self._strict_deadline_us(r) < NEVER_US for r in refused)
        possible = [r for r in refused if self._is_possible(r)]
        for lane in {r.lane for r in possible}:
            others = [r for r in self._in_lane(lane) if self._is_possible(r)]
            size = len(others)
            earliest_us = min(map(self._strict_deadline_us, others))
            assert size > settings.max_batch_size or self._settles_us(lane, size) > earliest_us
            assert len([r for r in possible if r.lane == lane]) < size, "no other request gains by it"
        self._remove(refused, expected=self.waiting.keys() & set(refused))

    def _is_possible(self, request: Request) -> bool:
        """Whether a request is in time as a batch of one, dispatched now."""
        return self._settles_us(request.lane, 1) <= self._strict_deadline_us(request)

    def _delay(self, delayed: set[Request], dispatches: list[Dispatch]) -> None:
        """These requests expired, and are behind all others. Their order among each other is not checked."""
        self.delayed |= delayed
        in_order = [r for dispatch in dispatches for r in dispatch.requests]
        in_order += [r for lane in self.scheduler._queue.lanes.values() for r in lane]
        for request in in_order:
            if request in delayed:
                self.number += 1
                self.waiting[request] = self.number

    def _check_that_delayed_requests_wait(self) -> None:
        assert self.delayed <= self.waiting.keys()
        assert not self.delayed & self.answered

    # --- fairness ------------------------------------------------------------------------------------------

    def _check_fairness(self, batch: list[Request]) -> None:
        """Tenants that wait all the while are served alike, by weight, to within one request of each.

        `leads` has, for each pair of tenants, by how much the first is ahead of the second, with the minimum
        and the maximum since both wait.
        """
        weights = self.scheduler.settings.tenant_weights
        for request in batch:
            rank = self._rank_of(request)
            share = max(1, request.cost) / weights.get(request.tenant, 1)
            others = {r.tenant for r in self._in_lane(request.lane) if self._rank_of(r) == rank}
            for other in others - {request.tenant}:
                for first, second, gain in ((request.tenant, other, share), (other, request.tenant, -share)):
                    lead, lead_min, lead_max = self.leads.get(
                        (request.lane, rank, first, second), (0.0, 0.0, 0.0)
                    )
                    lead += gain
                    lead_min, lead_max = min(lead_min, lead), max(lead_max, lead)
                    self.leads[request.lane, rank, first, second] = lead, lead_min, lead_max
                    limit = MAX_COST / weights.get(first, 1) + MAX_COST / weights.get(second, 1)
                    assert lead_max - lead_min <= limit + 1e-6, f"unfair: {first!r} and {second!r}"
            del self.waiting[request]
            self.delayed.discard(request)
            self._forget_leads()

    def _forget_leads(self) -> None:
        """Forget the leads of tenants without waiting requests."""
        waiting = {(r.lane, self._rank_of(r), r.tenant) for r in self.waiting}
        self.leads = {
            (lane, rank, first, second): lead
            for (lane, rank, first, second), lead in self.leads.items()
            if {(lane, rank, first), (lane, rank, second)} <= waiting
        }

    # --- dispatches ----------------------------------------------------------------------------------------

    def _is_full(self, lane: str) -> bool:
        queue, settings = self._in_lane(lane), self.scheduler.settings
        return (
            len(queue) >= settings.max_batch_size
            or sum(map(bytes_of, queue)) >= MAX_BATCH_BYTES
            or (settings.max_batch_cost is not None and sum(r.cost for r in queue) >= settings.max_batch_cost)
        )

    def _over(self, batch: list[Request]) -> bool:
        settings = self.scheduler.settings
        return sum(map(bytes_of, batch)) > MAX_BATCH_BYTES or (
            settings.max_batch_cost is not None and sum(r.cost for r in batch) > settings.max_batch_cost
        )

    def _check_requests(self, dispatch: Dispatch) -> None:
        """From the front of one lane, rank by rank and each tenant in order; as many as fit."""
        batch, settings = dispatch.requests, self.scheduler.settings
        assert batch and set(batch) <= self.waiting.keys() and len(set(batch)) == len(batch)
        ranks = [self._rank_of(r) for r in batch]
        assert ranks == sorted(ranks, reverse=True)
        rest = [r for r in self._in_lane(dispatch.lane) if r not in batch]
        assert all(self._rank_of(r) <= ranks[-1] for r in rest)
        for rank, tenant in {(self._rank_of(r), r.tenant) for r in batch}:
            of_tenant = [r for r in batch if (self._rank_of(r), r.tenant) == (rank, tenant)]
            queue = [r for r in self._in_lane(dispatch.lane) if r.tenant == tenant]
            assert of_tenant == [r for r in queue if self._rank_of(r) == rank][: len(of_tenant)]
        is_preferred = dispatch.reason == "preferred"
        size = self._preferred_size(dispatch.lane) if is_preferred else settings.max_batch_size
        assert len(batch) <= size and (len(batch) == 1 or not self._over(batch))
        if self._is_deferred(dispatch.lane):
            settles_us = self._settles_us(dispatch.lane, len(batch))
            in_time = all(settles_us <= self._strict_deadline_us(r) for r in batch)
            assert in_time or self._is_trial(dispatch)
        elif rest and len(batch) < size:
            first = {r.tenant: r for r in reversed(rest) if self._rank_of(r) == self._rank_of(rest[0])}
            assert any(self._over([*batch, r]) for r in first.values())

    def _is_trial(self, dispatch: Dispatch) -> bool:
        """No request of the lane can be in time, so that without a trial nothing would be learned."""
        lane = dispatch.lane
        soonest_us = self._settles_us(lane, 1)
        none_in_time = all(self._strict_deadline_us(r) < soonest_us for r in self._in_lane(lane))
        return none_in_time and all(batch[0].lane != lane for batch in self.in_flight.values())

    def _check_dispatch(self, dispatch: Dispatch, reserved: int) -> None:
        lane, settings = dispatch.lane, self.scheduler.settings
        taken = len(self.in_flight) + reserved
        assert not self._past_deadline(set(dispatch.requests) - dispatch.undated)
        # A request that is served even after its deadline has none in flight.
        for r in dispatch.requests:
            deadline_us = self._strict_deadline_us(r)
            assert dispatch.deadline_us(r) == (None if deadline_us == NEVER_US else deadline_us)
        self._check_requests(dispatch)
        # The reason is the first that applies.
        queue = self._in_lane(lane)
        lead_us_max = 1.5 * self.turnaround_us_max + 2000
        deadlines_us = [self.deadlines_us[r] or NEVER_US for r in queue]
        is_urgent = any(deadline_us <= self.now_us + lead_us_max for deadline_us in deadlines_us)
        if self._is_full(lane):
            assert dispatch.reason == "full"
        elif self._preferred_size(lane):
            assert dispatch.reason == "preferred"
        elif dispatch.reason == "efficient":
            assert self._is_deferred(lane) and len(queue) >= self._efficient_size(lane)
        elif dispatch.reason == "deadline":
            assert is_urgent or (self._is_deferred(lane) and self.now_us >= self._latest_start_us(lane))
        else:
            assert dispatch.reason == ("delay" if settings.max_queue_delay_ms else "idle")
            assert dispatch.reason == "delay" or not self._is_deferred(lane)
            assert self.now_us >= self._ready_at_us(lane)
        # A process is idle or about to become free; a full batch may be one ahead of any process.
        assert self._has_capacity(lane, taken)
        # No other lane that could be dispatched now comes first.
        for other in LANES:
            if other != lane and self._can_dispatch(other, taken):
                assert self._claim(lane) <= self._claim(other)
        self._check_fairness(dispatch.requests)

    def _has_capacity(self, lane: str, taken: int) -> bool:
        capacity, processes = self.scheduler.capacity, self.scheduler.model_processes
        if taken < processes:
            return True
        if taken >= 2 * processes:
            return False
        if self._is_full(lane) and self.scheduler.settings.policy != "deferred":
            return True
        executing = capacity._executing[taken - processes :]
        if not capacity.latency.known or not executing:
            return False
        settles_us, batch_id = executing[0]
        # A batch that takes longer than expected may take any time.
        latest_us = settles_us + capacity._tolerance_us(batch_id)
        return settles_us - capacity.round_trip_us <= self.now_us <= latest_us

    def _can_dispatch(self, lane: str, taken: int) -> bool:
        if not self._in_lane(lane) or not self._has_capacity(lane, taken):
            return False
        return self.now_us >= self._ready_at_us(lane)

    def _claim(self, lane: str) -> tuple[int, int]:
        return -max(map(self._rank_of, self._in_lane(lane))), self._oldest_us(lane)

    def _check_that_no_batch_was_missed(self, reserved: int) -> None:
        taken = len(self.in_flight) + reserved
        assert not [lane for lane in LANES if self._can_dispatch(lane, taken)]
        if taken < self.scheduler.model_processes and self.scheduler.settings.max_queue_delay_ms:
            last_us = self.now_us + 2000
            in_time = self.waiting.keys() - self.delayed
            assert all(r.deadline_us is None or r.deadline_us > last_us for r in in_time)

    def _apply(self, dispatch: Dispatch, fate: int | None) -> None:
        vanished: set[Entry] = set()
        if fate is not None:
            entries = list(dict.fromkeys(r.entry for r in dispatch.requests))
            vanished = set(entries[: 1 + fate % len(entries)])
        # No request of a vanished entry waits any more, whether it was to be dispatched or not.
        still_waiting = {r for r in self.waiting if r.entry in vanished}
        self.scheduler.forget(r for entry in vanished for r in entry.requests)
        self._remove(still_waiting, expected=still_waiting)
        self.answered.update(r for r in dispatch.requests if r.entry in vanished)
        batch = [r for r in dispatch.requests if r.entry not in vanished]
        if not batch:
            self.scheduler.cancel()
            return
        self.number += 1
        batch_id = f"batch {self.number}"
        self.in_flight[batch_id] = batch
        self.undated |= dispatch.undated
        self.scheduler.launch(batch_id, dispatch._replace(requests=batch), self.now_us)

    def _check_that_all_requests_settle(self) -> None:
        """After any events, one process that executes all batches serves all requests."""
        self.scheduler.model_processes = 1
        for _ in range(10 + 2 * self.number):
            self.poll(fate=None)
            while self.in_flight:
                self.settle(0, 0)
            if not self.waiting:
                return
            self._advance(max(self.now_us, self.scheduler.wake_at_us() or 0))
        raise AssertionError(f"{len(self.waiting)} wait for ever")


def bytes_of(request: Request) -> int:
    """The bytes of a request that count against limits."""
    return len(request.body) + sum(map(len, (request.extra or {}).values()))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # that depends on the machine
)
