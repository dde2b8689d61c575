"""Latency per lane, and trials: batches of lanes that seem too slow, for a small share of the time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from carpool.model_settings import ModelSettings
from carpool_batcher.core.learned.lane_latency import LANE_BATCHES_MIN, TRIAL_PAUSE_RATIO, LaneLatencies
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival
from carpool_cli.tuning.simulator import Simulation, World

EXECUTION_US = 100_000
MINUTE_US = 60_000_000


def learned(*lanes: str) -> LaneLatencies:
    """Lanes which use their own latency models, last observed at 0."""
    latencies = LaneLatencies()
    for lane in lanes:
        for _ in range(LANE_BATCHES_MIN):
            latencies.observe(lane, 1, EXECUTION_US, EXECUTION_US, 0)
    return latencies


def test_one_trial_at_a_time() -> None:
    latencies = learned("a", "b")
    assert latencies.begin_trial("a", MINUTE_US)
    assert not latencies.begin_trial("b", MINUTE_US + 1), "the trial of a is in flight"
    settled_us = MINUTE_US + EXECUTION_US
    latencies.observe("a", 1, EXECUTION_US, EXECUTION_US, settled_us)
    pause_us = int(TRIAL_PAUSE_RATIO * EXECUTION_US)
    assert not latencies.begin_trial("b", settled_us + pause_us - 1)
    assert latencies.begin_trial("b", settled_us + pause_us)


def test_trial_of_which_nothing_was_executed_pauses_for_its_turnaround() -> None:
    """Or a flood of requests that fail would be a trial each."""
    latencies = learned("a", "b")
    assert latencies.begin_trial("a", MINUTE_US)
    settled_us = MINUTE_US + EXECUTION_US
    latencies.observe("a", 1, EXECUTION_US, None, settled_us)
    pause_us = int(TRIAL_PAUSE_RATIO * EXECUTION_US)
    assert not latencies.begin_trial("b", settled_us + pause_us - 1)
    assert latencies.begin_trial("b", settled_us + pause_us)


def test_trial_that_never_settles_does_not_block_later_ones() -> None:
    latencies = learned("a", "b")
    assert latencies.begin_trial("a", MINUTE_US)
    assert latencies.begin_trial("b", MINUTE_US + int(TRIAL_PAUSE_RATIO * EXECUTION_US))


def test_clock_set_back_does_not_delay_trials() -> None:
    latencies = learned("a", "b")
    assert latencies.begin_trial("a", 60 * MINUTE_US)
    latencies.observe("a", 1, EXECUTION_US, EXECUTION_US, 60 * MINUTE_US + EXECUTION_US)
    assert latencies.begin_trial("a", MINUTE_US)


def test_trials_of_slow_lanes_take_a_small_share_of_the_time() -> None:
    """Twenty lanes are never in time, and one always can be."""
    chance = random.Random(1)

    def arrivals() -> Iterator[Arrival]:
        for at in range(8000):
            lane = "" if at % 2 else f"slow{chance.randrange(20)}"
            yield Arrival(at * 2500, 40_000, lane, 4, 1)

    slower = {f"slow{number}": 30.0 for number in range(20)}
    world = World(processes=2, intercept_us=3000.0, slope_us=20.0, slower=slower)
    scheduler = Scheduler(ModelSettings(policy="deferred", max_batch_size=32), model_processes=2)
    outcome = Simulation(scheduler, world).run(arrivals())
    assert outcome.good > 0.8 * 4000


def test_batch_without_execution_counts_for_the_turnaround_only() -> None:
    latencies = learned("a")
    latencies.observe("a", 1, 2 * EXECUTION_US, None, MINUTE_US)
    assert latencies.of("a").turnaround_us == 2 * EXECUTION_US
    assert latencies.of("a").latency.of(1) == EXECUTION_US
    assert (latencies.of("a").executed_batches, latencies.of("a").last_executed_us) == (LANE_BATCHES_MIN, 0)


def observe_runs(
    latencies: LaneLatencies, times_us: dict[str, int], batches: int, seed: int = 0
) -> Iterator[int]:
    """Batches of these lanes settle, several in a row of each; yields what is expected of any lane's."""
    generator = random.Random(seed)
    while batches > 0:
        lane = generator.choice(list(times_us))
        for _ in range(generator.randint(1, 8)):
            took_us = round(times_us[lane] * generator.uniform(0.97, 1.03))
            latencies.observe(lane, generator.randint(1, 4), took_us, took_us, 0)
            batches -= 1
        yield latencies.all_lanes.latency.of(1)


@pytest.mark.parametrize("seed", range(3))
def test_runs_of_a_slow_lane_are_no_change_of_speed(seed: int) -> None:
    times_us = {"wide": 900_000, "narrow": 10_000}
    expected_us = [*observe_runs(learned(), times_us, 4000, seed)]
    assert 9_500 <= min(expected_us) <= max(expected_us) <= 950_000


def test_a_change_of_speed_of_several_lanes_is_followed() -> None:
    latencies = learned()
    assert len(list(observe_runs(latencies, {"a": 100_000, "b": 100_000}, 500))) > 1
    list(observe_runs(latencies, {"a": 300_000, "b": 300_000}, 12))
    assert 280_000 < latencies.all_lanes.latency.of(1) < 320_000
