"""`carpool models`: the registered models, and how many requests wait for each."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.clock import RedisClock
from carpool.errors import CANCELLED
from carpool.keys import Keys
from carpool.model_settings import ModelKind
from carpool.process_names import worker_of
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable, printable_json
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.dead_letters import DeadLetters
from carpool.store.declarations import Declarations
from carpool.store.directory import Directory, in_streams_of_versions, take_snapshot, texts
from carpool.store.eviction import eviction_warning
from carpool.store.overrides import describe_unregistered as describe_unregistered  # noqa: PLC0414
from carpool.store.unregistered import Unserved, find_unregistered
from carpool.wire.orders import DrainOrder, Paused, read_drain_order
from carpool.wire.registration import (
    Registration,
    decode_parameters,
    describe_differing,
    differing,
    versions_of,
)
from carpool.wire.report import BatcherReport, SequencesReport, SteppingReport, VersionReport
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, duration

_HEADINGS: Final = (
    "model", "waiting", "oldest", "in flight", "processes", "batcher", "policy", "dead", "batch size",
)  # fmt: skip
_STEPPING_HEADINGS: Final = (
    "stepping model", "waiting", "oldest", "slots", "prefetched", "processes", "batcher", "dead",
    "first p50", "first p99", "gap p50", "gap p99",
)  # fmt: skip

Row = tuple[str, ...]


class ModelsSettings(ConnectionSettings):
    """List the registered models.

    waiting     requests waiting, and how many of them are delayed; if no batcher is active, entries of the
                request stream, each of which is one request, or several that were sent together
    oldest      age of the entry that has waited longest, also if it is delayed
    in flight   batches dispatched and not settled
    processes   model processes; one that was killed counts until its lease runs out; loading: a worker loads
                the model; draining: they take no more batches
    batcher     whether a batcher is active
    policy      the policy in force, as the batcher reports it
    dead        dead letters: requests given up because their model process or worker died repeatedly; how
                many others were dropped, because there were too many or they grew old
    failed      requests that workers answered with errors, and what the model raised last, below the table
    refused     requests that the batcher answered with errors, by status and reason, below the table
    version     those that its workers declare, if any does
    settings    those that workers declare differently, as during an update, below the table
    parameters  what the model was loaded with, below the table; secrets are hidden
    paused      since when, by whom and why, below the table; `carpool resume` ends it
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
    dead_dropped: int
    max_batch_size: int | None  # of a stepping model, the slots of each process
    policy: str | None  # the one in force; None if no batcher reports it
    rejected_settings: str  # why the batcher rejects the model's settings; empty if it does not
    stepping: SteppingReport | None = None  # None: it is not a stepping model
    sequences: SequencesReport | None = None  # None: it has no sequences, or no batcher reports them
    failed: Mapping[str, int] = {}  # requests that workers answered with errors, by status, as it reports
    refused: Mapping[str, int] = {}  # requests that the batcher answered with errors, by "STATUS/reason"
    last_error: str | None = None  # what the model raised last
    last_error_ms: int | None = None  # how long ago that was
    loading: bool = False  # a worker is loading it
    waiting: int | None = None  # requests; None if no batcher reports how many the entries hold
    delayed: int | None = None  # of these, the ones that must not be dispatched yet (`not_before`)
    # Of what workers declare differently how many declare which value.
    differing: Mapping[str, Mapping[str, int]] = {}
    parameters: Mapping[str, str] = {}  # what it was loaded with, as text; secrets are hidden
    versions: Mapping[str, int] = {}  # how many workers declare which; an empty one: they declare none
    shares: Mapping[str, int] = {}  # of the requests that ask for no version, by version, in per cent
    by_version: Mapping[str, VersionReport] = {}  # what workers of each did since the batcher became active
    paused: Paused | None = None  # by an operator
    draining: int = 0  # of the processes, those that take no more batches, or begin no more sequences
    drained: Mapping[str, DrainOrder] = {}  # workers that an operator drains

    def as_json(self) -> dict[str, Any]:
        """As plain dicts, for `json.dumps`."""
        reports: dict[str, Any] = {"stepping": self.stepping, "sequences": self.sequences}
        by_version = {version: of._asdict() for version, of in self.by_version.items()}
        drained = {worker: order._asdict() for worker, order in self.drained.items()}
        nested = {name: of and of._asdict() for name, of in {**reports, "paused": self.paused}.items()}
        return {**self._asdict(), **nested, "by_version": by_version, "drained": drained}


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 1 if Redis does not answer, or refuses a command."""
    settings = read_settings(ModelsSettings, argv, "carpool models")
    link = Link(settings.redis_url, name=f"carpool-models-{os.getpid()}")
    try:
        states, unserved = read_models(link, settings.prefix)
        warning = eviction_warning(link)
    except (LinkError, CommandError) as error:
        complain(f"carpool models: {explain(error)}")
        return 1
    finally:
        link.close()
    if settings.as_json:
        print(printable_json([state.as_json() for state in states]))
    else:
        show(states, Screen())
    for stream in unserved:
        complain(f"carpool models: {_why_unserved(stream, states)}")
    if warning:
        complain(f"carpool models: {warning}")
    return 0


def read_models(link: Link, prefix: str) -> tuple[list[ModelState], list[Unserved]]:
    """The present state of every model that is registered, or is being loaded; and request streams that
    nobody reads."""
    directory = Directory(link, prefix)
    registered = directory.models()
    unregistered = find_unregistered(link, prefix, registered)
    models = sorted([*registered, *unregistered.loading])
    return [_read_model(link, directory, Keys(model, prefix)) for model in models], unregistered.unserved


def _why_unserved(stream: Unserved, states: Sequence[ModelState]) -> str:
    """What is wrong with a request stream that nobody reads."""
    waiting = f"requests in {printable(stream.key)} are read by nobody: "
    names = [state.model for state in states]
    if not stream.has_braces:
        braced = f"carpool:{{{printable(stream.model)}}}:requests"
        return f"{waiting}the name of the model needs braces, as in {braced}"
    similar = difflib.get_close_matches(stream.model, names, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ", and none loads it"
    return f"{waiting}no worker has registered a model {stream.model!r}{hint}"


def _read_model(link: Link, directory: Directory, keys: Keys) -> ModelState:
    clock, declared = RedisClock(), read_declared(link, keys)
    snapshot = take_snapshot(link, keys, clock)
    arrival_us = directory.oldest_arrival_us(keys.model)
    batcher, dead = link.call("EXISTS", keys.batcher), link.call("XLEN", keys.dead)
    dropped = DeadLetters(link, keys).dropped()
    report = BatcherReport.decode(link.call("GET", keys.report) or b"") if batcher else None
    overrides = {} if report and report.rejected_settings else snapshot.overrides  # which the batcher rejects
    size = {**snapshot.registration, **overrides}.get("max_batch_size", "")
    max_batch_size = int(size) if size.isdigit() else None
    stepping = None
    if ModelKind.of(snapshot.registration) is ModelKind.STEPPING:
        slots = len(snapshot.model_processes) * (max_batch_size or 0)
        stepping = (report and report.stepping) or SteppingReport(slots, 0, None, None)
    return ModelState(
        keys.model,
        snapshot.waiting_entries,
        None if arrival_us is None else max(0, clock.now_us() - arrival_us) // 1000,
        snapshot.batches_in_flight + in_streams_of_versions(link, keys, snapshot.versions),
        len(snapshot.model_processes),
        bool(batcher),
        dead,
        sum(dropped.values()),
        max_batch_size,
        (report and report.policy) or None,
        report.rejected_settings if report else "",
        stepping,
        report.sequences if report else None,
        dict(report.failed) if report else {},
        _refused_only(report.refused) if report else {},
        report.last_error[0] if report and report.last_error else None,
        max(0, clock.now_us() - report.last_error[1]) // 1000 if report and report.last_error else None,
        _is_loading(link, keys),
        report.gauges.waiting if report else None,
        report.gauges.delayed if report else None,
        differing(declared),
        decode_parameters(snapshot.registration),
        versions_of(declared),
        snapshot.shares,
        dict(report.versions) if report else {},
        snapshot.paused,
        len(set(snapshot.draining).intersection(snapshot.model_processes)),
        _drained(link, keys, set(map(worker_of, snapshot.model_processes))),
    )


def _drained(link: Link, keys: Keys, living: Collection[str]) -> dict[str, DrainOrder]:
    """The living workers that an operator drains."""
    orders = texts(link.call("HGETALL", keys.drained))
    return {worker: read_drain_order(text) for worker, text in orders.items() if worker in living}


def read_declared(link: Link, keys: Keys) -> list[Registration]:
    """What each living worker of a model declares."""
    return list(Declarations(link, keys).read().by_worker.values())


def read_differing(link: Link, keys: Keys) -> Mapping[str, Mapping[str, int]]:
    """What the living workers of a model declare differently: how many declare which value."""
    return differing(read_declared(link, keys))


def describe_workers(model: str, found: Mapping[str, Mapping[str, int]]) -> str:
    """The sentence about what `read_differing` found; empty if that is nothing."""
    if not found:
        return ""
    described = printable(describe_differing(found))
    return f"Workers of {model} declare different settings, and the tightest apply: {described}"


def _is_loading(link: Link, keys: Keys) -> bool:
    return bool(link.call("EXISTS", keys.loading))


def show(states: Sequence[ModelState], screen: Screen) -> None:
    """Write a table of models and one of stepping models, or how to serve a model if there is none."""
    if not states:
        screen.print("no model is registered; `carpool up square` serves one")
        return
    of_batches = [state for state in states if state.stepping is None]
    if of_batches:
        rows = [_HEADINGS, *(_row(state) for state in of_batches)]
        if any(state.sequences for state in of_batches):
            rows = _with_column(rows, "sequences", [_sequences(state.sequences) for state in of_batches])
        screen.print_table(build_table(_with_versions(rows, of_batches)))
    stepping = [state for state in states if state.stepping is not None]
    if of_batches and stepping:
        screen.print()
    if stepping:
        rows = [_STEPPING_HEADINGS, *(_stepping_row(one, one.stepping) for one in stepping if one.stepping)]
        screen.print_table(build_table(_with_versions(rows, stepping)))
    for state in states:
        if state.rejected_settings:
            screen.print(
                f"\nThe batcher rejects the settings of {state.model} and serves it with others: "
                f"{printable(state.rejected_settings)}"
            )
        for paragraph in _paragraphs(state):
            screen.print(f"\n{paragraph}")


def _paragraphs(state: ModelState) -> Iterator[str]:
    """What is below the tables about a model."""
    if state.paused is not None:
        yield f"{state.model} is {printable(state.paused.describe())}"
    for worker, order in sorted(state.drained.items()):
        yield f"{worker} of {state.model} is {printable(order.describe())}"
    if state.parameters:
        yield f"Parameters of {state.model}: {_parameters(state.parameters)}"
    if state.differing:
        yield describe_workers(state.model, state.differing)
    if len(state.by_version) > 1 or state.shares:
        yield _by_version(state)
    if state.failed:
        yield f"Requests of {state.model} that failed: {_failures(state)}"
    if state.refused:
        yield f"Requests of {state.model} that the batcher refused: {_numbers(state.refused)}"


def _parameters(parameters: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in map(_printable_pair, parameters.items()))


def _printable_pair(pair: tuple[str, str]) -> tuple[str, str]:
    return printable(pair[0]), printable(pair[1])


def _with_column(rows: Sequence[Row], heading: str, cells: Sequence[str]) -> list[Row]:
    return [(*row, cell) for row, cell in zip(rows, (heading, *cells), strict=True)]


def _with_versions(rows: Sequence[Row], states: Sequence[ModelState]) -> Sequence[Row]:
    """With a column of versions, if a worker declares one."""
    if not any(version for state in states for version in state.versions):
        return rows
    return _with_column(rows, "version", [_versions(state) for state in states])


def _versions(state: ModelState) -> str:
    return ", ".join(version or "none" for version in state.versions) or "-"


def _by_version(state: ModelState) -> str:
    """A line for each version: its share, and what its workers did."""
    lines = [f"Versions of {state.model}, since the batcher became active:"]
    for version in sorted({*filter(None, state.versions), *state.shares, *state.by_version}):
        share = f", {state.shares[version]}% of the traffic" if version in state.shares else ""
        of = state.by_version.get(version)
        lines.append(f"  {printable(version)}{share}: {describe_version(of) if of else 'no requests'}")
    return "\n".join(lines)


def describe_version(of: VersionReport) -> str:
    """What workers of a version did: `1,200 requests, 3 failed, mean 12 ms, 4 ms for a batch of 3.1`."""
    if not (of.requests and of.batches):
        return "no requests"
    mean, execution = duration(of.total_us / of.requests / 1e6), duration(of.compute_us / of.batches / 1e6)
    failed = f", {of.failed:,} failed" if of.failed else ""
    size = of.requests / of.batches
    return f"{of.requests:,} requests{failed}, mean {mean}, {execution} for a batch of {size:.1f}"


def _refused_only(answered: Mapping[str, int]) -> dict[str, int]:
    """What batchers answered themselves, without what producers withdrew."""
    return {of: number for of, number in answered.items() if not of.startswith(f"{CANCELLED}/")}


def _failures(state: ModelState) -> str:
    """What failed since the batcher became active, and how to find out why."""
    numbers = _numbers(state.failed)
    if state.last_error is None or state.last_error_ms is None:
        return f"{numbers}, since the batcher became active"
    ago = duration(state.last_error_ms / 1000)
    return (
        f"{numbers}, since the batcher became active. The last error, {ago} ago: "
        f"{printable(state.last_error)}; the log of its worker says more"
    )


def _numbers(requests: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {printable(reason)}" for reason, number in sorted(requests.items()))


def _row(state: ModelState) -> tuple[str, ...]:
    """The cells below `_HEADINGS`."""
    return (
        state.model,
        _waiting(state),
        _age(state),
        f"{state.batches_in_flight:,}",
        _processes(state),
        "yes" if state.batcher else "none",
        state.policy or "-",
        _dead(state),
        "?" if state.max_batch_size is None else f"up to {state.max_batch_size}",
    )


def _stepping_row(state: ModelState, stepping: SteppingReport) -> tuple[str, ...]:
    """The cells below `_STEPPING_HEADINGS`."""
    slots_in_use = min(state.batches_in_flight, stepping.slots)
    return (
        state.model,
        _waiting(state),
        _age(state),
        f"{slots_in_use:,} of {stepping.slots:,}",
        f"{state.batches_in_flight - slots_in_use:,}",
        _processes(state),
        "yes" if state.batcher else "none",
        _dead(state),
        *_times(stepping.first_us),
        *_times(stepping.gap_us),
    )


def _waiting(state: ModelState) -> str:
    """Requests, as the batcher reported last; entries if none reports, or if they came since."""
    if not (state.waiting and state.waiting_entries):
        return f"{state.waiting_entries:,}"
    return f"{state.waiting:,}" + (f", {state.delayed:,} delayed" if state.delayed else "")


def _sequences(report: SequencesReport | None) -> str:
    if report is None:
        return "-"
    waiting, slots = report.waiting_to_start, report.slots
    kept = f"{report.kept:,}" if slots is None else f"{report.kept:,} of {slots:,} slots"
    return kept + (f", {waiting:,} wait to start" if waiting else "")


def _dead(state: ModelState) -> str:
    return f"{state.dead:,}" + (f", {state.dead_dropped:,} dropped" if state.dead_dropped else "")


def _processes(state: ModelState) -> str:
    shown = [f"{state.workers:,}"] if state.workers or not state.loading else []
    if state.draining:
        shown.append(f"{state.draining:,} draining")
    return ", ".join([*shown, *(["loading"] if state.loading else [])])


def _age(state: ModelState) -> str:
    return "-" if state.oldest_ms is None else duration(state.oldest_ms / 1000)


def _times(quantiles_us: tuple[int, int] | None) -> tuple[str, str]:
    if quantiles_us is None:
        return "-", "-"
    p50_us, p99_us = quantiles_us
    return duration(p50_us / 1e6), duration(p99_us / 1e6)
