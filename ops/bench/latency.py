"""How long requests take that arrive by chance (Poisson): on the real system, and simulated beside it.

    .venv/bin/python ops/bench/latency.py [--rates 500,2000,4000,7000] [--seconds 5] [--rounds 3]

The model sleeps 5 ms + 0.05 ms for each request of a batch. Both get the same arrivals: the moments of
sending. Before each run the real system is measured as `carpool tune` does it, with bursts of every size, and
that is the simulator's world: nothing of the run itself is. Everything is on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sleeper import Linear

from carpool.client.aio import AsyncClient
from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.tuning.arrivals import poisson, recorded
from carpool_cli.tuning.calibrate import bursts, calibrate
from carpool_cli.tuning.simulator import Simulation, World

WITHIN_MS: Final = 50.0
PATIENCE_S: Final = 20.0
CALIBRATION_ROUNDS: Final = 5  # as `carpool tune` has it
FORGOTTEN: Final = 20  # lone requests, after which the batcher does not remember what a burst's trip took


class Row(NamedTuple):
    """What a rate of arrivals came to."""

    p50_ms: float
    p99_ms: float
    within: float  # the share that took WITHIN_MS at most
    mean_batch: float


def row(latencies_ms: Sequence[float], mean_batch: float) -> Row:
    """Latencies in short."""
    ordered = sorted(latencies_ms)
    within = sum(one <= WITHIN_MS for one in ordered) / len(ordered)
    return Row(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], within, mean_batch)


class Sent(NamedTuple):
    """A run of the real system: what came of it, and when its requests were sent in truth."""

    row: Row
    times_us: list[int]
    late_ms: float  # the load generator, one request in a hundred: after they were due


async def send(client: AsyncClient, due_us: Sequence[int]) -> Sent:
    """Requests at these times, whatever became of those before.

    An event loop wakes up to a millisecond late, and then sends all that is due. So times are those of
    sending, and the simulator gets the same.
    """
    sent_us: list[int] = []
    latencies_ms: list[float] = []
    sizes: list[int] = []
    waiting: set[asyncio.Task[None]] = set()
    began_s = time.perf_counter()

    async def ask() -> None:
        sent_s = time.perf_counter()
        sent_us.append(int((sent_s - began_s) * 1e6))
        reply = await client.request(Linear.name, 1)
        latencies_ms.append((time.perf_counter() - sent_s) * 1e3)
        sizes.append(reply.batch_size)

    for at_us in due_us:
        due_s = began_s + at_us / 1e6
        while (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(ask())
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    await asyncio.gather(*waiting)
    late_us = sorted(sent - due for sent, due in zip(sent_us, due_us, strict=True))
    mean_batch = len(sizes) / sum(1 / size for size in sizes)
    return Sent(row(latencies_ms, mean_batch), sent_us, late_us[len(late_us) * 99 // 100] / 1000)


async def measure(url: str, options: argparse.Namespace) -> None:
    """All rates in turn, as often as told, each time with the world measured anew: the machine has others."""
    sizes = bursts(Linear.max_batch_size, CALIBRATION_ROUNDS)
    rounds: dict[int, list[Pair]] = {rate: [] for rate in options.rates}
    async with AsyncClient(url) as client:
        await until_served(client)
        gc.collect()
        gc.freeze()  # a collection halts the load generator for 20 ms, which is nobody's latency but its own
        gc.disable()
        for seed in range(options.rounds):
            for rate in options.rates:
                world = await world_of(client, sizes)
                due_us = [one.at_us for one in poisson(rate, int(rate * options.seconds), seed)]
                sent = await send(client, due_us)
                rounds[rate].append(Pair(sent.row, simulate(sent.times_us, world), sent.late_ms, world))
    report(rounds)


async def world_of(client: AsyncClient, sizes: Sequence[int]) -> World:
    """The world that `carpool tune` would measure now."""
    found_out = await calibrate(client, Linear.name, 1, sizes, holds_back=False, step=lambda: None)
    for _ in range(FORGOTTEN):
        await client.infer(Linear.name, 1)
    return found_out.world(processes=1)


def simulate(times_us: Sequence[int], world: World) -> Row:
    """The same arrivals in virtual time."""
    settings = ModelSettings(max_batch_size=Linear.max_batch_size)
    outcome = Simulation(Scheduler(settings, world.processes), world).run(recorded(times_us))
    return row([one / 1000 for one in outcome.latencies_us], outcome.mean_batch)


# --- what came of it ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """One round at one rate."""

    real: Row
    simulated: Row
    late_ms: float
    world: World


def report(rounds: Mapping[int, Sequence[Pair]]) -> None:
    """What was measured; then the real row, the simulated one, and how far off that is."""
    worlds = [pair.world for pairs in rounds.values() for pair in pairs]
    intercept = spread([world.intercept_us / 1000 for world in worlds], ".2f")
    slope = spread([world.slope_us / 1000 for world in worlds], ".3f")
    trip = spread([(world.out_us + world.back_us) / 1000 for world in worlds], ".2f")
    trip_slope = spread([world.trip_slope_us / 1000 for world in worlds], ".3f")
    print(f"measured: l(n) = {intercept} + {slope} n ms; trip(n) = {trip} + {trip_slope} n ms")
    late_ms = max(pair.late_ms for pairs in rounds.values() for pair in pairs)
    print(f"the load generator: 99 of 100 requests sent {late_ms:.1f} ms late at most")
    print("requests/s            p50 ms           p99 ms    within 50 ms       mean batch")
    for rate, pairs in rounds.items():
        print(f"{rate:8,} real   {columns([pair.real for pair in pairs])}")
        print(f"      simulated   {columns([pair.simulated for pair in pairs])}")
        print(f"      off by      {off(pairs)}")


def off(pairs: Sequence[Pair]) -> str:
    """How much more the simulator says: in the middle of the rounds, each with its own world."""

    def more(figure: str) -> str:
        each = [getattr(pair.simulated, figure) / getattr(pair.real, figure) - 1 for pair in pairs]
        return f"{statistics.median(each):+6.0%}"

    p50, p99, batch = more("p50_ms"), more("p99_ms"), more("mean_batch")
    return f"{p50:21}{p99:29}{batch}"


def columns(rows: Sequence[Row]) -> str:
    """The median of the rounds, and their range."""
    p50, p99, within, batch = zip(*rows, strict=True)
    share = f"{statistics.median(within):8.2%}"
    return f"{spread(p50, '.1f')}  {spread(p99, '.1f')}  {share}  {spread(batch, '.1f')}"


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(values):6{form}} [{min(values):{form}} .. {max(values):{form}}]"


async def until_served(client: AsyncClient) -> None:
    """The worker may still be loading."""
    for _ in range(int(PATIENCE_S / 0.05)):
        if Linear.name in await client.models():
            await client.infer(Linear.name, 1)
            return
        await asyncio.sleep(0.05)
    raise SystemExit("no worker came up")


def main() -> None:
    """Start the stack, measure, stop it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rates = [500, 2000, 4000, 7000]
    parser.add_argument("--rates", type=lambda text: [int(one) for one in text.split(",")], default=rates)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each rate and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = f"{Linear.name}={Path(__file__).with_name('sleeper.py')}:Linear"
    with EmbeddedRedis() as server, tempfile.TemporaryFile() as log:
        environment = {**os.environ, "CARPOOL_REDIS_URL": server.url, "CARPOOL_LOG_LEVEL": "warning"}
        services = [
            subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=log, stderr=log)
            for command in (["carpool_batcher"], ["carpool_worker", model])
        ]
        try:
            asyncio.run(measure(server.url, options))
        finally:
            for service in services:
                service.terminate()
            for service in services:
                service.wait()


if __name__ == "__main__":
    main()
