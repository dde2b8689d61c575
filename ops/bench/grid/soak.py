"""A steady mixed load for a long time: does anything grow?

    make soak [SOAK_MINUTES=60]

One batcher, a worker for each of two models, one AsyncClient: small tensors, images, requests whose deadline
is too short, and requests that are cancelled. Every few seconds the memory of every process and of Redis's
data is read, and the requests answered since. Written are build/bench/soak.csv and soak.svg. At the end a
line is fitted to each series after the warm-up: memory has grown if the line rises by more than
GROWTH_MIB_MIN and GROWTH_SHARE_MIN of its begin.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError, DeadlineExceededError
from grid import plots, processes
from grid.catalog import carpool_services
from grid.environments import BUILD, HERE
from grid.models import MODELS
from grid.redis_server import RedisServer
from grid.runner import process
from grid.setup import Setup

INTERVAL_S: Final = 5.0
WARM_UP_SHARE: Final = 1 / 3
GROWTH_MIB_MIN: Final = 4.0
GROWTH_SHARE_MIN: Final = 0.05
SAMPLES_MIN: Final = 4
START_S_MAX: Final = 90.0

NOOP_IN_FLIGHT: Final = 32
IMAGES_IN_FLIGHT: Final = 2
SHORT_S: Final = 0.002  # a deadline that many requests miss
CANCEL_AFTER_S: Final = 0.001
PAUSE_S: Final = 0.02  # between such requests


class Sample(NamedTuple):
    """One row of the CSV."""

    seconds: float  # since the start
    per_second: float
    memory_mib: Mapping[str, float]  # by role; "data" is what Redis counts as used


class Load:
    """Endless requests."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.answered = 0

    async def run(self) -> None:
        """Until cancelled."""
        loops = [
            *(self._infer("noop") for _ in range(NOOP_IN_FLIGHT)),
            *(self._infer("image") for _ in range(IMAGES_IN_FLIGHT)),
            self._miss_deadlines(),
            self._cancel(),
        ]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)

    async def _infer(self, model: str) -> None:
        body = MODELS[model].body(0)
        while True:
            await self._client.infer(model, body)
            self.answered += 1

    async def _miss_deadlines(self) -> None:
        body = MODELS["noop"].body(0)
        while True:
            with contextlib.suppress(DeadlineExceededError):
                await self._client.infer("noop", body, timeout=SHORT_S)
            await asyncio.sleep(PAUSE_S)

    async def _cancel(self) -> None:
        body = MODELS["noop"].body(0)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_AFTER_S):
                    await self._client.infer("noop", body)
            await asyncio.sleep(PAUSE_S)


def growth_mib(samples: Sequence[Sample], role: str) -> tuple[float, float]:
    """Of the line fitted to a series after the warm-up: its value at the begin, and how much it rises until
    the end."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    seconds = [sample.seconds for sample in kept]
    slope, intercept = statistics.linear_regression(seconds, [sample.memory_mib[role] for sample in kept])
    return intercept + slope * seconds[0], slope * (seconds[-1] - seconds[0])


def verdict(samples: Sequence[Sample]) -> tuple[list[str], bool]:
    """A line for each series, and whether any has grown."""
    lines, has_grown = [], False
    hours = (samples[-1].seconds - samples[0].seconds) * (1 - WARM_UP_SHARE) / 3600
    for role in samples[0].memory_mib:
        begin_mib, rise_mib = growth_mib(samples, role)
        grew = rise_mib > max(GROWTH_MIB_MIN, GROWTH_SHARE_MIN * begin_mib)
        has_grown = has_grown or grew
        outcome = "GREW" if grew else "steady"
        lines.append(
            f"{role:20} {begin_mib:8.1f} MiB {rise_mib:+7.1f} MiB, {rise_mib / hours:+.1f} an hour: {outcome}"
        )
    return lines, has_grown


async def soak(url: str, redis: RedisServer, pids: Mapping[str, int], minutes: float) -> list[Sample]:
    """Run the load and sample."""
    samples: list[Sample] = []
    async with AsyncClient(url) as client:
        await _until_served(client)
        load = Load(client)
        running = asyncio.create_task(load.run())
        started_s = before_s = time.monotonic()
        answered = 0
        while not running.done() and time.monotonic() < started_s + minutes * 60:
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            per_second = (load.answered - answered) / (now_s - before_s)
            before_s, answered = now_s, load.answered
            samples.append(
                Sample(now_s - started_s, per_second, await asyncio.to_thread(_memory_mib, redis, pids))
            )
            latest = ", ".join(f"{role} {mib:.0f}" for role, mib in samples[-1].memory_mib.items())
            print(f"{samples[-1].seconds:6.0f} s  {per_second:8,.0f}/s  MiB: {latest}", file=sys.stderr)
        if running.done():
            running.result()  # raises
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return samples


def _memory_mib(redis: RedisServer, pids: Mapping[str, int]) -> dict[str, float]:
    roles = processes.by_role(
        pids, {role: {"": f"{role} model"} for role in pids if role.startswith("worker")}
    )
    roles["producer"] = [os.getpid()]  # without its children: they are the services
    used_mib = int(redis.info("memory")["used_memory"]) / (1 << 20)
    return {**processes.memory_mib_by_role(roles), "data": used_mib}


async def _until_served(client: AsyncClient) -> None:
    """Wait for a first answer of each model, and say how long that took, and after which errors."""
    for model in ("noop", "image"):
        started_s, errors = time.monotonic(), Counter[str]()
        while True:
            try:
                await client.infer(model, MODELS[model].body(0))
                break
            except CarpoolError as error:
                if time.monotonic() > started_s + START_S_MAX:
                    raise
                errors[error.status] += 1
                await asyncio.sleep(0.05)
        took_s = time.monotonic() - started_s
        print(f"{model}: first answer after {took_s:.1f} s {dict(errors) or ''}", file=sys.stderr)


@contextlib.contextmanager
def services(redis: RedisServer) -> Iterator[dict[str, int]]:
    """The services' process IDs, by role."""
    commands = {"batcher": carpool_services("noop")["batcher"]}
    for model in ("noop", "image"):
        commands[f"worker {model}"] = carpool_services(model)["worker"]
    setup = Setup("noop", 64, 0.0, redis.url, 0)
    environment = {
        **os.environ,
        **setup.environment(),
        "CARPOOL_REDIS_URL": redis.url,
        "PYTHONPATH": str(HERE.parent),
    }
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((BUILD / "soak.log").open("w"))
        programs = Path(sys.executable).parent
        started = {
            role: stack.enter_context(process(command, programs, environment, log, stdin=subprocess.DEVNULL))
            for role, command in commands.items()
        }
        yield {role: service.pid for role, service in started.items()}


def write(samples: Sequence[Sample]) -> list[Path]:
    """The CSV, and a plot."""
    table, plot = BUILD / "soak.csv", BUILD / "soak.svg"
    roles = list(samples[0].memory_mib)
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["seconds", "requests_per_second", *(f"{role.replace(' ', '_')}_mib" for role in roles)]
        )
        for sample in samples:
            figures = [sample.memory_mib[role] for role in roles]
            rows.writerow([f"{value:.1f}" for value in (sample.seconds, sample.per_second, *figures)])
    series = {role: [(sample.seconds / 60, sample.memory_mib[role]) for sample in samples] for role in roles}
    series["1,000 requests/s"] = [(sample.seconds / 60, sample.per_second / 1000) for sample in samples]
    plot.write_text(plots.lines("minutes", "MiB", series, logarithmic=False))
    return [table, plot]


def main() -> None:
    """Run, write, judge. Exits with 1 if memory has grown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    with RedisServer() as redis, services(redis) as pids:
        samples = asyncio.run(soak(redis.url, redis, {"redis": redis.pid, **pids}, options.minutes))
    if len(samples) < SAMPLES_MIN:
        raise SystemExit(f"too short: {len(samples)} samples, {SAMPLES_MIN} are needed")
    for path in write(samples):
        print(f"written: {path}", file=sys.stderr)
    per_minute = statistics.median(sample.per_second for sample in samples) * 60
    lines, has_grown = verdict(samples)
    print("\n".join([f"{per_minute:,.0f} requests a minute (median)", *lines]))
    print("memory has grown" if has_grown else "memory has not grown")
    sys.exit(has_grown)


if __name__ == "__main__":
    main()
