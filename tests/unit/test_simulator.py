"""The simulator: each request ends exactly once, and times are exact."""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import Any
from unittest import mock

import pytest

from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival, bursty, poisson, recorded
from carpool_cli.tuning.simulator import (
    PROGRESS_REQUESTS,
    Requirement,
    Simulation,
    SimulationResult,
    World,
    lognormal,
    normal,
)

# A batch of n executes for 1000 + 100 n us, and is on the way for 200 us before and 300 us after that.
WORLD = World(intercept_us=1000, slope_us=100, out_us=200, back_us=300)


def run(
    arrivals: Any,
    world: World = WORLD,
    seed: int = 0,
    *,
    in_order: bool = False,
    requirement: Requirement | None = None,
    **settings: Any,
) -> SimulationResult:
    scheduler = Scheduler(ModelSettings(**settings), world.processes)
    return Simulation(scheduler, world, seed, in_order=in_order, requirement=requirement).run(arrivals)


def test_lone_request_takes_round_trip_and_execution() -> None:
    result = run(recorded([70]))
    assert result.latencies_us == [200 + 1100 + 300]
    assert (result.batch_sizes, result.reasons, result.duration_us) == ([1], {"idle": 1}, 1600)


def test_requests_that_wait_share_a_batch_which_arrives_when_the_process_is_idle() -> None:
    result = run(recorded([0, 100, 150, 2000]))
    # The first batch settles at 1600. Until then l(n) is not known, so the next two requests are dispatched
    # at 1600, execute from 1800 to 3000, and settle at 3300. One alone took 1100, so the batcher expects a
    # quarter more, 1375, for two, and their settling at 1600 + 500 + 1375 = 3475. It dispatches the last
    # request a round trip before that, at 2975; it executes from 3175 to 4275, and settles at 4575.
    assert result.batch_sizes == [1, 2, 1]
    assert result.latencies_us == [1600, 3200, 3150, 2575]
    assert result.duration_us == 4575


def test_two_processes_execute_in_parallel() -> None:
    times_us = [0, 10]
    assert run(recorded(times_us), WORLD._replace(processes=2)).latencies_us == [1600, 1600]
    assert run(recorded(times_us)).latencies_us == [1600, 1600 - 10 + 1600]


def test_expired_request_is_answered_at_its_deadline_and_only_once() -> None:
    result = run([Arrival(0), Arrival(0, expiration_us=1599), Arrival(5, expiration_us=100)])
    # The first two share a batch until 1700; one of them expires in flight, the third while it waits.
    assert result.latencies_us == [1700]
    assert (result.late, result.refused) == (2, 0)


def test_result_exactly_at_the_deadline_is_in_time() -> None:
    assert run([Arrival(0, expiration_us=1600)]).good == 1
    assert run([Arrival(0, expiration_us=1599)]).late == 1


def test_a_request_is_known_some_time_after_it_was_sent_and_its_deadline_counts_from_then() -> None:
    far = WORLD._replace(in_us=400)
    assert run([Arrival(0, expiration_us=2000)], far).latencies_us == [2000]
    assert run([Arrival(0, expiration_us=1999)], far).late == 1


def test_a_batcher_is_late_only_at_times_at_which_nothing_arrives() -> None:
    """A batch that waits for more requests is dispatched when its delay has passed."""
    late = WORLD._replace(late_us=70)
    assert run([Arrival(0)], late).latencies_us == [1600]
    assert run([Arrival(0)], late, max_queue_delay_ms=2).latencies_us == [3670]


def test_request_is_refused_when_the_queue_is_full() -> None:
    # One executes, one is dispatched ahead, two wait.
    result = run(recorded([0, 1, 2, 3, 4]), max_queue_size=2, max_batch_size=1)
    assert (result.good, result.refused) == (4, 1)


@pytest.mark.parametrize(
    ("latency_ms", "from_us", "misses_max", "answered"),
    [
        (2.6, 0, 0, 2),
        (3.5, 0, 0, 3),
        (3.5, 0, 97, 3),
        (3.5, 0, 98, 100),
        (3.5, 500, 49, 3),
        (3.5, 500, 50, 100),  # earlier requests do not count
        (200.0, 0, 0, 100),
    ],
)
def test_simulation_ends_when_it_is_certain_that_a_requirement_is_missed(
    latency_ms: float, from_us: int, misses_max: int, answered: int
) -> None:
    # All arrive within 1 ms. The first answers take 1.6, 2.69 and 3.78 ms, and the last one 110 ms.
    requirement = Requirement(latency_ms, from_us, misses_max)
    result = run(recorded(range(0, 1000, 10)), requirement=requirement, max_batch_size=1)
    assert (result.good, result.is_complete) == (answered, answered == 100)


@pytest.mark.parametrize("seed", range(6))
def test_each_request_ends_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = [
        arrival._replace(
            expiration_us=chance.choice([None, 2000, 5000, 20_000]),
            lane=chance.choice(["", "a", "b"]),
            priority=chance.randrange(10),
        )
        for arrival in bursty(chance.choice([500, 2000, 8000]), 1000, seed)
    ]
    result = run(
        arrivals,
        WORLD._replace(processes=chance.choice([1, 3]), spread=normal(0.3), round_trip_spread=normal(0.3)),
        seed,
        policy=chance.choice(["eager", "deferred"]),
        max_batch_size=chance.choice([1, 4, 16]),
        max_queue_delay_ms=chance.choice([0, 3]),
        max_queue_size=chance.choice([50, 10_000]),
        expiration_action=chance.choice(["reject", "delay"]),
        in_order=chance.choice([False, True]),
    )
    assert result.requests == len(arrivals)
    assert len(result.good_arrivals_us) == result.good > 0
    assert sum(result.reasons.values()) == len(result.batch_sizes)
    assert sum(result.batch_sizes) >= result.good


def test_same_seed_gives_same_run() -> None:
    noisy = WORLD._replace(spread=normal(0.2))
    first, again, other = (run(poisson(1500, 500, 1), noisy, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.latencies_us != other.latencies_us


def test_noise_varies_execution_but_not_its_mean() -> None:
    apart = recorded(range(0, 5_000_000, 5000))  # so that each request has a batch of its own
    execution_us = [
        latency_us - 500 for latency_us in run(apart, WORLD._replace(spread=normal(0.2))).latencies_us
    ]
    assert sum(execution_us) / len(execution_us) == pytest.approx(1100, rel=0.05)
    spread = (sum((each_us - 1100) ** 2 for each_us in execution_us) / len(execution_us)) ** 0.5
    assert spread == pytest.approx(220, rel=0.15)


def test_result_is_withheld_until_earlier_ones_are_ready() -> None:
    # Two processes, batches of one. The first request has the lowest priority, so it executes after another:
    # 200 + 1100 + 1100 + 300.
    two = WORLD._replace(processes=2)
    times = [
        Arrival(0, lane="a", priority=0),
        Arrival(0, lane="b", priority=9),
        Arrival(0, lane="b", priority=9),
    ]
    unordered = run(times, two, max_batch_size=1)
    ordered = run(times, two, max_batch_size=1, in_order=True)
    assert sorted(unordered.latencies_us) == [1600, 1600, 2700]
    assert ordered.latencies_us == [2700, 2700, 2700]


def test_result_withheld_beyond_its_deadline_is_late() -> None:
    two = WORLD._replace(processes=2)
    times = [Arrival(0, lane="a", priority=0), *2 * [Arrival(0, 2000, lane="b", priority=9)]]
    result = run(times, two, max_batch_size=1, in_order=True)
    assert (result.latencies_us, result.late) == ([2700], 2)


def test_no_result_is_withheld_for_an_expired_request() -> None:
    two = WORLD._replace(processes=2)
    times = [Arrival(0, 2500, lane="a", priority=0), *2 * [Arrival(0, lane="b", priority=9)]]
    result = run(times, two, max_batch_size=1, in_order=True)
    assert (result.latencies_us, result.late) == ([2500, 2500], 1)


@pytest.mark.parametrize("seed", range(4))
def test_results_are_delivered_in_order_of_arrival(seed: int) -> None:
    apart = [
        arrival._replace(lane=random.Random(arrival.at_us).choice(["a", "b"]), priority=arrival.at_us % 10)
        for arrival in bursty(4000, 700, seed)
    ]
    world = WORLD._replace(processes=3, spread=normal(0.3))
    unordered, ordered = (
        run(apart, world, seed, max_batch_size=4, in_order=order) for order in (False, True)
    )
    assert ordered.good_arrivals_us == sorted(ordered.good_arrivals_us) == sorted(unordered.good_arrivals_us)
    assert ordered.batch_sizes == unordered.batch_sizes  # withheld results do not change the batches
    assert sum(ordered.latencies_us) > sum(unordered.latencies_us)


def test_each_request_of_a_batch_adds_to_its_round_trip() -> None:
    world = WORLD._replace(round_trip_slope_us=40)
    # A batch of two: 200 + 40 out, execution 1200, 300 + 40 back.
    assert run(recorded([0, 0]), world).latencies_us == [1780, 1780]


def test_slow_round_trip_is_slow_both_ways() -> None:
    slow = WORLD._replace(round_trip_slope_us=40, round_trip_spread=(2.0,))
    result = run(recorded([0, 10]), slow)
    # The first takes 2 (200 + 20) + 1100 + 2 (300 + 20); then the second is dispatched.
    assert result.latencies_us == [2180, 2180 - 10 + 2180]


UNEVEN = (1.0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("world", "slow_us"),
    [
        (WORLD._replace(spread=UNEVEN), 1600 + 2 * 1100),
        (WORLD._replace(round_trip_spread=UNEVEN), 1600 + 2 * 500),
    ],
)
def test_spreads_are_sampled_evenly(world: World, slow_us: int) -> None:
    apart = recorded(range(0, 20_000_000, 10_000))  # each request in a batch of one
    latencies_us = run(apart, world).latencies_us
    assert set(latencies_us) == {1600, slow_us}
    assert latencies_us.count(slow_us) / len(latencies_us) == pytest.approx(0.25, abs=0.04)


def test_normal_spread_keeps_the_mean_and_has_a_minimum() -> None:
    factors = normal(0.2)
    assert sum(factors) / len(factors) == pytest.approx(1.0)
    assert sum((factor - 1) ** 2 for factor in factors) / len(factors) == pytest.approx(0.04, rel=0.1)
    assert min(normal(1.0)) == 0.1
    assert normal(0.0) == (1.0,)


def test_lognormal_spread_has_the_median_and_the_share_that_were_asked_for() -> None:
    factors = sorted(lognormal(3.0))
    assert factors[len(factors) // 2] == pytest.approx(1.0, rel=0.05)
    assert sum(factor <= 3.0 for factor in factors) / len(factors) == pytest.approx(0.9, abs=0.01)
    assert lognormal(1.0) == lognormal(0.0) == (1.0,)


def test_throughput_grows_with_processes() -> None:
    def served(processes: int) -> float:
        result = run(poisson(20_000, 4000, 1), WORLD._replace(processes=processes), max_batch_size=4)
        return 1e6 * result.good / result.duration_us

    one, three = served(1), served(3)
    assert one == pytest.approx(4 / 0.0014, rel=0.02)  # full batches of 4 without a pause
    assert three == pytest.approx(3 * one, rel=0.02)


def in_lanes(per_s: float, number: int, expirations_us: dict[str, int]) -> list[Arrival]:
    """Requests at random times, for each lane in turn."""
    lanes = list(expirations_us)
    trace = enumerate(poisson(per_s, number, 1))
    return [
        arrival._replace(lane=lane, expiration_us=expirations_us[lane])
        for at, arrival in trace
        for lane in (lanes[at % len(lanes)],)
    ]


@pytest.mark.parametrize("first", ["fast", "slow"])
def test_deferred_meets_deadlines_of_lanes_with_different_execution_times(first: str) -> None:
    world = World(processes=4, intercept_us=5000, slope_us=50, slower={"slow": 10})
    lanes = {"fast": 30_000, "slow": 150_000}
    alone = in_lanes(100, 60, {first: lanes[first]})
    begins_us = alone[-1].at_us + 1_000_000
    both = [arrival._replace(at_us=begins_us + arrival.at_us) for arrival in in_lanes(400, 4000, lanes)]
    result = run(alone + both, world, policy="deferred", max_batch_size=64)
    assert result.good > 0.97 * result.requests


def test_deferred_tries_where_ways_take_too_long_now_and_then() -> None:
    """Given ways of 3 ms that take ten for one batch in ten, and deadlines of 15 ms, expect that requests are
    not given up because of the one: then processes would be idle.
    """
    ways = [math.exp(NormalDist(0, 0.9).inv_cdf((at + 0.5) / 200)) for at in range(200)]
    world = World(intercept_us=2000, slope_us=1000, out_us=1200, back_us=1800, round_trip_spread=ways)
    result = run(poisson(500, 5000, 1, 15_000), world, policy="deferred", max_batch_size=64)
    assert result.good > 0.4 * result.requests


def test_deferred_recovers_from_a_cold_start() -> None:
    warm, cold = World(intercept_us=5000), World(intercept_us=900_000)
    simulation = Simulation(Scheduler(ModelSettings(policy="deferred", max_batch_size=32), 1), cold)
    arrivals = list(poisson(500, 10_000, 1, 50_000))

    def warm_up(_: int) -> None:
        simulation._world = warm

    simulation._on_progress = warm_up
    result = simulation.run(arrivals)
    last_us = arrivals[-1].at_us
    late_half = [at_us for at_us in result.good_arrivals_us if at_us > last_us / 2]
    assert len(late_half) > 0.97 * sum(arrival.at_us > last_us / 2 for arrival in arrivals)


def test_deferred_keeps_a_process_busy_though_round_trips_vary() -> None:
    """Given short batches and more requests than can be served, expect nearly the most that can be.

    A batch that comes late leaves the process idle, and one that comes early must not be late itself.
    """
    world = World(intercept_us=2000, slope_us=25, out_us=450, back_us=450, round_trip_spread=lognormal(1.7))
    most_per_s = 8 / world.execution_us(8) * 1e6
    result = run(poisson(1.5 * most_per_s, 8000, 1, 50_000), world, policy="deferred", max_batch_size=8)
    assert result.served_per_s > 0.955 * most_per_s


def test_progress_is_reported_regularly() -> None:
    reported: list[int] = []
    Simulation(Scheduler(ModelSettings(), 1), WORLD, on_progress=reported.append).run(
        poisson(1000, 2 * PROGRESS_REQUESTS + 1)
    )
    assert reported == [PROGRESS_REQUESTS, PROGRESS_REQUESTS]


def test_empty_trace_gives_empty_result() -> None:
    result = run([])
    assert (result.requests, result.duration_us, result.latency_ms(0.99), result.mean_batch) == (0, 0, 0, 0)


def test_deferred_remembers_execution_time_of_large_batches() -> None:
    """Sixteen workers at low load execute only batches of the efficient size, for a long time."""
    world = World(16, 2000.0, 1000.0)
    arrivals = list(poisson(4600, 12_000, 1, 50_000))
    result = run(arrivals, world, policy="deferred", max_batch_size=256)
    assert (result.good, result.late, result.refused) == (12_000, 0, 0)


@pytest.mark.parametrize(("processes", "load"), [(2, 0.1), (4, 0.2), (16, 0.15)])
def test_dispatch_at_even_intervals_shortens_queue_delay(processes: int, load: float) -> None:
    """At even intervals there is always a worker that becomes idle soon."""
    world = World(processes, 5000.0, 50.0)
    rate = load * processes * 256 / world.execution_us(256) * 1e6
    arrivals = list(poisson(rate, max(6000, int(rate / 2)), 3))
    evenly = run(arrivals, world, max_batch_size=256)
    with mock.patch.object(Capacity, "spacing_ends_us", lambda _: 0):
        in_bursts = run(arrivals, world, max_batch_size=256)
    assert sum(evenly.latencies_us) < 0.91 * sum(in_bursts.latencies_us)
    assert evenly.latency_ms(0.99) < 0.91 * in_bursts.latency_ms(0.99)
