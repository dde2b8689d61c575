"""The search for settings, on models whose l(n) is known; and the measurement of a model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import cast

import pytest

from carpool.client.aio import AsyncClient, Reply
from carpool.model_settings import ModelSettings
from carpool_batcher.core.curve import Curve
from carpool_cli.tuning import calibrate as calibration
from carpool_cli.tuning import search
from carpool_cli.tuning.calibrate import (
    LONE_REQUESTS,
    Measured,
    bursts,
    calibrate,
    deviation,
    doubts,
    measured,
)
from carpool_cli.tuning.curve import Line
from carpool_cli.tuning.live import LiveModel
from carpool_cli.tuning.search import (
    RATE_PRECISION,
    RATE_TOLERANCE,
    Candidate,
    Figures,
    Goal,
    LargerBatches,
    candidates,
    changed_settings,
    larger_batches,
    rank_by_latency,
    rank_by_rate,
    recommend,
)
from carpool_cli.tuning.simulator import World, normal
from carpool_cli.tuning.tune import curve_rows, notes

PRESENT = ModelSettings(max_batch_size=32)
FLAT = World(intercept_us=5000, slope_us=50)
STEEP = World(intercept_us=2000, slope_us=1000)


@pytest.fixture(autouse=True)
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than in production, and long enough to tell good settings from bad ones."""
    monkeypatch.setattr(search, "TRACE_REQUESTS_MIN", 400)
    monkeypatch.setattr(search, "TRACE_REQUESTS_MAX", 400)


@pytest.mark.parametrize(("world", "latency_ms"), [(FLAT, 20.0), (STEEP, 20.0)])
def test_search_finds_the_rate_that_exhaustive_search_finds(world: World, latency_ms: float) -> None:
    goal = Goal(world, latency_ms)
    tried = list(candidates(PRESENT, 32, latency_ms))[::5]
    found = rank_by_rate(goal, tried, 32)[0]
    ceiling = goal.ceiling_per_s(32)
    rates = [ceiling * (step + 1) / 12 for step in range(12)]
    highest = max(rate for rate in rates for candidate in tried if goal.is_met(candidate, rate))
    assert found.rate >= highest * (1 - RATE_TOLERANCE - RATE_PRECISION)
    assert goal.is_met(found.candidate, found.rate)


def test_best_at_a_rate_is_the_best_of_all_candidates() -> None:
    goal = Goal(FLAT, 20.0)
    tried = list(candidates(PRESENT, 32, 20.0))
    found = rank_by_latency(goal, tried, 2000.0)
    every = [goal.simulate(candidate, 2000.0) for candidate in tried]
    assert round(found[0].within, 3) == max(round(figures.within, 3) for figures in every)
    equals = [figures.p99_ms for figures in every if round(figures.within, 3) == round(found[0].within, 3)]
    assert found[0].p99_ms == min(equals)
    assert {figures.candidate.kind for figures in found} == {candidate.kind for candidate in tried}


def test_delay_that_exceeds_the_latency_is_removed() -> None:
    present = replace(PRESENT, max_queue_delay_ms=40)
    found = rank_by_latency(Goal(FLAT, 20.0), list(candidates(present, 32, 20.0)), 200.0)
    best = recommend(found, present, at_one_rate=True)
    assert best.within > 0.99
    assert "max_queue_delay_ms" in changed_settings(best.candidate.settings, present)
    present_figures = next(figures for figures in found if figures.candidate.kind == "present")
    assert present_figures.within < best.within


def test_latency_that_cannot_be_kept_has_rate_zero() -> None:
    (found,) = rank_by_rate(Goal(FLAT, 5.0), [Candidate("eager", PRESENT)], 32)
    assert (found.rate, found.p99_ms) == (0.0, math.inf)


def test_quantile_counts_all_requests() -> None:
    expiring = replace(PRESENT, default_expiration_ms=6)
    found = Goal(FLAT, 6.0).simulate(Candidate("", expiring), 2000.0)
    assert found.within < 0.5
    assert found.p50_ms == found.p99_ms == math.inf


def test_fewest_changes_are_recommended_among_equals() -> None:
    def figures(rate: float, **changed: object) -> Figures:
        return Figures(Candidate("", ModelSettings(**changed)), rate, 1.0, 1.0, 1.0, 1.0)  # type: ignore[arg-type]

    present = ModelSettings()
    two_changes = figures(1000, policy="deferred", target_latency_ms=5)
    one_change = figures(990, max_queue_delay_ms=2)
    assert recommend([two_changes, one_change, figures(900)], present, at_one_rate=False) is one_change
    assert recommend([two_changes, figures(900)], present, at_one_rate=False) is two_changes


CHANGED = Figures(Candidate("delay", ModelSettings(max_queue_delay_ms=20)), 3000, 1.0, 5.0, 10.0, 8.0)
PRESENT_FIGURES = CHANGED._replace(candidate=Candidate("present", ModelSettings()))


@pytest.mark.parametrize(
    ("best", "present", "is_changed"),
    [
        ({}, {"p99_ms": 10.3}, False),  # within the error of p99
        ({}, {"p99_ms": 10.6}, True),
        ({}, {"within": 0.992}, False),
        ({}, {"within": 0.985, "p99_ms": 10.1}, True),  # close, but the latency is not kept
        ({"within": 0.615, "p99_ms": 80.0}, {"within": 0.605, "p99_ms": 95.0}, False),
        ({"within": 0.615, "p99_ms": math.inf}, {"within": 0.6, "p99_ms": math.inf}, True),
    ],
)
def test_settings_are_changed_only_for_more_than_noise(
    best: dict[str, float], present: dict[str, float], is_changed: bool
) -> None:
    first, last = CHANGED._replace(**best), PRESENT_FIGURES._replace(**present)  # type: ignore[arg-type]
    found = recommend([first, last], last.candidate.settings, at_one_rate=True)
    assert found is (first if is_changed else last)


@pytest.mark.parametrize(
    ("world", "mean_batch", "observed_size_max", "latency_ms", "gain"),
    [
        (FLAT, 30.0, 32, 20.0, 2 * 6600 / 8200 - 1),
        (FLAT, 15.0, 32, 20.0, None),  # batches are not full
        (FLAT, 30.0, 20, 20.0, None),  # batches near the largest size were not measured
        (FLAT, 30.0, 32, 8.5, None),  # l(64) is 8.2 ms, without the round trip
        (World(intercept_us=100, slope_us=1000), 32.0, 32, 100.0, None),  # no gain
    ],
)
def test_larger_batches_are_suggested_where_they_promise_a_gain(
    world: World, mean_batch: float, observed_size_max: int, latency_ms: float, gain: float | None
) -> None:
    found = larger_batches(
        Goal(world, latency_ms), PRESENT_FIGURES._replace(mean_batch=mean_batch), 32, observed_size_max
    )
    assert found == (None if gain is None else LargerBatches(64, gain))


def test_changed_settings_are_valid_for_config() -> None:
    present = ModelSettings(preferred_batch_sizes=(4, 8), default_expiration_ms=9, max_batch_size=16)
    changed = changed_settings(ModelSettings(max_batch_size=8, policy="deferred"), present)
    assert changed == {
        "max_batch_size": "8", "preferred_batch_sizes": "none", "default_expiration_ms": "none",
        "policy": "deferred",
    }  # fmt: skip
    assert ModelSettings.from_mapping({**present.as_text(), **changed}) == ModelSettings(
        max_batch_size=8, policy="deferred"
    )


def test_candidates_respect_the_largest_batch_size() -> None:
    for max_size in (1, 2, 32):
        tried = list(candidates(ModelSettings(max_batch_size=max_size), max_size, 10.0))
        assert {candidate.settings.max_batch_size for candidate in tried} <= set(range(1, max_size + 1))
        assert max(candidate.settings.max_batch_size for candidate in tried) == max_size


def test_bursts_have_every_power_of_two_and_one_more_and_start_with_one() -> None:
    assert sorted(bursts(20, 2)) == sorted(2 * [1, 2, 3, 4, 5, 8, 9, 16, 17, 20] + LONE_REQUESTS * [1])
    assert sorted(bursts(1, 3)) == (3 + LONE_REQUESTS) * [1]
    assert bursts(64, 5) != sorted(bursts(64, 5))
    assert {bursts(64, rounds)[0] for rounds in range(1, 20)} == {1}


class FakeClient:
    """A client of a model with known times, on a clock of its own.

    l(n) = 2000 + 100 n us, and the round trip takes 900 + 30 n us. Encoding takes 1000 us for each request,
    before the burst is sent. `limit` is the largest batch size.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 64) -> None:
        self._now_us = 0
        self._limit = limit
        self._sent: list[asyncio.Future[int]] = []
        monkeypatch.setattr("carpool_cli.tuning.calibrate.perf_counter_ns", lambda: 1000 * self._now_us)
        monkeypatch.setattr("carpool_cli.tuning.calibrate.monotonic", lambda: self._now_us / 1e6)

    async def infer(self, model: str, body: object) -> object:
        return (await self.request(model, body)).value

    async def request(self, model: str, body: object) -> Reply:
        self._now_us += 1000
        if not self._sent:
            asyncio.get_running_loop().call_soon(self._serve)
        future = asyncio.get_running_loop().create_future()
        self._sent.append(future)
        size = await future
        return Reply(body, "", size, 700, self.execution_us(size))

    @staticmethod
    def execution_us(size: int) -> int:
        return 2000 + 100 * size

    def _serve(self) -> None:
        while self._sent:
            batch, self._sent = self._sent[: self._limit], self._sent[self._limit :]
            self._now_us += 900 + 30 * len(batch) + self.execution_us(len(batch))
            for future in batch:
                future.set_result(len(batch))


def calibrated(client: FakeClient, sizes: list[int], *, delays: bool = False) -> Measured:
    steps: list[None] = []
    found = asyncio.run(
        calibrate(
            cast("AsyncClient", client), "m", 7, sizes, delays=delays, on_progress=lambda: steps.append(None)
        )
    )
    assert len(steps) <= len(sizes)
    return found


def test_calibration_measures_execution_and_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), bursts(64, 2))
    assert found.round_trip[:2] == pytest.approx((1900, 30))
    for factors in (found.spread, found.round_trip_spread):
        assert factors == pytest.approx([1.0] * len(factors), abs=0.001)
    world = found.world(3)
    assert world.processes == 3
    assert world.execution_us(10) == pytest.approx(3000)
    assert world.round_trip_us(10) == pytest.approx(2200)


def test_split_burst_does_not_count_as_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch, limit=4), [1, 8, 2, 16, 4])
    assert found.round_trip[:2] == pytest.approx((1900, 30))


def test_queue_delay_is_not_part_of_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), [1, 2, 4], delays=True)
    assert found.round_trip[:2] == pytest.approx((1200, 30))


def test_slow_lone_requests_add_to_the_spread_and_not_to_the_round_trip() -> None:
    round_trips = [(1, 1000)] * 30 + [(1, 4000)] * 20 + [(8, 1140)] * 5
    found = measured([(1, 5000), (8, 5000)], round_trips)
    assert found.round_trip[:2] == pytest.approx((980, 20))
    assert set(found.round_trip_spread) == {1.0, 4.0}


def test_steps_are_simulated_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "execution_us", staticmethod(lambda size: 1000 * size.bit_length()))
    found = calibrated(FakeClient(monkeypatch), bursts(64, 3))
    world = found.world(1)
    assert [world.execution_us(size) for size in (1, 8, 64)] == [1000, 4000, 7000]
    assert set(found.spread) == {1.0}
    assert doubts(found) == []


def test_calibration_ends_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CALIBRATION_S_MAX", 0.01)
    found = calibrated(FakeClient(monkeypatch), [1, 1, 64, 64, 64])
    assert found.observed == [(1, 2100)] * 2  # after 8 ms and after 12
    assert found.world(1).round_trip_us(64) == 1930  # bursts of one size show no slope


def test_unknown_round_trip_gets_the_default() -> None:
    found = measured([(1, 1000), (2, 1100)] * 10)
    assert found.world(1).round_trip_us(1) == calibration.ROUND_TRIP_DEFAULT.at(1)


def test_deviation_of_a_normal_spread_is_its_standard_deviation() -> None:
    assert deviation(normal(0.2)) == pytest.approx(0.2, rel=0.1)
    assert deviation((1.0,)) == 0.0


QUIET = Measured(
    [], Curve([1.0], [5050.0]), (1.0,) * 20, Line(1000.0, 20.0),
    (0.8,) * 5 + (1.0,) * 13 + (3.0,) * 2,
)  # fmt: skip
SLOW_TENTH = (1.0,) * 18 + (2.5,) * 2


@pytest.mark.parametrize(
    ("measurement", "parts"),
    [
        (QUIET._replace(round_trip_spread=(1.0,) * 20), []),
        (
            QUIET._replace(round_trip=Line(3500.0, 0.0)),
            ["round trip of a lone request takes 3.5 ms, its execution 5.05 ms", "round trip in ten"],
        ),
        (
            QUIET._replace(
                curve=Curve([1.0], [100_000.0]), round_trip=Line(3500.0, 0.0), round_trip_spread=(1.0,)
            ),
            [],
        ),
        (
            QUIET._replace(curve=Curve([1.0], [200.0]), round_trip_spread=(1.0,)),
            [],
        ),  # of a fast model the round trip is longer than the execution
        (QUIET, ["One round trip in ten took at least 3 times the median"]),
        (QUIET._replace(round_trip=Line(400.0, 0.0)), []),  # three times as long, but short
        (
            QUIET._replace(round_trip_spread=(1.0,), spread=SLOW_TENTH),
            ["One execution in ten took at least 2.5 times"],
        ),
    ],
)
def test_measurement_on_a_busy_machine_is_doubted(measurement: Measured, parts: list[str]) -> None:
    found = doubts(measurement)
    assert len(found) == len(parts)
    assert all(part in reason for part, reason in zip(parts, found, strict=True))


LIVE = LiveModel(ModelSettings(max_batch_size=64), ModelSettings(max_batch_size=64), 1, [])


@pytest.mark.parametrize(
    ("observed", "parts"),
    [
        ([(size, 5000 + 50 * size) for size in bursts(64, 3)], []),
        (
            [(size, 5000 + 50 * size) for size in bursts(16, 3)],
            ["observed batch sizes: 1 to 16;"],
        ),
        ([(8, 5000)] * 20, ["observed batch sizes: 8;"]),
        ([(size, 1000 * size.bit_length()) for size in bursts(64, 3)], []),
    ],
)
def test_limitations_of_the_measurement_are_noted(observed: list[tuple[int, int]], parts: list[str]) -> None:
    found = list(notes(LIVE, measured(observed), 64))
    assert len(found) == len(parts)
    assert all(part in note for part, note in zip(parts, found, strict=True))


def test_table_of_the_curve_shows_only_observed_sizes() -> None:
    assert [row.split()[-2:] for row in curve_rows(measured([(8, 5000), (16, 6000)] * 4))] == [
        ["8", "16"],
        ["5", "6"],
    ]
    many_sizes = measured([(size, 5000 + 50 * size) for size in range(1, 1001)])
    sizes, times_ms = (row.split() for row in curve_rows(many_sizes))
    assert len(times_ms) < 20
    assert int(sizes[-1]) > 900
