"""The search for settings, on models whose l(n) is known; and what is measured of one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from carpool.model_settings import ModelSettings
from carpool_batcher.core.latency import Line
from carpool_cli import search
from carpool_cli.calibrate import bursts, noise_of
from carpool_cli.search import (
    FOUND,
    LIKE,
    Candidate,
    Figures,
    Goal,
    candidates,
    changes,
    most_in_time,
    most_requests,
    recommended,
)
from carpool_cli.simulator import World

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
    late = little._replace(p99_ms=1.5)
    assert recommended([much, late], present, at_one_rate=True) is much


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
    assert sorted(bursts(20, 2)) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 20, 20]
    assert sorted(bursts(1, 3)) == [1, 1, 1]
    assert bursts(64, 5) != sorted(bursts(64, 5))


def test_noise_does_not_mind_a_single_pause() -> None:
    line = Line(1000.0, 0.0)
    assert noise_of([(1, 1000)] * 9 + [(1, 50_000)], line) == 0.0
    assert noise_of([(1, 900), (1, 1100)] * 5, line) == pytest.approx(0.148)
