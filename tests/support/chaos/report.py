"""The tables of `make chaos`."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from support.chaos.client import CLIENTS
from support.chaos.faults import FAULTS
from support.chaos.gateway_faults import GATEWAY_FAULTS
from support.chaos.gateway_run import GATEWAYS, GatewayOutcome
from support.chaos.run import LEASE_S, PRODUCERS, Outcome
from support.chaos.streams import LATE_S, StreamReport

Outcomes = Mapping[str, Sequence[Outcome]]  # by fault
GatewayOutcomes = Mapping[str, Sequence[GatewayOutcome]]

_HEAD: Final = """\
# What happens when something fails

Written by `make chaos CHAOS=--write`, which anyone can repeat.

Each run has a real Redis, two batchers, two workers with a lease of {lease} s, and {producers} producers:
processes that send requests in every form which the protocol has, and send again, under the same
correlation ID, what Redis did not confirm. One more enqueues, and at the end another process reads the
results of its requests by their IDs. The model answers with a hash of correlation ID and body, so that
a result that went to another request shows. A fault is inflicted at a random moment, several times in a run.
Then the load ends, and every request is looked for: the history of what was sent is in files of the
producers, not in Redis.

Beside them, one more producer means harm. It sends entries that are within all limits and cost a batcher
much, each kind in turn: lanes that expire together, misspelt fields, malformed starts and ends of sequences,
and others. Its requests do not count, but nothing of them may be left over.

- lost: accepted, and without a result; duplicated: more final results than were asked for; misrouted: a
  result of another request; left over: keys or pending batches that should not be there when all is answered.
- recovery: from the fault until a new request is answered, or, where a worker or its model process is the
  victim, until all batches that were in flight are settled. From the end of the fault where it has one. Its
  bound for a worker: the lease, and the time of two full batches, one request at a time: what killed a worker
  must not take others with it.
- bound: the longest recovery that is intended; kept: whether none was longer, and nothing above was wrong.
  Where all counts are 0, `no` is a late recovery.
- memory: the most that a process, or Redis, had.

Measured on {machine}; seeds {seeds}.

"""
_COLUMNS: Final = (
    "fault", "runs", "requests", "lost", "duplicated", "misrouted", "left over", "recovery, median", "worst",
    "bound", "kept", "memory of Redis", "of a batcher", "of a worker",
)  # fmt: skip

_QUOTED_COLUMNS: Final = (
    "fault", "runs", "requests", "lost", "duplicated", "misrouted", "recovery, median", "worst"
)  # fmt: skip
_QUOTED: Final = (
    "the active batcher is killed",
    "a worker is killed",
    "a model process is killed",
    "Redis is killed, appendfsync always",
    "the network carries no replies for 5 s",
    "the primary is killed, with Sentinel",
    "any of these that leave the network alone, at random",
)
_QUOTED_TABLE: Final = re.compile(r"^\| fault \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


_GATEWAY_TITLE: Final = "## Behind gateways\n"
_GATEWAY_HEAD: Final = (
    _GATEWAY_TITLE
    + """
Here {gateways} gateways are added, and beside the producers there are {clients} HTTP clients. They send
bodies, bodies with an Idempotency-Key, also with `Prefer: respond-async`, and several lines in one call. What
has a key is sent again, to another gateway, until it has a result, and sometimes although it has one. The
model records each execution in a file.

- sent again: calls beyond the first; refused: answers 429, 502, 503 and 504, before or instead of a result;
  broken: the connection ended before the answer to a request without a key.
- lost: no answer on an open connection, or with a key no result; misrouted: with a result of another request;
  different: two results of one key; repeated: with a key, and executed more than once; failed: with any other
  error. Lost, duplicated and misrouted requests of the producers are in the column for these.
- left over: also bodies and connections that a gateway still holds when all clients have ended.

In the runs of the last row two more workers serve a model that steps, and for each front end a reader reads
one text of it after the other, through each gateway in turn. The text depends on its prompt alone, so a gap
shows, and what comes twice. The second table has what became of these texts.

- failed: with an error on the stream; refused: with an answer 429, 502, 503 or 504 in place of it; broken:
  with a connection whose gateway was killed, or had ended before the text began.
- wrong: not the beginning of the text, or not all of it at its end; cut off: with a connection of a gateway
  that had not ended; unexpected: refused with another answer; late: without an end for {late} s.
- longest: the time that a text took, with all faults that it met.

Measured on {machine}; seeds {seeds}.

"""
)
_GATEWAY_COLUMNS: Final = (
    "fault", "runs", "requests of HTTP", "sent again", "refused", "broken", "lost", "misrouted", "different",
    "repeated", "failed", "requests of producers", "wrong", "left over", "recovery, median", "worst", "bound",
    "kept", "memory of a gateway",
)  # fmt: skip


_STREAM_COLUMNS: Final = (
    "front end", "texts", "complete", "failed", "refused", "broken", "wrong", "cut off", "unexpected", "late",
    "longest",
)  # fmt: skip


def document(outcomes: Outcomes, seeds: str, before: str = "") -> str:
    """The whole document. `before`: as it was, of which the part about gateways is kept."""
    head = _HEAD.format(lease=LEASE_S, producers=PRODUCERS, machine=_machine(), seeds=seeds)
    notes = [
        "",
        "Rows in brackets are not covered by what [Carpool promises](../README.md#what-carpool-promises):",
        "there the table shows what was lost.",
    ]
    _, title, gateways = before.partition(_GATEWAY_TITLE)
    return "\n".join([head + "\n".join(table(outcomes)), *notes, *([title + gateways] if title else [""])])


def with_gateways(outcomes: GatewayOutcomes, seeds: str, before: str) -> str:
    """The document with a new part about gateways. `before`: as it was."""
    first, _, _ = before.partition(f"\n{_GATEWAY_TITLE}")
    head = _GATEWAY_HEAD.format(
        gateways=GATEWAYS, clients=CLIENTS, machine=_machine(), seeds=seeds, late=int(LATE_S)
    )
    return "\n".join([first.rstrip("\n"), "", head + "\n".join(gateway_tables(outcomes)), ""])


def gateway_tables(outcomes: GatewayOutcomes) -> Iterator[str]:
    """The lines of the table of gateways, and of that of streams if any were read."""
    yield from gateway_table(outcomes)
    reports: dict[str, list[StreamReport]] = {}
    for outcome in itertools.chain.from_iterable(outcomes.values()):
        for name, report in outcome.of_readers.items():
            reports.setdefault(name, []).append(report)
    if reports:
        yield ""
        yield f"| {' | '.join(_STREAM_COLUMNS)} |"
        yield "|---|" + "---:|" * (len(_STREAM_COLUMNS) - 1)
        for name, of_front_end in sorted(reports.items()):
            yield f"| {' | '.join(_stream_cells(name, of_front_end))} |"


def _stream_cells(name: str, reports: Sequence[StreamReport]) -> Iterator[str]:
    yield name
    for kind in ("texts", "complete", "failed", "refused", "broken"):
        yield f"{sum(getattr(report, kind) for report in reports):,}"
    for kind in ("wrong", "cut_off", "unexpected", "late"):
        yield f"{sum(len(getattr(report, kind)) for report in reports):,}"
    yield _seconds(max(report.longest_s for report in reports))


def gateway_table(outcomes: GatewayOutcomes) -> Iterator[str]:
    """The lines of the table of gateways."""
    yield f"| {' | '.join(_GATEWAY_COLUMNS)} |"
    yield "|---|" + "---:|" * (len(_GATEWAY_COLUMNS) - 1)
    for name, of_fault in outcomes.items():
        if of_fault:
            yield f"| {' | '.join(_gateway_cells(name, of_fault))} |"


def _gateway_cells(name: str, outcomes: Sequence[GatewayOutcome]) -> Iterator[str]:
    reports = [outcome.of_clients for outcome in outcomes]
    producers = [outcome.of_producers for outcome in outcomes]
    recoveries_s = [seconds for outcome in producers for seconds in outcome.recoveries_s]
    yield name
    yield str(len(outcomes))
    for kind in ("requests", "resent", "refused", "broken"):
        yield f"{sum(getattr(report, kind) for report in reports):,}"
    for kind in ("lost", "misrouted", "different", "repeated", "failed"):
        yield f"{sum(len(getattr(report, kind)) for report in reports):,}"
    yield f"{sum(outcome.report.accepted for outcome in producers):,}"
    yield f"{sum(map(_wrong_of, producers)):,}"
    yield f"{sum(len(outcome.left_over) for outcome in producers):,}"
    yield _seconds(median(recoveries_s) if recoveries_s else None)
    yield _seconds(max(recoveries_s, default=None))
    yield _seconds(GATEWAY_FAULTS[name].bound_s)
    yield "yes" if all(is_kept_by_gateways(name, outcome) for outcome in outcomes) else "no"
    yield f"{max(outcome.memory_mib['gateway'] for outcome in producers):,.0f} MiB"


def _wrong_of(outcome: Outcome) -> int:
    report = outcome.report
    return sum(map(len, (report.lost, report.duplicated, report.misrouted, report.unexpected)))


def is_kept_by_gateways(name: str, outcome: GatewayOutcome) -> bool:
    """Whether a run with gateways kept what is promised, and recovered in time."""
    fault = GATEWAY_FAULTS[name]
    is_in_time = max(outcome.of_producers.recoveries_s, default=0.0) <= fault.bound_s
    return is_in_time and outcome.is_faultless(executes_once=fault.executes_once)


def gateway_progress(name: str, outcome: GatewayOutcome, seed: int) -> str:
    """A line for one run with gateways."""
    verdict = "kept" if is_kept_by_gateways(name, outcome) else "NOT KEPT"
    producers = outcome.of_producers
    recoveries = ", ".join(map(_seconds, producers.recoveries_s)) or "-"
    return (
        f"{verdict}: {name}, seed {seed}: {outcome.of_clients}; producers: {producers.report}; "
        f"left over: {', '.join(producers.left_over) or 'nothing'}; recovered in {recoveries}"
        + "".join(f"\n  {name}: {report}" for name, report in outcome.of_readers.items())
    )


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}"


def table(outcomes: Outcomes, columns: Sequence[str] = _COLUMNS) -> Iterator[str]:
    """The lines of a table with these columns."""
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    for name, of_fault in outcomes.items():
        if of_fault:
            cells = dict(zip(_COLUMNS, _cells(name, of_fault), strict=True))
            yield f"| {' | '.join([cells[column] for column in columns])} |"


def quoted(outcomes: Outcomes, text: str) -> str:
    """A document whose table of faults is replaced by one of the same columns, with some of these."""
    rows = table({name: outcomes[name] for name in _QUOTED}, _QUOTED_COLUMNS)
    replaced, count = _QUOTED_TABLE.subn(lambda _: "\n".join(rows), text)
    if count != 1:
        raise ValueError(f"{count} tables begin with a column `fault`, but one should")
    return replaced


def _cells(name: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    fault, reports = FAULTS[name], [outcome.report for outcome in outcomes]
    recoveries_s = [seconds for outcome in outcomes for seconds in outcome.recoveries_s]
    yield name if fault.is_covered else f"({name})"
    yield str(len(outcomes))
    yield f"{sum(report.accepted for report in reports):,}"
    for kind in ("lost", "duplicated", "misrouted"):
        yield f"{sum(len(getattr(report, kind)) for report in reports):,}"
    yield f"{sum(len(outcome.left_over) for outcome in outcomes):,}"
    yield _seconds(median(recoveries_s) if recoveries_s else None)
    yield _seconds(max(recoveries_s, default=None))
    yield _seconds(fault.bound_s)
    yield "yes" if all(is_kept(name, outcome) for outcome in outcomes) else "no"
    for kind in ("Redis", "batcher", "worker"):
        yield f"{max(outcome.memory_mib[kind] for outcome in outcomes):,.0f} MiB"


def is_kept(name: str, outcome: Outcome) -> bool:
    """Whether a run kept what is promised, and recovered in time. Where the promise does not cover the fault,
    requests may be lost."""
    fault, report = FAULTS[name], outcome.report
    is_in_time = fault.bound_s is None or max(outcome.recoveries_s, default=0.0) <= fault.bound_s
    if fault.is_covered:
        return is_in_time and outcome.is_faultless
    return is_in_time and not (report.duplicated or report.misrouted or report.unexpected)


def progress(name: str, outcome: Outcome, seed: int) -> str:
    """A line for one run."""
    report = outcome.report
    recoveries = ", ".join(map(_seconds, outcome.recoveries_s)) or "-"
    verdict = "kept" if is_kept(name, outcome) else "NOT KEPT"
    return (
        f"{verdict}: {name}, seed {seed}: {report.accepted:,} accepted, {report.ok:,} ok, "
        f"{report.error} errors, {len(report.lost)} lost, {len(report.duplicated)} duplicated, "
        f"{len(report.misrouted)} misrouted, "
        f"{len(report.unexpected)} unexpected, left over: {', '.join(outcome.left_over) or 'nothing'}; "
        f"recovered in {recoveries}"
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
