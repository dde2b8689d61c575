"""What a request costs that is enqueued and read by ID, beside `infer`: CPU time of each process.

    .venv/bin/python ops/bench/enqueued.py [--rounds 5] [--requests 2000]

A no-op model, one worker. In turns, rounds of `infer`, of `enqueue` and `result`, and of `infer` again, with
one request at a time and with 64; the same producer sends and reads. Printed are medians, in us a request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np
from service_processes import NOOP, CpuMeter, child_of, start, stop

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

IN_FLIGHT: Final = (1, 64)
_BODY: Final = np.zeros(128, np.float32)


async def infer(client: AsyncClient) -> None:
    """One request."""
    await client.infer("noop", _BODY)


async def enqueue(client: AsyncClient) -> None:
    """One request by ID."""
    await client.result(await client.enqueue("noop", _BODY))


async def measure(
    client: AsyncClient,
    one: Callable[[AsyncClient], Awaitable[Any]],
    pids: dict[str, int],
    requests: int,
    in_flight: int,
) -> dict[str, float]:
    """CPU time and duration of a request, in us."""

    async def worker(count: int) -> None:
        for _ in range(count):
            await one(client)

    meter, started_s = CpuMeter(pids), time.monotonic()
    await asyncio.gather(*[worker(requests // in_flight) for _ in range(in_flight)])
    took_us = (time.monotonic() - started_s) * 1e6
    sent = requests // in_flight * in_flight
    return {name: us / sent for name, us in {**meter.stop(), "duration": took_us}.items()}


async def compare(url: str, pids: dict[str, int], rounds: int, requests: int) -> None:
    """Measure in turns, and print."""
    async with AsyncClient(url) as client:
        await client.wait_ready("noop", 60)
        for in_flight in IN_FLIGHT:
            found: dict[str, list[dict[str, float]]] = {"infer": [], "enqueue": [], "infer again": []}
            for _ in range(rounds + 1):
                for name, rows in found.items():
                    one = enqueue if name == "enqueue" else infer
                    rows.append(await measure(client, one, pids, requests, in_flight))
            for name, rows in found.items():
                of_each = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
                cpu_us = sum(us for key, us in of_each.items() if key != "duration")
                shown = ", ".join(f"{key} {us:.0f}" for key, us in of_each.items())
                print(f"{in_flight:3} in flight, {name:12} {cpu_us:6.0f} us of CPU: {shown}")


def main() -> None:
    """Start a stack, measure, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    with EmbeddedRedis(append_only=False) as server, tempfile.TemporaryFile() as log:
        services = [start(server.url, log, "carpool_batcher"), start(server.url, log, "carpool_worker", NOOP)]
        try:
            asyncio.run(_when_ready(server, services, arguments.rounds, arguments.requests))
        finally:
            stop(services)


async def _when_ready(server: EmbeddedRedis, services: list[Any], rounds: int, requests: int) -> None:
    async with AsyncClient(server.url) as client:
        await client.wait_ready("noop", 60)
    batcher, worker = services
    pids = {"batcher": batcher.pid, "worker": worker.pid, "model": child_of(worker.pid), "redis": server.pid}
    await compare(server.url, {"producer": os.getpid(), **pids}, rounds, requests)


if __name__ == "__main__":
    main()
