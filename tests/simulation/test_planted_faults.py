"""The state machine of the scheduler finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import pytest

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.rows import Bodies
from carpool.tickets import Tickets
from carpool_batcher.core.deadlines import Deadlines
from carpool_batcher.core.dispatching import Dispatcher
from carpool_batcher.core.in_flight import BatchesInFlight
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.waiting import lane
from carpool_batcher.core.waiting.batch_space import BatchSpace
from carpool_batcher.core.waiting.fairness import FairQueue, Turns
from carpool_batcher.core.waiting.lane_index import Claim, Gate, LaneIndex
from carpool_batcher.core.waiting.queue import Queue
from carpool_batcher.core.waiting.withdrawals import ArrivedLater
from simulation.test_scheduler_machine import SchedulerMachine
from support.planting import Fault, Faults, Patch, of_machine
from unit import test_fairness as examples

FAULTS: Final = Faults(of_machine(SchedulerMachine, steps=40))


@FAULTS.found(examples=12, first_seed=3000)
def lose_the_rest_of_a_cut_run(patch: Patch) -> None:
    """All that is left has the ID of its first request, so that the counts are right."""

    def cut(run: Run, count: int) -> Run:
        part = original(run, count)
        run.correlation_ids = run.correlation_ids[:1] * len(run.correlation_ids)
        return part

    original = Run.cut
    patch.setattr(Run, "cut", cut)


@FAULTS.found(examples=12, first_seed=3000)
def dispatch_a_cut_run_whole(patch: Patch) -> None:
    def cut(run: Run, _count: int) -> Run:
        return run

    patch.setattr(Run, "cut", cut)


@FAULTS.found(examples=36, first_seed=36000)
def keep_a_part_out_of_its_entry(patch: Patch) -> None:
    def insert_part(run: Run, ids: list[str], bodies: Bodies, tickets: Tickets | None) -> Run:
        part = original(run, ids, bodies, tickets)
        run.entry.runs.remove(part)
        return part

    def separate(run: Run) -> list[Run]:
        return run.divide(1)

    original = Run._insert_part
    patch.setattr(Run, "_insert_part", insert_part)
    patch.setattr(Run, "separate", separate)


@FAULTS.found(examples=98, first_seed=12000)
def keep_withdrawn_requests(patch: Patch) -> None:
    def withdraw(queue: Queue, arrived_later: ArrivedLater) -> list[Refusal]:
        waiting = [run for lane in queue.lanes.values() for run in lane]
        firsts = frozenset(run.correlation_ids[0] for run in waiting)
        return original(queue, {name: runs for name, runs in arrived_later.items() if name in firsts})

    original = Queue.withdraw
    patch.setattr(Queue, "withdraw", withdraw)


@FAULTS.found(examples=12, first_seed=3000)
def count_a_run_as_one(patch: Patch) -> None:
    """If there is space for one request of a run, there is for all of them."""

    def add(space: BatchSpace, run: Run, start: int, count: int) -> int:
        left = space.size
        if left > 0:
            space.size = max(left, count)
        fitting = original(space, run, start, count) if left > 0 else 0
        space.size = left - fitting
        return fitting

    original = BatchSpace.add
    patch.setattr(BatchSpace, "add", add)


@FAULTS.found(examples=12, first_seed=3000)
def ignore_cost_of_all_but_one(patch: Patch) -> None:
    def add(space: BatchSpace, run: Run, start: int, count: int) -> int:
        cost = space.cost
        space.cost = 1 << 62
        fitting = original(space, run, start, count)
        space.cost = cost - run.cost
        return fitting

    original = BatchSpace.add
    patch.setattr(BatchSpace, "add", add)


@FAULTS.found(examples=10, first_seed=3000)
def admit_more_than_fits(patch: Patch) -> None:
    def admit_part(queue: Queue, run: Run, *_: object, **__: object) -> list[Refusal]:
        queue._insert(run, 0)
        return []

    patch.setattr(Queue, "_admit_part", admit_part)


@FAULTS.found(examples=10, first_seed=3000)
def forget_only_the_first_run(patch: Patch) -> None:
    def forget(queue: Queue, runs: Iterable[Run]) -> None:
        original(queue, list(runs)[:1])

    original = Queue.forget
    patch.setattr(Queue, "forget", forget)


@FAULTS.found(examples=10, first_seed=3000)
def expire_only_single_requests(patch: Patch) -> None:
    def watch(deadlines: Deadlines, run: Run, *arguments: Any) -> None:
        if len(run) == 1:
            original(deadlines, run, *arguments)

    original = Deadlines.watch
    patch.setattr(Deadlines, "watch", watch)


@FAULTS.found(examples=99, first_seed=42000)
def count_positions_by_run(patch: Patch) -> None:
    def in_flight(*arguments: Any) -> InFlightBatch:
        batch = original(*arguments)
        return batch._replace(expiring=dict(enumerate(batch.expiring.values())))

    original = BatchesInFlight._take
    patch.setattr(BatchesInFlight, "_take", in_flight)


@FAULTS.found(examples=98, first_seed=12000)
def refuse_the_wrong_requests(patch: Patch) -> None:
    def take(queue: Queue, run: Run, indexes: Sequence[int]) -> Run:
        return original(queue, run, range(len(indexes)))

    original = Queue.take
    patch.setattr(Queue, "take", take)


@FAULTS.found(examples=10, first_seed=3000)
def overlook_that_a_lane_changed(patch: Patch) -> None:
    """The dispatcher may then look at the same claim for ever."""

    def put(index: LaneIndex, gate: Any, claim: Any, *others: Any) -> None:
        if claim.lane not in index._lanes:
            original(index, gate, claim, *others)

    original = LaneIndex.put
    patch.setattr(LaneIndex, "put", put)


@FAULTS.found(examples=112, first_seed=30000)
def keep_an_expired_run_in_its_place(patch: Patch) -> None:
    patch.setattr(lane, "_rank", lambda run: 1 + run.priority)


@FAULTS.found(examples=82, first_seed=3000)
def wait_for_every_run_of_a_tenant(patch: Patch) -> None:
    """A run that does not fit whole closes the batch."""

    def pop(queue: FairQueue, space: BatchSpace, weights: Any) -> Run | None:
        run = next(iter(next(iter(queue._runs.values()))))
        is_first = space.size == space._limits.size
        return None if len(run) > space.size and not is_first else original(queue, space, weights)

    original = FairQueue.pop
    patch.setattr(FairQueue, "pop", pop)


@FAULTS.shown_by(examples.test_tenants_share_alike_in_however_many_lanes_they_wait)
def choose_lanes_by_arrival_only(patch: Patch) -> None:
    """A tenant then has a turn in each lane that it names."""

    def first(index: LaneIndex, gates: Sequence[Gate], now_us: int) -> Claim | None:
        if original(index, gates, now_us) is None:
            return None
        claims = [lane.claim for lane in index._lanes.values() if lane.gate in gates]
        return min((one for one in claims if one.ready_at_us <= now_us), key=lambda one: one.arrival_us)

    original = LaneIndex.first
    patch.setattr(LaneIndex, "first", first)


@FAULTS.found(examples=203, first_seed=15000)
def count_only_the_first_of_a_batch(patch: Patch) -> None:
    """What else fits into the batch costs its tenants almost nothing."""

    def serve(turns: Turns, tenant: str, size: int, duration: int, *, is_first: bool) -> None:
        original(turns, tenant, size, duration if is_first else 1, is_first=is_first)

    original = Turns.serve
    patch.setattr(Turns, "serve", serve)


@FAULTS.shown_by(
    partial(
        examples.test_full_batches_overtake_a_lane_that_comes_first_only_once_for_each_process,
        "eager",
        1,
        True,
    )
)
def let_full_batches_overtake_for_ever(patch: Patch) -> None:
    def next_claim(dispatcher: Dispatcher, *arguments: Any) -> tuple[Any, bool]:
        dispatcher._overtaken = 0
        return original(dispatcher, *arguments)

    original = Dispatcher._next_claim
    patch.setattr(Dispatcher, "_next_claim", next_claim)


@FAULTS.found(examples=79, first_seed=3000)
def look_for_requests_too_late(patch: Patch) -> None:
    def earliest_dispatch_us(dispatcher: Dispatcher, now_us: int) -> int:
        return original(dispatcher, now_us) + 1000

    original = Dispatcher.earliest_dispatch_us
    patch.setattr(Dispatcher, "earliest_dispatch_us", earliest_dispatch_us)


@FAULTS.found(examples=52, first_seed=3000)
def take_an_outdated_timer_for_the_next_one(patch: Patch) -> None:
    """The timers behind it are dropped with it."""

    def wake_at_us(deadlines: Deadlines) -> int | None:
        if deadlines._timers and not deadlines._has_effect(deadlines._timers[0][2]):
            return None
        return original(deadlines)

    original = Deadlines.wake_at_us
    patch.setattr(Deadlines, "wake_at_us", wake_at_us)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
