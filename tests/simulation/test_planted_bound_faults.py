"""The state machine of bound sequences finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest

from carpool.messages.requests import Run
from carpool.messages.sequences import SlotFreed
from carpool_batcher.core.sequences.processes import Processes
from carpool_batcher.core.sequences.sequence import OneSequence
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.core.waiting.queue import Queue
from simulation.test_bound_machine import BoundMachine
from support.planting import Fault, Faults, Patch, of_machine
from unit import test_bound_sequences as examples

FAULTS: Final = Faults(of_machine(BoundMachine, steps=40))


@FAULTS.shown_by(examples.test_a_batcher_that_takes_over_knows_which_process_has_which_sequence)
def free_a_slot_twice(patch: Patch) -> None:
    def leave(self: Processes, sequence: OneSequence) -> SlotFreed | None:
        process = sequence.process
        freed = original(self, sequence)
        if freed is not None and self._slots_taken[process]:
            self._slots_taken[process] -= 1
        return freed

    original = Processes.leave
    patch.setattr(Processes, "leave", leave)


@FAULTS.found(examples=8, first_seed=0)
def never_free_a_slot(patch: Patch) -> None:
    patch.setattr(Processes, "leave", lambda self, sequence: None)


@FAULTS.found(examples=8, first_seed=0)
def tell_no_process_that_a_slot_is_free(patch: Patch) -> None:
    def leave(self: Processes, sequence: OneSequence) -> None:
        original(self, sequence)

    original = Processes.leave
    patch.setattr(Processes, "leave", leave)


@FAULTS.found(examples=11, first_seed=0)
def choose_a_process_for_each_request(patch: Patch) -> None:
    def process_of(self: Sequences, run: Run) -> str:
        return self.space._roomiest() or original(self, run)  # type: ignore[attr-defined]

    original = Sequences.process_of
    patch.setattr(Sequences, "process_of", process_of)


@FAULTS.found(examples=22, first_seed=15000)
def begin_in_a_process_that_drains(patch: Patch) -> None:
    def set_live(self: Processes, live: Iterable[str], draining: Iterable[str]) -> None:
        original(self, live, ())

    original = Processes.set_live
    patch.setattr(Processes, "set_live", set_live)


@FAULTS.found(examples=308, first_seed=21000)
def believe_in_processes_that_are_gone(patch: Patch) -> None:
    patch.setattr(Processes, "must_leave", lambda self, sequence: False)


@FAULTS.found(examples=53, first_seed=30000)
def forget_which_process_has_a_sequence_at_takeover(patch: Patch) -> None:
    patch.setattr(Processes, "restore", lambda self, sequence, process: None)


@FAULTS.found(examples=60, first_seed=21000)
def send_batches_to_a_busy_process(patch: Patch) -> None:
    patch.setattr(Processes, "is_busy", lambda self, process: False)


@FAULTS.found(examples=166, first_seed=39000)
def never_look_again_at_the_lanes_of_a_busy_process(patch: Patch) -> None:
    patch.setattr(Queue, "look_again", lambda self, process: None)


@FAULTS.shown_by(examples.test_sequences_of_a_process_that_is_gone_are_broken_and_others_unharmed)
def leave_the_head_of_a_gone_process_in_its_lane(patch: Patch) -> None:
    patch.setattr(Sequences, "heads_to_move", lambda self: [])


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
