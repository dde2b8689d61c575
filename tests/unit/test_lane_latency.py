"""Trials: a lane in which nobody can be met sends a batch all the same, for a small share of the time."""

from __future__ import annotations

import random
from collections.abc import Iterator

from carpool.model_settings import ModelSettings
from carpool_batcher.core.lane_latency import ENOUGH, PAUSE, LaneLatencies
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.tuning.arrivals import Arrival
from carpool_cli.tuning.simulator import Simulation, World

TAKES_US = 100_000
MINUTE_US = 60_000_000


def known(*lanes: str) -> LaneLatencies:
    """Lanes of which enough was heard, the last time at 0."""
    latencies = LaneLatencies()
    for lane in lanes:
        for _ in range(ENOUGH):
            latencies.observe(lane, 1, TAKES_US, TAKES_US, 0)
    return latencies


def test_one_lane_is_tried_at_a_time() -> None:
    latencies = known("a", "b")
    assert latencies.begin_trial("a", MINUTE_US)
    assert not latencies.begin_trial("b", MINUTE_US + 1), "nothing is heard of a yet"
    heard_us = MINUTE_US + TAKES_US
    latencies.observe("a", 1, TAKES_US, TAKES_US, heard_us)
    pause_us = int(PAUSE * TAKES_US)
    assert not latencies.begin_trial("b", heard_us + pause_us - 1)
    assert latencies.begin_trial("b", heard_us + pause_us)


def test_a_trial_of_which_nothing_is_heard_is_not_the_last() -> None:
    latencies = known("a", "b")
    assert latencies.begin_trial("a", MINUTE_US)
    assert latencies.begin_trial("b", MINUTE_US + int(PAUSE * TAKES_US))


def test_a_clock_that_was_set_back_does_not_put_trials_off() -> None:
    latencies = known("a", "b")
    assert latencies.begin_trial("a", 60 * MINUTE_US)
    latencies.observe("a", 1, TAKES_US, TAKES_US, 60 * MINUTE_US + TAKES_US)
    assert latencies.begin_trial("a", MINUTE_US)


def test_lanes_that_are_too_slow_leave_most_of_the_time_to_others() -> None:
    """Twenty lanes that are never in time, and one that always could be."""
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
