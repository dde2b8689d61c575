"""Latency of requests that arrive at random (Poisson): of the real system, and of the simulator beside it.
What a request costs at these rates, in CPU time of each process.

    .venv/bin/python ops/bench/latency.py [--rates 500,2000,4000,7000] [--seconds 5] [--rounds 3]

The model sleeps 5 ms + 0.05 ms for each request of a batch. Simulated requests arrive at the times at which
the real ones were sent. Before each run the real system is measured with bursts, as `carpool tune` does, and
the simulator uses that measurement; it uses nothing of the run itself. Everything runs on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from service_processes import CpuMeter, child_of, start, stop
from sleeper import Linear

from carpool.client.aio import AsyncClient
from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.tuning.arrivals import poisson, recorded
from carpool_cli.tuning.calibrate import bursts, calibrate
from carpool_cli.tuning.simulator import Simulation, World

WITHIN_MS: Final = 50.0
START_S_MAX: Final = 20.0
CALIBRATION_ROUNDS: Final = 5  # the default of `carpool tune`
LONE_REQUESTS: Final = 20  # after which the batcher no longer uses the round trips of the bursts


class Row(NamedTuple):
    """Latencies at one rate."""

    p50_ms: float
    p99_ms: float
    within: float  # the share of requests with a latency of at most WITHIN_MS
    mean_batch: float


def row(latencies_ms: Sequence[float], mean_batch: float) -> Row:
    """Summarise latencies."""
    ordered = sorted(latencies_ms)
    within = sum(latency_ms <= WITHIN_MS for latency_ms in ordered) / len(ordered)
    return Row(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], within, mean_batch)


class Sent(NamedTuple):
    """A run of the real system: its latencies, and when its requests were actually sent."""

    row: Row
    times_us: list[int]
    late_ms: float  # p99 of how late the load generator sent requests
    cpu_us: dict[str, float]  # of a request, by process


async def send(client: AsyncClient, due_us: Sequence[int], pids: Mapping[str, int]) -> Sent:
    """Send requests at these times, without waiting for results of earlier ones (open loop).

    An event loop wakes up to a millisecond late, and then sends all requests that are due. So the times of
    sending are recorded, for the simulator to use.
    """
    sent_us: list[int] = []
    latencies_ms: list[float] = []
    sizes: list[int] = []
    unanswered: set[asyncio.Task[None]] = set()
    cpu = CpuMeter(pids)
    started_s = time.perf_counter()

    async def ask() -> None:
        sent_s = time.perf_counter()
        sent_us.append(int((sent_s - started_s) * 1e6))
        reply = await client.request(Linear.name, 1)
        latencies_ms.append((time.perf_counter() - sent_s) * 1e3)
        sizes.append(reply.batch_size)

    for at_us in due_us:
        due_s = started_s + at_us / 1e6
        while (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(ask())
        unanswered.add(task)
        task.add_done_callback(unanswered.discard)
    await asyncio.gather(*unanswered)
    cpu_us = {name: us / len(due_us) for name, us in cpu.stop().items()}
    late_us = sorted(sent - due for sent, due in zip(sent_us, due_us, strict=True))
    mean_batch = len(sizes) / sum(1 / size for size in sizes)
    return Sent(row(latencies_ms, mean_batch), sent_us, late_us[len(late_us) * 99 // 100] / 1000, cpu_us)


async def measure(url: str, pids: Mapping[str, int], options: argparse.Namespace) -> None:
    """Run all rates in each round, each with a new measurement: the load of the machine may change."""
    sizes = bursts(Linear.max_batch_size, CALIBRATION_ROUNDS)
    rounds: dict[int, list[Pair]] = {rate: [] for rate in options.rates}
    async with AsyncClient(url) as client:
        await until_served(client)
        pids = {**pids, "model": child_of(pids["worker"]), "producer": os.getpid()}
        gc.collect()
        gc.freeze()  # a collection would pause the load generator for 20 ms
        gc.disable()
        for seed in range(options.rounds):
            for rate in options.rates:
                world = await world_of(client, sizes)
                due_us = [arrival.at_us for arrival in poisson(rate, int(rate * options.seconds), seed)]
                sent = await send(client, due_us, pids)
                simulated = simulate(sent.times_us, world)
                rounds[rate].append(Pair(sent.row, simulated, sent.late_ms, world, sent.cpu_us))
    report(rounds)


async def world_of(client: AsyncClient, sizes: Sequence[int]) -> World:
    """The world that `carpool tune` would measure now."""
    measurement = await calibrate(client, Linear.name, 1, sizes, delays=False, on_progress=lambda: None)
    for _ in range(LONE_REQUESTS):
        await client.infer(Linear.name, 1)
    return measurement.world(processes=1)


def simulate(times_us: Sequence[int], world: World) -> Row:
    """Simulate these arrivals."""
    settings = ModelSettings(max_batch_size=Linear.max_batch_size)
    result = Simulation(Scheduler(settings, world.processes), world).run(recorded(times_us))
    return row([latency_us / 1000 for latency_us in result.latencies_us], result.mean_batch)


# --- printing ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """One round at one rate."""

    real: Row
    simulated: Row
    late_ms: float
    world: World
    cpu_us: dict[str, float]


def report(rounds: Mapping[int, Sequence[Pair]]) -> None:
    """Print the measured times, then for each rate real and simulated latencies, and their difference."""
    worlds = [pair.world for pairs in rounds.values() for pair in pairs]
    intercept = spread([world.intercept_us / 1000 for world in worlds], ".2f")
    slope = spread([world.slope_us / 1000 for world in worlds], ".3f")
    round_trip = spread([(world.out_us + world.back_us) / 1000 for world in worlds], ".2f")
    round_trip_slope = spread([world.round_trip_slope_us / 1000 for world in worlds], ".3f")
    print(f"measured: l(n) = {intercept} + {slope} n ms; round trip = {round_trip} + {round_trip_slope} n ms")
    late_ms = max(pair.late_ms for pairs in rounds.values() for pair in pairs)
    print(f"load generator: 99% of the requests were sent at most {late_ms:.1f} ms late")
    print("requests/s            p50 ms           p99 ms    within 50 ms       mean batch")
    for rate, pairs in rounds.items():
        print(f"{rate:8,} real   {columns([pair.real for pair in pairs])}")
        print(f"      simulated   {columns([pair.simulated for pair in pairs])}")
        print(f"      difference  {differences(pairs)}")
    print("requests/s   CPU us a request, all   by process")
    for rate, pairs in rounds.items():
        cpu_us = {name: statistics.median(pair.cpu_us[name] for pair in pairs) for name in pairs[0].cpu_us}
        by_process = ", ".join(f"{name} {us:.0f}" for name, us in cpu_us.items())
        print(f"{rate:8,}   {sum(cpu_us.values()):21.0f}   {by_process}")


def differences(pairs: Sequence[Pair]) -> str:
    """The relative difference of simulated and real figures: the median of the rounds."""

    def difference(figure: str) -> str:
        each = [getattr(pair.simulated, figure) / getattr(pair.real, figure) - 1 for pair in pairs]
        return f"{statistics.median(each):+6.0%}"

    p50, p99, batch = difference("p50_ms"), difference("p99_ms"), difference("mean_batch")
    return f"{p50:21}{p99:29}{batch}"


def columns(rows: Sequence[Row]) -> str:
    """The median and the range of the rounds."""
    p50, p99, within, batch = zip(*rows, strict=True)
    share = f"{statistics.median(within):8.2%}"
    return f"{spread(p50, '.1f')}  {spread(p99, '.1f')}  {share}  {spread(batch, '.1f')}"


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(values):6{form}} [{min(values):{form}} .. {max(values):{form}}]"


async def until_served(client: AsyncClient) -> None:
    """Wait until a worker serves the model."""
    for _ in range(int(START_S_MAX / 0.05)):
        if Linear.name in await client.models():
            await client.infer(Linear.name, 1)
            return
        await asyncio.sleep(0.05)
    raise SystemExit("no worker became ready")


def main() -> None:
    """Start the stack, measure, stop it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rates = [500, 2000, 4000, 7000]
    parser.add_argument("--rates", type=lambda text: [int(rate) for rate in text.split(",")], default=rates)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = f"{Linear.name}={Path(__file__).with_name('sleeper.py')}:Linear"
    with EmbeddedRedis() as server, tempfile.TemporaryFile() as log:
        services = [
            start(server.services_url, log, *command, CARPOOL_LOG_LEVEL="warning")
            for command in (["carpool_batcher"], ["carpool_worker", model])
        ]
        try:
            pids = {"Redis": server.pid, "batcher": services[0].pid, "worker": services[1].pid}
            asyncio.run(measure(server.url, pids, options))
        finally:
            stop(services)


if __name__ == "__main__":
    main()
