"""What more workers bring: requests/s with 1, 2, 4, 8 and 16, and how soon one more, or one less, is felt.

    .venv/bin/python ops/bench/scale_out.py [--seconds 5] [--workers 1,2,4,8,16] [--write]

The model sleeps 50 ms for a batch of up to 16, so a worker can do 320 requests/s and takes no CPU: what is
missing to a straight line is what Carpool loses. One Redis, two batchers, one AsyncClient that keeps every
worker's next batch waiting, all on this machine. --write puts the table and the plot into SCALE_OUT.md and
scale_out.svg beside this file.
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

from sleeper import Sleeper

from carpool.client.aio import AsyncClient
from carpool.keys import Keys
from carpool.messages import BatchSettled
from carpool.store.connection import Link
from carpool.wire.batches import decode_settled
from carpool_cli.local.embedded import EmbeddedRedis

HERE: Final = Path(__file__).parent
KEYS: Final = Keys(Sleeper.name)
IDEAL_PER_S: Final = Sleeper.max_batch_size / Sleeper.seconds
BATCHES_WAITING: Final = 3  # for each worker: one executed, one ahead, one that fills up
WARM_UP_S: Final = 1.0
PATIENCE_S: Final = 30.0


class Row(NamedTuple):
    """One number of workers."""

    workers: int
    per_s: float
    mean_batch: float


class Felt(NamedTuple):
    """Seconds from a change to its effect."""

    added: float  # from starting a process to its first committed batch
    removed: float  # from SIGTERM to the process's exit, everything in hand committed
    lost: float  # from SIGTERM to the moment from which the batcher counts on the others only


class Workers:
    """As many worker processes as wanted; each serves one model process."""

    def __init__(self, url: str, log: IO[bytes]) -> None:
        self._environment = {**os.environ, "CARPOOL_REDIS_URL": url, "CARPOOL_LOG_LEVEL": "warning"}
        self._log = log
        self._link = Link(url, name="scale-out")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *argv: str) -> subprocess.Popen[bytes]:
        """Start a service."""
        command = [sys.executable, "-m", module, *argv]
        return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)

    def add(self) -> subprocess.Popen[bytes]:
        """One worker more."""
        process = self.start("carpool_worker", f"{Sleeper.name}={HERE / 'sleeper.py'}:Sleeper")
        self.processes.append(process)
        return process

    def registered(self) -> int:
        """How many model processes have a lease."""
        count: int = self._link.call("ZCARD", KEYS.workers)
        return count

    def settled_by(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether this worker has committed a batch lately."""
        mark = f"-{process.pid}-"
        latest = self._link.call("XREVRANGE", KEYS.settled, "+", "-", "COUNT", 200)
        return any(mark in batch.worker for batch in _settled(latest))

    def settled(self) -> tuple[int, int]:
        """Batches and requests committed so far, of what `settled` still holds."""
        sizes = [one.size for one in _settled(self._link.call("XRANGE", KEYS.settled, "-", "+"))]
        return len(sizes), sum(sizes)

    def stop(self) -> None:
        """End them all."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self._link.close()


def _settled(entries: Sequence[tuple[bytes, list[bytes]]]) -> list[BatchSettled]:
    """The committed batches among these entries of the `settled` stream."""
    settled = [decode_settled(flat) for _, flat in entries]
    return [one for one in settled if isinstance(one, BatchSettled)]


async def until(happens: Callable[[], bool], what: str) -> float:
    """Wait until something happens; how long that took."""
    began_s = time.monotonic()
    while not happens():
        if time.monotonic() > began_s + PATIENCE_S:
            raise SystemExit(f"waited {PATIENCE_S:.0f} s in vain for {what}; see the log")
        await asyncio.sleep(0.005)
    return time.monotonic() - began_s


class Load:
    """Requests without end, so many in flight; `done` counts answers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self.done = 0

    def at_least(self, in_flight: int) -> None:
        """From now on at least so many are in flight."""
        while len(self._tasks) < in_flight:
            self._tasks.append(asyncio.create_task(self._ask()))

    async def _ask(self) -> None:
        while True:
            await self._client.infer(Sleeper.name, 1)
            self.done += 1

    async def stop(self) -> None:
        """Let go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def load_on(url: str) -> AsyncIterator[Load]:
    """A producer that never tires."""
    async with AsyncClient(url) as client:
        load = Load(client)
        try:
            yield load
        finally:
            await load.stop()


async def measure(workers: Workers, load: Load, counts: Sequence[int], seconds: float) -> AsyncIterator[Row]:
    """Requests/s at each number of workers, which only grows."""
    for count in counts:
        while len(workers.processes) < count:
            workers.add()
        await until(lambda count=count: workers.registered() == count, f"{count} workers")  # type: ignore[misc]
        load.at_least(count * BATCHES_WAITING * Sleeper.max_batch_size)
        await asyncio.sleep(WARM_UP_S)
        done, began_s = load.done, time.perf_counter()
        batches, requests = workers.settled()
        await asyncio.sleep(seconds)
        per_s = (load.done - done) / (time.perf_counter() - began_s)
        more_batches, more_requests = workers.settled()
        mean = (more_requests - requests) / max(1, more_batches - batches)
        yield Row(count, per_s, mean)


async def feel(workers: Workers) -> Felt:
    """How soon a worker that is started, and one that is told to leave, makes a difference under load."""
    before = workers.registered()
    process = workers.add()
    added = await until(lambda: workers.settled_by(process), "a batch from the new worker")
    process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    lost = await until(lambda: workers.registered() == before, "the lease of the worker that left")
    await until(lambda: process.poll() is not None, "the end of the worker that left")
    if process.returncode != 0:
        raise SystemExit(f"the worker that left ended with {process.returncode}")
    workers.processes.remove(process)
    return Felt(added, time.monotonic() - began_s, lost)


def table(rows: Sequence[Row], felt: Felt) -> Iterator[str]:
    """The figures, in Markdown."""
    one = rows[0].per_s / rows[0].workers
    yield "| workers | requests/s | of linear | of the ideal | mean batch |"
    yield "|---:|---:|---:|---:|---:|"
    for row in rows:
        linear, ideal = row.per_s / (one * row.workers), row.per_s / (IDEAL_PER_S * row.workers)
        yield f"| {row.workers} | {row.per_s:,.0f} | {linear:.1%} | {ideal:.1%} | {row.mean_batch:.1f} |"
    yield ""
    yield f"A worker that is added commits its first batch {felt.added:.2f} s after its process was started."
    yield f"One that is told to leave (SIGTERM) counts no more after {felt.lost:.2f} s, and has ended after"
    yield f"{felt.removed:.2f} s with all that it had in hand committed."


def plot(rows: Sequence[Row], to: Path) -> None:
    """Requests/s over workers, beside the straight line."""
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
        label="16 requests in 50 ms, each",
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
    """The page that --write writes."""
    return "\n".join(
        (
            "# Scaling out",
            "",
            "Written by `.venv/bin/python ops/bench/scale_out.py --write`. The model sleeps 50 ms for a",
            "batch of up to 16. One Redis, two batchers, the producer and the workers, each a process, share",
            f"{os.cpu_count()} cores of one machine ({platform.machine()}, Python",
            f"{platform.python_version()}); {seconds:g} s at each number of workers.",
            "",
            "![requests/s over workers](scale_out.svg)",
            "",
            *lines,
            "",
        )
    )


async def run(options: argparse.Namespace, url: str, log: IO[bytes]) -> tuple[list[Row], Felt]:
    """All of it."""
    workers = Workers(url, log)
    batchers = [workers.start("carpool_batcher") for _ in range(2)]
    try:
        async with load_on(url) as load:
            rows = []
            workers.add()
            await until(lambda: workers.registered() == 1, "a worker")
            async for row in measure(workers, load, options.workers, options.seconds):
                print(f"{row.workers:3} workers: {row.per_s:8,.0f} requests/s", file=sys.stderr)
                rows.append(row)
            felt = await feel(workers)
    finally:
        for batcher in batchers:
            batcher.terminate()
        workers.stop()
        for batcher in batchers:
            batcher.wait()
    return rows, felt


def main() -> None:
    """Start the stack, measure, stop it, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of workers")
    parser.add_argument(
        "--workers",
        type=lambda text: sorted(int(one) for one in text.split(",")),
        default=[1, 2, 4, 8, 16],
        help="how many, as in 1,2,4",
    )
    parser.add_argument("--write", action="store_true", help="write SCALE_OUT.md and scale_out.svg")
    options = parser.parse_args()
    with EmbeddedRedis() as server, tempfile.NamedTemporaryFile(prefix="scale-out-", suffix=".log") as log:
        rows, felt = asyncio.run(run(options, server.url, log.file))
    lines = list(table(rows, felt))
    print("\n".join(lines))
    if options.write:
        (HERE / "SCALE_OUT.md").write_text(document(lines, options.seconds))
        plot(rows, HERE / "scale_out.svg")


if __name__ == "__main__":
    main()
