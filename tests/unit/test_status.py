"""What a batcher says of itself: what is counted, how exact quantiles are, and what is not understood."""

from __future__ import annotations

import json
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
from carpool.messages import JSON, DispatchReason, Entry, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool.wire.report import BatcherReport, Gauges
from carpool_batcher.core.capacity import InFlightBatch
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from carpool_batcher.meter import BatcherMetrics, Meter
from carpool_batcher.tally import RECENT_US, Recent, gauges

SECOND_US = 1_000_000


def requests(number: int, arrival_us: int = 0) -> list[Request]:
    entry = Entry("1-1", arrival_us)
    return [Request(entry, str(at), b"", arrival_us=arrival_us) for at in range(number)]


# --- quantiles ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 500_000_000), min_size=1, max_size=300))
def test_a_quantile_is_within_5_percent_of_the_exact_one(durations_us: list[int]) -> None:
    now_us = 1_000 * SECOND_US
    recent = Recent(now_us)
    recent.observe([now_us - one for one in durations_us], now_us)
    said = recent.quantiles_us(now_us)
    assert said is not None
    in_order = sorted(durations_us)
    for quantile_us, share in zip(said, (0.5, 0.99), strict=True):
        exact_us = in_order[ceil(share * len(in_order)) - 1]
        assert quantile_us == pytest.approx(exact_us, rel=0.05, abs=51)


def test_a_clock_that_is_behind_and_a_request_that_took_hours_break_nothing() -> None:
    recent = Recent(0)
    recent.observe([5_000, -(10**11)], 4_000)
    assert recent.quantiles_us(4_000) == pytest.approx((50, 600 * SECOND_US), rel=0.05)


def test_what_took_long_is_forgotten_after_10_to_20_seconds() -> None:
    """Given slow requests at first and fast ones after, expect the slow ones' p99 until 20 s."""
    recent = Recent(0)
    recent.observe([0] * 50, SECOND_US)
    seen = []
    for second in range(2, 25):
        now_us = second * SECOND_US
        recent.observe([now_us - 1000] * 50, now_us)
        quantiles_us = recent.quantiles_us(now_us)
        assert quantiles_us is not None
        seen.append((second, quantiles_us[1] > SECOND_US / 2))
    remembered = [second for second, slow in seen if slow]
    assert remembered == list(range(2, 20))


def test_nothing_is_left_of_a_model_that_has_rested() -> None:
    recent = Recent(0)
    assert recent.quantiles_us(0) is None
    recent.observe([0], 1_000)
    assert recent.quantiles_us(2 * RECENT_US - 1) is not None
    assert recent.quantiles_us(3 * RECENT_US) is None
    recent.observe([0], 5 * RECENT_US)
    assert recent.quantiles_us(7 * RECENT_US) is None, "after a rest of two turns both halves are old"


# --- counting ----------------------------------------------------------------------------------------------


def dispatch(meter: Meter, scheduler: Scheduler, *batches: tuple[DispatchReason, int]) -> None:
    """Batches of these reasons and sizes are dispatched."""
    meter.dispatched([Dispatch(requests(size), reason, "") for reason, size in batches], scheduler, 0)


def test_a_batcher_counts_from_when_it_took_over() -> None:
    meter = Meter(BatcherMetrics(), "square")
    scheduler = Scheduler(ModelSettings(max_batch_size=10), model_processes=2)
    dispatch(meter, scheduler, ("full", 10))
    meter.took_over(7 * SECOND_US)

    dispatch(meter, scheduler, ("full", 10), ("idle", 5))
    dispatch(meter, scheduler, ("full", 10))
    for reason in ("queue_size", "queue_bytes", "queue_size"):
        meter.refused([Refusal(Entry("1-1", 0), "c", None, JSON, RESOURCE_EXHAUSTED, reason, "")])
    meter.expired_in_flight(0)
    before = meter.status("me", scheduler, 8 * SECOND_US)
    meter.expired_in_flight(2)
    meter.settled(InFlightBatch(0, 2, "", {}, [8 * SECOND_US, 8 * SECOND_US]), 9 * SECOND_US)
    status = meter.status("me", scheduler, 9 * SECOND_US)

    assert (status.batcher, status.began_us, status.at_us) == ("me", 7 * SECOND_US, 9 * SECOND_US)
    assert status.batches == {"full": 2, "idle": 1}
    assert (status.requests, status.fill_percent) == (25, 250)
    assert before.refused == {"RESOURCE_EXHAUSTED/queue_size": 2, "RESOURCE_EXHAUSTED/queue_bytes": 1}
    assert status.refused == {**before.refused, f"{DEADLINE_EXCEEDED}/in_flight": 2}
    assert (before.quantiles_us, status.learned) == (None, None)
    assert status.quantiles_us == pytest.approx((SECOND_US, SECOND_US), rel=0.05)


def test_what_there_is_to_see_and_what_was_learned() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=10), model_processes=3)
    for one in requests(2, arrival_us=SECOND_US):
        assert scheduler.offer(one, SECOND_US) is None
    for batch_id, size in (("1-1", 4), ("1-2", 8)):
        scheduler.adopt(batch_id, Dispatch(requests(size), "idle", ""), 0)
    scheduler.set_withheld(7)
    assert gauges(scheduler, 3 * SECOND_US) == Gauges(2, scheduler.waiting_bytes, 2.0, 2, 12, 3, 7)

    assert scheduler.in_flight()["1-1"].arrivals_us == [0] * 4
    scheduler.settle("1-1", 8_000, 9_000)
    meter = Meter(BatcherMetrics(), "square")
    assert meter.status("me", scheduler, 0).learned == (8_000.0, 0.0, 4), "one size tells nothing of others"
    scheduler.adopt("1-3", Dispatch(requests(8), "idle", ""), 0)
    scheduler.settle("1-3", 12_000, 13_000)
    assert meter.status("me", scheduler, 0).learned == pytest.approx((4_000.0, 1_000.0, 0))


# --- saying it ---------------------------------------------------------------------------------------------

STATUS = BatcherReport(
    "me", 1, 2, Gauges(1, 2, 0.5, 3, 4, 5), {"full": 3}, 30, 300, {"A/b": 1}, (5.5, 0.25, 0), (100, 200)
)


def test_what_is_said_is_understood() -> None:
    assert BatcherReport.decode(STATUS.encode().encode()) == STATUS
    said = json.loads(STATUS.encode())
    assert (said["gauges"]["waiting"], said["batches"]) == (1, {"full": 3})
    assert BatcherReport.decode(json.dumps({**said, "of a later version": 1}).encode()) == STATUS


@pytest.mark.parametrize(
    "said", [b"", b"{}", b"[]", b"\xff", STATUS.encode().replace("30,", '"x",').encode()]
)
def test_what_makes_no_sense_is_nothing(said: bytes) -> None:
    assert BatcherReport.decode(said) is None
