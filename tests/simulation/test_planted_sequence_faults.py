"""The state machine of sequences finds faults that are planted in the production code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from carpool.messages import Run, SequenceChange
from carpool_batcher.core.queue import Queue
from carpool_batcher.core.sequence import Segment, Sequence, place_of
from carpool_batcher.core.sequences import Sequences
from simulation.test_sequences_machine import SequencesMachine
from support.sequence_harness import SequenceStore
from unit import test_sequences as examples

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


def send_two_of_a_sequence(patch: Patch) -> None:
    """A dispatched head does not count as in flight."""

    def take(self: Sequences, run: Run) -> None:
        original(self, run)
        sequence = self._with_taken(run)
        assert sequence is not None
        sequence.taken = None
        sequence.kept = True
        self._changed[sequence] = None

    original = Sequences.take
    patch.setattr(Sequences, "take", take)


def forget_what_is_in_flight_at_takeover(patch: Patch) -> None:
    patch.setattr(Sequences, "adopt", lambda self, run: None)


def serve_in_the_order_of_reading(patch: Patch) -> None:
    """Places of requests that were put back do not count."""

    def complete(self: Sequences) -> None:
        if self._unread is not None:
            self._unread = [(f"{at:05d}", event) for at, (_, event) in enumerate(self._unread)]
        original(self)

    original = Sequences.complete
    patch.setattr(Sequences, "complete", complete)


def serve_counted_requests_as_they_come(patch: Patch) -> None:
    def turn_of(self: Segment, next_index: int) -> Run | None:
        return min(self.rest(), key=place_of, default=None)

    patch.setattr(Segment, "turn_of", turn_of)


def leak_a_head(patch: Patch) -> None:
    """A head that is withdrawn still counts as one."""

    def removed(self: Sequences, run: Run) -> None:
        if run in self.followers:
            original(self, run)

    original = Sequences.removed
    patch.setattr(Sequences, "removed", removed)


def forget_a_follower(patch: Patch) -> None:
    """Nothing happens when a request succeeded."""

    def settle(self: Sequences, run: Run, *, is_broken: bool) -> None:
        original(self, run, is_broken=is_broken)
        if not is_broken:
            self._changed.clear()

    original = Sequences.settle
    patch.setattr(Sequences, "settle", settle)


def serve_what_comes_after_a_failure(patch: Patch) -> None:
    patch.setattr(Segment, "after", lambda self, place: [])


def accept_what_comes_after_a_failure(patch: Patch) -> None:
    def judge(self: Sequences, run: Run) -> Any:
        refused = original(self, run)
        return None if refused is not None and refused.status == "ABORTED" else refused

    original = Sequences.judge
    patch.setattr(Sequences, "judge", judge)


def end_a_sequence_with_waiting_requests(patch: Patch) -> None:
    """Idle time counts from the last arrival, whatever waits or is in flight."""

    def advance(self: Sequences, sequence: Sequence, now_us: int) -> None:
        original(self, sequence, now_us)
        if sequence.sequence_id in self._by_id:
            self._still.add(sequence, now_us, waits=False)

    original = Sequences._advance
    patch.setattr(Sequences, "_advance", advance)


def never_end_a_sequence(patch: Patch) -> None:
    patch.setattr(Sequences, "_end_still", lambda self, now_us: False)


def begin_without_space(patch: Patch) -> None:
    def recount(self: Sequences, sequence: Sequence) -> None:
        original(self, sequence)
        self._kept -= sequence.counts
        sequence.counts = False

    original = Sequences._recount
    patch.setattr(Sequences, "_recount", recount)


def never_begin_what_waits_for_space(patch: Patch) -> None:
    patch.setattr(Sequences, "_begin_waiting", lambda self, now_us: None)


def count_a_refused_follower_as_waiting(patch: Patch) -> None:
    def follow(self: Queue, decided: Any) -> None:
        original(self, decided._replace(refusals=[]))

    original = Queue.follow
    patch.setattr(Queue, "follow", follow)


def serve_a_request_that_was_sent_twice(patch: Patch) -> None:
    patch.setattr(Sequence, "known_id", lambda self, part: None)


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


FAULTS: Final[list[Callable[[Patch], None]]] = [
    send_two_of_a_sequence,
    forget_what_is_in_flight_at_takeover,
    serve_counted_requests_as_they_come,
    leak_a_head,
    forget_a_follower,
    accept_what_comes_after_a_failure,
    end_a_sequence_with_waiting_requests,
    never_end_a_sequence,
    begin_without_space,
    never_begin_what_waits_for_space,
    count_a_refused_follower_as_waiting,
    serve_a_request_that_was_sent_twice,
]


def before_several_breaks() -> None:
    examples.test_requests_before_several_breaks_are_served(takes_over=False)


# The machine finds these seldom, so an example shows them.
FAULTS_OF_EXAMPLES: Final[list[tuple[Callable[[Patch], None], Callable[[], None]]]] = [
    (serve_in_the_order_of_reading, examples.test_another_batcher_goes_on_in_the_same_order),
    (serve_what_comes_after_a_failure, examples.test_requests_before_a_break_are_served),
    (drop_the_state_of_earlier_requests, before_several_breaks),
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
        run_state_machine_as_test(SequencesMachine, settings=MACHINE_SETTINGS)
