"""`carpool models`: the registered models, and how many requests wait for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.model_settings import ModelKind
from carpool.settings import ConnectionSettings, read_settings
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory, take_snapshot
from carpool.store.eviction import eviction_warning
from carpool.wire.kinds import kind_of
from carpool.wire.report import BatcherReport, SequencesReport, SteppingReport
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, duration

_HEADINGS: Final = (
    "model", "waiting", "oldest", "in flight", "processes", "batcher", "policy", "dead", "batch size",
)  # fmt: skip
_STEPPING_HEADINGS: Final = (
    "stepping model", "waiting", "oldest", "slots", "prefetched", "processes", "batcher", "dead",
    "first p50", "first p99", "gap p50", "gap p99",
)  # fmt: skip


class ModelsSettings(ConnectionSettings):
    """List the registered models.

    waiting     entries of the request stream; an entry is one request, or several that were sent together
    oldest      age of the entry that has waited longest, also if it is delayed
    in flight   batches dispatched and not settled
    processes   model processes; one that was killed counts until its lease runs out
    batcher     whether a batcher is active
    policy      the policy in force, as the batcher reports it
    dead        dead letters: requests given up because their model process or worker died repeatedly
    sequences   those kept, as the batcher reports them, of all slots where the model binds them to its
                processes (processes x max_batch_size), and those that wait to start

    Of a stepping model:
    slots       requests in flight that have a slot, of all slots (processes x max_batch_size)
    prefetched  requests in flight that get a slot as soon as one is free
    first       time from arrival to the first chunk, p50 and p99 of streams that ended lately
    gap         mean time between two chunks of a stream, of the same streams
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    as_json: bool = Field(False, description="print a JSON array instead of a table")


class ModelState(NamedTuple):
    """A model as Redis has it. The names are the keys of `carpool models --json`."""

    model: str
    waiting_entries: int
    oldest_ms: int | None
    batches_in_flight: int
    workers: int
    batcher: bool
    dead: int
    max_batch_size: int | None  # of a stepping model, the slots of each process
    policy: str | None  # the one in force; None if no batcher reports it
    unheeded: str  # why the batcher rejects the model's settings; empty if it does not
    stepping: SteppingReport | None = None  # None: it is not a stepping model
    sequences: SequencesReport | None = None  # None: it has no sequences, or no batcher reports them

    def as_json(self) -> dict[str, Any]:
        """As plain dicts, for `json.dumps`."""
        reports = {"stepping": self.stepping, "sequences": self.sequences}
        return {**self._asdict(), **{name: of and of._asdict() for name, of in reports.items()}}


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 1 if Redis does not answer, or refuses a command."""
    settings = read_settings(ModelsSettings, argv, "carpool models")
    link = Link(settings.redis_url, name=f"carpool-models-{os.getpid()}")
    try:
        states, warning = read_models(link, settings.prefix), eviction_warning(link)
    except (LinkError, CommandError) as error:
        print(f"carpool models: {explain(error)}", file=sys.stderr)
        return 1
    finally:
        link.close()
    if settings.as_json:
        print(json.dumps([state.as_json() for state in states]))
    else:
        show(states, Screen())
    if warning:
        print(f"carpool models: {warning}", file=sys.stderr)
    return 0


def read_models(link: Link, prefix: str) -> list[ModelState]:
    """The present state of every registered model."""
    directory = Directory(link, prefix)
    return [_read_model(link, directory, Keys(model, prefix)) for model in directory.models()]


def _read_model(link: Link, directory: Directory, keys: Keys) -> ModelState:
    clock = RedisClock()
    snapshot = take_snapshot(link, keys, clock)
    arrival_us = directory.oldest_arrival_us(keys.model)
    batcher, dead = link.call("EXISTS", keys.batcher), link.call("XLEN", keys.dead)
    report = BatcherReport.decode(link.call("GET", keys.report) or b"") if batcher else None
    size = snapshot.registration.get("max_batch_size", "")
    max_batch_size = int(size) if size.isdigit() else None
    stepping = None
    if kind_of(snapshot.registration) is ModelKind.STEPPING:
        slots = len(snapshot.model_processes) * (max_batch_size or 0)
        stepping = (report and report.stepping) or SteppingReport(slots, 0, None, None)
    return ModelState(
        keys.model,
        snapshot.waiting_entries,
        None if arrival_us is None else max(0, clock.now_us() - arrival_us) // 1000,
        snapshot.batches_in_flight,
        len(snapshot.model_processes),
        bool(batcher),
        dead,
        max_batch_size,
        (report and report.policy) or None,
        report.unheeded if report else "",
        stepping,
        report.sequences if report else None,
    )


def describe_unregistered(model: str, registered: Sequence[str]) -> str:
    """The error for a model that is not registered, with the models that are."""
    hint = f"registered models: {', '.join(registered)}" if registered else "`carpool up square` serves one"
    return f"model {model!r:.140} is not registered; {hint}"


def show(states: Sequence[ModelState], screen: Screen) -> None:
    """Write a table of models and one of stepping models, or how to serve a model if there is none."""
    if not states:
        screen.print("no model is registered; `carpool up square` serves one")
        return
    of_batches = [state for state in states if state.stepping is None]
    rows = [(*_HEADINGS, "sequences"), *((*_row(state), _sequences(state.sequences)) for state in of_batches)]
    if of_batches:
        has_sequences = any(state.sequences for state in of_batches)
        screen.print_table(build_table(rows if has_sequences else [row[:-1] for row in rows]))
    stepping = [_stepping_row(state, state.stepping) for state in states if state.stepping is not None]
    if of_batches and stepping:
        screen.print()
    if stepping:
        screen.print_table(build_table([_STEPPING_HEADINGS, *stepping]))
    for state in states:
        if state.unheeded:
            screen.print(
                f"\nThe batcher rejects the settings of {state.model} and serves it with others: "
                f"{state.unheeded}"
            )


def _row(state: ModelState) -> tuple[str, ...]:
    """The cells below `_HEADINGS`."""
    return (
        state.model,
        f"{state.waiting_entries:,}",
        _age(state),
        f"{state.batches_in_flight:,}",
        f"{state.workers:,}",
        "yes" if state.batcher else "none",
        state.policy or "-",
        f"{state.dead:,}",
        "?" if state.max_batch_size is None else f"up to {state.max_batch_size}",
    )


def _stepping_row(state: ModelState, stepping: SteppingReport) -> tuple[str, ...]:
    """The cells below `_STEPPING_HEADINGS`."""
    slots_in_use = min(state.batches_in_flight, stepping.slots)
    return (
        state.model,
        f"{state.waiting_entries:,}",
        _age(state),
        f"{slots_in_use:,} of {stepping.slots:,}",
        f"{state.batches_in_flight - slots_in_use:,}",
        f"{state.workers:,}",
        "yes" if state.batcher else "none",
        f"{state.dead:,}",
        *_times(stepping.first_us),
        *_times(stepping.gap_us),
    )


def _sequences(report: SequencesReport | None) -> str:
    if report is None:
        return "-"
    waiting, slots = report.waiting_to_start, report.slots
    kept = f"{report.kept:,}" if slots is None else f"{report.kept:,} of {slots:,} slots"
    return kept + (f", {waiting:,} wait to start" if waiting else "")


def _age(state: ModelState) -> str:
    return "-" if state.oldest_ms is None else duration(state.oldest_ms / 1000)


def _times(quantiles_us: tuple[int, int] | None) -> tuple[str, str]:
    if quantiles_us is None:
        return "-", "-"
    p50_us, p99_us = quantiles_us
    return duration(p50_us / 1e6), duration(p99_us / 1e6)
