"""The state machine of the scheduler finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from carpool.messages import Refusal, Run
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies
from carpool.tickets import Tickets
from carpool_batcher.core import capacity, scheduler
from carpool_batcher.core.batch_space import BatchSpace
from carpool_batcher.core.deadlines import Deadlines
from carpool_batcher.core.dispatching import Dispatcher
from carpool_batcher.core.fairness import FairQueue
from carpool_batcher.core.lane import Lane
from carpool_batcher.core.lane_index import LaneIndex
from carpool_batcher.core.queue import Queue
from carpool_batcher.core.withdrawals import ArrivedLater
from simulation.test_scheduler_machine import SchedulerMachine

MACHINE_SETTINGS: Final = hypothesis_settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

OVERLOOKED_MAX: Final = 20_000  # in all examples; from then on each one is an error, also when it is repeated
Patch = pytest.MonkeyPatch


def lose_the_rest_of_a_cut_run(patch: Patch) -> None:
    def cut(run: Run, count: int) -> Run:
        part = original(run, count)
        run.correlation_ids = run.correlation_ids[:1]
        return part

    original = Run.cut
    patch.setattr(Run, "cut", cut)


def dispatch_a_cut_run_whole(patch: Patch) -> None:
    def cut(run: Run, _count: int) -> Run:
        return run

    patch.setattr(Run, "cut", cut)


def keep_a_part_out_of_its_entry(patch: Patch) -> None:
    def insert_part(run: Run, ids: list[str], bodies: Bodies, tickets: Tickets | None) -> Run:
        part = original(run, ids, bodies, tickets)
        run.entry.runs.remove(part)
        return part

    original = Run._insert_part
    patch.setattr(Run, "_insert_part", insert_part)


def keep_withdrawn_requests(patch: Patch) -> None:
    def withdraw(queue: Queue, arrived_later: ArrivedLater) -> list[Refusal]:
        waiting = [run for lane in queue.lanes.values() for run in lane]
        firsts = frozenset(run.correlation_ids[0] for run in waiting)
        return original(queue, {name: runs for name, runs in arrived_later.items() if name in firsts})

    original = Queue.withdraw
    patch.setattr(Queue, "withdraw", withdraw)


def count_a_run_as_one(patch: Patch) -> None:
    def add(space: BatchSpace, run: Run, start: int, count: int) -> int:
        fitting = original(space, run, start, count)
        space.size += max(0, fitting - 1)
        return fitting

    original = BatchSpace.add
    patch.setattr(BatchSpace, "add", add)


def ignore_cost_of_all_but_one(patch: Patch) -> None:
    def add(space: BatchSpace, run: Run, start: int, count: int) -> int:
        cost = space.cost
        space.cost = 1 << 62
        fitting = original(space, run, start, count)
        space.cost = cost - run.cost
        return fitting

    original = BatchSpace.add
    patch.setattr(BatchSpace, "add", add)


def admit_more_than_fits(patch: Patch) -> None:
    def admit_part(queue: Queue, run: Run, _settings: object) -> list[Refusal]:
        queue._insert(run, 0)
        return []

    patch.setattr(Queue, "_admit_part", admit_part)


def forget_only_the_first_run(patch: Patch) -> None:
    def forget(queue: Queue, runs: Iterable[Run]) -> None:
        original(queue, list(runs)[:1])

    original = Queue.forget
    patch.setattr(Queue, "forget", forget)


def expire_only_single_requests(patch: Patch) -> None:
    def watch(deadlines: Deadlines, run: Run, *arguments: Any) -> None:
        if len(run) == 1:
            original(deadlines, run, *arguments)

    original = Deadlines.watch
    patch.setattr(Deadlines, "watch", watch)


def count_positions_by_run(patch: Patch) -> None:
    def in_flight(*arguments: Any) -> capacity.InFlightBatch:
        batch = original(*arguments)
        return batch._replace(expiring=dict(enumerate(batch.expiring.values())))

    original = scheduler.Scheduler._in_flight
    patch.setattr(scheduler.Scheduler, "_in_flight", in_flight)


def refuse_the_wrong_requests(patch: Patch) -> None:
    def take(queue: Queue, run: Run, indexes: Sequence[int]) -> Run:
        return original(queue, run, range(len(indexes)))

    original = Queue.take
    patch.setattr(Queue, "take", take)


def overlook_that_a_lane_changed(patch: Patch) -> None:
    def put(index: LaneIndex, gate: Any, claim: Any) -> None:
        if claim.lane not in index._claims:
            original(index, gate, claim)
        elif next(overlooked) >= OVERLOOKED_MAX:
            raise AssertionError("the dispatcher asks for the same batch for ever")

    overlooked = count()
    original = LaneIndex.put
    patch.setattr(LaneIndex, "put", put)


def keep_an_expired_run_in_its_place(patch: Patch) -> None:
    patch.setattr(Lane, "move_expired", lambda lane, run: lane.expired.add(run) or lane.urgent.discard(run))


def wait_for_every_run_of_a_tenant(patch: Patch) -> None:
    """A run that does not fit whole closes the batch."""

    def pop(queue: FairQueue, space: BatchSpace, weights: Any) -> Run | None:
        run = next(iter(next(iter(queue._runs.values()))))
        is_first = space.size == space._limits.size
        return None if len(run) > space.size and not is_first else original(queue, space, weights)

    original = FairQueue.pop
    patch.setattr(FairQueue, "pop", pop)


def look_for_requests_too_late(patch: Patch) -> None:
    def earliest_dispatch_us(dispatcher: Dispatcher, settings: ModelSettings, now_us: int) -> int:
        return original(dispatcher, settings, now_us) + 1000

    original = Dispatcher.earliest_dispatch_us
    patch.setattr(Dispatcher, "earliest_dispatch_us", earliest_dispatch_us)


def take_an_outdated_timer_for_the_next_one(patch: Patch) -> None:
    """The timers behind it are dropped with it."""

    def wake_at_us(deadlines: Deadlines) -> int | None:
        if deadlines._timers and not deadlines._has_effect(deadlines._timers[0][2]):
            return None
        return original(deadlines)

    original = Deadlines.wake_at_us
    patch.setattr(Deadlines, "wake_at_us", wake_at_us)


FAULTS: Final[Sequence[Callable[[Patch], None]]] = (
    lose_the_rest_of_a_cut_run,
    dispatch_a_cut_run_whole,
    keep_a_part_out_of_its_entry,
    keep_withdrawn_requests,
    count_a_run_as_one,
    ignore_cost_of_all_but_one,
    admit_more_than_fits,
    forget_only_the_first_run,
    expire_only_single_requests,
    count_positions_by_run,
    refuse_the_wrong_requests,
    overlook_that_a_lane_changed,
    keep_an_expired_run_in_its_place,
    wait_for_every_run_of_a_tenant,
    look_for_requests_too_late,
    take_an_outdated_timer_for_the_next_one,
)


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_fault_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception) as found:  # which one depends on the fault
        run_state_machine_as_test(SchedulerMachine, settings=MACHINE_SETTINGS)
    assert not isinstance(found.value, TypeError), "the fault itself is broken"
