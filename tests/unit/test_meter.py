"""What a batcher counts and reports of itself, and how exact its latency quantiles are."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
from carpool.messages.batches import DispatchReason
from carpool.messages.requests import JSON, Entry, Run
from carpool.messages.results import Refusal
from carpool.messages.settled import Streamed
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.report import Gauges, SteppingReport
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from carpool_batcher.meter import BatcherMetrics, Meter, gauges
from carpool_batcher.recent_latency import WINDOW_US, RecentLatency
from support.scheduler_harness import settle

SECOND_US = 1_000_000


def run(number: int, arrival_us: int = 0) -> Run:
    return Run(Entry("1-1", arrival_us), list(map(str, range(number))), [b""] * number, arrival_us=arrival_us)


# --- quantiles ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 500_000_000), min_size=1, max_size=300))
def test_quantile_is_within_5_percent_of_the_exact_one(durations_us: list[int]) -> None:
    now_us = 1_000 * SECOND_US
    recent = RecentLatency(now_us)
    recent.observe([(now_us - one, 1) for one in durations_us], now_us)
    quantiles = recent.quantiles_us(now_us)
    assert quantiles is not None
    in_order = sorted(durations_us)
    for quantile_us, share in zip(quantiles, (0.5, 0.99), strict=True):
        exact_us = in_order[ceil(share * len(in_order)) - 1]
        assert quantile_us == pytest.approx(exact_us, rel=0.05, abs=51)


def test_arrival_in_the_future_and_latency_of_hours_are_clamped() -> None:
    recent = RecentLatency(0)
    recent.observe([(5_000, 1), (-(10**11), 1)], 4_000)
    assert recent.quantiles_us(4_000) == pytest.approx((50, 600 * SECOND_US), rel=0.05)


def test_slow_requests_are_forgotten_after_10_to_20_seconds() -> None:
    """Given slow requests first and fast ones later, expect the slow p99 until 20 s."""
    recent = RecentLatency(0)
    recent.observe([(0, 20), (0, 30)], SECOND_US)
    seen = []
    for second in range(2, 25):
        now_us = second * SECOND_US
        recent.observe([(now_us - 1000, 50)], now_us)
        quantiles_us = recent.quantiles_us(now_us)
        assert quantiles_us is not None
        seen.append((second, quantiles_us[1] > SECOND_US / 2))
    remembered = [second for second, slow in seen if slow]
    assert remembered == list(range(2, 20))


def test_idle_model_has_no_quantiles() -> None:
    recent = RecentLatency(0)
    assert recent.quantiles_us(0) is None
    recent.observe([(0, 1)], 1_000)
    assert recent.quantiles_us(2 * WINDOW_US - 1) is not None
    assert recent.quantiles_us(3 * WINDOW_US) is None
    recent.observe([(0, 1)], 5 * WINDOW_US)
    assert recent.quantiles_us(7 * WINDOW_US) is None, "after two idle windows both histograms have expired"


# --- counting ----------------------------------------------------------------------------------------------


def dispatch(meter: Meter, scheduler: Scheduler, *batches: tuple[DispatchReason, int]) -> None:
    """Batches of these reasons and sizes are dispatched."""
    meter.dispatched([Dispatch([run(size)], reason, "") for reason, size in batches], scheduler, 0)


def test_report_counts_from_the_takeover() -> None:
    meter = Meter(BatcherMetrics(), "square")
    scheduler = Scheduler(ModelSettings(max_batch_size=10), model_processes=2)
    dispatch(meter, scheduler, ("full", 10))
    meter.missed({"waiting": 9})
    meter.activated(7 * SECOND_US)

    dispatch(meter, scheduler, ("full", 10), ("idle", 5))
    dispatch(meter, scheduler, ("full", 10))
    for reason in ("queue_size", "queue_bytes", "queue_size"):
        meter.refused([Refusal(Entry("1-1", 0), ["c"], None, JSON, RESOURCE_EXHAUSTED, reason, "")])
    meter.answered_in_flight(DEADLINE_EXCEEDED, 0)
    meter.missed({"waiting": 1})
    before = meter.report("me", scheduler, 8 * SECOND_US)
    meter.answered_in_flight(DEADLINE_EXCEEDED, 2)
    meter.missed({"computed_long": 2, "waiting": 3})
    meter.settled(InFlightBatch(0, 2, "", {}, [(8 * SECOND_US, 2)]), 9 * SECOND_US)
    report = meter.report("me", scheduler, 9 * SECOND_US)

    assert (report.batcher, report.began_us, report.at_us) == ("me", 7 * SECOND_US, 9 * SECOND_US)
    assert report.batches == {"full": 2, "idle": 1}
    assert (report.requests, report.fill_percent) == (25, 250)
    assert before.refused == {"RESOURCE_EXHAUSTED/queue_size": 2, "RESOURCE_EXHAUSTED/queue_bytes": 1}
    assert report.refused == {**before.refused, f"{DEADLINE_EXCEEDED}/in_flight": 2}
    assert (before.missed, report.missed) == ({"waiting": 1}, {"waiting": 4, "computed_long": 2})
    assert (before.quantiles_us, report.learned) == (None, ())
    assert report.quantiles_us == pytest.approx((SECOND_US, SECOND_US), rel=0.05)


def test_stepping_model_has_slots_and_chunks_and_no_batch_sizes() -> None:
    """Given requests of a stepping model, each a batch by itself, expect them in no histogram of batches."""
    metrics = BatcherMetrics()
    meter = Meter(metrics, "writer")
    scheduler = Scheduler(ModelSettings(max_batch_size=8), model_processes=2, kind=ModelKind.STEPPING)
    assert meter.report("me", scheduler, 0).stepping == SteppingReport(16, 0, None, None)
    dispatch(meter, scheduler, ("full", 1), ("full", 1))
    for gap_us in (20_000, 20_000, 20_000):
        meter.stream_ended(Streamed(11, 300_000, 10 * gap_us), SECOND_US)
    meter.stream_ended(Streamed(1, 300_000, 0), SECOND_US)
    meter.stream_ended(Streamed(4, 300_000), SECOND_US)  # withdrawn
    report = meter.report("me", scheduler, SECOND_US)
    assert (report.requests, report.batches, report.fill_percent) == (2, {"full": 2}, 0)
    assert (sum(metrics.size.of("writer").snapshot()[0]), sum(metrics.fill.of("writer").snapshot()[0])) == (
        0,
        0,
    )
    stepping = report.stepping
    assert stepping is not None
    assert (stepping.slots, stepping.chunks) == (16, 38)
    assert stepping.first_us == pytest.approx((300_000, 300_000), rel=0.05)
    assert stepping.gap_us == pytest.approx((20_000, 20_000), rel=0.05)
    later = meter.report("me", scheduler, SECOND_US + 2 * WINDOW_US).stepping
    assert later == SteppingReport(16, 38, None, None), "what is recent is forgotten, what is counted is not"
    meter.activated(60 * SECOND_US)
    assert meter.report("me", scheduler, 60 * SECOND_US).stepping == SteppingReport(16, 0, None, None)
    assert meter.report("me", Scheduler(ModelSettings(), 1), 60 * SECOND_US).stepping is None


def test_chunks_of_streams_in_flight_count_once() -> None:
    """Given a stream that a previous batcher saw, and another one, expect what was written since, also while
    one has ended and is not known to have settled, and when its batch is lost."""
    meter = Meter(BatcherMetrics(), "writer")
    scheduler = Scheduler(ModelSettings(max_batch_size=8), model_processes=2, kind=ModelKind.STEPPING)

    def chunks(**written: int) -> int:
        meter.chunks_written(written)
        stepping = meter.report("me", scheduler, SECOND_US).stepping
        assert stepping is not None
        return stepping.chunks

    meter.activated(0)
    assert chunks(old=100) == 0
    assert chunks(old=103, other=5) == 8
    assert chunks(other=6) == 8, "the first one was committed"
    meter.stream_ended(Streamed(110, 300_000), SECOND_US)
    assert chunks(other=6) == 16
    assert chunks() == 16, "the other one is lost"
    meter.activated(SECOND_US)
    assert chunks() == 0
    assert chunks(third=2) == 2


def test_report_holds_gauges_and_the_learned_latency() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=10), model_processes=3)
    assert scheduler.offer(run(2, arrival_us=SECOND_US), SECOND_US) == []
    for batch_id, size in (("1-1", 4), ("1-2", 8)):
        scheduler.in_flight.adopt(batch_id, Dispatch([run(size)], "idle", ""), 0)
    scheduler.queue.withheld = 7
    assert gauges(scheduler, 3 * SECOND_US) == Gauges(2, scheduler.queue.bytes, 2.0, 2, 12, 3, 7)

    assert scheduler.in_flight.batches["1-1"].arrivals == [(0, 4)]
    settle(scheduler, "1-1", 8_000, 9_000)
    meter = Meter(BatcherMetrics(), "square")
    assert meter.report("me", scheduler, 0).learned == ((4, 8_000),)
    scheduler.in_flight.adopt("1-3", Dispatch([run(8)], "idle", ""), 0)
    settle(scheduler, "1-3", 12_000, 13_000)
    assert meter.report("me", scheduler, 0).learned == ((4, 8_000), (8, 12_000))


def test_wanted_workers_are_exported_by_the_active_batcher_alone() -> None:
    metrics = BatcherMetrics()
    scheduler, meter = Scheduler(ModelSettings(min_workers=3)), Meter(metrics, "square")

    def exported() -> float | None:
        value: float | None = metrics.registry.get_sample_value("carpool_wanted_workers", {"model": "square"})
        return value

    assert exported() is None
    scheduler.observe_demand(SECOND_US, 1, 1, 0)
    meter.update_gauges(scheduler, SECOND_US)
    assert exported() == 3
    assert meter.report("b", scheduler, SECOND_US).wanted == (3, 3, "minimum")
    meter.deactivated()
    assert exported() is None
    meter.update_gauges(scheduler, SECOND_US)
    assert exported() == 3, "it took over again"
