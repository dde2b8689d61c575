"""The latency model: a line fitted to observed execution times, robust against outliers and drift."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_batcher.core import latency as latency_module
from carpool_batcher.core.latency import LatencyModel, fit

SIZES = (1, 4, 8, 16, 32)


def true_us(size: int, intercept_us: float = 5000, slope_us: float = 50) -> int:
    return int(intercept_us + slope_us * size)


def learned(observed: Sequence[tuple[int, int]]) -> LatencyModel:
    latency = LatencyModel()
    for size, took_us in observed:
        latency.observe(size, took_us)
    return latency


def on_the_line(number: int, intercept_us: float = 5000, slope_us: float = 50) -> list[tuple[int, int]]:
    sizes = [SIZES[at % len(SIZES)] for at in range(number)]
    return [(size, true_us(size, intercept_us, slope_us)) for size in sizes]


def test_nothing_is_known_before_the_first_observation() -> None:
    latency = LatencyModel()
    assert not latency.known
    assert (latency.of(8), latency.at_most(8)) == (0, 0)


def test_observations_on_a_line_are_fitted_exactly() -> None:
    latency = learned(on_the_line(20))
    assert latency.known
    for size in (1, 2, 10, 32, 100):
        assert latency.of(size) == pytest.approx(true_us(size), abs=2)
        assert latency.at_most(size) == pytest.approx(true_us(size), abs=4)


def test_two_sizes_determine_the_line() -> None:
    latency = learned([(1, 2000), (11, 3000)])
    assert latency.of(6) == pytest.approx(2500, abs=1)


def test_single_size_is_extrapolated_flat_downwards_and_little_upwards() -> None:
    latency = learned([(8, 1000)] * 20)
    assert (latency.of(1), latency.of(8)) == (1000, 1000)
    assert latency.of(16) == 1250  # a quarter of proportional growth
    # After a few observations it is known.
    for _ in range(latency_module.REFIT_INTERVAL):
        latency.observe(16, 1100)
    assert latency.of(16) == pytest.approx(1100, abs=30)


def test_frequent_size_does_not_push_out_observations_of_others() -> None:
    latency = learned([*on_the_line(20), *[(11, true_us(11))] * 1000])
    for size in (1, 11, 40):
        assert latency.of(size) == pytest.approx(true_us(size), abs=2)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_change_of_speed_applies_to_sizes_not_observed_since(factor: float) -> None:
    latency = learned([*on_the_line(40), *[(11, int(factor * true_us(11)))] * 20])
    for size in (1, 11, 40):
        assert latency.of(size) == pytest.approx(factor * true_us(size), rel=0.02)


def test_outliers_do_not_change_the_model() -> None:
    chance = random.Random(1)
    observed = [(size, int(took_us * chance.gauss(1, 0.02))) for size, took_us in on_the_line(60)]
    for at in (3, 30, 50):
        observed[at] = (observed[at][0], 400_000)  # the machine paused
    latency = learned(observed)
    for size in SIZES:
        assert latency.of(size) == pytest.approx(true_us(size), rel=0.05)
        assert latency.at_most(size) < 1.2 * true_us(size)


@pytest.mark.parametrize("paused_us", [30_000, 400_000])
def test_fit_ignores_outliers(paused_us: int) -> None:
    """Tested on `fit`: in a LatencyModel, later observations could hide the error as a change of speed."""
    observed = on_the_line(40)
    for at in (3, 20, 37):
        observed[at] = (observed[at][0], paused_us)
    line = fit(observed)
    for size in SIZES:
        assert line.at(size) == pytest.approx(true_us(size), rel=0.02)
    assert line.margin_us < 0.02 * true_us(1)


def test_cold_start_is_forgotten() -> None:
    latency = learned([(1, 900_000), (1, 300_000), *on_the_line(40)])
    assert latency.of(16) == pytest.approx(true_us(16), rel=0.02)


def test_a_tenth_of_observations_exceeds_at_most() -> None:
    chance = random.Random(2)
    observed = [(size, took_us + chance.randrange(2000)) for size, took_us in on_the_line(64)]
    latency = learned(observed)
    longer = sum(took_us > latency.at_most(size) for size, took_us in observed)
    assert 2 <= longer <= 13
    assert all(latency.at_most(size) >= latency.of(size) for size in SIZES)


@pytest.mark.parametrize("factor", [0.2, 0.5, 2, 10])
def test_change_of_speed_is_learned_soon(factor: float) -> None:
    latency = learned(on_the_line(64))
    for size, took_us in on_the_line(14, 5000 * factor, 50 * factor):
        latency.observe(size, took_us)
    assert latency.of(16) == pytest.approx(factor * true_us(16), rel=0.15)


def test_alternating_slow_and_fast_batches_are_no_change_of_speed() -> None:
    """Only several in a row are a change; otherwise the model would be scaled again and again."""
    latency = learned(on_the_line(64))
    for size, took_us in on_the_line(40):
        latency.observe(size, 2 * took_us)
        assert not latency._deviation_run > 1
        latency.observe(size, took_us)
        assert latency._deviation_run < 1
    assert true_us(16) < latency.of(16) < 2 * true_us(16)


def test_larger_batches_are_never_faster() -> None:
    latency = learned([(1, 9000), (8, 5000), (16, 3000)] * 4)
    assert latency.of(1) == latency.of(16) == latency.of(100)


def test_latency_is_never_negative() -> None:
    latency = learned([(1, 1), (2, 1000), (4, 6000), (8, 20_000)] * 4)
    assert latency.of(1) >= 0
    assert latency.of(8) > latency.of(4) > 0


observations = st.lists(st.tuples(st.integers(1, 1024), st.integers(1, 10_000_000)), min_size=1, max_size=80)


@settings(deadline=None)
@given(observations)
def test_latency_is_monotone_for_any_observations(observed: list[tuple[int, int]]) -> None:
    latency = learned(observed)
    sizes = (1, 2, 8, 100, 1024, 5000)
    assert latency.known
    assert [latency.of(size) for size in sizes] == sorted(latency.of(size) for size in sizes)
    assert all(0 <= latency.of(size) <= latency.at_most(size) for size in sizes)


@settings(deadline=None)
@given(observations)
def test_slope_and_intercept_are_never_negative(
    observed: list[tuple[int, int]],
) -> None:
    line = fit(observed)
    assert line.slope_us >= 0
    assert line.intercept_us >= -1e-6 * max(took_us for _, took_us in observed)


def test_number_and_size_of_fits_is_bounded() -> None:
    with mock.patch.object(latency_module, "fit", wraps=fit) as fits:
        latency = learned(on_the_line(64))
        before = fits.call_count
        for size, took_us in on_the_line(800):
            latency.observe(size, took_us)
        for size in range(1000):
            latency.at_most(size)
    assert before <= 4 + 4 * latency_module.REFIT_INTERVAL
    assert fits.call_count - before == 800 // latency_module.REFIT_INTERVAL
    assert max(
        len(call.args[0]) for call in fits.call_args_list
    ) <= latency_module.CLASS_OBSERVATIONS_MAX * len(SIZES)


def test_repeated_changes_of_speed_cancel_out() -> None:
    """A slowdown and a speedup by the same ratio are detected alike."""
    latency = learned(on_the_line(40))
    for turn in range(40):
        factor = 1.5 if turn % 2 == 0 else 1.0
        for _ in range(20):
            latency.observe(32, int(factor * true_us(32)))
    assert latency.of(1) == pytest.approx(true_us(1), rel=0.1)
    assert latency.of(32) == pytest.approx(true_us(32), rel=0.02)


@pytest.mark.parametrize("factor", [1.0005, 0.9995])
def test_drift_applies_to_sizes_not_observed_since(factor: float) -> None:
    """A tenth in 200 batches is too slow for a change. The line still follows, also for other sizes."""
    latency, speed, chance = learned(on_the_line(40)), 1.0, random.Random(1)
    for _ in range(4000):
        speed *= factor
        latency.observe(32, int(speed * true_us(32) * chance.gauss(1, 0.02)))
    for size in (1, 8, 32, 100):
        assert latency.of(size) == pytest.approx(speed * true_us(size), rel=0.06)


def test_nonlinear_latency_is_not_mistaken_for_drift() -> None:
    """One size is always off the line; that moves no other size."""
    latency = learned([(size, int(1000 * size**1.3)) for size in (1, 2, 4, 8, 16) * 8])
    before = [latency.of(size) for size in (1, 16)]
    for _ in range(1000):
        latency.observe(16, int(1000 * 16**1.3))
    assert [latency.of(size) for size in (1, 16)] == pytest.approx(before, rel=0.01)


def test_noise_is_not_mistaken_for_drift() -> None:
    latency, chance = learned(on_the_line(40)), random.Random(2)
    for _ in range(5000):
        latency.observe(32, int(true_us(32) * chance.gauss(1, 0.05)))
    assert latency.of(1) == pytest.approx(true_us(1), rel=0.1)
