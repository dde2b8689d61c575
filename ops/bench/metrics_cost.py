"""Cost of metrics: CPU time for each request and batch, and the time of a scrape.

    .venv/bin/python ops/bench/metrics_cost.py [--batch N]

Calls what batcher and worker call for each batch, on prepared requests, and compares it with the CPU time
that all processes together spend on a request (31 us; see README.md). Then the same for a stepping model: a
step with one chunk for each of N requests, and the end of a request. No Redis, no processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import generate_latest

from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import MSGPACK, Entry, Run
from carpool.messages.results import Chunk
from carpool.messages.settled import BatchSettled, Streamed
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.steps import KeptChunk, StepWrite
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.missed_deadlines import MissedDeadlines
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from carpool_batcher.meter import BatcherMetrics, Meter
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from carpool_worker.stepping.execution import StepExecution

REQUEST_CPU_US: Final = 31.0  # CPU time of a request over all processes: `make bench`, 1,024 in flight
MODEL: Final = "noop"
ROUNDS: Final = 7
BATCHES: Final = 300


def dispatched(size: int) -> tuple[Callable[[], None], BatcherMetrics]:
    """What a batcher records for one batch."""
    metrics = BatcherMetrics()
    meter = Meter(metrics, MODEL)
    scheduler = Scheduler(ModelSettings(max_batch_size=size), model_processes=1)
    missed = MissedDeadlines(scheduler.learned, scheduler.in_flight.batches)
    runs = [
        Run(Entry("1-1", 1000), [str(at)], [b""], arrival_us=1000, deadline_us=60_000_000)
        for at in range(size)
    ]
    batches = [Dispatch(runs, "full", "")]
    in_flight = InFlightBatch(2_000, size, "", dict(enumerate(runs)), [(run.arrival_us, 1) for run in runs])
    event = BatchSettled("1-1", "w/0", size, 900, 7_000, size)

    def record() -> None:
        meter.dispatched(batches, scheduler, 5_000)
        meter.settled(in_flight, 7_000)
        scheduler.learned.observe_delivery(300)
        missed.settled(event, in_flight)

    return record, metrics


def committed(size: int) -> tuple[Callable[[], None], WorkerMetrics]:
    """What a worker records for one batch."""
    metrics = WorkerMetrics(MODEL)
    runs = [BatchedRun("1-1", [str(at)], [b""], MSGPACK, None, 1000 + at, None, None) for at in range(size)]
    batch = Batch("1-1", 1, runs, "full", 2_000, "")
    execution = Execution(batch, input_us=30, compute_us=900, frames_executed=1)
    for at, run in enumerate(runs):
        execution.succeed(run, at, [at], [b""])
    return lambda: metrics.committed(execution, execution.counts(), 70, 5_000), metrics


def stepped(size: int) -> Callable[[], None]:
    """What a worker records for a step with a chunk for each of `size` requests."""
    metrics = WorkerMetrics(MODEL)
    run = BatchedRun("1-1", ["1"], [b""], MSGPACK, None, 1000, None, None)
    batch = Batch("1-1", 1, [run], "full", 2_000, "", stream=True)
    requests = [StepExecution(Execution(batch), key, 0.0) for key in range(size)]
    for request in requests:
        request.chunk_us = 30_000
    write = StepWrite(batch, 1, [KeptChunk(Chunk("1", MSGPACK, b"", 1), b"")])
    written = [(write, request.chunk_us) for request in requests]

    def record() -> None:
        metrics.stepped(19_000)
        metrics.chunks_written(written, 50_000)

    return record


def generated() -> tuple[Callable[[], None], Callable[[], None]]:
    """What a batcher and a worker record for a request of a stepping model, from dispatch to its end."""
    meter = Meter(BatcherMetrics(), MODEL)
    scheduler = Scheduler(ModelSettings(), model_processes=1, kind=ModelKind.STEPPING)
    batches = [Dispatch([Run(Entry("1-1", 1000), ["1"], [b""], arrival_us=1000)], "full", "")]
    in_flight = InFlightBatch(2_000, 1, "", {}, [(1000, 1)])
    streamed = Streamed(50, 40_000, 980_000)
    worker = WorkerMetrics(MODEL)
    run = BatchedRun("1-1", ["1"], [b""], MSGPACK, None, 1000, None, None)
    execution = Execution(Batch("1-1", 1, [run], "full", 2_000, ""), input_us=30, compute_us=900_000)
    execution.succeed(run, 0, [0], [b""])

    def of_batcher() -> None:
        meter.dispatched(batches, scheduler, 5_000)
        meter.settled(in_flight, 1_000_000)
        meter.stream_ended(streamed, 1_000_000)

    return of_batcher, lambda: worker.ended(execution, execution.counts(), 1_000_000)


def best_us(work: Callable[[], object], times: int) -> float:
    """CPU time of one call in us: the best of several rounds, because disturbances only add to it."""

    def one_round() -> float:
        started_ns = time.process_time_ns()
        for _ in range(times):
            work()
        return (time.process_time_ns() - started_ns) / times / 1000

    return min(one_round() for _ in range(ROUNDS))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="requests in a batch")
    size = parser.parse_args().batch
    total_us = 0.0
    print(f"{'':10}{'per batch':>12}{'+ per request':>14}{f'request of {size}':>20}{'of all CPU':>14}")
    for name, prepare in (("batcher", dispatched), ("worker", committed)):
        one_us = best_us(prepare(1)[0], BATCHES)
        many_us = best_us(prepare(size)[0], BATCHES)
        each_us = (many_us - one_us) / max(1, size - 1)
        total_us += many_us / size
        cpu_share = many_us / size / REQUEST_CPU_US
        print(
            f"{name:10}{one_us - each_us:9.1f} us{each_us:11.2f} us{many_us / size:17.2f} us{cpu_share:14.1%}"
        )
    print(f"{'total':10}{total_us:46.2f} us{total_us / REQUEST_CPU_US:14.1%}")
    step_us, chunks_us = best_us(stepped(0), BATCHES), best_us(stepped(size), BATCHES)
    batcher_us, worker_us = (best_us(record, BATCHES) for record in generated())
    print(
        f"stepping model: a step {step_us:.1f} us, each chunk in it {(chunks_us - step_us) / size:.2f} us; a "
        f"request {batcher_us:.1f} us in the batcher, {worker_us:.1f} us in the worker"
    )
    for name, prepare in (("batcher", dispatched), ("worker", committed)):
        record, metrics = prepare(size)
        record()
        page = generate_latest(metrics.registry)
        scrape_us = best_us(lambda: generate_latest(metrics.registry), 20)  # noqa: B023 (called here)
        print(
            f"scrape of a {name}: {scrape_us / 1000:.1f} ms, {len(page) / 1000:.0f} kB; every 15 s: "
            f"{scrape_us / 15e6:.3%} of a core, or the CPU time of {scrape_us / REQUEST_CPU_US:.0f} requests"
        )


if __name__ == "__main__":
    main()
