"""Refusals of requests that cannot be in time are postponed for a moment, and answered together."""

from __future__ import annotations

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages.requests import Entry, Run, SequencePart
from carpool.messages.results import Refusal
from carpool_batcher.core.decisions import refusal
from carpool_batcher.refusals import POSTPONED_MAX, POSTPONED_US, EarlyRefusals


def refused(reason: str = "early", part: SequencePart | None = None) -> Refusal:
    run = Run(Entry("1-0", 0), ["id"], [b""], sequence=part)
    return refusal(run, DEADLINE_EXCEEDED, reason, "refused")


def test_early_refusals_are_answered_together_when_the_first_is_due() -> None:
    early, first, second = EarlyRefusals(), refused(), refused()
    assert early.postpone([first], 1000) == []
    assert early.due_us == 1000 + POSTPONED_US
    assert early.postpone([second], 1000 + POSTPONED_US - 1) == []
    assert early.postpone([], 1000 + POSTPONED_US) == [first, second]
    assert early.due_us is None
    assert early.postpone([], 1000 + 2 * POSTPONED_US) == []


def test_many_are_answered_at_once() -> None:
    early = EarlyRefusals()
    assert early.postpone([refused() for _ in range(POSTPONED_MAX - 1)], 0) == []
    assert len(early.postpone([refused()], 0)) == POSTPONED_MAX


def test_other_refusals_and_those_of_sequences_are_not_held() -> None:
    early = EarlyRefusals()
    part = SequencePart("s", False, False, None, SequencePart.place_of("1-0", 0))
    others = [refused("waiting"), refused("early", part)]
    assert early.postpone([*others, refused()], 0) == others


def test_a_request_that_was_put_back_meanwhile_is_answered_in_its_new_entry() -> None:
    early, postponed = EarlyRefusals(), refused()
    assert postponed.run is not None
    early.postpone([postponed], 0)
    postponed.run.entry = Entry("2-0", 0)
    (answered,) = early.postpone([], POSTPONED_US)
    assert answered.entry is postponed.run.entry
