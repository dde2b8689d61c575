"""The ways and delays of the simulator's world, as a batcher reports them of a live model."""

from __future__ import annotations

from carpool.wire.report import BatcherReport
from carpool_cli.tuning.simulator import World, lognormal


def has_ways(report: BatcherReport | None) -> bool:
    """Whether batches have settled since this batcher took over, so that it knows their ways."""
    return report is not None and report.ways_us[0] > 0


def with_ways(world: World, report: BatcherReport) -> World:
    """This world with the ways and delays that a batcher reports, whatever the size of a batch.

    The ways have a lognormal distribution through what half and nine of ten batches took.
    """
    usual_us, at_most_us = report.ways_us
    in_us, late_us = report.delays_us
    return world._replace(
        out_us=usual_us // 2,
        back_us=usual_us - usual_us // 2,
        round_trip_slope_us=0.0,
        round_trip_spread=lognormal(at_most_us / max(1, usual_us)),
        in_us=in_us,
        late_us=late_us,
    )
