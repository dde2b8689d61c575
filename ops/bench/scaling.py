"""Fleets of workers that are started and stopped: in virtual time, and with real workers on this machine.

    .venv/bin/python ops/bench/scaling.py --simulated [--write]
    .venv/bin/python ops/bench/scaling.py --real [--write]

--real starts Redis, a batcher and a gateway, and sends requests with deadlines of 3 s to a model that sleeps,
at rates that change. A loop stands for the autoscaler: every 2 s it asks the gateway how many workers are
wanted, or reads the length of the request stream, or asks nobody, and starts and stops worker processes, five
at most. Each way has a stack of its own. --write puts the tables into docs/scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import service_processes
from scaled import Scaled
from sections import table, write_section

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError, NotFoundError
from carpool.keys import Keys
from carpool.store.connection import Link
from carpool_cli.local.embedded import EmbeddedRedis, free_port

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "scaling.md"
MODEL: Final = f"{Scaled.name}={Path(__file__).with_name('scaled.py')}:Scaled"
KEYS: Final = Keys(Scaled.name)
POLL_S: Final = 2.0
DEADLINE_S: Final = 3.0
PHASES: Final = ((4, 30), (20, 60), (40, 60), (10, 60), (2, 50))  # requests/s, and for how many seconds
SHORT_PHASES: Final = ((4, 10), (20, 20), (2, 15))
READY_S: Final = 60.0

Wanted = Callable[[], int]


class Way(NamedTuple):
    """How the number of workers is found. `fixed`: always this number."""

    name: str
    fixed: int | None = None


WAYS: Final = (Way("wanted"), Way("depth 5"), Way("fixed 3", 3), Way("fixed 5", 5))


# --- in virtual time ---------------------------------------------------------------------------------------


LOAD: Final = (
    "--rate",
    "40",
    "--intercept-ms",
    "100",
    "--slope-ms",
    "50",
    "max_batch_size=16",
    "max_workers=30",
)
SIMULATED: Final = {
    "An hour like a day, 8 to 72 requests/s, deadlines of 1 s": (
        *LOAD,
        *("--arrivals", "diurnal", "--period-s", "3600", "--requests", "144000", "--expiration-ms", "1000"),
    ),
    "Half an hour like a day, without deadlines; `scale_wait_ms` is 1 s": (
        *LOAD,
        *("--arrivals", "diurnal", "--period-s", "1800", "--requests", "72000"),
    ),
    "Phases of about 5 minutes with 13 or 67 requests/s, deadlines of 1 s": (
        *LOAD,
        *("--arrivals", "bursty", "--period-s", "300", "--requests", "72000", "--expiration-ms", "1000"),
    ),
    "The same with `scale_down_ms` 10 minutes": (
        *LOAD,
        *("--arrivals", "bursty", "--period-s", "300", "--requests", "72000", "--expiration-ms", "1000"),
        "scale_down_ms=10min",
    ),
    "A model that gains by batches, 400 + 5 n ms, n up to 256; 24 to 216 requests/s, deadlines of 2 s": (
        *("--arrivals", "diurnal", "--period-s", "1200", "--rate", "120", "--requests", "144000"),
        *("--expiration-ms", "2000", "--intercept-ms", "400", "--slope-ms", "5"),
        *("max_batch_size=256", "max_workers=30"),
    ),
}


def simulated() -> str:
    """The tables of all loads."""
    parts = []
    for title, arguments in SIMULATED.items():
        command = [sys.executable, "-m", "carpool_cli", "simulate", "--scale", *arguments, "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        fleets = json.loads(done.stdout)["fleets"]
        print(title, *fleets, sep="\n", flush=True)
        parts.append(f"{title}:\n\n{fleet_table(fleets)}")
    return "\n\n".join(parts)


def fleet_table(fleets: Sequence[dict[str, Any]]) -> str:
    """As `carpool simulate --scale` prints it."""
    heading = ("workers", "mean", "most", "worker-hours", "missed", "p50", "p99", "changes up", "down")
    rows = [
        (
            fleet["fleet"],
            f"{fleet['workers_mean']:.1f}",
            str(fleet["workers_max"]),
            f"{fleet['worker_s'] / 3600:.1f}",
            f"{fleet['missed']:.2%}",
            f"{fleet['p50_ms'] / 1000:,.2f} s",
            f"{fleet['p99_ms'] / 1000:,.2f} s",
            str(fleet["ups"]),
            str(fleet["downs"]),
        )
        for fleet in fleets
    ]
    return table(heading, rows)


# --- real workers ------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of the requests of one way, and what it cost."""

    sent: int
    missed: int
    missed_early: int  # of those that were sent within RISE_S after the rate rose
    latencies_s: list[float]
    worker_s: float
    workers_max: int
    ups: int
    downs: int
    numbers: list[int]  # of workers at the end of each phase


RISE_S: Final = 15.0  # after a rise of the rate, in which workers start


class Workers:
    """The worker processes of a stack, which a loop starts and stops."""

    def __init__(self, url: str, log: IO[bytes]) -> None:
        self._url, self._log = url, log
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        self._stopped: list[tuple[subprocess.Popen[bytes], float]] = []
        self.seconds = 0.0
        self.most = self.ups = self.downs = 0

    def __len__(self) -> int:
        return len(self._running)

    def set(self, number: int) -> None:
        """Have so many from now on."""
        self.ups += number > len(self._running)
        self.downs += number < len(self._running)
        while len(self._running) < number:
            process = service_processes.start(
                self._url, self._log, "carpool_worker", MODEL, CARPOOL_LOG_LEVEL="warning"
            )
            self._running.append((process, time.monotonic()))
        while len(self._running) > number:
            process, started_s = self._running.pop()
            process.terminate()
            self._stopped.append((process, started_s))
        self.most = max(self.most, number)
        self.reap()

    def reap(self) -> None:
        """Count the time of those that have ended."""
        ended = [one for one in self._stopped if one[0].poll() is not None]
        self._stopped = [one for one in self._stopped if one not in ended]
        self.seconds += sum(time.monotonic() - started_s for _, started_s in ended)

    def stop(self) -> None:
        """Stop all, and wait for them."""
        now_s = time.monotonic()
        self.seconds += sum(now_s - started_s for _, started_s in [*self._running, *self._stopped])
        service_processes.stop([process for process, _ in [*self._running, *self._stopped]])
        self._running, self._stopped = [], []


def asked(url: str) -> int:
    """How many workers are wanted, of a gateway."""
    with urllib.request.urlopen(f"{url}/carpool/v1/scale/{Scaled.name}", timeout=3) as answer:  # noqa: S310
        return int(json.load(answer)["wanted"])


async def scale(workers: Workers, wanted: Wanted, ended: asyncio.Event) -> None:
    """Have as many workers as are wanted, until it ends."""
    while not ended.is_set():
        try:
            number = await asyncio.to_thread(wanted)
        except OSError:  # as an autoscaler: after an error it changes nothing
            number = len(workers)
        workers.set(min(max(number, 1), Scaled.max_workers))
        try:
            await asyncio.wait_for(ended.wait(), POLL_S)
        except TimeoutError:
            continue


class Sender:
    """Sends requests at rates that change, and waits for all results."""

    def __init__(self, client: AsyncClient, workers: Workers, seed: int = 1) -> None:
        self._client, self._workers = client, workers
        self._random = random.Random(seed)  # noqa: S311 (arrivals)
        self.latencies_s: list[float] = []
        self.missed_s: list[float] = []  # how long after the latest rise of the rate they were sent
        self.numbers: list[int] = []

    async def send(self, phases: Sequence[tuple[int, int]]) -> int:
        """Returns how many requests were sent."""
        tasks: list[asyncio.Task[None]] = []
        at_s = risen_s = time.monotonic()
        per_s_before = 0
        for per_s, seconds in phases:
            end_s = at_s + seconds
            risen_s = at_s if per_s > per_s_before else -math.inf
            per_s_before = per_s
            while (at_s := at_s + self._random.expovariate(per_s)) < end_s:
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                tasks.append(asyncio.ensure_future(self._request(at_s - risen_s)))
            at_s = end_s
            self.numbers.append(len(self._workers))
        await asyncio.gather(*tasks)
        return len(tasks)

    async def _request(self, since_rise_s: float) -> None:
        began_s = time.monotonic()
        try:
            await self._client.infer(Scaled.name, 1, timeout=DEADLINE_S)
        except CarpoolError:
            self.missed_s.append(since_rise_s)
        else:
            self.latencies_s.append(time.monotonic() - began_s)


async def first_result(client: AsyncClient) -> None:
    """Wait until a worker serves the model."""
    end_s = time.monotonic() + READY_S
    while True:
        try:
            await client.infer(Scaled.name, 1, timeout=READY_S)
            return
        except NotFoundError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.1)


async def measure(way: Way, phases: Sequence[tuple[int, int]], log: IO[bytes]) -> Outcome:
    """Run one way, with a stack of its own."""
    with EmbeddedRedis() as redis:
        port = free_port()
        services = [
            service_processes.start(redis.url, log, "carpool_batcher", CARPOOL_LOG_LEVEL="warning"),
            service_processes.start(redis.url, log, "carpool_gateway", "--port", str(port)),
        ]
        workers = Workers(redis.url, log)
        link = Link(redis.url, name="scaling")

        def depth() -> int:
            return math.ceil(int(link.call("XLEN", KEYS.requests)) / 5)

        ways: dict[str, Wanted] = {
            "wanted": lambda: asked(f"http://127.0.0.1:{port}"),
            "depth 5": Down(depth, Scaled.scale_down_ms / 1000),
        }
        wanted = ways.get(way.name, lambda: way.fixed or 1)
        ended = asyncio.Event()
        try:
            workers.set(way.fixed or 1)
            async with AsyncClient(redis.url) as client:
                await first_result(client)
                sender = Sender(client, workers)
                scaling = asyncio.ensure_future(scale(workers, wanted, ended))
                workers.ups = workers.downs = 0
                sent = await sender.send(phases)
                ended.set()
                await scaling
        finally:
            workers.stop()
            service_processes.stop(services)
            link.close()
    early = sum(since_s <= RISE_S for since_s in sender.missed_s)
    return Outcome(
        sent,
        len(sender.missed_s),
        early,
        sorted(sender.latencies_s),
        workers.seconds,
        workers.most,
        workers.ups,
        workers.downs,
        sender.numbers,
    )


class Down:
    """The largest number of the last `seconds`, as the HPA's stabilisation window makes it."""

    def __init__(self, wanted: Wanted, seconds: float) -> None:
        self._wanted, self._seconds = wanted, seconds
        self._lately: list[tuple[float, int]] = []

    def __call__(self) -> int:
        now_s = time.monotonic()
        self._lately = [one for one in self._lately if one[0] > now_s - self._seconds]
        self._lately.append((now_s, self._wanted()))
        return max(number for _, number in self._lately)


def real(phases: Sequence[tuple[int, int]]) -> str:
    """The table of all ways."""
    load_before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryFile() as log:
        for way in WAYS:
            found = asyncio.run(measure(way, phases, log))
            print(way.name, found._replace(latencies_s=[]), flush=True)
            rows.append(
                (
                    way.name,
                    ", ".join(map(str, found.numbers)),
                    f"{found.worker_s:,.0f}",
                    f"{found.missed / found.sent:.2%}",
                    f"{(found.missed - found.missed_early) / found.sent:.2%}",
                    f"{1000 * found.latencies_s[len(found.latencies_s) // 2]:,.0f} ms",
                    f"{1000 * found.latencies_s[int(0.99 * len(found.latencies_s))]:,.0f} ms",
                    str(found.ups),
                    str(found.downs),
                )
            )
    rates = ", ".join(f"{per_s} for {seconds} s" for per_s, seconds in phases)
    heading = (
        *("workers", "in each phase", "worker-seconds", "missed", "of them later (1)"),
        *("p50", "p99", "changes up", "down"),
    )
    text = (
        f"Requests/s: {rates}.\nLoad of the machine before: {load_before:.1f}, with {os.cpu_count()} cores."
    )
    note = f"1. More than {RISE_S:.0f} s after a rise of the rate, in which workers start."
    return f"{text}\n\n{table(heading, rows)}\n\n{note}"


# --- the command -------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--short", action="store_true", help="--real for 45 s each")
    parser.add_argument("--write", action="store_true", help="into docs/scaling.md")
    options = parser.parse_args()
    texts = {}
    if options.simulated:
        texts["### Fleets"] = simulated()
    if options.real:
        texts["### Measured"] = real(SHORT_PHASES if options.short else PHASES)
    for heading, text in texts.items():
        print(text)
        if options.write:
            write_section(DOCUMENT, heading, text)


if __name__ == "__main__":
    main()
