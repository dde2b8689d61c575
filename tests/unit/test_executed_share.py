"""How many requests of a batch are executed, where some are refused by `validate`."""

from __future__ import annotations

from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.executed_share import BATCHES_MAX, ExecutedShares
from support.scheduler_harness import LearningCapacity

MS = 1000


def shares_after(*observed: tuple[int, int]) -> ExecutedShares:
    shares = ExecutedShares()
    for size, executed in observed:
        shares.observe(size, executed)
    return shares


def test_nothing_is_kept_while_all_is_executed() -> None:
    assert not shares_after(*[(8, 8)] * 100)


def test_half_and_nine_of_ten_of_the_latest_batches() -> None:
    shares = shares_after(*[(8, 8)] * 10, *[(10, 4)] * (BATCHES_MAX - 4), *[(10, 9)] * 4)
    assert (shares.half(20), shares.nine_of_ten(20)) == (8, 18)
    assert shares.half(1) == 1  # never none


def test_one_batch_does_not_count_yet() -> None:
    shares = shares_after((10, 1))
    assert (shares.half(20), shares.nine_of_ten(20)) == (20, 20)


def test_it_is_forgotten_once_all_is_executed_again() -> None:
    shares = shares_after(*[(10, 1)] * 50, *[(10, 10)] * 4)
    assert (shares.half(20), shares.nine_of_ten(20)) == (2, 20)
    for _ in range(BATCHES_MAX):
        shares.observe(10, 10)
    assert not shares


def settled(capacity: LearningCapacity, lane: str, size: int, executed: int, number: int) -> None:
    """A batch was executed in 2 ms + 1 ms * executed."""
    capacity.adopt(f"{lane}{number}", InFlightBatch(0, size, lane, {}))
    capacity.settle(f"{lane}{number}", (2 + executed) * MS, (3 + executed) * MS, executed=executed)


def test_batches_of_a_lane_are_expected_to_take_as_long_as_their_executed_requests() -> None:
    capacity = LearningCapacity(1)
    for number in range(2 * BATCHES_MAX):
        settled(capacity, "whole", 5 + number % 20, 5 + number % 20, number)
        settled(capacity, "flooded", 10 + 2 * (number % 20), 5 + number % 20, number)

    assert capacity.learned.times_of("whole").of(20) == 22 * MS
    assert capacity.learned.times_of("flooded").of(40) == 22 * MS
    assert capacity.learned.times_of("flooded").at_most(40) >= 22 * MS
    assert capacity.learned.latency.of(20) == 22 * MS  # the model's own is not affected


def test_expected_end_of_a_batch_in_flight_is_that_of_its_executed_requests() -> None:
    capacity = LearningCapacity(1)
    for number in range(2 * BATCHES_MAX):
        settled(capacity, "", 10 + 2 * (number % 15), 5 + number % 15, number)
    capacity.adopt("in flight", InFlightBatch(0, 20, "", {}))
    assert capacity.free_at_us(0) == 12 * MS
