"""l(n) as measured: exact at sizes that were observed, and reasonable elsewhere."""

from __future__ import annotations

import math
import random

import pytest

from carpool_batcher.core.latency import Line
from carpool_cli.tuning.calibrate import bursts
from carpool_cli.tuning.curve import at, curve_of, largest_error, learned_line, medians, spread_of


def square_us(size: int) -> int:
    """The README's `square`: a logarithm."""
    return int(1000 * math.log(size + 1)) + 100


SQUARE = [(size, square_us(size)) for size in bursts(200, 5)]


@pytest.mark.parametrize("size", range(1, 260, 7))
def test_logarithm_is_not_fitted_by_a_line(size: int) -> None:
    assert at(curve_of(SQUARE), size) == pytest.approx(square_us(size), rel=0.06)


def test_curve_is_exact_at_observed_sizes() -> None:
    for size, time_us in SQUARE:
        assert at(curve_of(SQUARE), size) == time_us


def test_median_ignores_a_single_pause() -> None:
    observed = [(1, 1000), (1, 1000), (1, 90_000), (8, 2000), (8, 2000), (8, 2100)]
    assert medians(observed) == [(1.0, 1000.0), (8.0, 2000.0)]


def test_larger_batch_is_never_faster() -> None:
    # The third size is faster than the second: both get their weighted mean.
    observed = [(1, 1000), (4, 3000), (16, 1000), (16, 1000), (16, 1000), (64, 4000)]
    assert medians(observed) == [(1.0, 1000.0), (4.0, 1500.0), (16.0, 1500.0), (64.0, 4000.0)]


def test_noise_of_close_sizes_makes_no_steps() -> None:
    chance = random.Random(1)
    observed = []
    for _ in range(64):
        size = chance.randint(20, 200)
        observed.append((size, int((5000 + 50 * size) * chance.uniform(0.9, 1.1))))
    curve = curve_of(observed)
    for size in (1, 20, 50, 100, 200, 300):
        assert at(curve, size) == pytest.approx(5000 + 50 * size, rel=0.15)


def test_last_slope_continues_beyond_the_largest_size() -> None:
    assert at(curve_of([(1, 1000), (2, 1100), (4, 1700)]), 8) == 1700 + 4 * 300


def test_single_size_is_extrapolated_as_the_batcher_does() -> None:
    curve = curve_of([(8, 1000)])
    for size in (1, 4, 8, 16, 32):
        assert at(curve, size) == learned_line([(8, 1000)]).at(size)


def test_spread_is_relative_to_the_median_of_each_size() -> None:
    assert set(spread_of(SQUARE, curve_of(SQUARE))) == {1.0}
    assert set(spread_of(SQUARE, [(1.0, 1.0)])) == {1.0}  # however bad the curve is
    noisy = [
        (size, time_us * (3 if index % 5 == 0 else 1)) for index, (size, time_us) in enumerate(sorted(SQUARE))
    ]
    assert set(spread_of(noisy, curve_of(noisy))) == {1.0, 3.0}


def test_spread_ignores_a_single_pause() -> None:
    assert spread_of([(1, 1000)] * 9 + [(1, 50_000)], [(1.0, 1000.0)]) == (1.0,) * 9
    assert spread_of([(1, 1100), (1, 900)] * 2, [(1.0, 1000.0)]) == (0.9, 0.9, 1.1)
    assert spread_of([(1, 900)], [(1.0, 1000.0)]) == (1.0,)


def test_largest_error_of_a_line_is_found() -> None:
    curve = [(1.0, 1000.0), (16.0, 4000.0), (64.0, 5000.0)]
    assert largest_error(Line(2000.0, 50.0), curve, 64) == (1, 2050 / 1000 - 1)
    assert largest_error(Line(1000.0, 62.5), curve, 64) == (16, -0.5)
    assert largest_error(Line(1000.0, 62.5), curve, 8)[0] == 8  # larger sizes do not occur


def test_learned_line_of_a_line_is_that_line() -> None:
    observed = [(size, 5000 + 50 * size) for size in bursts(64, 3)]
    assert learned_line(observed)[:2] == pytest.approx((5000, 50))
    assert abs(largest_error(learned_line(observed), curve_of(observed), 64)[1]) < 0.001
