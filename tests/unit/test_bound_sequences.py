"""Sequences of a bound model: each stays with one process, which has a slot for it."""

from __future__ import annotations

from carpool.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED
from carpool.messages.batches import Dispatch
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from support.bound_harness import BoundHarness

GONE = "its model process ended; begin it again with sequence_start"


def slots(harness: BoundHarness) -> dict[str, list[str]]:
    """Which sequences are in which process, once each has read its inbox."""
    harness.read_inboxes()
    return {name: sorted(process.states) for name, process in harness.processes.items()}


def test_a_start_goes_to_the_process_with_the_most_free_slots() -> None:
    harness = BoundHarness("p", "q", slots=2)
    for name in "abc":
        harness.send(f"{name}0", start=True)
        harness.run()
    assert slots(harness) == {"p": ["a", "c"], "q": ["b"]}


def test_later_requests_go_where_their_sequence_was_begun() -> None:
    harness = BoundHarness("p", "q", slots=2)
    for name in "abcd":
        harness.send(f"{name}0", start=True)
    assert sorted(harness.run()) == [["a0", "c0"], ["b0", "d0"]]
    for name in "cbad":
        harness.send(f"{name}1")
    assert sorted(harness.run()) == [["a1", "c1"], ["b1", "d1"]]
    assert harness.ok["d1"] == ("d0", "d1")


def test_one_batch_of_a_process_is_in_flight() -> None:
    harness = BoundHarness("p", "q", slots=2)
    for name in "abcd":
        harness.send(f"{name}0", start=True)
    harness.run()
    harness.send("a1")
    assert harness.poll() == [["a1"]]
    harness.send("c1")
    harness.send("d1")
    assert harness.poll() == [["d1"]]
    harness.settle()
    assert harness.poll() == [["c1"]]


def test_a_process_that_is_busy_holds_up_no_other_lane_for_ever() -> None:
    harness = BoundHarness("p", slots=3)
    for name in "abc":
        harness.send(f"{name}0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    harness.send("b1", lane="left")
    harness.send("c1", lane="right")
    assert harness.poll() == []
    assert harness.scheduler.oldest_arrival_us() == 0
    harness.settle()
    assert harness.run() == [["b1"], ["c1"]]


def test_starts_wait_for_a_slot_in_the_order_of_arrival() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("b0", start=True)
    harness.send("c0", start=True, priority=9)
    assert harness.run() == []
    assert harness.scheduler.sequences.census().waiting_to_start == 2
    harness.send("a1", end=True)
    harness.send("d0", start=True, end=True)
    assert harness.run() == [["a1"], ["b0"]]
    harness.end_sequences("b")
    harness.send("c1", end=True)
    assert harness.run() == [["c0"], ["c1"], ["d0"]]


def test_slots_are_the_effective_batch_size() -> None:
    harness = BoundHarness("p", slots=2)
    harness.scheduler.settings = ModelSettings(max_batch_size=1)
    assert harness.scheduler.processes.slots == 1
    harness.send("a0", start=True)
    harness.send("b0", start=True)
    assert harness.run() == [["a0"]]
    harness.scheduler.settings = ModelSettings(max_batch_size=2)
    assert harness.run() == [["b0"]]


def test_without_a_process_a_start_waits_until_one_joins() -> None:
    harness = BoundHarness("p", slots=1)
    harness.leave("p")
    harness.compare()
    harness.send("a0", start=True)
    assert harness.poll() == []
    harness.join("q")
    harness.compare()
    assert harness.run() == [["a0"]]


# --- slots that become free --------------------------------------------------------------------------------


def test_a_process_is_told_of_an_idle_sequence() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("b0", 50, start=True)
    assert harness.run(50) == []
    assert harness.run(100) == [["b0"]]
    assert harness.processes["p"].ended == ["a"]


def test_a_process_is_told_of_a_sequence_that_is_ended_by_force() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    harness.send("b0", start=True)
    harness.send("a2")
    harness.end_sequences("a")
    assert harness.poll() == []  # a1 is in flight
    assert harness.processes["p"].ended == []
    harness.settle()
    assert harness.run() == [["b0"]]
    assert harness.processes["p"].ended == ["a"]
    assert harness.answers == {"a2": CANCELLED}


def test_a_process_is_told_of_a_sequence_whose_waiting_request_expired() -> None:
    harness = BoundHarness("p", slots=2)
    harness.send("a0", start=True)
    harness.send("b0", start=True)
    harness.run()
    harness.send("b1")
    harness.poll()
    harness.send("a1", expiration=5)
    harness.poll(10)
    assert harness.answers == {"a1": DEADLINE_EXCEEDED}
    harness.settle()
    assert slots(harness) == {"p": ["b"]}


def test_a_start_that_expires_is_told_that_no_slot_was_free() -> None:
    harness = BoundHarness("p", "q", slots=1)
    for name in "ab":
        harness.send(f"{name}0", start=True)
    harness.send("c0", start=True, expiration=5)
    harness.run()
    harness.poll(5)
    assert harness.details["c0"].endswith(
        ", for one of 2 slots of its model's processes (max_batch_size of each)"
    )


def test_a_process_is_told_of_a_sequence_whose_request_expired_in_flight() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True, expiration=5)
    harness.poll()
    harness.poll(10)
    harness.settle(at=10)
    assert slots(harness) == {"p": ["a"]}
    harness.poll(10)
    assert slots(harness) == {"p": []}


def test_a_process_is_not_told_of_what_it_ended_itself_or_never_had() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True, end=True)
    harness.run()
    harness.poll()
    harness.send("b0", start=True)
    harness.withdraw("b0")
    harness.poll()
    assert harness.processes["p"].inbox == []


def test_a_sequence_that_begins_anew_keeps_its_slot() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("a1", start=True)
    assert harness.run() == [["a1"]]
    assert slots(harness) == {"p": ["a"], "q": []}
    assert harness.ok["a1"] == ("a1",)


# --- processes that end ------------------------------------------------------------------------------------


def test_sequences_of_a_process_that_is_gone_are_broken_and_others_unharmed() -> None:
    harness = BoundHarness("p", "q", slots=2)
    for name in "abcd":
        harness.send(f"{name}0", start=True)
    harness.run()
    harness.send("a1")
    harness.send("c1", lane="other")
    harness.send("b1")
    assert harness.poll() == [["a1"], ["b1"]]
    harness.leave("p")
    harness.compare()
    harness.poll()
    assert harness.answers == {"c1": ABORTED}
    assert harness.details["c1"] == f"sequence c: {GONE}"
    harness.send("c2")
    assert harness.details["c2"] == f"sequence c: {GONE}"
    harness.settle()  # a1 is answered by the worker that reclaims it
    assert "b1" in harness.ok and "a1" in harness.failed
    harness.send("d1")
    assert harness.run() == [["d1"]]


def test_a_start_that_a_process_did_not_get_before_it_was_gone_goes_to_another() -> None:
    harness = BoundHarness("p", slots=2)
    harness.send("a0", start=True)
    harness.poll()
    harness.send("b0", start=True)
    assert harness.poll() == []
    harness.leave("p")
    harness.join("q")
    harness.compare()
    assert harness.poll() == [["b0"]]
    harness.settle()
    assert slots(harness) == {"q": ["b"]}
    assert harness.scheduler.queue.count == 0


def test_a_sequence_whose_process_is_gone_begins_anew_after_its_last_answer() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.poll()
    harness.send("a1", start=True)
    harness.leave("p")
    harness.compare()
    assert harness.poll() == []  # a0 is still in flight
    harness.settle()
    assert harness.run() == [["a1"]]
    assert harness.ok == {"a1": ("a1",)}


def test_a_batch_of_a_process_that_is_gone_takes_no_capacity_of_others() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.send("b0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    harness.leave("p")
    harness.compare()
    harness.send("b1")
    assert harness.poll() == [["b1"]]


def test_a_process_that_drains_gets_no_starts_but_what_follows_in_its_sequences() -> None:
    harness = BoundHarness("p", "q", slots=2)
    harness.send("a0", start=True)
    harness.run()
    harness.drain("p")
    harness.compare()
    for name in "bcd":
        harness.send(f"{name}0", start=True)
    harness.send("a1")
    assert sorted(harness.run()) == [["a1"], ["b0", "c0"]]
    assert slots(harness) == {"p": ["a"], "q": ["b", "c"]}
    harness.send("a2", end=True)
    assert harness.run() == [["a2"]]
    assert slots(harness)["p"] == []


def test_a_sequence_that_begins_anew_moves_away_from_a_process_that_drains() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.drain("p")
    harness.compare()
    harness.send("a1", start=True)
    assert harness.run() == [["a1"]]
    assert slots(harness) == {"p": [], "q": ["a"]}


def test_a_sequence_that_begins_anew_waits_if_only_a_process_that_drains_has_space() -> None:
    harness = BoundHarness("p", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.drain("p")
    harness.compare()
    harness.send("a1", start=True)
    assert harness.run() == []
    assert slots(harness) == {"p": []}
    harness.join("q")
    harness.compare()
    assert harness.run() == [["a1"]]


def test_a_start_that_waits_for_a_busy_process_moves_when_that_drains() -> None:
    harness = BoundHarness("p", slots=3)
    harness.send("a0", start=True)
    harness.send("b0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    harness.send("b1", start=True)
    harness.send("b2")
    harness.send("c0", start=True)
    assert harness.poll() == []
    harness.drain("p")
    harness.join("q")
    harness.compare()
    assert harness.poll() == [["b1", "c0"]]
    harness.settle()
    assert harness.run() == [["b2"]]
    assert slots(harness) == {"p": ["a"], "q": ["b", "c"]}


# --- taking over -------------------------------------------------------------------------------------------


def test_a_batcher_that_takes_over_knows_which_process_has_which_sequence() -> None:
    harness = BoundHarness("p", "q", slots=2)
    for name in "abc":
        harness.send(f"{name}0", start=True)
    harness.run()
    harness.send("a1")
    harness.poll()
    harness.take_over()
    harness.send("c1")
    harness.send("b1")
    harness.send("d0", start=True)
    harness.send("e0", start=True)
    assert harness.poll() == [["b1", "d0"]]
    harness.settle()
    assert harness.run() == [["c1"]]
    assert slots(harness) == {"p": ["a", "c"], "q": ["b", "d"]}


def test_a_batcher_that_takes_over_breaks_sequences_whose_process_is_gone() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.send("a1")
    harness.leave("p")
    harness.take_over()
    harness.poll()
    assert harness.details["a1"] == f"sequence a: {GONE}"
    harness.send("a2", start=True)
    assert harness.run() == [["a2"]]
    harness.take_over()
    harness.send("a3")
    assert harness.run() == [["a3"]]
    assert harness.ok["a3"] == ("a2", "a3")


def test_a_break_by_a_process_that_is_gone_outlives_the_batcher() -> None:
    harness = BoundHarness("p", "q", slots=1)
    harness.send("a0", start=True)
    harness.run()
    harness.leave("p")
    harness.compare()
    harness.poll()
    harness.take_over()
    harness.send("a1")
    assert harness.details["a1"] == f"sequence a: {GONE}"


def test_a_dispatch_that_was_not_carried_out_leaves_its_process_idle() -> None:
    harness = BoundHarness("p", slots=2)
    scheduler: Scheduler = harness.scheduler
    assert scheduler.kind is ModelKind.BOUND
    harness.send("a0", start=True)
    (dispatch,) = scheduler.poll(0)
    assert isinstance(dispatch, Dispatch) and dispatch.process == "p"
    scheduler.forget(dispatch.runs)
    scheduler.in_flight.unreserve(dispatch.process)
    del harness.waiting["a0"]
    harness.send("b0", start=True)
    assert harness.run() == [["b0"]]
