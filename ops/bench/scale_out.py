"""Scaling with workers: requests/s with 1, 2, 4, 8 and 16, and how soon an added or removed worker matters.

    .venv/bin/python ops/bench/scale_out.py [--seconds 5] [--workers 1,2,4,8,16] [--write]

The model sleeps 50 ms for a batch of up to 16, so a worker can serve 320 requests/s and uses no CPU: the
difference to a straight line is the loss in Carpool. One Redis, two batchers, and one AsyncClient that always
has the next batch of each worker waiting, all on one machine. --write puts the table and the plot into
SCALE_OUT.md and scale_out.svg beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import service_processes
from sleeper import Sleeper

from carpool.client.aio import AsyncClient
from carpool.keys import Keys
from carpool.messages.settled import BatchSettled
from carpool.store.connection import Link
from carpool.wire.batches import decode_settled
from carpool_cli.local.embedded import EmbeddedRedis

HERE: Final = Path(__file__).parent
KEYS: Final = Keys(Sleeper.name)
IDEAL_PER_S: Final = Sleeper.max_batch_size / Sleeper.seconds
BATCHES_PER_WORKER: Final = 3  # of requests in flight: one executes, one is dispatched ahead, one fills
WARM_UP_S: Final = 1.0
WAIT_S_MAX: Final = 180.0  # many workers start slowly on few cores


class Row(NamedTuple):
    """The figures for one number of workers."""

    workers: int
    per_s: float
    mean_batch: float


class Reaction(NamedTuple):
    """Seconds from a change in the number of workers to its effect."""

    first_commit_s: float  # from the start of a worker to its first committed batch
    exit_s: float  # from SIGTERM to the exit of the worker, which has then committed all its executions
    unregistered_s: float  # from SIGTERM until the batcher no longer counts on the worker


class Workers:
    """A growing number of worker processes, each with one model process."""

    def __init__(self, url: str, log: IO[bytes]) -> None:
        self._url, self._log = url, log
        self._link = Link(url, name="scale-out")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *argv: str) -> subprocess.Popen[bytes]:
        """Start a service."""
        return service_processes.start(self._url, self._log, module, *argv, CARPOOL_LOG_LEVEL="warning")

    def add(self) -> subprocess.Popen[bytes]:
        """Start one more worker."""
        process = self.start("carpool_worker", f"{Sleeper.name}={HERE / 'sleeper.py'}:Sleeper")
        self.processes.append(process)
        return process

    def registered(self) -> int:
        """The number of model processes that have a lease."""
        count: int = self._link.call("ZCARD", KEYS.workers)
        return count

    def settled_by(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether this worker committed one of the latest batches."""
        mark = f"-{process.pid}-"
        latest = self._link.call("XREVRANGE", KEYS.settled, "+", "-", "COUNT", 200)
        return any(mark in batch.worker for batch in _settled(latest))

    def settled(self) -> tuple[int, int]:
        """The number of batches and of requests in the stream `settled`."""
        sizes = [batch.size for batch in _settled(self._link.call("XRANGE", KEYS.settled, "-", "+"))]
        return len(sizes), sum(sizes)

    def stop(self) -> None:
        """Stop all workers."""
        service_processes.stop(self.processes)
        self._link.close()


def _settled(entries: Sequence[tuple[bytes, list[bytes]]]) -> list[BatchSettled]:
    """The committed batches among these entries of the stream `settled`."""
    settled = [decode_settled(flat) for _, flat in entries]
    return [message for message in settled if isinstance(message, BatchSettled)]


async def wait_for(condition: Callable[[], bool], description: str) -> float:
    """Wait until a condition holds, and return the seconds that took."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() > started_s + WAIT_S_MAX:
            raise SystemExit(f"timed out after {WAIT_S_MAX:.0f} s while waiting for {description}")
        await asyncio.sleep(0.005)
    return time.monotonic() - started_s


class Load:
    """An endless load with a fixed number of requests in flight. `done` counts results."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self.done = 0

    def at_least(self, in_flight: int) -> None:
        """Keep at least this number of requests in flight from now on."""
        while len(self._tasks) < in_flight:
            self._tasks.append(asyncio.create_task(self._request_repeatedly()))

    async def _request_repeatedly(self) -> None:
        while True:
            await self._client.infer(Sleeper.name, 1)
            self.done += 1

    async def stop(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def load_on(url: str) -> AsyncIterator[Load]:
    """A load on the Redis at `url`, stopped at the end of the block."""
    async with AsyncClient(url) as client:
        load = Load(client)
        try:
            yield load
        finally:
            await load.stop()


async def measure(workers: Workers, load: Load, counts: Sequence[int], seconds: float) -> AsyncIterator[Row]:
    """Measure requests/s at each number of workers; `counts` is ascending."""
    for count in counts:
        while len(workers.processes) < count:
            workers.add()
        await wait_for(lambda count=count: workers.registered() == count, f"{count} workers")  # type: ignore[misc]
        load.at_least(count * BATCHES_PER_WORKER * Sleeper.max_batch_size)
        await asyncio.sleep(WARM_UP_S)
        done, started_s = load.done, time.perf_counter()
        batches, requests = workers.settled()
        await asyncio.sleep(seconds)
        per_s = (load.done - done) / (time.perf_counter() - started_s)
        more_batches, more_requests = workers.settled()
        mean = (more_requests - requests) / max(1, more_batches - batches)
        yield Row(count, per_s, mean)


async def measure_reaction(workers: Workers) -> Reaction:
    """Add a worker under load and remove it again; how soon each takes effect."""
    before = workers.registered()
    process = workers.add()
    first_commit_s = await wait_for(lambda: workers.settled_by(process), "a batch from the new worker")
    process.send_signal(signal.SIGTERM)
    started_s = time.monotonic()
    unregistered_s = await wait_for(lambda: workers.registered() == before, "the lease of a stopped worker")
    await wait_for(lambda: process.poll() is not None, "the exit of a stopped worker")
    if process.returncode != 0:
        raise SystemExit(f"the stopped worker exited with {process.returncode}")
    workers.processes.remove(process)
    return Reaction(first_commit_s, time.monotonic() - started_s, unregistered_s)


def table(rows: Sequence[Row], reaction: Reaction) -> Iterator[str]:
    """The figures in Markdown."""
    per_worker = rows[0].per_s / rows[0].workers
    yield "| workers | requests/s | of linear | of the ideal | mean batch |"
    yield "|---:|---:|---:|---:|---:|"
    for row in rows:
        linear, ideal = row.per_s / (per_worker * row.workers), row.per_s / (IDEAL_PER_S * row.workers)
        yield f"| {row.workers} | {row.per_s:,.0f} | {linear:.1%} | {ideal:.1%} | {row.mean_batch:.1f} |"
    yield ""
    first_commit_s, exit_s, unregistered_s = reaction
    yield f"An added worker commits its first batch {first_commit_s:.2f} s after the start of its process."
    yield f"A stopped worker (SIGTERM) gets no further batches after {unregistered_s:.2f} s, and has exited"
    yield f"after {exit_s:.2f} s, with all its executions committed."


def plot(rows: Sequence[Row], to: Path) -> None:
    """Plot requests/s over workers, and the ideal line."""
    import matplotlib as mpl  # noqa: PLC0415 (only --write needs it)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "carpool"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    counts = [row.workers for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(
        counts,
        [count * IDEAL_PER_S for count in counts],
        ":",
        color="0.6",
        label="ideal: 16 requests in 50 ms per worker",
    )
    axes.plot(counts, [row.per_s for row in rows], "o-", color="tab:blue", label="measured")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="requests/s")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yticks([row.per_s for row in rows], [f"{row.per_s:,.0f}" for row in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(to, metadata={"Date": None})


def document(lines: Sequence[str], seconds: float) -> str:
    """The text of SCALE_OUT.md."""
    python = f"Python {platform.python_version()}"
    return "\n".join(
        (
            "# Scaling out",
            "",
            "Written by `.venv/bin/python ops/bench/scale_out.py --write`. The model sleeps 50 ms for a",
            "batch of up to 16. Redis, two batchers, the producer and the workers, each a process, share",
            f"{os.cpu_count()} cores of one machine ({platform.machine()}, {python}).",
            f"Each number of workers was measured for {seconds:g} s.",
            "",
            "![requests/s over workers](scale_out.svg)",
            "",
            *lines,
            "",
        )
    )


async def run(options: argparse.Namespace, url: str, log: IO[bytes]) -> tuple[list[Row], Reaction]:
    """Start the services, measure, and stop them."""
    workers = Workers(url, log)
    batchers = [workers.start("carpool_batcher") for _ in range(2)]
    try:
        async with load_on(url) as load:
            rows = []
            workers.add()
            await wait_for(lambda: workers.registered() == 1, "a worker")
            async for row in measure(workers, load, options.workers, options.seconds):
                print(f"{row.workers:3} workers: {row.per_s:8,.0f} requests/s", file=sys.stderr)
                rows.append(row)
            reaction = await measure_reaction(workers)
    finally:
        for batcher in batchers:
            batcher.terminate()
        workers.stop()
        for batcher in batchers:
            batcher.wait()
    return rows, reaction


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of the measurement at each number of workers"
    )
    parser.add_argument(
        "--workers",
        type=lambda text: sorted(int(number) for number in text.split(",")),
        default=[1, 2, 4, 8, 16],
        help="numbers of workers, as in 1,2,4",
    )
    parser.add_argument("--write", action="store_true", help="write SCALE_OUT.md and scale_out.svg")
    options = parser.parse_args()
    with EmbeddedRedis() as server, tempfile.NamedTemporaryFile(prefix="scale-out-", suffix=".log") as log:
        rows, reaction = asyncio.run(run(options, server.url, log.file))
    lines = list(table(rows, reaction))
    print("\n".join(lines))
    if options.write:
        (HERE / "SCALE_OUT.md").write_text(document(lines, options.seconds))
        plot(rows, HERE / "scale_out.svg")


if __name__ == "__main__":
    main()
