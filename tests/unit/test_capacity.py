"""Capacity: whether the model processes can take a batch, and when the next one becomes free."""

from __future__ import annotations

from itertools import count

import pytest

from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.lane_latency import LANE_BATCHES_MIN, LANES_MAX
from support.scheduler_harness import LearningCapacity

MS = 1000
ROUND_TRIP = 1 * MS
EXECUTION = 10 * MS


class CapacityHarness:
    """A Capacity in ms whose batches are numbers, from 1. Execution takes 10 ms, the round trip 1 ms."""

    def __init__(self, processes: int = 1, *, learned: bool = True) -> None:
        self.capacity = LearningCapacity(processes)
        self.numbers = count(1)
        if learned:
            self.capacity.adopt("first", InFlightBatch(-100 * MS, 8, "", {}))
            self.capacity.settle("first", EXECUTION, -100 * MS + EXECUTION + ROUND_TRIP)

    def dispatch(self, at: float = 0, size: int = 8) -> int:
        number = next(self.numbers)
        self.capacity.reserve()
        self.capacity.launch(str(number), InFlightBatch(int(at * MS), size, "", {}))
        return number

    def settle(self, number: int, at: float, execution: float | None = 10, waited: float = 0) -> None:
        execution_us = 0 if execution is None else int(execution * MS)
        waited_us = int(waited * MS)
        self.capacity.settle(str(number), execution_us, int(at * MS), waited_us=waited_us)

    def free_at(self, now: float = 0) -> float | None:
        free_at_us = self.capacity.free_at_us(int(now * MS))
        return None if free_at_us is None else free_at_us / MS


def test_idle_process_is_free_at_once() -> None:
    harness = CapacityHarness(processes=2)
    assert harness.free_at(now=3) == 3
    harness.dispatch()
    assert harness.free_at(now=3) == 3
    harness.dispatch()
    assert harness.free_at(now=3) not in (3, 0)


def test_no_process_has_no_capacity() -> None:
    capacity = LearningCapacity(0)
    assert not capacity.has_capacity()
    assert capacity.free_at_us(0) is None
    assert capacity.free_times_us(0) == []


def test_busy_process_has_no_known_free_time_before_anything_is_learned() -> None:
    harness = CapacityHarness(learned=False)
    harness.dispatch()
    assert harness.free_at() is None
    assert harness.capacity.has_capacity()  # for a full batch


def test_next_batch_is_dispatched_a_round_trip_before_the_process_becomes_free() -> None:
    harness = CapacityHarness()
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP
    harness.dispatch(at=50)
    # It settles at 50 + 1 + 10, and the next one takes 1 to arrive.
    assert harness.free_at() == 50 + 10


def test_full_batch_may_be_dispatched_two_round_trips_before() -> None:
    harness = CapacityHarness(processes=2)
    assert harness.capacity.free_at_us(3 * MS, is_full=True) == 3 * MS  # a process is idle
    harness.dispatch(at=50)
    harness.dispatch(at=51)
    assert harness.capacity.free_at_us(0, is_full=True) == (50 + 10 + 1 - 2) * MS


def test_second_full_batch_ahead_is_dispatched_two_round_trips_before_the_first_one_settles() -> None:
    harness = CapacityHarness(processes=2)
    for at in range(50, 54):
        harness.dispatch(at=at)
    # The first process settles its batch at 50 + 10 + 1, and the one that waits for it 10 later.
    assert harness.free_at() is None
    assert harness.capacity.free_at_us(0, is_full=True) == (50 + 10 + 1 + 10 - 2) * MS
    assert harness.capacity.starts_us(0) == (50 + 10 + 1 + 10 - 1) * MS
    harness.dispatch(at=54)
    assert harness.capacity.free_at_us(0, is_full=True) == (51 + 10 + 1 + 10 - 2) * MS
    harness.dispatch(at=55)
    assert harness.capacity.free_at_us(0, is_full=True) is None


def test_second_batch_ahead_is_not_dispatched_while_one_takes_longer_than_expected() -> None:
    harness = CapacityHarness()
    harness.dispatch(at=0)
    harness.dispatch(at=8)
    late = 11 + ROUND_TRIP // MS + 10  # it settles at 11, give or take a round trip and l(1)
    assert harness.capacity.free_at_us(late * MS, is_full=True) == (11 + 10 - 2) * MS
    assert harness.capacity.free_at_us((late + 1) * MS, is_full=True) is None


def test_second_batch_ahead_is_not_decided_before_the_first_one_is_dispatched() -> None:
    harness = CapacityHarness()
    harness.dispatch(at=0)
    harness.capacity.reserve()
    assert harness.capacity.free_at_us(0, is_full=True) is None
    assert harness.capacity.starts_us(0) == 0


def test_batch_dispatched_ahead_starts_when_another_settles() -> None:
    harness = CapacityHarness()
    first, second = harness.dispatch(at=0), harness.dispatch(at=8)
    assert harness.free_at() is None
    harness.settle(first, at=11)
    assert harness.free_at() == 11 + 10 - 1
    harness.settle(second, at=21)
    assert harness.free_at() == 0


def test_two_batches_per_process_and_never_three() -> None:
    harness = CapacityHarness(processes=2)
    batches = []
    for number in range(4):
        assert harness.capacity.has_capacity()
        batches.append(harness.dispatch(at=number))
    assert not harness.capacity.has_capacity()
    assert harness.free_at() is None
    harness.settle(batches[0], at=12)
    assert harness.capacity.has_capacity()


def test_reservation_takes_capacity_until_it_is_cancelled() -> None:
    capacity = CapacityHarness().capacity
    capacity.reserve()
    assert capacity.free_at_us(0) is None
    capacity.reserve()
    assert not capacity.has_capacity()
    capacity.unreserve()
    capacity.unreserve()
    assert capacity.free_at_us(0) == 0


def test_batch_dispatched_ahead_goes_to_the_process_that_becomes_free_first() -> None:
    harness = CapacityHarness(processes=2)
    harness.dispatch(at=0)
    harness.dispatch(at=4)
    assert harness.free_at() == 10
    harness.dispatch(at=10)
    # That one goes to the first process to become free: the second one is next.
    assert harness.free_at() == 14


def test_free_time_follows_the_learned_latency_of_a_size() -> None:
    harness = CapacityHarness()
    for size, execution in ((8, 10), (16, 18)) * 8:
        batch = harness.dispatch(at=0, size=size)
        harness.settle(batch, at=execution + 1, execution=execution)
    harness.dispatch(at=100, size=12)
    assert harness.free_at() == pytest.approx(100 + 14, abs=0.01)


def test_batch_settled_without_execution_teaches_no_latency() -> None:
    harness = CapacityHarness()
    curve = harness.capacity.learned.latency.curve
    harness.settle(harness.dispatch(at=0), at=500, execution=None)
    assert harness.capacity.learned.latency.curve is curve
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP
    assert harness.free_at() == 0


def test_size_that_was_executed_teaches_and_not_that_of_the_batch() -> None:
    harness = CapacityHarness(learned=False)
    number = harness.dispatch(at=0, size=8)
    harness.capacity.settle(str(number), 30 * MS, 31 * MS, executed=2)
    assert harness.capacity.learned.latency.curve is not None
    assert harness.capacity.learned.latency.curve.shown == [(2, 30 * MS)]
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP


@pytest.mark.parametrize(("execution", "executed"), [(500, 0), (0, 3), (0, 0)])
def test_execution_that_was_not_normal_teaches_nothing_but_the_turnaround(
    execution: int, executed: int
) -> None:
    harness = CapacityHarness()
    curve = harness.capacity.learned.latency.curve
    number = harness.dispatch(at=0, size=8)
    harness.capacity.settle(str(number), execution * MS, 600 * MS, executed=executed)
    assert harness.capacity.learned.latency.curve is curve
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP
    assert harness.capacity.learned.turnaround_us("") == 600 * MS


def test_forgotten_batch_frees_its_process_and_teaches_nothing() -> None:
    harness = CapacityHarness()
    curve, turnaround_us = harness.capacity.learned.latency.curve, harness.capacity.learned.turnaround_us("")
    lost, ahead = harness.dispatch(at=0), harness.dispatch(at=8)
    harness.capacity.end(str(lost), 500 * MS)
    harness.capacity.end(str(lost), 501 * MS)
    assert list(harness.capacity.in_flight) == [str(ahead)]
    assert harness.free_at(500) == 500 + 10 - 1
    assert harness.capacity.learned.latency.curve is curve
    assert harness.capacity.learned.turnaround_us("") == turnaround_us
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP


def test_batch_that_takes_too_long_has_no_known_free_time() -> None:
    harness = CapacityHarness()
    harness.dispatch(at=0)
    tolerance = 1 + 10
    assert harness.free_at(11 + tolerance) == 10
    assert harness.free_at(11 + tolerance + 0.001) is None


def test_pause_does_not_change_the_round_trip() -> None:
    harness = CapacityHarness()
    for number in range(1, 12):
        harness.settle(harness.dispatch(at=100 * number), at=100 * number + (11 if number % 4 else 80))
    assert harness.capacity.learned.round_trip_us == ROUND_TRIP


def test_time_in_which_a_batch_waited_for_a_process_is_not_its_round_trip() -> None:
    """Given batches dispatched ahead that tell how long they waited, expect their transit to be learned."""
    harness = CapacityHarness(learned=False)
    for at in range(0, 300, 20):
        first, ahead = harness.dispatch(at=at), harness.dispatch(at=at + 1)
        harness.settle(first, at=at + 12, waited=0)  # transit takes 2 ms
        harness.settle(ahead, at=at + 22, waited=8)  # and 3 ms
    assert harness.capacity.learned.round_trip_us == pytest.approx(2.5 * MS, abs=0.5 * MS)
    assert harness.capacity.learned.transit_us[1] == 3 * MS


def test_round_trip_is_never_negative() -> None:
    harness = CapacityHarness(learned=False)
    harness.settle(harness.dispatch(at=0), at=5, execution=10)  # by two clocks that differ
    assert harness.capacity.learned.round_trip_us == 0


def test_batches_may_settle_out_of_order_and_twice() -> None:
    harness = CapacityHarness(processes=1)
    first, second = harness.dispatch(at=0), harness.dispatch(at=9)
    harness.settle(second, at=12, execution=None)
    harness.settle(second, at=13, execution=None)
    assert list(harness.capacity.in_flight) == [str(first)]
    assert harness.free_at() == 10
    harness.settle(first, at=14)
    assert harness.free_at() == 0
    assert not harness.capacity._executing
    assert not harness.capacity._ahead


def test_new_process_takes_a_batch_dispatched_ahead() -> None:
    harness = CapacityHarness()
    harness.dispatch(at=0)
    harness.dispatch(at=5)
    assert harness.free_at() is None
    harness.capacity.resize(2)
    assert harness.free_at() == 10
    harness.capacity.resize(3)
    assert harness.free_at() == 0


def test_batch_of_a_removed_process_still_has_to_be_executed() -> None:
    harness = CapacityHarness(processes=2)
    first, second = harness.dispatch(at=0), harness.dispatch(at=4)
    harness.capacity.resize(1)
    assert harness.free_at() is None
    harness.settle(first, at=11)
    assert harness.free_at() == 14
    harness.settle(second, at=15)
    assert harness.free_at() == 0


def test_batch_is_dispatched_earlier_where_round_trips_vary_and_what_it_waits_is_expected() -> None:
    harness = CapacityHarness(learned=False)
    for number in range(20):  # of ten round trips eight take 1 ms, and two take 3 ms
        at = 100 * number
        harness.settle(harness.dispatch(at=at), at=at + 10 + (3 if number % 5 == 0 else 1))
    assert harness.capacity.starts_us(2000 * MS) == 2000 * MS  # it is idle
    harness.dispatch(at=2000)
    assert harness.free_at(2000) == 2000 + 11 - 3
    assert harness.capacity.starts_us((2000 + 8) * MS) == (2000 + 11 - 1) * MS
    assert harness.capacity.starts_us((2000 + 15) * MS) == (2000 + 15) * MS


def test_free_times_of_all_processes() -> None:
    harness = CapacityHarness(processes=3)
    harness.dispatch(at=0)
    harness.dispatch(at=4)
    assert harness.capacity.free_times_us(5 * MS) == [10 * MS, 14 * MS, 5 * MS]
    assert harness.capacity.free_times_us(12 * MS) == [
        12 * MS,
        14 * MS,
        12 * MS,
    ]  # overdue: free at any moment
    harness.dispatch(at=6)
    harness.dispatch(at=7)  # dispatched ahead: for the first to become free
    assert sorted(harness.capacity.free_times_us(8 * MS)) == [14 * MS, 16 * MS, 20 * MS]


def test_lanes_that_settled_last_are_kept() -> None:
    capacity = LearningCapacity(1)
    settled_us = count(1)

    def settle(lane: str, execution: int) -> None:
        for _ in range(LANE_BATCHES_MIN):
            capacity.adopt(lane, InFlightBatch(0, 8, lane, {}))
            capacity.settle(lane, execution * MS, next(settled_us))

    settle("kept", 3)
    settle("forgotten", 5)
    for number in range(LANES_MAX - 1):
        settle(f"lane {number}", 100)
        settle("kept", 3)
    assert len(capacity.learned._lanes._lanes) == LANES_MAX
    assert capacity.learned.times_of("kept").of(8) == 3 * MS
    assert capacity.learned.times_of("forgotten") is capacity.learned.latency


def test_lane_uses_its_own_latency_once_enough_batches_were_executed() -> None:
    harness = CapacityHarness()
    for number in range(LANE_BATCHES_MIN):
        assert harness.capacity.learned.times_of("slow").of(8) == harness.capacity.learned.latency.of(8)
        harness.capacity.adopt("s", InFlightBatch(1000 * number * MS, 8, "slow", {}))
        harness.capacity.settle("s", 90 * MS, (1000 * number + 91) * MS)
    assert harness.capacity.learned.times_of("slow").of(8) == 90 * MS
    assert harness.capacity.learned.turnaround_us("slow") == 91 * MS
    assert harness.capacity.learned.times_of("") is harness.capacity.learned.latency
    assert harness.capacity.learned.times_of("slow") is not harness.capacity.learned.latency


# --- even spacing ------------------------------------------------------------------------------------------


def test_batches_of_one_are_not_spaced() -> None:
    harness = CapacityHarness(processes=4)
    for at in range(50):
        harness.settle(harness.dispatch(at * 20, size=1), at * 20 + 11)
    harness.dispatch(2000, size=1)
    assert harness.capacity.spacing_ends_us() <= 2000 * MS


def test_batches_of_several_are_spaced_evenly() -> None:
    harness = CapacityHarness(processes=4)
    for at in range(50):
        harness.settle(harness.dispatch(at * 20, size=8), at * 20 + 11)
    harness.dispatch(2000)
    assert harness.capacity.spacing_ends_us() == pytest.approx((2000 + 10 / 4) * MS, rel=1e-6)
    harness.capacity.resize(2)
    harness.dispatch(2001)
    assert harness.capacity.spacing_ends_us() == pytest.approx((2001 + 10 / 2) * MS, rel=1e-6)


def test_spacing_is_shorter_where_larger_batches_take_longer() -> None:
    """l(n) = 2 n: a request that waits for a larger batch also waits longer for its result."""
    harness = CapacityHarness(processes=4, learned=False)
    for at in range(100):
        size = 4 + 8 * (at % 2)
        harness.settle(harness.dispatch(at * 20, size=size), at * 20 + 2 * size + 1, execution=2 * size)
    harness.dispatch(3000, size=8)
    assert 3000 * MS <= harness.capacity.spacing_ends_us() < 3001 * MS


@pytest.mark.parametrize(("processes", "learned"), [(1, True), (0, True), (4, False)])
def test_no_spacing_for_one_process_or_an_unknown_latency(processes: int, learned: bool) -> None:
    harness = CapacityHarness(processes=processes, learned=learned)
    for at in range(20):
        harness.dispatch(at)
    assert harness.capacity.spacing_ends_us() == 0
