"""The report that an active batcher publishes about once a second, for `carpool top` and `carpool config`.

Its counters start at 0 when the batcher takes the lease, so a rate is the difference between two reports of
the same batcher, divided by the time between them.

Why: docs/decisions/0022.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from pydantic import TypeAdapter, ValidationError


class Gauges(NamedTuple):
    """The current state of a model, as its active batcher sees it."""

    waiting: int
    waiting_bytes: int
    oldest_s: float  # age of the request that has waited longest; 0 if none waits
    batches_in_flight: int
    requests_in_flight: int
    model_processes: int
    withheld: int = 0  # results (`preserve_ordering`)
    delayed: int = 0  # of those waiting, the ones that must not be dispatched yet (`not_before`)


class SteppingReport(NamedTuple):
    """What a batcher reports of a stepping model.

    `chunks` is a counter; the others are p50 and p99 over the streams that ended in the last 10 to 20 s: the
    batcher learns of them when a stream ends.
    """

    slots: int  # of all model processes
    chunks: (
        int  # of streams in flight those that are written; of all that ended, counted before any are merged
    )
    first_us: tuple[int, int] | None  # time from arrival to the first chunk
    gap_us: tuple[int, int] | None  # mean time between two chunks of a stream


class SequencesReport(NamedTuple):
    """What a batcher reports of a stateful or bound model. `started`, `ended` and `broken` are counters."""

    kept: int  # begun, and neither ended nor broken
    waiting_to_start: int  # because `max_candidate_sequences` are kept, or no process has a free slot
    started: int
    ended: int  # with their last request, by `end_sequences`, or because they were idle
    broken: int  # a request did not succeed, or the process that had the state of a bound model ended
    slots: int | None = None  # of all model processes of a bound model


class VersionReport(NamedTuple):
    """What workers of one version did, in counters. The times are added up: `total_us`, from arrival to
    result, over requests; `compute_us`, of executions, over batches."""

    requests: int
    failed: int
    batches: int
    total_us: int
    compute_us: int


class WantedReport(NamedTuple):
    """How many workers a model needs, and why (docs/scaling.md). `processes`: of all of them together."""

    workers: int
    processes: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatcherReport:
    """What a batcher publishes. Counters count since `began_us`; times are Redis's."""

    batcher: str
    began_us: int
    at_us: int
    gauges: Gauges
    batches: dict[str, int]  # batches dispatched, by reason
    requests: int  # requests in these batches
    fill_percent: int  # sum of the fill of these batches, in percent of a full batch
    refused: dict[str, int]  # requests refused, or expired in flight, by "STATUS/reason"
    learned: tuple[tuple[int, int], ...]  # of l(n): some sizes, ascending, and the time of each (µs)
    quantiles_us: tuple[int, int] | None  # p50 and p99 of the latency over the last 10 to 20 s
    rejected_settings: str = ""  # why the settings in Redis are not in effect; empty if they are
    policies: tuple[str, ...] = ()  # custom policies that this batcher has loaded
    policy: str = ""  # the policy in force
    transit_us: tuple[int, int] = (0, 0)  # of a batch to the worker and back, what half and nine of ten take
    missed: dict[str, int] = field(default_factory=dict)  # requests that missed their deadlines, by cause
    stepping: SteppingReport | None = None  # None: it is not a stepping model
    # How long it takes half of the requests from their arrival until the batcher has read them, where it does
    # not wait on purpose, and how late it is half of the times when it acts because a time has come.
    delays_us: tuple[int, int] = (0, 0)
    sequences: SequencesReport | None = None  # None: it is neither a stateful nor a bound model
    failed: dict[str, int] = field(
        default_factory=dict
    )  # requests that workers answered with errors, by status
    last_error: tuple[str, int] | None = None  # what the model raised last (`Failures`), and when
    versions: dict[str, VersionReport] = field(
        default_factory=dict
    )  # what workers of each did, if they have any
    wanted: WantedReport | None = None  # None: the batcher is of another version

    def encode(self) -> str:
        """The report as JSON."""
        values = {name: getattr(self, name) for name in _FIELDS}  # `asdict` would copy what they hold
        for name in ("gauges", "stepping", "sequences", "wanted"):
            if values[name] is not None:
                values[name] = values[name]._asdict()
        return json.dumps(values, separators=(",", ":"))

    @staticmethod
    def decode(report: bytes) -> BatcherReport | None:
        """What `encode` wrote; None if it is not understood, such as a report by another version."""
        try:
            return _DECODER.validate_json(report)
        except ValidationError:
            return None


_FIELDS: Final = tuple(field.name for field in fields(BatcherReport))
_DECODER: Final = TypeAdapter(BatcherReport)
