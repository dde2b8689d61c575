"""The detail of a model: which lane is slow, which tenant floods, what failed; bounded, whoever sends."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest

from carpool.messages.requests import Entry
from carpool.messages.settled import Failures
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.detail import DETAIL_BYTES_MAX, ModelDetail
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.detail import (
    INTERVAL_RATIO_MIN,
    INTERVAL_US,
    LANES_SHOWN,
    RUNS_EXACT_MAX,
    TENANTS_LOOKED_AT_MAX,
    TENANTS_OF_SLICE_MAX,
    TENANTS_SHOWN,
    WINDOW_US,
    Arrivals,
    Detail,
    quantiles,
)
from carpool_batcher.recent import BATCHES_MAX, Recent
from support.scheduler_harness import MS, SchedulerHarness, run, settled

SECOND: Final = 1_000_000
NOW: Final = 1000 * SECOND


def made(scheduler: Scheduler, recent: Recent | None = None, detail: Detail | None = None) -> ModelDetail:
    """The detail at NOW, as its readers have it."""
    detail = detail or Detail(NOW)
    text = detail.make("b", scheduler, recent or Recent(), None, lambda: NOW).encode()
    assert len(text) <= DETAIL_BYTES_MAX
    decoded = ModelDetail.decode(text.encode())
    assert decoded is not None
    return decoded


def batch_of(
    lane: str, size: int, arrivals: list[tuple[int, int]], dispatched_us: int = NOW - SECOND, **fields: Any
) -> InFlightBatch:
    return InFlightBatch(dispatched_us, size, lane, {}, arrivals, reason="full", **fields)


def test_what_waits_by_lane_tenant_and_priority() -> None:
    harness = SchedulerHarness(processes=0)
    harness.offer("a b c", at=999_000, lane="wide", tenant="flood")
    harness.offer("d", at=998_000, lane="wide", tenant="quiet", priority=8)
    harness.offer("e f", at=999_500, lane="narrow", tenant="flood")
    harness.offer("g", at=999_500)
    found = made(harness.scheduler)
    assert [(lane.lane, lane.waiting, lane.oldest_s) for lane in found.lanes] == [
        ("wide", 4, 2.0), ("narrow", 2, 0.5), ("", 1, 0.5),
    ]  # fmt: skip
    assert [(one.tenant, one.waiting, one.oldest_s) for one in found.tenants] == [
        ("flood", 5, 1.0), ("", 1, 0.5), ("quiet", 1, 2.0),
    ]  # fmt: skip
    assert [(one.priority, one.waiting, one.oldest_s) for one in found.priorities] == [
        (8, 1, 2.0),
        (4, 6, 1.0),
    ]
    assert (found.lanes_number, found.tenants_number, found.is_partial) == (3, 3, False)


def test_delayed_requests_count_by_priority_and_have_no_age() -> None:
    harness = SchedulerHarness(processes=0)
    delayed = run("later", 2_000_000, not_before_ms=5)
    harness.offer_runs([delayed], 1000)
    found = made(harness.scheduler)
    assert found.delayed == 1
    assert [(one.priority, one.waiting, one.oldest_s) for one in found.priorities] == [(4, 1, None)]
    assert found.lanes == ()


def test_a_slow_lane_is_seen_beside_busier_ones() -> None:
    """Forty lanes are busier than the slow one, which is shown all the same."""
    recent, harness = Recent(), SchedulerHarness(processes=0)
    for number in range(40):
        harness.offer("x y z", at=999_000, lane=f"lane-{number}")
        arrivals = [(NOW - 2 * SECOND, 2)]
        recent.settled(settled(str(number), 2, 5 * MS, NOW - SECOND), batch_of(f"lane-{number}", 2, arrivals))
    for number in range(100, 104):
        arrivals = [(NOW - 31 * SECOND, 1), (NOW - 21 * SECOND, 2), (NOW - 11 * SECOND, 1)]
        event = settled(str(number), 4, 900 * MS, NOW - SECOND)
        recent.settled(event, batch_of("slow", 4, arrivals, NOW - 10 * SECOND))
    found = made(harness.scheduler, recent)
    assert len(found.lanes) == LANES_SHOWN
    (slow,) = [lane for lane in found.lanes if lane.lane == "slow"]
    assert (slow.batches, slow.requests, slow.waiting, slow.oldest_s) == (4, 16, 0, None)
    assert slow.latency_us == (20 * SECOND, 30 * SECOND)
    assert slow.execution_us == (900 * MS, 900 * MS)
    (other,) = [lane for lane in found.lanes if lane.lane == "lane-0"]
    assert other.latency_us == (SECOND, SECOND)


def test_batches_with_their_reasons_and_failures() -> None:
    recent = Recent()
    batch = batch_of("wide", 4, [(NOW - 3 * SECOND, 4)], NOW - 2 * SECOND, version="2")
    failures = Failures({"INTERNAL": 3}, "KeyError at model.py:14")
    recent.settled(settled("7-0", 4, 5 * MS, NOW - SECOND, failures=failures, waited_us=9), batch)
    recent.settled(settled("8-0", 16, 5 * MS, NOW), batch_of("", 16, [(NOW - 2 * SECOND, 16)]))
    latest, first = made(SchedulerHarness(max_batch_size=16).scheduler, recent).batches
    assert (latest.batch, latest.fill, latest.statuses) == ("8-0", 1.0, {})
    assert (first.batch, first.reason, first.size, first.fill) == ("7-0", "full", 4, 0.25)
    assert (first.lane, first.version, first.worker) == ("wide", "2", "w/0")
    assert (first.wait_us, first.waited_us, first.execution_us) == (SECOND, 9, 5 * MS)
    assert (first.statuses, first.error) == ({"INTERNAL": 3}, "KeyError at model.py:14")


def test_old_batches_are_in_no_window() -> None:
    recent = Recent()
    at_us = NOW - WINDOW_US - 1
    recent.settled(settled("1-0", 1, 5, at_us), batch_of("", 1, [(at_us - 5, 1)]))
    assert made(SchedulerHarness().scheduler, recent).batches == ()


def test_figures_say_how_much_time_they_cover() -> None:
    """As many batches as are kept settled in ten seconds: the figures are of these."""
    recent, scheduler = Recent(), SchedulerHarness().scheduler
    assert made(scheduler, recent).over_us == WINDOW_US
    for number in range(BATCHES_MAX + 5):
        at_us = NOW - 10 * SECOND + number * 10
        recent.settled(settled(str(number), 1, 5, at_us), batch_of("", 1, [(at_us - 5, 1)]))
    assert made(scheduler, recent).over_us == 10 * SECOND - 50
    recent.watch(is_watched=True)
    assert made(scheduler, recent).over_us == 10 * SECOND - 50
    assert made(scheduler, Recent(NOW - 3 * SECOND)).over_us == 3 * SECOND


def test_more_batches_are_kept_while_somebody_looks() -> None:
    recent = Recent()

    def settle(number: int) -> None:
        for at in range(number):
            recent.settled(settled(str(at), 1, 5, NOW), batch_of("", 1, [(NOW - 5, 1)]))

    settle(BATCHES_MAX + 10)
    assert len(recent.batches) == BATCHES_MAX
    recent.watch(is_watched=True)
    settle(100)
    assert len(recent.batches) == BATCHES_MAX + 100
    recent.watch(is_watched=False)
    assert len(recent.batches) == BATCHES_MAX


def test_learned_curve_has_its_doubt() -> None:
    found = made(SchedulerHarness().learn(intercept=10, slope=1).scheduler).learned
    assert [(point.size, point.time_us) for point in found][::-1][0] == (11, 21 * MS)
    assert all(point.at_most_us >= point.time_us for point in found)


def test_processes_of_a_bound_model() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=3), kind=ModelKind.BOUND)
    scheduler.set_processes(["w/0", "w/1"], (), {}, 0)
    scheduler.processes.begin_batch("w/1")
    assert [tuple(one) for one in made(scheduler).processes] == [("w/0", 0, 3, False), ("w/1", 0, 3, True)]


# --- arrivals ----------------------------------------------------------------------------------------------


def entry(tenant: str, number: int) -> Entry:
    return run("x " * number, tenant=tenant).entry


def test_the_tenant_that_floods_has_the_largest_share() -> None:
    detail = Detail(NOW - 5 * SECOND)
    for at in range(9):
        detail.arrived([entry("flood", 100), entry(f"t{at}", 1)], NOW - 4 * SECOND)
    found = made(SchedulerHarness(processes=0).scheduler, detail=detail)
    assert found.tenants[0].tenant == "flood"
    assert found.tenants[0].arrived == 900
    assert found.tenants[0].share == pytest.approx(900 / 909)
    assert (found.arrived, found.arrivals_over_us) == (909, 5 * SECOND)


def test_arrivals_are_forgotten_after_a_minute() -> None:
    arrivals = Arrivals(0)
    for at_s in range(0, 200, 5):
        arrivals.add([entry(f"t{at_s}", 1)], at_s * SECOND)
    totals, number, over_us = arrivals.counted(200 * SECOND)
    assert over_us == WINDOW_US
    assert number == sum(totals.values()) == 12  # those of six slices of ten seconds
    assert set(totals) == {f"t{at_s}" for at_s in range(140, 200, 5)}
    assert arrivals.counted(1000 * SECOND)[1] == 0


def test_tenants_beyond_the_limit_count_together() -> None:
    arrivals = Arrivals(0)
    arrivals.add([entry(f"t{at}", 1) for at in range(2 * TENANTS_OF_SLICE_MAX)], SECOND)
    totals, number, _ = arrivals.counted(SECOND)
    assert (len(totals), number) == (TENANTS_OF_SLICE_MAX, 2 * TENANTS_OF_SLICE_MAX)


# --- hostile producers -------------------------------------------------------------------------------------


def test_a_lane_and_a_tenant_for_each_request() -> None:
    """Each request has a lane and a tenant of its own, with the longest names that are possible, full of
    control characters. The detail is bounded, and takes no longer than for some thousands."""
    harness, number = SchedulerHarness(processes=0, max_queue_size=200_000), 20_000
    for at in range(number):
        lane, tenant = f"{at:05}".ljust(128, "\x1b"), f"{at:05}".ljust(128, "t")
        harness.scheduler.offer(run(f"{at:0128}", 999_000, f"{at + 1}-0", lane=lane, tenant=tenant), NOW)
    began_s = time.process_time()
    found = made(harness.scheduler)
    took_s = time.process_time() - began_s
    assert found.is_partial
    assert found.lanes_number == number
    assert 5 <= len(found.lanes) <= LANES_SHOWN
    assert 5 <= len(found.tenants) <= TENANTS_SHOWN
    assert found.tenants_number <= TENANTS_LOOKED_AT_MAX
    assert [(one.priority, one.waiting) for one in found.priorities] == [(4, number)]
    assert took_s < 1


def test_many_requests_of_a_tenant_are_estimated() -> None:
    """Ten thousand entries of one tenant are not counted one by one; those of another one are."""
    harness = SchedulerHarness(processes=0, max_queue_size=200_000)
    for at in range(10_000):
        harness.scheduler.offer(run(f"{at}a {at}b {at}c", 999_000, f"{at + 1}-0", tenant="flood"), NOW)
    for at in range(RUNS_EXACT_MAX):
        harness.scheduler.offer(run(f"{at}d", 999_000, f"{at + 20_000}-0", tenant="quiet"), NOW)
    found = made(harness.scheduler)
    assert [(one.tenant, one.waiting) for one in found.tenants] == [
        ("flood", 30_000),
        ("quiet", RUNS_EXACT_MAX),
    ]
    assert found.is_partial


def test_the_next_detail_waits_for_a_multiple_of_the_time_that_this_one_took() -> None:
    times_us = iter([NOW, NOW + 200 * MS])
    detail = Detail(NOW)
    detail.make("b", SchedulerHarness().scheduler, Recent(), None, lambda: next(times_us))
    assert detail.due_us == NOW + 200 * MS + INTERVAL_RATIO_MIN * 200 * MS
    detail.make("b", SchedulerHarness().scheduler, Recent(), None, lambda: NOW)
    assert detail.due_us == NOW + INTERVAL_US


def test_quantiles_count_weights() -> None:
    assert quantiles([]) is None
    assert quantiles([(5, 1)]) == (5, 5)
    assert quantiles([(100, 1), (5, 99), (7, 100)]) == (7, 7)
    assert quantiles([(100, 3), (5, 99), (7, 98)]) == (7, 100)
