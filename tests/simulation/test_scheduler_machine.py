"""The scheduler in virtual time, compared with a plain reference model under random events.

The reference knows single requests only, and the scheduler has them in runs. The reference records which
requests wait, are in flight, or are answered, and what Redis would hold. It checks the rules at the top of
`core/scheduler.py` by looking at every request each time, and knows nothing of the data structures. It takes
from the scheduler how long a batch takes, when a process becomes free, and how dispatches are spaced: these
have unit tests (`test_latency.py`, `test_capacity.py`). For turns between tenants it checks that they are
consistent over all lanes, and not one order.

Here are the events, and what holds at any time. The reference, what it expects and what it checks of
decisions are in `support.scheduler_reference`.
"""

from __future__ import annotations

from itertools import groupby

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from carpool.messages.requests import Entry, Withdrawal
from carpool.messages.results import Refusal
from carpool.messages.settled import ExecutedOf
from carpool.model_settings import ModelSettings
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler
from support.scheduler_harness import settle
from support.scheduler_reference.decisions import DecisionChecks
from support.scheduler_reference.drawn import (
    LANES,
    START_US,
    TENANTS,
    CustomLimit,
    Traits,
    model_settings,
    names_of,
    numbers,
    numbers_of_processes,
    traits,
)


class SchedulerMachine(DecisionChecks):
    """The events, a poll with its checks, and what holds at any time."""

    def teardown(self) -> None:
        try:
            if not self.in_poll:  # or a poll failed, and what follows would hide why
                self._check_that_all_requests_settle()
        finally:
            self.limit.stop()

    # --- events --------------------------------------------------------------------------------------------

    @initialize(
        settings=model_settings,
        processes=numbers_of_processes,
        found=st.lists(traits, max_size=3),
        custom=st.sampled_from((False, False, False, True)),
    )
    def take_over(self, settings: ModelSettings, processes: int, found: list[Traits], custom: bool) -> None:
        self.scheduler = Scheduler(settings, processes)
        self._count_looks()
        self.custom = custom
        if custom:
            self.scheduler.custom_policy = CustomPolicy(CustomLimit())
        if found:
            runs = [self._run(Entry("0-0", START_US), fields) for fields in found]
            self.in_flight["found"] = self._items_of(runs)
            self.scheduler.in_flight.adopt("found", Dispatch(runs, "idle", runs[0].lane), self.now_us - 1000)

    @rule(of_entry=st.lists(traits, min_size=1, max_size=4))
    def offer(self, of_entry: list[Traits]) -> None:
        """The batcher reads an entry."""
        entry = self._entry([(fields, self._names(fields)) for fields in of_entry])
        self.redis[entry.id] = set(names_of(entry.runs))
        self._offer(entry)

    @rule(choice=numbers)
    @precondition(lambda self: self.copies)
    def read_outdated_copy(self, choice: int) -> None:
        """The batcher reads an entry that was dispatched, refused or put back in the meantime."""
        entry_id, runs = self.copies[choice % len(self.copies)]
        if entry_id in self.table or entry_id in self.redis:
            return
        entry = self._entry(runs, entry_id)
        self._offer(entry)

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

    @rule(
        choice=numbers,
        compute_us=st.sampled_from((0, 500, 3_000, 3_200, 20_000)),
        executed=st.sampled_from((None, 0, 1, 2)),
    )
    @precondition(lambda self: self.in_flight)
    def settle(self, choice: int, compute_us: int, executed: int | None) -> None:
        batch_id = list(self.in_flight)[choice % len(self.in_flight)]
        self.answered.update(self.in_flight.pop(batch_id))
        self.turnaround_us_max = max(self.turnaround_us_max, self.now_us - START_US + 1000)
        self.polled, self.closed_until_us = False, 0
        curve = self.scheduler.learned.latency.curve
        settle(self.scheduler, batch_id, compute_us, self.now_us, executed=executed)
        settle(self.scheduler, batch_id, compute_us, self.now_us, executed=executed)  # again: has no effect
        if not compute_us or executed == 0:
            assert self.scheduler.learned.latency.curve is curve, "only what was executed teaches"

    @rule(tenant=st.sampled_from(TENANTS), executed=st.sampled_from((0, 0, 1)))
    def producer_is_observed(self, tenant: str, executed: int) -> None:
        """In some batches none of a tenant's requests was executed, or all were."""
        for _ in range(10):
            self.scheduler.learned.producers.observe([], [ExecutedOf((tenant, ""), 1, executed)])

    @rule(choice=numbers)
    @precondition(lambda self: self.in_flight)
    def lose_batch(self, choice: int) -> None:
        """A batch is no longer in Redis, and the batcher did not see it settle."""
        batch_id = list(self.in_flight)[choice % len(self.in_flight)]
        self.answered.update(self.in_flight.pop(batch_id))
        self.polled, self.closed_until_us = False, 0
        self.scheduler.in_flight.forget(batch_id, self.now_us)

    @rule(processes=numbers_of_processes)
    def model_processes_change(self, processes: int) -> None:
        self.scheduler.model_processes = processes
        self.polled, self.closed_until_us = False, 0

    @rule(settings=model_settings)
    def settings_change(self, settings: ModelSettings) -> None:
        self.scheduler.settings = settings
        self.leads.clear()
        self.polled, self.closed_until_us = False, 0

    @rule(choices=st.sets(numbers, max_size=4))
    def withdraw(self, choices: set[int]) -> None:
        known = [*self.waiting, *self.answered]
        named = {known[choice % len(known)].name for choice in choices if known}
        self.number += 1
        self.withdrawals.append(Entry(f"{self.number}-0", self.now_us))
        self.withdrawn.update(r for r in self.waiting if r.name in named)
        self.scheduler.withdraw(Withdrawal(self.withdrawals[-1], frozenset(named)))
        self.polled = False
        self._carry_out_withdrawals()

    @rule(choices=st.sets(numbers, min_size=1, max_size=3))
    @precondition(lambda self: self.table)
    def forget(self, choices: set[int]) -> None:
        """Entries are no longer in Redis, and the batcher finds that out."""
        entries = list(self.table.values())
        for entry in dict.fromkeys(entries[choice % len(entries)] for choice in choices):
            self.redis.pop(entry.id, None)
            self._forget(entry)

    @rule(choice=numbers)
    @precondition(lambda self: self.redis)
    def lose_entry(self, choice: int) -> None:
        """An entry is no longer in Redis: another batcher dispatched it, or it was deleted by its ID."""
        del self.redis[list(self.redis)[choice % len(self.redis)]]

    # --- polls ---------------------------------------------------------------------------------------------

    @rule(fate=st.one_of(st.none(), numbers))
    def poll(self, fate: int | None) -> None:
        """Check every decision, and carry it out.

        With a `fate`, some or all entries of the first dispatch are no longer in Redis, because another
        batcher dispatched them.
        """
        self._carry_out_withdrawals()
        past = self._past_deadline(self.waiting) - self.delayed
        delayed = {r for r in past if self.scheduler.settings.delays_expired(r.priority)}
        overdue = {
            (batch_id, position, r)
            for batch_id, batch in self.in_flight.items()
            for position, r in enumerate(batch)
            if r in self._past_deadline(batch) and r not in self.answered
        }
        self.in_poll, self.looks, self.overtaken_max = True, 0, 0
        decisions = self.scheduler.poll(self.now_us)
        if self.now_us < self.closed_until_us:
            # With one more batch ahead it may be known when another process is free, and so for others.
            reasons = [decision.reason for decision in decisions if isinstance(decision, Dispatch)]
            assert set(reasons[:1]) <= self.ahead

        refusals = [decision for decision in decisions if isinstance(decision, Refusal)]
        expired_waiting = [refusal for refusal in refusals if refusal.reason == "waiting"]
        self._remove_refused(expired_waiting, expected=past - delayed)
        self._delay(delayed, decisions)
        self._check_that_delayed_requests_wait()

        expired = [decision for decision in decisions if isinstance(decision, Expire)]
        listed = [
            (one.batch_id, one.position + at, item)
            for one in expired
            for at, item in enumerate(self._items_of([one.run]))
        ]
        assert len(listed) == len(overdue) and set(listed) == overdue
        self.answered.update(r for _, _, r in overdue)

        dispatches: list[Dispatch] = []
        for are_refusals, group in groupby(decisions, key=lambda decision: isinstance(decision, Refusal)):
            if are_refusals:
                refused = [r for r in group if isinstance(r, Refusal) and r.reason != "waiting"]
                taken = len(self.in_flight) + len(dispatches)
                self._check_failed(refused) if self.custom else self._check_early(refused, taken)
                continue
            for dispatch in (decision for decision in group if isinstance(decision, Dispatch)):
                self._check_dispatch(dispatch, reserved=len(dispatches))
                dispatches.append(dispatch)
        self._check_that_no_batch_was_missed(len(dispatches))
        self._carry_out_refusals(refusals)
        self._apply(dispatches, fate)
        self.polled = not dispatches
        if self.polled and not self.withdrawals:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is None or wake_us > self.now_us, "immediate wake-up without effect"
        self.closed_until_us = self.scheduler.earliest_dispatch_us()
        self.in_poll = False

    @property
    def ahead(self) -> set[str]:
        """The reasons of batches that need not be dispatched yet, but may be."""
        return set() if self._policy == "deferred" else {"full"}

    def _check_that_all_requests_settle(self) -> None:
        """After any events, one process that executes all batches serves all requests."""
        self.scheduler.model_processes, self.closed_until_us = 1, 0
        for _ in range(10 + 2 * self.number):
            self.poll(fate=None)
            while self.in_flight:
                self.settle(0, 0, None)
            if not self.waiting:
                return
            self._advance(max(self.now_us, self.scheduler.wake_at_us() or 0))
        raise AssertionError(f"{len(self.waiting)} wait for ever")

    # --- invariants ----------------------------------------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        in_flight = [r for batch in self.in_flight.values() for r in batch]
        assert len(in_flight) == len(set(in_flight)) and not self.waiting.keys() & set(in_flight)
        assert not self.answered & self.waiting.keys()
        assert list(self.scheduler.in_flight.batches) == list(self.in_flight)

    @invariant()
    def totals_of_the_queue_are_right(self) -> None:
        waiting = self._items_of(run for lane in self.scheduler.queue.lanes.values() for run in lane)
        assert len(waiting) == len(self.waiting) and set(waiting) == self.waiting.keys()
        assert self.scheduler.queue.count == len(self.waiting)
        assert self.scheduler.queue.bytes == sum(r.bytes for r in self.waiting)
        by_priority = [sum(r.priority == priority for r in self.waiting) for priority in range(10)]
        assert self.scheduler.queue._count_by_priority == by_priority
        for name, lane in self.scheduler.queue.lanes.items():
            in_lane = self._in_lane(name)
            totals = len(in_lane), sum(r.cost for r in in_lane), sum(r.bytes for r in in_lane)
            assert (lane.count, lane.cost, lane.bytes) == totals
            assert lane.executable == len(self._planned(name))
        delayed = self._items_of(
            run for lane in self.scheduler.queue.lanes.values() for run in lane if run.is_late
        )
        assert self.delayed == set(delayed)
        oldest_us = min((self._oldest_us(lane) for lane in LANES if self._in_lane(lane)), default=None)
        assert self.scheduler.oldest_arrival_us() == oldest_us

    @invariant()
    def runs_of_an_entry_are_what_redis_holds(self) -> None:
        """A put-back entry gets what its runs have, so each request must be in exactly one of them."""
        for entry in self.table.values():
            names = names_of(entry.runs)
            assert all(run.entry is entry and len(run.bodies) == len(run) for run in entry.runs)
            assert len(set(names)) == len(names)
            if entry.id in self.redis:
                assert self.redis[entry.id] == set(names)
            assert {self.items[entry, name] for name in names} <= self.waiting.keys()

    @invariant()
    def at_most_three_batches_per_process_are_in_flight(self) -> None:
        self.processes_max = max(self.processes_max, self.scheduler.model_processes)
        assert len(self.in_flight.keys() - {"found"}) <= 3 * self.processes_max

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.scheduler.queue.lanes) <= 1 + len({r.lane for r in self.waiting})
        # Outdated timers and claims are dropped from time to time only.
        self.waiting_max = max(self.waiting_max, len(self.waiting) + len(self.in_flight))
        assert len(self.scheduler._deadlines._timers) <= 4 * self.waiting_max + 1001
        assert len(self.scheduler._dispatchers.of_any._index._oldest) <= 2 * len(LANES) + 65

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
        if self.withdrawals:
            times_us.append(self.look_due_us)
        free_at_us = self.scheduler.capacity.free_at_us(self.now_us)
        if self.scheduler.model_processes > len(self.in_flight):
            assert free_at_us == self.now_us
        else:
            capacity = self.scheduler.capacity
            free_us = {settles_us - self.scheduler.learned.lead_us for settles_us, _ in capacity._executing}
            assert free_at_us is None or free_at_us in free_us
        if free_at_us is not None and self.paused is None:
            times_us += [max(free_at_us, self._ready_at_us(lane)) for lane in LANES if self._in_lane(lane)]
        if times_us:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is not None and wake_us <= min(times_us)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # that depends on the machine
)
