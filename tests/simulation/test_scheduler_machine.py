"""The scheduler in virtual time, compared with a plain reference model under random events.

The reference knows single requests only, and the scheduler has them in runs. The reference records which
requests wait, are in flight, or are answered, and what Redis would hold. It checks the rules at the top of
`core/scheduler.py` by looking at every request each time, and knows nothing of the data structures. It takes
from the scheduler how long a batch takes, when a process becomes free, and how dispatches are spaced: these
have unit tests (`test_latency.py`, `test_capacity.py`). For turns between tenants it checks that they are
consistent over all lanes, and not one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.messages.requests import Entry, Request, Run, Withdrawal
from carpool.messages.results import Refusal
from carpool.messages.settled import ExecutedOf
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Rows, StoredBody
from carpool_batcher.core import applied_settings
from carpool_batcher.core.learned.transit import magnitude
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.core.policies.deferred import PLANNED_BATCHES_MAX
from carpool_batcher.core.scheduler import Decision, Dispatch, Expire, Scheduler
from carpool_batcher.core.waiting.lane import NEVER_US
from carpool_batcher.core.waiting.lane_index import Claim, Gate
from carpool_batcher.core.waiting.withdrawals import PAUSE_US
from support.scheduler_harness import settle

MAX_BATCH_BYTES = 40  # small, so that batches reach it
START_US = 1_000_000
LANES = ("", "a", "b")
TENANTS = ("", "gold", "silver")
MAX_COST = 5


CUSTOM_SIZE = 2


@dataclass(frozen=True)
class Traits:
    """The fields of a run. `ago_us` is the time since its arrival; negative if clocks differ. `sizes_bytes`
    is of the body of each request; as rows, all have the first size, and one byte more."""

    lane: str
    tenant: str
    priority: int
    cost: int
    sizes_bytes: list[int]
    rows: bool
    extra_bytes: int
    expiration_us: int | None
    ago_us: int


@dataclass(eq=False)
class Item:
    """One request as the reference has it. Of the copies of an entry only one is in Redis."""

    entry: Entry
    name: str
    bytes: int
    arrival_us: int
    deadline_us: int | None
    priority: int
    lane: str
    tenant: str
    cost: int
    is_doubtful: bool = False  # the model is not expected to execute it

    def __hash__(self) -> int:
        """Not of its address: when Hypothesis repeats a history, sets of items must have the same order."""
        return hash(self.name)


class CustomLimit:
    """A custom policy: at most CUSTOM_SIZE requests, and it raises for some."""

    def initialise(self) -> list[Request]:
        return []

    def include(self, batch: list[Request], request: Request) -> bool:
        if raises(request.correlation_id):
            raise ValueError
        batch.append(request)
        return len(batch) <= CUSTOM_SIZE


def raises(name: str) -> bool:
    return name.endswith("3")


sizes_bytes = st.sampled_from((0, 1, 1, 1, 15, 50))
traits = st.builds(
    Traits,
    lane=st.sampled_from(LANES),
    tenant=st.sampled_from(TENANTS),
    priority=st.sampled_from((0, 4, 4, 4, 9)),
    cost=st.sampled_from((0, 1, 1, 1, 2, MAX_COST)),
    sizes_bytes=st.one_of(
        st.lists(sizes_bytes, min_size=1, max_size=2),
        st.lists(sizes_bytes, min_size=1, max_size=9),
        st.builds(lambda size, number: [size] * number, st.sampled_from((0, 1)), st.integers(2, 20)),
    ),
    rows=st.booleans(),
    extra_bytes=st.sampled_from((0, 0, 0, 20)),
    expiration_us=st.sampled_from((None, None, 1, 1_000, 4_000, 5_000, 20_000, 900_000)),
    ago_us=st.sampled_from((0, 0, 0, 3_000, -500)),
)
model_settings = st.builds(
    ModelSettings,
    max_batch_size=st.sampled_from((1, 2, 3, 8)),
    max_batch_cost=st.sampled_from((None, None, 1, 4)),
    max_queue_delay_ms=st.sampled_from((0, 0, 0.5, 3, 10)),
    max_queue_size=st.sampled_from((1, 5, 100, 100)),
    max_queue_bytes=st.sampled_from((30, 1000, 1000)),
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
        self.limit = mock.patch.object(applied_settings, "MAX_BATCH_BYTES", MAX_BATCH_BYTES)
        self.limit.start()
        self.now_us = START_US
        self.items: dict[tuple[Entry, str], Item] = {}
        self.redis: dict[str, set[str]] = {}  # the correlation IDs in each entry
        self.table: dict[str, Entry] = {}  # the entries as the batcher has them
        self.copies: list[tuple[str, list[tuple[Traits, list[str]]]]] = []  # of entries that were changed
        self.carried_out: set[str] = set()  # each ID only once
        self.waiting: dict[Item, int] = {}
        self.undated: set[Item] = set()  # in flight, without a deadline there
        self.delayed: set[Item] = set()
        self.leads: dict[tuple[int, str, str], float] = {}  # see _check_fairness
        self.served: dict[tuple[int, str], float] = {}
        self.held_off: set[tuple[int, str]] = set()  # tenants that could not be served since they were
        self.overtaken = 0  # batches dispatched since a lane that came first had to wait for a process
        self.withdrawals: list[Entry] = []  # those that were not carried out
        self.withdrawn: set[Item] = set()  # by these, of those that waited then
        self.look_due_us = 0
        self.in_flight: dict[str, list[Item]] = {}
        self.answered: set[Item] = set()
        self.polled = False  # no event since the last poll, and no time passed
        self.closed_until_us = 0  # by the last poll; 0 if more happened since than arrivals
        self.in_poll = False  # a poll is being checked, or its check failed
        self.looks = 0  # of the dispatcher at the lanes, in this poll
        self.overtaken_max = 0  # what the dispatcher itself counted at these: it starts anew within a poll
        self.number = 0
        self.turnaround_us_max = 0
        self.processes_max = 0
        self.waiting_max = 0

    def teardown(self) -> None:
        try:
            if not self.in_poll:  # or a poll failed, and what follows would hide why
                self._check_that_all_requests_settle()
        finally:
            self.limit.stop()

    # --- events ------------------------------------------------------------------------------------------

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

    def _count_looks(self) -> None:
        """A poll ends; and what the dispatcher decides by is known."""

        def first(gates: Sequence[Gate], now_us: int) -> Claim | None:
            self.looks += 1
            assert self.looks <= 100 + 4 * self.number, "the dispatcher looks at the lanes for ever"
            self.overtaken_max = max(self.overtaken_max, self.scheduler._dispatcher._overtaken)
            return original(gates, now_us)

        index = self.scheduler._dispatcher._index
        original = index.first
        index.first = first  # type: ignore[method-assign]

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

    def _carry_out_withdrawals(self) -> None:
        """As in each turn of a batcher. What arrived after its withdrawal still waits."""
        waiting = len(self.waiting)
        refusals, cancelled, entries = self.scheduler.carry_out_withdrawals(self.now_us)
        assert not cancelled
        if not entries:
            assert not refusals
            assert not self.withdrawals or self.now_us < self.look_due_us
            return
        assert entries == self.withdrawals
        assert [refusal.status for refusal in refusals] == ["CANCELLED"] * len(refusals)
        self._remove_refused(list(refusals), expected={r for r in self.withdrawn if r in self.waiting})
        self._carry_out_refusals(list(refusals))
        self.withdrawals, self.look_due_us = [], self.now_us + PAUSE_US * waiting
        self.withdrawn.clear()

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

    # --- invariants --------------------------------------------------------------------------------------

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
        assert len(self.scheduler._dispatcher._index._oldest) <= 2 * len(LANES) + 65

    @property
    def ahead(self) -> set[str]:
        """The reasons of batches that need not be dispatched yet, but may be."""
        return set() if self._policy == "deferred" else {"full"}

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
        if free_at_us is not None:
            times_us += [max(free_at_us, self._ready_at_us(lane)) for lane in LANES if self._in_lane(lane)]
        if times_us:
            wake_us = self.scheduler.wake_at_us()
            assert wake_us is not None and wake_us <= min(times_us)

    # --- the reference -----------------------------------------------------------------------------------

    def _names(self, fields: Traits) -> list[str]:
        self.number += len(fields.sizes_bytes)
        return [f"r{self.number - at}" for at in range(len(fields.sizes_bytes))]

    def _entry(self, runs: list[tuple[Traits, list[str]]], entry_id: str | None = None) -> Entry:
        self.number += 1
        entry = Entry(entry_id or f"{self.number}-0", self.now_us)
        # What is read again has another address: `test_any_fields.py` is about requests sent again.
        reply_to = None if entry_id is None else f"{self.number}"
        entry.runs = [self._run(entry, fields, names, reply_to) for fields, names in runs]
        self.copies.append((entry.id, runs))
        return entry

    def _run(
        self, entry: Entry, fields: Traits, names: list[str] | None = None, reply_to: str | None = None
    ) -> Run:
        names = self._names(fields) if names is None else names
        arrival_us = self.now_us - fields.ago_us
        sizes = fields.sizes_bytes
        bodies: Bodies = [StoredBody("x", size) if size == 15 else b"x" * size for size in sizes]
        if fields.rows:
            bodies = Rows(b"x" * sizes[0], b"y" * len(sizes), 1)
            sizes = [1 + sizes[0]] * len(sizes)
        run = Run(
            entry,
            names,
            bodies,
            reply_to=reply_to,
            arrival_us=arrival_us,
            deadline_us=None if fields.expiration_us is None else arrival_us + fields.expiration_us,
            priority=fields.priority,
            lane=fields.lane,
            tenant=fields.tenant,
            cost=fields.cost,
            extra={"": b"x" * fields.extra_bytes} if fields.extra_bytes else None,
        )
        for name, size in zip(names, sizes, strict=True):
            self.items[entry, name] = Item(
                entry, name, size + fields.extra_bytes, arrival_us, run.deadline_us, run.priority, run.lane,
                run.tenant, run.cost,
            )  # fmt: skip
        return run

    def _items_of(self, runs: Iterable[Run]) -> list[Item]:
        return [self.items[run.entry, name] for run in runs for name in run.correlation_ids]

    def _offer(self, entry: Entry) -> None:
        self.table[entry.id] = entry
        refusals: list[Refusal] = []
        for run in list(entry.runs):
            expected = {name: self._admit(self.items[entry, name]) for name in run.correlation_ids}
            refused = self.scheduler.offer(run, self.now_us)
            for item in self._items_of([run]):
                item.is_doubtful = run.is_doubtful
            listed = {name: one.status for one in refused for name in one.correlation_ids}
            assert listed == {name: status for name, status in expected.items() if status is not None}
            assert sum(len(one.correlation_ids) for one in refused) == len(listed)
            refusals += refused
            self.answered.update(self.items[entry, name] for name in listed)
        self._carry_out_refusals(refusals)
        self.polled = False

    def _admit(self, item: Item) -> str | None:
        """The status of a request that is not admitted."""
        settings = self.scheduler.settings
        if settings.max_batch_cost is not None and item.cost > settings.max_batch_cost:
            return "INVALID_ARGUMENT"
        waiting_bytes = sum(r.bytes for r in self.waiting) + item.bytes
        if (
            len(self.waiting) >= settings.max_queue_size
            or waiting_bytes > settings.max_queue_bytes
            or self._is_priority_full(item.priority)
        ):
            return "RESOURCE_EXHAUSTED"
        self.number += 1
        self.waiting[item] = self.number
        return None

    def _is_priority_full(self, priority: int) -> bool:
        policy = self.scheduler.settings.priority_policies.get(priority)
        same = [r for r in self.waiting if r.priority == priority]
        return policy is not None and policy.max_queue_size is not None and len(same) >= policy.max_queue_size

    def _advance(self, now_us: int) -> None:
        self.polled = self.polled and now_us == self.now_us
        self.now_us = now_us

    def _remove(self, removed: Iterable[Item]) -> None:
        for item in removed:
            assert item in self.waiting
            del self.waiting[item]
            self.delayed.discard(item)
            self.answered.add(item)
        self._forget_leads()

    def _remove_refused(self, refusals: list[Refusal], *, expected: set[Item]) -> None:
        listed = self._items_of_refusals(refusals)
        assert len(listed) == len(set(listed)) and set(listed) == expected
        self._remove(listed)

    def _items_of_refusals(self, refusals: list[Refusal]) -> list[Item]:
        for refusal in refusals:
            assert refusal.run is not None and refusal.run.entry is refusal.entry
            assert refusal.run.correlation_ids == list(refusal.correlation_ids)
        return self._items_of(refusal.run for refusal in refusals if refusal.run is not None)

    # --- what the batcher and the scripts do --------------------------------------------------------------

    def _carry_out_refusals(self, refusals: list[Refusal]) -> None:
        self._carry_out([refusal.run for refusal in refusals if refusal.run is not None])

    def _carry_out(self, decided: list[Run]) -> list[Run]:
        """Remove decided runs from their entries in Redis, and put back the others under another ID. Returns
        those of the decided runs that were still there."""
        carried_out: list[Run] = []
        for entry in dict.fromkeys(run.entry for run in decided):
            of_entry = [run for run in decided if run.entry is entry]
            if entry.id not in self.redis:
                self._forget(entry)
                continue
            names = names_of(of_entry)
            assert set(names) <= self.redis[entry.id] and not self.carried_out & set(names)
            self.carried_out.update(names)
            carried_out += of_entry
            put_back = [run for run in entry.runs if run not in of_entry]
            assert sorted([*names, *names_of(put_back)]) == sorted(self.redis.pop(entry.id))
            del self.table[entry.id]
            entry.runs = put_back
            if put_back:
                self.number += 1
                entry.id = f"{self.number}-1"
                self.redis[entry.id] = set(names_of(put_back))
                self.table[entry.id] = entry
        return [run for run in decided if run in carried_out]

    def _forget(self, entry: Entry) -> None:
        """The batcher learns that an entry is not in Redis any more."""
        self.table.pop(entry.id, None)
        self.scheduler.forget(entry.runs)
        waiting = {run for lane in self.scheduler.queue.lanes.values() for run in lane}
        assert waiting.isdisjoint(entry.runs)
        self._remove([r for r in self._items_of(entry.runs) if r in self.waiting])
        entry.runs = []

    # --- the reference, continued -------------------------------------------------------------------------

    def _past_deadline(self, requests: Iterable[Item]) -> set[Item]:
        return {
            r
            for r in requests
            if r not in self.undated and r.deadline_us is not None and r.deadline_us <= self.now_us
        }

    def _in_lane(self, lane: str) -> list[Item]:
        """The waiting requests of a lane, in the order of dispatch if all were of one tenant."""
        return sorted(
            (r for r in self.waiting if r.lane == lane),
            key=lambda r: (-self._rank_of(r), r.arrival_us, self.waiting[r]),
        )

    def _rank_of(self, request: Item) -> int:
        return -1 if request in self.delayed else request.priority

    def _oldest_us(self, lane: str) -> int:
        queue = self._in_lane(lane)
        return min(r.arrival_us for r in [r for r in queue if r not in self.delayed] or queue)

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

    def _preferred_size(self, lane: str) -> int:
        sizes = self.scheduler.settings.preferred_batch_sizes
        return max((size for size in sizes if size <= len(self._in_lane(lane))), default=0)

    # --- the policy deferred -----------------------------------------------------------------------------

    def _due_us(self, request: Item) -> int:
        target_ms = self.scheduler.settings.target_latency_ms
        if request.deadline_us is not None:
            return request.deadline_us
        return NEVER_US if target_ms is None else request.arrival_us + int(target_ms * 1000)

    def _earliest_due_us(self, lane: str) -> int:
        return min((self._due_us(r) for r in self._in_lane(lane) if r not in self.delayed), default=NEVER_US)

    @property
    def _policy(self) -> str:
        """A custom policy decides only which requests are in a batch."""
        return "eager" if self.custom else self.scheduler.settings.policy

    def _is_deferred(self, lane: str) -> bool:
        deferred = self._policy == "deferred" and self.scheduler.learned.latency.known
        return deferred and self._earliest_due_us(lane) < NEVER_US

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

    def _planned(self, lane: str) -> list[Item]:
        """The requests of a lane that the model is expected to execute."""
        return [r for r in self._in_lane(lane) if not r.is_doubtful]

    def _latest_start_us(self, lane: str) -> int:
        more = min(max(1, len(self._planned(lane))) + 1, self.scheduler.settings.max_batch_size)
        return self._earliest_due_us(lane) - self._takes_us(lane, more)

    def _strict_deadline_us(self, request: Item) -> int:
        deadline_us = request.deadline_us
        is_soft = request in self.delayed or self.scheduler.settings.delays_expired(request.priority)
        return NEVER_US if deadline_us is None or is_soft else deadline_us

    def _check_early(self, refusals: list[Refusal], taken: int) -> None:
        """A refused request cannot be in time, or not all of its lane can, as one batch dispatched now."""
        starts_us = self._starts_us(taken)
        refused = self._items_of_refusals(refusals)
        assert self._policy == "deferred" or not refused
        assert {refusal.reason for refusal in refusals} <= {"early"}
        assert all(self._strict_deadline_us(r) < NEVER_US and not r.is_doubtful for r in refused)
        possible = [r for r in refused if self._is_possible(r, starts_us)]
        for lane in {r.lane for r in possible}:
            others = [r for r in self._planned(lane) if self._is_possible(r, starts_us)]
            assert not self._is_one_batch(others, starts_us)
            assert len([r for r in possible if r.lane == lane]) < len(others), "no other request gains by it"
        self._remove_refused(refusals, expected=self.waiting.keys() & set(refused))

    def _check_failed(self, refusals: list[Refusal]) -> None:
        """The custom policy raised for these."""
        assert {(refusal.status, refusal.reason) for refusal in refusals} <= {("INTERNAL", "policy")}
        failed = self._items_of_refusals(refusals)
        assert all(raises(r.name) for r in failed)
        self._remove_refused(refusals, expected=self.waiting.keys() & set(failed))

    def _is_one_batch(self, requests: list[Item], starts_us: int) -> bool:
        """Whether a lane's requests are in time as one batch dispatched now with a long transit."""
        arrives_us = starts_us + self._takes_us(requests[0].lane, len(requests))
        is_in_time = arrives_us <= min(map(self._strict_deadline_us, requests))
        return is_in_time and len(requests) <= self.scheduler.settings.max_batch_size

    def _is_possible(self, request: Item, starts_us: int) -> bool:
        """Whether a request is in time as a batch of one with a long transit."""
        return starts_us + self._takes_us(request.lane, 1) <= self._strict_deadline_us(request)

    def _delay(self, delayed: set[Item], decisions: Sequence[Decision]) -> None:
        """These requests expired, and are behind all others. Their order among each other is not checked."""
        self.delayed |= delayed
        runs: list[Run] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                runs += decision.runs
            elif isinstance(decision, Refusal) and decision.run is not None:
                runs.append(decision.run)
        runs += [run for lane in self.scheduler.queue.lanes.values() for run in lane]
        for request in self._items_of(runs):
            if request in delayed:
                self.number += 1
                self.waiting[request] = self.number

    def _check_that_delayed_requests_wait(self) -> None:
        assert self.delayed <= self.waiting.keys()
        assert not self.delayed & self.answered

    # --- fairness ----------------------------------------------------------------------------------------

    def _check_fairness(self, batch: list[Item], lane: str, taken: int) -> None:
        """Whether turns are consistent: no tenant is served before another one that has been served less.

        What each tenant was served is counted by rank, over all lanes, less an unknown start. If the first of
        two is served while the second could be, it is not ahead of it by more than the difference of their
        starts: `leads` has the most by which it was. That of the second, the other way round, is at most the
        negative of it. A tenant that could not be served for a while may have a later start from then on.
        """
        rank = self._rank_of(batch[0])
        waiting = {r.tenant for r in self.waiting if self._rank_of(r) == rank}
        lanes = {r.lane for r in self.waiting if self._rank_of(r) == rank}
        ready = {one for one in lanes if one == lane or self._can_dispatch(one, taken)}
        could_be = {r.tenant for r in self.waiting if self._rank_of(r) == rank and r.lane in ready}
        self.held_off |= {(rank, tenant) for tenant in waiting - could_be}
        self._check_turn(rank, batch[0].tenant, could_be)
        payer, payer_rank, is_chosen = batch[0].tenant, rank, len(lanes) > 1
        for request in batch:
            rank, tenant = self._rank_of(request), request.tenant
            in_lane = {r.tenant for r in self._in_lane(lane) if self._rank_of(r) == rank}
            self._check_turn(rank, tenant, in_lane)
            self.served[rank, tenant] = self.served.get((rank, tenant), 0.0) + self._share(request, tenant)
            if (rank, tenant) in self.held_off:
                self.held_off.remove((rank, tenant))
                self._forget_leads({(rank, tenant)})
            del self.waiting[request]
            self.delayed.discard(request)
            self._forget_leads()
        if is_chosen:  # before other lanes: the tenant pays for the whole batch
            of_others = sum(self._share(r, payer) for r in batch if r.tenant != payer)
            self.served[payer_rank, payer] += of_others

    def _check_turn(self, rank: int, tenant: str, could_be: set[str]) -> None:
        """A tenant is served. These are those that could be."""
        for other in could_be - {tenant}:
            ahead = self.served.get((rank, tenant), 0.0) - self.served.get((rank, other), 0.0)
            lead = self.leads[rank, tenant, other] = max(ahead, self.leads.get((rank, tenant, other), ahead))
            limit = -self.leads.get((rank, other, tenant), -lead)
            assert lead <= limit + 1e-6, f"unfair: {tenant!r} is served before {other!r}"

    def _share(self, request: Item, payer: str) -> float:
        """What a request counts for the turns of the tenant that pays for it."""
        settings = self.scheduler.settings
        size, cost_max = settings.max_batch_size, settings.max_batch_cost or settings.max_batch_size
        cost_min = max(1, cost_max // size) if size > 1 else 1
        return min(max(request.cost, cost_min), cost_max) / settings.tenant_weights.get(payer, 1)

    def _forget_leads(self, of: set[tuple[int, str]] | None = None) -> None:
        """Forget the leads of these; by default, of the tenants without waiting requests."""
        waiting = {(self._rank_of(r), r.tenant) for r in self.waiting}
        kept = waiting - (of or set())
        self.leads = {
            (rank, one, other): lead
            for (rank, one, other), lead in self.leads.items()
            if {(rank, one), (rank, other)} <= kept
        }
        self.held_off &= waiting

    # --- dispatches --------------------------------------------------------------------------------------

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

    def _check_requests(self, dispatch: Dispatch, taken: int) -> None:
        """From the front of one lane, rank by rank and each tenant in order; as many as fit."""
        batch, settings = self._items_of(dispatch.runs), self.scheduler.settings
        assert (
            batch
            and len(batch) == dispatch.size
            and set(batch) <= self.waiting.keys()
            and len(set(batch)) == len(batch)
        )
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
        if self.custom:
            size = min(settings.max_batch_size, CUSTOM_SIZE)
            assert not any(raises(r.name) for r in batch)
        assert len(batch) <= size and (len(batch) == 1 or not self._over(batch))
        if self._is_deferred(dispatch.lane) and not self.custom:
            assert self._is_in_time(batch, taken) or self._is_trial(dispatch.lane, size, taken)
        elif rest and len(batch) < size:
            first = {r.tenant: r for r in reversed(rest) if self._rank_of(r) == self._rank_of(rest[0])}
            assert any(self._over([*batch, r]) for r in first.values())

    def _is_in_time(self, batch: list[Item], taken: int) -> bool:
        """Whether all of a batch are in time with a long transit; or as usual, if not all that wait can be in
        time as one batch with a long transit."""
        lane, starts_us = batch[0].lane, self._starts_us(taken)
        planned = [r for r in batch if not r.is_doubtful]
        possible = [r for r in self._planned(lane) if self._is_possible(r, starts_us)]
        transit = self.scheduler.learned.transit_by_size
        transit_us = (
            transit.at_most_us if possible and self._is_one_batch(possible, starts_us) else transit.usual_us
        )
        arrives_us = starts_us + self._takes_us(lane, len(planned), transit_us)
        return all(arrives_us <= self._strict_deadline_us(r) for r in planned)

    def _is_trial(self, lane: str, size: int, taken: int) -> bool:
        """None that a plan considers can be in time, so that without a trial nothing would be learned."""
        queue, starts_us = self._planned(lane), self._starts_us(taken)
        impossible = sum(not self._is_possible(r, starts_us) for r in queue)
        if len(self._in_lane(lane)) - len(queue) > PLANNED_BATCHES_MAX * size:
            return True  # a plan does not consider what is behind so many others
        none_in_time = impossible >= min(len(queue), PLANNED_BATCHES_MAX * size)
        return none_in_time and all(batch[0].lane != lane for batch in self.in_flight.values())

    def _check_dispatch(self, dispatch: Dispatch, reserved: int) -> None:
        lane, settings = dispatch.lane, self.scheduler.settings
        taken = len(self.in_flight) + reserved
        batch = self._items_of(dispatch.runs)
        assert not self._past_deadline(set(batch) - set(self._items_of(dispatch.undated)))
        # A request that is served even after its deadline has none in flight.
        for run in dispatch.runs:
            for r in self._items_of([run]):
                deadline_us = self._strict_deadline_us(r)
                assert dispatch.deadline_us(run) == (None if deadline_us == NEVER_US else deadline_us)
        self._check_requests(dispatch, taken)
        # The reason is the first that applies.
        queue = self._in_lane(lane)
        lead_us_max = 1.5 * self.turnaround_us_max + 2000
        deadlines_us = [r.deadline_us or NEVER_US for r in queue]
        is_urgent = any(deadline_us <= self.now_us + lead_us_max for deadline_us in deadlines_us)
        if self._is_full(lane):
            assert dispatch.reason == "full"
        elif self._preferred_size(lane):
            assert dispatch.reason == "preferred"
        elif dispatch.reason == "efficient":
            assert self._is_deferred(lane)
        elif dispatch.reason == "deadline":
            assert is_urgent or (self._is_deferred(lane) and self.now_us >= self._latest_start_us(lane))
        else:
            assert dispatch.reason == ("delay" if settings.max_queue_delay_ms else "idle")
            assert dispatch.reason == "delay" or not self._is_deferred(lane)
            is_overtaken = self.overtaken_max >= self.scheduler.model_processes
            assert self.now_us >= (self._delay_ends_us(lane) if is_overtaken else self._ready_at_us(lane))
        # A process is idle or about to become free; a full batch may be one ahead of any process.
        assert self._has_capacity(lane, taken, is_early=True)
        # No other lane that could be dispatched now comes first. For turns between tenants see below.
        for other in LANES:
            if other != lane and self._can_dispatch(other, taken, is_early=True):
                assert self._claim(lane)[0] <= self._claim(other)[0]
                if self._has_one_tenant(self._claim(lane)[0]):
                    assert self._claim(lane) <= self._claim(other)
        self._check_overtaking(lane, taken)
        self._check_fairness(batch, lane, taken)

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

    def _claim(self, lane: str) -> tuple[int, int]:
        """The highest rank, and the oldest request of that."""
        rank = max(map(self._rank_of, self._in_lane(lane)))
        return -rank, min(r.arrival_us for r in self._in_lane(lane) if self._rank_of(r) == rank)

    def _has_one_tenant(self, minus_rank: int) -> bool:
        return len({r.tenant for r in self.waiting if self._rank_of(r) == -minus_rank}) == 1

    def _check_overtaking(self, lane: str, taken: int) -> None:
        """Of full batches, not more than one for each process overtake one that comes first, but waits."""
        if taken < self.scheduler.model_processes or not self._is_full(lane):
            self.overtaken = 0
            return
        rank = self._claim(lane)[0]
        waits = [one for one in LANES if self._in_lane(one) and not self._is_full(one)]
        if any(self._claim(one)[0] < rank and self._delay_ends_us(one) <= self.now_us for one in waits):
            self.overtaken += 1
            if self.scheduler.settings.policy == "eager":
                processes = max(self.processes_max, self.scheduler.model_processes)
                assert self.overtaken <= processes, "full batches overtake for ever"

    def _check_that_no_batch_was_missed(self, reserved: int) -> None:
        taken = len(self.in_flight) + reserved
        missed = [lane for lane in LANES if self._can_dispatch(lane, taken)]
        if missed and taken >= self.scheduler.model_processes:
            # Others have overtaken a lane that comes first, and waits for a process: now these wait, too.
            assert self.scheduler._dispatcher._overtaken >= self.scheduler.model_processes
            waits = [one for one in LANES if self._in_lane(one) and one not in missed]
            assert any(self._claim(one)[0] <= self._claim(lane)[0] for one in waits for lane in missed)
        else:
            assert not missed
        if taken < self.scheduler.model_processes and self.scheduler.settings.max_queue_delay_ms:
            last_us = self.now_us + 2000
            in_time = self.waiting.keys() - self.delayed
            assert all(r.deadline_us is None or r.deadline_us > last_us for r in in_time)

    def _apply(self, dispatches: list[Dispatch], fate: int | None) -> None:
        """One script dispatches all batches."""
        if dispatches and fate is not None:
            entries = list(dict.fromkeys(run.entry for run in dispatches[0].runs))
            for entry in entries[: 1 + fate % len(entries)]:
                self.redis.pop(entry.id, None)
        decided = [run for dispatch in dispatches for run in dispatch.runs]
        carried_out = self._carry_out(decided)
        self.answered.update(self._items_of(run for run in decided if run not in carried_out))
        for dispatch in dispatches:
            runs = [run for run in dispatch.runs if run in carried_out]
            if not runs:
                self.scheduler.in_flight.unreserve()
                continue
            self.number += 1
            batch_id = f"batch {self.number}"
            self.in_flight[batch_id] = batch = self._items_of(runs)
            assert len({r.name for r in batch}) == len(batch)
            self.undated.update(self._items_of(dispatch.undated))
            self.scheduler.in_flight.launch(batch_id, dispatch._replace(runs=runs), self.now_us)
            planned = self.scheduler.in_flight.batches[batch_id].executable
            # All of them if no producer is remembered any more
            assert planned in (sum(not r.is_doubtful for r in batch), len(batch))

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


def names_of(runs: Iterable[Run]) -> list[str]:
    return [name for run in runs for name in run.correlation_ids]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # that depends on the machine
)
