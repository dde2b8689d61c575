"""Producers whose requests the model is not expected to execute, and the batches with such requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from carpool.messages.requests import Producer
from carpool.messages.settled import ExecutedOf
from carpool.producer_ratios import PRODUCERS_MAX
from carpool_batcher.core.applied_settings import Shares
from carpool_batcher.core.learned.doubtful_producers import DoubtfulProducers
from carpool_batcher.core.learned.executed_share import BATCHES_MAX
from carpool_batcher.core.policies.deferred import ArrivalRate
from carpool_batcher.core.waiting.fairness import RunPart
from carpool_batcher.core.waiting.lane import Lane
from support.scheduler_harness import MS, SchedulerHarness, settle

FLOOD: Producer = ("", "flood")
NONE_EXECUTED = [ExecutedOf(FLOOD, 10, 0)]
ALL_BUT_ONE_EXECUTED = [ExecutedOf(FLOOD, 10, 9)]
BATCHES_UNTIL_DOUBTFUL = 9  # 1 - 0.75 ** 9 is over 0.9


def producers_after(*batches: list[ExecutedOf]) -> DoubtfulProducers:
    producers = DoubtfulProducers()
    for of_producers in batches:
        producers.observe([FLOOD] if len(producers) else [], of_producers)
    return producers


def test_a_producer_is_doubtful_after_some_batches_in_which_nothing_of_it_was_executed() -> None:
    assert not producers_after(*[NONE_EXECUTED] * (BATCHES_UNTIL_DOUBTFUL - 1)).is_doubtful(FLOOD)
    producers = producers_after(*[NONE_EXECUTED] * BATCHES_UNTIL_DOUBTFUL)
    assert producers.is_doubtful(FLOOD)
    assert not producers.is_doubtful(("", "other"))
    assert not producers.is_doubtful(("tenant", "flood"))


@pytest.mark.parametrize("executed", [[], ALL_BUT_ONE_EXECUTED])
def test_it_is_not_doubtful_any_more_once_its_requests_were_executed(executed: list[ExecutedOf]) -> None:
    producers = producers_after(*[NONE_EXECUTED] * 30)
    producers.observe([FLOOD], executed)
    assert not producers.is_doubtful(FLOOD)


def test_batches_without_its_requests_change_nothing() -> None:
    producers = producers_after(*[NONE_EXECUTED] * 30)
    for _ in range(30):
        producers.observe([], [ExecutedOf(("", "other"), 4, 1)])
    assert producers.is_doubtful(FLOOD)


def test_it_is_forgotten_after_some_batches_that_were_executed() -> None:
    producers = producers_after(*[NONE_EXECUTED] * 30)
    for _ in range(11):
        producers.observe([FLOOD], [])
    assert len(producers) == 0


def test_a_producer_of_which_half_is_executed_is_not_doubtful() -> None:
    assert not producers_after(*[[ExecutedOf(FLOOD, 10, 5)]] * 100).is_doubtful(FLOOD)


def test_names_without_end_use_bounded_memory() -> None:
    producers = DoubtfulProducers()
    for number in range(PRODUCERS_MAX + 50):
        producers.observe([], [ExecutedOf(("", str(number)), 1, 0)])
    assert len(producers) == PRODUCERS_MAX


# --- in the scheduler ------------------------------------------------------------------------------------


def flooded_harness(**settings: Any) -> SchedulerHarness:
    """l(n) = 10 + n ms, and the producer "flood" is doubtful."""
    harness = SchedulerHarness(**settings).learn()
    for number in range(BATCHES_UNTIL_DOUBTFUL):
        harness.offer(f"f{number}", reply_to="flood")
        harness.poll()
        settle(harness.scheduler, str(number + 1), 0, 0, executed=0, of_producers=[ExecutedOf(FLOOD, 1, 0)])
    return harness


def test_no_time_is_planned_for_doubtful_requests() -> None:
    harness = flooded_harness(max_batch_size=100, policy="deferred")
    harness.offer(" ".join(f"f{number}" for number in range(30)), reply_to="flood")
    harness.offer("a b", expiration=13)  # 10 + 2 ms suffice for two requests, and not for 32
    assert [decision.split()[0] for decision in harness.poll()] == ["deadline:"]
    (batch,) = harness.scheduler.in_flight.batches.values()
    assert (batch.size, batch.executable) == (32, 2)
    assert harness.scheduler.capacity.free_at_us(0) == 12 * MS


def test_of_requests_that_cannot_all_be_in_time_doubtful_ones_are_not_refused() -> None:
    harness = flooded_harness(max_batch_size=4, policy="deferred")
    harness.scheduler.model_processes = 0
    for names, reply_to in (
        ("f1", "flood"),
        ("late", "a"),
        ("f2 f3", "flood"),
        ("b c", "a"),
        ("f4", "flood"),
    ):
        harness.offer(names, reply_to=reply_to, expiration=11 if names in ("late", "f1") else 60)
    harness.scheduler.model_processes = 1
    assert harness.poll(1) == ["DEADLINE_EXCEEDED: late", "full: f1 f2 f3 b"]


def test_batch_of_planned_requests_takes_doubtful_ones_between_and_behind_them() -> None:
    harness = flooded_harness(max_batch_size=20, policy="deferred")
    harness.scheduler.model_processes = 0
    harness.offer("a b", expiration=12)
    harness.offer("f1", reply_to="flood")
    harness.offer("c d", expiration=30)
    harness.offer("f2", reply_to="flood")
    harness.scheduler.model_processes = 1
    # Four take 14 ms, which is too long for a and b; those are worth more than what c and d would lose.
    assert harness.poll() == ["deadline: a b f1"]


def test_only_doubtful_requests_are_dispatched_as_others() -> None:
    harness = flooded_harness(max_batch_size=4, policy="deferred")
    harness.offer("f1 f2", reply_to="flood", expiration=30)
    assert harness.poll(30 - 12) == ["deadline: f1 f2"]
    assert harness.scheduler.capacity.free_at_us(18 * MS) == 18 * MS


def test_requests_of_a_producer_that_was_doubtful_are_planned_for_again() -> None:
    harness = flooded_harness(max_batch_size=100, policy="deferred")
    harness.offer("f1 f2", reply_to="flood")
    harness.poll()
    settle(harness.scheduler, str(1 + BATCHES_UNTIL_DOUBTFUL), 12 * MS, 12 * MS, executed=2)
    harness.offer("f3 f4", at=12, reply_to="flood")
    harness.poll(12)
    (batch,) = harness.scheduler.in_flight.batches.values()
    assert batch.executable == 2


def test_what_a_batch_shows_of_its_other_requests_is_kept_apart_from_doubtful_ones() -> None:
    harness = flooded_harness(max_batch_size=100, policy="deferred")
    for number in range(2 * BATCHES_MAX):
        harness.offer(" ".join(f"f{at}" for at in range(1 + number % 30)), reply_to="flood")
        harness.offer("a b", reply_to="a")
        harness.poll()
        batch = str(1 + BATCHES_UNTIL_DOUBTFUL + number)
        told = [ExecutedOf(FLOOD, 1 + number % 30, 0)]
        settle(harness.scheduler, batch, 12 * MS, 0, executed=2, of_producers=told)
    assert harness.scheduler.learned.times_of("") is harness.scheduler.learned.latency  # no share is known


def test_batch_waits_as_if_there_were_no_doubtful_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrivalRate, "gap_us", 0.0)  # the next request arrives at once
    harness = flooded_harness(max_batch_size=100, policy="deferred")
    harness.offer(" ".join(f"f{number}" for number in range(30)), reply_to="flood")
    harness.offer("a b", expiration=50)
    assert harness.wake_at_ms() == 50 - 13  # when three would still be in time


def test_a_batch_that_settled_before_teaches_nothing_again() -> None:
    harness = SchedulerHarness().learn()
    harness.offer("f", reply_to="flood")
    harness.poll()
    for _ in range(BATCHES_UNTIL_DOUBTFUL):
        settle(harness.scheduler, "1", 0, 0, executed=0, of_producers=NONE_EXECUTED)
    harness.offer("g", reply_to="flood")
    harness.poll()
    (batch,) = harness.scheduler.in_flight.batches.values()
    assert batch.executable == 1


def test_plan_does_not_look_at_any_number_of_doubtful_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def in_order(lane: Lane, shares: Shares) -> Iterator[RunPart]:
        nonlocal looked_at
        for one in original(lane, shares):
            looked_at += 1
            yield one

    original = Lane.in_order
    monkeypatch.setattr(Lane, "in_order", in_order)
    harness = flooded_harness(max_batch_size=4, max_queue_size=10_000, policy="deferred", target_latency_ms=1)
    harness.scheduler.model_processes = 0
    for number in range(1000):
        harness.offer(f"g{number}", reply_to="flood")
    harness.offer("a")
    harness.scheduler.model_processes = 1
    looked_at = 0
    assert [one.split(": ")[1] for one in harness.poll(100)] == ["g0 g1 g2 g3"]
    assert 0 < looked_at < 100
