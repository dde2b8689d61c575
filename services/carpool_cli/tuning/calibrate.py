"""How long a live model takes for a batch of n, and the way there and back: found by sending it bursts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter_ns
from typing import Any, Final, NamedTuple

from carpool.client.aio import AsyncClient, Reply
from carpool_batcher.core.latency import Line, fit
from carpool_cli.tuning.curve import Curve, Sizes, at, curve_of, learned, medians, spread_of
from carpool_cli.tuning.simulator import STEADY, World

LONGEST_S: Final = 20.0  # then what was heard has to do
LONE: Final = 50  # requests sent alone
TRIP: Final = Line(1000.0, 20.0)  # where it was not measured: as on two cores that everything shares
LONG_US: Final = 3000  # a lone request's trip on cores that are free takes a third of that
SCATTERED: Final = 2.0  # times the median, in one of ten
WORTH_US: Final = 1000  # what is less than that from the median is not far from it


class Measured(NamedTuple):
    """What bursts showed. `seen`: the size of each batch, and how long it was computed in us; `curve`: what
    follows from it, and `line`: what a batcher takes it for."""

    seen: Sizes
    curve: Curve
    line: Line
    spread: Sequence[float]
    trip: Line = TRIP
    trip_spread: Sequence[float] = STEADY

    def world(self, processes: int) -> World:
        """The simulator's world like this."""
        out_us = int(self.trip.intercept_us / 2)
        back_us = int(self.trip.intercept_us) - out_us
        line, trip = self.line, self.trip
        return World(
            processes, line.intercept_us, line.slope_us, out_us, back_us, trip.slope_us, self.spread,
            self.trip_spread, curve=self.curve,
        )  # fmt: skip


def measured(seen: Sizes, trips: Sizes = ()) -> Measured:
    """What follows from batches' times, and from their trips where there are any. Of `seen` one at least."""
    curve = curve_of(seen)
    computed = Measured(seen, curve, learned(seen), spread_of(seen, curve))
    if not trips:
        return computed
    usual = medians(trips)  # one of each size, or slow trips of lone requests were in line and spread both
    trip = fit([(round(size), int(took_us)) for size, took_us in usual])
    return computed._replace(trip=trip, trip_spread=spread_of(trips, usual))


def bursts(max_size: int, rounds: int) -> list[int]:
    """The sizes of the bursts to send: 1, 2, 4 and so on up to `max_size`, in no order, and LONE more of 1.

    One of 1 is the first: whatever time runs out in, there is a lone request.
    """
    sizes = sorted({1 << power for power in range(max_size.bit_length())} | {max_size})
    sent = rounds * sizes + LONE * [1]
    random.Random(0).shuffle(sent)  # noqa: S311 (so that a machine that warms up does not look like a slope)
    sent.remove(1)
    return [1, *sent]


async def calibrate(
    client: AsyncClient,
    model: str,
    body: Any,
    sizes: Sequence[int],
    *,
    holds_back: bool,
    step: Callable[[], None],
) -> Measured:
    """Send bursts, one after another, and never more than one at a time. Raises CarpoolError.

    `sizes`: of the bursts, the first of them 1. `holds_back`: whether the model's settings let a lone request
    wait for company.
    """
    ends_s = monotonic() + LONGEST_S
    await client.infer(model, body)  # whatever is done only once is done now
    seen: list[tuple[int, int]] = []
    trips: list[tuple[int, int]] = []
    for size in sizes:
        asked = await asyncio.gather(*[_ask(client, model, body) for _ in range(size)])
        # A burst may have been cut in batches, and others' requests may ride along: batches are what counts.
        seen += {(reply.batch_size, reply.compute_us) for reply, _ in asked}
        # The trip is that of the request put out last: before it, the others were made, which is no trip.
        last, took_us = asked[-1]
        if size == 1 or all(reply.batch_size == size for reply, _ in asked):
            held_us = last.queue_us if holds_back else 0
            trips.append((last.batch_size, max(0, took_us - last.compute_us - held_us)))
        step()
        if monotonic() > ends_s:
            break
    return measured(seen, trips)


async def _ask(client: AsyncClient, model: str, body: Any) -> tuple[Reply, int]:
    """A request's reply, and how many us it took."""
    began_ns = perf_counter_ns()
    reply = await client.request(model, body)
    return reply, (perf_counter_ns() - began_ns) // 1000


# --- whether to believe it ---------------------------------------------------------------------------------


def doubts(of: Measured) -> list[str]:
    """Why what was measured is no ground for advice: reasons, as sentences, and none if it is."""
    trip_us, alone_us = of.trip.at(1), at(of.curve, 1)
    found: list[str] = []
    if trip_us > max(LONG_US, alone_us / 2):
        found.append(
            f"A lone request is on its way for {trip_us / 1000:.3g} ms, "
            f"and computed in {alone_us / 1000:.3g} ms."
        )
    for what, middle_us, factors in (("trip", trip_us, of.trip_spread), ("computation", alone_us, of.spread)):
        median, tenth = factors[len(factors) // 2], factors[len(factors) * 9 // 10]
        if tenth > SCATTERED * median and (tenth - median) * middle_us > WORTH_US:
            found.append(f"One {what} in ten took {tenth / median:.2g} times the usual one.")
    return found


def give_or_take(spread: Sequence[float]) -> float:
    """Half of the range in which the middle two thirds lie: of a normal spread, its standard deviation."""
    return (spread[len(spread) * 5 // 6] - spread[len(spread) // 6]) / 2
