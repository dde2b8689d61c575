"""Cost of idle models: CPU, threads, connections and memory of the batcher; latency of a lone request.

    .venv/bin/python ops/bench/many_models.py [--models 1,51,201] [--seconds 20] [--requests 1000]

All models but one are registered as a worker would, and have a model process whose lease runs, and no
requests. A worker serves the other one, `noop`. First nothing is sent for `--seconds`; then lone requests
are. Each number of models has a Redis, a batcher and a worker of its own, all on one machine.

The last column is what a node takes beside its processes that has as many models, each with a process: the
CPU time of its turns, of which it has two a second. Its processes are not started.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
from redis import Redis
from service_processes import NOOP, cpu_time_us, start, stop

from carpool.client.aio import AsyncClient
from carpool.errors import NotFoundError
from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.nodes import NodeStore
from carpool.store.seats import SeatStore
from carpool.store.worker import WorkerStore
from carpool.wire.audit import Actor
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker.node.main import TURN_S
from carpool_worker.node.node import Node

SETTLE_S: Final = 6.0  # until models that were just found are idle
LEASE_MS: Final = 3_600_000
WARM_UP: Final = 100
NODE_TURNS: Final = 100


class Idle(NamedTuple):
    """What a batcher and its Redis cost while nothing is sent. CPU in percent of a core."""

    batcher_percent: float
    redis_percent: float
    threads: int
    connections: int
    rss_mb: float


def register_idle_models(url: str, number: int) -> None:
    """Register models `idle0`, `idle1`, ..., each with a live model process."""
    link = Link(url, name="register")
    for at in range(number):
        store = WorkerStore(link, Keys(f"idle{at}"))
        store.register(ModelSettings().as_text())
        store.join("worker", LEASE_MS)
    link.close()


def measure_idle(redis: Any, batcher: int, server: int, seconds: float) -> Idle:
    """Watch both processes for a while."""
    before_us = cpu_time_us(batcher), cpu_time_us(server)
    time.sleep(seconds)
    batcher_us, redis_us = cpu_time_us(batcher) - before_us[0], cpu_time_us(server) - before_us[1]
    status = dict(line.split(":", 1) for line in Path(f"/proc/{batcher}/status").read_text().splitlines())
    name = f"-{batcher}-"  # in the names of its connections
    connections = sum(name in client["name"] for client in redis.client_list())
    return Idle(
        batcher_us / seconds / 1e4,
        redis_us / seconds / 1e4,
        int(status["Threads"]),
        connections,
        int(status["VmRSS"].split()[0]) / 1024,
    )


async def is_served(client: AsyncClient, body: np.ndarray) -> bool:
    """Whether the worker has registered its model."""
    try:
        await client.infer("noop", body)
    except NotFoundError:
        return False
    return True


async def lone_latencies_ms(url: str, requests: int) -> list[float]:
    """Latencies of requests that are sent one at a time, in ascending order."""
    body = np.zeros(128, np.float32)
    latencies_ms: list[float] = []
    async with AsyncClient(url) as client:
        while not await is_served(client, body):
            await asyncio.sleep(0.05)
        gc.collect()
        gc.disable()
        for _ in range(WARM_UP + requests):
            started_s = time.perf_counter()
            await client.infer("noop", body)
            latencies_ms.append((time.perf_counter() - started_s) * 1e3)
    return sorted(latencies_ms[WARM_UP:])


class Figures(NamedTuple):
    """What was measured with a number of models."""

    idle: Idle
    p50_ms: float  # of lone requests
    p99_ms: float


class ServingProcess:
    """In place of a process that serves."""

    serves, is_drained, ended, cannot_load = True, False, "", False

    def poll(self) -> None: ...

    def drain(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, within_s: float) -> bool:
        return True


def measure_node(url: str, models: int) -> float:
    """What the turns of a node take that serves so many models, in percent of a core."""
    links = [Link(url, name=name) for name in ("operator", "node")]
    operator, seats = NodeStore(links[0]), SeatStore(links[1], "node", LEASE_MS)
    entries = {f"idle{at}": ["1"] for at in range(models)}
    node = Node(
        seats, "node", models, lambda: (entries, {}), lambda wanted, slot: ServingProcess(), drain_s=30.0
    )
    node.turn()
    for name in entries:
        operator.load(name, "1", {}, None, None, actor=Actor("bench", "command"))
    while node.turn():
        pass  # it claims the seats, and says that they serve
    began_s = time.process_time()
    for _ in range(NODE_TURNS):
        node.turn()
    turn_s = (time.process_time() - began_s) / NODE_TURNS
    for link in links:
        link.close()
    return 100 * turn_s / TURN_S


def measure(models: int, seconds: float, requests: int) -> Figures:
    """The figures for this number of models."""
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as server:
        register_idle_models(server.url, models - 1)
        services = [
            start(server.url, log, "carpool_batcher"),
            start(server.url, log, "carpool_worker", NOOP),
        ]
        redis: Any = Redis.from_url(server.url, protocol=2)
        try:
            asyncio.run(lone_latencies_ms(server.url, 1))
            time.sleep(SETTLE_S)
            idle = measure_idle(redis, services[0].pid, server.pid, seconds)
            latencies_ms = asyncio.run(lone_latencies_ms(server.url, requests))
        finally:
            redis.close()
            stop(services)
    p50_ms, p99_ms = (latencies_ms[len(latencies_ms) * percent // 100] for percent in (50, 99))
    return Figures(idle, p50_ms, p99_ms)


def main() -> None:
    """Measure each number of models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="1,51,201", help="numbers of registered models")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to watch idle processes")
    parser.add_argument("--requests", type=int, default=1000, help="lone requests")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("models  batcher/%   redis/%   threads  connections   rss/MB    p50/ms   p99/ms  node/%")
    for models in map(int, options.models.split(",")):
        idle, p50_ms, p99_ms = measure(models, options.seconds, options.requests)
        with EmbeddedRedis(append_only=False) as server:
            node_percent = measure_node(server.url, models)
        print(
            f"{models:6}  {idle.batcher_percent:9.1f} {idle.redis_percent:9.1f} {idle.threads:9} "
            f"{idle.connections:12} {idle.rss_mb:8.0f}  {p50_ms:8.2f} {p99_ms:8.2f} {node_percent:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
