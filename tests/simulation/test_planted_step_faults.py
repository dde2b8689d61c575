"""The state machine of the stepper finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from carpool_worker.model_process.stepping import slots
from carpool_worker.model_process.stepping.generation import Generation
from carpool_worker.model_process.stepping.slots import Round, Slots
from carpool_worker.model_process.stepping.stepper import Stepper
from simulation.test_stepper_machine import StepperMachine
from support.planting import Fault, Faults, Patch, of_machine

FAULTS: Final = Faults(of_machine(StepperMachine, steps=30))


@FAULTS.found(examples=36, first_seed=9000)
def free_a_slot_twice(patch: Patch) -> None:
    def end(held: Slots[Any], key: int) -> None:
        original(held, key)
        held._size += 1

    original = Slots.end
    patch.setattr(Slots, "end", end)


@FAULTS.found(examples=9, first_seed=9000)
def keep_the_slot_of_a_dropped_request(patch: Patch) -> None:
    patch.setattr(Slots, "drop", lambda held, key: held._running.get(key))


@FAULTS.found(examples=9, first_seed=9000)
def keep_dropped_requests_waiting(patch: Patch) -> None:
    def drop(held: Slots[Any], key: int) -> Any:
        return original(held, key) if key in held._running else None

    original = Slots.drop
    patch.setattr(Slots, "drop", drop)


@FAULTS.found(examples=124, first_seed=27000)
def keep_the_cost_of_a_dropped_request(patch: Patch) -> None:
    def drop(held: Slots[Any], key: int) -> Any:
        request = original(held, key)
        held._cost += request.cost if request else 0
        return request

    original = Slots.drop
    patch.setattr(Slots, "drop", drop)


@FAULTS.found(examples=75, first_seed=9000)
def free_cost_twice(patch: Patch) -> None:
    def end(held: Slots[Any], key: int) -> None:
        held._cost -= held._running[key].cost
        original(held, key)

    original = Slots.end
    patch.setattr(Slots, "end", end)


@FAULTS.found(examples=12, first_seed=3000)
def admit_the_last_first(patch: Patch) -> None:
    def admit(held: Slots[Any]) -> list[Any]:
        held._waiting = dict(reversed(held._waiting.items()))
        return original(held)

    original = Slots._admit
    patch.setattr(Slots, "_admit", admit)


@FAULTS.found(examples=59, first_seed=9000)
def ignore_costs(patch: Patch) -> None:
    patch.setattr(slots, "_is_over", lambda cost, cost_max: False)


@FAULTS.found(examples=52, first_seed=9000)
def stop_at_a_request_that_costs_too_much(patch: Patch) -> None:
    """Also where nothing runs: it never gets a slot."""

    def admit(held: Slots[Any]) -> list[Any]:
        first = next(iter(held._waiting.values()), None)
        if first is not None and slots._is_over(held._cost + first.cost, held._cost_max):
            return []
        return original(held)

    original = Slots._admit
    patch.setattr(Slots, "_admit", admit)


@FAULTS.found(examples=55, first_seed=3000)
def step_all_with_one_that_is_alone(patch: Patch) -> None:
    def next_round(held: Slots[Any], *, admits: bool) -> Round[Any]:
        planned = original(held, admits=admits)
        return planned._replace(stepped=held.running)

    original = Slots.next_round
    patch.setattr(Slots, "next_round", next_round)


@FAULTS.found(examples=56, first_seed=33000)
def begin_others_before_the_step_that_is_owed(patch: Patch) -> None:
    def next_round(held: Slots[Any], *, admits: bool) -> Round[Any]:
        return original(held)

    original = Slots.next_round
    patch.setattr(Slots, "next_round", next_round)


@FAULTS.found(examples=25, first_seed=3000)
def send_what_begin_emitted_after_the_step(patch: Patch) -> None:
    def pop_advances(
        stepper: Stepper, generations: Sequence[Generation], *, has_stepped: bool = False
    ) -> Any:
        return original(stepper, generations, has_stepped=True) if has_stepped else ([], "")

    original = Stepper._pop_advances
    patch.setattr(Stepper, "_pop_advances", pop_advances)


@FAULTS.found(examples=72, first_seed=3000)
def lose_what_is_put_back(patch: Patch) -> None:
    patch.setattr(Slots, "put_back", Slots.end)


@FAULTS.found(examples=142, first_seed=3000)
def put_back_at_the_end(patch: Patch) -> None:
    def put_back(held: Slots[Any], key: int) -> None:
        held._waiting[key] = held._running[key]
        held.end(key)

    patch.setattr(Slots, "put_back", put_back)


@FAULTS.found(examples=49, first_seed=3000)
def exceed_the_slots_by_one_that_is_alone(patch: Patch) -> None:
    patch.setattr(Slots, "lacks_space", False)


@FAULTS.found(examples=54, first_seed=27000)
def go_on_after_one_that_is_alone(patch: Patch) -> None:
    def add_alone(held: Slots[Any], request: Any, steps: int) -> None:
        original(held, request, steps)
        held._is_paused = False

    original = Slots.add_alone
    patch.setattr(Slots, "add_alone", add_alone)


@FAULTS.found(examples=11, first_seed=3000)
def take_only_one_step_alone(patch: Patch) -> None:
    def add_alone(held: Slots[Any], request: Any, steps: int) -> None:
        original(held, request, 1)

    original = Slots.add_alone
    patch.setattr(Slots, "add_alone", add_alone)


@FAULTS.found(examples=245, first_seed=24000)
def stay_alone_after_a_drop(patch: Patch) -> None:
    """All others wait as if it were still to be alone."""

    def drop(held: Slots[Any], key: int) -> Any:
        held._is_paused |= key in held._steps_alone
        return original(held, key)

    original = Slots.drop
    patch.setattr(Slots, "drop", drop)


@FAULTS.found(examples=9, first_seed=9000)
def drop_without_end(patch: Patch) -> None:
    def drop(stepper: Stepper, keys: Sequence[int]) -> None:
        for key in keys:
            stepper._slots.drop(key)

    patch.setattr(Stepper, "drop", drop)


@FAULTS.found(examples=9, first_seed=9000)
def end_dropped_requests_twice(patch: Patch) -> None:
    def drop(stepper: Stepper, keys: Sequence[int]) -> None:
        dropped = [generation for generation in stepper._slots.running if generation.key in keys]
        original(stepper, keys)
        for generation in dropped:
            generation.is_begun = True
            stepper._end(generation)

    original = Stepper.drop
    patch.setattr(Stepper, "drop", drop)


@FAULTS.found(examples=58, first_seed=3000)
def begin_anew_without_end(patch: Patch) -> None:
    def restarted(stepper: Stepper, generations: Sequence[Generation]) -> Sequence[Generation]:
        for generation in generations:
            generation.restart(continues=True)
        return generations

    patch.setattr(Stepper, "_restarted", restarted)


@FAULTS.found(examples=58, first_seed=3000)
def fail_all_where_the_model_raised(patch: Patch) -> None:
    def restarted(stepper: Stepper, generations: Sequence[Generation]) -> Sequence[Generation]:
        for generation in generations:
            generation.reject(("INTERNAL", "of all together"))
        return []

    patch.setattr(Stepper, "_restarted", restarted)


@FAULTS.found(examples=76, first_seed=3000)
def forget_what_was_emitted_before_the_model_raised(patch: Patch) -> None:
    def restart(generation: Generation, *, continues: bool) -> None:
        original(generation, continues=continues)
        generation._chunks_count, generation._chunks_bytes = generation._sent_count, generation._sent_bytes

    original = Generation.restart
    patch.setattr(Generation, "restart", restart)


@FAULTS.found(examples=65, first_seed=3000)
def begin_at_the_start_what_was_sent(patch: Patch) -> None:
    def restart(generation: Generation, *, continues: bool) -> None:
        generation.state = None
        generation.emitted = generation._chunks_count = generation._sent_count = 0
        generation._chunks_bytes = generation._sent_bytes = 0
        generation._packed.clear()

    patch.setattr(Generation, "restart", restart)


@FAULTS.found(examples=424, first_seed=33000)
def keep_what_is_generated_again(patch: Patch) -> None:
    def restart(generation: Generation, *, continues: bool) -> None:
        if continues or generation.was_sent:
            original(generation, continues=continues)
        generation.state = None

    original = Generation.restart
    patch.setattr(Generation, "restart", restart)


@FAULTS.found(examples=27, first_seed=18000)
def lose_what_is_emitted_before_the_end(patch: Patch) -> None:
    def pop_advance(generation: Generation) -> Any:
        advance = original(generation)
        return advance and (advance._replace(chunk=b"") if advance.has_ended else advance)

    original = Generation.pop_advance
    patch.setattr(Generation, "pop_advance", pop_advance)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
