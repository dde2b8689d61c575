"""A lane: order, limits of a batch, totals, expired requests, and due times."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages import Bodies, Entry, Rows, Run
from carpool_batcher.core.due_index import NEVER_US
from carpool_batcher.core.fairness import NO_WEIGHTS
from carpool_batcher.core.lane import Lane, bytes_of

NO_LIMIT = 1 << 60


def request(
    name: str,
    arrival_us: int = 0,
    priority: int = 4,
    cost: int = 1,
    body: bytes = b"x",
    tenant: str = "",
    deadline_us: int | None = None,
) -> Run:
    return Run(
        Entry("1-0", arrival_us), name, body, arrival_us=arrival_us, priority=priority, cost=cost,
        tenant=tenant, deadline_us=deadline_us,
    )  # fmt: skip


def lane_of(*requests: Run) -> Lane:
    lane = Lane("")
    for r in requests:
        lane.insert(r)
    return lane


def names(lane: Lane) -> str:
    return " ".join(r.correlation_id for r in lane.pop_batch(100, None, NO_LIMIT))


def test_request_put_back_is_inserted_by_arrival() -> None:
    a, b, c, d = request("a", 1), request("b", 2), request("c", 2), request("d", 3)
    assert names(lane_of(a, b, d, c)) == "a b c d"
    assert names(lane_of(d, a, c, b)) == "a c b d"


def test_head_is_right_after_every_change() -> None:
    high, old, new = request("high", 5, priority=9), request("old", 1), request("new", 7)
    lane = lane_of(new)
    assert lane.head() == (1 + 4, 7)
    lane.insert(high)
    assert lane.head() == (1 + 9, 5)
    lane.insert(old)
    assert lane.head() == (1 + 9, 1)
    lane.remove(old)
    assert lane.head() == (1 + 9, 5)
    assert lane.pop_batch(1, None, NO_LIMIT) == [high]
    assert lane.head() == (1 + 4, 7)


def test_totals_follow_every_change() -> None:
    a, b, c = request("a", cost=2, body=b"123"), request("b", cost=3), request("c", body=b"12")
    lane = lane_of(a, b, c)
    assert (lane.count, lane.cost, lane.bytes) == (3, 6, 6)
    lane.remove(b)
    assert b not in lane and a in lane
    assert (lane.count, lane.cost, lane.bytes) == (2, 3, 5)
    assert lane.pop_batch(1, None, NO_LIMIT) == [a]
    assert (lane.count, lane.cost, lane.bytes) == (1, 1, 2)
    assert list(lane) == [c]


def test_pop_batch_stops_at_each_limit_and_returns_at_least_one() -> None:
    def taken(max_size: int = 100, max_cost: int | None = None, max_bytes: int = NO_LIMIT) -> int:
        lane = lane_of(*(request(str(number), cost=3, body=b"1234") for number in range(5)))
        return len(lane.pop_batch(max_size, max_cost, max_bytes))

    assert taken() == 5
    assert taken(max_size=2) == 2
    assert [taken(max_cost=cost) for cost in (1, 8, 9, 14, 15)] == [1, 2, 3, 4, 5]
    assert [taken(max_bytes=size) for size in (1, 11, 12, 19, 20)] == [1, 2, 3, 4, 5]


def test_request_that_does_not_fit_is_not_overtaken_by_a_lower_priority() -> None:
    lane = lane_of(request("low", priority=0), request("big", cost=9), request("high", priority=9))
    assert [r.correlation_id for r in lane.pop_batch(10, 5, NO_LIMIT)] == ["high"]


def test_removed_requests_are_no_longer_urgent() -> None:
    a, b = request("a"), request("b")
    lane = lane_of(a, b)
    lane.urgent |= {a, b}
    lane.remove(b)
    lane.pop_batch(1, None, NO_LIMIT)
    assert not lane.urgent


def test_fields_for_the_model_count_as_bytes() -> None:
    r = request("a", body=b"12345")
    assert bytes_of(r) == 5
    r.extra = {"abc": b"1234567"}
    assert bytes_of(r) == 15


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from((4, 4, 9)), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("pop"), st.integers(1, 4)),
        st.tuples(st.just("expire"), st.integers(0, 100)),
    ),
    max_size=60,
)
tenant_weights = st.sampled_from([NO_WEIGHTS, {"a": 4.0}, {"a": 0.5, "b": 2.0, "c": 3.0}])


@settings(deadline=None)
@given(steps, tenant_weights)
def test_in_order_and_peek_batch_agree_with_pop_batch(
    operations: list[tuple[object, ...]], weights: Mapping[str, float]
) -> None:
    lane = Lane("")
    number = count()
    for operation, *arguments in operations:
        present = list(lane)
        if operation == "add":
            tenant, priority, cost = arguments
            at = next(number)
            lane.insert(request(str(at), at, int(str(priority)), int(str(cost)), tenant=str(tenant)))
        elif operation == "pop" and present:
            size = int(str(arguments[0]))
            expected = list(lane.in_order(weights))[:size]
            assert lane.peek_batch(size, None, NO_LIMIT, weights) == expected
            assert lane.pop_batch(size, None, NO_LIMIT, weights) == expected
        elif present:
            chosen = present[int(str(arguments[0])) % len(present)]
            lane.remove(chosen) if operation == "remove" else lane.move_expired(chosen)
        assert len(list(lane.in_order(weights))) == lane.count == len(set(lane))
    remaining = list(lane.in_order(weights))
    assert not remaining or lane.pop_batch(NO_LIMIT, None, NO_LIMIT, weights) == remaining


# --- expired requests --------------------------------------------------------------------------------------


def test_expired_request_is_behind_all_others_and_not_urgent() -> None:
    late, low, high = request("late", 1, priority=9), request("low", 5, priority=0), request("high", 6)
    lane = lane_of(late, high, low)
    lane.urgent.add(late)
    lane.move_expired(late)
    assert not lane.urgent
    # The arrival of the expired request does not count for the others.
    assert lane.head() == (1 + 4, 5)
    assert names(lane) == "high low late"
    assert not lane.expired


def test_head_of_a_lane_with_only_expired_requests() -> None:
    late, later = request("late", 1), request("later", 2)
    lane = lane_of(later, late)
    lane.move_expired(late)
    assert lane.head() == (1 + 4, 2)
    lane.move_expired(later)
    assert lane.head() == (0, 1)
    lane.insert(request("new", 3))
    assert lane.head() == (1 + 4, 3)


# --- due times ---------------------------------------------------------------------------------------------


def due_us(waiting: Run, target_us: int | None) -> int:
    if waiting.deadline_us is not None:
        return waiting.deadline_us
    return NEVER_US if target_us is None else waiting.arrival_us + target_us


def test_earliest_due_time_is_of_waiting_requests_that_have_not_expired() -> None:
    first, second, third = (request(str(at), deadline_us=at) for at in (10, 20, 30))
    lane = lane_of(third, first)
    assert lane.earliest_due_us(None) == 10
    lane.insert(second)
    lane.remove(first)
    assert lane.earliest_due_us(None) == 20
    lane.move_expired(second)
    assert lane.earliest_due_us(None) == 30
    # Given a request without a deadline, the target counts for it, also when it changes.
    lane.insert(request("target", arrival_us=5))
    assert lane.earliest_due_us(None) == 30
    assert lane.earliest_due_us(7) == 12
    assert lane.earliest_due_us(20) == 25
    assert lane.earliest_due_us(None) == 30
    lane.pop_batch(2, None, NO_LIMIT)
    assert lane.earliest_due_us(None) == NEVER_US


@given(
    st.lists(st.integers(0, 9) | st.none(), max_size=30),
    st.none() | st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_earliest_due_time_is_right_after_every_change(
    deadlines_us: list[int | None], target_us: int | None, chance: random.Random
) -> None:
    lane, waiting = Lane(""), []
    for at, deadline_us in enumerate(deadlines_us):
        arriving = request(str(at), chance.randrange(10), chance.randrange(3), deadline_us=deadline_us)
        lane.insert(arriving)
        waiting.append(arriving)
        if chance.random() < 0.5:
            lane.remove(waiting.pop(chance.randrange(len(waiting))))
        expected_us = min((due_us(r, target_us) for r in waiting), default=NEVER_US)
        assert lane.earliest_due_us(target_us) == expected_us


def test_due_index_does_not_keep_removed_requests() -> None:
    first = request("first", deadline_us=1)
    lane = lane_of(first)
    for at in range(1000):
        if at % 500 == 0:
            assert lane.earliest_due_us(None) == 1
        r = request(str(at), deadline_us=1000 + at)
        lane.insert(r)
        lane.remove(r)
    assert len(lane._due_index or ()) < 100
    assert lane.earliest_due_us(None) == 1
