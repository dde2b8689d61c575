"""Deadlines: urgent requests, expiration in the queue and in flight, and the memory of timers."""

from __future__ import annotations

import gc

import pytest

from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool_batcher.core.deadlines import BatchTimer
from carpool_batcher.core.scheduler import Dispatch, Expire
from support.scheduler_harness import MS, SchedulerHarness, run

# --- urgent requests -------------------------------------------------------------------------------------


def test_batch_is_dispatched_before_the_queue_delay_ends_when_a_deadline_is_near() -> None:
    harness = SchedulerHarness(max_batch_size=4, max_queue_delay_ms=1000)
    harness.offer("a")
    harness.offer("b", at=1, expiration=50)
    # 2 ms before the deadline, as no turnaround is known yet.
    assert harness.wake_at_ms() == 49
    assert harness.poll(48) == []
    assert harness.poll(49) == ["deadline: a b"]


def test_lead_before_a_deadline_follows_the_turnaround() -> None:
    harness = SchedulerHarness(max_queue_delay_ms=1000)
    # Given a batch that took 20 ms from dispatch to settled
    harness.offer("a", expiration=10)
    assert harness.poll(8) == ["deadline: a"]
    harness.settle(1, at=28)
    assert harness.poll(28) == []
    # Then the next is urgent one and a half turnarounds, and 2 ms, before its deadline
    harness.offer("b", at=100, expiration=100)
    assert harness.wake_at_ms() == 200 - 30 - 2


def test_lead_rises_at_once_and_falls_slowly() -> None:
    harness = SchedulerHarness(max_queue_delay_ms=10_000)
    leads: list[float] = []
    for number, took in enumerate((10, 20, 10, 10), 1):
        start = 1000 * number
        harness.offer("a", at=start, expiration=0.5)
        assert harness.poll(start) == ["deadline: a"]
        harness.settle(number, at=start + took)
        harness.poll(start + took)
        harness.offer("b", at=start + 100, expiration=800)
        leads.append(start + 900 - (harness.wake_at_ms() or 0))
        harness.withdraw("b", at=start + 100)
        harness.poll(start + 900)
    assert leads == [pytest.approx(1.5 * turnaround + 2, abs=0.01) for turnaround in (10, 20, 19, 18.1)]


def test_request_with_a_very_short_expiration_is_dispatched_at_once() -> None:
    harness = SchedulerHarness(max_queue_delay_ms=1000)
    harness.offer("a", at=5, expiration=1)
    assert harness.poll(5) == ["deadline: a"]


def test_deadline_is_met_after_a_queue_delay_was_introduced() -> None:
    harness = SchedulerHarness()
    harness.offer("a")
    assert harness.poll() == ["idle: a"]
    # Given a request that waits for a busy process
    harness.offer("b", expiration=100)
    assert harness.poll(1) == []
    # When a queue delay is set, and the process is free
    harness.settle(1, at=2)
    harness.scheduler.settings = ModelSettings(max_queue_delay_ms=1000)
    assert harness.poll(2) == []
    # Then the request is dispatched before its deadline
    assert harness.wake_at_ms() == 100 - 1.5 * 2 - 2
    assert harness.poll(95) == ["deadline: b"]


def test_withdrawn_urgent_request_does_not_hurry_others() -> None:
    harness = SchedulerHarness(processes=0, max_queue_delay_ms=1000)
    harness.offer("a", expiration=100)
    harness.offer("b")
    assert harness.poll(98) == []  # a is urgent now
    harness.withdraw("a", at=98)
    harness.scheduler.model_processes = 1
    assert harness.poll(99) == []
    assert harness.poll(1000) == ["delay: b"]


def test_urgent_request_expires_also_after_a_queue_delay_was_introduced_again() -> None:
    # Given a request that is urgent, and no process
    harness = SchedulerHarness(processes=0, max_queue_delay_ms=1000)
    harness.offer("a", expiration=100)
    assert harness.poll(98) == []
    # When the delay is removed, and set again
    for delay_ms in (0, 1000):
        harness.scheduler.settings = ModelSettings(max_queue_delay_ms=delay_ms)
        assert harness.poll(99) == []
    # Then it still expires
    assert harness.wake_at_ms() == 100
    assert harness.poll(100) == ["DEADLINE_EXCEEDED: a"]


# --- expiration in the queue -----------------------------------------------------------------------------


def test_waiting_request_is_refused_at_its_deadline() -> None:
    harness = SchedulerHarness(processes=0)
    harness.offer("a", at=10, expiration=30)
    harness.offer("b", at=10, expiration=60)
    harness.offer("c", at=10)
    assert harness.wake_at_ms() == 40
    assert harness.poll(39.999) == []
    (refusal,) = harness.scheduler.poll(40 * MS)
    assert isinstance(refusal, Refusal)
    assert refusal.status == "DEADLINE_EXCEEDED"
    assert refusal.detail == "expired: still waiting 30 ms after its arrival; no worker serves its model now"
    assert harness.wake_at_ms() == 70
    # And it is not dispatched afterwards
    harness.scheduler.model_processes = 1
    assert harness.poll(50) == ["idle: b c"]


def test_expired_requests_are_refused_before_batches_are_formed() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=2)
    harness.offer("a", expiration=10)
    harness.offer("b c")
    harness.scheduler.model_processes = 1
    # When the deadline passed since the last poll
    assert harness.poll(25) == ["DEADLINE_EXCEEDED: a", "full: b c"]


def test_request_that_expired_before_it_was_read_is_refused() -> None:
    for delay in (0, 50):
        harness = SchedulerHarness(max_queue_delay_ms=delay)
        harness.offer("a", at=10, expiration=5)
        assert harness.poll(20) == ["DEADLINE_EXCEEDED: a"]


def test_rest_of_a_cut_run_expires_once() -> None:
    harness = SchedulerHarness(processes=1, max_batch_size=2)
    harness.offer("a b c d e", expiration=10)
    assert harness.poll() == ["full: a b", "full: c d"]
    assert harness.poll(10) == ["DEADLINE_EXCEEDED: e", "expired: a b", "expired: c d"]
    assert harness.poll(11) == []


def test_runs_of_an_entry_are_urgent_at_their_own_times() -> None:
    harness = SchedulerHarness(processes=0, max_queue_delay_ms=1000)
    soon, late = run("a", expiration=50), run("b", expiration=90, lane="x")
    late.entry = soon.entry
    soon.entry.runs.append(late)
    harness.offer_runs([soon, late], at=0)
    assert harness.poll(48) == []
    harness.scheduler.model_processes = 2
    assert harness.poll(48) == ["deadline: a"]
    assert harness.poll(88) == ["expired: a", "deadline: b"]


# --- expiration in flight --------------------------------------------------------------------------------


def test_request_in_flight_expires_once_and_its_batch_continues() -> None:
    harness = SchedulerHarness()
    harness.offer("a", expiration=30)
    harness.offer("b")
    harness.offer("c", expiration=10)
    assert harness.poll() == ["idle: a b c"]
    # The earliest deadline of the batch comes first, then the next.
    assert harness.wake_at_ms() == 10
    (expire,) = harness.scheduler.poll(10 * MS)
    assert isinstance(expire, Expire)
    assert (expire.batch_id, expire.position, expire.run.correlation_ids) == ("1", 2, ["c"])
    assert harness.poll(11) == []
    assert harness.wake_at_ms() == 30
    assert harness.poll(30) == ["expired: a"]
    assert harness.poll(31) == []
    # The batch takes up capacity until it settles.
    harness.offer("d")
    assert harness.poll(32) == []
    harness.settle(1, at=33)
    assert harness.poll(33) == ["idle: d"]


def test_settled_request_does_not_expire() -> None:
    harness = SchedulerHarness()
    harness.offer("a", expiration=30)
    assert harness.poll() == ["idle: a"]
    harness.settle(1, at=5)
    assert harness.poll(30) == []
    assert harness.wake_at_ms() is None


def test_requests_of_an_adopted_batch_expire() -> None:
    harness = SchedulerHarness()
    in_flight = [run("a"), run("b", expiration=20), run("c", expiration=-5)]
    harness.scheduler.in_flight.adopt("found", Dispatch(in_flight, "idle", ""), dispatched_us=-10 * MS)
    assert harness.poll(0) == ["expired: c"]
    assert harness.wake_at_ms() == 20
    assert harness.poll(20) == ["expired: b"]


# --- expiration_action is delay --------------------------------------------------------------------------


def test_delayed_request_is_served_after_all_others_and_never_expires() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=2, expiration_action="delay")
    harness.offer("late", expiration=10, priority=9)
    assert harness.poll(10) == []
    harness.offer("a b", at=11, expiration=10, priority=0)
    harness.scheduler.model_processes = 1
    assert harness.poll(12) == ["full: a b"]
    assert harness.poll(50) == []
    harness.settle(1, at=60)
    assert harness.poll(60) == ["idle: late"]
    assert harness.poll(1000) == []
    assert harness.wake_at_ms() is None


def test_delayed_request_stays_delayed_when_settings_change() -> None:
    harness = SchedulerHarness(processes=0, expiration_action="delay")
    harness.offer("late", expiration=10)
    assert harness.poll(10) == []
    harness.scheduler.settings = ModelSettings(expiration_action="reject", max_queue_delay_ms=5)
    harness.scheduler.model_processes = 1
    assert harness.poll(20) == ["delay: late"]
    assert harness.poll(30) == []


def test_delayed_request_is_not_refused_early_when_settings_change() -> None:
    harness = SchedulerHarness(processes=0, expiration_action="delay", policy="deferred").learn()
    harness.offer("late", expiration=10)
    assert harness.poll(10) == []
    harness.offer("a", at=15, expiration=100)
    harness.scheduler.settings = ModelSettings(expiration_action="reject", policy="deferred")
    harness.scheduler.model_processes = 1
    assert harness.poll(102) == ["efficient: a late"]


# --- memory ----------------------------------------------------------------------------------------------


def test_outdated_timers_do_not_pile_up() -> None:
    harness = SchedulerHarness(max_batch_size=1)
    for number in range(5000):
        harness.offer("a", at=number, expiration=3_600_000)
        assert harness.poll(number) == ["full: a"]
        harness.settle(number + 1, at=number)
    assert len(harness.scheduler._deadlines._timers) <= 1010
    # And a request that waits still expires
    harness.scheduler.model_processes = 0
    harness.offer("b", at=5000, expiration=10)
    assert harness.poll(5010) == ["DEADLINE_EXCEEDED: b"]


def test_timer_of_a_new_batch_is_kept_when_outdated_timers_are_dropped() -> None:
    harness = SchedulerHarness(max_batch_size=1)
    for number in range(1, 601):
        harness.offer("a", at=number, expiration=3_600_000)
        assert harness.poll(number) == ["full: a"]
        timers = [timer for _, _, timer in harness.scheduler._deadlines._timers]
        assert any(isinstance(timer, BatchTimer) and timer.batch_id == str(number) for timer in timers)
        harness.settle(number, at=number)


def test_bodies_of_dispatched_requests_are_not_kept() -> None:
    harness = SchedulerHarness(processes=20, max_batch_size=4)
    body = bytes(100)
    for number in range(10):
        harness.offer("a b", at=number, expiration=3_600_000, body=body)
        assert harness.poll(number) == ["idle: a b"]
    assert len(harness.scheduler._deadlines._timers) == 20
    harness.settle(3, at=10)
    gc.collect()
    assert [found for found in gc.get_referrers(body) if type(found) is list] == []


def test_request_is_watched_after_outdated_timers_were_dropped() -> None:
    harness = SchedulerHarness(max_batch_size=1, processes=1)
    harness.offer("a", expiration=50)
    assert harness.poll() == ["full: a"]
    # Given that the latest timer was dropped, because none of its requests still waits
    harness.scheduler._deadlines._drop_outdated()
    harness.settle(1)
    harness.scheduler.model_processes = 0
    # Then a new request with the same deadline gets a timer
    harness.offer("b", expiration=50)
    assert harness.poll(50) == ["DEADLINE_EXCEEDED: b"]
