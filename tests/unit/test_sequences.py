"""Sequences: the rules at the top of `core/sequences/sequences.py`, in virtual time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
)
from carpool.messages.requests import Entry, Run, SequencePart
from carpool.messages.results import UNANSWERED, Refusal
from carpool.messages.sequences import SequenceChange
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.core.sequences import takeover
from carpool_batcher.core.sequences.sequence import place_of
from carpool_batcher.core.sequences.takeover import ForcedEnd
from support.scheduler_harness import settle
from support.sequence_harness import SequenceHarness

# --- order -------------------------------------------------------------------------------------------------


def test_one_request_of_a_sequence_at_a_time_and_in_order() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("a2", end=True)
    assert harness.run() == [["a0"], ["a1"], ["a2"]]
    assert harness.store.kept == {}
    assert len(harness.scheduler.sequences) == 0


def test_heads_of_several_sequences_share_a_batch() -> None:
    harness = SequenceHarness()
    for name in ("a0", "b0", "c0"):
        harness.send(name, start=True)
    for name in ("a1", "b1"):
        harness.send(name)
    assert harness.scheduler.queue.count == 5
    assert harness.poll() == [["a0", "b0", "c0"]]
    assert harness.poll() == []
    assert harness.scheduler.queue.count == 2
    harness.settle()
    assert harness.poll() == [["a1", "b1"]]


def test_one_request_may_be_a_whole_sequence() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, end=True)
    harness.send("a1", start=True, end=True)
    assert harness.run() == [["a0"], ["a1"]]
    assert len(harness.scheduler.sequences) == 0
    assert harness.scheduler.sequences.census()[2:] == (2, 2, 0)


def test_a_start_begins_a_sequence_anew_after_earlier_requests() -> None:
    harness = SequenceHarness(max_candidate_sequences=1)
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("a2", start=True)
    harness.send("a3")
    assert harness.run() == [["a0"], ["a1"], ["a2"], ["a3"]]
    assert harness.store.kept["a"].next_index == 2


# --- never begun -------------------------------------------------------------------------------------------


def test_a_sequence_that_was_never_begun() -> None:
    harness = SequenceHarness()
    harness.send("a0")
    assert harness.answers == {"a0": INVALID_ARGUMENT}
    assert harness.details["a0"].startswith("sequence_id: a was never begun, or has ended")
    harness.poll()
    assert harness.store.kept == {}
    assert len(harness.scheduler.sequences) == 0


def test_a_sequence_that_has_ended() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, end=True)
    harness.send("a1")
    assert harness.run() == [["a0"]]
    harness.send("a2")
    assert harness.answers == {"a1": INVALID_ARGUMENT, "a2": INVALID_ARGUMENT}
    assert harness.scheduler.queue.count == 0


# --- index -------------------------------------------------------------------------------------------------


def test_requests_are_taken_in_the_order_of_their_index() -> None:
    harness = SequenceHarness()
    harness.send("a2", index=2)
    harness.send("a1", index=1)
    assert harness.run() == []
    harness.send("a0", start=True, index=0)
    harness.send("a4", index=4, end=True)
    assert harness.run() == [["a0"], ["a1"], ["a2"]]
    harness.send("a3", index=3)
    assert harness.run() == [["a3"], ["a4"]]
    assert harness.answers == {}


def test_a_request_sent_twice_is_dropped_wherever_the_first_one_is() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.send("b0", start=True, index=0)
    harness.send("again0", sequence="a", start=True, index=0, correlation_id="a0")  # waiting
    harness.poll()
    harness.send("again1", sequence="a", start=True, index=0, correlation_id="a0")  # in flight
    harness.settle()
    harness.poll()
    harness.send("again2", sequence="a", start=True, index=0, correlation_id="a0")  # the last one
    harness.send("a1", index=1)
    harness.send("again3", sequence="a", index=1, correlation_id="a1")
    harness.run()
    harness.send("again4", sequence="a", index=1, correlation_id="a1")
    harness.send("again5", sequence="a", start=True, index=0, correlation_id="a0")  # the first one
    harness.take_over()
    harness.send("again6", sequence="a", start=True, index=0, correlation_id="a0")
    harness.run()
    assert harness.answers == dict.fromkeys([f"again{number}" for number in range(7)], UNANSWERED)
    assert harness.store.kept["a"].next_index == 2
    assert not harness.store.kept["a"].broken


def test_another_request_with_an_index_that_is_taken() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.send("a1", index=1)
    harness.send("other1", sequence="a", index=1)
    harness.run()
    harness.send("other2", sequence="a", index=1)
    assert harness.answers == dict.fromkeys(("other1", "other2"), INVALID_ARGUMENT)
    assert harness.details["other2"] == "sequence_index: 1 was sent before; the next to be processed is 2"
    harness.send("a2", index=2)
    assert harness.run() == [["a2"]]  # the sequence is as it was


def test_a_missing_index_breaks_the_sequence_after_a_while() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.run()
    harness.send("a2", 90, index=2)
    assert harness.run(90) == []
    harness.send("a3", 180, index=3)
    assert harness.run(189) == []
    assert harness.answers == {}
    assert harness.scheduler.wake_at_us() == 190_000
    harness.run(190)
    assert harness.answers == {"a2": ABORTED, "a3": ABORTED}
    assert "index 1 did not arrive within 100 ms; begin it again" in harness.details["a3"]
    harness.send("a1", 191, index=1)
    assert harness.answers["a1"] == ABORTED
    harness.send("a4", 192, start=True, index=0)
    assert harness.run(192) == [["a4"]]


def test_requests_that_wait_for_a_start() -> None:
    harness = SequenceHarness()
    harness.send("a1", index=1)
    harness.run(0)
    harness.run(100)
    assert harness.answers == {"a1": INVALID_ARGUMENT}
    assert len(harness.scheduler.sequences) == 0
    assert harness.store.kept == {}


# --- breaking ----------------------------------------------------------------------------------------------


def test_a_request_that_fails_breaks_what_comes_after_it_up_to_the_next_start() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("a2", start=True)
    harness.send("a3")
    harness.poll()
    harness.settle("a")
    assert harness.run() == [["a2"], ["a3"]]
    assert harness.answers == {"a1": ABORTED}
    assert harness.details["a1"].endswith(
        "its request a0 did not succeed; begin it again with sequence_start"
    )


def test_requests_before_a_break_are_served() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    for name in ("a1", "a2", "a3", "a4"):
        harness.send(name)
    harness.poll()
    harness.withdraw("a2")
    assert harness.answers == {"a2": CANCELLED}
    harness.poll()
    assert harness.answers == {"a2": CANCELLED, "a3": ABORTED, "a4": ABORTED}
    harness.settle()
    assert harness.run() == [["a1"]]
    harness.send("a5")
    assert harness.answers["a5"] == ABORTED
    assert harness.store.kept["a"].broken == "its request a2 did not succeed"


@pytest.mark.parametrize("takes_over", [False, True])
def test_requests_before_several_breaks_are_served(takes_over: bool) -> None:
    """Given a request that is withdrawn, and then one before it, expect that those before both are served."""
    harness = SequenceHarness()
    harness.send("a0", start=True)
    assert harness.run() == [["a0"]]
    for name in ("a1", "a2", "a3", "a4", "a5", "a6"):
        harness.send(name)
    assert harness.poll() == [["a1"]]
    for name in ("a5", "a3"):
        harness.withdraw(name)
        harness.poll()
    if takes_over:
        harness.take_over()
    harness.settle()
    assert harness.run() == [["a2"]]
    assert harness.ok == {"a0": ("a0",), "a1": ("a0", "a1"), "a2": ("a0", "a1", "a2")}
    assert harness.answers == {"a5": CANCELLED, "a6": ABORTED, "a3": CANCELLED, "a4": ABORTED}
    assert harness.store.kept["a"].failed_at == place_of(harness.runs["a3"])


def test_withdrawn_requests_of_one_sequence_are_all_cancelled() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    for name in ("a1", "a2", "a3"):
        harness.send(name)
    harness.withdraw("a0", "a1", "a2")
    harness.poll()
    assert harness.answers == {"a0": CANCELLED, "a1": CANCELLED, "a2": CANCELLED, "a3": ABORTED}
    assert harness.scheduler.queue.count == harness.scheduler.queue.bytes == 0


def test_a_follower_expires_and_breaks() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1", expiration=10)
    harness.send("a2")
    harness.poll()
    harness.poll(10)
    assert harness.answers == {"a1": DEADLINE_EXCEEDED, "a2": ABORTED}


def test_a_request_expires_in_flight_and_breaks() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, expiration=10)
    harness.send("a1")
    harness.poll()
    harness.poll(10)  # answered ahead
    harness.poll(10)
    assert harness.answers == {"a1": ABORTED}
    harness.send("a2", start=True)
    assert harness.poll(11) == []  # one at a time, although nobody waits for that one
    harness.settle()
    assert harness.poll(12) == [["a2"]]


def test_a_follower_that_expires_is_delayed_if_so_set() -> None:
    harness = SequenceHarness(expiration_action="delay", max_batch_size=1, model_processes=1)
    harness.send("a0", start=True)
    harness.send("a1", expiration=10)
    harness.poll()
    harness.poll(10)
    harness.send("b0", 11, start=True)
    harness.settle(at=12)
    assert harness.run(12) == [["b0"], ["a1"]]
    assert harness.answers == {}


def test_a_request_over_the_queue_limit_breaks() -> None:
    harness = SequenceHarness(max_queue_size=2)
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("a2")
    harness.send("a3")
    assert harness.answers == {"a2": RESOURCE_EXHAUSTED, "a3": ABORTED}
    assert harness.run() == [["a0"], ["a1"]]
    assert harness.store.kept["a"].broken


def test_a_start_over_the_queue_limit_breaks() -> None:
    harness = SequenceHarness(max_queue_size=1)
    harness.send("b0", start=True)
    harness.send("a0", start=True)
    harness.send("a1")
    assert harness.answers == {"a0": RESOURCE_EXHAUSTED, "a1": ABORTED}


def test_an_entry_removed_by_hand_breaks() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("a2")
    harness.poll()
    harness.delete("a1")
    assert harness.scheduler.wake_at_us() == 0
    harness.poll()
    assert harness.answers == {"a2": ABORTED}
    assert harness.store.kept["a"].broken == "its request a1 did not succeed"


def test_a_request_that_could_not_be_decoded_breaks() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.run()
    part = SequencePart("a", False, False, None, "9")
    refused = Refusal(Entry("9-0", 0), ["bad"], None, "", INVALID_ARGUMENT, "input", "body: bad", breaks=part)
    assert list(harness.scheduler.refuse_malformed(refused)) == [refused]
    harness.send("a2")
    assert harness.answers == {"a2": ABORTED}
    harness.poll()
    assert harness.store.kept["a"].broken == "its request bad did not succeed"


def test_a_batch_that_vanished_breaks() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1")
    harness.poll()
    harness.scheduler.in_flight.forget(next(iter(harness.in_flight)), 0)
    harness.poll()
    assert harness.answers == {"a1": ABORTED}
    assert harness.store.kept["a"].broken


# --- space -------------------------------------------------------------------------------------------------


def test_sequences_wait_to_start_in_the_order_of_arrival() -> None:
    harness = SequenceHarness(max_candidate_sequences=2)
    for name in "abcd":
        harness.send(f"{name}0", start=True)
        harness.send(f"{name}1", end=True)
    assert harness.poll() == [["a0", "b0"]]
    assert harness.scheduler.sequences.census()[:2] == (2, 2)
    harness.settle()
    assert harness.poll() == [["a1", "b1"]]
    harness.settle()
    assert harness.poll() == [["c0", "d0"]]


def test_a_start_that_waits_for_space_keeps_its_deadline() -> None:
    harness = SequenceHarness(max_candidate_sequences=1)
    harness.send("a0", start=True)
    harness.send("b0", start=True, expiration=10)
    harness.send("b1")
    harness.send("c0", start=True)
    harness.run()
    harness.poll(10)
    assert harness.answers == {"b0": DEADLINE_EXCEEDED, "b1": ABORTED}
    assert harness.scheduler.sequences.census()[:2] == (1, 1)
    harness.end_sequences("a")
    assert harness.poll(11) == [["c0"]]


@pytest.mark.parametrize(
    ("expiring", "awaited"),
    [
        ({"start": True, "sequence": "b"}, "one of 1 sequences to end (max_candidate_sequences)"),
        ({}, "an earlier request of its sequence"),
        ({"index": 2}, "the request of its sequence with the index 1"),
        ({"index": 1, "sequence": "c"}, "the start of its sequence"),
        ({"start": True}, ""),
    ],
)
def test_who_expires_is_told_what_it_waited_for(expiring: dict[str, Any], awaited: str) -> None:
    harness = SequenceHarness(max_candidate_sequences=1, model_processes=int("index" in expiring))
    if expiring != {"start": True}:
        harness.send("a0", start=True)
        harness.run()
    harness.send("x", expiration=10, **{"sequence": "a", **expiring})
    harness.poll()
    harness.poll(10)
    assert harness.details == {
        "x": "expired: still waiting 10 ms after its arrival"
        + (f", for {awaited}" if awaited else "; no worker serves its model now")
    }


def test_a_broken_sequence_makes_space() -> None:
    harness = SequenceHarness(max_candidate_sequences=1)
    harness.send("a0", start=True)
    harness.send("b0", start=True)
    harness.poll()
    harness.settle("a")
    assert harness.poll() == [["b0"]]


# --- idle --------------------------------------------------------------------------------------------------


def test_an_idle_sequence_is_ended() -> None:
    harness = SequenceHarness(max_candidate_sequences=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("a1", 50)
    harness.run(50)
    harness.send("b0", 60, start=True)
    assert harness.run(149) == []
    assert harness.scheduler.wake_at_us() == 150_000
    assert harness.run(150) == [["b0"]]
    assert list(harness.store.kept) == ["b"]
    harness.send("a2", 151)
    assert harness.answers == {"a2": INVALID_ARGUMENT}


def test_a_sequence_with_waiting_requests_is_not_idle() -> None:
    harness = SequenceHarness(model_processes=1, max_batch_size=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("b0", 0, start=True)
    harness.poll(0)  # the only process is busy
    harness.send("c0", 0, start=True)
    harness.poll(0)
    harness.send("a1", 50)
    assert harness.poll(500) == []
    harness.settle(at=501)
    assert harness.run(501) == [["a1"]]


def test_what_broke_is_forgotten_when_idle() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.poll()
    harness.settle("a")
    harness.poll(0)
    harness.poll(100)
    assert harness.store.kept == {}
    harness.send("a1", 101)
    assert harness.answers == {"a1": INVALID_ARGUMENT}


# --- end_sequences -----------------------------------------------------------------------------------------


def test_sequences_are_ended_by_force() -> None:
    harness = SequenceHarness(model_processes=1, max_batch_size=1)
    harness.send("a0", start=True)
    harness.send("a1")
    harness.send("b0", start=True)
    harness.poll()
    harness.poll()
    harness.send("a2", start=True)
    harness.end_sequences("a", "b", "unknown")
    harness.poll()
    assert harness.answers.items() >= {"a1": CANCELLED, "a2": CANCELLED}.items()
    harness.send("a3")
    assert harness.answers["a3"] == ABORTED
    assert "it was ended (end_sequences); begin it again" in harness.details["a3"]
    harness.settle()  # what was in flight is finished
    harness.send("a4")
    assert harness.answers["a4"] == ABORTED
    harness.send("a5", start=True)
    assert ["a5"] in harness.run()
    assert harness.scheduler.queue.count == 0
    assert "unknown" not in harness.store.kept


# --- kinds of models ---------------------------------------------------------------------------------------


def test_a_stateful_model_needs_a_sequence_and_another_has_none() -> None:
    part = SequencePart("a", True, True, None, "1")
    for kind, sequence, status in (
        (ModelKind.STATEFUL, None, INVALID_ARGUMENT),
        (ModelKind.PLAIN, part, UNIMPLEMENTED),
        (ModelKind.STEPPING, part, UNIMPLEMENTED),
    ):
        scheduler = Scheduler(ModelSettings(), 1, kind)
        run = Run(Entry("1-0", 0), ["x"], [b""], sequence=sequence)
        (refused,) = scheduler.offer(run, 0)
        assert refused.status == status
        assert refused.detail.startswith("sequence_id: ")
        assert scheduler.queue.count == 0


# --- taking over -------------------------------------------------------------------------------------------


def test_another_batcher_goes_on_in_the_same_order() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    for name in ("a1", "a2", "a3"):
        harness.send(name)
    harness.poll()
    harness.take_over(
        reading=["a3", "a1", "a2"]
    )  # a1 and a2 were put back: they stand later than their places
    assert harness.poll() == []
    harness.settle()
    assert harness.run() == [["a1"], ["a2"], ["a3"]]
    assert harness.answers == {}


def test_no_request_is_dispatched_before_all_were_read() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    scheduler = harness.scheduler = Scheduler(harness.settings, 1, ModelKind.STATEFUL)
    scheduler.sequences.load([])
    scheduler.offer(harness.waiting["a0"], 0)
    assert harness.poll() == []
    assert scheduler.queue.count == 1
    scheduler.sequences.complete()
    assert harness.poll() == [["a0"]]


def test_another_batcher_knows_what_is_broken() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.poll()
    harness.settle("a")
    harness.take_over()
    harness.send("a1")
    assert harness.answers == {"a1": ABORTED}


def test_another_batcher_knows_what_is_broken_at_two_places() -> None:
    """Given a request that failed while a later one, after another start, was broken already."""
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.poll()
    harness.send("a1")
    harness.send("a2", start=True)
    harness.send("a3")
    harness.withdraw("a3")
    harness.poll()
    harness.settle("a")
    harness.take_over()
    harness.send("a4")
    assert harness.run() == [["a2"]]
    assert harness.answers == {"a1": ABORTED, "a3": CANCELLED, "a4": ABORTED}


def test_what_follows_a_start_that_was_refused_while_another_batcher_reads_is_aborted() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.send("a1")
    harness.take_over(meanwhile=lambda: harness.withdraw("a0"))
    harness.send("a2")
    harness.poll()
    assert harness.answers == {"a0": CANCELLED, "a1": ABORTED, "a2": ABORTED}


def test_what_stands_before_a_start_that_was_refused_while_another_batcher_reads_is_served() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.run()
    for name, starts in (("a1", False), ("a2", True), ("a3", False)):
        harness.send(name, start=starts)
    harness.take_over(meanwhile=lambda: harness.withdraw("a2"))
    assert harness.run() == [["a1"]]
    assert harness.answers == {"a2": CANCELLED, "a3": ABORTED}


def test_a_start_that_succeeds_while_another_batcher_reads_begins_the_sequence_anew() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.poll()
    harness.settle("a")
    harness.send("a1", start=True)
    harness.poll()
    harness.send("a2")
    harness.take_over(meanwhile=harness.settle)
    assert harness.run() == [["a2"]]
    assert harness.answers == {}


def test_another_batcher_forgets_a_sequence_whose_state_was_lost() -> None:
    """Given a request in flight for which there is no state, expect that nothing is kept in the end."""
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    ((run,),) = harness.in_flight.values()
    harness.store.kept.clear()
    harness.take_over()
    assert run.sequence is not None
    harness.store.change(SequenceChange(run.sequence, "a1", "broken", "there is no state"), 0)
    settle(harness.scheduler, harness.in_flight.popitem()[0], 0, 0, broken=["a"])
    harness.poll()
    harness.poll(200)
    assert harness.store.kept == {}


def test_a_broken_sequence_keeps_its_space_for_what_stands_before_the_break() -> None:
    """Given a broken sequence that was changed earlier, and waits to begin anew."""
    harness = SequenceHarness(max_candidate_sequences=1)
    harness.send("b0", start=True)
    harness.poll()
    harness.settle("b")
    harness.send("a0", start=True)
    harness.run()
    harness.scheduler.model_processes = 0
    harness.send("a1")
    harness.send("a2")
    harness.withdraw("a2")
    harness.send("b1", start=True)
    harness.poll()
    harness.take_over()
    assert harness.run() == [["a1"], ["b1"]]
    assert harness.answers == {"a2": CANCELLED}


def test_another_batcher_counts_idle_time_from_the_last_change() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True)
    harness.run(50)
    harness.take_over(90)
    harness.poll(149)
    assert "a" in harness.store.kept
    harness.poll(150)
    assert harness.store.kept == {}


def test_a_result_that_was_kept_before_the_batcher_took_over_is_counted_once() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.run()
    harness.send("a1", index=1)
    harness.poll()
    (batch_id,) = harness.in_flight
    runs = harness.in_flight[batch_id]
    harness.settle()  # a batcher reads the batches before, and the sequences after that
    harness.in_flight[batch_id] = runs
    harness.take_over()
    del harness.in_flight[batch_id]
    settle(harness.scheduler, batch_id, 0, 0)
    harness.send("a2", index=2)
    assert harness.run() == [["a2"]]


def test_a_request_after_one_that_was_kept_before_the_batcher_took_over_has_its_turn() -> None:
    """Given a result that was kept before the new batcher looked, and that it has not read yet."""
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.run()
    harness.send("a1", index=1)
    harness.poll()
    harness.send("a2", index=2)
    ((batch_id, (run,)),) = harness.in_flight.items()
    assert run.sequence is not None
    harness.store.change(SequenceChange(run.sequence, "a1", "kept"), 0)
    harness.take_over()
    harness.send("a3", index=3)
    assert harness.poll() == []
    del harness.in_flight[batch_id]
    settle(harness.scheduler, batch_id, 0, 0)
    assert harness.run() == [["a2"], ["a3"]]
    assert harness.answers == {}


def test_copies_of_requests_that_were_kept_before_the_batcher_took_over() -> None:
    harness = SequenceHarness()
    harness.send("a0", start=True, index=0)
    harness.send("a1", index=1)
    harness.run()
    harness.send("a2", index=2)
    harness.poll()
    ((_, (run,)),) = harness.in_flight.items()
    assert run.sequence is not None
    harness.store.change(SequenceChange(run.sequence, "a2", "kept"), 0)
    harness.take_over()
    harness.send("again", sequence="a", index=2, correlation_id="a2")
    harness.send("other", sequence="a", index=1, correlation_id="a1")
    assert harness.answers == {"again": UNANSWERED, "other": INVALID_ARGUMENT}


@pytest.mark.parametrize("seed", range(10))
def test_events_of_a_takeover_are_sorted_in_pieces(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of places; at one place, in the order in which they were recorded."""
    monkeypatch.setattr(takeover, "SORTED_AT_ONCE", 4)
    choice = Random(seed)
    events = [(f"{choice.randrange(12):02d}", ForcedEnd((), str(number))) for number in range(30)]
    recorded = takeover.Takeover(())
    for place, event in events:
        recorded.record(place, event)
    assert len(list(recorded.sort())) == 8
    assert list(recorded.in_order()) == [event for _, event in sorted(events, key=lambda one: one[0])]
