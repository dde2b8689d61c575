"""Does runs on the real system, and shows progress.

The runs of a model and a number of workers share a stack. At each point the policies take turns, and so do
runs with and without a flood, so that what else the machine does concerns all of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Final

from grid.load import no_garbage_collection
from host import CpuTime

from carpool.client.aio import AsyncClient
from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.wire.audit import Actor
from carpool.wire.report import BatcherReport
from deadlines.flood import FLOODS, flood
from deadlines.load import CAUSES, send
from deadlines.plans import LEARNING_S, Plan
from deadlines.runs import Run, evaluate
from deadlines.stack import MODEL, stack, until_served

REPORTS_INTERVAL_S: Final = 1.0  # a batcher reports as often
PAUSE_S: Final = 1.0  # before a run: what is in flight ends, and the batcher applies the policy


def do_runs(plans: Sequence[Plan], seconds: float, on_run: Callable[[Run], None]) -> None:
    """Do runs of `seconds`, in order. Calls `on_run` with each. Progress goes to stderr."""
    progress = Progress(len(plans), LEARNING_S + seconds + PAUSE_S)
    for (model, workers), of_stack in groupby(plans, lambda plan: plan.point[:2]):
        with stack(model, workers) as url:
            asyncio.run(_do_on_stack(url, list(of_stack), seconds, progress, on_run))


class Progress:
    """Prints each run."""

    def __init__(self, runs: int, run_s: float) -> None:
        self._runs, self._run_s, self._done = runs, run_s, 0
        self._started_s = time.monotonic()
        print(f"{runs} runs, about {runs * run_s / 60:.0f} minutes", file=sys.stderr, flush=True)

    def show(self, run: Run) -> None:
        """A run is done."""
        self._done += 1
        missed = ", ".join(f"{cause} {run.missed[cause] / run.sent:.1%}" for cause in CAUSES)
        minutes = (time.monotonic() - self._started_s) / 60
        mark = "" if run.is_valid else " (says nothing)"
        usual_ms, at_most_ms, in_ms, late_ms = (us / 1000 for us in (*run.transit_us, *run.delays_us))
        print(
            f"{self._done} of {self._runs}, {minutes:.1f} min: {run.plan.description}: "
            f"{run.good / run.bound:.1%} of {run.plan.point.bound_name}, {run.virtual / run.bound:.1%} in "
            f"virtual time, {run.predicted / run.bound:.1%} predicted with a transit of "
            f"{usual_ms:.1f} to {at_most_ms:.1f} ms, delays of {in_ms:.1f} and {late_ms:.1f} ms; "
            f"missed: {missed}; sent {run.late_ms:.1f} ms late; "
            f"CPU {run.busy:.0%} busy, {run.stolen:.0%} stolen{mark}",
            file=sys.stderr,
            flush=True,
        )


async def _do_on_stack(
    url: str, plans: Sequence[Plan], seconds: float, progress: Progress, on_run: Callable[[Run], None]
) -> None:
    link = Link(url, name="bench-config")
    async with AsyncClient(url) as client:
        await until_served(client)
        for plan in plans:
            Directory(link, DEFAULT_PREFIX).configure(
                MODEL, {"policy": plan.policy}, [], actor=Actor("bench", "command")
            )
            run = await _do(client, url, link, plan, seconds)
            progress.show(run)
            on_run(run)
    link.close()


async def _do(client: AsyncClient, url: str, link: Link, plan: Plan, seconds: float) -> Run:
    beside = FLOODS.get(plan.flood)
    with nullcontext() if beside is None else flood(url, beside):
        due_us = plan.due_us(seconds)
        await asyncio.sleep(PAUSE_S)
        cpu = CpuTime()
        reports: list[BatcherReport] = []
        reading = asyncio.create_task(_read_reports(link, reports))
        with no_garbage_collection():
            sent = await send(client, MODEL, due_us, plan.point.deadline_ms)
        shares = cpu.shares()
        reading.cancel()
    return evaluate(plan, sent, [*reports, _report(link)], shares)


async def _read_reports(link: Link, reports: list[BatcherReport]) -> None:
    """Read what the batcher reports, from the end of the learning on."""
    await asyncio.sleep(LEARNING_S)
    while True:
        reports.append(_report(link))
        await asyncio.sleep(REPORTS_INTERVAL_S)


def _report(link: Link) -> BatcherReport:
    """What the batcher has learned."""
    report = BatcherReport.decode(link.call("GET", Keys(MODEL).report) or b"")
    if report is None:
        raise SystemExit("the batcher has not reported")
    return report
