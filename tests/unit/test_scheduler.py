"""The events of a scheduler: settings, carried out dispatches, and batches in flight."""

from __future__ import annotations

from carpool.messages.requests import SequencePart
from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Dispatch
from support.scheduler_harness import MS, SchedulerHarness, run, settle


def test_cancelled_dispatch_takes_no_capacity() -> None:
    harness = SchedulerHarness()
    harness.offer("a")
    (dispatch,) = harness.scheduler.poll(0)
    assert isinstance(dispatch, Dispatch)
    harness.offer("b")
    assert harness.poll() == []
    harness.scheduler.in_flight.unreserve()
    assert harness.poll() == ["idle: b"]


def test_settling_an_unknown_batch_or_one_twice_has_no_effect() -> None:
    harness = SchedulerHarness()
    harness.offer("a b")
    assert harness.poll() == ["idle: a b"]
    harness.offer("c")
    harness.settle(7)
    assert harness.poll() == []
    harness.settle(1)
    harness.settle(1)
    assert harness.poll() == ["idle: c"]
    harness.offer("d")
    assert harness.poll() == []


def test_adopted_batch_takes_capacity_until_it_is_forgotten() -> None:
    harness = SchedulerHarness()
    harness.scheduler.in_flight.adopt("found", Dispatch([run("a")], "idle", ""), dispatched_us=-5 * MS)
    harness.offer("b")
    assert harness.poll() == []
    harness.scheduler.in_flight.forget("found", 10 * MS)
    assert harness.poll(10) == ["idle: b"]


def test_batch_of_a_sequence_of_a_model_that_was_replaced_is_like_any_other() -> None:
    """Given one in flight that a previous batcher dispatched, and a model without sequences, expect its
    requests to be served."""
    harness = SchedulerHarness()
    sequence = SequencePart("mic7", True, False, None, "1-0")
    dispatch = Dispatch([run("a", sequence=sequence)], "idle", "", process="gone")
    harness.scheduler.in_flight.adopt("found", dispatch, dispatched_us=0)
    harness.offer("b")
    settle(harness.scheduler, "found", 5 * MS, 10 * MS)
    assert harness.poll(10) == ["idle: b"]


def test_new_settings_apply_to_requests_that_already_wait() -> None:
    harness = SchedulerHarness(processes=1, max_batch_size=8, max_queue_delay_ms=1000)
    harness.offer("a b c")
    assert harness.poll() == []
    harness.scheduler.settings = ModelSettings(max_batch_size=2)
    assert harness.poll() == ["full: a b"]
    harness.settle(1)
    assert harness.poll() == ["idle: c"]


def test_forgotten_batch_teaches_nothing() -> None:
    harness = SchedulerHarness(max_queue_delay_ms=1000).learn()
    expected = harness.scheduler.learned.turnaround_us("")
    harness.scheduler.in_flight.adopt("lost", Dispatch([run("a")], "idle", ""), dispatched_us=0)
    harness.scheduler.in_flight.forget("lost", 30_000 * MS)
    assert harness.scheduler.in_flight.batches == {}
    assert harness.scheduler.learned.turnaround_us("") == expected
    assert harness.scheduler.learned.round_trip_us == 0


def test_wake_up_time_of_a_batch_that_is_ready_is_the_last_poll() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=1)
    harness.offer("a", at=5)
    assert harness.poll(6) == []
    assert harness.wake_at_ms() is None
    harness.scheduler.model_processes = 1
    assert harness.wake_at_ms() == 6
