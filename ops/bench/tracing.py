"""Cost of traces: CPU time of a request without a collector, with one, and with 1% and 100% of requests
recorded.

    .venv/bin/python ops/bench/tracing.py [--requests N] [--rounds N] [--in-flight N] [--batch-size N]

A no-op model on float32[128] and one AsyncClient. Two stacks, with a Redis each, one of them with a collector
that takes everything; a round sends the same to each, one after the other, in turn forwards and backwards.
Each recorded request has a trace of its own, which its producer names. The median of the rounds is printed
with their range, and for each way the difference to the first one in the same round, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from grid import machine
from service_processes import NOOP, child_of, cpu_time_us, start, stop
from throughput import Round, spread

from carpool.client.aio import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

READY_S: Final = 120.0
COLLECTOR: Final = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
WAYS: Final = {  # name -> whether there is a collector, and the share of requests that are recorded
    "no collector": (False, 0.0),
    "none recorded": (True, 0.0),
    "1% recorded": (True, 0.01),
    "100% recorded": (True, 1.0),
}


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A process that takes spans and drops them; its address."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        stop([process])


@contextlib.contextmanager
def stack(log: IO[bytes], batch_size: int, endpoint: str) -> Iterator[tuple[str, dict[str, int]]]:
    """The address of a Redis with a batcher and a worker, and all their processes."""
    with EmbeddedRedis(append_only=False) as server:
        common = {"CARPOOL_OTLP_ENDPOINT": endpoint, "BENCH_BATCH_SIZE": str(batch_size)}
        services = {
            "batcher": start(server.url, log, "carpool_batcher", **common),
            "worker": start(server.url, log, "carpool_worker", NOOP, **common),
        }
        try:
            yield server.url, {"redis": server.pid, **{name: one.pid for name, one in services.items()}}
        finally:
            stop(services.values())


async def send(
    client: AsyncClient, requests: int, in_flight: int, share: float, pids: dict[str, int]
) -> Round:
    """Requests/s, and the CPU time of each process for a request."""
    body = np.zeros(128, np.float32)
    every = round(1 / share) if share else requests + 1
    traced = [
        {"fields": {"traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}}
        for _ in range(requests // every)
    ]
    none: dict[str, Any] = {}
    options = iter([traced.pop() if traced and not number % every else none for number in range(requests)])

    async def one_after_another() -> None:
        for one in options:
            await client.infer("noop", body, **one)

    before = {name: cpu_time_us(pid) for name, pid in pids.items()}
    started_s = time.perf_counter()
    await asyncio.gather(*[one_after_another() for _ in range(in_flight)])
    duration_s = time.perf_counter() - started_s
    cpu_us = {name: (cpu_time_us(pid) - before[name]) / requests for name, pid in pids.items()}
    return Round(requests / duration_s, cpu_us)


async def measure(
    stacks: list[tuple[str, dict[str, int]]], requests: int, rounds: int, in_flight: int
) -> dict[str, list[Round]]:
    """All rounds, by way."""
    found: dict[str, list[Round]] = {name: [] for name in WAYS}
    clients = [AsyncClient(url) for url, _ in stacks]
    try:
        for client, (_, pids) in zip(clients, stacks, strict=True):
            await client.wait_ready("noop", READY_S)
            pids |= {"model": child_of(pids["worker"]), "producer": os.getpid()}
            await send(client, requests // 4, in_flight, 0.5, pids)  # warm up
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            ways = list(WAYS.items())
            for name, (has_collector, share) in ways if number % 2 == 0 else ways[::-1]:
                pids = stacks[has_collector][1]
                found[name].append(await send(clients[has_collector], requests, in_flight, share, pids))
    finally:
        for client in clients:
            await client.close()
    return found


def print_ways(found: dict[str, list[Round]]) -> None:
    """Each way, and what it takes beside the first one."""
    totals = {name: [sum(one.cpu_us.values()) for one in rounds] for name, rounds in found.items()}
    first = totals[next(iter(WAYS))]
    for name, rounds in found.items():
        more = [total - without for total, without in zip(totals[name], first, strict=True)]
        by_process = {
            process: statistics.median([one.cpu_us[process] for one in rounds])
            for process in rounds[0].cpu_us
        }
        listed = ", ".join(f"{process} {us:.1f}" for process, us in by_process.items())
        print(f"{name:15} CPU us a request: {spread(totals[name], '.1f')}, more: {spread(more, '+.2f')}")
        print(f"{'':15} {listed}; {spread([one.per_second for one in rounds], ',.0f')} requests/s")


def main() -> None:
    """Start the stacks, measure, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=50_000, help="number of requests of each way in a round"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64, help="the model's max_batch_size")
    options = parser.parse_args()
    print("\n".join(machine.sentences(machine.describe(Path(sys.executable)))))
    with (
        tempfile.TemporaryFile() as log,
        collector() as endpoint,
        stack(log, options.batch_size, "") as bare,
        stack(log, options.batch_size, endpoint) as tracing,
    ):
        found = asyncio.run(measure([bare, tracing], options.requests, options.rounds, options.in_flight))
        print_ways(found)


if __name__ == "__main__":
    main()
