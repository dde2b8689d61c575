"""How long requests take that arrive by chance (Poisson): on the real system, and simulated beside it.

    .venv/bin/python ops/bench/latency.py [--rates 500,2000,4000,7000] [--seconds 5] [--rounds 3]

The model sleeps 5 ms + 0.05 ms for each request of a batch. Both get the same arrivals; the simulator is told
the trips that the real system showed for lone requests. Everything is on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sleeper import Linear

from carpool.aio import AsyncClient
from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.arrivals import poisson, recorded
from carpool_cli.embedded import EmbeddedRedis
from carpool_cli.simulator import Simulation, World

WITHIN_MS: Final = 50.0
PATIENCE_S: Final = 20.0


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


async def send(client: AsyncClient, times_us: Sequence[int]) -> Row:
    """Requests at these times, whatever became of those before."""
    latencies_ms: list[float] = []
    sizes: list[int] = []
    waiting: set[asyncio.Task[None]] = set()
    began_s = time.perf_counter()

    async def ask(due_s: float) -> None:
        reply = await client.request(Linear.name, 1)
        latencies_ms.append((time.perf_counter() - due_s) * 1e3)
        sizes.append(reply.batch_size)

    for at_us in times_us:
        due_s = began_s + at_us / 1e6
        while (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(ask(due_s))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    await asyncio.gather(*waiting)
    return row(latencies_ms, len(sizes) / sum(1 / size for size in sizes))


async def lone_ms(client: AsyncClient) -> float:
    """What a lone request takes, in the middle."""
    took_ms = []
    for _ in range(100):
        began_s = time.perf_counter()
        await client.infer(Linear.name, 1)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(took_ms)


async def measure(url: str, options: argparse.Namespace) -> None:
    """All rates in turn, as often as told."""
    async with AsyncClient(url) as client:
        await until_served(client)
        trip_us = int((await lone_ms(client) - 5.05) * 1000)
        print(f"a lone request: {trip_us / 1000:.2f} ms more than the model takes")
        print("requests/s            p50 ms           p99 ms    within 50 ms       mean batch")
        for rate in options.rates:
            real, simulated = [], []
            for seed in range(options.rounds):
                times_us = [one.at_us for one in poisson(rate, int(rate * options.seconds), seed)]
                real.append(await send(client, times_us))
                simulated.append(simulate(times_us, trip_us))
            print(f"{rate:8,} real   {columns(real)}")
            print(f"      simulated   {columns(simulated)}")


def simulate(times_us: Sequence[int], trip_us: int) -> Row:
    """The same arrivals in virtual time."""
    world = World(intercept_us=5060, slope_us=50, out_us=trip_us // 2, back_us=trip_us - trip_us // 2)
    settings = ModelSettings(max_batch_size=Linear.max_batch_size)
    outcome = Simulation(Scheduler(settings, world.processes), world).run(recorded(times_us))
    return row([one / 1000 for one in outcome.latencies_us], outcome.mean_batch)


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
