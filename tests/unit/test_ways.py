"""How long batches are on their ways, learned by the size of the batch."""

from __future__ import annotations

from carpool_batcher.core.ways import (
    FORGOTTEN_AFTER_BATCHES,
    LONGEST_WAYS_RATIO_MAX,
    MAGNITUDES,
    PAUSE_US,
    TIMES_MAX,
    Ways,
    WaysBySize,
    magnitude,
)

SMALL, MIDDLE, LARGE = 2, 10, 40


def ways_of(small_us: int, large_us: int, delivery_us: int = 0) -> Ways:
    """After many small batches, and a few large ones before."""
    ways = Ways()
    for _ in range(20):
        ways.observe_round_trip(LARGE, large_us, 0, 0)
    for _ in range(TIMES_MAX):
        ways.observe_round_trip(SMALL, small_us, 0, 0)
        ways.observe_delivery(delivery_us)
    return ways


def at_most_us(ways: Ways, size: int) -> int:
    return ways.by_size.at_most_us[magnitude(size)]


def test_magnitudes_grow_by_four_and_have_an_end() -> None:
    sizes = (1, 3, 4, 15, 16, 63, 64, 255, 256, 10**9)
    assert [magnitude(size) for size in sizes] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 11]


def test_large_batches_are_remembered_while_there_are_only_small_ones() -> None:
    ways = ways_of(1000, 4000, delivery_us=500)
    assert ways.at_most_us == 1500, "of any size, only the latest count"
    assert at_most_us(ways, SMALL) == 1500
    assert at_most_us(ways, LARGE) == 4500


def test_size_that_is_not_known_takes_as_long_as_a_smaller_one_that_is() -> None:
    ways = ways_of(1000, 4000)
    ways.observe_round_trip(MIDDLE, 9000, 0, 0)  # too few
    assert at_most_us(ways, MIDDLE) == 1000
    assert at_most_us(ways, 1_000_000) == 4000


def test_no_size_is_faster_than_a_smaller_one() -> None:
    assert at_most_us(ways_of(3000, 1000), LARGE) == 3000


def test_until_a_size_is_known_all_batches_count() -> None:
    ways = Ways()
    assert ways.by_size == WaysBySize(*[[0] * MAGNITUDES] * 3)
    for size in (SMALL, MIDDLE, LARGE):
        for _ in range(3):
            ways.observe_round_trip(size, 1000, 0, 0)
    ways.observe_delivery(200)
    assert set(ways.by_size.at_most_us) == {1200}


def test_sizes_below_the_smallest_that_is_known_take_as_long_as_that() -> None:
    ways = Ways()
    for _ in range(10):
        ways.observe_round_trip(LARGE, 4000, 0, 0)
    assert at_most_us(ways, SMALL) == 4000


def test_longest_ways_are_limited_for_each_size() -> None:
    ways = ways_of(1000, 4000)
    for _ in range(3):
        ways.observe_round_trip(LARGE, 90_000, 0, 0)
        ways.observe_round_trip(SMALL, 1500, 0, 0)
    longest_us = ways.by_size.longest_us
    assert longest_us[magnitude(SMALL)] == 1500
    assert longest_us[magnitude(LARGE)] == LONGEST_WAYS_RATIO_MAX * at_most_us(ways, LARGE)


def test_magnitude_that_does_not_occur_for_long_is_forgotten() -> None:
    """Given large batches that were slow once, expect them to be tried again."""
    ways = Ways()
    for _ in range(TIMES_MAX):
        ways.observe_round_trip(LARGE, 9000, 0, 0)
    for _ in range(FORGOTTEN_AFTER_BATCHES - 1):
        ways.observe_round_trip(SMALL, 1000, 0, 0)
    assert at_most_us(ways, LARGE) == 9000
    ways.observe_round_trip(SMALL, 1000, 0, 0)
    assert at_most_us(ways, LARGE) == 1000
    for _ in range(TIMES_MAX):
        ways.observe_round_trip(LARGE, 2000, 0, 0)
    assert at_most_us(ways, LARGE) == 2000


def test_small_batches_that_were_slow_once_do_not_delay_large_ones_for_ever() -> None:
    ways = Ways()
    for _ in range(TIMES_MAX):
        ways.observe_round_trip(SMALL, 9000, 0, 0)
    for _ in range(FORGOTTEN_AFTER_BATCHES):
        ways.observe_round_trip(LARGE, 1000, 0, 0)
    assert at_most_us(ways, LARGE) == 1000


def after_a_pause(ways: Ways, size: int, round_trip_us: int, pause_us: int = 2 * PAUSE_US) -> None:
    dispatched_us = ways._settled_us + pause_us
    ways.observe_round_trip(size, round_trip_us, dispatched_us, dispatched_us + round_trip_us)


def test_two_quick_batches_after_pauses_show_that_what_was_learned_is_outdated() -> None:
    ways = ways_of(9000, 20_000, delivery_us=5000)
    for _ in range(3):
        after_a_pause(ways, SMALL, 1000)
        after_a_pause(ways, SMALL, 5000)
    assert at_most_us(ways, SMALL) == 14_000, "one in two was not quick"
    for _ in range(3):
        after_a_pause(ways, SMALL, 1000, pause_us=PAUSE_US)
        after_a_pause(ways, SMALL, -1)
        after_a_pause(ways, MIDDLE, 1000)
    assert at_most_us(ways, SMALL) == 14_000, "no pause, clocks that differ, and a size that is not known"
    after_a_pause(ways, SMALL, 1000)
    after_a_pause(ways, SMALL, 2000)
    assert {at_most_us(ways, size) for size in (SMALL, MIDDLE, LARGE)} == {2000}
    assert ways.usual_us == 2000


def test_a_small_batch_after_a_pause_says_nothing_about_large_ones() -> None:
    ways = ways_of(1000, 4000)
    for _ in range(TIMES_MAX):
        ways.observe_round_trip(LARGE, 4000, 0, 0)
    for _ in range(10):
        after_a_pause(ways, SMALL, 1000)
    assert at_most_us(ways, LARGE) == 4000
