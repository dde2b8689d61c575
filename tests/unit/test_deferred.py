"""The plans of the policy `deferred`, compared with every possible plan in small cases."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_batcher.core.learned.latency import LatencyModel
from carpool_batcher.core.learned.transit import MAGNITUDES, TransitBySize
from carpool_batcher.core.policies.plan import (
    Forecast,
    Plan,
    _earliest_in_batch,
    is_efficient,
    latest_start_us,
    plan,
)
from carpool_batcher.core.waiting.lane import NEVER_US

thorough = settings(deadline=None, max_examples=200)


def learned(intercept_us: int, slope_us: int) -> LatencyModel:
    """A model whose batches take exactly as long as the line says, without a margin."""
    latency = LatencyModel()
    for size in (1, 1, 1000, 1000):
        latency.observe(size, intercept_us + slope_us * size)
    return latency


def forecast_of(
    intercept: int = 10, slope: int = 1, *, max_size: int = 8, round_trip: int = 2, free_times: object = (0,)
) -> Forecast:
    assert isinstance(free_times, tuple)
    transit = same_for_all_sizes(0, 0, 0)
    forecast = Forecast(learned(intercept, slope), max_size, transit, transit.at_most_us, free_times)
    return with_transit(forecast, round_trip)


def same_for_all_sizes(usual: int, at_most: int, longest: int) -> TransitBySize:
    return TransitBySize(*((transit,) * MAGNITUDES for transit in (usual, at_most, longest)))


def with_transit(
    forecast: Forecast, at_most: int, *, usual: int | None = None, longest: int | None = None
) -> Forecast:
    """The same with a transit that do not depend on the size."""
    transit = same_for_all_sizes(
        at_most if usual is None else usual, at_most, at_most if longest is None else longest
    )
    return forecast._replace(transit=transit, transit_us=transit.at_most_us)


# --- sizes and times ---------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 20), st.integers(1, 40), st.integers(1, 64), st.integers(0, 50))
def test_batch_is_efficient_unless_waiting_for_one_more_raises_throughput(
    intercept: int, slope: int, size: int, max_size: int, gap: int
) -> None:
    """On a line, if one more does not raise it, no number of them does."""
    latency = learned(intercept, slope)
    waited = [
        (size + more) / (more * gap + latency.of(size + more)) for more in range(1, max_size - size + 1)
    ]
    best = max(waited, default=0)
    assert is_efficient(latency, size, max_size, gap) == (best <= size / latency.of(size) * (1 + 1e-12))


def test_batch_that_is_padded_waits_for_as_many_as_take_no_longer() -> None:
    steps = LatencyModel()
    for size in (1, 8, 9, 16, 17, 32) * 3:
        steps.observe(size, 100 * max(8, 1 << (size - 1).bit_length()))
    assert not is_efficient(steps, 6, 32, 10)
    assert is_efficient(steps, 8, 32, 10)
    assert not is_efficient(steps, 9, 32, 10)
    assert is_efficient(steps, 9, 32, 10_000)


def test_latest_start_leaves_time_for_one_more_request() -> None:
    forecast = forecast_of(10, 1, max_size=8, round_trip=2)
    assert latest_start_us(forecast, 100, 3) == 100 - 2 - (10 + 4)
    assert latest_start_us(forecast, 100, 7) == latest_start_us(forecast, 100, 8) == 100 - 2 - (10 + 8)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 8))
def test_largest_batch_in_time(start: int, deadline: int, limit: int) -> None:
    forecast = forecast_of(10, 3)
    in_time = [size for size in range(1, limit + 1) if forecast.arrives_us(start, size) <= deadline]
    assert forecast.largest_in_time(start, deadline, limit) == max(in_time, default=0)


# --- plans -------------------------------------------------------------------------------------------------

deadlines = st.lists(st.integers(5, 90) | st.just(NEVER_US), min_size=1, max_size=7)
forecasts = st.builds(
    forecast_of,
    st.integers(1, 20),
    st.integers(0, 8),
    max_size=st.integers(1, 4),
    round_trip=st.integers(0, 3),
    free_times=st.lists(st.integers(0, 40), min_size=1, max_size=2).map(lambda later: (0, *later[1:])),
)


def all_in_time(forecast: Forecast, waiting: list[int], now: int) -> bool:
    """Whether all are in time for some division into batches, each on the first process that is free."""
    for cuts in range(len(waiting)):
        for at in combinations(range(1, len(waiting)), cuts):
            ends = [0, *at, len(waiting)]
            free_times = [max(now, free) for free in forecast.free_times_us]
            batches = [waiting[begin:end] for begin, end in pairwise(ends)]
            for batch in batches:
                start = min(free_times)
                if len(batch) > forecast.max_size or forecast.arrives_us(start, len(batch)) > min(batch):
                    break
                free_times[free_times.index(start)] = start + forecast.times.of(len(batch))
            else:
                return True
    return False


def test_doubtful_request_is_served_where_no_other_is_in_time() -> None:
    """Given a transit of 10 and at times 30, and deadlines that 30 would miss, expect a batch of those for
    which 10 are enough; and expect them to be refused where another request can be in time even with 30.
    """
    forecast = with_transit(forecast_of(10, 1), 30, usual=10)
    assert plan(forecast, [15, 25, 26], 0) == Plan([0], 2)
    assert plan(forecast, [15, 25, 26, 60], 0) == Plan([0, 1, 2], 1)


@thorough
@given(forecasts, deadlines)
def test_planned_batch_is_in_time(forecast: Forecast, waiting: list[int]) -> None:
    refused, size = plan(forecast, waiting, 0)
    batch = [deadline for at, deadline in enumerate(waiting) if at not in refused][:size]
    assert len(batch) == size <= forecast.max_size
    assert all(forecast.arrives_us(0, size) <= deadline for deadline in batch)
    # And there is a batch unless all are refused.
    assert size or len(refused) == len(waiting)


@thorough
@given(forecasts, deadlines)
def test_requests_are_refused_only_if_necessary(forecast: Forecast, waiting: list[int]) -> None:
    refused, _ = plan(forecast, waiting, 0)
    hopeless = [at for at, deadline in enumerate(waiting) if forecast.arrives_us(0, 1) > deadline]
    others = [at for at in range(len(waiting)) if at not in hopeless]
    assert refused[: len(hopeless)] == hopeless
    # Of the others, those at the front, and only if not all deadlines can be met.
    limited = [at for at in others if waiting[at] < NEVER_US]
    assert refused[len(hopeless) :] == limited[: len(refused) - len(hopeless)]
    if len(refused) > len(hopeless):
        assert not eager_is_in_time(forecast, [waiting[at] for at in others])


def eager_is_in_time(forecast: Forecast, waiting: list[int]) -> bool:
    """Whether all are in time if each batch is the largest that is in time."""
    free_times = list(forecast.free_times_us)
    while waiting:
        start = min(free_times)
        sizes = [
            size
            for size in range(1, min(len(waiting), forecast.max_size) + 1)
            if forecast.arrives_us(start, size) <= min(waiting[: forecast.max_size])
        ]
        if not sizes:
            return False
        free_times[free_times.index(start)] = start + forecast.times.of(max(sizes))
        waiting = waiting[max(sizes) :]
    return True


@thorough
@given(forecasts, st.lists(st.integers(5, 90), min_size=1, max_size=6))
def test_no_request_is_refused_if_one_batch_in_order_of_deadlines_can_serve_all(
    forecast: Forecast, waiting: list[int]
) -> None:
    """Requests with the same expiration arrive in the order of their deadlines."""
    waiting = sorted(deadline for deadline in waiting if deadline >= forecast.arrives_us(0, 1))
    one_batch = len(waiting) <= forecast.max_size
    if waiting and one_batch and len(forecast.free_times_us) == 1 and all_in_time(forecast, waiting, 0):
        assert not plan(forecast, waiting, 0).refused


def test_first_request_is_refused_if_its_deadline_keeps_the_batch_too_small() -> None:
    # Given a model that takes 100 per batch and 1 per request, and a request with time for a batch of 1
    forecast = forecast_of(100, 1, max_size=8, round_trip=0)
    tight, rest = 101, [200] * 8
    # When not all can be served, that request is refused rather than the other eight
    assert plan(forecast, [tight, *rest], 0) == ([0], 8)
    # But not when there is time for both
    assert plan(forecast, [tight, *[300] * 8], 0) == ([], 1)


def test_first_request_is_refused_if_small_batches_would_make_those_behind_late() -> None:
    # Given three free processes, 100 per batch and 1 per request, and a first request with time for 7
    forecast = forecast_of(100, 1, max_size=8, round_trip=0)._replace(free_times_us=(0, 0, 0))
    crowd = [107 + 4 * at for at in range(16)]  # more than the processes can execute
    # When all that wait fit into one batch for each process, none is refused; but when they do not
    assert plan(forecast, crowd, 0) == ([], 7)
    assert plan(forecast, crowd, 0, behind=7) == ([], 7)
    assert plan(forecast, crowd, 0, behind=8) == ([0], 8)
    # And none is if later ones are due so much later that there is time for all
    assert plan(forecast, [107 + 8 * at for at in range(16)], 0, behind=100) == ([], 7)


def test_of_one_batch_nothing_is_concluded_about_those_behind() -> None:
    forecast = forecast_of(100, 1, max_size=8, round_trip=0)
    assert plan(forecast, [107, *[300] * 7], 0, behind=100) == ([], 7)


def test_first_request_that_is_late_if_the_ways_take_long_is_refused_if_others_replace_it() -> None:
    # Given a transit of 2, and of 6 now and then, and a first request with time for those of 2
    forecast = with_transit(forecast_of(10, 1, max_size=2), 2, longest=6)
    tight = 2 + 12
    # When not all can be served, and the batch is as large without it, it is refused
    assert plan(forecast, [tight, *[40] * 9], 0) == ([0], 2)
    # But not if there is time for all, or if the batch were smaller
    assert plan(forecast, [tight, *[1000] * 9], 0) == ([], 2)
    assert plan(forecast, [tight] * 9, 0) == ([], 2)


def padded(up_to_eight: int) -> Forecast:
    """A model that takes 10 for up to 4 requests, and this for up to 8; transit 2, and 4 in one of ten."""
    latency = LatencyModel()
    for size in (1, 4, 5, 8) * 3:
        latency.observe(size, 10 if size <= 4 else up_to_eight)
    return with_transit(forecast_of(max_size=8)._replace(times=latency), 4, usual=2)


def test_batch_is_planned_for_usual_ways_if_more_are_expected_to_be_in_time() -> None:
    # Given more requests than can be served, with time for 8 if transit is as usual, or else for 4
    assert plan(padded(11), [11 + 2] * 32, 0) == ([], 8)
    # But not when two batches of 4 serve as many in that time, and more surely
    assert plan(padded(20), [20 + 2] * 32, 0) == ([], 4)


@thorough
@given(forecasts, deadlines, st.integers(0, 3), st.integers(0, 10))
def test_planned_batch_is_in_time_if_its_ways_are_as_usual(
    forecast: Forecast, waiting: list[int], usual: int, longer: int
) -> None:
    forecast = with_transit(forecast, usual + longer, usual=usual, longest=usual + 2 * longer)
    refused, size = plan(forecast, waiting, 0)
    batch = [deadline for at, deadline in enumerate(waiting) if at not in refused][:size]
    assert len(batch) == size <= forecast.max_size
    as_usual = forecast._replace(transit_us=forecast.transit.usual_us)
    assert all(as_usual.arrives_us(0, size) <= deadline for deadline in batch)
    assert size or len(refused) == len(waiting)


def test_requests_without_a_deadline_are_not_refused() -> None:
    forecast = forecast_of(100, 1, max_size=8, round_trip=0)
    assert plan(forecast, [NEVER_US, 101, NEVER_US, *[200] * 8], 0) == ([1], 8)


def test_deadline_outside_of_the_first_batch_does_not_limit_its_size() -> None:
    forecast = forecast_of(10, 5, max_size=4, round_trip=0)
    assert plan(forecast, [100, 100, 100, 100, 20], 0) == ([], 4)
    assert plan(forecast, [100, 100, 100, 20], 0).size == 2


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 5))
def test_earliest_deadline_within_a_batch(deadlines_us: list[int], window: int) -> None:
    among = [min(deadlines_us[at : at + window]) for at in range(len(deadlines_us))]
    assert _earliest_in_batch(deadlines_us, window) == among


def test_all_hopeless_requests_are_refused_at_once_at_any_position() -> None:
    forecast = forecast_of(10, 1, max_size=8, round_trip=2)
    assert plan(forecast, [5, 100, 12, NEVER_US, 13], 0) == ([0, 2], 1)
    assert plan(forecast, [5, 12], 0) == ([0, 1], 0)


def test_planning_takes_linear_time() -> None:
    """By the number of calls of the latency model: a constant number per request."""

    class CountingModel(LatencyModel):
        calls = 0

        def of(self, size: int) -> int:
            CountingModel.calls += 1
            return super().of(size)

        def at_most(self, size: int) -> int:
            CountingModel.calls += 1
            return super().at_most(size)

    latency = CountingModel()
    for size in (1, 1000, 1000):
        latency.observe(size, 10 + size)
    forecast = forecast_of()._replace(times=latency, max_size=32)
    plan(forecast, [20 + at for at in range(1000)], 0)
    assert CountingModel.calls < 1000 * 12
