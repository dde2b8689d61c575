"""One lane's requests: in order, in fair turns, counted, and out again from anywhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages import Entry, Request
from carpool_batcher.core.lane import NEVER, NO_WEIGHTS, Lane, Level, bytes_of

NO_LIMIT = 1 << 60


def request(
    name: str,
    arrival_us: int = 0,
    priority: int = 4,
    cost: int = 1,
    body: bytes = b"x",
    tenant: str = "",
    deadline_us: int | None = None,
) -> Request:
    return Request(
        Entry("1-0", arrival_us), name, body, arrival_us=arrival_us, priority=priority, cost=cost,
        tenant=tenant, deadline_us=deadline_us,
    )  # fmt: skip


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
    assert lane.head() == (1 + 4, 7)
    lane.add(high)
    assert lane.head() == (1 + 9, 5)
    lane.add(old)
    assert lane.head() == (1 + 9, 1)
    lane.remove(old)
    assert lane.head() == (1 + 9, 5)
    assert lane.take(1, None, NO_LIMIT) == [high]
    assert lane.head() == (1 + 4, 7)


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


# --- fair turns --------------------------------------------------------------------------------------------


def crowd(tenant: str, number: int, cost: int = 1) -> list[Request]:
    return [request(f"{tenant}{at}", tenant=tenant, cost=cost) for at in range(number)]


def tenants(lane: Lane, number: int, weights: Mapping[str, float] = NO_WEIGHTS) -> str:
    """Whose the next so many are."""
    return "".join(one.tenant for one in lane.take(number, None, NO_LIMIT, weights))


def test_a_flood_delays_nobody_but_its_own_producer() -> None:
    lane = lane_of(*crowd("f", 1000))
    assert tenants(lane, 100) == "f" * 100
    for one in crowd("t", 3):
        lane.add(one)
    assert tenants(lane, 8).count("t") == 3


def test_turns_follow_the_weights() -> None:
    lane = lane_of(*crowd("g", 100), *crowd("s", 100))
    taken = tenants(lane, 50, {"g": 4.0})
    assert (taken.count("g"), taken.count("s")) == (40, 10)
    assert all(taken[at : at + 6].count("s") >= 1 for at in range(45))  # evenly, and not 40 and then 10


def test_turns_are_of_cost_and_not_of_number() -> None:
    lane = lane_of(*crowd("big", 20, cost=9), *crowd("x", 90))
    taken = [one.tenant for one in lane.take(40, None, NO_LIMIT)]
    assert (taken.count("big"), taken.count("x")) == (4, 36)


def test_costing_nothing_is_no_way_to_have_every_turn() -> None:
    assert tenants(lane_of(*crowd("f", 100, cost=0), *crowd("t", 4)), 8).count("t") == 4


def test_who_comes_back_has_no_credit_for_its_absence() -> None:
    lane = lane_of(*crowd("a", 200), *crowd("b", 1))
    assert tenants(lane, 100).count("b") == 1
    for one in crowd("b", 100):
        lane.add(one)
    assert tenants(lane, 20).count("b") == 10


def test_who_comes_and_goes_has_no_more_than_its_share() -> None:
    lane = lane_of(*crowd("a", 200))
    taken = ""
    for at in range(100):
        if "b" not in [one.tenant for one in lane]:
            lane.add(request(f"b{at}", tenant="b"))
        taken += tenants(lane, 1)
    assert taken.count("b") == 50


def test_who_is_taken_out_costs_its_tenant_no_turn() -> None:
    a, b = crowd("a", 6), crowd("b", 6)
    lane = lane_of(*a, *b)
    for one in (a[0], a[2], b[1], b[3], b[4]):
        lane.remove(one)
    assert names(lane) == "a1 b0 a3 b2 a4 b5 a5"


def test_a_tenant_of_whom_nobody_waits_any_more_is_passed_over() -> None:
    a, b, c = crowd("a", 2), crowd("b", 2), crowd("c", 2)
    lane = lane_of(*a, *b, *c)
    for one in b:
        lane.remove(one)
    assert names(lane) == "a0 c0 a1 c1"


@pytest.mark.parametrize("leaves", ["served", "withdrawn"])
def test_names_are_not_remembered_without_end(leaves: str) -> None:
    level = Level()
    for one in crowd("waits", 3):
        level.add(one)
    for at in range(2000):
        one = request("x", tenant=f"new {at}" if at % 2 else "again")
        level.add(one)
        if leaves == "withdrawn":
            level.remove(one)
        elif level.pop(NO_WEIGHTS).tenant == "waits":
            level.pop(NO_WEIGHTS)
            level.add(request("y", tenant="waits"))
    assert len(level._next) < 60
    assert len(level._turns) < 60


def test_new_names_without_end_starve_nobody() -> None:
    lane = lane_of(*crowd("waits", 10))
    taken: list[str] = []
    for at in range(600):
        lane.add(request("x", tenant=f"new {at}"))
        lane.add(request("x", tenant=f"newer {at}"))
        taken += [one.tenant for one in lane.take(2, None, NO_LIMIT)]
    assert taken.count("waits") == 10


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from((4, 4, 9)), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("late"), st.integers(0, 100)),
    ),
    max_size=60,
)
weighted = st.sampled_from([NO_WEIGHTS, {"a": 4.0}, {"a": 0.5, "b": 2.0, "c": 3.0}])


@settings(deadline=None)
@given(steps, weighted)
def test_in_order_and_fitting_are_what_take_takes(
    happens: list[tuple[object, ...]], weights: Mapping[str, float]
) -> None:
    lane = Lane("")
    number = count()
    for what, *how in happens:
        present = list(lane)
        if what == "add":
            tenant, priority, cost = how
            at = next(number)
            lane.add(request(str(at), at, int(str(priority)), int(str(cost)), tenant=str(tenant)))
        elif what == "take" and present:
            size = int(str(how[0]))
            expected = list(lane.in_order(weights))[:size]
            assert lane.fitting(size, None, NO_LIMIT, weights) == expected
            assert lane.take(size, None, NO_LIMIT, weights) == expected
        elif present:
            one = present[int(str(how[0])) % len(present)]
            lane.remove(one) if what == "remove" else lane.put_behind(one)
        assert len(list(lane.in_order(weights))) == lane.count == len(set(lane))
    everybody = list(lane.in_order(weights))
    assert not everybody or lane.take(NO_LIMIT, None, NO_LIMIT, weights) == everybody


# --- behind all others -------------------------------------------------------------------------------------


def test_who_is_late_is_behind_all_others_and_hurries_nobody() -> None:
    late, low, high = request("late", 1, priority=9), request("low", 5, priority=0), request("high", 6)
    lane = lane_of(late, high, low)
    lane.urgent.add(late)
    lane.put_behind(late)
    assert not lane.urgent
    # How long it has waited is not for the others' good
    assert lane.head() == (1 + 4, 5)
    assert names(lane) == "high low late"
    assert not lane.late


def test_the_head_of_those_who_are_late_alone_is_their_own() -> None:
    late, later = request("late", 1), request("later", 2)
    lane = lane_of(later, late)
    lane.put_behind(late)
    assert lane.head() == (1 + 4, 2)
    lane.put_behind(later)
    assert lane.head() == (0, 1)
    lane.add(request("new", 3))
    assert lane.head() == (1 + 4, 3)


# --- the earliest ------------------------------------------------------------------------------------------


def deadline(one: Request) -> int:
    return NEVER if one.deadline_us is None else one.deadline_us


def test_the_earliest_is_of_those_who_wait_and_are_not_late() -> None:
    first, second, third = (request(str(at), deadline_us=at) for at in (10, 20, 30))
    lane = lane_of(third, first)
    assert lane.earliest_us(deadline) == 10
    lane.add(second)
    lane.remove(first)
    assert lane.earliest_us(deadline) == 20
    lane.put_behind(second)
    assert lane.earliest_us(deadline) == 30
    assert lane.earliest_us(lambda one: -(one.deadline_us or 0)) == -30
    lane.take(1, None, NO_LIMIT)
    assert lane.earliest_us(deadline) == NEVER


@given(st.lists(st.integers(0, 9) | st.just(NEVER), max_size=30), st.randoms(use_true_random=False))
def test_the_earliest_is_found_whoever_comes_and_goes(deadlines_us: list[int], chance: random.Random) -> None:
    lane, waiting = Lane(""), []
    for at, deadline_us in enumerate(deadlines_us):
        one = request(str(at), deadline_us=deadline_us, priority=chance.randrange(3))
        lane.add(one)
        waiting.append(one)
        if chance.random() < 0.5:
            lane.remove(waiting.pop(chance.randrange(len(waiting))))
        assert lane.earliest_us(deadline) == min(map(deadline, waiting), default=NEVER)


def test_who_has_left_is_not_kept_for_the_earliest() -> None:
    first = request("first", deadline_us=1)
    lane = lane_of(first)
    for at in range(1000):
        if at % 500 == 0:
            assert lane.earliest_us(deadline) == 1
        one = request(str(at), deadline_us=1000 + at)
        lane.add(one)
        lane.remove(one)
    assert len(lane._earliest or ()) < 100
    assert lane.earliest_us(deadline) == 1
