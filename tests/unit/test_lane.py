"""One lane's requests: in order, counted, and out again from anywhere."""

from __future__ import annotations

from carpool.messages import Entry, Request
from carpool_batcher.core.lane import Lane, bytes_of

NO_LIMIT = 1 << 60


def request(name: str, arrival_us: int = 0, priority: int = 4, cost: int = 1, body: bytes = b"x") -> Request:
    return Request(Entry("1-0", arrival_us), name, body, arrival_us=arrival_us, priority=priority, cost=cost)


def lane_of(*requests: Request) -> Lane:
    lane = Lane("")
    for one in requests:
        lane.add(one)
    return lane


def names(lane: Lane) -> str:
    return " ".join(one.correlation_id for one in lane.take(100, None, NO_LIMIT))


def test_one_that_came_back_stands_behind_those_of_its_time_and_before_later_ones() -> None:
    a, b, c, d = request("a", 1), request("b", 2), request("c", 2), request("d", 3)
    assert names(lane_of(a, b, d, c)) == "a b c d"
    assert names(lane_of(d, a, c, b)) == "a c b d"


def test_the_head_is_known_after_every_change() -> None:
    high, old, new = request("high", 5, priority=9), request("old", 1), request("new", 7)
    lane = lane_of(new)
    assert lane.head() == (4, 7)
    lane.add(high)
    assert lane.head() == (9, 5)
    lane.add(old)
    assert lane.head() == (9, 1)
    lane.remove(old)
    assert lane.head() == (9, 5)
    assert lane.take(1, None, NO_LIMIT) == [high]
    assert lane.head() == (4, 7)


def test_counts_follow_who_comes_and_goes() -> None:
    a, b, c = request("a", cost=2, body=b"123"), request("b", cost=3), request("c", body=b"12")
    lane = lane_of(a, b, c)
    assert (lane.count, lane.cost, lane.bytes) == (3, 6, 6)
    lane.remove(b)
    assert b not in lane and a in lane
    assert (lane.count, lane.cost, lane.bytes) == (2, 3, 5)
    assert lane.take(1, None, NO_LIMIT) == [a]
    assert (lane.count, lane.cost, lane.bytes) == (1, 1, 2)
    assert list(lane) == [c]


def test_take_stops_at_each_limit_and_takes_one_at_least() -> None:
    def taken(max_size: int = 100, max_cost: int | None = None, max_bytes: int = NO_LIMIT) -> int:
        lane = lane_of(*(request(str(number), cost=3, body=b"1234") for number in range(5)))
        return len(lane.take(max_size, max_cost, max_bytes))

    assert taken() == 5
    assert taken(max_size=2) == 2
    assert [taken(max_cost=cost) for cost in (1, 8, 9, 14, 15)] == [1, 2, 3, 4, 5]
    assert [taken(max_bytes=size) for size in (1, 11, 12, 19, 20)] == [1, 2, 3, 4, 5]


def test_what_does_not_fit_is_not_overtaken_by_a_lower_priority() -> None:
    lane = lane_of(request("low", priority=0), request("big", cost=9), request("high", priority=9))
    assert [one.correlation_id for one in lane.take(10, 5, NO_LIMIT)] == ["high"]


def test_who_was_urgent_is_not_once_it_left() -> None:
    a, b = request("a"), request("b")
    lane = lane_of(a, b)
    lane.urgent |= {a, b}
    lane.remove(b)
    lane.take(1, None, NO_LIMIT)
    assert not lane.urgent


def test_fields_that_the_model_reads_are_part_of_what_a_request_brings() -> None:
    one = request("a", body=b"12345")
    assert bytes_of(one) == 5
    one.extra = {"abc": b"1234567"}
    assert bytes_of(one) == 15
