"""The simulator's world as a batcher reports it."""

from __future__ import annotations

from statistics import median

import pytest

from carpool.wire.report import BatcherReport, Gauges
from carpool_cli.tuning.simulator import World, has_transit, with_transit


def report(transit_us: tuple[int, int], delays_us: tuple[int, int] = (0, 0)) -> BatcherReport:
    nothing = Gauges(0, 0, 0.0, 0, 0, 1)
    return BatcherReport(
        "b", 0, 0, nothing, {}, 0, 0, {}, (), None, transit_us=transit_us, delays_us=delays_us
    )


def test_a_batcher_without_settled_batches_knows_no_ways() -> None:
    assert not has_transit(None)
    assert not has_transit(report((0, 0)))
    assert has_transit(report((800, 1200)))


def test_the_world_has_the_ways_and_delays_of_the_report() -> None:
    world = with_transit(World(3, round_trip_slope_us=9.0), report((801, 1600), (600, 90)))
    assert (world.processes, world.in_us, world.late_us) == (3, 600, 90)
    assert world.round_trip_us(100) == 801
    factors = sorted(world.round_trip_spread)
    assert median(factors) == pytest.approx(1, rel=0.01)
    assert 1.9 < factors[round(0.9 * len(factors))] < 2.1
