"""ArrivalOrder: runs by arrival, in whatever order they are inserted and removed."""

from __future__ import annotations

from operator import itemgetter

import hypothesis.strategies as st
from hypothesis import given

from carpool.messages.requests import Entry, Run
from carpool_batcher.core.waiting.arrival_order import OUTDATED_MIN, ArrivalOrder
from carpool_batcher.core.waiting.fairness import FairQueue

RUNS = 2000


def run(arrival_us: int) -> Run:
    return Run(Entry("1-0", 0), ["r"], [b""], arrival_us=arrival_us)


@given(steps=st.lists(st.one_of(st.integers(0, 9), st.just("first"), st.floats(0, 1)), max_size=60))
def test_order_is_that_of_a_sorted_list(steps: list[int | str | float]) -> None:
    """Insert a run that arrived then, remove the first one, or remove one from any position."""
    order = ArrivalOrder()
    expected: list[tuple[int, int, Run]] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            inserted = run(step)
            order.insert(inserted)
            expected = sorted([*expected, (step, number, inserted)], key=itemgetter(0, 1))
        elif expected:
            at = 0 if isinstance(step, str) else min(int(step * len(expected)), len(expected) - 1)
            removed = expected.pop(at)[2]
            assert removed in order
            assert order.remove(removed) == bool(expected)
            assert removed not in order
        assert list(order) == [one for _, _, one in expected]
        if expected:
            assert order.first() is expected[0][2]


class CountedRun(Run):
    """A run that counts how often its arrival is read."""

    reads = 0

    @property
    def arrival_us(self) -> int:
        CountedRun.reads += 1
        return self._arrival_us

    @arrival_us.setter
    def arrival_us(self, arrival_us: int) -> None:
        self._arrival_us = arrival_us


def test_inserting_the_latest_first_does_not_look_at_all_others() -> None:
    """Given heads of sequences, or expired requests, in the worst order, expect no look at each for each."""
    queue, CountedRun.reads = FairQueue(), 0
    for number in range(RUNS):
        queue.insert(CountedRun(Entry("1-0", 0), ["r"], [b""], arrival_us=RUNS - number))
    assert CountedRun.reads <= 4 * RUNS


def test_runs_that_were_removed_are_not_kept() -> None:
    order = ArrivalOrder()
    order.insert(run(RUNS + 1))
    late = [run(RUNS - number) for number in range(RUNS)]
    for one in late:
        order.insert(one)
        order.remove(one)
        order.insert(one)
    assert len(order._heap) <= 2 * RUNS + OUTDATED_MIN + 1
    for one in late:
        order.remove(one)
    assert not order._heap
