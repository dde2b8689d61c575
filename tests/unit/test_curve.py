"""l(n) as measured: exact at sizes that were observed, and reasonable elsewhere."""

from __future__ import annotations

import math
import random

import pytest

from carpool_batcher.core.learned.curve import Curve
from carpool_batcher.core.learned.latency import LatencyModel
from carpool_cli.tuning.calibrate import bursts
from carpool_cli.tuning.curve import curve_of, line_through, spread_of


def square_us(size: int) -> int:
    """The README's `square`: a logarithm."""
    return int(1000 * math.log(size + 1)) + 100


def knots(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(curve.sizes, curve.times_us, strict=True))


SQUARE = [(size, square_us(size)) for size in bursts(200, 5)]


@pytest.mark.parametrize("size", range(1, 260, 7))
def test_logarithm_is_not_fitted_by_a_line(size: int) -> None:
    assert curve_of(SQUARE).at(size) == pytest.approx(square_us(size), rel=0.06)


def test_curve_is_exact_at_observed_sizes() -> None:
    for size, time_us in SQUARE:
        assert curve_of(SQUARE).at(size) == time_us


def test_median_ignores_a_single_pause() -> None:
    observed = [(1, 1000), (1, 1000), (1, 90_000), (8, 2000), (8, 2000), (8, 2100)]
    assert knots(curve_of(observed)) == [(1.0, 1000.0), (8.0, 2000.0)]


def test_larger_batch_is_never_faster() -> None:
    # The third size is faster than the second: both get their weighted median.
    observed = [(1, 1000), (4, 3000), (16, 1000), (16, 1000), (16, 1000), (64, 4000)]
    assert knots(curve_of(observed)) == [(1.0, 1000.0), (4.0, 1000.0), (16.0, 1000.0), (64.0, 4000.0)]


def test_noise_of_close_sizes_makes_no_steps() -> None:
    chance = random.Random(1)
    observed = []
    for _ in range(64):
        size = chance.randint(20, 200)
        observed.append((size, int((5000 + 50 * size) * chance.uniform(0.9, 1.1))))
    curve = curve_of(observed)
    for size in (20, 50, 100, 150, 200, 300):
        assert curve.at(size) == pytest.approx(5000 + 50 * size, rel=0.15)


def test_noise_of_close_sizes_does_not_decide_what_is_assumed_of_larger_ones() -> None:
    observed = [(1, 1000), (30, 3800), (31, 4000), (32, 5000)]
    assert curve_of(observed).at(64) == 2 * 5000  # proportional, and not 1000 more for each request


def test_steps_of_a_padding_model_are_seen() -> None:
    def padded_us(size: int) -> int:
        return 1000 * (1 << (size - 1).bit_length())

    curve = curve_of([(size, padded_us(size)) for size in bursts(64, 3)])
    assert [curve.at(size) for size in range(1, 65)] == [padded_us(size) for size in range(1, 65)]


@pytest.mark.parametrize("observed", [[(8, 1000)], [(1, 1000), (2, 1100), (4, 1700)], [(9, 100), (10, 150)]])
def test_sizes_that_were_not_observed_take_what_the_batcher_assumes(observed: list[tuple[int, int]]) -> None:
    curve, learned = curve_of(observed), LatencyModel()
    for size, time_us in observed * 2:
        learned.observe(size, time_us)
    for size in (1, 4, 8, 16, 32):
        assert learned.of(size) == round(curve.at(size))


def test_spread_is_relative_to_the_median_of_each_size() -> None:
    assert set(spread_of(SQUARE, curve_of(SQUARE))) == {1.0}
    assert set(spread_of(SQUARE, Curve([1.0], [1.0]))) == {1.0}  # however bad the curve is
    noisy = [
        (size, time_us * (3 if index % 5 == 0 else 1)) for index, (size, time_us) in enumerate(sorted(SQUARE))
    ]
    assert set(spread_of(noisy, curve_of(noisy))) == {1.0, 3.0}


def test_spread_ignores_a_single_pause() -> None:
    assert spread_of([(1, 1000)] * 9 + [(1, 50_000)], Curve([1.0], [1000.0])) == (1.0,) * 9
    assert spread_of([(1, 1100), (1, 900)] * 2, Curve([1.0], [1000.0])) == (0.9, 0.9, 1.1)
    assert spread_of([(1, 900)], Curve([1.0], [1000.0])) == (1.0,)


def test_line_through_a_line_is_that_line() -> None:
    curve = curve_of([(size, 5000 + 50 * size) for size in bursts(64, 3)])
    assert line_through(curve) == pytest.approx((5000, 50))
    assert line_through(curve).at(10) == pytest.approx(5500)


def test_line_has_no_negative_part() -> None:
    assert line_through(Curve([1.0, 8.0], [10.0, 800.0])).intercept_us == 0
    assert line_through(Curve([8.0], [800.0])) == (800.0, 0.0)
