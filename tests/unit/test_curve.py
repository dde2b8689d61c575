"""l(n) as it was measured: right at what was seen, and reasonable elsewhere."""

from __future__ import annotations

import math
import random

import pytest

from carpool_batcher.core.latency import Line
from carpool_cli.tuning.calibrate import bursts
from carpool_cli.tuning.curve import at, curve_of, furthest_off, learned, medians, spread_of


def square_us(size: int) -> int:
    """The README's `square`: a logarithm."""
    return int(1000 * math.log(size + 1)) + 100


SQUARE = [(size, square_us(size)) for size in bursts(200, 5)]


@pytest.mark.parametrize("size", range(1, 260, 7))
def test_a_curve_is_not_made_a_line(size: int) -> None:
    assert at(curve_of(SQUARE), size) == pytest.approx(square_us(size), rel=0.06)


def test_what_was_measured_is_what_is_there() -> None:
    for size, took_us in SQUARE:
        assert at(curve_of(SQUARE), size) == took_us


def test_the_median_of_a_size_does_not_mind_a_pause() -> None:
    seen = [(1, 1000), (1, 1000), (1, 90_000), (8, 2000), (8, 2000), (8, 2100)]
    assert medians(seen) == [(1.0, 1000.0), (8.0, 2000.0)]


def test_a_larger_batch_is_never_faster() -> None:
    # The second and the third size fall below the first: they are one level, which their weights make.
    seen = [(1, 1000), (4, 3000), (16, 1000), (16, 1000), (16, 1000), (64, 4000)]
    assert medians(seen) == [(1.0, 1000.0), (4.0, 1500.0), (16.0, 1500.0), (64.0, 4000.0)]


def test_sizes_that_were_seen_by_chance_make_no_steps() -> None:
    chance = random.Random(1)
    seen = []
    for _ in range(64):
        size = chance.randint(20, 200)
        seen.append((size, int((5000 + 50 * size) * chance.uniform(0.9, 1.1))))
    curve = curve_of(seen)
    for size in (1, 20, 50, 100, 200, 300):
        assert at(curve, size) == pytest.approx(5000 + 50 * size, rel=0.15)


def test_beyond_the_largest_the_last_slope_goes_on() -> None:
    assert at(curve_of([(1, 1000), (2, 1100), (4, 1700)]), 8) == 1700 + 4 * 300


def test_of_one_size_the_batcher_s_guess_is_taken() -> None:
    curve = curve_of([(8, 1000)])
    for size in (1, 4, 8, 16, 32):
        assert at(curve, size) == learned([(8, 1000)]).at(size)


def test_scatter_is_that_of_a_size_and_not_of_a_law() -> None:
    assert set(spread_of(SQUARE, curve_of(SQUARE))) == {1.0}
    assert set(spread_of(SQUARE, [(1.0, 1.0)])) == {1.0}  # however bad the curve is
    shaky = [(size, took_us * (3 if at % 5 == 0 else 1)) for at, (size, took_us) in enumerate(sorted(SQUARE))]
    assert set(spread_of(shaky, curve_of(shaky))) == {1.0, 3.0}


def test_a_spread_does_not_mind_a_single_pause() -> None:
    assert spread_of([(1, 1000)] * 9 + [(1, 50_000)], [(1.0, 1000.0)]) == (1.0,) * 9
    assert spread_of([(1, 1100), (1, 900)] * 2, [(1.0, 1000.0)]) == (0.9, 0.9, 1.1)
    assert spread_of([(1, 900)], [(1.0, 1000.0)]) == (1.0,)


def test_a_line_is_off_where_it_is_off_by_most() -> None:
    curve = [(1.0, 1000.0), (16.0, 4000.0), (64.0, 5000.0)]
    assert furthest_off(Line(2000.0, 50.0), curve, 64) == (1, 2050 / 1000 - 1)
    assert furthest_off(Line(1000.0, 62.5), curve, 64) == (16, -0.5)
    assert furthest_off(Line(1000.0, 62.5), curve, 8)[0] == 8  # larger ones do not come


def test_the_batcher_s_line_through_a_line_is_that_line() -> None:
    seen = [(size, 5000 + 50 * size) for size in bursts(64, 3)]
    assert learned(seen)[:2] == pytest.approx((5000, 50))
    assert abs(furthest_off(learned(seen), curve_of(seen), 64)[1]) < 0.001
