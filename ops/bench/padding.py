"""Requests of 64 lengths: one execution for each length, or padded so that they share one.

    .venv/bin/python ops/bench/padding.py [--requests N]

Tokens are arrays of INT64, 8 to 512 of them in steps of 8, each length as often. A model that sleeps 2 ms and
1 us for each number that it gets, padding too, as a device that is better used by large batches; batches of
up to 64 requests, one worker, 256 in flight. For each way: requests/s and the time from sending to result;
executions for a batch; the share of what the model gets that is padding; and CPU time for a request, of the
worker with its model. In the last way the model pads in `predict`, which gets arrays one by one.
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
from typing import Final, NamedTuple

import numpy as np
from service_processes import CpuMeter, child_of, start, stop

from carpool import TensorSpec
from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

ROUNDS: Final = 3
IN_FLIGHT: Final = 256
LENGTHS: Final = tuple(range(8, 513, 8))
LONGEST: Final = LENGTHS[-1]
WAYS: Final = {
    "ByLength": "an execution for each length",
    "FourBuckets": "`buckets=[64, 128, 256, 512]`",
    "OneBucket": "`buckets=[512]`",
    "InPredict": "`predict` pads to the longest",
}


class ByLength:
    """Declares that the length varies, and nothing else: arrays of one length are stacked."""

    max_batch_size = 64
    inputs = (TensorSpec("ids", "INT64", (-1,)),)

    def predict(self, batch: np.ndarray) -> list[dict[str, float]]:
        """Of each request: when its execution began, and how many numbers it got for it."""
        ids = batch["ids"] if isinstance(batch, dict) else batch
        return executed(ids)


class FourBuckets(ByLength):
    """The worker pads to the next of four lengths."""

    inputs = (TensorSpec("ids", "INT64", (-1,), pad=0, buckets=[64, 128, 256, LONGEST], lengths="lengths"),)


class OneBucket(ByLength):
    """The worker pads to the largest length."""

    inputs = (TensorSpec("ids", "INT64", (-1,), pad=0, buckets=[LONGEST], lengths="lengths"),)


class InPredict:
    """Declares nothing, and pads all arrays of a batch itself."""

    max_batch_size = 64

    def predict(self, batch: list[np.ndarray]) -> list[dict[str, float]]:
        """See ByLength."""
        ids = np.zeros((len(batch), max(map(len, batch))), np.int64)
        for row, of_one in zip(ids, batch, strict=True):
            row[: len(of_one)] = of_one
        return executed(ids)


def executed(ids: np.ndarray) -> list[dict[str, float]]:
    """Execute a batch: int64 (requests, length)."""
    began_s = time.monotonic()
    time.sleep(0.002 + ids.size * 1e-6)
    return [{"began": began_s, "numbers": ids.shape[1]}] * len(ids)


class Measured(NamedTuple):
    """Of one way and round; times in ms, CPU in us for a request."""

    rate: float
    p50_ms: float
    p99_ms: float
    executions_per_batch: float
    padding: float
    worker_us: float


async def load(url: str, way: str, bodies: list[np.ndarray], pids: dict[str, int]) -> Measured:
    """Send these bodies, IN_FLIGHT at a time."""
    times_ms: list[float] = []
    executions: set[float] = set()
    batches = numbers = 0.0
    left = iter(bodies)

    async def send(client: AsyncClient) -> None:
        nonlocal batches, numbers
        for body in left:
            sent_s = time.monotonic()
            reply = await client.request(way, body, timeout=60)
            times_ms.append((time.monotonic() - sent_s) * 1000)
            executions.add(reply.value["began"])
            numbers += reply.value["numbers"]
            batches += 1 / reply.batch_size

    async with AsyncClient(url) as client:
        await client.wait_ready(way, 60)
        await asyncio.gather(*[client.infer(way, body, timeout=60) for body in bodies[:IN_FLIGHT]])
        meter, began_s = CpuMeter(pids), time.monotonic()
        await asyncio.gather(*[send(client) for _ in range(IN_FLIGHT)])
        passed_s, cpu_us = time.monotonic() - began_s, meter.stop()
    return Measured(
        len(bodies) / passed_s,
        median(times_ms),
        quantiles(times_ms, n=100)[98],
        len(executions) / batches,
        1 - sum(map(len, bodies)) / numbers,
        sum(cpu_us.values()) / len(bodies),
    )


def measure(way: str, bodies: list[np.ndarray]) -> Measured:
    """On a stack of its own."""
    with EmbeddedRedis(append_only=False) as redis, tempfile.TemporaryFile() as log, ExitStack() as stack:
        services: list[subprocess.Popen[bytes]] = []
        stack.callback(stop, services)
        services.append(start(redis.url, log, "carpool_batcher"))
        services.append(start(redis.url, log, "carpool_worker", f"{Path(__file__)}:{way}"))
        asyncio.run(wait_for_worker(redis.url, way))
        pids = {"worker": services[1].pid, "model": child_of(services[1].pid)}
        return asyncio.run(load(redis.url, way, bodies, pids))


async def wait_for_worker(url: str, way: str) -> None:
    """Until it executes batches."""
    async with AsyncClient(url) as client:
        await client.wait_ready(way, 60)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=4096)
    count = parser.parse_args().requests
    lengths = np.random.default_rng(1).permutation(np.resize(LENGTHS, count))
    bodies = [np.arange(length) for length in lengths]
    print("| way | requests/s | p50 | p99 | executions for a batch | padding | worker |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for way, title in WAYS.items():
        rounds = [measure(way, bodies) for _ in range(ROUNDS)]
        of = Measured(*map(median, zip(*rounds, strict=True)))
        print(
            f"| {title} | {of.rate:,.0f} | {of.p50_ms:.0f} ms | {of.p99_ms:.0f} ms | "
            f"{of.executions_per_batch:.1f} | {of.padding:.0%} | {of.worker_us:.0f} µs |",
            flush=True,
        )


if __name__ == "__main__":
    main()
