"""Fleets of workers in virtual time: what they cost, how an autoscaler changes them, and what is missed."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from carpool.model_settings import ModelSettings
from carpool_cli.tuning.arrivals import Arrival, poisson
from carpool_cli.tuning.fleet import (
    POLL_US,
    Autoscaler,
    Figures,
    Fleet,
    FleetResult,
    FleetSimulation,
    depth,
    fixed,
    pending,
    wanted,
)
from carpool_cli.tuning.simulate import main
from carpool_cli.tuning.simulator import World

SECOND_US = 1_000_000
WORLD = World(intercept_us=1_000_000, slope_us=0)  # a batch of any size takes 1 s
DEADLINE_US = 5 * SECOND_US


def run(fleet: Fleet, arrivals: list[Arrival], start_s: float = 30.0, **settings: int) -> FleetResult:
    model = ModelSettings.from_mapping({"max_batch_size": 4, **settings})
    return FleetSimulation(fleet, model, WORLD, start_us=int(start_s * 1e6)).run_fleet(arrivals)


def steady(per_s: float, seconds: int, from_s: int = 0) -> list[Arrival]:
    gap_us = int(1e6 / per_s)
    return [Arrival(from_s * SECOND_US + at * gap_us, DEADLINE_US) for at in range(int(per_s * seconds))]


def test_fixed_fleet_costs_its_workers_and_serves_as_a_simulation_does() -> None:
    outcome = run(fixed(3), list(poisson(2, 400, 1, DEADLINE_US)))
    assert (outcome.result.good, outcome.missed, outcome.ups, outcome.downs) == (400, 0.0, 0, 0)
    assert outcome.worker_us == 3 * outcome.result.duration_us
    assert outcome.workers_mean == pytest.approx(3.0)


def test_fleet_follows_a_load_up_and_down_and_misses_only_while_workers_start() -> None:
    """Given 1 request/s for two minutes, 10 for five, and 1 for five, of which a worker serves 4."""
    trace = [*steady(1, 120), *steady(10, 300, 120), *steady(1, 300, 420)]
    outcome = run(wanted(), trace)
    assert 4 <= outcome.workers_max <= 5
    assert outcome.ups + outcome.downs <= 5
    reaction_s = 10 + POLL_US / 1e6 + 30
    assert 0 < outcome.result.late <= 10 * reaction_s
    assert 2.0 < outcome.workers_mean < 3.0, "4 or 5 for about 6 of 12 minutes"


def test_queue_of_a_model_with_large_batches_says_nothing() -> None:
    """Given a queue that one worker does within a second, expect no worker more by what is wanted, and many
    by the length of the queue."""
    bursts = chain.from_iterable([Arrival(at * 2 * SECOND_US, DEADLINE_US)] * 20 for at in range(60))
    trace = list(bursts)
    assert run(wanted(), trace, max_batch_size=20).workers_max == 1
    assert run(depth(5), trace, max_batch_size=20).workers_max > 1


def test_batches_in_flight_never_ask_for_more_than_two_for_each_worker() -> None:
    trace = steady(20, 60)
    assert run(pending(5), trace).workers_max == 1
    assert run(wanted(), trace).workers_max > 5


def test_fleet_has_no_worker_without_requests_and_gets_one_when_one_waits() -> None:
    trace = [Arrival(0), Arrival(100 * SECOND_US), Arrival(400 * SECOND_US)]
    outcome = run(wanted(), trace, start_s=20, min_workers=0, scale_idle_ms=30_000)
    assert outcome.result.good == 3
    # It waits until the autoscaler has looked, and the worker has started.
    assert outcome.result.latency_ms(0.99) == pytest.approx(20_000 + POLL_US / 1000, abs=15_500)
    assert outcome.workers_mean < 0.5


def test_autoscaler_doubles_at_most_and_waits_before_it_stops_workers() -> None:
    """Given a figure of 50 from the start, and of 2 from 2 minutes on."""
    now = {"us": 0}
    seen: list[tuple[int, int]] = []

    def figure(_: object) -> float:
        return 50.0 if now["us"] < 120 * SECOND_US else 2.0

    fleet = Fleet("given", figure)
    autoscaler, current = Autoscaler(fleet, 1, 100), 1
    for look in range(40):
        now["us"] = look * POLL_US
        current = autoscaler.decide(now["us"], Figures(0, 0, 0), current)
        seen.append((look * 15, current))
    assert [number for _, number in seen[:5]] == [5, 10, 20, 40, 50]
    assert [second for second, number in seen if number == 50] == list(range(60, 405 + 15, 15))
    assert seen[-1][1] == 2


def test_command_compares_fleets_under_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--scale", "--rate", "20", "--requests", "400", "--expiration-ms", "1000", "max_workers=3")
    assert main([*arguments, "--json"]) == 0
    fleets = json.loads(capsys.readouterr().out)["fleets"]
    names = [fleet["fleet"] for fleet in fleets]
    assert names[:5] == ["wanted", "depth 5", "depth 32", "pending 5", "pending 1"]
    assert set(names[5:]) <= {"fixed 1", "fixed 2", "fixed 3"}
    assert all(0 <= fleet["missed"] <= 1 and fleet["workers_max"] <= 3 for fleet in fleets)
    assert main([*arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "400 requests in 21 s, a worker starts in 30 s"
    assert [line.split("  ")[0] for line in printed[2:]] == names
