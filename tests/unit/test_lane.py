"""A lane: order, limits of a batch, totals, expired requests, and due times."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.messages.requests import Entry, Run
from carpool.rows import Bodies, Rows, StoredBody
from carpool_batcher.core.applied_settings import EQUAL_SHARES, NO_LIMIT, NO_WEIGHTS, BatchLimits, Shares
from carpool_batcher.core.waiting.batch_space import bytes_of
from carpool_batcher.core.waiting.lane import NEVER_US, Lane


def run(
    names: str,
    arrival_us: int = 0,
    priority: int = 4,
    cost: int = 1,
    body: bytes = b"x",
    tenant: str = "",
    deadline_us: int | None = None,
    rows: bool = False,
) -> Run:
    """A run with these requests. Each has the same body."""
    ids = names.split()
    bodies: Bodies = Rows(b"", body * len(ids), len(body)) if rows else [body] * len(ids)
    one = Run(
        Entry("1-0", arrival_us), ids, bodies, arrival_us=arrival_us, priority=priority, cost=cost,
        tenant=tenant, deadline_us=deadline_us,
    )  # fmt: skip
    one.entry.runs.append(one)
    return one


def insert(lane: Lane, *runs: Run) -> Lane:
    for one in runs:
        lane.insert(one, bytes_of(one))
    return lane


def remove(lane: Lane, one: Run) -> None:
    lane.remove(one, bytes_of(one))


def lane_of(*runs: Run) -> Lane:
    return insert(Lane(""), *runs)


def names(runs: Iterable[Run]) -> str:
    return " ".join(name for one in runs for name in one.correlation_ids)


def popped(lane: Lane, size: int = 100, weights: Mapping[str, float] = NO_WEIGHTS) -> str:
    return names(lane.pop_batch(BatchLimits(size), Shares(weights)).runs)


def test_run_put_back_is_inserted_by_arrival() -> None:
    a, b, c, d = run("a", 1), run("b1 b2", 2), run("c", 2), run("d", 3)
    assert popped(lane_of(a, b, d, c)) == "a b1 b2 c d"
    assert popped(lane_of(d, a, c, b)) == "a c b1 b2 d"


def test_front_is_right_after_every_change() -> None:
    high, old, new = run("high", 5, priority=9), run("old", 1), run("new", 7)
    lane = lane_of(new)
    assert lane.front() == (1 + 4, 7)
    insert(lane, high)
    assert lane.front() == (1 + 9, 5)
    insert(lane, old)
    assert lane.front() == (1 + 9, 1)
    remove(lane, old)
    assert lane.front() == (1 + 9, 5)
    assert popped(lane, 1) == "high"
    assert lane.front() == (1 + 4, 7)


def test_totals_follow_every_change() -> None:
    a, b, c = run("a1 a2", cost=2, body=b"123"), run("b", cost=3), run("c1 c2 c3", body=b"12", rows=True)
    lane = lane_of(a, b, c)
    assert (lane.count, lane.cost, lane.bytes) == (6, 10, 13)
    remove(lane, b)
    assert b not in lane and a in lane
    assert (lane.count, lane.cost, lane.bytes) == (5, 7, 12)
    assert popped(lane, 1) == "a1"
    assert (lane.count, lane.cost, lane.bytes) == (4, 5, 9)
    assert names([lane.take(c, [1])]) == "c2"
    assert (lane.count, lane.cost, lane.bytes) == (3, 4, 7)
    assert list(lane) == [a, c]


@pytest.mark.parametrize("runs", [["0 1 2 3 4"], ["0 1", "2", "3 4"], list("01234")])
@pytest.mark.parametrize("rows", [False, True])
def test_pop_batch_stops_at_each_limit_and_returns_at_least_one(runs: Sequence[str], rows: bool) -> None:
    def taken(size: int = 100, cost: int = NO_LIMIT, size_bytes: int = NO_LIMIT) -> int:
        lane = lane_of(*(run(names, cost=3, body=b"1234", rows=rows) for names in runs))
        limits = BatchLimits(size, cost, size_bytes)
        peeked = sum(one.size for one in lane.peek_batch(limits, EQUAL_SHARES))
        batch = len(names(lane.pop_batch(limits).runs).split())
        assert peeked == batch
        assert names(lane) == " ".join("01234"[batch:])
        return batch

    assert taken() == 5
    assert taken(size=2) == 2
    assert [taken(cost=cost) for cost in (1, 8, 9, 14, 15)] == [1, 2, 3, 4, 5]
    assert [taken(size_bytes=size) for size in (1, 11, 12, 19, 20)] == [1, 2, 3, 4, 5]


def test_free_requests_fit_until_the_first_is_over_the_cost_limit() -> None:
    lane = lane_of(run("a b", cost=0), run("c", cost=5), run("d e", cost=0))
    assert names(lane.pop_batch(BatchLimits(cost=5)).runs) == "a b c d e"
    lane = lane_of(run("a", cost=6), run("b", cost=0))
    assert names(lane.pop_batch(BatchLimits(cost=5)).runs) == "a"


def test_cut_run_stays_in_its_place() -> None:
    first, second = run("a b c", 1), run("d", 2)
    lane = lane_of(first, second)
    assert popped(lane, 2) == "a b"
    assert list(lane) == [first, second]
    assert names(first.entry.runs) == "a b c"
    assert popped(lane) == "c d"


def test_request_that_does_not_fit_is_not_overtaken_by_a_lower_priority() -> None:
    lane = lane_of(run("low", priority=0), run("big", cost=9), run("high", priority=9))
    assert names(lane.pop_batch(BatchLimits(10, 5)).runs) == "high"


def test_removed_runs_are_no_longer_urgent() -> None:
    a, b = run("a1 a2"), run("b")
    lane = lane_of(a, b)
    lane.urgent |= {a, b}
    remove(lane, b)
    popped(lane, 1)
    assert lane.urgent == {a}
    popped(lane, 1)
    assert not lane.urgent


def test_fields_for_the_model_count_as_bytes_of_each_request() -> None:
    one = run("a b", body=b"12345")
    assert bytes_of(one) == 10
    one.extra = {"abc": b"1234567"}
    assert bytes_of(one) == 30
    one.bodies = Rows(b"12", b"abc" * 2, 3)
    assert bytes_of(one) == 30
    one.bodies = [b"1", StoredBody("name", 1000)]
    assert (bytes_of(one), bytes_of(one, 0, 1), bytes_of(one, 1, 2)) == (1021, 11, 1010)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from("abc"),
            st.sampled_from((4, 4, 9)),
            st.integers(0, 3),
            st.integers(1, 9),
        ),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("take"), st.integers(0, 100)),
        st.tuples(st.just("pop"), st.integers(1, 9)),
        st.tuples(st.just("expire"), st.integers(0, 100)),
    ),
    max_size=60,
)
tenant_weights = st.sampled_from([NO_WEIGHTS, {"a": 4.0}, {"a": 0.5, "b": 2.0, "c": 3.0}])


@settings(deadline=None)
@given(steps, tenant_weights)
@example(  # a tenant that waits no more is forgotten while one run is served
    [("add", "a", 9, 0, 3), ("add", "b", 9, 0, 7), ("pop", 9), ("add", "a", 9, 0, 3), ("pop", 1)], NO_WEIGHTS
)
def test_runs_are_served_as_their_requests_would_be(
    operations: list[tuple[object, ...]], weights: Mapping[str, float]
) -> None:
    """Given the same requests in runs, and each by itself in another lane, expect the same order."""
    lane, singly = Lane(""), Lane("")
    number = count()
    for operation, *arguments in operations:
        present = list(lane)
        if operation == "add":
            tenant, priority, cost, size = arguments
            at = next(number)
            ids = [f"{at}.{index}" for index in range(int(str(size)))]
            fields = {"arrival_us": at, "priority": priority, "cost": cost, "tenant": tenant}
            insert(lane, run(" ".join(ids), **fields))  # type: ignore[arg-type]
            insert(singly, *(run(name, **fields) for name in ids))  # type: ignore[arg-type]
        elif operation == "pop" and present:
            size = int(str(arguments[0]))
            assert names_in_order(lane, weights) == names_in_order(singly, weights)
            expected = names_in_order(lane, weights)[:size]
            peeked = lane.peek_batch(BatchLimits(size), Shares(weights))
            assert [
                one.run.correlation_ids[one.start + at] for one in peeked for at in range(one.size)
            ] == expected
            assert popped(lane, size, weights).split() == popped(singly, size, weights).split() == expected
        elif present:
            chosen = present[int(str(arguments[0])) % len(present)]
            same = [one for name in chosen.correlation_ids for one in singly if one.correlation_ids == [name]]
            if operation == "remove":
                remove(lane, chosen)
            elif operation == "expire":
                if not chosen.is_late:  # a run expires once
                    lane.move_expired(chosen)
                    for one in same:
                        singly.move_expired(one)
            elif len(chosen) > 1:
                lane.take(chosen, [1])
                remove(singly, same[1])
            if operation == "remove":
                for one in same:
                    remove(singly, one)
        assert len(names_in_order(lane, weights)) == lane.count == singly.count
    remaining = names_in_order(lane, weights)
    assert remaining == names_in_order(singly, weights)
    assert not remaining or popped(lane, NO_LIMIT, weights).split() == remaining


def names_in_order(lane: Lane, weights: Mapping[str, float]) -> list[str]:
    return [
        name
        for one, start, size in lane.in_order(Shares(weights))
        for name in one.correlation_ids[start : start + size]
    ]


# --- expired requests --------------------------------------------------------------------------------------


def test_expired_request_is_behind_all_others_and_not_urgent() -> None:
    late, low, high = run("late", 1, priority=9), run("low", 5, priority=0), run("high", 6)
    lane = lane_of(late, high, low)
    lane.urgent.add(late)
    lane.move_expired(late)
    assert not lane.urgent
    # The arrival of the expired request does not count for the others.
    assert lane.front() == (1 + 4, 5)
    assert popped(lane) == "high low late"
    assert late.waits_in is None


def test_front_of_a_lane_with_only_expired_requests() -> None:
    late, later = run("late", 1), run("later", 2)
    lane = lane_of(later, late)
    lane.move_expired(late)
    assert lane.front() == (1 + 4, 2)
    lane.move_expired(later)
    assert lane.front() == (0, 1)
    insert(lane, run("new", 3))
    assert lane.front() == (1 + 4, 3)


# --- due times ---------------------------------------------------------------------------------------------


def due_us(one: Run, target_us: int | None) -> int:
    if one.deadline_us is not None:
        return one.deadline_us
    return NEVER_US if target_us is None else one.arrival_us + target_us


def test_earliest_due_time_is_of_waiting_requests_that_have_not_expired() -> None:
    first, second, third = (run(str(at), deadline_us=at) for at in (10, 20, 30))
    lane = lane_of(third, first)
    assert lane.earliest_due_us(None) == 10
    insert(lane, second)
    remove(lane, first)
    assert lane.earliest_due_us(None) == 20
    lane.move_expired(second)
    assert lane.earliest_due_us(None) == 30
    # Given a request without a deadline, the target counts for it, also when it changes.
    insert(lane, run("target", arrival_us=5))
    assert lane.earliest_due_us(None) == 30
    assert lane.earliest_due_us(7) == 12
    assert lane.earliest_due_us(20) == 25
    assert lane.earliest_due_us(None) == 30
    popped(lane, 2)
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
        arriving = run(str(at), chance.randrange(10), chance.randrange(3), deadline_us=deadline_us)
        insert(lane, arriving)
        waiting.append(arriving)
        if chance.random() < 0.5:
            remove(lane, waiting.pop(chance.randrange(len(waiting))))
        expected_us = min((due_us(r, target_us) for r in waiting), default=NEVER_US)
        assert lane.earliest_due_us(target_us) == expected_us


def test_due_index_does_not_keep_removed_requests() -> None:
    first = run("first", deadline_us=1)
    lane = lane_of(first)
    for at in range(1000):
        if at % 500 == 0:
            assert lane.earliest_due_us(None) == 1
        r = run(str(at), deadline_us=1000 + at)
        insert(lane, r)
        remove(lane, r)
    assert len(lane._due_index or ()) < 100
    assert lane.earliest_due_us(None) == 1
