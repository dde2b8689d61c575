"""Cost of a request: latency of a lone one, requests/s with 64 and 1,024 in flight, CPU time by process.

    .venv/bin/python ops/bench/throughput.py [--requests N] [--rounds N] [--batch-size N] [--unix] [--ordered]

A no-op model on float32[128] and one AsyncClient, all on one machine. Rounds alternate between the numbers in
flight, and with `--ordered` between `preserve_ordering` off and on; the median is printed with the range,
because a single figure means little on a shared machine. The first lines describe the machine and the
interpreter, with two yardsticks for comparing machines: a PING and a fixed loop of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from grid import machine
from service_processes import NOOP, child_of, cpu_time_us, start, stop

from carpool.client.aio import AsyncClient
from carpool.errors import NotFoundError
from carpool.keys import DEFAULT_PREFIX
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.wire.audit import Actor
from carpool_cli.local.embedded import EmbeddedRedis

LONE_REQUESTS: Final = 1000
IN_FLIGHT: Final = (64, 1024)
SETTING_APPLIES_S: Final = 1.5  # a batcher applies a change of a setting within a second


class Round(NamedTuple):
    """One measurement with a fixed number of requests in flight."""

    per_second: float
    cpu_us: dict[str, float]  # per request, by process


async def lone(client: AsyncClient, body: np.ndarray) -> tuple[float, float]:
    """p50 and p99 (ms) of requests that are sent one at a time."""
    latencies_s = []
    for _ in range(LONE_REQUESTS):
        started_s = time.perf_counter()
        await client.infer("noop", body)
        latencies_s.append(time.perf_counter() - started_s)
    latencies_s.sort()
    return latencies_s[len(latencies_s) // 2] * 1e3, latencies_s[len(latencies_s) * 99 // 100] * 1e3


async def many(
    client: AsyncClient, body: np.ndarray, in_flight: int, requests: int, pids: dict[str, int]
) -> Round:
    """Requests/s with `in_flight` requests at all times, and the CPU time of each process."""
    numbers = iter(range(requests))

    async def one_after_another() -> None:
        for _ in numbers:
            await client.infer("noop", body)

    before = {name: cpu_time_us(pid) for name, pid in pids.items()}
    started_s = time.perf_counter()
    await asyncio.gather(*[one_after_another() for _ in range(in_flight)])
    duration_s = time.perf_counter() - started_s
    return Round(
        requests / duration_s,
        {name: (cpu_time_us(pid) - before[name]) / requests for name, pid in pids.items()},
    )


async def measure(
    url: str, pids: dict[str, int], requests: int, rounds: int, orders: tuple[bool, ...]
) -> None:
    """Run all rounds, each with every setting of `preserve_ordering` in `orders`, and print the figures."""
    body = np.random.default_rng(0).random(128, dtype=np.float32)
    latencies: dict[bool, list[tuple[float, float]]] = {on: [] for on in orders}
    results: dict[tuple[int, bool], list[Round]] = {(number, on): [] for number in IN_FLIGHT for on in orders}
    async with AsyncClient(url) as client:
        await until_served(client, body)
        pids = {**pids, "model": child_of(pids["worker"]), "producer": os.getpid()}
        await many(client, body, IN_FLIGHT[-1], requests // 4, pids)  # warm up
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for on in orders if number % 2 == 0 else orders[::-1]:
                if len(orders) > 1:
                    await preserve_ordering(url, on)
                latencies[on].append(await lone(client, body))
                for in_flight in IN_FLIGHT:
                    results[in_flight, on].append(await many(client, body, in_flight, requests, pids))
    titles = {False: "", True: ", in order"}
    for on, of_lone in latencies.items():
        p50s, p99s = zip(*of_lone, strict=True)
        p99_ms = statistics.median(p99s)
        print(f"lone request{titles[on]}: p50 {spread(p50s, '.3f')} ms, p99 {p99_ms:.3f} ms")
    for (in_flight, on), of_rounds in results.items():
        print_rounds(f"{in_flight:5} in flight{titles[on]}", of_rounds)


def print_rounds(title: str, rounds: list[Round]) -> None:
    """Requests/s, and the CPU time of each process."""
    print(f"{title}: {spread([result.per_second for result in rounds], ',.0f')} requests/s")
    cpu_us = {name: statistics.median(result.cpu_us[name] for result in rounds) for name in rounds[0].cpu_us}
    listed = ", ".join(f"{name} {us:.1f}" for name, us in cpu_us.items())
    print(f"       CPU us per request: {listed}; total {sum(cpu_us.values()):.1f}")


async def preserve_ordering(url: str, on: bool) -> None:
    """Set it, and wait until the batcher has applied it."""
    link = Link(url, name="bench-config")
    Directory(link, DEFAULT_PREFIX).configure(
        "noop", {"preserve_ordering": str(on).lower()}, [], actor=Actor("bench", "command")
    )
    link.close()
    await asyncio.sleep(SETTING_APPLIES_S)


async def until_served(client: AsyncClient, body: np.ndarray) -> None:
    """Wait until a worker serves the model."""
    for _ in range(200):
        try:
            await client.infer("noop", body)
        except NotFoundError:
            await asyncio.sleep(0.05)
        else:
            return
    raise SystemExit("no worker became ready")


def spread(values: tuple[float, ...] | list[float], form: str) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(values):{form}} [{min(values):{form}} .. {max(values):{form}}]"


def main() -> None:
    """Start the stack, measure, stop it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="number of requests in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--append-only", action="store_true", help="with Redis's append-only file, as in `carpool up`"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="the model's max_batch_size")
    parser.add_argument("--unix", action="store_true", help="connect by a Unix socket, as in `carpool up`")
    parser.add_argument(
        "--ordered", action="store_true", help="every round without and with `preserve_ordering`"
    )
    options = parser.parse_args()
    orders = (False, True) if options.ordered else (False,)
    print("\n".join(machine.sentences(machine.describe(Path(sys.executable)))))
    with EmbeddedRedis(append_only=options.append_only) as server, tempfile.TemporaryFile() as log:
        url = server.unix_url if options.unix else server.url
        if url is None:
            raise SystemExit("the path of the temporary directory is too long for a Unix socket; set TMPDIR")
        services = {
            "batcher": start(url, log, "carpool_batcher"),
            "worker": start(url, log, "carpool_worker", NOOP, BENCH_BATCH_SIZE=str(options.batch_size)),
        }
        pids = {"redis": server.pid, **{name: service.pid for name, service in services.items()}}
        try:
            asyncio.run(measure(url, pids, options.requests, options.rounds, orders))
        finally:
            stop(services.values())


if __name__ == "__main__":
    main()
