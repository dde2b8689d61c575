"""What measuring costs: CPU microseconds a request and a batch, and what a scrape takes.

    .venv/bin/python ops/bench/metrics_cost.py [--batch N]

Calls what batcher and worker call for each batch, on requests that are ready made, and prints it beside a
request's whole trip (27 us of CPU over all processes; see README.md). No Redis, no processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import generate_latest

from carpool.errors import OK
from carpool.messages import MSGPACK, Batch, BatchedRequest, Entry, Request, Result
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import InFlightBatch
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from carpool_batcher.meter import BatcherMetrics, Meter
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics

TRIP_US: Final = 27.0  # `make bench`, 1,024 in flight: CPU a request, all processes together
MODEL: Final = "noop"
ROUNDS: Final = 7
BATCHES: Final = 300


def dispatched(size: int) -> tuple[Callable[[], None], BatcherMetrics]:
    """A batcher's share of one batch."""
    metrics = BatcherMetrics()
    meter = Meter(metrics, MODEL)
    scheduler = Scheduler(ModelSettings(max_batch_size=size), model_processes=1)
    requests = [Request(Entry("1-1", 1000 + at), str(at), b"") for at in range(size)]
    batches = [Dispatch(requests, "full", "")]
    riding = InFlightBatch(2_000, size, "", {}, [request.arrival_us for request in requests])

    def share() -> None:
        meter.dispatched(batches, scheduler, 5_000)
        meter.settled(riding, 7_000)

    return share, metrics


def committed(size: int) -> tuple[Callable[[], None], WorkerMetrics]:
    """A worker's share of one batch."""
    metrics = WorkerMetrics(MODEL)
    requests = [
        BatchedRequest("1-1", str(at), MSGPACK, None, 1000 + at, None, b"", None) for at in range(size)
    ]
    batch = Batch("1-1", 1, requests, "full", 2_000, "")
    execution = Execution(batch, input_us=30, compute_us=900, frames_executed=1)
    execution.results = {at: Result(str(at), OK, MSGPACK, b"") for at in range(size)}
    return lambda: metrics.committed(execution, 70, 5_000), metrics


def best_us(work: Callable[[], object], times: int) -> float:
    """CPU microseconds of one call: the best of a few rounds, since whatever disturbs only adds."""

    def a_round() -> float:
        began_ns = time.process_time_ns()
        for _ in range(times):
            work()
        return (time.process_time_ns() - began_ns) / times / 1000

    return min(a_round() for _ in range(ROUNDS))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="requests in a batch")
    size = parser.parse_args().batch
    together_us = 0.0
    print(f"{'':10}{'a batch':>12}{'+ a request':>14}{f'a request of {size}':>20}{'of its trip':>14}")
    for name, share in (("batcher", dispatched), ("worker", committed)):
        one_us = best_us(share(1)[0], BATCHES)
        many_us = best_us(share(size)[0], BATCHES)
        each_us = (many_us - one_us) / max(1, size - 1)
        together_us += many_us / size
        of_trip = many_us / size / TRIP_US
        print(
            f"{name:10}{one_us - each_us:9.1f} us{each_us:11.2f} us{many_us / size:17.2f} us{of_trip:14.1%}"
        )
    print(f"{'together':10}{together_us:46.2f} us{together_us / TRIP_US:14.1%}")
    for name, share in (("batcher", dispatched), ("worker", committed)):
        one, metrics = share(size)
        one()
        page = generate_latest(metrics.registry)
        scrape_us = best_us(lambda: generate_latest(metrics.registry), 20)  # noqa: B023 (called here)
        print(
            f"a scrape of a {name}: {scrape_us / 1000:.1f} ms, {len(page) / 1000:.0f} kB; every 15 s that is "
            f"{scrape_us / 15e6:.3%} of a core, or what {scrape_us / TRIP_US:.0f} requests take"
        )


if __name__ == "__main__":
    main()
