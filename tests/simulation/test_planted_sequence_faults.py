"""The state machine of sequences finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from carpool.messages.requests import Run
from carpool.messages.sequences import SequenceChange
from carpool_batcher.core.sequences.followers import Followers
from carpool_batcher.core.sequences.heads import Heads
from carpool_batcher.core.sequences.sequence import OneSequence, Segment, place_of
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.core.sequences.takeover import Event, Takeover
from carpool_batcher.core.waiting.queue import Queue
from simulation.test_sequences_machine import SequencesMachine
from support.planting import Fault, Faults, Patch, of_machine
from support.sequence_harness import SequenceStore
from unit import test_sequences as examples

FAULTS: Final = Faults(of_machine(SequencesMachine, steps=40))


def before_several_breaks() -> None:
    examples.test_requests_before_several_breaks_are_served(takes_over=False)


@FAULTS.found(examples=10, first_seed=3000)
def send_two_of_a_sequence(patch: Patch) -> None:
    """A dispatched head does not count as in flight."""

    def dispatch(self: Sequences, run: Run) -> None:
        original(self, run)
        sequence = self._with_in_flight(run)
        assert sequence is not None
        sequence.in_flight = None
        sequence.has_state = True
        self._known.changed[sequence] = None

    original = Sequences.dispatch
    patch.setattr(Sequences, "dispatch", dispatch)


@FAULTS.found(examples=29, first_seed=9000)
def forget_what_is_in_flight_at_takeover(patch: Patch) -> None:
    patch.setattr(Sequences, "adopt", lambda self, run, process="": None)


@FAULTS.shown_by(examples.test_another_batcher_goes_on_in_the_same_order)
def serve_in_the_order_of_reading(patch: Patch) -> None:
    """Places of requests that were put back do not count."""

    def record(self: Takeover, place: str, event: Event) -> None:
        original(self, f"{len(self._events):05d}", event)

    original = Takeover.record
    patch.setattr(Takeover, "record", record)


@FAULTS.found(examples=11, first_seed=3000)
def serve_counted_requests_as_they_come(patch: Patch) -> None:
    def turn_of(self: Segment, next_index: int) -> Run | None:
        return min(self.rest(), key=place_of, default=None)

    patch.setattr(Segment, "turn_of", turn_of)


@FAULTS.found(examples=217, first_seed=30000)
def leak_a_head(patch: Patch) -> None:
    """A head that is withdrawn still counts as one."""

    def removed(self: Sequences, run: Run) -> None:
        if run in self.followers:
            original(self, run)

    original = Sequences.removed
    patch.setattr(Sequences, "removed", removed)


@FAULTS.found(examples=8, first_seed=3000)
def forget_a_follower(patch: Patch) -> None:
    """Nothing happens when a request succeeded."""

    def settle(self: Sequences, run: Run, *, is_broken: bool) -> None:
        original(self, run, is_broken=is_broken)
        if not is_broken:
            self._known.changed.clear()

    original = Sequences.settle
    patch.setattr(Sequences, "settle", settle)


@FAULTS.shown_by(examples.test_requests_before_a_break_are_served)
def serve_what_comes_after_a_failure(patch: Patch) -> None:
    def refuse_after(self: Followers, segment: Segment, place: str) -> Iterator[None]:
        yield

    patch.setattr(Followers, "_refuse_after", refuse_after)


@FAULTS.found(examples=86, first_seed=9000)
def accept_what_comes_after_a_failure(patch: Patch) -> None:
    def judge(self: Sequences, run: Run) -> Any:
        refused = original(self, run)
        return None if refused is not None and refused.status == "ABORTED" else refused

    original = Sequences.judge
    patch.setattr(Sequences, "judge", judge)


@FAULTS.found(examples=11, first_seed=3000)
def end_a_sequence_with_waiting_requests(patch: Patch) -> None:
    """Idle time counts from the last arrival, whatever waits or is in flight."""

    def advance(self: Heads, sequence: OneSequence, now_us: int) -> None:
        original(self, sequence, now_us)
        if sequence.sequence_id in self._known.by_id:
            self._idle.add(sequence, now_us, waits=False, has_state=sequence.has_state)

    original = Heads._advance
    patch.setattr(Heads, "_advance", advance)


@FAULTS.found(examples=6, first_seed=3000)
def never_end_a_sequence(patch: Patch) -> None:
    patch.setattr(Heads, "_end_long_idle", lambda self, now_us, idle_us: iter(()))


@FAULTS.found(examples=13, first_seed=45000)
def begin_without_space(patch: Patch) -> None:
    def recount(self: Heads, sequence: OneSequence) -> None:
        original(self, sequence)
        self.begun -= sequence.occupies_space
        sequence.occupies_space = False

    original = Heads._recount
    patch.setattr(Heads, "_recount", recount)


@FAULTS.found(examples=47, first_seed=45000)
def never_begin_what_waits_for_space(patch: Patch) -> None:
    patch.setattr(Heads, "_begin_waiting", lambda self, now_us: None)


@FAULTS.found(examples=6, first_seed=3000)
def count_a_refused_follower_as_waiting(patch: Patch) -> None:
    def apply(self: Queue, decided: Any) -> None:
        original(self, decided._replace(refusals=[]))

    original = Queue.apply
    patch.setattr(Queue, "apply", apply)


@FAULTS.found(examples=19, first_seed=3000)
def serve_a_request_that_was_sent_twice(patch: Patch) -> None:
    patch.setattr(OneSequence, "known_id", lambda self, part: None)


@FAULTS.shown_by(before_several_breaks)
def drop_the_state_of_earlier_requests(patch: Patch) -> None:
    """A sequence that is broken at a later place, and then at an earlier one, has no state."""

    def change(self: SequenceStore, change: SequenceChange, now_us: int) -> None:
        known = self.kept.get(change.part.sequence_id)
        is_broken_later = known is not None and known.broken_at > change.part.place
        original(self, change, now_us)
        if change.outcome == "broken" and is_broken_later:
            self.kept[change.part.sequence_id].next_index = None

    original = SequenceStore.change
    patch.setattr(SequenceStore, "change", change)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
