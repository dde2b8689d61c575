"""The scheduler's CPU time per request, by queue depth: it should not depend on the depth.

    .venv/bin/python ops/bench/core.py [--requests 50000]

At each depth, requests are offered and batches of 64 are dispatched and settled, so that the depth stays the
same. Prints microseconds per request, and the ratio to the smallest depth. The one-time cost of when l(n)
becomes known, in proportion to the depth, is paid before the measurement.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

from carpool.lifecycle import collect_garbage_rarely
from carpool.messages import Entry, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.scheduler import Dispatch, Scheduler

DEPTHS: Final = (10, 1_000, 100_000)
BATCH_SIZE: Final = 64
EXECUTION_US: Final = 5_000
WARM_UP_BATCHES: Final = 4
BATCH_IDS: Final = count(1)
KINDS: Final = {
    "eager": {"policy": "eager"},
    "eager, expiring": {"policy": "eager"},
    "deferred, expiring": {"policy": "deferred"},
    "eager, 100 tenants": {"policy": "eager"},
}


def cost_us(kind: str, depth: int, requests: int) -> float:
    """Microseconds to offer a request, and for its share of polling and settling."""
    settings = ModelSettings(
        max_batch_size=BATCH_SIZE, max_queue_size=2 * depth + requests, policy=KINDS[kind]["policy"]
    )
    scheduler = Scheduler(settings, model_processes=0)
    before = depth + WARM_UP_BATCHES * BATCH_SIZE
    offered = [_request(kind, number) for number in range(before + requests)]
    for request in offered[:depth]:
        scheduler.offer(request, 0)
    scheduler.model_processes = 1
    now_us = _serve(scheduler, offered[depth:before], 0)
    started_s = time.perf_counter()
    _serve(scheduler, offered[before:], now_us)
    return (time.perf_counter() - started_s) / requests * 1e6


def _serve(scheduler: Scheduler, offered: Sequence[Request], now_us: int) -> int:
    """Offer these requests in batches, and dispatch and settle one after each. Returns the end time."""
    for at in range(0, len(offered), BATCH_SIZE):
        for request in offered[at : at + BATCH_SIZE]:
            scheduler.offer(request, now_us)
        for decision in scheduler.poll(now_us):
            if type(decision) is Dispatch:
                scheduler.launch(str(next(BATCH_IDS)), decision, now_us)
        now_us += EXECUTION_US
        for batch_id in list(scheduler.in_flight()):
            scheduler.settle(batch_id, EXECUTION_US, now_us)
    return now_us


def _request(kind: str, number: int) -> Request:
    entry = Entry(f"{number}-0", 0)
    deadline_us = 3_600_000_000 if "expiring" in kind else None
    tenant = f"tenant-{number % 100}" if "tenants" in kind else ""
    request = Request(entry, str(number), b"body", deadline_us=deadline_us, tenant=tenant)
    entry.requests.append(request)
    return request


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000, help="at each depth")
    options = parser.parse_args()
    collect_garbage_rarely()  # as a batcher does
    print(f"{'':20}" + "".join(f"{depth:>22,}" for depth in DEPTHS))
    for kind in KINDS:
        costs = [min(cost_us(kind, depth, options.requests) for _ in range(2)) for depth in DEPTHS]
        cells = [f"{cost:8.2f} us  x{cost / costs[0]:5.2f}" for cost in costs]
        print(f"{kind:20}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
