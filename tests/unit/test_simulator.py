"""The simulator: every request has one end, and times are exact."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival, bursty, poisson, recorded
from carpool_cli.tuning.simulator import STEP, Outcome, Simulation, World, normal

# A batch of n takes 1000 + 100 n, and is there after 200 and heard of after 300 more.
WORLD = World(intercept_us=1000, slope_us=100, out_us=200, back_us=300)


def run(
    arrivals: Any, world: World = WORLD, seed: int = 0, *, in_order: bool = False, **settings: Any
) -> Outcome:
    scheduler = Scheduler(ModelSettings(**settings), world.processes)
    return Simulation(scheduler, world, seed, in_order=in_order).run(arrivals)


def test_a_request_alone_takes_the_way_and_its_computation() -> None:
    outcome = run(recorded([70]))
    assert outcome.latencies_us == [200 + 1100 + 300]
    assert (outcome.sizes, outcome.reasons, outcome.took_us) == ([1], {"idle": 1}, 1600)


def test_who_comes_meanwhile_rides_together_and_leaves_in_time_for_the_process_to_go_on() -> None:
    outcome = run(recorded([0, 100, 150, 2000]))
    # The first is heard of at 1600. Until then nothing is known of l(n), so the next two leave at 1600, are
    # computed from 1800 to 3000, and heard of at 3300. One alone took 1100, so two are thought to take a
    # quarter more, 1375, and to be heard of at 1600 + 500 + 1375 = 3475. The last leaves a trip before that,
    # at 2975, is computed from 3175 to 4275, and heard of at 4575.
    assert outcome.sizes == [1, 2, 1]
    assert outcome.latencies_us == [1600, 3200, 3150, 2575]
    assert outcome.took_us == 4575


def test_two_processes_compute_side_by_side() -> None:
    times_us = [0, 10]
    assert run(recorded(times_us), WORLD._replace(processes=2)).latencies_us == [1600, 1600]
    assert run(recorded(times_us)).latencies_us == [1600, 1600 - 10 + 1600]


def test_a_deadline_is_answered_when_it_passes_and_not_again_when_the_batch_is_done() -> None:
    outcome = run([Arrival(0), Arrival(0, expiration_us=1599), Arrival(5, expiration_us=100)])
    # The first two ride together until 1700; one of them expires in flight, the third while it waits.
    assert outcome.latencies_us == [1700]
    assert (outcome.late, outcome.refused) == (2, 0)


def test_a_result_at_the_very_deadline_is_in_time() -> None:
    assert run([Arrival(0, expiration_us=1600)]).good == 1
    assert run([Arrival(0, expiration_us=1599)]).late == 1


def test_who_finds_the_queue_full_is_refused() -> None:
    # One is computed, one is ahead of the process, two wait.
    outcome = run(recorded([0, 1, 2, 3, 4]), max_queue_size=2, max_batch_size=1)
    assert (outcome.good, outcome.refused) == (4, 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_has_exactly_one_end(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = [
        one._replace(
            expiration_us=chance.choice([None, 2000, 5000, 20_000]),
            lane=chance.choice(["", "a", "b"]),
            priority=chance.randrange(10),
        )
        for one in bursty(chance.choice([500, 2000, 8000]), 3000, seed)
    ]
    outcome = run(
        arrivals,
        WORLD._replace(processes=chance.choice([1, 3]), spread=normal(0.3), trip_spread=normal(0.3)),
        seed,
        policy=chance.choice(["eager", "deferred"]),
        max_batch_size=chance.choice([1, 4, 16]),
        max_queue_delay_ms=chance.choice([0, 3]),
        max_queue_size=chance.choice([50, 10_000]),
        expiration_action=chance.choice(["reject", "delay"]),
        in_order=chance.choice([False, True]),
    )
    assert outcome.requests == len(arrivals)
    assert len(outcome.good_arrivals_us) == outcome.good > 0
    assert sum(outcome.reasons.values()) == len(outcome.sizes)
    assert sum(outcome.sizes) >= outcome.good


def test_the_same_seed_is_the_same_run() -> None:
    noisy = WORLD._replace(spread=normal(0.2))
    first, again, other = (run(poisson(1500, 500, 1), noisy, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.latencies_us != other.latencies_us


def test_noise_moves_each_batch_and_not_the_mean() -> None:
    apart = recorded(range(0, 5_000_000, 5000))  # each alone, so that a latency is a computation and the way
    took_us = [one - 500 for one in run(apart, WORLD._replace(spread=normal(0.2))).latencies_us]
    assert sum(took_us) / len(took_us) == pytest.approx(1100, rel=0.05)
    spread = (sum((one - 1100) ** 2 for one in took_us) / len(took_us)) ** 0.5
    assert spread == pytest.approx(220, rel=0.15)


def test_a_result_is_held_until_those_before_it_are_there() -> None:
    # Two processes, a request each. Who came first has the lowest priority, and waits ahead of one of them:
    # 200 + 1100 + 1100 + 300.
    two = WORLD._replace(processes=2)
    times = [
        Arrival(0, lane="a", priority=0),
        Arrival(0, lane="b", priority=9),
        Arrival(0, lane="b", priority=9),
    ]
    free = run(times, two, max_batch_size=1)
    held = run(times, two, max_batch_size=1, in_order=True)
    assert sorted(free.latencies_us) == [1600, 1600, 2700]
    assert held.latencies_us == [2700, 2700, 2700]


def test_who_is_held_beyond_its_deadline_is_late() -> None:
    two = WORLD._replace(processes=2)
    times = [Arrival(0, lane="a", priority=0), *2 * [Arrival(0, 2000, lane="b", priority=9)]]
    outcome = run(times, two, max_batch_size=1, in_order=True)
    assert (outcome.latencies_us, outcome.late) == ([2700], 2)


def test_nobody_is_held_for_one_who_expired() -> None:
    two = WORLD._replace(processes=2)
    times = [Arrival(0, 2500, lane="a", priority=0), *2 * [Arrival(0, lane="b", priority=9)]]
    outcome = run(times, two, max_batch_size=1, in_order=True)
    assert (outcome.latencies_us, outcome.late) == ([2500, 2500], 1)


@pytest.mark.parametrize("seed", range(4))
def test_in_order_means_in_order(seed: int) -> None:
    apart = [
        one._replace(lane=random.Random(one.at_us).choice(["a", "b"]), priority=one.at_us % 10)
        for one in bursty(4000, 2000, seed)
    ]
    world = WORLD._replace(processes=3, spread=normal(0.3))
    free, held = (run(apart, world, seed, max_batch_size=4, in_order=order) for order in (False, True))
    assert held.good_arrivals_us == sorted(held.good_arrivals_us) == sorted(free.good_arrivals_us)
    assert held.sizes == free.sizes  # what is held is no reason to batch otherwise
    assert sum(held.latencies_us) > sum(free.latencies_us)


def test_each_request_of_a_batch_makes_its_way_longer() -> None:
    world = WORLD._replace(trip_slope_us=40)
    # Two ride together: out 200 + 40, computed 1200, back 300 + 40.
    assert run(recorded([0, 0]), world).latencies_us == [1780, 1780]


def test_a_trip_that_takes_longer_does_so_both_ways() -> None:
    slow = WORLD._replace(trip_slope_us=40, trip_spread=(2.0,))
    outcome = run(recorded([0, 10]), slow)
    # The first starts at 2 (200 + 20) and is heard of 2 (300 + 20) after 1100; then the second sets out.
    assert outcome.latencies_us == [2180, 2180 - 10 + 2180]


ODD = (1.0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("world", "slow_us"),
    [(WORLD._replace(spread=ODD), 1600 + 2 * 1100), (WORLD._replace(trip_spread=ODD), 1600 + 2 * 500)],
)
def test_spreads_are_sampled_evenly(world: World, slow_us: int) -> None:
    apart = recorded(range(0, 20_000_000, 10_000))  # each alone
    taken = run(apart, world).latencies_us
    assert set(taken) == {1600, slow_us}
    assert taken.count(slow_us) / len(taken) == pytest.approx(0.25, abs=0.04)


def test_a_normal_spread_keeps_the_mean_and_is_never_below_a_tenth() -> None:
    factors = normal(0.2)
    assert sum(factors) / len(factors) == pytest.approx(1.0)
    assert sum((one - 1) ** 2 for one in factors) / len(factors) == pytest.approx(0.04, rel=0.1)
    assert min(normal(1.0)) == 0.1
    assert normal(0.0) == (1.0,)


def test_more_processes_serve_more() -> None:
    def served(processes: int) -> float:
        outcome = run(poisson(20_000, 4000, 1), WORLD._replace(processes=processes), max_batch_size=4)
        return 1e6 * outcome.good / outcome.took_us

    one, three = served(1), served(3)
    assert one == pytest.approx(4 / 0.0014, rel=0.02)  # full batches of 4, one after another
    assert three == pytest.approx(3 * one, rel=0.02)


def in_lanes(per_s: float, number: int, expirations_us: dict[str, int]) -> list[Arrival]:
    """By turns, at random times."""
    lanes = list(expirations_us)
    trace = enumerate(poisson(per_s, number, 1))
    return [
        one._replace(lane=lane, expiration_us=expirations_us[lane])
        for at, one in trace
        for lane in (lanes[at % len(lanes)],)
    ]


@pytest.mark.parametrize("first", ["fast", "slow"])
def test_deferred_lanes_of_different_speed_are_in_time_each_by_its_own(first: str) -> None:
    world = World(processes=4, intercept_us=5000, slope_us=50, slower={"slow": 10})
    lanes = {"fast": 30_000, "slow": 150_000}
    alone = in_lanes(100, 60, {first: lanes[first]})
    begins_us = alone[-1].at_us + 1_000_000
    both = [one._replace(at_us=begins_us + one.at_us) for one in in_lanes(400, 4000, lanes)]
    outcome = run(alone + both, world, policy="deferred", max_batch_size=64)
    assert outcome.good > 0.97 * outcome.requests


def test_deferred_a_cold_start_is_not_the_end() -> None:
    warm, cold = World(intercept_us=5000), World(intercept_us=900_000)
    simulation = Simulation(Scheduler(ModelSettings(policy="deferred", max_batch_size=32), 1), cold)
    arrivals = list(poisson(500, 10_000, 1, 50_000))

    def warm_up(_: int) -> None:
        simulation._world = warm

    simulation._step = warm_up
    outcome = simulation.run(arrivals)
    last_us = arrivals[-1].at_us
    late_half = [at_us for at_us in outcome.good_arrivals_us if at_us > last_us / 2]
    assert len(late_half) > 0.97 * sum(one.at_us > last_us / 2 for one in arrivals)


def test_progress_is_told_of_each_step() -> None:
    told: list[int] = []
    Simulation(Scheduler(ModelSettings(), 1), WORLD, step=told.append).run(poisson(1000, 2 * STEP + 1))
    assert told == [STEP, STEP]


def test_nothing_comes_of_nothing() -> None:
    outcome = run([])
    assert (outcome.requests, outcome.took_us, outcome.latency_ms(0.99), outcome.mean_batch) == (0, 0, 0, 0)


def test_deferred_does_not_forget_what_large_batches_take_while_all_are_small() -> None:
    """Sixteen workers with time to spare send batches of the efficient size for as long as one likes."""
    world = World(16, 2000.0, 1000.0)
    arrivals = list(poisson(4600, 12_000, 1, 50_000))
    outcome = run(arrivals, world, policy="deferred", max_batch_size=256)
    assert (outcome.good, outcome.late, outcome.refused) == (12_000, 0, 0)


@pytest.mark.parametrize(("processes", "load"), [(2, 0.1), (4, 0.2), (16, 0.3)])
def test_workers_that_are_not_in_step_make_everybody_wait_less(processes: int, load: float) -> None:
    """Batches set out at even intervals, and so there is always one worker that is soon free."""
    world = World(processes, 5000.0, 50.0)
    rate = load * processes * 256 / world.takes_us(256) * 1e6
    arrivals = list(poisson(rate, max(6000, int(rate / 2)), 3))
    evenly = run(arrivals, world, max_batch_size=256)
    with mock.patch.object(Capacity, "spacing_ends_us", lambda _: 0):
        in_step = run(arrivals, world, max_batch_size=256)
    assert sum(evenly.latencies_us) < 0.91 * sum(in_step.latencies_us)
    assert evenly.latency_ms(0.99) < 0.91 * in_step.latency_ms(0.99)
