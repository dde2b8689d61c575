"""Measure the execution time and the round trip of a live model by sending bursts of requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter_ns
from typing import Any, Final, NamedTuple

from carpool.client.aio import AsyncClient, Reply, RequestOptions
from carpool_batcher.core.learned.curve import Curve
from carpool_cli.tuning.curve import Line, Sizes, curve_of, line_through, spread_of
from carpool_cli.tuning.simulator import NO_SPREAD, World

CALIBRATION_S_MAX: Final = 20.0  # after that, what was measured so far must do
LONE_REQUESTS: Final = 50
ROUND_TRIP_DEFAULT: Final = Line(1000.0, 20.0)  # where it was not measured: of two cores that run everything
# Doubts about a measurement:
ROUND_TRIP_US_MAX: Final = 3000  # of a lone request; with idle cores it takes a third of that
TAIL_MEDIAN_RATIO: Final = 2.0  # of the slowest tenth
TAIL_US_MIN: Final = 1000  # a smaller difference from the median does not matter


class Measured(NamedTuple):
    """What bursts, or recently settled batches, showed.

    `observed` has size and execution time (us) of each batch, and `curve` is derived from it.
    """

    observed: Sizes
    curve: Curve
    spread: Sequence[float]
    round_trip: Line = ROUND_TRIP_DEFAULT
    round_trip_spread: Sequence[float] = NO_SPREAD

    def world(self, processes: int) -> World:
        """The simulator's world with these times."""
        out_us = int(self.round_trip.intercept_us / 2)
        back_us = int(self.round_trip.intercept_us) - out_us
        return World(
            processes,
            out_us=out_us,
            back_us=back_us,
            round_trip_slope_us=self.round_trip.slope_us,
            spread=self.spread,
            round_trip_spread=self.round_trip_spread,
            curve=self.curve,
        )


def measured(observed: Sizes, round_trips: Sizes = ()) -> Measured:
    """Derive everything from the times of batches, which must not be empty, and of round trips, if any."""
    curve = curve_of(observed)
    execution = Measured(observed, curve, spread_of(observed, curve))
    if not round_trips:
        return execution
    # The line goes through the medians: otherwise slow lone requests would count in both line and spread.
    middle = curve_of(round_trips)
    return execution._replace(
        round_trip=line_through(middle), round_trip_spread=spread_of(round_trips, middle)
    )


def bursts(max_size: int, rounds: int) -> list[int]:
    """The sizes of the bursts to send, each `rounds` times, in random order.

    They are 1, 2, 4 ... up to `max_size`, and one more than each of these, where a model that pads has steps.
    LONE_REQUESTS further bursts have size 1. The first burst has size 1 too, so that there is a lone request
    however soon the time is over.
    """
    powers = {1 << power for power in range(max_size.bit_length())}
    sizes = sorted(size for size in powers | {size + 1 for size in powers} | {max_size} if size <= max_size)
    sent = rounds * sizes + LONE_REQUESTS * [1]
    random.Random(0).shuffle(sent)  # noqa: S311 (so that a machine that warms up does not look like a slope)
    sent.remove(1)
    return [1, *sent]


async def calibrate(
    client: AsyncClient,
    model: str,
    body: Any,
    sizes: Sequence[int],
    *,
    options: RequestOptions | None = None,
    delays: bool,
    on_progress: Callable[[], None],
) -> Measured:
    """Send bursts one after another. Raises CarpoolError.

    `sizes` are those of the bursts; the first is 1. `delays`: the model's settings may delay a lone request
    so that others can join its batch. `options`: of each request.
    """
    options = options or {}
    ends_s = monotonic() + CALIBRATION_S_MAX
    await client.infer(model, body, **options)  # one-time work, such as lazy loading, is done now
    observed: list[tuple[int, int]] = []
    round_trips: list[tuple[int, int]] = []
    for size in sizes:
        replies = await asyncio.gather(*[_timed_request(client, model, body, options) for _ in range(size)])
        # A burst may be split into batches, which may contain requests of other producers: batches count.
        observed += {(reply.batch_size, reply.compute_us) for reply, _ in replies}
        # The round trip is that of the request sent last. The time of an earlier one includes the encoding of
        # those after it.
        last, latency_us = replies[-1]
        if size == 1 or all(reply.batch_size == size for reply, _ in replies):
            queue_us = last.queue_us if delays else 0
            round_trips.append((last.batch_size, max(0, latency_us - last.compute_us - queue_us)))
        on_progress()
        if monotonic() > ends_s:
            break
    return measured(observed, round_trips)


async def _timed_request(
    client: AsyncClient, model: str, body: Any, options: RequestOptions
) -> tuple[Reply, int]:
    """A request's reply, and its latency in us."""
    started_ns = perf_counter_ns()
    reply = await client.request(model, body, **options)
    return reply, (perf_counter_ns() - started_ns) // 1000


# --- whether the measurement can be trusted --------------------------------------------------------------


def doubts(measurement: Measured) -> list[str]:
    """Reasons, as sentences, why a measurement is no basis for advice; none if it is."""
    round_trip_us, execution_us = measurement.round_trip.at(1), measurement.curve.at(1)
    reasons: list[str] = []
    if round_trip_us > max(ROUND_TRIP_US_MAX, execution_us / 2):
        reasons.append(
            f"The round trip of a lone request takes {round_trip_us / 1000:.3g} ms, "
            f"its execution {execution_us / 1000:.3g} ms."
        )
    for name, middle_us, factors in (
        ("round trip", round_trip_us, measurement.round_trip_spread),
        ("execution", execution_us, measurement.spread),
    ):
        median, tenth = factors[len(factors) // 2], factors[len(factors) * 9 // 10]
        if tenth > TAIL_MEDIAN_RATIO * median and (tenth - median) * middle_us > TAIL_US_MIN:
            reasons.append(f"One {name} in ten took at least {tenth / median:.2g} times the median.")
    return reasons


def deviation(spread: Sequence[float]) -> float:
    """Half the range of the middle two thirds: of a normal spread, its standard deviation."""
    return (spread[len(spread) * 5 // 6] - spread[len(spread) // 6]) / 2
