"""How many requests a batch gets, where their model tells what they cost."""

from __future__ import annotations

from carpool.messages.requests import Entry, Run
from carpool.model_settings import ModelSettings
from carpool_batcher.core.learned.request_costs import LANES_MAX, RequestCosts
from carpool_batcher.core.scheduler import Dispatch, Scheduler


def dispatched(scheduler: Scheduler, requests: int, lane: str = "") -> list[int]:
    """The sizes of the batches in which this number of requests is dispatched, which arrive together."""
    for number in range(requests):
        entry = Entry(f"{number + 1}-0", 0)
        run = Run(entry, [f"r{number}"], [b"1"], lane=lane)
        entry.runs.append(run)
        assert scheduler.offer(run, 0) == []
    return [decision.size for decision in scheduler.poll(0) if type(decision) is Dispatch]


def scheduler_of(max_batch_cost: int | None) -> Scheduler:
    settings = ModelSettings(max_batch_size=64, max_batch_cost=max_batch_cost, max_queue_delay_ms=1000)
    return Scheduler(settings, model_processes=8)


def test_batches_have_as_many_requests_as_usually_cost_the_limit() -> None:
    scheduler = scheduler_of(100)
    scheduler.observe_cost("", 64, 640)
    assert dispatched(scheduler, 25) == [10, 10]
    assert scheduler.queue.count == 5  # they wait for others, as those of a batch that is not full


def test_what_nothing_limits_and_nobody_tells_is_not_limited() -> None:
    scheduler = scheduler_of(None)
    scheduler.observe_cost("", 64, 64_000)
    assert dispatched(scheduler, 64) == [64]
    assert dispatched(scheduler_of(100), 64) == [64]


def test_model_that_tells_costs_no_longer_is_not_limited_after_a_while() -> None:
    scheduler = scheduler_of(100)
    scheduler.observe_cost("", 64, 640)
    for _ in range(40):
        scheduler.observe_cost("", 64, 0)
    assert dispatched(scheduler, 64) == [64]


def test_limit_that_is_changed_holds_at_once() -> None:
    scheduler = scheduler_of(100)
    scheduler.observe_cost("", 10, 100)
    scheduler.settings = ModelSettings(max_batch_size=64, max_batch_cost=200, max_queue_delay_ms=1000)
    assert dispatched(scheduler, 20) == [20]


def test_request_that_costs_more_than_the_limit_is_dispatched_alone() -> None:
    scheduler = scheduler_of(100)
    scheduler.observe_cost("", 1, 1000)
    assert dispatched(scheduler, 3) == [1, 1, 1]


def test_the_lane_whose_requests_cost_least_decides() -> None:
    costs = RequestCosts()
    assert (bool(costs), costs.usual_size(100)) == (False, None)
    costs.observe("long", 1, 50)
    costs.observe("short", 4, 20)
    assert (bool(costs), costs.usual_size(100), costs.usual_size(None)) == (True, 20, None)


def test_lanes_that_were_observed_long_ago_are_forgotten() -> None:
    costs = RequestCosts()
    costs.observe("short", 1, 1)
    for number in range(LANES_MAX):
        costs.observe(f"long {number}", 1, 10)
    assert costs.usual_size(100) == 10


def test_mean_follows_what_is_observed() -> None:
    costs = RequestCosts()
    costs.observe("", 1, 10)
    costs.observe("", 1, 90)
    assert costs.usual_size(100) == 5  # the mean is 20
    for _ in range(60):
        costs.observe("", 1, 90)
    assert costs.usual_size(100) == 1
