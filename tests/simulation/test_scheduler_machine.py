"""The scheduler in virtual time, against a plain account of who waits, who rides and who is answered.

The account knows the rules at the top of `core/scheduler.py` and nothing of how they are kept: it looks at
every request each time. Whatever happens, in whatever order, both must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.messages import Entry, ModelSettings, Refusal, Request
from carpool_batcher.core import scheduler as module
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler

MAX_BATCH_BYTES = 40  # small, so that batches reach it
START_US = 1_000_000
LANES = ("", "a", "b")


@dataclass(frozen=True)
class Traits:
    """What a producer says of a request, and when it arrived: before now, or after, by clocks that differ."""

    lane: str
    priority: int
    cost: int
    size_bytes: int
    extra_bytes: int
    expiration_us: int | None
    ago_us: int


traits = st.builds(
    Traits,
    lane=st.sampled_from(LANES),
    priority=st.sampled_from((0, 4, 4, 4, 9)),
    cost=st.sampled_from((0, 1, 1, 1, 2, 5)),
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
)
numbers_of_workers = st.integers(0, 3)
numbers = st.integers(0, 1000)


class SchedulerMachine(RuleBasedStateMachine):
    """`waiting`, `riding` and `answered` are the account: where each request is that was admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = mock.patch.object(module, "MAX_BATCH_BYTES", MAX_BATCH_BYTES)
        self.limit.start()
        self.now_us = START_US
        self.waiting: dict[Request, int] = {}
        self.riding: dict[str, list[Request]] = {}
        self.answered: set[Request] = set()
        self.polled = False  # nothing happened since the last poll, and no time passed
        self.number = 0
        self.longest_ride_us = 0
        self.most_waiting_bytes = 0

    def teardown(self) -> None:
        try:
            self._everybody_arrives()
        finally:
            self.limit.stop()

    # --- what happens --------------------------------------------------------------------------------------

    @initialize(settings=model_settings, workers=numbers_of_workers, found=st.lists(traits, max_size=3))
    def take_over(self, settings: ModelSettings, workers: int, found: list[Traits]) -> None:
        self.scheduler = Scheduler(settings, workers)
        if found:
            riders = [self._request(Entry("0-0", START_US), one) for one in found]
            self.riding["found"] = riders
            self.scheduler.ride("found", riders, self.now_us - 1000)

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
        while (wake_us := self.scheduler.wake_at()) is not None and wake_us <= end_us:
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

    @rule(choice=numbers)
    @precondition(lambda self: self.riding)
    def settle(self, choice: int) -> None:
        batch_id = list(self.riding)[choice % len(self.riding)]
        self.answered.update(self.riding.pop(batch_id))
        self.longest_ride_us = max(self.longest_ride_us, self.now_us - START_US + 1000)
        self.polled = False
        self.scheduler.settle(batch_id, self.now_us)
        self.scheduler.settle(batch_id, self.now_us)  # a word that comes twice says nothing new

    @rule(workers=numbers_of_workers)
    def workers_come_and_go(self, workers: int) -> None:
        self.scheduler.workers = workers
        self.polled = False

    @rule(settings=model_settings)
    def settings_change(self, settings: ModelSettings) -> None:
        self.scheduler.settings = settings
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
        due = self._past_deadline(self.waiting)
        overdue = {
            (batch_id, position, one)
            for batch_id, riders in self.riding.items()
            for position, one in enumerate(riders)
            if one in self._past_deadline(riders) and one not in self.answered
        }
        decisions = self.scheduler.poll(self.now_us)

        refusals = [one for one in decisions if isinstance(one, Refusal)]
        assert {one.status for one in refusals} <= {"DEADLINE_EXCEEDED"}
        self._leave([one.request for one in refusals], expected=due)

        expired = [tuple(one) for one in decisions if isinstance(one, Expire)]
        assert len(expired) == len(overdue) and set(expired) == overdue
        self.answered.update(one for _, _, one in overdue)

        dispatches = [one for one in decisions if isinstance(one, Dispatch)]
        for number, one in enumerate(dispatches):
            self._check_dispatch(one, departing=number)
        self._check_nobody_was_overlooked(len(dispatches))
        for number, one in enumerate(dispatches):
            self._depart(one, fate if number == 0 else None)
        self.polled = not dispatches
        if self.polled:
            wake_us = self.scheduler.wake_at()
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

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.scheduler._lanes) <= 1 + len({one.lane for one in self.waiting})
        # What alarms hold on to is looked at now and then, while others begin to be watched.
        self.most_waiting_bytes = max(
            self.most_waiting_bytes, self.scheduler.waiting_bytes + 1000 * len(self.waiting)
        )
        watched = [one for _, _, alarm in self.scheduler._alarms for one in alarm.requests]
        held_bytes = sum(map(size_of, watched)) + 1000 * len(watched)
        assert held_bytes <= 3 * self.most_waiting_bytes + MAX_BATCH_BYTES

    @invariant()
    def nobody_is_woken_up_late(self) -> None:
        """By time alone: what happens is followed by a poll anyway."""
        if not self.polled:
            return
        moments = [one.deadline_us for one in self.waiting if one.deadline_us is not None]
        moments += [
            one.deadline_us
            for riders in self.riding.values()
            for one in riders
            if one.deadline_us is not None and one not in self.answered
        ]
        if self.scheduler.workers > len(self.riding):
            moments += [self._delay_ends_us(lane) for lane in LANES if self._in_lane(lane)]
        if moments:
            wake_us = self.scheduler.wake_at()
            assert wake_us is not None and wake_us <= min(moments)

    # --- the account ---------------------------------------------------------------------------------------

    def _request(self, entry: Entry, one: Traits) -> Request:
        self.number += 1
        arrival_us = self.now_us - one.ago_us
        return Request(
            entry,
            f"r{self.number}",
            b"x" * one.size_bytes,
            arrival_us=arrival_us,
            deadline_us=None if one.expiration_us is None else arrival_us + one.expiration_us,
            priority=one.priority,
            lane=one.lane,
            cost=one.cost,
            extra={"": b"x" * one.extra_bytes} if one.extra_bytes else None,
        )

    def _offer(self, request: Request) -> None:
        settings = self.scheduler.settings
        waiting_bytes = sum(map(size_of, self.waiting)) + size_of(request)
        expected = None
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            expected = "INVALID_ARGUMENT"
        elif len(self.waiting) >= settings.max_queue_size or waiting_bytes > settings.max_queue_bytes:
            expected = "RESOURCE_EXHAUSTED"
        refused = self.scheduler.offer(request, self.now_us)
        assert (refused and refused.status) == expected
        if refused is None:
            self.number += 1
            self.waiting[request] = self.number
        self.polled = False

    def _advance(self, now_us: int) -> None:
        self.polled = self.polled and now_us == self.now_us
        self.now_us = now_us

    def _leave(self, gone: Iterable[Request | None], *, expected: set[Request]) -> None:
        listed = [one for one in gone if one is not None]
        assert len(listed) == len(set(listed)) and set(listed) == expected
        for request in listed:
            del self.waiting[request]
            self.answered.add(request)

    def _past_deadline(self, requests: Iterable[Request]) -> set[Request]:
        return {one for one in requests if one.deadline_us is not None and one.deadline_us <= self.now_us}

    def _in_lane(self, lane: str) -> list[Request]:
        """Who waits in a lane, in the order in which they are to leave."""
        return sorted(
            (one for one in self.waiting if one.lane == lane),
            key=lambda one: (-one.priority, one.arrival_us, self.waiting[one]),
        )

    def _delay_ends_us(self, lane: str) -> int:
        delay_us = int(self.scheduler.settings.max_queue_delay_ms * 1000)
        return min(one.arrival_us for one in self._in_lane(lane)) + delay_us

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

    def _next_batch(self, lane: str) -> list[Request]:
        """The longest row from the front of the lane that is within all limits."""
        settings, batch = self.scheduler.settings, list[Request]()
        for one in self._in_lane(lane):
            grown = [*batch, one]
            over = (
                len(grown) > settings.max_batch_size
                or sum(map(size_of, grown)) > MAX_BATCH_BYTES
                or (
                    settings.max_batch_cost is not None
                    and sum(r.cost for r in grown) > settings.max_batch_cost
                )
            )
            if batch and over:
                break
            batch = grown
        return batch

    def _check_dispatch(self, dispatch: Dispatch, departing: int) -> None:
        lane, settings = dispatch.lane, self.scheduler.settings
        outside = len(self.riding) + departing
        # Who leaves: the front of one lane, and as many as may.
        assert set(dispatch.requests) <= self.waiting.keys()
        assert not self._past_deadline(dispatch.requests)
        assert dispatch.requests == self._next_batch(lane)
        # Why: the first reason that holds.
        queue = self._in_lane(lane)
        hurry_us = 1.5 * self.longest_ride_us + 2000
        in_a_hurry = any(one.deadline_us and one.deadline_us <= self.now_us + hurry_us for one in queue)
        if self._is_full(lane):
            assert dispatch.reason == "full"
        elif dispatch.reason == "deadline":
            assert in_a_hurry
        else:
            assert dispatch.reason == ("delay" if settings.max_queue_delay_ms else "idle")
            assert self.now_us >= self._delay_ends_us(lane)
        # Where to: one batch for each process, one more if it is full.
        assert outside < self.scheduler.workers * (2 if dispatch.reason == "full" else 1)
        # Before whom: no lane that might leave now has a better claim.
        for other in LANES:
            if other != lane and self._may_leave(other, outside):
                assert self._rank(lane) <= self._rank(other)
        for request in dispatch.requests:
            del self.waiting[request]

    def _may_leave(self, lane: str, outside: int) -> bool:
        if not self._in_lane(lane):
            return False
        if self._is_full(lane):
            return outside < 2 * self.scheduler.workers
        return outside < self.scheduler.workers and self.now_us >= self._delay_ends_us(lane)

    def _rank(self, lane: str) -> tuple[int, int]:
        queue = self._in_lane(lane)
        return -max(one.priority for one in queue), min(one.arrival_us for one in queue)

    def _check_nobody_was_overlooked(self, departing: int) -> None:
        outside = len(self.riding) + departing
        assert not [lane for lane in LANES if self._may_leave(lane, outside)]
        if outside < self.scheduler.workers and self.scheduler.settings.max_queue_delay_ms:
            last_us = self.now_us + 2000
            assert all(one.deadline_us is None or one.deadline_us > last_us for one in self.waiting)

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
        batch_id = None
        if riders:
            self.number += 1
            batch_id = f"batch {self.number}"
            self.riding[batch_id] = riders
        self.scheduler.departed(batch_id, riders, self.now_us)

    def _everybody_arrives(self) -> None:
        """Whatever happened before: with one worker that does its work, nobody is left."""
        self.scheduler.workers = 1
        for _ in range(10 + 2 * self.number):
            self.poll(fate=None)
            while self.riding:
                self.settle(0)
            if not self.waiting:
                return
            self._advance(max(self.now_us, self.scheduler.wake_at() or 0))
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
