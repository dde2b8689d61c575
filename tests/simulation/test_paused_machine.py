"""A model that is paused and resumed, at any time and in both ways: rule 12 of `core/scheduler.py`.

The events, and the reference, are those of `test_scheduler_machine.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import precondition, rule

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.scheduler import Decision, Dispatch, Scheduler
from simulation.test_scheduler_machine import SchedulerMachine
from support.planting import Fault, Faults, Patch, of_machine
from support.scheduler_reference.drawn import Item, Traits, traits

HOW: Final = ("waits", "waits", "refuses", "refused before")


class PausedMachine(SchedulerMachine):
    """What a pause adds: `paused` is what the reference knows of it."""

    @rule(how=st.sampled_from(HOW), of_entry=st.lists(traits, min_size=1, max_size=4))
    def pause(self, how: str, of_entry: list[Traits]) -> None:
        """The model is paused, or otherwise than before, and requests arrive. With `refused before`, a
        batcher takes over what is paused already."""
        from_us = {"waits": None, "refuses": self.now_us, "refused before": self.now_us - 2000}[how]
        self.paused = self.scheduler.pause = Pause("new weights", from_us)
        self.polled, self.closed_until_us = False, 0
        self.offer(of_entry)
        self.poll(fate=None)

    @rule()
    @precondition(lambda self: self.paused)
    def resume(self) -> None:
        self.paused = self.scheduler.pause = None
        self.polled, self.closed_until_us = False, 0

    # --- what is expected ----------------------------------------------------------------------------------

    def _admit(self, item: Item) -> str | None:
        from_us = None if self.paused is None else self.paused.refuses_from_us
        if from_us is not None and item.arrival_us >= from_us:
            return "UNAVAILABLE"
        return super()._admit(item)

    def _check_dispatch(self, dispatch: Dispatch, reserved: int) -> None:
        assert self.paused is None, "nothing is dispatched"
        super()._check_dispatch(dispatch, reserved)

    def _check_early(self, refusals: list[Refusal], taken: int) -> None:
        assert self.paused is None or not refusals, "nothing is refused early"
        super()._check_early(refusals, taken)

    def _check_that_no_batch_was_missed(self, reserved: int) -> None:
        if self.paused is None:
            super()._check_that_no_batch_was_missed(reserved)

    def _check_that_all_requests_settle(self) -> None:
        if self.paused is not None:
            self.resume()
        super()._check_that_all_requests_settle()


TestPaused = PausedMachine.TestCase
TestPaused.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)

FAULTS: Final = Faults(of_machine(PausedMachine, steps=40))


@FAULTS.found(examples=7, first_seed=3000)
def dispatch_while_paused(patch: Patch) -> None:
    """A poll forgets the pause."""

    def poll(scheduler: Scheduler, now_us: int) -> Generator[None, None, list[Decision]]:
        paused, scheduler.pause = scheduler.pause, None
        decisions = yield from original(scheduler, now_us)
        scheduler.pause = paused
        return decisions

    original = Scheduler.poll_in_pieces
    patch.setattr(Scheduler, "poll_in_pieces", poll)


@FAULTS.found(examples=28, first_seed=3000)
def refuse_what_arrived_before_the_pause(patch: Patch) -> None:
    def refuses(pause: Pause, _run: Run) -> bool:
        return pause.refuses_from_us is not None

    patch.setattr(Pause, "refuses", refuses)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
