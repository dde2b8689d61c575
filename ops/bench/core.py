"""The scheduler's CPU time per request, by queue depth and by lanes: it should depend on neither.

    .venv/bin/python ops/bench/core.py [--requests 50000]

At each depth, requests are offered and batches of 64 are dispatched and settled, so that the depth stays the
same. They are offered in runs of 1, and of 64 as rows. Runs of several tenants are cut into single requests
while those tenants wait. With many lanes, each request is in another one, so that batches are of one request.

Prints microseconds of CPU time per request, and the ratio to the smallest depth or number of lanes. The
one-time cost of when l(n) becomes known, in proportion to the depth, is paid before the measurement.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from carpool.lifecycle import collect_garbage_rarely
from carpool.messages.requests import Entry, Run
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Rows
from carpool_batcher.core.scheduler import Dispatch, Scheduler

DEPTHS: Final = (10, 1_000, 100_000)
LANES: Final = (1, 100, 10_000)
BATCH_SIZE: Final = 64
EXECUTION_US: Final = 5_000
WARM_UP_BATCHES: Final = 4
BATCH_IDS: Final = count(1)


class Kind(NamedTuple):
    """What is offered, and to which policy."""

    policy: str = "eager"
    run: int = 1
    expires: bool = False
    tenants: int = 1


KINDS: Final = {
    "eager": Kind(),
    "eager, expiring": Kind(expires=True),
    "deferred, expiring": Kind("deferred", expires=True),
    "eager, 100 tenants": Kind(tenants=100),
    "eager, rows": Kind(run=64),
    "eager, expiring, rows": Kind(run=64, expires=True),
    "deferred, expiring, rows": Kind("deferred", run=64, expires=True),
    "eager, 100 tenants, rows": Kind(run=64, tenants=100),
}


def cost_of_depth_us(kind: Kind, depth: int, requests: int) -> float:
    """Microseconds to offer a request, and for its share of polling and settling."""
    scheduler = Scheduler(_settings(kind, 2 * depth + requests), model_processes=0)
    before = depth + WARM_UP_BATCHES * BATCH_SIZE
    waiting = [_run(kind, number, kind.run) for number in range(0, depth, kind.run)]
    warm_up = [_run(kind, number, kind.run) for number in range(depth, before, kind.run)]
    offered = [_run(kind, number, kind.run) for number in range(before, before + requests, kind.run)]
    for run in waiting:
        scheduler.offer(run, 0)
    scheduler.model_processes = 1
    now_us = _serve(scheduler, warm_up, 0, BATCH_SIZE // kind.run)
    started_s = time.process_time()
    _serve(scheduler, offered, now_us, BATCH_SIZE // kind.run)
    return (time.process_time() - started_s) / requests * 1e6


def cost_of_lanes_us(kind: Kind, lanes: int, requests: int) -> float:
    """The same for requests of which each is in another lane, while one waits in each of `lanes`."""
    scheduler = Scheduler(_settings(kind, 2 * lanes + requests), model_processes=0)
    offered = [_run(kind, number, 1, lane=f"lane-{number}") for number in range(lanes + requests)]
    for run in offered[:lanes]:
        scheduler.offer(run, 0)
    if kind.policy == "deferred":  # only what is soon due is dispatched
        for number, run in enumerate(offered[lanes:], 1):
            run.deadline_us = number * EXECUTION_US + 2 * EXECUTION_US
    scheduler.model_processes = 1
    now_us = _serve(scheduler, offered[lanes : lanes + 8], 0, 1)
    started_s = time.process_time()
    _serve(scheduler, offered[lanes + 8 :], now_us, 1)
    return (time.process_time() - started_s) / (requests - 8) * 1e6


def _serve(scheduler: Scheduler, offered: Sequence[Run], now_us: int, runs: int) -> int:
    """Offer these, a few runs at a time; dispatch and settle a batch after each. Returns the end time."""
    for at in range(0, len(offered), runs):
        for run in offered[at : at + runs]:
            scheduler.offer(run, now_us)
        for decision in scheduler.poll(now_us):
            if type(decision) is Dispatch:
                for run in decision.runs:
                    run.entry.runs.remove(run)  # as the batcher does
                scheduler.in_flight.launch(str(next(BATCH_IDS)), decision, now_us)
        scheduler.wake_at_us()
        now_us += EXECUTION_US
        for batch_id, batch in list(scheduler.in_flight.batches.items()):
            scheduler.in_flight.settle(
                BatchSettled(batch_id, "", batch.size, EXECUTION_US, now_us, batch.size)
            )
    return now_us


def _settings(kind: Kind, requests_max: int) -> ModelSettings:
    return ModelSettings(max_batch_size=BATCH_SIZE, max_queue_size=requests_max, policy=kind.policy)


def _run(kind: Kind, number: int, size: int, **fields: Any) -> Run:
    bodies: Bodies = [b"body"] if size == 1 else Rows(b"", b"body" * size, 4)
    tenant = f"tenant-{number // size % kind.tenants}" if kind.tenants > 1 else ""
    deadline_us = 3_600_000_000 if kind.expires else None
    ids = [str(number + at) for at in range(size)]
    run = Run(Entry(f"{number}-0", 0), ids, bodies, deadline_us=deadline_us, tenant=tenant, **fields)
    run.entry.runs.append(run)
    return run


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000, help="at each depth")
    options = parser.parse_args()
    collect_garbage_rarely()  # as a batcher does
    print(f"{'waiting requests':24}" + "".join(f"{depth:>22,}" for depth in DEPTHS))
    for name, kind in KINDS.items():
        _print(
            name, [min(cost_of_depth_us(kind, depth, options.requests) for _ in range(3)) for depth in DEPTHS]
        )
    print(f"{'lanes':24}" + "".join(f"{lanes:>22,}" for lanes in LANES))
    for name, kind in KINDS.items():
        if kind.run == 1 and kind.tenants == 1:
            requests = max(500, options.requests // 20)
            _print(name, [min(cost_of_lanes_us(kind, lanes, requests) for _ in range(3)) for lanes in LANES])


def _print(name: str, costs_us: Sequence[float]) -> None:
    cells = [f"{cost_us:8.2f} us  x{cost_us / costs_us[0]:5.2f}" for cost_us in costs_us]
    print(f"{name:24}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
