"""The state machine of bound sequences finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from carpool.messages import Run, SlotFreed
from carpool_batcher.core.queue import Queue
from carpool_batcher.core.sequence import Sequence
from carpool_batcher.core.sequences import Sequences
from carpool_batcher.core.space import Processes
from simulation.test_bound_machine import BoundMachine
from unit import test_bound_sequences as examples

MACHINE_SETTINGS: Final = hypothesis_settings(
    max_examples=1000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
Patch = pytest.MonkeyPatch


def free_a_slot_twice(patch: Patch) -> None:
    def leave(self: Processes, sequence: Sequence) -> SlotFreed | None:
        process = sequence.process
        freed = original(self, sequence)
        if freed is not None and self._taken[process]:
            self._taken[process] -= 1
        return freed

    original = Processes.leave
    patch.setattr(Processes, "leave", leave)


def never_free_a_slot(patch: Patch) -> None:
    patch.setattr(Processes, "leave", lambda self, sequence: None)


def tell_no_process_that_a_slot_is_free(patch: Patch) -> None:
    def leave(self: Processes, sequence: Sequence) -> None:
        original(self, sequence)

    original = Processes.leave
    patch.setattr(Processes, "leave", leave)


def choose_a_process_for_each_request(patch: Patch) -> None:
    def process_of(self: Sequences, run: Run) -> str:
        return self.space._roomiest() or original(self, run)  # type: ignore[attr-defined]

    original = Sequences.process_of
    patch.setattr(Sequences, "process_of", process_of)


def begin_in_a_process_that_drains(patch: Patch) -> None:
    def follow(self: Processes, live: Iterable[str], draining: Iterable[str]) -> None:
        original(self, live, ())

    original = Processes.follow
    patch.setattr(Processes, "follow", follow)


def believe_in_processes_that_are_gone(patch: Patch) -> None:
    patch.setattr(Processes, "must_leave", lambda self, sequence: False)


def forget_which_process_has_a_sequence_at_takeover(patch: Patch) -> None:
    patch.setattr(Processes, "hold", lambda self, sequence, process: None)


def send_batches_to_a_busy_process(patch: Patch) -> None:
    patch.setattr(Processes, "is_busy", lambda self, process: False)


def never_look_again_at_the_lanes_of_a_busy_process(patch: Patch) -> None:
    patch.setattr(Queue, "look_again", lambda self, process: None)


def leave_the_head_of_a_gone_process_in_its_lane(patch: Patch) -> None:
    patch.setattr(Sequences, "heads_to_move", lambda self: [])


FAULTS: Final[list[Callable[[Patch], None]]] = [
    never_free_a_slot,
    tell_no_process_that_a_slot_is_free,
    choose_a_process_for_each_request,
    begin_in_a_process_that_drains,
    believe_in_processes_that_are_gone,
    forget_which_process_has_a_sequence_at_takeover,
    send_batches_to_a_busy_process,
    never_look_again_at_the_lanes_of_a_busy_process,
]


# The machine finds these seldom, so an example shows them.
FAULTS_OF_EXAMPLES: Final[list[tuple[Callable[[Patch], None], Callable[[], None]]]] = [
    (free_a_slot_twice, examples.test_a_batcher_that_takes_over_knows_which_process_has_which_sequence),
    (
        leave_the_head_of_a_gone_process_in_its_lane,
        examples.test_sequences_of_a_process_that_is_gone_are_broken_and_others_unharmed,
    ),
]


@pytest.mark.parametrize(("plant", "example"), FAULTS_OF_EXAMPLES)
def test_planted_fault_is_found_by_an_example(
    plant: Callable[[Patch], None], example: Callable[[], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        example()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, ExceptionGroup)):
        run_state_machine_as_test(BoundMachine, settings=MACHINE_SETTINGS)
