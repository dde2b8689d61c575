"""What producers that mean harm cost: refusals, and how long they delay the requests of another model.

    .venv/bin/python ops/bench/floods.py [--requests 1000000] [--entries 24] [--seconds 5]

First a model is sent very many requests without bodies, 25 bytes each, which are all refused: how many a
second, and the CPU time of each. Then it gets a backlog of each kind in `tests/support/hostile.py`, and
meanwhile another model lone requests, one after another. Their latency is what their producer sees, and their
queue delay what the batcher answers for: from arrival to dispatch, by Redis's clock. All on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from redis import Redis
from service_processes import NOOP, cpu_time_us, start, stop

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.worker import WorkerStore
from carpool_cli.local.embedded import EmbeddedRedis

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.hostile import OF_SEQUENCES, PLAIN, Shape, without_bodies

IN_ENTRY: Final = 4096
FLOODED: Final = Keys("flooded")
LONE: Final = Keys("noop")
WARM_UP: Final = 200
QUEUE_SIZE_MAX: Final = 100_000


class Stack(NamedTuple):
    """A Redis, and its batcher. `redis` is a connection of redis-py."""

    server: EmbeddedRedis
    redis: Any
    batcher: int

    def flood(self, entries: int, shape: Shape, **fields: str) -> None:
        """Send entries of this shape to the model, all at once."""
        pipeline = self.redis.pipeline(transaction=True)
        for _ in range(entries):
            for entry in shape(IN_ENTRY):
                pipeline.xadd(FLOODED.requests, fields | entry)
        pipeline.execute()


@contextmanager
def stack(*, has_sequences: bool = False) -> Iterator[Stack]:
    """A stack that serves both models, of which only LONE has a worker."""
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as server:
        link = Link(server.url, name="register")
        registered = ModelSettings(max_queue_size=QUEUE_SIZE_MAX).as_text()
        WorkerStore(link, FLOODED).register(registered | ({"stateful": "true"} if has_sequences else {}))
        link.close()
        services = [start(server.url, log, "carpool_batcher"), start(server.url, log, "carpool_worker", NOOP)]
        redis: Any = Redis.from_url(server.url, protocol=2)
        try:
            while not (redis.exists(FLOODED.batcher) and redis.zcard(LONE.workers)):
                time.sleep(0.05)
            yield Stack(server, redis, services[0].pid)
        finally:
            redis.close()
            stop(services)


def measure_refusals(requests: int, reply_to: str) -> None:
    """Print what it costs to refuse this many, whose results go to lists of their own, or to a stream."""
    with stack() as of:
        entries = -(-requests // IN_ENTRY)
        requests = entries * IN_ENTRY
        before_us, started_s = [cpu_time_us(pid) for pid in (of.batcher, of.server.pid)], time.monotonic()
        pipeline = of.redis.pipeline(transaction=False)
        for number in range(entries):
            (entry,) = without_bodies(IN_ENTRY, first=number * IN_ENTRY)
            pipeline.xadd(FLOODED.requests, entry | ({"reply_to": reply_to} if reply_to else {}))
        pipeline.execute()
        while of.redis.xlen(FLOODED.requests):
            time.sleep(0.01)
        wall_s = time.monotonic() - started_s
        batcher_us, redis_us = (
            (cpu_time_us(pid) - before) / requests
            for pid, before in zip((of.batcher, of.server.pid), before_us, strict=True)
        )
        where = "a reply stream" if reply_to else "lists"
        print(
            f"{requests:,} refusals to {where:14} {requests / wall_s:9,.0f}/s   "
            f"us each: batcher {batcher_us:.2f}, redis {redis_us:.2f}",
            flush=True,
        )


class Delays(NamedTuple):
    """Of lone requests, in ms, ascending: what their producer waited, and what they waited in the queue."""

    latency_ms: list[float]
    queue_ms: list[float]


def lone_requests(redis: Any, until_s: float, number: int = sys.maxsize) -> Delays:
    """Send lone requests, one after another, until this time, or as many."""
    delays = Delays([], [])
    while time.monotonic() < until_s and len(delays.latency_ms) < number:
        started_s = time.perf_counter()
        entry_id = redis.xadd(LONE.requests, {"body": "[1]"}).decode()
        _, envelope = redis.blpop([LONE.result(entry_id)], 60)
        delays.latency_ms.append((time.perf_counter() - started_s) * 1e3)
        delays.queue_ms.append(json.loads(envelope)["queue_us"] / 1e3)
    return delays


def measure_delays(shape: Shape | None, entries: int, seconds: float) -> None:
    """Print how long lone requests take beside a backlog of this shape; beside none if it is None."""
    with stack(has_sequences=shape in OF_SEQUENCES) as of:
        lone_requests(of.redis, time.monotonic() + 60, WARM_UP)
        if shape is not None:
            of.flood(entries, shape, reply_to="hostile")
        before_us, started_s = cpu_time_us(of.batcher), time.monotonic()
        delays = lone_requests(of.redis, started_s + seconds)
        batcher_percent = (cpu_time_us(of.batcher) - before_us) / (time.monotonic() - started_s) / 1e4
    row = "".join(f"{value:9.1f}" for values in delays for value in percentiles(values))
    name = "nothing" if shape is None else shape.__name__
    print(f"{name:36}{len(delays.queue_ms):9}{batcher_percent:11.0f}{row}", flush=True)


def percentiles(values: list[float]) -> list[float]:
    """The median, the 99th percentile and the largest."""
    ascending = sorted(values)
    return [ascending[len(ascending) * percent // 100] for percent in (50, 99)] + ascending[-1:]


def main() -> None:
    """Measure refusals, then delays."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="to be refused; 0: leave that out")
    parser.add_argument("--entries", type=int, default=24, help="of each kind, of 4,096 requests")
    parser.add_argument("--seconds", type=float, default=5.0, help="for how long lone requests are sent")
    parser.add_argument("--kinds", default="", help="only backlogs whose name contains this")
    options = parser.parse_args()
    for reply_to in ("", "hostile") if options.requests else ():
        measure_refusals(options.requests, reply_to)
    columns = "latency/ms: p50, p99, max     queue/ms: p50, p99, max"
    print(f"lone requests beside a backlog of       number  batcher/%    {columns}")
    for shape in (None, *PLAIN, *OF_SEQUENCES):
        if shape is None or options.kinds in shape.__name__:
            measure_delays(shape, options.entries, options.seconds)


if __name__ == "__main__":
    main()
