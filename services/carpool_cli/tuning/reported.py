"""The transit and delays of the simulator's world, as a batcher reports them of a live model."""

from __future__ import annotations

from carpool.wire.report import BatcherReport
from carpool_cli.tuning.simulator import World, lognormal


def has_transit(report: BatcherReport | None) -> bool:
    """Whether batches have settled since this batcher took over, so that it knows the transit."""
    return report is not None and report.transit_us[0] > 0


def with_transit(world: World, report: BatcherReport) -> World:
    """This world with the transit and delays that a batcher reports, whatever the size of a batch.

    Transit has a lognormal distribution through what half and nine of ten batches took.
    """
    usual_us, at_most_us = report.transit_us
    in_us, late_us = report.delays_us
    return world._replace(
        out_us=usual_us // 2,
        back_us=usual_us - usual_us // 2,
        round_trip_slope_us=0.0,
        round_trip_spread=lognormal(at_most_us / max(1, usual_us)),
        in_us=in_us,
        late_us=late_us,
    )
