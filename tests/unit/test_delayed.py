"""Requests that their producers put off: when they take part, what they count against, and how they leave."""

from __future__ import annotations

from typing import Any

from carpool.messages import Run
from support.scheduler_harness import MS, SchedulerHarness, run


def delayed(names: str, until: int, deadline: float | None = None, **fields: Any) -> Run:
    """A run that arrives at 0, and is put off until this millisecond."""
    one = run(names, until, f"{names[0]}-0", **fields)
    one.not_before_ms = until
    one.deadline_us = None if deadline is None else int(deadline * MS)
    return one


def test_delayed_request_is_dispatched_when_its_time_has_come() -> None:
    harness = SchedulerHarness()
    harness.offer_runs([delayed("a", 50)], at=0)
    assert harness.poll(0) == []
    assert harness.wake_at_ms() == 50
    assert harness.poll(49.9) == []
    assert harness.poll(50) == ["idle: a"]
    assert harness.wake_at_ms() is None


def test_others_do_not_wait_for_a_delayed_request_even_in_its_lane_and_entry() -> None:
    harness = SchedulerHarness(processes=2, max_batch_size=2)
    late, early = delayed("a", 50), run("b", 0, "a-0")
    early.entry = late.entry
    late.entry.runs = [late, early]
    harness.offer_runs([late, early], at=0)
    assert harness.poll(0) == ["idle: b"]
    harness.offer("c", at=10)
    assert harness.poll(10) == ["idle: c"]
    harness.settle(1, at=20)
    assert harness.poll(50) == ["idle: a"]


def test_delayed_request_stands_behind_those_that_arrived_before_its_time() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=2)
    harness.offer_runs([delayed("a", 50)], at=0)
    for name, at in (("b", 10), ("c", 60)):
        harness.offer(name, at=at)
    assert harness.poll(60) == []
    harness.scheduler.model_processes = 2
    assert harness.poll(60) == ["full: b a", "idle: c"]


def test_delayed_requests_count_against_the_limits() -> None:
    harness = SchedulerHarness(max_queue_size=2)
    assert harness.offer_runs([delayed("a b", 50)], at=0) == []
    (refused,) = harness.offer("c")
    assert refused.status == "RESOURCE_EXHAUSTED"
    assert (harness.scheduler.waiting, harness.scheduler.waiting_bytes > 0) == (2, True)
    assert harness.poll(50) == ["idle: a b"]
    assert (harness.scheduler.waiting, harness.scheduler.waiting_bytes) == (0, 0)


def test_delayed_request_can_be_withdrawn_or_removed() -> None:
    harness = SchedulerHarness()
    one, other = delayed("a b c", 50), delayed("d", 60)
    harness.offer_runs([one, other], at=0)
    (refused,) = harness.withdraw("b")
    assert (refused.status, refused.correlation_ids) == ("CANCELLED", ["b"])
    assert harness.scheduler.waiting == 3
    harness.scheduler.forget([other])
    assert harness.scheduler.waiting == 2
    assert harness.poll(50) == ["idle: a c"]
    assert harness.poll(60) == []
    assert harness.scheduler.waiting == 0


def test_delayed_request_expires_after_its_time() -> None:
    harness = SchedulerHarness(processes=0)
    harness.offer_runs([delayed("a", 50, deadline=80)], at=0)
    assert harness.poll(50) == []
    assert harness.wake_at_ms() == 80
    assert harness.poll(80) == ["DEADLINE_EXCEEDED: a"]


def test_urgent_request_is_dispatched_as_soon_as_it_may_be() -> None:
    """With a queue delay, it is dispatched some time before its deadline, but not before its own time."""
    harness = SchedulerHarness(max_queue_delay_ms=1000)
    harness.offer_runs([delayed("a", 50, deadline=51)], at=0)
    assert harness.poll(49) == []
    assert harness.poll(50) == ["deadline: a"]


def test_time_that_is_past_is_no_delay() -> None:
    harness = SchedulerHarness()
    harness.offer_runs([delayed("a", 50)], at=70)  # of an entry that waited when this batcher took over
    assert harness.poll(70) == ["idle: a"]


def test_many_that_are_withdrawn_are_not_kept() -> None:
    harness = SchedulerHarness(max_queue_size=10_000)
    for number in range(1000):
        harness.offer_runs([delayed(f"r{number}", 50)], at=0)
        harness.withdraw(f"r{number}")
    assert len(harness.scheduler._queue.delayed._heap) < 100
    assert harness.poll(50) == []
