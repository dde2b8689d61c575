"""Sequences: 1,000 at once while workers are killed, and what a state costs.

    .venv/bin/python ops/bench/sequences.py [--sequences 1000] [--requests 30] [--seconds 5] [--rounds 3]
                                            [--write]

First, 1,000 interleaved sequences are served by four workers, of which two are killed (SIGKILL): every answer
must be the one that a single stream gives. Each sequence sends its next request when it has the answer to
the last one. Then the CPU time of a request in each process, of a model that keeps 128 B, 1 KiB or 64 KiB
for each sequence, and of the same one that keeps nothing: 256 sequences, in turns, the median of the rounds.
All on one machine. --write puts the figures into SEQUENCES.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import host
import numpy as np
import service_processes
from mixing import WORDS, Small, answers_of
from scale_out import wait_for

from carpool.client.aio import AsyncClient
from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.wire.tensors import Array
from carpool_cli.local.embedded import EmbeddedRedis

HERE: Final = Path(__file__).parent
LEASE_MS: Final = 2000
WORKERS, KILLED = 4, 2
IN_FLIGHT: Final = 256
WARM_UP_S: Final = 1.0
MODELS: Final = {"no state": "Stateless", "128 B": "Tiny", "1 KiB": "Small", "64 KiB": "Large"}


class Killed(NamedTuple):
    """What became of the sequences whose workers were killed."""

    requests: int
    equal: int  # to a single stream's
    seconds: float
    longest_s: float  # that a request waited for its answer
    reclaimed: int  # batches that were in a killed worker's hands


class Round(NamedTuple):
    """Requests/s of a model, CPU time for each request by process, and the share that the host withheld."""

    per_s: float
    cpu_us: Mapping[str, float]
    stolen: float


class Services:
    """Redis, a batcher, and workers."""

    def __init__(self, server: EmbeddedRedis, log: IO[bytes]) -> None:
        self._server, self._log = server, log
        self._link = Link(server.url, name="bench")
        self.batcher = service_processes.start(server.url, log, "carpool_batcher", CARPOOL_LOG_LEVEL="info")
        self.workers: list[subprocess.Popen[bytes]] = []

    def add_worker(self, model: str) -> int:
        """Start a worker; return its process ID."""
        location = f"{model}={HERE / 'mixing.py'}:{model}"
        process = service_processes.start(
            self._server.url, self._log, "carpool_worker", location, "--lease-ms", str(LEASE_MS),
            CARPOOL_LOG_LEVEL="info",
        )  # fmt: skip
        self.workers.append(process)
        return process.pid

    async def ready(self, model: str, count: int) -> None:
        """Wait until this many model processes of a model have a lease."""
        await wait_for(lambda: self._link.call("ZCARD", Keys(model).workers) == count, f"{count} workers")

    def stop(self) -> None:
        """Stop all services."""
        service_processes.stop([*self.workers, self.batcher])
        self._link.close()


# --- workers are killed ------------------------------------------------------------------------------------


async def serve_while_killed(services: Services, url: str, sequences: int, requests: int) -> Killed:
    """Serve all sequences, and kill a worker when a third, and when two thirds are answered."""
    model = Small.__name__
    for _ in range(WORKERS):
        services.add_worker(model)
    await services.ready(model, WORKERS)
    inputs = np.random.default_rng(0).integers(0, 1 << 63, (sequences, requests, WORDS), np.uint64)
    answers = np.zeros_like(inputs)
    answered, longest_s = 0, 0.0
    kill_at = {sequences * requests * part // (KILLED + 1) for part in range(1, KILLED + 1)}
    victims = iter(services.workers[:KILLED])

    async with AsyncClient(url, timeout=120) as client:

        async def serve_one(number: int) -> None:
            nonlocal answered, longest_s
            async with client.sequence(model) as sequence:
                for at in range(requests):
                    sent_s = time.perf_counter()
                    answers[number, at] = await sequence.infer(inputs[number, at], end=at == requests - 1)
                    longest_s = max(longest_s, time.perf_counter() - sent_s)
                    answered += 1
                    if answered in kill_at:
                        next(victims).kill()

        started_s = time.perf_counter()
        await asyncio.gather(*map(serve_one, range(sequences)))
        seconds = time.perf_counter() - started_s
    equal = sum(
        int((answers[number] == answers_of(inputs[number])).all(axis=1).sum()) for number in range(sequences)
    )
    return Killed(sequences * requests, equal, seconds, longest_s, 0)


# --- costs -------------------------------------------------------------------------------------------------


async def measure_costs(
    services: Services, server: EmbeddedRedis, seconds: float, rounds: int
) -> dict[str, list[Round]]:
    """Rounds of all models, in turns."""
    pids: dict[str, dict[str, int]] = {}
    for name, model in MODELS.items():
        worker = services.add_worker(model)
        await services.ready(model, 1)
        pids[name] = {
            "producer": os.getpid(), "batcher": services.batcher.pid, "worker": worker,
            "model": service_processes.child_of(worker), "Redis": server.pid,
        }  # fmt: skip
    results: dict[str, list[Round]] = {name: [] for name in MODELS}
    async with AsyncClient(server.url, timeout=120) as client:
        for name in MODELS:
            await serve_for(client, name, WARM_UP_S)
        for number in range(rounds):
            for name in list(MODELS)[:: 1 if number % 2 == 0 else -1]:
                time_of_host = host.CpuTime()
                meter = service_processes.CpuMeter(pids[name])
                count, passed_s = await serve_for(client, name, seconds)
                cpu_us = {process: us / count for process, us in meter.stop().items()}
                results[name].append(Round(count / passed_s, cpu_us, time_of_host.shares().stolen))
                print(f"{name}: {count / passed_s:,.0f} requests/s", file=sys.stderr)
    return results


async def serve_for(client: AsyncClient, name: str, seconds: float) -> tuple[int, float]:
    """Send requests of this model, each of IN_FLIGHT sequences one after another. Returns their number."""
    model, end_s = MODELS[name], time.perf_counter() + seconds
    body: Array = np.random.default_rng(0).integers(0, 1 << 63, WORDS, np.uint64)
    count = 0

    async def without_state() -> None:
        nonlocal count
        while time.perf_counter() < end_s:
            await client.infer(model, body)
            count += 1

    async def one_sequence() -> None:
        nonlocal count
        async with client.sequence(model) as sequence:
            while time.perf_counter() < end_s:
                await sequence.infer(body)
                count += 1
            await sequence.infer(body, end=True)
            count += 1

    started_s = time.perf_counter()
    one = without_state if model == "Stateless" else one_sequence
    await asyncio.gather(*[one() for _ in range(IN_FLIGHT)])
    return count, time.perf_counter() - started_s


# --- figures -----------------------------------------------------------------------------------------------


def sentences_of_killed(killed: Killed, sequences: int) -> str:
    """The figures for people."""
    each, per_s = killed.requests // sequences, killed.requests / killed.seconds
    return (
        f"{sequences:,} sequences of {each} requests over {WORKERS} workers, of which {KILLED} were "
        f"killed, with {killed.reclaimed} batches in their hands: {killed.equal:,} of "
        f"{killed.requests:,} answers are equal to a single stream's. It took {killed.seconds:.1f} s, or "
        f"{per_s:,.0f} requests/s. The longest wait for an answer was {killed.longest_s:.1f} s: the lease of "
        f"a worker is {LEASE_MS / 1000:g} s here."
    )


def lines_of_costs(results: Mapping[str, Sequence[Round]]) -> Iterator[str]:
    """The table in Markdown."""
    processes = list(results["no state"][0].cpu_us)
    yield "| state | requests/s | " + " | ".join(f"{name} µs" for name in processes) + " | all µs | ratio |"
    yield "|---|" + "---:|" * (len(processes) + 3)
    base_us = 0.0
    for name, rounds in results.items():
        cpu_us = [statistics.median(one.cpu_us[process] for one in rounds) for process in processes]
        total_us = statistics.median(sum(one.cpu_us.values()) for one in rounds)
        base_us = base_us or total_us
        per_s = statistics.median(one.per_s for one in rounds)
        cells = [f"{per_s:,.0f}", *(f"{us:.1f}" for us in cpu_us), f"{total_us:.1f}"]
        yield f"| {name} | " + " | ".join(cells) + f" | {total_us / base_us:.2f} |"


def document(killed: str, costs: Sequence[str], stolen: float, seconds: float, rounds: int) -> str:
    """The text of SEQUENCES.md."""
    machine = (
        "Written by `.venv/bin/python ops/bench/sequences.py --write`. Redis, a batcher, the workers and the "
        f"producer share {os.cpu_count()} cores of one machine ({platform.machine()}, Python "
        f"{platform.python_version()}) with other work (load {os.getloadavg()[2]:.0f}), of which the host "
        f"withheld up to {stolen:.0%} during a round."
    )
    how = (
        "CPU time for each request, by process, of a model that keeps a state for each sequence, and of the "
        f"same one that keeps nothing. {IN_FLIGHT} sequences, each with one request at a time; batches of "
        f"up to {Small.max_batch_size}; the median of {rounds} rounds of {seconds:g} s, in turns. "
        "The smallest state shows what a sequence costs beside it: its requests are not kept together as "
        "runs, so each is encoded, decoded and answered by itself."
    )
    paragraphs = ("# Sequences", machine, "## Workers are killed", killed, "## What a state costs", how)
    filled = [textwrap.fill(text, 118, break_on_hyphens=False) for text in paragraphs]
    return "\n\n".join([*filled, "\n".join(costs)]) + "\n"


async def run(options: argparse.Namespace, log: IO[bytes]) -> tuple[Killed, dict[str, list[Round]]]:
    """Start the services, measure, and stop them; with a Redis of its own for each part."""
    with EmbeddedRedis() as server:
        services = Services(server, log)
        try:
            killed = await serve_while_killed(services, server.url, options.sequences, options.requests)
        finally:
            services.stop()
    log.flush()
    reclaimed = Path(log.name).read_bytes().count(b'"batch reclaimed"')
    with EmbeddedRedis(append_only=False) as server:
        services = Services(server, log)
        try:
            costs = await measure_costs(services, server, options.seconds, options.rounds)
        finally:
            services.stop()
    return killed._replace(reclaimed=reclaimed), costs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=30, help="of each sequence")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write SEQUENCES.md")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile(prefix="sequences-", suffix=".log") as log:
        killed, costs = asyncio.run(run(options, log.file))
    sentences, table = sentences_of_killed(killed, options.sequences), list(lines_of_costs(costs))
    print("\n".join([sentences, "", *table]))
    if options.write:
        stolen = max(one.stolen for rounds in costs.values() for one in rounds)
        text = document(sentences, table, stolen, options.seconds, options.rounds)
        (HERE / "SEQUENCES.md").write_text(text)
    if killed.equal < killed.requests:
        raise SystemExit("some answers are wrong")


if __name__ == "__main__":
    main()
