"""Requests that their producers put off: when they take part, what they count against, and how they leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import UNANSWERED, Refusal
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
    harness = SchedulerHarness(max_queue_size=4)
    assert harness.offer_runs([delayed("a b", 50)], at=0) == []
    assert [one.correlation_ids for one in harness.offer("c d e")] == [["e"]]
    assert harness.scheduler.queue.count == 4
    assert harness.poll(0) == ["idle: c d"]
    harness.settle(1)
    assert harness.poll(50) == ["idle: a b"]
    assert (harness.scheduler.queue.count, harness.scheduler.queue.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "priority"),
    [
        ({"max_queue_size": 8}, 4),
        ({"max_queue_bytes": 8}, 4),
        ({"priority_policies": {9: {"max_queue_size": 8}}}, 9),
        ({"max_queue_size": 40, "max_delayed_share": 0.1}, 4),
    ],
)
def test_delayed_requests_have_a_share_of_each_limit(settings: Any, priority: int) -> None:
    """So others always have space, whatever the producers of delayed ones do."""
    harness = SchedulerHarness(processes=0, **settings)
    one = delayed("a b c d e", 3_600_000, priority=priority)
    (refused,) = harness.offer_runs([one], at=0)
    assert (refused.status, refused.reason) == ("RESOURCE_EXHAUSTED", "delayed")
    assert refused.detail.startswith("not_before: ") and "max_delayed_share" in refused.detail
    assert "4 of 4 bytes wait" in refused.detail
    assert (refused.correlation_ids, one.correlation_ids) == (["e"], ["a", "b", "c", "d"])
    assert harness.offer("v w x y", priority=priority) == []
    harness.withdraw("b")
    assert harness.offer_runs([delayed("f", 3_600_000, priority=priority)], at=0) == []


def test_share_of_a_short_queue_is_one_and_of_0_none() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=1)
    assert harness.offer_runs([delayed("a", 50)], at=0) == []
    harness = SchedulerHarness(processes=0, max_delayed_share=0)
    (refused,) = harness.offer_runs([delayed("a", 50)], at=0)
    assert refused.reason == "delayed"


def test_requests_whose_time_has_come_are_not_delayed_any_more() -> None:
    """Also when the next batcher reads them: those that were accepted are not refused."""
    harness = SchedulerHarness(processes=0, max_queue_size=4)
    for names in ("ab", "cd"):
        for name in names:
            assert harness.offer_runs([delayed(name, 50)], at=60) == []
    harness = SchedulerHarness(processes=0, max_queue_size=4)
    assert harness.offer_runs([delayed("a b", 50)], at=0) == []
    harness.poll(50)
    assert harness.offer_runs([delayed("c d", 90)], at=50) == []


def test_copy_of_a_delayed_request_waits_no_longer_than_the_first() -> None:
    harness = SchedulerHarness(max_queue_size=4)
    assert harness.offer_runs([delayed("a", 50)], at=0) == []
    assert harness.offer_runs([delayed("a", 60)], at=10) == []
    (refused,) = harness.offer_runs([delayed("a", 70)], at=20)
    assert refused.status == UNANSWERED
    (decision,) = harness.scheduler.poll(50_000)
    assert isinstance(decision, Dispatch)
    remaining = harness.scheduler.carry_out([decision], 50_000)
    remaining.launched("1", decision)
    (copy,) = remaining.finish()
    assert copy.status == UNANSWERED and harness.scheduler.queue.count == 0


def test_request_that_expires_before_its_time_is_served_behind_all_others() -> None:
    """Of a producer that writes an `arrival` which is long ago."""
    harness = SchedulerHarness(processes=0, expiration_action="delay")
    harness.offer_runs([delayed("a", 50, deadline=10)], at=0)
    harness.offer("b", at=0, expiration=20)
    assert harness.poll(30) == []
    harness.offer("c", at=40)
    assert harness.poll(50) == []
    harness.scheduler.model_processes = 1
    assert harness.poll(51) == ["idle: c b a"]


def test_delayed_request_can_be_withdrawn_or_removed() -> None:
    harness = SchedulerHarness()
    one, other = delayed("a b c", 50), delayed("d", 60)
    harness.offer_runs([one, other], at=0)
    (refused,) = harness.withdraw("b")
    assert (refused.status, refused.correlation_ids) == ("CANCELLED", ["b"])
    assert harness.scheduler.queue.count == 3
    harness.scheduler.forget([other])
    assert harness.scheduler.queue.count == 2
    assert harness.poll(50) == ["idle: a c"]
    assert harness.poll(60) == []
    assert harness.scheduler.queue.count == 0


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
    assert len(harness.scheduler.queue.delayed._heap) < 100
    assert harness.poll(50) == []


class Requests:
    """Requests of a scheduler, each of which leaves it once, and not before it may. `due`: those that wait,
    by the millisecond from which on they may be dispatched."""

    def __init__(self, queue_delay_ms: int) -> None:
        self.harness = SchedulerHarness(processes=2, max_batch_size=4, max_queue_delay_ms=queue_delay_ms)
        self.due: dict[str, int] = {}
        self.now = 0
        self.number = 0

    def offer(self, count: int, delay_ms: int, lane: str) -> None:
        names = [f"r{self.number + at}" for at in range(count)]
        self.number += count
        one = run(" ".join(names), self.now + delay_ms, f"{self.number}-0", lane=lane)
        one.not_before_ms = delay_ms
        self.due |= dict.fromkeys(names, self.now + delay_ms)
        assert self.harness.offer_runs([one], at=self.now) == []

    def withdraw(self, number: int) -> None:
        self._withdrawn(self.harness.withdraw(f"r{number}", at=self.now))

    def _withdrawn(self, refusals: Iterable[Refusal]) -> None:
        for name in [name for refused in refusals for name in refused.correlation_ids]:
            del self.due[name]

    def settle(self) -> None:
        for batch in list(self.harness.scheduler.in_flight.batches):
            self.harness.settle(int(batch), at=self.now)

    def time_passes(self, passes_ms: int) -> None:
        self.now += passes_ms

    def poll(self) -> None:
        scheduler = self.harness.scheduler
        self._withdrawn(scheduler.carry_out_withdrawals(self.now * MS).refusals)
        for name in [name for line in self.harness.poll(self.now) for name in line.split(" ")[1:]]:
            assert self.due.pop(name) <= self.now
        assert scheduler.queue.count == scheduler.queue.bytes == len(self.due)
        assert scheduler.queue.undelayed == sum(at <= self.now for at in self.due.values())


steps = st.one_of(
    st.tuples(st.just(Requests.offer), st.integers(1, 3), st.sampled_from((0, 1, 20)), st.sampled_from("xy")),
    st.tuples(st.just(Requests.withdraw), st.integers(0, 8)),
    st.tuples(st.just(Requests.settle)),
    st.tuples(st.just(Requests.time_passes), st.sampled_from((0, 1, 10, 30))),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=40), st.sampled_from((0, 5)))
def test_each_request_leaves_once_and_is_never_dispatched_early(
    taken: list[Any], queue_delay_ms: int
) -> None:
    requests = Requests(queue_delay_ms)
    for step, *values in taken:
        step(requests, *values)
        requests.poll()
    for _ in range(1 + 2 * requests.number):  # until all are served
        requests.settle()
        requests.now = max(requests.now, int(requests.harness.wake_at_ms() or 0) + 1)
        requests.poll()
    assert requests.due == {}
