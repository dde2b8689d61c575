"""A model that an operator has paused: rule 12 of the scheduler."""

from __future__ import annotations

import pytest

from carpool.messages.requests import SequencePart
from carpool.messages.results import Refusal
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.orders import REASON_CHARS_MAX, check_reason, read_drain_order, read_paused
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from support.scheduler_harness import MS, SchedulerHarness, run, settle

WAITS = Pause("new weights")


def test_nothing_is_dispatched_until_it_is_resumed() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    harness.scheduler.pause = WAITS
    assert harness.offer("a b c") == []
    assert harness.poll() == [] and harness.wake_at_ms() is None and harness.earliest_dispatch_ms() is None
    harness.scheduler.pause = None
    assert harness.poll(5) == ["full: a b"]


def test_what_is_in_flight_goes_on() -> None:
    harness = SchedulerHarness()
    harness.offer("a", expiration=50)
    assert harness.poll() == ["idle: a"]
    harness.scheduler.pause = WAITS
    assert harness.poll(50) == ["expired: a"]
    harness.settle(1, 60)
    assert not harness.scheduler.in_flight.batches


def test_deadlines_hold_and_say_why_nothing_was_dispatched() -> None:
    harness = SchedulerHarness()
    harness.scheduler.pause = WAITS
    harness.offer("a", expiration=30)
    assert harness.poll() == [] and harness.wake_at_ms() == 30
    (expired,) = harness.scheduler.poll(30 * MS)
    assert isinstance(expired, Refusal) and expired.status == "DEADLINE_EXCEEDED"
    assert expired.detail.endswith("; its model is paused by an operator: new weights")


def test_withdrawals_are_carried_out() -> None:
    harness = SchedulerHarness()
    harness.scheduler.pause = WAITS
    harness.offer("a b")
    assert [refused.correlation_ids for refused in harness.withdraw("a")] == [["a"]]


def test_deferred_refuses_nothing_early() -> None:
    """Given requests that cannot be in time, expect that they are refused early only without a pause."""
    for pause, decided in ((WAITS, []), (None, ["DEADLINE_EXCEEDED: a b"])):
        harness = SchedulerHarness(policy="deferred").learn(intercept=100, slope=100)
        harness.offer("x", expiration=10_000)
        harness.poll()
        harness.scheduler.pause = pause
        harness.offer("a b", 1, expiration=50)
        assert harness.poll(2) == decided


def test_only_what_arrives_since_is_refused() -> None:
    """Given one request that waited before, expect that it waits on, also when another batcher reads it."""
    harness = SchedulerHarness()
    harness.scheduler.pause = Pause("", 10 * MS)
    assert harness.offer("before", 9.9) == []
    (refused,) = harness.offer("after later", 10)
    assert (refused.status, refused.reason) == ("UNAVAILABLE", "paused")
    assert refused.detail == "its model is paused by an operator"
    assert refused.correlation_ids == ["after", "later"]
    assert harness.scheduler.queue.count == 1


def test_delayed_request_arrived_when_it_was_sent() -> None:
    harness = SchedulerHarness()
    harness.scheduler.pause = Pause("", 10 * MS)
    sent_before = run("a", 9, "7-0")
    sent_before.not_before_ms = 1000
    sent_before.arrival_us += 1_000_000
    assert harness.offer_runs([sent_before], 11) == []


def test_copy_of_a_request_that_waits_is_removed_without_an_answer() -> None:
    harness = SchedulerHarness()
    harness.offer("a", 0)
    harness.scheduler.pause = Pause("", 10 * MS)
    refusals = harness.offer("a b", 20)
    assert sorted((refused.status, *refused.correlation_ids) for refused in refusals) == [
        ("", "a"),
        ("UNAVAILABLE", "b"),
    ]


def part(sequence_id: str, entry_id: str, *, starts: bool) -> SequencePart:
    return SequencePart(sequence_id, starts, False, None, SequencePart.place_of(entry_id, 0))


def test_sequence_that_was_begun_goes_on_when_it_is_resumed() -> None:
    """Given a sequence, expect that what continues it waits, although what arrives is refused; and that no
    other one starts."""
    scheduler = Scheduler(ModelSettings(), 1, ModelKind.STATEFUL)
    scheduler.sequences.complete()
    start = run("a", 0, "1-0", sequence=part("s", "1-0", starts=True))
    assert scheduler.offer(start, 0) == []
    scheduler.in_flight.launch("1", scheduler.poll(0)[0], 0)  # type: ignore[arg-type]
    scheduler.pause = Pause("", 5 * MS)
    follower = run("b", 6, "2-0", sequence=part("s", "2-0", starts=False))
    assert scheduler.offer(follower, 6 * MS) == []
    other = run("c", 7, "3-0", sequence=part("t", "3-0", starts=True))
    (refused,) = scheduler.offer(other, 7 * MS)
    assert refused.status == "UNAVAILABLE"
    settle(scheduler, "1", 1000, 8 * MS)
    assert not [one for one in scheduler.poll(8 * MS) if isinstance(one, Dispatch)]
    scheduler.pause = None
    (dispatch,) = [one for one in scheduler.poll(9 * MS) if isinstance(one, Dispatch)]
    assert dispatch.runs == [follower]


# --- what is written by hand -------------------------------------------------------------------------------


def test_pause_that_was_written_by_hand_counts() -> None:
    paused = read_paused({"mode": "refuse", "since": "x" * 20})
    assert paused is not None and paused.refuses and paused.since_ms == 0
    assert "by somebody" in paused.describe()
    assert read_paused({}) is None
    assert read_drain_order("[1]").since_ms == 0


def test_reason_is_one_line_of_bounded_length() -> None:
    assert check_reason(" new\n weights ") == "new weights"
    with pytest.raises(ValueError, match="reason: 301 characters"):
        check_reason("x" * (REASON_CHARS_MAX + 1))
