"""How costs grow: with waiting requests, models, workers, connections, lanes, and requests in one entry.

    .venv/bin/python ops/bench/growth.py [--parts waiting,models,...] [--tiny] [--write]

Each part has stacks of its own: Redis, a batcher and a worker, all on one machine. Costs are CPU time, which
a busy machine disturbs less than requests/s; where requests are said to be served, they are no-ops on
float32[128]. --tiny measures little at the smallest sizes, to try the command. --write puts the tables and
the plot into docs/growth.md and docs/growth.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import core
import many_models
import msgpack
import numpy as np
import scale_out
import service_processes
from redis import Redis
from throughput import many, until_served

from carpool.client.aio import AsyncClient
from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.messages.requests import RAW
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.worker import WorkerStore
from carpool.wire.audit import Actor
from carpool.wire.tensors import tensor_head
from carpool_cli.local.embedded import EmbeddedRedis

DOCS: Final = Path(__file__).parents[2] / "docs"
KEYS: Final = Keys("noop")
ROW: Final = np.zeros(128, np.float32).tobytes()
HEAD: Final = tensor_head("FP32", (128,), len(ROW))
BATCH_SIZE: Final = 64
IN_FLIGHT: Final = 500
WAIT_S_MAX: Final = 120.0
EXPLANATION: Final = (
    "Costs are CPU time, mostly in microseconds a request: trust the ratios more than the values. A part "
    "is flat if the last column is near 1: it is the cost at the largest size relative to the smallest."
)


@dataclass
class Part:
    """The figures of one part: `series` has for each name a value at each of `sizes`."""

    title: str
    text: str
    axis: str
    unit: str
    sizes: Sequence[int]
    series: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        """The value of a series at the next size."""
        self.series.setdefault(name, []).append(value)


# --- a stack -----------------------------------------------------------------------------------------------


class Stack:
    """A Redis and its batcher; a worker of `noop` once `serve` is called."""

    def __init__(self, server: EmbeddedRedis, log: Any, batch_size: int) -> None:
        self._log, self._batch_size = log, batch_size
        self.url = server.url
        self.redis: Any = Redis.from_url(server.url, protocol=2)
        self.link = Link(server.url, name="growth")
        self.directory = Directory(self.link, DEFAULT_PREFIX)
        self._services = [service_processes.start(server.url, log, "carpool_batcher")]
        self.pids = {"batcher": self._services[0].pid, "Redis": server.pid}

    def serve(self) -> None:
        """Start a worker."""
        size = str(self._batch_size)
        worker = service_processes.start(
            self.url, self._log, "carpool_worker", service_processes.NOOP, BENCH_BATCH_SIZE=size
        )
        self._services.append(worker)
        self.pids["worker"] = worker.pid

    def cpu_us(self) -> dict[str, float]:
        """The CPU time of each process so far. The worker's is without that of its model process."""
        return {name: service_processes.cpu_time_us(pid) for name, pid in self.pids.items()}

    def since(self, before: dict[str, float], requests: int) -> dict[str, float]:
        """The CPU time of each process since `before`, divided by the number of requests."""
        now = self.cpu_us()
        return {name: (now[name] - cpu_us) / requests for name, cpu_us in before.items()}

    def waiting(self) -> int:
        """How many requests the batcher has read, by its latest report."""
        report = self.directory.sample("noop").report
        return -1 if report is None else report.gauges.waiting

    def send(self, entries: Sequence[Sequence[Any]]) -> None:
        """Add these entries, given by their fields."""
        for start in range(0, len(entries), 500):
            commands = [("XADD", KEYS.requests, "*", *flat) for flat in entries[start : start + 500]]
            self.link.call_many(*commands)

    def stop(self) -> None:
        """Stop the services."""
        service_processes.stop(self._services)
        self.link.close()
        self.redis.close()


@contextlib.contextmanager
def stack(batch_size: int = BATCH_SIZE) -> Iterator[Stack]:
    """A stack for the block."""
    with tempfile.TemporaryFile() as log, EmbeddedRedis(append_only=False) as server:
        started = Stack(server, log, batch_size)
        try:
            yield started
        finally:
            started.stop()


def until(condition: Callable[[], bool], pause_s: float = 0.005) -> None:
    """Wait until a condition holds."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() > started_s + WAIT_S_MAX:
            raise SystemExit(f"nothing happened for {WAIT_S_MAX:.0f} s")
        time.sleep(pause_s)


# --- requests ----------------------------------------------------------------------------------------------


def single_entries(requests: int) -> list[list[Any]]:
    """Requests, each an entry of its own."""
    return [
        ["correlation_id", f"s{number}", "content_type", RAW, "reply_to", "growth", "body", HEAD + ROW]
        for number in range(requests)
    ]


def columns(requests: int) -> list[list[Any]]:
    """Requests as columns, in one entry."""
    ids = " ".join(f"c{number}" for number in range(requests))
    fields = ["correlation_ids", ids, "row_head", HEAD, "rows", ROW * requests]
    return [[*fields, "content_type", RAW, "reply_to", "growth"]]


def packed(requests: int) -> list[list[Any]]:
    """Requests as maps, in one entry."""
    maps = [{"correlation_id": f"p{number}", "body": HEAD + ROW} for number in range(requests)]
    return [["requests", msgpack.packb(maps), "content_type", RAW, "reply_to", "growth"]]


def in_entries_of(size: int, requests: int) -> list[list[Any]]:
    """Requests as columns, in entries of `size`."""
    return [entry for _ in range(requests // size) for entry in columns(size)]


# --- the parts ---------------------------------------------------------------------------------------------


def waiting(tiny: bool) -> list[Part]:
    """Taking in and dispatching requests, while others wait."""
    depths = (1, 100, 1000) if tiny else (1, 10, 100, 1_000, 10_000, 100_000)
    part = Part(
        "Waiting requests",
        "The requests that wait have an entry each. Taking in: more are added, and the batcher reads them. "
        "Dispatching: a worker starts, and all are dispatched, executed and settled in batches of "
        f"{BATCH_SIZE}.",
        "waiting requests",
        "µs of CPU a request",
        depths,
    )
    for depth in depths:
        with stack() as one:
            take_in(one, single_entries(depth), depth)
            measure_waiting(part, one, depth, 2048 if tiny else 16_384)
    for name, make in (
        ("in an entry of its own", single_entries),
        ("as columns, 64 in an entry", lambda requests: in_entries_of(64, requests)),
    ):
        part.notes.append(memory_of(name, make(depths[-1] // 64 * 64), depths[-1] // 64 * 64))
    return [part]


def measure_waiting(part: Part, one: Stack, depth: int, requests: int) -> None:
    """Take in and dispatch this many requests while `depth` others wait."""
    before = one.cpu_us()
    take_in(one, single_entries(requests), depth + requests)
    for name, cpu_us in one.since(before, requests).items():
        part.add(f"taking in: {name}", cpu_us)
    one.serve()
    until(lambda: one.redis.xlen(KEYS.requests) < depth + requests)
    left, before = one.redis.xlen(KEYS.requests), one.cpu_us()
    until(lambda: one.redis.xlen(KEYS.requests) <= depth)
    dispatched = left - one.redis.xlen(KEYS.requests)
    for name, cpu_us in one.since(before, dispatched).items():
        part.add(f"dispatching: {name}", cpu_us)


def take_in(one: Stack, entries: Sequence[Sequence[Any]], expected: int) -> None:
    """Add entries to a model without a model process, and wait until the batcher has read all requests."""
    if not one.redis.exists(KEYS.registration):
        settings = ModelSettings(max_batch_size=BATCH_SIZE)
        WorkerStore(one.link, KEYS).register(settings.as_text())
        limits = {"max_queue_size": "1000000", "max_queue_bytes": str(1 << 30)}
        one.directory.configure("noop", limits, (), actor=Actor("bench", "command"))
        until(lambda: one.waiting() == 0, 0.05)
    one.send(entries)
    until(lambda: one.waiting() == expected, 0.05)


def memory_of(name: str, entries: Sequence[Sequence[Any]], requests: int) -> str:
    """What a waiting request takes in memory, as a sentence."""
    with stack() as one:
        take_in(one, single_entries(64), 64)
        before = _rss_bytes(one.pids["batcher"]), one.redis.info("memory")["used_memory"]
        take_in(one, entries, 64 + requests)
        batcher = (_rss_bytes(one.pids["batcher"]) - before[0]) / requests
        redis = (one.redis.info("memory")["used_memory"] - before[1]) / requests
    return (
        f"A waiting request of {len(HEAD + ROW)} bytes, {name}, takes {batcher:,.0f} bytes in the batcher "
        f"and {redis:,.0f} in Redis."
    )


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def models(tiny: bool) -> list[Part]:
    """Registered models, of which one is used."""
    part = Part(
        "Registered models",
        "All but one are idle. CPU is of the batcher, and of its Redis, while nothing is sent; then lone "
        "requests are sent to one model.",
        "registered models",
        "% of a core, or ms",
        (1, 10) if tiny else (1, 10, 50, 200),
    )
    for number in part.sizes:
        figures = many_models.measure(number, 1.0 if tiny else 10.0, 100 if tiny else 500)
        part.add("idle batcher, % of a core", figures.idle.batcher_percent)
        part.add("idle Redis, % of a core", figures.idle.redis_percent)
        part.add("lone request, p50 in ms", figures.p50_ms)
    return [part]


def workers(tiny: bool) -> list[Part]:
    """Workers of a model that sleeps."""
    part = Part(
        "Workers",
        "The model sleeps 50 ms for a batch of up to 16, so a worker can serve 320 requests/s.",
        "workers",
        "requests/s",
        (1, 2) if tiny else (1, 4, 16, 64),
    )
    options = argparse.Namespace(workers=list(part.sizes), seconds=1.0 if tiny else 5.0)
    with EmbeddedRedis() as server, tempfile.NamedTemporaryFile() as log:
        rows, _ = asyncio.run(scale_out.run(options, server.url, log.file))
    for row in rows:
        part.add("requests/s", row.per_s)
        part.add("ideal", row.workers * scale_out.IDEAL_PER_S)
    return [part]


def connections(tiny: bool) -> list[Part]:
    """Producers, each with connections of its own."""
    part = Part(
        "Producers",
        f"{IN_FLIGHT} requests are in flight in all. Each producer is an `AsyncClient` with its own "
        "connections. One client sends many requests in an entry; of 500 each sends single ones, and has "
        "a reply stream of its own.",
        "producers",
        "µs of CPU a request",
        (1, 10) if tiny else (1, 10, 100, 500),
    )
    with stack() as one:
        one.serve()
        for number in part.sizes:
            for name, cpu_us in asyncio.run(serve(one, number, 2_000 if tiny else 40_000)).items():
                part.add(name, cpu_us)
    part.series["total"] = [sum(values) for values in zip(*part.series.values(), strict=True)]
    return [part]


async def serve(one: Stack, producers: int, requests: int) -> dict[str, float]:
    """The CPU time of each process for a request, with this many producers."""
    body = np.zeros(128, np.float32)
    async with contextlib.AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(AsyncClient(one.url)) for _ in range(producers)]
        await until_served(clients[0], body)
        one.pids |= {"model": service_processes.child_of(one.pids["worker"]), "producers": os.getpid()}

        async def load(count: int) -> None:
            each = count // producers
            await asyncio.gather(
                *[many(client, body, IN_FLIGHT // producers, each, {}) for client in clients]
            )

        await load(requests // 4)
        before = one.cpu_us()
        await load(requests)
        return one.since(before, requests // producers * producers)


def lanes(tiny: bool) -> list[Part]:
    """Lanes with a waiting request each, in the core alone."""
    part = Part(
        "Lanes",
        "In each lane one request waits. A turn dispatches one of them, settles it, and takes in another "
        "one, of another lane. Only the scheduler is measured.",
        "lanes",
        "µs of CPU a turn",
        (1, 10, 100) if tiny else (1, 10, 100, 1_000, 10_000),
    )
    kinds = {"eager": core.Kind(), "eager, expiring": core.Kind(expires=True)}
    kinds["deferred, expiring"] = core.Kind("deferred", expires=True)
    for number in part.sizes:
        for name, kind in kinds.items():
            part.add(name, min(core.cost_of_lanes_us(kind, number, 500 if tiny else 2_000) for _ in range(3)))
    return [part]


def entry(tiny: bool) -> list[Part]:
    """Many requests in one entry, for models with small batches."""
    sizes = (256, 512) if tiny else (512, 1_024, 2_048, 4_096)
    forms = {"columns": columns, "packed maps": packed, "entries of their own": single_entries}
    parts = []
    for batch_size in (1, 8, 64):
        part = Part(
            f"Requests in one entry, `max_batch_size` {batch_size}",
            "One entry has all requests, as columns or as packed maps; or each request has an entry of "
            "its own. Time is that from the first entry to the last commit.",
            "requests in the entry",
            "µs a request",
            sizes,
        )
        with stack(batch_size) as one:
            one.serve()
            one.send(single_entries(256))
            until(lambda one=one: one.redis.xlen(KEYS.replies("growth")) > 0)  # type: ignore[misc]
            for name, make in forms.items():
                for size in sizes:
                    measure_entry(part, one, name, make(size), size, sizes[-1] // size)
        parts.append(part)
    return parts


def measure_entry(part: Part, one: Stack, name: str, entries: Any, size: int, times: int) -> None:
    """Send these entries a few times, and wait for the commit of the last batch each time."""

    def is_idle() -> bool:
        return bool(one.redis.xlen(KEYS.requests) == one.redis.xlen(KEYS.batches) == 0)

    until(is_idle)
    before, started_s = one.cpu_us(), time.perf_counter()
    for _ in range(times):
        one.send(entries)
        until(is_idle)
    wall_us = (time.perf_counter() - started_s) * 1e6 / (size * times)
    cpu_us = one.since(before, size * times)
    one.redis.delete(KEYS.replies("growth"))
    part.add(f"{name}: batcher", cpu_us["batcher"])
    part.add(f"{name}: Redis", cpu_us["Redis"])
    part.add(f"{name}: time", wall_us)


PARTS: Final[dict[str, Callable[[bool], list[Part]]]] = {
    "waiting": waiting,
    "entry": entry,
    "lanes": lanes,
    "connections": connections,
    "models": models,
    "workers": workers,
}


# --- the document ------------------------------------------------------------------------------------------


def tables(parts: Sequence[Part]) -> Iterator[str]:
    """The figures in Markdown."""
    for part in parts:
        yield from (f"## {part.title}", "", *_wrapped(part.text), "")
        yield (
            f"| {part.unit}, by {part.axis} | "
            + " | ".join(f"{size:,}" for size in part.sizes)
            + " | last / first |"
        )
        yield "|---|" + "---:|" * (len(part.sizes) + 1)
        for name, values in part.series.items():
            cells = " | ".join(f"{value:,.{_decimals(value)}f}" for value in values)
            ratio = f"{values[-1] / values[0]:.2f}" if values[0] else ""
            yield f"| {name} | {cells} | {ratio} |"
        yield ""
        for note in part.notes:
            yield from _wrapped(f"- {note}")
        if part.notes:
            yield ""


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_on_hyphens=False)


def plot(parts: Sequence[Part], to: Path) -> None:
    """A panel for each part."""
    import matplotlib as mpl  # noqa: PLC0415 (only --write needs it)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "carpool"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = -(-len(parts) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(12, 3.6 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_axis_off()
    for axes, part in zip(grid.flat, parts, strict=False):
        for name, values in part.series.items():
            axes.plot(part.sizes, values, "o-", ms=3, label=name)
        axes.set(xscale="log", xlabel=part.axis, ylabel=part.unit)
        axes.set_title(part.title.replace("`", ""), fontsize=10)
        axes.set_xticks(part.sizes, [f"{size:,}" for size in part.sizes])
        axes.minorticks_off()
        if part.title == "Workers":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(to, metadata={"Date": None})


def document(parts: Sequence[Part]) -> str:
    """The text of growth.md."""
    machine = f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()})"
    written = (
        "Written by `.venv/bin/python ops/bench/growth.py --write`. Redis, batcher, worker and producer "
        f"share {machine}; requests are no-ops on float32[128] unless said otherwise. {EXPLANATION}"
    )
    head = ["# How costs grow", "", *_wrapped(written), "", "![costs over sizes](growth.svg)", ""]
    return "\n".join([*head, *tables(parts)]).rstrip() + "\n"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--tiny", action="store_true", help="only the smallest sizes, to try the command")
    parser.add_argument("--write", action="store_true", help="write docs/growth.md and docs/growth.svg")
    options = parser.parse_args()
    parts: list[Part] = []
    for name in options.parts:
        print(f"measuring {name} ...", file=sys.stderr)
        of_part = PARTS[name](options.tiny)
        print("\n".join(tables(of_part)), flush=True)
        parts += of_part
        if options.write:
            (DOCS / "growth.md").write_text(document(parts))
            plot(parts, DOCS / "growth.svg")


if __name__ == "__main__":
    main()
