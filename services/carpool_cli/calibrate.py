"""How long a live model takes for a batch of n, and the way to it and back: found by sending it bursts."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from carpool.aio import AsyncClient
from carpool_batcher.core.latency import Line, fit

LONGEST_S: Final = 20.0  # then what was heard has to do
LONE: Final = 20  # requests sent alone, for the trip


class Measured(NamedTuple):
    """What bursts showed. `seen`: the size of each batch, and how long it took in us."""

    seen: list[tuple[int, int]]
    line: Line
    noise: float  # a batch's time varies by this share of it
    trip_us: int


def bursts(max_size: int, rounds: int) -> list[int]:
    """The sizes of the bursts to send: 1, 2, 4 and so on up to `max_size`, in no order."""
    sizes = sorted({1 << power for power in range(max_size.bit_length())} | {max_size})
    sent = rounds * sizes
    random.Random(0).shuffle(sent)  # noqa: S311 (so that a machine that warms up does not look like a slope)
    return sent


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

    `holds_back`: whether the model's settings let a lone request wait for company.
    """
    ends_s = time.monotonic() + LONGEST_S
    trips_us: list[int] = []
    await client.infer(model, body)  # whatever is done only once is done now
    for _ in range(LONE):
        began_s = time.perf_counter()
        reply = await client.request(model, body)
        took_us = int((time.perf_counter() - began_s) * 1e6)
        trips_us.append(took_us - reply.compute_us - (reply.queue_us if holds_back else 0))
        step()
    seen: list[tuple[int, int]] = []
    for size in sizes:
        replies = await asyncio.gather(*[client.request(model, body) for _ in range(size)])
        # A burst may have been cut in batches, and others' requests may ride along: batches are what counts.
        seen += {(reply.batch_size, reply.compute_us) for reply in replies}
        step()
        if time.monotonic() > ends_s:
            break
    line = fit(seen)
    return Measured(seen, line, noise_of(seen, line), max(100, int(statistics.median(trips_us))))


def noise_of(seen: Sequence[tuple[int, int]], line: Line) -> float:
    """How much a batch's time varies, as a share of it; a single pause of the machine does not count."""
    off = [abs(took_us / max(1, line.at(size)) - 1) for size, took_us in seen]
    return 1.48 * statistics.median(off)  # of a normal distribution that is the standard deviation
