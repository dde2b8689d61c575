"""The state machine of versions finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import pytest

from carpool.messages.requests import Run
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.core.version_capacity import ModelCapacity
from carpool_batcher.core.versions import Versions
from carpool_batcher.core.waiting.queue import Queue
from simulation.test_versions_machine import VersionsMachine
from support.planting import Fault, Faults, Patch, of_machine

FAULTS: Final = Faults(of_machine(VersionsMachine, steps=30))


@FAULTS.found(examples=9, first_seed=6000)
def let_any_version_execute_what_asks(patch: Patch) -> None:
    def lane_name(queue: Queue, run: Run) -> str:
        return run.lane if run.version else original(queue, run)

    original = Queue._lane_name
    patch.setattr(Queue, "_lane_name", lane_name)


@FAULTS.found(examples=49, first_seed=45000)
def keep_a_run_of_several_versions_together(patch: Patch) -> None:
    patch.setattr(Queue, "divide", lambda queue, run, *, in_order: [run])


@FAULTS.found(examples=127, first_seed=0)
def divide_runs_out_of_order(patch: Patch) -> None:
    def divide(queue: Queue, run: Run, *, in_order: bool) -> list[Run]:
        return original(queue, run, in_order=False)

    original = Queue.divide
    patch.setattr(Queue, "divide", divide)


@FAULTS.found(examples=33, first_seed=18000)
def leave_what_waits_where_it_is_when_shares_change(patch: Patch) -> None:
    patch.setattr(Queue, "divide_again", lambda queue: [])


@FAULTS.found(examples=12, first_seed=6000)
def count_a_batch_of_a_version_for_ever(patch: Patch) -> None:
    def end(capacity: ModelCapacity, batch_id: str, now_us: int) -> None:
        Capacity.end(capacity, batch_id, now_us)

    patch.setattr(ModelCapacity, "end", end)


@FAULTS.found(examples=177, first_seed=18000)
def let_what_a_lost_version_has_occupy_the_others(patch: Patch) -> None:
    patch.setattr(ModelCapacity, "set_apart", lambda capacity, batch_ids: [])


@FAULTS.found(examples=21, first_seed=18000)
def count_all_processes_for_each_version(patch: Patch) -> None:
    def tell_apart(capacity: ModelCapacity, processes: Mapping[str, int]) -> None:
        original(capacity, dict.fromkeys(processes, sum(processes.values())))

    original = ModelCapacity.tell_apart
    patch.setattr(ModelCapacity, "tell_apart", tell_apart)


@FAULTS.found(examples=33, first_seed=30000)
def refuse_what_a_version_was_just_missed_for(patch: Patch) -> None:
    def refused(versions: Versions, asked: Iterable[str], now_us: int) -> list[str]:
        return original(versions, asked, now_us + 3_000_000)

    original = Versions.refused
    patch.setattr(Versions, "refused", refused)


@FAULTS.found(examples=59, first_seed=48000)
def count_the_time_without_any_process(patch: Patch) -> None:
    def set_processes(versions: Versions, processes: Mapping[str, int], now_us: int) -> None:
        versions.processes = versions.processes or {"": 1}
        original(versions, processes, now_us)

    original = Versions.set_processes
    patch.setattr(Versions, "set_processes", set_processes)


@FAULTS.found(examples=33, first_seed=39000)
def forget_batches_in_flight_that_ask(patch: Patch) -> None:
    def asked(scheduler: Scheduler) -> Collection[str]:
        return set(scheduler.queue.asked_lanes)

    patch.setattr(Scheduler, "_asked_versions", asked)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
