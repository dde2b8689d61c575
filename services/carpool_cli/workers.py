"""`carpool workers`: the workers of models, what each has, and which of them drain."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable, printable_json
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory
from carpool.store.workers import WorkerState, read_workers
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, duration, size

_HEADINGS = (
    "model", "worker", "state", "processes", "in hand", "oldest", "memory", "devices", "up", "heartbeat",
    "version",
)  # fmt: skip


class WorkersSettings(ConnectionSettings):
    """List the workers of a model, or of all models.

    state       serving; draining, because it stops or an operator drains it (`carpool drain`); or lost: its
                lease has run out
    processes   model processes, and how many of these drain, if not all
    in hand     batches that it has; of a model that steps, requests
    oldest      how long ago the oldest of these was dispatched
    memory      of its processes, and of GPUs
    up          how long it has served
    heartbeat   how long ago it renewed its leases
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: CliPositionalArg[str] = Field("", description="the model's name (default: all)")
    as_json: bool = Field(False, description="print a JSON array instead of a table")


def main(argv: Sequence[str]) -> int:
    """Print them. Returns 1 if Redis does not answer, or the model is unknown."""
    settings = read_settings(WorkersSettings, argv, "carpool workers")
    link = Link(settings.redis_url, name=f"carpool-workers-{os.getpid()}")
    try:
        models = Directory(link, settings.prefix).models()
        if settings.model and settings.model not in models:
            return _fail(describe_unregistered(settings.model, models))
        chosen = [settings.model] if settings.model else models
        workers = [one for model in chosen for one in read_workers(link, Keys(model, settings.prefix))]
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()
    if settings.as_json:
        print(printable_json([as_json(worker) for worker in workers]))
    else:
        show(workers, Screen())
    return 0


def as_json(worker: WorkerState) -> dict[str, Any]:
    """A worker for programs."""
    processes = [
        {
            **process._asdict(),
            "batches": [held.batch for held in process.batches],
            "memory": process.memory._asdict(),
            "oldest_ms": process.oldest_ms,
        }
        for process in worker.processes
    ]
    order = None if worker.order is None else worker.order._asdict()
    state = {"state": worker.state, "host": worker.host, "memory": worker.memory._asdict()}
    return {**worker._asdict(), **state, "processes": processes, "order": order}


def show(workers: Sequence[WorkerState], screen: Screen) -> None:
    """The table, and who drains which of them."""
    if not workers:
        screen.print("no worker runs; start one with `carpool worker MODEL`")
        return
    rows = [_HEADINGS, *map(_row, workers)]
    if not any(worker.version for worker in workers):
        rows = [row[:-1] for row in rows]
    screen.print_table(build_table(rows))
    for line in _orders(workers):
        screen.print(f"\n{line}")


def _orders(workers: Sequence[WorkerState]) -> Iterator[str]:
    for worker in workers:
        if worker.order is not None:
            yield f"{worker.name} of {worker.model} is {printable(worker.order.describe())}"


def _row(worker: WorkerState) -> tuple[str, ...]:
    """The cells below `_HEADINGS`."""
    processes = worker.alive
    draining = sum(process.is_draining for process in processes)
    shown = f"{len(processes)}" + (f", {draining} draining" if 0 < draining < len(processes) else "")
    oldest = [at_ms for process in worker.processes if (at_ms := process.oldest_ms) is not None]
    memory = worker.memory
    taken = size(memory.resident) + (f", {size(memory.on_gpus)} of GPUs" if memory.on_gpus else "")
    return (
        worker.model,
        worker.name,
        worker.state,
        shown,
        f"{sum(process.in_hand for process in worker.processes):,}",
        _ago(worker, min(oldest, default=None)),
        taken if memory.resident else "-",
        ", ".join(dict.fromkeys(process.device for process in worker.processes if process.device)) or "-",
        _ago(worker, worker.since_ms),
        _ago(worker, worker.last_beat_ms),
        worker.version or "-",
    )


def _ago(worker: WorkerState, time_ms: int | None) -> str:
    age_s = worker.age_s(time_ms)
    return "-" if age_s is None else duration(age_s)


def _fail(error: str) -> int:
    complain(f"carpool workers: {error}")
    return 1
