"""A limit on the cost of a batch: nobody tells costs, producers do, or the model does.

    .venv/bin/python ops/bench/model_costs.py [--requests N]

Texts of 10 to 4,000 characters, 470 on average. A model that sleeps 2 ms and 1 us for each character of a
batch, in batches of up to 64 texts and 8,192 characters; two workers on this machine; 512 requests in flight.
For each way: requests/s and the time from sending to result; the largest cost that one call of the model
got; calls of the model for a batch; and CPU time for a request, of the batcher, and of both workers with
their models.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import numpy as np
from service_processes import CpuMeter, child_of, start, stop

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

ROUNDS: Final = 3
IN_FLIGHT: Final = 512
COST_MAX: Final = 8192
WAYS: Final = ("Untold", "OfProducers", "OfModel")


class Untold:
    """Nobody tells costs, and nothing limits them."""

    max_batch_size = 64

    def predict(self, batch: list[str]) -> list[dict[str, float]]:
        """What the call of each text cost, and its number."""
        cost = sum(map(len, batch))
        began_s = time.monotonic()
        time.sleep(0.002 + cost * 1e-6)
        return [{"cost": cost, "call": began_s} for _ in batch]


class OfProducers(Untold):
    """Producers send the cost of each text."""

    max_batch_cost = COST_MAX


class OfModel(OfProducers):
    """The model tells the cost of each text."""

    def cost(self, body: str) -> int:
        """Its characters."""
        return len(body)


class Measured(NamedTuple):
    """Of one way and round; times in ms, CPU in us for a request."""

    rate: float
    p50_ms: float
    p99_ms: float
    cost_max: float
    calls_per_batch: float
    batcher_us: float
    workers_us: float


async def load(url: str, way: str, texts: list[str], pids: dict[str, int]) -> Measured:
    """Send these texts, IN_FLIGHT at a time."""
    times_ms: list[float] = []
    costs: list[float] = []
    calls: set[float] = set()
    batches = 0.0
    left = iter(texts)

    async def send(client: AsyncClient) -> None:
        nonlocal batches
        for text in left:
            options: Any = {"cost": len(text)} if way == "OfProducers" else {}
            sent_s = time.monotonic()
            reply = await client.request(way, text, timeout=60, **options)
            times_ms.append((time.monotonic() - sent_s) * 1000)
            costs.append(reply.value["cost"])
            calls.add(reply.value["call"])
            batches += 1 / reply.batch_size

    async with AsyncClient(url) as client:
        await client.infer_many(way, texts[:500], timeout=60)
        meter, began_s = CpuMeter(pids), time.monotonic()
        await asyncio.gather(*[send(client) for _ in range(IN_FLIGHT)])
        passed_s, cpu_us = time.monotonic() - began_s, meter.stop()
    count = len(texts)
    batcher_us = cpu_us.pop("batcher")
    return Measured(
        count / passed_s,
        median(times_ms),
        quantiles(times_ms, n=100)[98],
        max(costs),
        len(calls) / batches,
        batcher_us / count,
        sum(cpu_us.values()) / count,
    )


def measure(way: str, texts: list[str]) -> Measured:
    """On a stack of its own."""
    with EmbeddedRedis(append_only=False) as redis, tempfile.TemporaryFile() as log, ExitStack() as stack:
        services: list[subprocess.Popen[bytes]] = []
        stack.callback(stop, services)
        services.append(start(redis.url, log, "carpool_batcher"))
        services += [start(redis.url, log, "carpool_worker", f"{Path(__file__)}:{way}") for _ in range(2)]
        asyncio.run(wait_for_workers(redis.url, way))
        pids = {"batcher": services[0].pid}
        for number, worker in enumerate(services[1:]):
            pids |= {f"worker {number}": worker.pid, f"model {number}": child_of(worker.pid)}
        return asyncio.run(load(redis.url, way, texts, pids))


async def wait_for_workers(url: str, way: str) -> None:
    """Until both execute batches."""
    async with AsyncClient(url) as client:
        await client.wait_ready(way, 60)
        while len({reply["call"] for reply in await client.infer_many(way, ["x"] * 256, timeout=60)}) < 4:
            pass


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=6000)
    count = parser.parse_args().requests
    sizes = np.random.default_rng(1).exponential(470, count).clip(10, 4000).astype(int)
    texts = ["x" * size for size in sizes]
    print("| costs | requests/s | p50 | p99 | largest call | calls for a batch | batcher | workers |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for way in WAYS:
        rounds = [measure(way, texts) for _ in range(ROUNDS)]
        of = Measured(*map(median, zip(*rounds, strict=True)))
        print(
            f"| {way} | {of.rate:,.0f} | {of.p50_ms:.0f} ms | {of.p99_ms:.0f} ms | {of.cost_max:,.0f} | "
            f"{of.calls_per_batch:.2f} | {of.batcher_us:.0f} µs | {of.workers_us:.0f} µs |",
            flush=True,
        )


if __name__ == "__main__":
    main()
