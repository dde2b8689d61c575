"""Goodput of a policy on the real system, beside the bound and virtual time; and why requests were missed.

    .venv/bin/python ops/bench/goodput_real.py [--models NAME] [--deadlines 15,50] [--loads 0.6,0.9,1.2,1.5]
        [--workers 1] [--arrivals Poisson] [--policies deferred,eager] [--seconds 12] [--write]

A worker sleeps l(b) for a batch of b (`goodput.MODELS`). One AsyncClient sends requests at random, without
waiting for results, each with the deadline as its `timeout`. The first LEARNING_S count for nothing: the
batcher learns l(b). All figures are of the moments at which requests were really sent:

    U3, U1     the bound of ops/bench/goodput.py, without any way to the worker and back
    virtual    the same policy, simulated in virtual time with the default round trip
    real       requests whose result the producer had within the deadline

Each request that was missed has one cause, found where its answer was given:

    given up   the batcher refused it early: it expected that the request could not be in time
    waiting    it was never dispatched, and its deadline passed
    in flight  it was dispatched, and its deadline passed before its batch was committed
    executed   it was answered OK, but it waited and was executed for longer than the deadline
    delivered  it was answered OK: waiting and execution were within the deadline, the ways were not
    client     the client's own timer ended before any answer
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from goodput import ARRIVALS, MODELS, Point, u1, u1_per_s, u3, world_of
from service_processes import start, stop

from carpool.client.aio import AsyncClient
from carpool.errors import DeadlineExceededError, NotFoundError
from carpool.keys import DEFAULT_PREFIX
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.tuning.arrivals import recorded
from carpool_cli.tuning.simulator import Simulation

HERE: Final = Path(__file__).parent
MODEL: Final = "sleeper"
LEARNING_S: Final = 6.0
PAUSE_S: Final = 1.0  # between two policies: what is in flight ends, and the batcher applies the setting
SEED: Final = 7
CAUSES: Final = ("given up", "waiting", "in flight", "executed", "delivered", "client")
_CAUSES_BY_DETAIL: Final = {
    "refused early": "given up",
    "expired: still waiting": "waiting",
    "expired: it was dispatched": "in flight",
    "no result within": "client",
}


class Sent(NamedTuple):
    """What became of a request: None if it was good, else the cause."""

    at_us: int
    missed: str | None


class Measured(NamedTuple):
    """A policy at one point: requests/s that were sent, of the bound, in virtual time, and really good ones.

    `missed`: the share of all requests, by cause.
    """

    point: Point
    policy: str
    sent_per_s: float
    bound_per_s: float
    virtual_per_s: float
    real_per_s: float
    missed: dict[str, float]


async def send(client: AsyncClient, due_us: Sequence[int], deadline_ms: int) -> list[Sent]:
    """Send requests at these times, without waiting for earlier results. When, and what became of each."""
    loop, sent, unanswered = asyncio.get_running_loop(), [], set()
    started_s = loop.time()

    async def ask() -> None:
        sent_s = loop.time()
        missed = None
        try:
            reply = await client.request(MODEL, 1, timeout=deadline_ms / 1000)
        except DeadlineExceededError as error:
            missed = cause_of(error)
        else:
            if loop.time() - sent_s > deadline_ms / 1000:
                is_executed_late = reply.queue_us + reply.compute_us > 1000 * deadline_ms
                missed = "executed" if is_executed_late else "delivered"
        sent.append(Sent(round((sent_s - started_s) * 1e6), missed))

    for at_us in due_us:
        while (wait_s := started_s + at_us / 1e6 - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(ask())
        unanswered.add(task)
        task.add_done_callback(unanswered.discard)
    await asyncio.gather(*unanswered)
    return sorted(sent)


def cause_of(error: DeadlineExceededError) -> str:
    """The cause that an answer names. Raises RuntimeError for one that is not known."""
    for text, cause in _CAUSES_BY_DETAIL.items():
        if text in error.detail:
            return cause
    raise RuntimeError(f"an answer of unknown cause: {error.detail}")


def compare(point: Point, policy: str, sent: Sequence[Sent]) -> Measured:
    """The real figures of requests, beside the bound and virtual time. Those of the learning do not count."""
    model, deadline_us = MODELS[point.model], 1000 * point.deadline_ms
    learning_us = 1e6 * LEARNING_S
    counted = [request for request in sent if request.at_us >= learning_us]
    times_us = np.array([request.at_us for request in counted], float)
    seconds = float(times_us[-1] - times_us[0]) / 1e6
    causes = Counter(request.missed for request in counted)
    world = world_of(point)
    bound = (u3 if point.workers == 1 else u1)(
        times_us, world._replace(out_us=0, back_us=0), deadline_us, model.max_batch_size
    )
    settings = ModelSettings.from_mapping({"max_batch_size": model.max_batch_size, "policy": policy})
    arrivals = recorded([request.at_us for request in sent], deadline_us)
    simulated = Simulation(Scheduler(settings, point.workers), world).run(arrivals)
    virtual = sum(at_us >= learning_us for at_us in simulated.good_arrivals_us)
    return Measured(
        point,
        policy,
        len(counted) / seconds,
        bound / seconds,
        virtual / seconds,
        causes[None] / seconds,
        {cause: causes[cause] / len(counted) for cause in CAUSES},
    )


def row(measured: Measured) -> str:
    """A row of the table."""
    point, policy, sent_per_s, bound_per_s, virtual_per_s, real_per_s, missed = measured
    name = "U3" if point.workers == 1 else "U1"
    causes = " | ".join(f"{missed[cause]:.1%}" for cause in CAUSES)
    return (
        f"| {point.model} | {point.workers} | {point.deadline_ms} ms | {point.arrivals} | {point.load:g} | "
        f"{sent_per_s:,.0f} | {policy} | {name} {bound_per_s:,.0f} | {virtual_per_s / bound_per_s:.1%} | "
        f"**{real_per_s / bound_per_s:.1%}** | {causes} |"
    )


def head() -> Iterator[str]:
    """The head of the table."""
    columns = (
        "l(b), ms | workers | deadline | arrivals | load | requests/s | policy | bound/s | virtual | real"
    )
    yield f"| {columns} | {' | '.join(CAUSES)} |"
    yield "|---|---:|---:|---|---:|---:|---|---:|---:|---:|" + "---:|" * len(CAUSES)


async def measure(url: str, points: Sequence[Point], options: argparse.Namespace) -> list[Measured]:
    """Measure points that have the same model and workers."""
    results: list[Measured] = []
    link = Link(url, name="bench-config")
    async with AsyncClient(url) as client:
        await until_served(client)
        gc.collect()
        gc.freeze()  # a collection would pause the load generator for 20 ms
        gc.disable()
        for point, policy in product(points, options.policies):
            Directory(link, DEFAULT_PREFIX).configure(MODEL, {"policy": policy}, [])
            await asyncio.sleep(PAUSE_S)
            sent = await send(client, due_us(point, options.seconds), point.deadline_ms)
            results.append(compare(point, policy, sent))
            print(row(results[-1]), flush=True)
    link.close()
    return results


def due_us(point: Point, seconds: float) -> list[int]:
    """When to send requests: those of the learning, and then for `seconds`."""
    max_batch_size = MODELS[point.model].max_batch_size
    rate = point.load * u1_per_s(world_of(point), 1000 * point.deadline_ms, max_batch_size)
    arrivals = ARRIVALS[point.arrivals](rate, int(rate * (LEARNING_S + seconds)), SEED)
    return [arrival.at_us for arrival in arrivals]


async def until_served(client: AsyncClient) -> None:
    """Wait until a worker serves the model."""
    for _ in range(400):
        try:
            await client.infer(MODEL, 1)
        except NotFoundError:
            await asyncio.sleep(0.05)
        else:
            return
    raise SystemExit("no worker became ready")


def run(model: str, workers: int, points: Sequence[Point], options: argparse.Namespace) -> list[Measured]:
    """Measure points on a stack of their own."""
    worker = ["carpool_worker", f"{MODEL}={HERE / 'modelled.py'}:Modelled"]
    with EmbeddedRedis() as server, tempfile.TemporaryFile() as log:
        services = [
            start(server.url, log, "carpool_batcher", CARPOOL_LOG_LEVEL="warning"),
            start(
                server.url, log, *worker, CARPOOL_LOG_LEVEL="warning", CARPOOL_REPLICAS=str(workers),
                CARPOOL_BENCH_MODEL=model,
            ),
        ]  # fmt: skip
        try:
            return asyncio.run(measure(server.url, points, options))
        finally:
            stop(services)


def main() -> None:
    """Measure all points, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=lambda text: text.split(","), default=["2 + 1 b"], help="names in goodput.MODELS")
    add("--deadlines", type=_numbers(int), default=[15, 50], help="in ms")
    add("--loads", type=_numbers(float), default=[0.6, 0.9, 1.2, 1.5], help="as shares of the best rate")
    add("--workers", type=_numbers(int), default=[1])
    add("--arrivals", type=lambda text: text.split(","), default=["Poisson"], help="Poisson, bursty")
    add("--policies", type=lambda text: text.split(","), default=["deferred", "eager"])
    add("--seconds", type=float, default=12.0, help="that count, for each row")
    add("--write", action="store_true", help="write GOODPUT_REAL.md")
    options = parser.parse_args()
    results: list[Measured] = []
    print("\n".join(head()), flush=True)
    for model, workers in product(options.models, options.workers):
        of_points = product(options.deadlines, options.arrivals, options.loads)
        points = [Point(model, workers, *of_point) for of_point in of_points]
        results += run(model, workers, points, options)
    if options.write:
        text = (__doc__ or "").split("\n\n", 2)[2]
        lines = ["# Goodput on the real system", "", "Written by `ops/bench/goodput_real.py --write`.", ""]
        lines += ["```text", text.strip(), "```", "", *head(), *map(row, results), ""]
        (HERE / "GOODPUT_REAL.md").write_text("\n".join(lines))


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
