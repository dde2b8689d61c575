"""The scheduler in virtual time, against a plain account of who waits, who rides and who is answered.

The account knows the rules at the top of `core/scheduler.py` and nothing of how they are kept: it looks at
every request each time. Whatever happens, in whatever order, both must agree. What a batch takes to compute,
and when a process is free, it believes (`tests/unit/test_latency.py`, `test_fleet.py`). Whose turn it is
among tenants it holds to what is fair, and not to one order.
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
from carpool_batcher.core.lane import NEVER
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler

MAX_BATCH_BYTES = 40  # small, so that batches reach it
START_US = 1_000_000
LANES = ("", "a", "b")
TENANTS = ("", "gold", "silver")
MAX_COST = 5


@dataclass(frozen=True)
class Traits:
    """What a producer says of a request, and when it arrived: before now, or after, by clocks that differ."""

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
numbers_of_workers = st.integers(0, 3)
numbers = st.integers(0, 1000)


class SchedulerMachine(RuleBasedStateMachine):
    """`waiting`, `riding` and `answered` are the account: where each request is that was admitted. Of those
    that wait, `late` have expired and are served all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = [
            mock.patch.object(module, "MAX_BATCH_BYTES", MAX_BATCH_BYTES) for module in (queue, deadlines)
        ]
        for limit in self.limits:
            limit.start()
        self.now_us = START_US
        self.waiting: dict[Request, int] = {}
        self.undated: set[Request] = set()  # in flight without a deadline
        self.deadlines_us: dict[Request, int | None] = {}  # as they were when each arrived
        self.late: set[Request] = set()
        self.leads: dict[tuple[str, int, str, str], tuple[float, float, float]] = {}  # see _take_turns
        self.riding: dict[str, list[Request]] = {}
        self.answered: set[Request] = set()
        self.polled = False  # nothing happened since the last poll, and no time passed
        self.number = 0
        self.longest_ride_us = 0
        self.most_processes = 0
        self.most_waiting_bytes = 0

    def teardown(self) -> None:
        try:
            self._everybody_arrives()
        finally:
            for limit in self.limits:
                limit.stop()

    # --- what happens --------------------------------------------------------------------------------------

    @initialize(settings=model_settings, workers=numbers_of_workers, found=st.lists(traits, max_size=3))
    def take_over(self, settings: ModelSettings, workers: int, found: list[Traits]) -> None:
        self.scheduler = Scheduler(settings, workers)
        if found:
            riders = [self._request(Entry("0-0", START_US), one) for one in found]
            self.riding["found"] = riders
            self.scheduler.adopt("found", Dispatch(riders, "idle", riders[0].lane), self.now_us - 1000)

    @rule(of_entry=st.lists(traits, min_size=1, max_size=6))
    def offer(self, of_entry: list[Traits]) -> None:
        entry = Entry(f"{self.number}-0", self.now_us)
        entry.requests = [self._request(entry, one) for one in of_entry]
        for request in entry.requests:
            self._offer(request)

    @rule(one=traits, number=st.integers(2, 12))
    def offer_alike(self, one: Traits, number: int) -> None:
        self.offer([one] * number)

    @rule(passes_us=st.sampled_from((0, 1, 500, 2_000, 10_000, 60_000)))
    def time_passes(self, passes_us: int) -> None:
        """As the batcher spends it: it polls whenever it is told to, and at the end."""
        end_us = self.now_us + passes_us
        polls = 0
        while (wake_us := self.scheduler.wake_at_us()) is not None and wake_us <= end_us:
            self._advance(max(self.now_us, wake_us))
            self.poll(fate=None)
            polls += 1
            assert polls <= 100 + 4 * self.number, "it is woken up in vain"
        self._advance(end_us)
        self.poll(fate=None)

    @rule(passes_us=st.sampled_from((1, 3_000, 30_000)))
    def busy_elsewhere(self, passes_us: int) -> None:
        """Nobody polls when it is time to."""
        self._advance(self.now_us + passes_us)

    @rule(choice=numbers, compute_us=st.sampled_from((0, 500, 3_000, 3_200, 20_000)))
    @precondition(lambda self: self.riding)
    def settle(self, choice: int, compute_us: int) -> None:
        batch_id = list(self.riding)[choice % len(self.riding)]
        self.answered.update(self.riding.pop(batch_id))
        self.longest_ride_us = max(self.longest_ride_us, self.now_us - START_US + 1000)
        self.polled = False
        self.scheduler.settle(batch_id, compute_us, self.now_us)
        self.scheduler.settle(batch_id, compute_us, self.now_us)  # a word that comes twice says nothing new

    @rule(workers=numbers_of_workers)
    def workers_come_and_go(self, workers: int) -> None:
        self.scheduler.model_processes = workers
        self.polled = False

    @rule(settings=model_settings)
    def settings_change(self, settings: ModelSettings) -> None:
        self.scheduler.settings = settings
        self.leads.clear()
        self.polled = False

    @rule(choices=st.sets(numbers, max_size=4))
    def withdraw(self, choices: set[int]) -> None:
        everybody = [*self.waiting, *self.answered]
        named = {everybody[choice % len(everybody)] for choice in choices if everybody}
        refusals = self.scheduler.withdraw(frozenset(one.correlation_id for one in named))
        assert [one.status for one in refusals] == ["CANCELLED"] * len(refusals)
        self._leave([one.request for one in refusals], expected=named & self.waiting.keys())

    @rule(choices=st.sets(numbers, max_size=4))
    def forget(self, choices: set[int]) -> None:
        """Requests are gone from Redis, some of them ours to forget and some not."""
        everybody = [
            *self.waiting,
            *self.answered,
            *(one for riders in self.riding.values() for one in riders),
        ]
        named = {everybody[choice % len(everybody)] for choice in choices if everybody}
        self.scheduler.forget(named)
        gone = named & self.waiting.keys()
        self._leave(gone, expected=gone)

    @rule(fate=st.one_of(st.none(), numbers))
    def poll(self, fate: int | None) -> None:
        """Check every decision, and carry it out. `fate` is the number of a dispatch that finds nobody, or
        only some, still there: another batcher was faster."""
        past = self._past_deadline(self.waiting) - self.late
        delayed = {one for one in past if self.scheduler.settings.delays_expired(one.priority)}
        overdue = {
            (batch_id, position, one)
            for batch_id, riders in self.riding.items()
            for position, one in enumerate(riders)
            if one in self._past_deadline(riders) and one not in self.answered
        }
        decisions = self.scheduler.poll(self.now_us)

        refusals = [one for one in decisions if isinstance(one, Refusal)]
        assert {one.status for one in refusals} <= {"DEADLINE_EXCEEDED"}
        self._leave([one.request for one in refusals if one.reason == "waiting"], expected=past - delayed)
        self._put_behind(delayed, [one for one in decisions if isinstance(one, Dispatch)])
        self._check_late_ones_only_wait()

        expired = [tuple(one) for one in decisions if isinstance(one, Expire)]
        assert len(expired) == len(overdue) and set(expired) == overdue
        self.answered.update(one for _, _, one in overdue)

        dispatches: list[Dispatch] = []
        for early, group in groupby(decisions, key=lambda one: isinstance(one, Refusal)):
            if early:
                self._check_given_up([r for r in group if isinstance(r, Refusal) and r.reason != "waiting"])
                continue
            for dispatch in (one for one in group if isinstance(one, Dispatch)):
                self._check_dispatch(dispatch, departing=len(dispatches))
                dispatches.append(dispatch)
        self._check_nobody_was_overlooked(len(dispatches))
        for number, one in enumerate(dispatches):
            self._depart(one, fate if number == 0 else None)
        self.polled = not dispatches
        if self.polled:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is None or wake_us > self.now_us, "it would be woken up at once, for nothing"

    # --- what must hold ------------------------------------------------------------------------------------

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        riders = [one for riders in self.riding.values() for one in riders]
        assert len(riders) == len(set(riders)) and not self.waiting.keys() & set(riders)
        assert not self.answered & self.waiting.keys()
        assert list(self.scheduler.in_flight()) == list(self.riding)

    @invariant()
    def the_queue_is_what_it_says(self) -> None:
        assert self.scheduler.waiting == len(self.waiting)
        assert self.scheduler.waiting_bytes == sum(map(size_of, self.waiting))
        held = [one for lane in self.scheduler._queue.lanes.values() for one in lane]
        assert len(held) == len(self.waiting) and set(held) == self.waiting.keys()
        late = [one for lane in self.scheduler._queue.lanes.values() for one in lane.late]
        assert self.late == set(late)

    @invariant()
    def never_more_than_two_batches_for_each_process(self) -> None:
        self.most_processes = max(self.most_processes, self.scheduler.model_processes)
        assert len(self.riding.keys() - {"found"}) <= 2 * self.most_processes

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.scheduler._queue.lanes) <= 1 + len({one.lane for one in self.waiting})
        # What alarms hold on to is looked at now and then, while others begin to be watched.
        self.most_waiting_bytes = max(
            self.most_waiting_bytes, self.scheduler.waiting_bytes + 1000 * len(self.waiting)
        )
        watched = [one for _, _, alarm in self.scheduler._deadlines._heap for one in alarm.requests]
        held_bytes = sum(map(size_of, watched)) + 1000 * len(watched)
        assert held_bytes <= 3 * self.most_waiting_bytes + MAX_BATCH_BYTES

    @invariant()
    def nobody_is_woken_up_late(self) -> None:
        """By time alone: what happens is followed by a poll anyway."""
        if not self.polled:
            return
        moments = [
            one.deadline_us for one in self.waiting if one.deadline_us is not None and one not in self.late
        ]
        moments += [
            one.deadline_us
            for riders in self.riding.values()
            for one in riders
            if one.deadline_us is not None and one not in self.answered | self.undated
        ]
        room_at_us = self.scheduler.capacity.room_at_us()
        assert (room_at_us == 0) == (self.scheduler.model_processes > len(self.riding))
        if room_at_us is not None:
            moments += [max(room_at_us, self._leaves_at_us(lane)) for lane in LANES if self._in_lane(lane)]
        if moments:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is not None and wake_us <= min(moments)

    # --- the account ---------------------------------------------------------------------------------------

    def _request(self, entry: Entry, one: Traits) -> Request:
        self.number += 1
        arrival_us = self.now_us - one.ago_us
        request = Request(
            entry,
            f"r{self.number}",
            b"x" * one.size_bytes,
            arrival_us=arrival_us,
            deadline_us=None if one.expiration_us is None else arrival_us + one.expiration_us,
            priority=one.priority,
            lane=one.lane,
            tenant=one.tenant,
            cost=one.cost,
            extra={"": b"x" * one.extra_bytes} if one.extra_bytes else None,
        )
        self.deadlines_us[request] = request.deadline_us
        return request

    def _offer(self, request: Request) -> None:
        settings = self.scheduler.settings
        waiting_bytes = sum(map(size_of, self.waiting)) + size_of(request)
        expected = None
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            expected = "INVALID_ARGUMENT"
        elif (
            len(self.waiting) >= settings.max_queue_size
            or waiting_bytes > settings.max_queue_bytes
            or self._level_is_full(request.priority)
        ):
            expected = "RESOURCE_EXHAUSTED"
        refused = self.scheduler.offer(request, self.now_us)
        assert (refused and refused.status) == expected
        if refused is None:
            self.number += 1
            self.waiting[request] = self.number
        self.polled = False

    def _level_is_full(self, priority: int) -> bool:
        policy = self.scheduler.settings.priority_policies.get(priority)
        alike = [one for one in self.waiting if one.priority == priority]
        return (
            policy is not None and policy.max_queue_size is not None and len(alike) >= policy.max_queue_size
        )

    def _advance(self, now_us: int) -> None:
        self.polled = self.polled and now_us == self.now_us
        self.now_us = now_us

    def _leave(self, gone: Iterable[Request | None], *, expected: set[Request]) -> None:
        listed = [one for one in gone if one is not None]
        assert len(listed) == len(set(listed)) and set(listed) == expected
        for request in listed:
            del self.waiting[request]
            self.late.discard(request)
            self.answered.add(request)
        self._forget_leads()

    def _past_deadline(self, requests: Iterable[Request]) -> set[Request]:
        return {
            one
            for one in requests
            if one not in self.undated and one.deadline_us is not None and one.deadline_us <= self.now_us
        }

    def _in_lane(self, lane: str) -> list[Request]:
        """Who waits in a lane, in the order in which they are to leave if all were one tenant's."""
        return sorted(
            (one for one in self.waiting if one.lane == lane),
            key=lambda one: (-self._level(one), one.arrival_us, self.waiting[one]),
        )

    def _level(self, request: Request) -> int:
        return -1 if request in self.late else request.priority

    def _oldest_us(self, lane: str) -> int:
        queue = self._in_lane(lane)
        return min(one.arrival_us for one in [one for one in queue if one not in self.late] or queue)

    def _delay_ends_us(self, lane: str) -> int:
        return self._oldest_us(lane) + int(self.scheduler.settings.max_queue_delay_ms * 1000)

    def _leaves_at_us(self, lane: str) -> int:
        """When, by time alone, a batch of a lane is to leave if there is room; 0: now."""
        settings = self.scheduler.settings
        if self._is_full(lane) or self._preferred(lane):
            return 0
        if not self._defers(lane):
            return self._delay_ends_us(lane)
        if len(self._in_lane(lane)) >= self._efficient(lane):
            return 0
        ends_us = self._delay_ends_us(lane) if settings.max_queue_delay_ms else NEVER
        return min(ends_us, self._latest_start_us(lane))

    def _preferred(self, lane: str) -> int:
        sizes = self.scheduler.settings.preferred_batch_sizes
        return max((size for size in sizes if size <= len(self._in_lane(lane))), default=0)

    # --- the policy deferred -------------------------------------------------------------------------------

    def _objective_us(self, request: Request) -> int:
        target_ms = self.scheduler.settings.target_latency_ms
        if (deadline_us := self.deadlines_us[request]) is not None:
            return deadline_us
        return NEVER if target_ms is None else request.arrival_us + int(target_ms * 1000)

    def _earliest_us(self, lane: str) -> int:
        return min((self._objective_us(r) for r in self._in_lane(lane) if r not in self.late), default=NEVER)

    def _defers(self, lane: str) -> bool:
        deferred = self.scheduler.settings.policy == "deferred" and self.scheduler.capacity.latency.known
        return deferred and self._earliest_us(lane) < NEVER

    def _efficient(self, lane: str) -> int:
        latency, most = self.scheduler.capacity.latency_of(lane), self.scheduler.settings.max_batch_size
        rates = {size: size / max(1, latency.of(size)) for size in range(1, most + 1)}
        return min(size for size, rate in rates.items() if rate >= 0.85 * rates[most])

    def _done_us(self, lane: str, size: int) -> int:
        capacity = self.scheduler.capacity
        return self.now_us + capacity.trip_us + capacity.latency_of(lane).at_most(size)

    def _latest_start_us(self, lane: str) -> int:
        more = min(len(self._in_lane(lane)) + 1, self.scheduler.settings.max_batch_size)
        return self._earliest_us(lane) - (self._done_us(lane, more) - self.now_us)

    def _must_be_done_us(self, request: Request) -> int:
        deadline_us = self.deadlines_us[request]
        soft = request in self.late or self.scheduler.settings.delays_expired(request.priority)
        return NEVER if deadline_us is None or soft else deadline_us

    def _check_given_up(self, refusals: list[Refusal]) -> None:
        """Each cannot be met at all, or its lane cannot be as one batch that leaves now."""
        settings = self.scheduler.settings
        given_up = [one.request for one in refusals if one.request is not None]
        assert settings.policy == "deferred" or not given_up
        assert {one.reason for one in refusals} <= {"early"}
        possible = [one for one in given_up if self._done_us(one.lane, 1) <= self._must_be_done_us(one)]
        assert all(self._must_be_done_us(one) < NEVER for one in given_up)
        for lane in {one.lane for one in possible}:
            others = [
                one for one in self._in_lane(lane) if self._done_us(one.lane, 1) <= self._must_be_done_us(one)
            ]
            size = len(others)
            earliest_us = min(map(self._must_be_done_us, others))
            assert size > settings.max_batch_size or self._done_us(lane, size) > earliest_us
            assert len([one for one in possible if one.lane == lane]) < size, "nobody gains by it"
        self._leave(given_up, expected=self.waiting.keys() & set(given_up))

    def _put_behind(self, delayed: set[Request], dispatches: list[Dispatch]) -> None:
        """These expired, and stand behind all others. In which order, those of one poll, it believes."""
        self.late |= delayed
        in_order = [one for dispatch in dispatches for one in dispatch.requests]
        in_order += [one for lane in self.scheduler._queue.lanes.values() for one in lane]
        for request in in_order:
            if request in delayed:
                self.number += 1
                self.waiting[request] = self.number

    def _check_late_ones_only_wait(self) -> None:
        assert self.late <= self.waiting.keys()
        assert not self.late & self.answered

    # --- turns ---------------------------------------------------------------------------------------------

    def _take_turns(self, batch: list[Request]) -> None:
        """Tenants that wait all the while are served alike, by weight, to within one request of each: by how
        much each leads each other one, with the least and the most it was since both wait."""
        weights = self.scheduler.settings.tenant_weights
        for request in batch:
            level = self._level(request)
            share = max(1, request.cost) / weights.get(request.tenant, 1)
            others = {one.tenant for one in self._in_lane(request.lane) if self._level(one) == level}
            for other in others - {request.tenant}:
                for one, two, by in ((request.tenant, other, share), (other, request.tenant, -share)):
                    lead, least, most = self.leads.get((request.lane, level, one, two), (0.0, 0.0, 0.0))
                    lead += by
                    least, most = min(least, lead), max(most, lead)
                    self.leads[request.lane, level, one, two] = lead, least, most
                    fair = MAX_COST / weights.get(one, 1) + MAX_COST / weights.get(two, 1)
                    assert most - least <= fair + 1e-6, f"{one!r} and {two!r} are not served alike"
            del self.waiting[request]
            self.late.discard(request)
            self._forget_leads()

    def _forget_leads(self) -> None:
        """Who does not wait has no claim."""
        there = {(one.lane, self._level(one), one.tenant) for one in self.waiting}
        self.leads = {
            (lane, level, one, two): lead
            for (lane, level, one, two), lead in self.leads.items()
            if {(lane, level, one), (lane, level, two)} <= there
        }

    # --- what may leave ------------------------------------------------------------------------------------

    def _is_full(self, lane: str) -> bool:
        queue, settings = self._in_lane(lane), self.scheduler.settings
        return (
            len(queue) >= settings.max_batch_size
            or sum(map(size_of, queue)) >= MAX_BATCH_BYTES
            or (
                settings.max_batch_cost is not None
                and sum(one.cost for one in queue) >= settings.max_batch_cost
            )
        )

    def _over(self, batch: list[Request]) -> bool:
        settings = self.scheduler.settings
        return sum(map(size_of, batch)) > MAX_BATCH_BYTES or (
            settings.max_batch_cost is not None and sum(one.cost for one in batch) > settings.max_batch_cost
        )

    def _check_who_leaves(self, dispatch: Dispatch) -> None:
        """From the front of one lane, level by level and each tenant in order; as many as may."""
        batch, settings = dispatch.requests, self.scheduler.settings
        assert batch and set(batch) <= self.waiting.keys() and len(set(batch)) == len(batch)
        levels = [self._level(one) for one in batch]
        assert levels == sorted(levels, reverse=True)
        rest = [one for one in self._in_lane(dispatch.lane) if one not in batch]
        assert all(self._level(one) <= levels[-1] for one in rest)
        for level, tenant in {(self._level(one), one.tenant) for one in batch}:
            mine = [one for one in batch if (self._level(one), one.tenant) == (level, tenant)]
            queue = [one for one in self._in_lane(dispatch.lane) if one.tenant == tenant]
            assert mine == [one for one in queue if self._level(one) == level][: len(mine)]
        size = self._preferred(dispatch.lane) if dispatch.reason == "preferred" else settings.max_batch_size
        assert len(batch) <= size and (len(batch) == 1 or not self._over(batch))
        if self._defers(dispatch.lane):
            done_us = self._done_us(dispatch.lane, len(batch))
            in_time = all(done_us <= self._must_be_done_us(one) for one in batch)
            assert in_time or self._may_be_tried(dispatch)
        elif rest and len(batch) < size:
            first = {one.tenant: one for one in reversed(rest) if self._level(one) == self._level(rest[0])}
            assert any(self._over([*batch, one]) for one in first.values())

    def _may_be_tried(self, dispatch: Dispatch) -> bool:
        """Nobody could be met, and so nothing would be learned."""
        lane = dispatch.lane
        soonest_us = self._done_us(lane, 1)
        none_in_time = all(self._must_be_done_us(one) < soonest_us for one in self._in_lane(lane))
        return none_in_time and all(riders[0].lane != lane for riders in self.riding.values())

    def _check_dispatch(self, dispatch: Dispatch, departing: int) -> None:
        lane, settings = dispatch.lane, self.scheduler.settings
        outside = len(self.riding) + departing
        assert not self._past_deadline(set(dispatch.requests) - dispatch.undated)
        # Who is to be served though it expires has no deadline on its ride.
        for one in dispatch.requests:
            deadline_us = self._must_be_done_us(one)
            assert dispatch.deadline_us(one) == (None if deadline_us == NEVER else deadline_us)
        self._check_who_leaves(dispatch)
        # Why: the first reason that holds.
        queue = self._in_lane(lane)
        hurry_us = 1.5 * self.longest_ride_us + 2000
        deadlines_us = [self.deadlines_us[one] for one in queue]
        in_a_hurry = any(one and one <= self.now_us + hurry_us for one in deadlines_us)
        if self._is_full(lane):
            assert dispatch.reason == "full"
        elif self._preferred(lane):
            assert dispatch.reason == "preferred"
        elif dispatch.reason == "efficient":
            assert self._defers(lane) and len(queue) >= self._efficient(lane)
        elif dispatch.reason == "deadline":
            assert in_a_hurry or (self._defers(lane) and self.now_us >= self._latest_start_us(lane))
        else:
            assert dispatch.reason == ("delay" if settings.max_queue_delay_ms else "idle")
            assert dispatch.reason == "delay" or not self._defers(lane)
            assert self.now_us >= self._delay_ends_us(lane)
        # Where to: an idle process, or one that soon is; to any, one ahead, if it is full.
        assert self._has_room(lane, outside)
        # Before whom: no lane that might leave now has a better claim.
        for other in LANES:
            if other != lane and self._may_leave(other, outside):
                assert self._rank(lane) <= self._rank(other)
        self._take_turns(dispatch.requests)

    def _has_room(self, lane: str, outside: int) -> bool:
        capacity, workers = self.scheduler.capacity, self.scheduler.model_processes
        if outside < workers:
            return True
        if outside >= 2 * workers:
            return False
        if self._is_full(lane) and self.scheduler.settings.policy != "deferred":
            return True
        executing = capacity._executing[outside - workers :]
        if not capacity.latency.known or not executing:
            return False
        done_us, batch_id = executing[0]
        # One that takes longer than it should may take any time.
        return done_us - capacity.trip_us <= self.now_us <= done_us + capacity._grace_us(batch_id)

    def _may_leave(self, lane: str, outside: int) -> bool:
        if not self._in_lane(lane) or not self._has_room(lane, outside):
            return False
        return self.now_us >= self._leaves_at_us(lane)

    def _rank(self, lane: str) -> tuple[int, int]:
        return -max(map(self._level, self._in_lane(lane))), self._oldest_us(lane)

    def _check_nobody_was_overlooked(self, departing: int) -> None:
        outside = len(self.riding) + departing
        assert not [lane for lane in LANES if self._may_leave(lane, outside)]
        if outside < self.scheduler.model_processes and self.scheduler.settings.max_queue_delay_ms:
            last_us = self.now_us + 2000
            in_time = self.waiting.keys() - self.late
            assert all(one.deadline_us is None or one.deadline_us > last_us for one in in_time)

    def _depart(self, dispatch: Dispatch, fate: int | None) -> None:
        gone: set[Entry] = set()
        if fate is not None:
            entries = list(dict.fromkeys(one.entry for one in dispatch.requests))
            gone = set(entries[: 1 + fate % len(entries)])
        # Nobody of an entry that vanished waits any more, whether or not they were to leave.
        left_behind = {one for one in self.waiting if one.entry in gone}
        self.scheduler.forget(one for entry in gone for one in entry.requests)
        self._leave(left_behind, expected=left_behind)
        self.answered.update(one for one in dispatch.requests if one.entry in gone)
        riders = [one for one in dispatch.requests if one.entry not in gone]
        if not riders:
            self.scheduler.cancel()
            return
        self.number += 1
        batch_id = f"batch {self.number}"
        self.riding[batch_id] = riders
        self.undated |= dispatch.undated
        self.scheduler.launch(batch_id, dispatch._replace(requests=riders), self.now_us)

    def _everybody_arrives(self) -> None:
        """Whatever happened before: with one worker that does its work, nobody is left."""
        self.scheduler.model_processes = 1
        for _ in range(10 + 2 * self.number):
            self.poll(fate=None)
            while self.riding:
                self.settle(0, 0)
            if not self.waiting:
                return
            self._advance(max(self.now_us, self.scheduler.wake_at_us() or 0))
        raise AssertionError(f"{len(self.waiting)} wait for ever")


def size_of(request: Request) -> int:
    """What a request brings along."""
    return len(request.body) + sum(map(len, (request.extra or {}).values()))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # it says more of the machine than of the test
)
