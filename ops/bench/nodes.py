"""What one Redis carries; the same on three nodes of a cluster; and what it costs to split a model's queue.

    .venv/bin/python ops/bench/nodes.py [--redis] [--cluster] [--split] [--seconds 5] [--write]

--redis: a no-op model on float32[128] under several loads: what a request costs Redis, by command.
--cluster: three models, or one in three shards, on one node and on three, all on this machine. A shard is a
model of its own: the producer chooses one for each request, at random.
--split: in virtual time, one queue of a model and its processes beside several that share both.
--write puts the tables into docs/scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from redis import Redis
from sections import table, write_section
from service_processes import CpuMeter, start, stop

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError, NotFoundError
from carpool.model_settings import ModelSettings
from carpool.wire.report import BatcherReport
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.local.embedded import EmbeddedRedis, find_servers
from carpool_cli.tuning.arrivals import poisson
from carpool_cli.tuning.simulator import Simulation, World

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
DOCUMENT: Final = ROOT / "docs" / "scaling.md"
BODY: Final = np.zeros(128, np.float32)
LOADS: Final = ((1, "one request at a time"), (64, "64 in flight"), (1024, "1,024 in flight"))
COMMANDS_SHOWN: Final = 5
WAIT_S_MAX: Final = 60.0


class Server(NamedTuple):
    """A Redis to measure: its process, and a connection to it."""

    pid: int
    redis: Any


class Run(NamedTuple):
    """What a load cost, in µs of CPU for each request, by process; and by command of Redis."""

    requests: int
    per_s: float
    us: dict[str, float]
    commands: dict[str, float]
    batch: float  # requests in one, on average


# --- real requests -----------------------------------------------------------------------------------------


async def serve(client: AsyncClient, models: Sequence[str]) -> None:
    """Wait until each model answers."""
    for model in models:
        end_s = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                await client.infer(model, BODY, timeout=WAIT_S_MAX)
                break
            except NotFoundError:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.1)


async def load(client: AsyncClient, models: Sequence[str], in_flight: int, seconds: float) -> int:
    """Requests, each to one of these models at random. Returns how many were answered."""
    end_s, answered = time.monotonic() + seconds, 0
    chance = random.Random(1)  # noqa: S311 (a load)

    async def sender() -> None:
        nonlocal answered
        while time.monotonic() < end_s:
            try:
                await client.infer(chance.choice(models), BODY, timeout=WAIT_S_MAX)
            except CarpoolError as error:
                raise SystemExit(f"a request failed: {error}") from None
            answered += 1

    await asyncio.gather(*[sender() for _ in range(in_flight)])
    return answered


def spent_us(servers: Sequence[Server]) -> dict[str, float]:
    """By command, since the statistics were reset; what a script calls counts for the script."""
    spent: dict[str, float] = {}
    for server in servers:
        for name, stats in server.redis.info("commandstats").items():
            command = name.removeprefix("cmdstat_")
            spent[command] = spent.get(command, 0.0) + stats["usec"]
    return spent


def dispatched(servers: Sequence[Server]) -> tuple[int, int]:
    """How many batches and requests were dispatched, by the latest reports of batchers."""
    batches = requests = 0
    for server in servers:
        for key in server.redis.scan_iter("*:status"):
            report = BatcherReport.decode(server.redis.get(key))
            if report is not None:
                batches, requests = batches + sum(report.batches.values()), requests + report.requests
    return batches, requests


async def measure(
    url: str,
    models: Sequence[str],
    servers: Sequence[Server],
    pids: dict[str, int],
    in_flight: int,
    seconds: float,
) -> Run:
    """One load."""
    async with AsyncClient(url) as client:
        await serve(client, models)
        await load(client, models, in_flight, 1.0)
        for server in servers:
            server.redis.config_resetstat()
        before = dispatched(servers)
        of_servers = {f"redis {at}": server.pid for at, server in enumerate(servers)}
        meter, began_s = CpuMeter({**of_servers, **pids, "producer": os.getpid()}), time.monotonic()
        answered = await load(client, models, in_flight, seconds)
        took_s, used = time.monotonic() - began_s, meter.stop()
        commands, after = spent_us(servers), dispatched(servers)
    return Run(
        answered,
        answered / took_s,
        {name: us / answered for name, us in used.items()},
        {name: us / answered for name, us in commands.items()},
        (after[1] - before[1]) / max(1, after[0] - before[0]),
    )


@contextmanager
def stack(url: str, models: Sequence[str], each: int, log: IO[bytes]) -> Iterator[dict[str, int]]:
    """A batcher, and `each` workers for every model. Yields the processes."""
    services = [start(url, log, "carpool_batcher", CARPOOL_LOG_LEVEL="warning")]
    for model in models:
        for _ in range(each):
            spec = f"{model}={HERE / 'noop.py'}:Noop"
            services.append(start(url, log, "carpool_worker", spec, CARPOOL_LOG_LEVEL="warning"))
    try:
        yield {"batcher": services[0].pid}
    finally:
        stop(services)


def on_one_redis(seconds: float) -> str:
    """The table of what a request costs Redis."""
    rows = []
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as redis:
        server = Server(redis.pid, Redis.from_url(redis.url, protocol=2))
        with stack(redis.url, ["noop"], 1, log) as pids:
            for in_flight, name in LOADS:
                run = asyncio.run(measure(redis.url, ["noop"], [server], pids, in_flight, seconds))
                print(name, run, flush=True)
                own = {
                    one: us
                    for one, us in run.commands.items()
                    if one in ("evalsha", "eval", "xread", "xreadgroup")
                }
                known = sum(own.values()) + run.commands.get("xadd", 0.0) / 3
                total = run.us["redis 0"]
                rows.append(
                    (
                        name,
                        f"{run.batch:.1f}",
                        f"{total:,.1f}",
                        *(f"{own.get(one, 0.0):,.1f}" for one in ("evalsha", "xread", "xreadgroup")),
                        f"{run.commands.get('xadd', 0.0) / 3:,.1f}",
                        f"{max(0.0, total - known):,.1f}",
                        f"{1e6 / total:,.0f}",
                    )
                )
    heading = (
        *("load", "in a batch", "µs a request", "scripts", "XREAD", "XREADGROUP", "XADD"),
        *("sockets", "requests/s of a core"),
    )
    return f"{machine()}\n\n{table(heading, rows)}"


def on_a_cluster(seconds: float) -> str:
    """The table of one node and three."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.cluster import RedisCluster  # noqa: PLC0415

    rows = []
    with tempfile.TemporaryFile() as log:
        for in_flight in (64, 512, 3072):
            with EmbeddedRedis(append_only=False) as redis:
                server = Server(redis.pid, Redis.from_url(redis.url, protocol=2))
                for title, models, each in (
                    ("one model, 3 workers; 1 node", ["noop"], 3),
                    ("3 models or shards; 1 node", ["noop.0", "noop.1", "noop.2"], 1),
                ):
                    with stack(redis.url, models, each, log) as pids:
                        run = asyncio.run(measure(redis.url, models, [server], pids, in_flight, seconds))
                    rows.append(row_of(title, in_flight, run))
            with RedisCluster(find_servers()[0]) as cluster:
                names = names_on_each(cluster)
                servers = [Server(node.pid, node.redis) for node in cluster.primaries]
                with stack(cluster.url, names, 1, log) as pids:
                    run = asyncio.run(measure(cluster.url, names, servers, pids, in_flight, seconds))
                rows.append(row_of("3 models or shards; 3 nodes", in_flight, run))
    heading = (
        *("", "in flight", "requests/s", "requests in a batch", "Redis, µs a request", "of the busiest node"),
        *("batcher", "producer"),
    )
    return f"{machine()}\n\n{table(heading, rows)}"


def names_on_each(cluster: Any) -> list[str]:
    """A name of a model for each node, whose keys that node has."""
    found: dict[int, str] = {}
    for number in itertools.count():
        name = f"noop.{number}"
        found.setdefault(cluster.primary_of(f"carpool:{{{name}}}:requests").port, name)
        if len(found) == len(cluster.primaries):
            return list(found.values())
    raise AssertionError


def row_of(title: str, in_flight: int, run: Run) -> tuple[str, ...]:
    """A row of the table."""
    print(title, in_flight, run, flush=True)
    of_nodes = [us for name, us in run.us.items() if name.startswith("redis")]
    return (
        title,
        str(in_flight),
        f"{run.per_s:,.0f}",
        f"{run.batch:.1f}",
        f"{sum(of_nodes):.1f}",
        f"{max(of_nodes):.1f}",
        f"{run.us['batcher']:.1f}",
        f"{run.us['producer']:.1f}",
    )


def machine() -> str:
    """What it was measured on."""
    version = (
        subprocess.run([str(find_servers()[0]), "--version"], check=True, stdout=subprocess.PIPE, text=True)
        .stdout.split("v=")[1]
        .split()[0]
    )
    load_before = os.getloadavg()[0]
    return (
        f"Redis {version}, {os.cpu_count()} cores ({platform.machine()}) that other work used, too: load "
        f"{load_before:.0f}. CPU times are the processes' own."
    )


# --- virtual time ------------------------------------------------------------------------------------------

SHARDS: Final = (1, 2, 3, 6)
PROCESSES: Final = 6
WORLDS: Final = {
    "l(n) = 20 + 2 n ms": World(intercept_us=20_000, slope_us=2_000),
    "l(n) = 40 + 0.2 n ms": World(intercept_us=40_000, slope_us=200),
}
REQUESTS: Final = 12_000
SIZE: Final = 64
WITHIN_MS: Final = 150.0
SHARE: Final = 0.99


def simulate(world: World, shards: int, processes: int, per_s: float) -> tuple[float, float, float, float]:
    """Mean batch, p50, p99 and the share within WITHIN_MS, of all shards together."""
    latencies_us: list[int] = []
    sizes: list[int] = []
    for shard in range(shards):
        scheduler = Scheduler(ModelSettings(max_batch_size=SIZE), processes // shards)
        simulation = Simulation(scheduler, world._replace(processes=processes // shards), shard)
        result = simulation.run(poisson(per_s / shards, REQUESTS // shards, shard))
        latencies_us += result.latencies_us
        sizes += result.batch_sizes
    latencies_us.sort()
    in_time = sum(one <= 1000 * WITHIN_MS for one in latencies_us) / len(latencies_us)
    p50, p99 = (latencies_us[int(share * len(latencies_us))] / 1000 for share in (0.5, 0.99))
    return sum(sizes) / len(sizes), p50, p99, in_time


def split() -> str:
    """The table of split queues."""
    rows = []
    for name, world in WORLDS.items():
        ceiling = PROCESSES * SIZE / world.execution_us(SIZE) * 1e6
        for load_share in (0.05, 0.3, 0.7):
            per_s = load_share * ceiling
            for shards in SHARDS:
                size, p50, p99, _ = simulate(world, shards, PROCESSES, per_s)
                needed = next(
                    number
                    for number in range(shards, 1000, shards)
                    if 0.9 * number * SIZE / world.execution_us(SIZE) * 1e6 > per_s
                    and simulate(world, shards, number, per_s)[3] >= SHARE
                )
                row = (
                    name,
                    f"{per_s:,.0f}",
                    str(shards),
                    f"{size:.1f}",
                    f"{p50:.0f} ms",
                    f"{p99:.0f} ms",
                    str(needed),
                )
                print(row, flush=True)
                rows.append(row)
    heading = ("model", "requests/s", "queues", "requests in a batch", "p50", "p99", "processes needed")
    return (
        f"{PROCESSES} model processes, batches of up to {SIZE}, Poisson arrivals. Needed: for 99% within "
        f"{WITHIN_MS:.0f} ms, a multiple of the queues.\n\n{table(heading, rows)}"
    )


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("redis", "cluster", "split", "write"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each load")
    options = parser.parse_args()
    texts = {}
    if options.split:
        texts["### Split queues"] = split()
    if options.redis:
        texts["### A request in Redis"] = on_one_redis(options.seconds)
    if options.cluster:
        texts["### Three nodes"] = on_a_cluster(options.seconds)
    for heading, text in texts.items():
        print(text)
        if options.write:
            write_section(DOCUMENT, heading, text)


if __name__ == "__main__":
    main()
