"""The model processes as the batcher knows them: whether there is room, and when there will be."""

from __future__ import annotations

from itertools import count

import pytest

from carpool_batcher.core.capacity import Capacity, InFlightBatch
from carpool_batcher.core.lane_latency import ENOUGH, LANES

MS = 1000
TRIP = 1 * MS
COMPUTE = 10 * MS


class Depot:
    """A capacity whose batches are numbers, from 1. Each takes 10 ms, and the way there and back 1 ms."""

    def __init__(self, processes: int = 1, *, learned: bool = True) -> None:
        self.capacity = Capacity(processes)
        self.numbers = count(1)
        if learned:
            self.capacity.launch("first", InFlightBatch(-100 * MS, 8, "", {}))
            self.capacity.settle("first", COMPUTE, -100 * MS + COMPUTE + TRIP)

    def send(self, at: float = 0, size: int = 8) -> int:
        number = next(self.numbers)
        self.capacity.reserve()
        self.capacity.cancel()
        self.capacity.launch(str(number), InFlightBatch(int(at * MS), size, "", {}))
        return number

    def settle(self, number: int, at: float, compute: float = 10) -> None:
        self.capacity.settle(str(number), int(compute * MS), int(at * MS))

    def room_at(self) -> float | None:
        room_at_us = self.capacity.room_at_us()
        return None if room_at_us is None else room_at_us / MS


def test_an_idle_process_is_room_at_once() -> None:
    depot = Depot(processes=2)
    assert depot.room_at() == 0
    depot.send()
    assert depot.room_at() == 0
    depot.send()
    assert depot.room_at() != 0


def test_nobody_no_room() -> None:
    capacity = Capacity(0)
    assert not capacity.has_room()
    assert capacity.room_at_us() is None
    assert capacity.frees_us(0) == []


def test_before_anything_is_known_a_busy_process_is_no_room() -> None:
    depot = Depot(learned=False)
    depot.send()
    assert depot.room_at() is None
    assert depot.capacity.has_room()  # for what is full


def test_the_next_leaves_so_that_it_arrives_when_a_process_is_free() -> None:
    depot = Depot()
    assert depot.capacity.trip_us == TRIP
    depot.send(at=50)
    # It is heard of at 50 + 1 + 10, and the next takes 1 to be there
    assert depot.room_at() == 50 + 10


def test_one_that_waited_ahead_is_begun_when_another_is_done() -> None:
    depot = Depot()
    one, two = depot.send(at=0), depot.send(at=8)
    assert depot.room_at() is None
    depot.settle(one, at=11)
    assert depot.room_at() == 11 + 10 - 1
    depot.settle(two, at=21)
    assert depot.room_at() == 0


def test_two_for_each_process_and_never_three() -> None:
    depot = Depot(processes=2)
    sent = []
    for number in range(4):
        assert depot.capacity.has_room()
        sent.append(depot.send(at=number))
    assert not depot.capacity.has_room()
    assert depot.room_at() is None
    depot.settle(sent[0], at=12)
    assert depot.capacity.has_room()


def test_a_batch_that_is_about_to_leave_takes_room_and_one_without_riders_gives_it_back() -> None:
    capacity = Depot().capacity
    capacity.reserve()
    assert capacity.room_at_us() is None
    capacity.reserve()
    assert not capacity.has_room()
    capacity.cancel()
    capacity.cancel()
    assert capacity.room_at_us() == 0


def test_a_batch_ahead_is_for_whoever_is_free_first() -> None:
    depot = Depot(processes=2)
    depot.send(at=0)
    depot.send(at=4)
    assert depot.room_at() == 10
    depot.send(at=10)
    # That one takes the first to be free: there is room with the second
    assert depot.room_at() == 14


def test_larger_batches_take_longer_as_was_learned() -> None:
    depot = Depot()
    for size, compute in ((8, 10), (16, 18)) * 8:
        depot.settle(depot.send(at=0, size=size), at=compute + 1, compute=compute)
    depot.send(at=100, size=12)
    assert depot.room_at() == pytest.approx(100 + 14, abs=0.01)


def test_what_is_gone_without_having_been_computed_teaches_nothing() -> None:
    depot = Depot()
    line = depot.capacity.latency.line
    depot.settle(depot.send(at=0), at=500, compute=0)
    assert depot.capacity.latency.line == line
    assert depot.capacity.trip_us == TRIP
    assert depot.room_at() == 0


def test_one_that_waited_ahead_says_nothing_of_the_way() -> None:
    depot = Depot()
    executing = depot.send(at=0)
    for number in range(1, 40):
        ahead = depot.send(at=10 * number - 8)
        depot.settle(executing, at=10 * number + 1)
        executing = ahead
    assert depot.capacity.trip_us == TRIP


def test_a_pause_on_the_way_is_not_the_way() -> None:
    depot = Depot()
    for number in range(1, 12):
        depot.settle(depot.send(at=100 * number), at=100 * number + (11 if number % 4 else 80))
    assert depot.capacity.trip_us == TRIP


def test_a_trip_is_never_less_than_nothing() -> None:
    depot = Depot(learned=False)
    depot.settle(depot.send(at=0), at=5, compute=10)  # two clocks that differ
    assert depot.capacity.trip_us == 0


def test_who_settles_out_of_order_and_twice() -> None:
    depot = Depot(processes=1)
    one, two = depot.send(at=0), depot.send(at=9)
    depot.settle(two, at=12)
    depot.settle(two, at=13)
    assert list(depot.capacity.in_flight) == [str(one)]
    assert depot.room_at() == 10
    depot.settle(one, at=14)
    assert depot.room_at() == 0
    assert not depot.capacity._executing
    assert not depot.capacity._ahead


def test_a_process_that_comes_takes_what_waits_ahead() -> None:
    depot = Depot()
    depot.send(at=0)
    depot.send(at=5)
    assert depot.room_at() is None
    depot.capacity.resize(2)
    assert depot.room_at() == 10
    depot.capacity.resize(3)
    assert depot.room_at() == 0


def test_of_a_process_that_went_the_work_is_still_to_be_done() -> None:
    depot = Depot(processes=2)
    one, two = depot.send(at=0), depot.send(at=4)
    depot.capacity.resize(1)
    assert depot.room_at() is None
    depot.settle(one, at=11)
    assert depot.room_at() == 14
    depot.settle(two, at=15)
    assert depot.room_at() == 0


def test_when_each_process_is_free() -> None:
    depot = Depot(processes=3)
    depot.send(at=0)
    depot.send(at=4)
    assert depot.capacity.frees_us(5 * MS) == [10 * MS, 14 * MS, 5 * MS]
    assert depot.capacity.frees_us(12 * MS) == [12 * MS, 14 * MS, 12 * MS]  # later than expected: any moment
    depot.send(at=6)
    depot.send(at=7)  # waits ahead of the first to be free
    assert sorted(depot.capacity.frees_us(8 * MS)) == [14 * MS, 16 * MS, 20 * MS]


def test_lanes_are_remembered_as_long_as_they_are_among_the_last_heard_of() -> None:
    capacity = Capacity(1)
    settled_us = count(1)

    def settle(lane: str, compute: int) -> None:
        for _ in range(ENOUGH):
            capacity.launch(lane, InFlightBatch(0, 8, lane, {}))
            capacity.settle(lane, compute * MS, next(settled_us))

    settle("kept", 3)
    settle("forgotten", 5)
    for number in range(LANES - 1):
        settle(f"lane {number}", 100)
        settle("kept", 3)
    assert len(capacity._latencies._lanes) == LANES
    assert capacity.latency_of("kept").of(8) == 3 * MS
    assert capacity.latency_of("forgotten") is capacity.latency


def test_a_lane_goes_by_its_own_once_enough_is_known_of_it() -> None:
    depot = Depot()
    for number in range(ENOUGH):
        assert depot.capacity.latency_of("slow").of(8) == depot.capacity.latency.of(8)
        depot.capacity.launch("s", InFlightBatch(1000 * number * MS, 8, "slow", {}))
        depot.capacity.settle("s", 90 * MS, (1000 * number + 91) * MS)
    assert depot.capacity.latency_of("slow").of(8) == 90 * MS
    assert depot.capacity.ride_us("slow") == 91 * MS
    assert depot.capacity.latency_of("").of(8) == depot.capacity.latency.of(8) != 90 * MS


# --- even intervals ----------------------------------------------------------------------------------------


def test_who_can_ride_alone_does_so_at_once() -> None:
    depot = Depot(processes=4)
    for at in range(50):
        depot.settle(depot.send(at * 20, size=1), at * 20 + 11)
    depot.send(2000, size=1)
    assert depot.capacity.evenly_us() <= 2000 * MS


def test_batches_of_several_set_out_at_even_intervals() -> None:
    depot = Depot(processes=4)
    for at in range(50):
        depot.settle(depot.send(at * 20, size=8), at * 20 + 11)
    depot.send(2000)
    assert depot.capacity.evenly_us() == pytest.approx((2000 + 10 / 4) * MS, rel=1e-6)
    depot.capacity.resize(2)
    depot.send(2001)
    assert depot.capacity.evenly_us() == pytest.approx((2001 + 10 / 2) * MS, rel=1e-6)


def test_intervals_are_shorter_where_larger_batches_take_longer() -> None:
    """l(n) = 2 n: who waits for a larger batch waits longer for its result, too."""
    depot = Depot(processes=4, learned=False)
    for at in range(100):
        size = 8 + at % 2
        depot.settle(depot.send(at * 20, size=size), at * 20 + 2 * size + 1, compute=2 * size)
    depot.send(3000, size=8)
    assert 3000 * MS <= depot.capacity.evenly_us() < 3001 * MS


@pytest.mark.parametrize(("processes", "learned"), [(1, True), (0, True), (4, False)])
def test_one_process_and_one_of_which_nothing_is_known_wait_for_no_interval(
    processes: int, learned: bool
) -> None:
    depot = Depot(processes=processes, learned=learned)
    for at in range(20):
        depot.send(at)
    assert depot.capacity.evenly_us() == 0
