"""How long batches are in transit, learned by the size of the batch."""

from __future__ import annotations

from carpool_batcher.core.learned.transit import (
    FORGOTTEN_AFTER_BATCHES,
    LONGEST_TRANSIT_RATIO_MAX,
    MAGNITUDES,
    PAUSE_US,
    TIMES_MAX,
    Transit,
    TransitBySize,
    magnitude,
)

SMALL, MIDDLE, LARGE = 2, 10, 40


def transit_of(small_us: int, large_us: int, delivery_us: int = 0) -> Transit:
    """After many small batches, and a few large ones before."""
    transit = Transit()
    for _ in range(20):
        transit.observe_round_trip(LARGE, large_us, 0, 0)
    for _ in range(TIMES_MAX):
        transit.observe_round_trip(SMALL, small_us, 0, 0)
        transit.observe_delivery(delivery_us)
    return transit


def at_most_us(transit: Transit, size: int) -> int:
    return transit.by_size.at_most_us[magnitude(size)]


def test_magnitudes_grow_by_four_and_have_an_end() -> None:
    sizes = (1, 3, 4, 15, 16, 63, 64, 255, 256, 10**9)
    assert [magnitude(size) for size in sizes] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 11]


def test_large_batches_are_remembered_while_there_are_only_small_ones() -> None:
    transit = transit_of(1000, 4000, delivery_us=500)
    assert transit.at_most_us == 1500, "of any size, only the latest count"
    assert at_most_us(transit, SMALL) == 1500
    assert at_most_us(transit, LARGE) == 4500


def test_size_that_is_not_known_takes_as_long_as_a_smaller_one_that_is() -> None:
    transit = transit_of(1000, 4000)
    transit.observe_round_trip(MIDDLE, 9000, 0, 0)  # too few
    assert at_most_us(transit, MIDDLE) == 1000
    assert at_most_us(transit, 1_000_000) == 4000


def test_no_size_is_faster_than_a_smaller_one() -> None:
    assert at_most_us(transit_of(3000, 1000), LARGE) == 3000


def test_until_a_size_is_known_all_batches_count() -> None:
    transit = Transit()
    assert transit.by_size == TransitBySize(*[[0] * MAGNITUDES] * 3)
    for size in (SMALL, MIDDLE, LARGE):
        for _ in range(3):
            transit.observe_round_trip(size, 1000, 0, 0)
    transit.observe_delivery(200)
    assert set(transit.by_size.at_most_us) == {1200}


def test_sizes_below_the_smallest_that_is_known_take_as_long_as_that() -> None:
    transit = Transit()
    for _ in range(10):
        transit.observe_round_trip(LARGE, 4000, 0, 0)
    assert at_most_us(transit, SMALL) == 4000


def test_longest_ways_are_limited_for_each_size() -> None:
    transit = transit_of(1000, 4000)
    for _ in range(3):
        transit.observe_round_trip(LARGE, 90_000, 0, 0)
        transit.observe_round_trip(SMALL, 1500, 0, 0)
    longest_us = transit.by_size.longest_us
    assert longest_us[magnitude(SMALL)] == 1500
    assert longest_us[magnitude(LARGE)] == LONGEST_TRANSIT_RATIO_MAX * at_most_us(transit, LARGE)


def test_magnitude_that_does_not_occur_for_long_is_forgotten() -> None:
    """Given large batches that were slow once, expect them to be tried again."""
    transit = Transit()
    for _ in range(TIMES_MAX):
        transit.observe_round_trip(LARGE, 9000, 0, 0)
    for _ in range(FORGOTTEN_AFTER_BATCHES - 1):
        transit.observe_round_trip(SMALL, 1000, 0, 0)
    assert at_most_us(transit, LARGE) == 9000
    transit.observe_round_trip(SMALL, 1000, 0, 0)
    assert at_most_us(transit, LARGE) == 1000
    for _ in range(TIMES_MAX):
        transit.observe_round_trip(LARGE, 2000, 0, 0)
    assert at_most_us(transit, LARGE) == 2000


def test_small_batches_that_were_slow_once_do_not_delay_large_ones_for_ever() -> None:
    transit = Transit()
    for _ in range(TIMES_MAX):
        transit.observe_round_trip(SMALL, 9000, 0, 0)
    for _ in range(FORGOTTEN_AFTER_BATCHES):
        transit.observe_round_trip(LARGE, 1000, 0, 0)
    assert at_most_us(transit, LARGE) == 1000


def after_a_pause(transit: Transit, size: int, round_trip_us: int, pause_us: int = 2 * PAUSE_US) -> None:
    dispatched_us = transit._settled_us + pause_us
    transit.observe_round_trip(size, round_trip_us, dispatched_us, dispatched_us + round_trip_us)


def test_two_quick_batches_after_pauses_show_that_what_was_learned_is_outdated() -> None:
    transit = transit_of(9000, 20_000, delivery_us=5000)
    for _ in range(3):
        after_a_pause(transit, SMALL, 1000)
        after_a_pause(transit, SMALL, 5000)
    assert at_most_us(transit, SMALL) == 14_000, "one in two was not quick"
    for _ in range(3):
        after_a_pause(transit, SMALL, 1000, pause_us=PAUSE_US)
        after_a_pause(transit, SMALL, -1)
        after_a_pause(transit, MIDDLE, 1000)
    assert at_most_us(transit, SMALL) == 14_000, "no pause, clocks that differ, and a size that is not known"
    after_a_pause(transit, SMALL, 1000)
    after_a_pause(transit, SMALL, 2000)
    assert {at_most_us(transit, size) for size in (SMALL, MIDDLE, LARGE)} == {2000}
    assert transit.usual_us == 2000


def test_a_small_batch_after_a_pause_says_nothing_about_large_ones() -> None:
    transit = transit_of(1000, 4000)
    for _ in range(TIMES_MAX):
        transit.observe_round_trip(LARGE, 4000, 0, 0)
    for _ in range(10):
        after_a_pause(transit, SMALL, 1000)
    assert at_most_us(transit, LARGE) == 4000
