"""The search for settings, on models whose l(n) is known; and what is measured of one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import cast

import pytest

from carpool.client.aio import AsyncClient, Reply
from carpool.model_settings import ModelSettings
from carpool_batcher.core.latency import Line
from carpool_cli.tuning import calibrate as calibration
from carpool_cli.tuning import search
from carpool_cli.tuning.calibrate import (
    LONE,
    Measured,
    bursts,
    calibrate,
    doubts,
    give_or_take,
    measured,
)
from carpool_cli.tuning.live import Live
from carpool_cli.tuning.search import (
    FOUND,
    LIKE,
    Candidate,
    Figures,
    Goal,
    Larger,
    candidates,
    changes,
    larger,
    most_in_time,
    most_requests,
    recommended,
)
from carpool_cli.tuning.simulator import World, normal
from carpool_cli.tuning.tune import curve_rows, notes

PRESENT = ModelSettings(max_batch_size=32)
FLAT = World(intercept_us=5000, slope_us=50)
STEEP = World(intercept_us=2000, slope_us=1000)


@pytest.fixture(autouse=True)
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough to tell good settings from bad ones."""
    monkeypatch.setattr(search, "FEWEST", 400)
    monkeypatch.setattr(search, "MOST", 400)


@pytest.mark.parametrize(("world", "latency_ms"), [(FLAT, 20.0), (STEEP, 20.0)])
def test_it_finds_what_trying_every_rate_finds(world: World, latency_ms: float) -> None:
    goal = Goal(world, latency_ms)
    tried = list(candidates(PRESENT, 32, latency_ms))[::5]
    found = most_requests(goal, tried, 32)[0]
    ceiling = goal.ceiling_per_s(32)
    rates = [ceiling * (step + 1) / 12 for step in range(12)]
    highest = max(rate for rate in rates for one in tried if goal.holds(one, rate))
    # A better one of a kind is not looked for below LIKE, and rates are found to within FOUND.
    assert found.rate >= highest * (1 - LIKE - FOUND)
    assert goal.holds(found.candidate, found.rate)


def test_the_best_at_a_rate_is_the_best_of_all() -> None:
    goal = Goal(FLAT, 20.0)
    tried = list(candidates(PRESENT, 32, 20.0))
    found = most_in_time(goal, tried, 2000.0)
    every = [goal.try_at(one, 2000.0) for one in tried]
    assert round(found[0].within, 3) == max(round(one.within, 3) for one in every)
    equals = [one.p99_ms for one in every if round(one.within, 3) == round(found[0].within, 3)]
    assert found[0].p99_ms == min(equals)
    assert {one.candidate.kind for one in found} == {one.kind for one in tried}


def test_a_delay_that_keeps_nothing_is_found_out() -> None:
    present = replace(PRESENT, max_queue_delay_ms=40)
    found = most_in_time(Goal(FLAT, 20.0), list(candidates(present, 32, 20.0)), 200.0)
    best = recommended(found, present, at_one_rate=True)
    assert best.within > 0.99
    assert "max_queue_delay_ms" in changes(best.candidate.settings, present)
    as_it_is = next(one for one in found if one.candidate.kind == "as it is")
    assert as_it_is.within < best.within


def test_what_cannot_be_kept_has_no_capacity() -> None:
    (found,) = most_requests(Goal(FLAT, 5.0), [Candidate("eager", PRESENT)], 32)
    assert (found.rate, found.p99_ms) == (0.0, math.inf)


def test_a_quantile_is_of_all_requests_and_not_of_the_served() -> None:
    expiring = replace(PRESENT, default_expiration_ms=6)
    found = Goal(FLAT, 6.0).try_at(Candidate("", expiring), 2000.0)
    assert found.within < 0.5
    assert found.p50_ms == found.p99_ms == math.inf


def test_of_equals_the_one_that_changes_least_is_recommended() -> None:
    def figures(rate: float, **changed: object) -> Figures:
        return Figures(Candidate("", ModelSettings(**changed)), rate, 1.0, 1.0, 1.0, 1.0)  # type: ignore[arg-type]

    present = ModelSettings()
    much, little = figures(1000, policy="deferred", target_latency_ms=5), figures(990, max_queue_delay_ms=2)
    assert recommended([much, little, figures(900)], present, at_one_rate=False) is little
    assert recommended([much, figures(900)], present, at_one_rate=False) is much


AT_ONE_RATE = Figures(Candidate("delay", ModelSettings(max_queue_delay_ms=20)), 3000, 1.0, 5.0, 10.0, 8.0)
AS_IT_IS = AT_ONE_RATE._replace(candidate=Candidate("as it is", ModelSettings()))


@pytest.mark.parametrize(
    ("best", "present", "changes_it"),
    [
        ({}, {"p99_ms": 10.3}, False),  # of p99 one trace tells no more
        ({}, {"p99_ms": 10.6}, True),
        ({}, {"within": 0.992}, False),
        ({}, {"within": 0.985, "p99_ms": 10.1}, True),  # near, and not what was asked for
        ({"within": 0.615, "p99_ms": 80.0}, {"within": 0.605, "p99_ms": 95.0}, False),
        ({"within": 0.615, "p99_ms": math.inf}, {"within": 0.6, "p99_ms": math.inf}, True),
    ],
)
def test_settings_are_changed_for_what_is_more_than_noise(
    best: dict[str, float], present: dict[str, float], changes_it: bool
) -> None:
    first, last = AT_ONE_RATE._replace(**best), AS_IT_IS._replace(**present)  # type: ignore[arg-type]
    found = recommended([first, last], last.candidate.settings, at_one_rate=True)
    assert found is (first if changes_it else last)


@pytest.mark.parametrize(
    ("world", "mean_batch", "seen_to", "latency_ms", "gain"),
    [
        (FLAT, 30.0, 32, 20.0, 2 * 6600 / 8200 - 1),
        (FLAT, 15.0, 32, 20.0, None),  # they are not full as they are
        (FLAT, 30.0, 20, 20.0, None),  # a guess upon a guess
        (FLAT, 30.0, 32, 8.5, None),  # 8.2 ms, and the way
        (World(intercept_us=100, slope_us=1000), 32.0, 32, 100.0, None),  # nothing is won
    ],
)
def test_larger_batches_are_suggested_where_they_pay(
    world: World, mean_batch: float, seen_to: int, latency_ms: float, gain: float | None
) -> None:
    found = larger(Goal(world, latency_ms), AS_IT_IS._replace(mean_batch=mean_batch), 32, seen_to)
    assert found == (None if gain is None else Larger(64, gain))


def test_changes_are_what_config_reads() -> None:
    present = ModelSettings(preferred_batch_sizes=(4, 8), default_expiration_ms=9, max_batch_size=16)
    changed = changes(ModelSettings(max_batch_size=8, policy="deferred"), present)
    assert changed == {
        "max_batch_size": "8", "preferred_batch_sizes": "none", "default_expiration_ms": "none",
        "policy": "deferred",
    }  # fmt: skip
    assert ModelSettings.from_mapping({**present.as_text(), **changed}) == ModelSettings(
        max_batch_size=8, policy="deferred"
    )


def test_candidates_stay_within_what_the_model_takes() -> None:
    for max_size in (1, 2, 32):
        tried = list(candidates(ModelSettings(max_batch_size=max_size), max_size, 10.0))
        assert {one.settings.max_batch_size for one in tried} <= set(range(1, max_size + 1))
        assert max(one.settings.max_batch_size for one in tried) == max_size


def test_bursts_are_of_every_power_of_two_and_bounded() -> None:
    assert sorted(bursts(20, 2)) == sorted(2 * [1, 2, 4, 8, 16, 20] + LONE * [1])
    assert sorted(bursts(1, 3)) == (3 + LONE) * [1]
    assert bursts(64, 5) != sorted(bursts(64, 5))
    assert {bursts(64, rounds)[0] for rounds in range(1, 20)} == {1}


class FakeClient:
    """A model of which everything is known, by its own clock: l(n) = 2000 + 100 n us, and a batch takes
    900 + 30 n us there and back. Each request is made in 1000 us, before its burst leaves.

    `limit`: the largest batch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 64) -> None:
        self._now_us = 0
        self._limit = limit
        self._put_out: list[asyncio.Future[int]] = []
        monkeypatch.setattr("carpool_cli.tuning.calibrate.perf_counter_ns", lambda: 1000 * self._now_us)
        monkeypatch.setattr("carpool_cli.tuning.calibrate.monotonic", lambda: self._now_us / 1e6)

    async def infer(self, model: str, body: object) -> object:
        return (await self.request(model, body)).value

    async def request(self, model: str, body: object) -> Reply:
        self._now_us += 1000
        if not self._put_out:
            asyncio.get_running_loop().call_soon(self._serve)
        future = asyncio.get_running_loop().create_future()
        self._put_out.append(future)
        size = await future
        return Reply(body, "", size, 700, self.computed_us(size))

    @staticmethod
    def computed_us(size: int) -> int:
        return 2000 + 100 * size

    def _serve(self) -> None:
        while self._put_out:
            batch, self._put_out = self._put_out[: self._limit], self._put_out[self._limit :]
            self._now_us += 900 + 30 * len(batch) + self.computed_us(len(batch))
            for future in batch:
                future.set_result(len(batch))


def calibrated(client: FakeClient, sizes: list[int], *, holds_back: bool = False) -> Measured:
    steps: list[None] = []
    found = asyncio.run(
        calibrate(
            cast("AsyncClient", client), "m", 7, sizes, holds_back=holds_back, step=lambda: steps.append(None)
        )
    )
    assert len(steps) <= len(sizes)
    return found


def test_bursts_show_computation_and_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), bursts(64, 2))
    assert found.line[:2] == pytest.approx((2000, 100))
    assert found.trip[:2] == pytest.approx((1900, 30))
    for factors in (found.spread, found.trip_spread):
        assert factors == pytest.approx([1.0] * len(factors), abs=0.001)
    world = found.world(3)
    assert world.processes == 3
    assert world.takes_us(10) == pytest.approx(3000)
    assert world.trip_us(10) == pytest.approx(2200)


def test_a_burst_that_was_cut_says_nothing_of_the_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch, limit=4), [1, 8, 2, 16, 4])
    assert found.trip[:2] == pytest.approx((1900, 30))


def test_what_a_model_held_back_is_no_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), [1, 2, 4], holds_back=True)
    assert found.trip[:2] == pytest.approx((1200, 30))


def test_lone_trips_that_are_slow_are_spread_and_no_longer_trip() -> None:
    trips = [(1, 1000)] * 30 + [(1, 4000)] * 20 + [(8, 1140)] * 5
    found = measured([(1, 5000), (8, 5000)], trips)
    assert found.trip[:2] == pytest.approx((980, 20))
    assert set(found.trip_spread) == {1.0, 4.0}


def test_what_is_no_line_is_simulated_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "computed_us", staticmethod(lambda size: 1000 * size.bit_length()))
    found = calibrated(FakeClient(monkeypatch), bursts(64, 3))
    world = found.world(1)
    assert [world.takes_us(size) for size in (1, 8, 64)] == [1000, 4000, 7000]
    assert abs(found.line.at(8) / 4000 - 1) > 0.15
    assert set(found.spread) == {1.0}
    assert doubts(found) == []


def test_bursts_end_in_time_with_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LONGEST_S", 0.01)
    found = calibrated(FakeClient(monkeypatch), [1, 1, 64, 64, 64])
    assert found.seen == [(1, 2100)] * 2  # after 8 ms and after 12
    assert found.world(1).trip_us(64) == 1930  # a slope was not seen


def test_without_trips_they_are_guessed() -> None:
    found = measured([(1, 1000), (2, 1100)] * 10)
    assert found.world(1).trip_us(1) == calibration.TRIP.at(1)


def test_give_or_take_is_a_normal_spreads_standard_deviation() -> None:
    assert give_or_take(normal(0.2)) == pytest.approx(0.2, rel=0.1)
    assert give_or_take((1.0,)) == 0.0


QUIET = Measured(
    [], [(1.0, 5050.0)], Line(5000.0, 50.0), (1.0,) * 20, Line(1000.0, 20.0),
    (0.8,) * 5 + (1.0,) * 13 + (3.0,) * 2,
)  # fmt: skip
TENTH = (1.0,) * 18 + (2.5,) * 2


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (QUIET._replace(trip_spread=(1.0,) * 20), []),
        (
            QUIET._replace(trip=Line(3500.0, 0.0)),
            ["on its way for 3.5 ms, and computed in 5.05 ms", "trip in ten"],
        ),
        (QUIET._replace(curve=[(1.0, 100_000.0)], trip=Line(3500.0, 0.0), trip_spread=(1.0,)), []),
        (QUIET._replace(curve=[(1.0, 200.0)], trip_spread=(1.0,)), []),  # a quick model's trip is the larger
        (QUIET, ["One trip in ten took 3 times the usual one"]),
        (QUIET._replace(trip=Line(400.0, 0.0)), []),  # three times of nothing
        (QUIET._replace(trip_spread=(1.0,), spread=TENTH), ["One computation in ten took 2.5 times"]),
    ],
)
def test_a_starved_machine_is_doubted(measured: Measured, says: list[str]) -> None:
    found = doubts(measured)
    assert len(found) == len(says)
    assert all(part in reason for part, reason in zip(says, found, strict=True))


LIVE = Live(ModelSettings(max_batch_size=64), ModelSettings(max_batch_size=64), 1, [])


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ([(size, 5000 + 50 * size) for size in bursts(64, 3)], []),
        ([(size, 5000 + 50 * size) for size in bursts(16, 3)], ["only batches of 1 to 16 were seen"]),
        ([(8, 5000)] * 20, ["only batches of 8 were seen"]),
        (
            [(size, 1000 * size.bit_length()) for size in bursts(64, 3)],
            ["The batcher learns a line", "batches that leave just in time"],
        ),
    ],
)
def test_what_the_advice_rests_on_is_told(seen: list[tuple[int, int]], says: list[str]) -> None:
    found = list(notes(LIVE, measured(seen), 64))
    assert len(found) == len(says)
    assert all(part in note for part, note in zip(says, found, strict=True))


def test_where_the_batcher_s_line_is_off_by_most_is_told() -> None:
    found_out = measured([(1, 1000), (32, 5000), (64, 5500)] * 8)._replace(line=Line(1000.0, 62.5))
    first, _ = notes(LIVE, found_out, 64)
    assert "1 + 0.0625 n ms, which is 40% too low at n = 32" in first


def test_only_what_was_seen_is_shown_as_measured() -> None:
    assert [row.split()[-2:] for row in curve_rows(measured([(8, 5000), (16, 6000)] * 4))] == [
        ["8", "16"],
        ["5", "6"],
    ]
    by_chance = measured([(size, 5000 + 50 * size) for size in range(1, 1001)])
    sizes, times_ms = (row.split() for row in curve_rows(by_chance))
    assert len(times_ms) < 20
    assert int(sizes[-1]) > 900
