"""The latency model: the monotone curve that was seen, in spite of outliers, changes of speed and drift."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_batcher.core.learned.curve import Curve, non_decreasing
from carpool_batcher.core.learned.latency import (
    CHANGE_OBSERVATIONS_MIN,
    FORGOTTEN_AFTER_OBSERVATIONS,
    REFIT_INTERVAL_MIN,
    UNASKED_REFIT_INTERVAL,
    LatencyModel,
)
from carpool_batcher.core.learned.size_class import CLASS_OBSERVATIONS_MAX, SCALE_MAX, size_class

SIZES = (1, 4, 8, 16, 32)
Shape = Callable[[int], float]


def line(size: int) -> float:
    return 5000 + 50 * size


def steep(size: int) -> float:
    return 2000 + 1000 * size


def logarithm(size: int) -> float:
    return 100 + 1000 * math.log(size + 1)


def steps(size: int) -> float:
    """Batches are padded to 8, 16, 32, and so on."""
    return 4000 + 250 * max(8, 1 << (size - 1).bit_length())


def learned(observed: Iterable[tuple[int, float]]) -> LatencyModel:
    latency = LatencyModel()
    for size, took_us in observed:
        latency.observe(size, max(1, int(took_us)))
    return latency


def seen(
    shape: Shape, sizes: Sequence[int], number: int, noise: float = 0.0, outliers: float = 0.0, seed: int = 1
) -> list[tuple[int, float]]:
    """Batches of random sizes. An outlier takes 3 to 50 times as long."""
    chance = random.Random(seed)
    observed = []
    for _ in range(number):
        size = chance.choice(sizes)
        slowness = chance.choice((3, 10, 50)) if chance.random() < outliers else 1
        observed.append((size, slowness * shape(size) * chance.gauss(1, noise)))
    return observed


def largest_error(latency: LatencyModel, shape: Shape, sizes: Iterable[int]) -> float:
    return max(abs(latency.of(size) / shape(size) - 1) for size in sizes)


# --- classes of sizes, isotonic regression -----------------------------------------------------------------


def test_classes_end_where_a_padding_model_has_steps() -> None:
    assert [size_class(size) for size in range(1, 33)] == list(range(32))
    for multiple, size_max in ((8, 128), (16, 256), (32, 512)):
        for step in range(multiple, size_max + 1, multiple):
            assert size_class(step) < size_class(step + 1)
    for size, larger in pairwise(range(1, 5000)):
        assert size_class(larger) - size_class(size) in (0, 1)
        if size > 32:  # all sizes of a class are within a sixteenth
            assert size_class(size) < size_class(size + size // 16 + 1)


def test_falling_values_get_their_weighted_median() -> None:
    assert non_decreasing([1, 3, 2, 4], [1, 1, 1, 1]) == [1, 2, 2, 4]
    assert non_decreasing([1, 3, 2, 4], [1, 3, 1, 1]) == [1, 3, 3, 4]
    assert non_decreasing([9, 9, 1], [1, 1, 5]) == [1, 1, 1]
    assert non_decreasing([5, 4, 3, 2, 1], [1] * 5) == [3] * 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=6))
def test_no_non_decreasing_values_are_nearer(weighted: list[tuple[int, int]]) -> None:
    """Against all non-decreasing combinations of the values themselves, among which the nearest one is."""
    values, weights = [value for value, _ in weighted], [weight for _, weight in weighted]

    def distance(others: Sequence[float]) -> float:
        return sum(
            weight * abs(value - other) for value, other, weight in zip(values, others, weights, strict=True)
        )

    nearest = dict.fromkeys(sorted(set(values)), 0.0)  # distance so far, by the last value
    for value, weight in weighted:
        best = math.inf
        for last, so_far in nearest.items():
            best = min(best, so_far)
            nearest[last] = best + weight * abs(value - last)
    found = non_decreasing(values, weights)
    assert list(found) == sorted(found)
    assert distance(found) == min(nearest.values())


# --- what is seen is what is learned -----------------------------------------------------------------------


def test_nothing_is_known_before_the_first_observation() -> None:
    latency = LatencyModel()
    assert not latency.known
    assert latency.curve is None
    assert (latency.of(8), latency.at_most(8)) == (0, 0)


@pytest.mark.parametrize("shape", [line, steep, logarithm, steps])
def test_any_monotone_shape_is_learned_exactly(shape: Shape) -> None:
    latency = learned(seen(shape, range(1, 257), 2000))
    assert largest_error(latency, shape, range(1, 257)) < 0.002
    assert all(latency.at_most(size) <= 1.01 * shape(size) + 2 for size in range(1, 257))


@pytest.mark.parametrize("shape", [line, steep, logarithm])
def test_smooth_shapes_are_learned_from_few_sizes(shape: Shape) -> None:
    latency = learned(seen(shape, (1, 2, 4, 8, 16, 32, 64, 128, 256), 60))
    assert largest_error(latency, shape, range(1, 257)) < 0.07


def test_steps_are_learned_from_the_sizes_beside_them() -> None:
    sizes = [size for end in (8, 16, 32, 64) for size in (end, end + 1)]
    latency = learned(seen(steps, sizes, 60))
    assert largest_error(latency, steps, range(1, 66)) < 0.002


def test_step_between_sizes_is_found_by_trying_sizes_that_seem_fast() -> None:
    """As `deferred` does. Were the rise spread over the sizes between, 15 and 16 would seem slow for ever."""
    latency = learned([(size, steps(size)) for size in (8, 9, 10, 30, 31)] * 3)
    tried = []
    for _ in range(5):
        tried.append(max(size for size in range(1, 32) if latency.of(size) <= 1.01 * steps(16)))
        for _ in range(2):
            latency.observe(tried[-1], int(steps(tried[-1])))
    assert tried[0] == 20
    assert tried[-1] == 16
    assert latency.of(16) < 1.01 * steps(16)
    assert latency.of(17) > 1.2 * steps(16)


@pytest.mark.parametrize("shape", [line, steep, logarithm])
def test_smooth_shapes_have_no_steps(shape: Shape) -> None:
    latency = learned(seen(shape, (1, 2, 3, 20, 21, 40, 41), 100, noise=0.01))
    assert all(latency.of(size + 1) < 1.12 * latency.of(size) + 1010 for size in range(1, 41))


@pytest.mark.parametrize("shape", [line, steep, logarithm, steps])
def test_noise_and_outliers_do_not_change_the_curve(shape: Shape) -> None:
    latency = learned(seen(shape, range(1, 65), 1500, noise=0.05, outliers=0.1))
    assert largest_error(latency, shape, range(1, 65)) < 0.12
    assert all(latency.at_most(size) < 1.5 * shape(size) for size in range(1, 65))


def test_single_size_is_extrapolated_flat_downwards_and_little_upwards() -> None:
    latency = learned([(8, 1000)] * 20)
    assert (latency.of(1), latency.of(8)) == (1000, 1000)
    assert latency.of(16) == 1250  # a quarter of proportional growth
    latency.observe(16, 1100)  # and after one batch it is known
    assert latency.of(16) == 1100


def test_growth_of_the_last_octave_continues() -> None:
    latency = learned([(1, 2000), (11, 3000)] * 2)
    assert latency.of(6) == 2500
    assert latency.of(31) == 5000
    assert learned([(size, steps(size)) for size in (4, 8, 9, 16)] * 2).of(32) == steps(32)


def test_growth_beyond_the_largest_size_is_at_most_proportional() -> None:
    latency = learned([(10, 100), (20, 1000)] * 2)
    assert latency.of(40) == 2000


def test_larger_batches_are_never_faster() -> None:
    latency = learned([(1, 9000), (8, 5000), (16, 3000)] * 4)
    assert latency.of(1) == latency.of(16) == 5000


def test_shown_sizes_are_the_ends_and_powers_of_two_between_them() -> None:
    assert Curve([3.0, 20.0], [30.0, 200.0]).shown == [(3, 30), (4, 40), (8, 80), (16, 160), (20, 200)]
    assert Curve([8.0], [90.0]).shown == [(8, 90)]
    assert Curve([1.0, 2.0], [9.0, 10.0]).shown == [(1, 9), (2, 10)]


def test_both_sides_of_each_step_are_shown() -> None:
    """Whoever draws straight lines between what is shown gets the steps, too."""
    curve = learned((size, steps(size)) for size in range(1, 33) for _ in range(8)).curve
    assert curve is not None
    shown = Curve(*zip(*curve.shown, strict=True))
    for size in range(1, 33):
        assert shown.at(size) == pytest.approx(curve.at(size), rel=0.05)
    assert {size for size, _ in curve.shown} >= {8, 9, 16, 17, 32}


def test_what_is_shown_of_a_noisy_curve_is_short() -> None:
    sizes = range(1, 200)
    curve = Curve(sizes, [1000.0 + 1000 * (size // 2) ** 2 for size in sizes])
    assert len(curve.shown) <= 24
    assert curve.shown[-1][0] == 199


def test_curve_is_not_shown_beyond_the_largest_size_seen() -> None:
    curve = learned(seen(line, (1, 100), 20)).curve
    assert curve is not None
    assert curve.shown[-1][0] == 100


observations = st.lists(st.tuples(st.integers(1, 1024), st.integers(1, 10_000_000)), min_size=1, max_size=80)


@settings(deadline=None)
@given(observations)
def test_latency_is_monotone_for_any_observations(observed: list[tuple[int, int]]) -> None:
    latency = learned(observed)
    sizes = (0, 1, 2, 8, 100, 101, 102, 1024, 5000)
    assert latency.known
    assert [latency.of(size) for size in sizes] == sorted(latency.of(size) for size in sizes)
    assert [latency.at_most(size) for size in sizes] == sorted(latency.at_most(size) for size in sizes)
    assert all(0 < latency.of(size) <= latency.at_most(size) for size in sizes)


# --- doubt -------------------------------------------------------------------------------------------------


def test_about_a_tenth_of_observations_exceeds_at_most() -> None:
    chance = random.Random(2)
    latency = learned((size, line(size) + chance.randrange(2000)) for size in SIZES * 20)
    longer = sum(line(size) + chance.randrange(2000) > latency.at_most(size) for size in SIZES * 100)
    assert 20 <= longer <= 120


def test_each_size_has_its_own_margin() -> None:
    chance = random.Random(3)
    latency = learned(
        (size, line(size) * (chance.uniform(0.9, 1.1) if size == 1 else chance.uniform(0.7, 1.3)))
        for size in (1, 8) * 20
    )
    assert 1.02 < latency.at_most(1) / latency.of(1) < 1.15
    assert 1.15 < latency.at_most(8) / latency.of(8) < 1.6


def test_doubt_is_greater_where_few_were_seen() -> None:
    chance = random.Random(4)
    latency = learned([(size, line(size) * chance.uniform(0.9, 1.1)) for size in (1, 4) * 20] + [(8, 5400)])
    margins = [latency.at_most(size) / latency.of(size) - 1 for size in (1, 4, 8)]
    assert margins[2] > 1.3 * max(margins[:2]) > 0.05


def test_larger_batches_are_never_doubted_less() -> None:
    chance = random.Random(5)
    latency = learned(
        (size, 5000 * chance.uniform(0.7, 1.3) if size == 1 else 5100) for size in (1, 2, 8) * 20
    )
    assert latency.at_most(8) == latency.at_most(2) == latency.at_most(1) > 5500


def test_a_pause_does_not_widen_the_margin() -> None:
    latency = learned([*seen(line, SIZES, 60, noise=0.02), (16, 400_000)])
    assert latency.at_most(16) < 1.15 * line(16)


# --- what must not be learned ------------------------------------------------------------------------------


def test_cold_start_is_forgotten() -> None:
    latency = learned([(1, 900_000), (1, 300_000), *seen(line, SIZES, 40)])
    assert largest_error(latency, line, SIZES) < 0.02


def test_cold_first_batch_is_forgotten_after_one_more() -> None:
    for size in (1, 2, 8):
        assert learned([(1, 900_000), (size, 5000)]).of(1) == 5000


def test_first_slow_batch_of_the_largest_size_must_be_confirmed() -> None:
    latency = learned([*[(1, 5000), (2, 5100)] * 5, (16, 90_000)])
    assert latency.of(16) < 15_000
    latency.observe(16, 89_000)
    assert latency.of(16) == 89_000


def test_outlier_of_a_rare_size_does_not_slow_down_larger_ones() -> None:
    latency = learned([*[(1, 5050), (32, 6600)] * 8, (16, 300_000)])
    assert latency.of(16) == 6600
    assert latency.of(32) == 6600


def test_largest_size_that_seemed_slow_is_forgotten_and_tried_again() -> None:
    """Otherwise `deferred` would never dispatch such a batch, and never learn that it was wrong."""
    latency = learned([*seen(line, (1, 8, 16), 60), (32, 60_000), (32, 60_000)])
    assert latency.of(32) == 60_000
    for size, took_us in seen(line, (1, 8, 16), FORGOTTEN_AFTER_OBSERVATIONS + 2 * REFIT_INTERVAL_MIN):
        latency.observe(size, int(took_us))
    assert latency.of(32) == line(32)


@pytest.mark.parametrize("shape", [line, steep, logarithm, steps])
def test_sizes_rarely_seen_are_not_forgotten(shape: Shape) -> None:
    latency = learned([*seen(shape, (1, 8, 16, 17, 64, 128), 100), *seen(shape, (4,), 5000, noise=0.02)])
    assert largest_error(latency, shape, (1, 8, 16, 17, 64, 128)) < 0.03


# --- change of speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [line, logarithm, steps])
@pytest.mark.parametrize("factor", [0.2, 1 / 3, 0.5, 2, 3, 10])
def test_change_of_speed_is_learned_soon_for_all_sizes(shape: Shape, factor: float) -> None:
    latency = learned(seen(shape, range(1, 65), 600, noise=0.03))
    for size, took_us in seen(shape, (4, 11, 30), 12, noise=0.03, seed=2):
        latency.observe(size, int(factor * took_us))
    assert largest_error(latency, lambda size: factor * shape(size), range(1, 65)) < 0.15


def test_change_of_speed_of_a_single_size() -> None:
    latency = learned([(1, 5000)] * 50 + [(1, 15_000)] * 10)
    assert latency.of(1) == 15_000


@pytest.mark.parametrize("already", range(REFIT_INTERVAL_MIN))
def test_change_of_speed_is_seen_whenever_the_curve_is_fitted(already: int) -> None:
    """A fit in the middle of the change would make it look like the past."""
    latency = learned([(1, 5000), (32, 6600)] * 20)
    latency.of(1)
    for number in range(already + 8):
        latency.observe(1, 5000 if number < already else 15_000)
        latency.of(1)
    assert latency.of(32) == pytest.approx(3 * 6600, rel=0.01)


def test_unusual_times_of_sizes_that_are_not_known_are_no_change_of_speed() -> None:
    latency = learned([*seen(line, (1, 2, 3), 60), *[(200 + at, 60_000) for at in range(0, 56, 8)]])
    assert largest_error(latency, line, (1, 2, 3)) < 0.001


def test_alternating_slow_and_fast_batches_are_no_change_of_speed() -> None:
    """Only several in a row are a change; otherwise the model would be scaled again and again."""
    latency = learned(seen(line, SIZES, 64))
    with mock.patch.object(latency, "_follow_change") as change:
        for size, took_us in seen(line, SIZES, 40):
            latency.observe(size, int(2 * took_us))
            latency.observe(size, int(took_us))
    assert not change.called


def test_repeated_changes_of_speed_cancel_out() -> None:
    """A slowdown and a speedup by the same ratio are detected alike."""
    latency = learned(seen(line, SIZES, 60))
    for turn in range(40):
        for _ in range(20):
            latency.observe(32, int((1.5 if turn % 2 == 0 else 1.0) * line(32)))
    assert largest_error(latency, line, SIZES) < 0.1


@pytest.mark.parametrize("sizes", [(32,), range(1, 32)])
@pytest.mark.parametrize("factor", [1.0003, 0.9997])
def test_drift_applies_to_sizes_not_observed_since(sizes: Sequence[int], factor: float) -> None:
    """A twentieth in 160 batches is too slow for a change. The curve still follows, also for other sizes."""
    latency, speed = learned(seen(line, (1, 8, 32, 64), 60)), 1.0
    for size, took_us in seen(line, sizes, 4000, noise=0.02):
        speed *= factor
        latency.observe(size, int(speed * took_us))
        latency.of(size)
    assert largest_error(latency, lambda size: speed * line(size), (1, 8, 31, 64)) < 0.2


@pytest.mark.parametrize("sizes", [(32,), (1, 2, 3, 4), range(1, 32)])
def test_noise_is_not_mistaken_for_drift(sizes: Sequence[int]) -> None:
    latency = learned(seen(line, (1, 8, 64), 60))
    for size, took_us in seen(line, sizes, 10_000, noise=0.05):
        latency.observe(size, int(took_us))
        latency.of(size)
    assert latency.of(64) == pytest.approx(line(64), rel=0.1)


@pytest.mark.parametrize("slow", [1.2, 0.8])
def test_times_that_are_observed_more_often_while_they_rise_are_not_mistaken_for_drift(slow: float) -> None:
    """A machine that is busy now and then makes batches small and slow: then one size is seen all the time
    while it becomes slower, and another one while the first becomes quicker again."""
    latency, busy = learned(seen(line, (1, 2, 8, 64), 60)), False
    for number in range(4000):
        busy = number % 100 < 50
        size = 1 if busy == (number % 10 > 0) else 2
        latency.observe(size, int((slow if busy else 1.0) * line(size)))
        latency.of(size)
    assert latency.of(64) == pytest.approx(line(64), rel=0.25)
    assert latency.of(8) == pytest.approx(line(8), rel=0.25)


def test_noise_of_neighbouring_sizes_is_not_mistaken_for_drift() -> None:
    """Sizes from 65 to 80 share four classes."""
    latency = learned(seen(lambda size: 50 * size, (1, 8, *range(65, 81)), 200))
    for number, (size, took_us) in enumerate(seen(lambda size: 50 * size, range(65, 81), 6000)):
        latency.observe(size, int(took_us * (1.2 if number % 60 < 30 else 1)))
        latency.of(size)
    assert latency.of(1) == pytest.approx(50, rel=0.3)


def test_size_that_is_new_continues_the_speed_that_others_follow() -> None:
    latency = learned(seen(line, (1, 64), 60))
    for speed, size, number in ((3, 1, 60), (3, 2, 300), (1, 2, 60), (1, 3, 300)):
        for _ in range(number):
            latency.observe(size, int(speed * line(size)))
            latency.of(size)
        assert latency.of(64) == pytest.approx(speed * line(64), rel=0.02), (speed, size)


@pytest.mark.parametrize("slow_ratio", [0.3, 0.5])
def test_speed_that_changes_for_ever_can_be_followed(slow_ratio: float) -> None:
    """The ratios of all changes are multiplied. They do not cancel out where batches are slow at random."""
    chance, latency = random.Random(0), LatencyModel()
    for _ in range(20_000):
        latency.observe(8, 20_000 if chance.random() < slow_ratio else 1000)
        latency.of(8)
        assert 1 / SCALE_MAX / 100 < latency._classes[size_class(8)].scale < 100 * SCALE_MAX
    assert latency.of(8) in (1000, 20_000)


def test_nonlinear_latency_is_not_mistaken_for_drift() -> None:
    latency = learned([(size, int(1000 * size**1.3)) for size in (1, 2, 4, 8, 16) * 8])
    for _ in range(1000):
        latency.observe(16, int(1000 * 16**1.3))
    assert [latency.of(1), latency.of(16)] == [1000, int(1000 * 16**1.3)]


# --- cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3, 4), range(1, 257)])
def test_curve_is_fitted_rarely_and_only_when_somebody_asks(sizes: Sequence[int]) -> None:
    latency = learned(seen(line, sizes, 3000, noise=0.05))
    with mock.patch.object(latency, "_curve_of", wraps=latency._curve_of) as fits:
        latency.of(1)
        fits.reset_mock()
        for size, took_us in seen(line, sizes, UNASKED_REFIT_INTERVAL - 1, noise=0.05):
            latency.observe(size, int(took_us))
        assert not fits.called
        latency.observe(1, int(line(1)))
        assert fits.call_count == 1
        fits.reset_mock()
        interval = max(REFIT_INTERVAL_MIN, len(latency._classes))
        for size, took_us in seen(line, sizes, 10 * interval, noise=0.05):
            latency.observe(size, int(took_us))
            for asked in range(1, 40):
                latency.at_most(asked)
        assert 9 <= fits.call_count <= 11


def test_memory_is_bounded() -> None:
    latency = learned(seen(line, range(1, 1025), 20_000, noise=0.05))
    assert len(latency._classes) == 32 + 5 * 16
    assert max(map(len, latency._classes.values())) == CLASS_OBSERVATIONS_MAX
    assert latency._changed <= set(latency._classes.values())


def test_observations_that_nobody_asks_for_are_bounded_too() -> None:
    latency = learned(seen(line, SIZES, 10_000))
    assert sum(map(len, latency._classes.values())) == CLASS_OBSERVATIONS_MAX * len(SIZES)
    assert len(latency._changed) == len(SIZES)
    assert latency._latest.maxlen == CHANGE_OBSERVATIONS_MIN
