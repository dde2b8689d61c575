"""The policy `deferred`, against all that could be done: small cases, and every way to serve them."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_batcher.core.deferred import (
    EFFICIENT,
    Outlook,
    _earliest_ahead,
    efficient_size,
    latest_start_us,
    plan,
)
from carpool_batcher.core.lane import NEVER
from carpool_batcher.core.latency import LatencyModel

thorough = settings(deadline=None, max_examples=400)


def known(intercept_us: int, slope_us: int) -> LatencyModel:
    """Of a model that is never late: nine of ten take as long as the line says, and so does the tenth."""
    latency = LatencyModel()
    for size in (1, 1000):
        latency.observe(size, intercept_us + slope_us * size)
    return latency


def outlook(
    intercept: int = 10, slope: int = 1, *, max_size: int = 8, trip: int = 2, frees: object = (0,)
) -> Outlook:
    assert isinstance(frees, tuple)
    return Outlook(known(intercept, slope), max_size, trip, frees)


# --- sizes and times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_size", [1, 2, 3, 8, 32, 100])
@pytest.mark.parametrize(("intercept", "slope"), [(0, 10), (10, 10), (1000, 1), (5000, 50), (100, 0)])
def test_efficient_is_the_smallest_batch_that_is_nearly_as_good(
    intercept: int, slope: int, max_size: int
) -> None:
    latency = known(intercept, slope)
    rates = {size: size / latency.of(size) for size in range(1, max_size + 1)}
    expected = min(size for size, rate in rates.items() if rate >= EFFICIENT * rates[max_size])
    assert efficient_size(latency, max_size) == expected


def test_nothing_is_known_anything_is_efficient() -> None:
    assert efficient_size(LatencyModel(), 32) == 1


def test_a_batch_leaves_before_one_more_would_be_late() -> None:
    look = outlook(10, 1, max_size=8, trip=2)
    assert latest_start_us(look, 100, 3) == 100 - 2 - (10 + 4)
    assert latest_start_us(look, 100, 7) == latest_start_us(look, 100, 8) == 100 - 2 - (10 + 8)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 8))
def test_as_many_fit_as_are_in_time(start: int, deadline: int, limit: int) -> None:
    look = outlook(10, 3)
    in_time = [size for size in range(1, limit + 1) if look.done_us(start, size) <= deadline]
    assert look.fits(start, deadline, limit) == max(in_time, default=0)


# --- who leaves, and who is given up -----------------------------------------------------------------------

deadlines = st.lists(st.integers(5, 90) | st.just(NEVER), min_size=1, max_size=7)
looks = st.builds(
    outlook,
    st.integers(1, 20),
    st.integers(0, 8),
    max_size=st.integers(1, 4),
    trip=st.integers(0, 3),
    frees=st.lists(st.integers(0, 40), min_size=1, max_size=2).map(lambda later: (0, *later[1:])),
)


def all_in_time(look: Outlook, waiting: list[int], now: int) -> bool:
    """Whether some way to cut the row into batches has everybody in time; each takes who is free first."""
    for cuts in range(len(waiting)):
        for at in combinations(range(1, len(waiting)), cuts):
            ends = [0, *at, len(waiting)]
            frees = [max(now, free) for free in look.frees_us]
            batches = [waiting[begin:end] for begin, end in pairwise(ends)]
            for batch in batches:
                start = min(frees)
                if len(batch) > look.max_size or look.done_us(start, len(batch)) > min(batch):
                    break
                frees[frees.index(start)] = start + look.latency.of(len(batch))
            else:
                return True
    return False


@thorough
@given(looks, deadlines)
def test_nobody_leaves_who_would_be_late(look: Outlook, waiting: list[int]) -> None:
    given_up, leave = plan(look, waiting, 0)
    leaving = [one for at, one in enumerate(waiting) if at not in given_up][:leave]
    assert len(leaving) == leave <= look.max_size
    assert all(look.done_us(0, leave) <= one for one in leaving)
    # And somebody always leaves, or is told
    assert leave or len(given_up) == len(waiting)


@thorough
@given(looks, deadlines)
def test_nobody_is_given_up_who_does_not_have_to_be(look: Outlook, waiting: list[int]) -> None:
    given_up, _ = plan(look, waiting, 0)
    hopeless = [at for at, one in enumerate(waiting) if look.done_us(0, 1) > one]
    others = [at for at in range(len(waiting)) if at not in hopeless]
    assert given_up[: len(hopeless)] == hopeless
    # Of the others a row from the front, and only if there are deadlines that cannot all be met
    limited = [at for at in others if waiting[at] < NEVER]
    assert given_up[len(hopeless) :] == limited[: len(given_up) - len(hopeless)]
    if len(given_up) > len(hopeless):
        assert not eager_is_in_time(look, [waiting[at] for at in others])


def eager_is_in_time(look: Outlook, waiting: list[int]) -> bool:
    """Whether the largest batch that is in time, and again, has everybody in time."""
    frees = list(look.frees_us)
    while waiting:
        start = min(frees)
        sizes = [
            size
            for size in range(1, min(len(waiting), look.max_size) + 1)
            if look.done_us(start, size) <= min(waiting[: look.max_size])
        ]
        if not sizes:
            return False
        frees[frees.index(start)] = start + look.latency.of(max(sizes))
        waiting = waiting[max(sizes) :]
    return True


@thorough
@given(looks, st.lists(st.integers(5, 90), min_size=1, max_size=6))
def test_equal_waits_lose_nobody_whom_some_plan_would_keep(look: Outlook, waiting: list[int]) -> None:
    """In order of deadlines, as they are when all ask for the same, the largest first is best."""
    waiting = sorted(one for one in waiting if one >= look.done_us(0, 1))
    one_batch = len(waiting) <= look.max_size
    if waiting and one_batch and len(look.frees_us) == 1 and all_in_time(look, waiting, 0):
        assert not plan(look, waiting, 0).given_up


def test_a_head_that_keeps_its_batch_small_is_given_up_for_the_rest() -> None:
    # Given a model that costs 100 a batch and 1 a request, and one who has time for a batch of 1
    look = outlook(100, 1, max_size=8, trip=0)
    tight, rest = 101, [200] * 8
    # When all cannot be served, the one is given up rather than the eight
    assert plan(look, [tight, *rest], 0) == ([0], 8)
    # But not when there is time for both
    assert plan(look, [tight, *[300] * 8], 0) == ([], 1)


def test_who_has_no_deadline_is_not_given_up_with_a_head_that_is() -> None:
    look = outlook(100, 1, max_size=8, trip=0)
    assert plan(look, [NEVER, 101, NEVER, *[200] * 8], 0) == ([1], 8)


def test_who_shares_no_batch_with_the_head_does_not_hurry_it() -> None:
    look = outlook(10, 5, max_size=4, trip=0)
    assert plan(look, [100, 100, 100, 100, 20], 0) == ([], 4)
    assert plan(look, [100, 100, 100, 20], 0).leave == 2


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 5))
def test_the_earliest_among_those_of_one_batch(deadlines_us: list[int], window: int) -> None:
    among = [min(deadlines_us[at : at + window]) for at in range(len(deadlines_us))]
    assert _earliest_ahead(deadlines_us, window) == among


def test_all_who_cannot_be_met_are_told_at_once_wherever_they_stand() -> None:
    look = outlook(10, 1, max_size=8, trip=2)
    assert plan(look, [5, 100, 12, NEVER, 13], 0) == ([0, 2], 1)
    assert plan(look, [5, 12], 0) == ([0, 1], 0)


def test_a_row_of_a_thousand_is_planned_without_going_over_it_for_each() -> None:
    """Bound by questions to the latency: a constant number for each request."""

    class Counted(LatencyModel):
        asked = 0

        def of(self, size: int) -> int:
            Counted.asked += 1
            return super().of(size)

        def at_most(self, size: int) -> int:
            Counted.asked += 1
            return super().at_most(size)

    latency = Counted()
    latency.observe(1, 11)
    latency.observe(1000, 1010)
    look = Outlook(latency, 32, 2, (0,))
    plan(look, [20 + at for at in range(1000)], 0)
    assert Counted.asked < 1000 * 12
