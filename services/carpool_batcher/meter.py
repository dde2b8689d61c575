"""What a batcher measures: BatcherMetrics for the process, a Meter for each of its models.

Counters are kept once, in the metrics, where the report for `carpool top` reads them. The report's recent
latencies come from `recent_latency` and are in no metric; its gauges and l(n) come from the scheduler.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, get_args

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)
from carpool.messages.batches import Dispatch, DispatchReason
from carpool.messages.requests import Entry, Run
from carpool.messages.results import Refusal
from carpool.messages.settled import Failures, Streamed
from carpool.model_settings import ModelKind, ModelSettings
from carpool.prometheus import CollectorRegistry, Counter, Gauge
from carpool.service_metrics import DURATIONS_US, PERCENTS, SIZES, CommonMetrics, Histogram, counter_value
from carpool.wire.report import BatcherReport, Gauges, SequencesReport, SteppingReport, WantedReport
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.transit import RecentTimes
from carpool_batcher.core.missed_deadlines import CAUSES, Cause
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.recent_latency import RecentLatency, count_equal
from carpool_batcher.spans import BatcherSpans
from carpool_batcher.version_meter import VersionMeter

_GAUGES: Final = {  # in the order of wire.report.Gauges
    "carpool_waiting_requests": "Requests waiting to be dispatched",
    "carpool_waiting_bytes": "Bytes of the requests waiting to be dispatched",
    "carpool_oldest_request_seconds": "How long the oldest waiting request has waited",
    "carpool_in_flight_batches": "Batches dispatched and not settled",
    "carpool_in_flight_requests": "Requests in batches that are dispatched and not settled",
    "carpool_model_processes": "Model processes with a valid lease",
    "carpool_withheld_results": "Results withheld until earlier ones are delivered (preserve_ordering)",
    "carpool_delayed_requests": "Waiting requests that must not be dispatched yet (not_before)",
}
_IN_FLIGHT: Final = "in_flight"
# Status and reason of every answer that a batcher gives. Exported from zero, because Prometheus's rate()
# does not see the first increase of a series that did not exist before.
_ANSWERS: Final = (
    (INVALID_ARGUMENT, "input"),
    (INVALID_ARGUMENT, "cost"),
    (UNIMPLEMENTED, "input"),
    (RESOURCE_EXHAUSTED, "queue_size"),
    (RESOURCE_EXHAUSTED, "queue_bytes"),
    (RESOURCE_EXHAUSTED, "delayed"),
    (CANCELLED, "withdrawn"),
    (CANCELLED, _IN_FLIGHT),
    (DEADLINE_EXCEEDED, "waiting"),
    (DEADLINE_EXCEEDED, "early"),
    (DEADLINE_EXCEEDED, _IN_FLIGHT),
    (INTERNAL, "policy"),
    (INVALID_ARGUMENT, "sequence"),
    (ABORTED, "sequence"),
    (CANCELLED, "sequence"),
    (UNAVAILABLE, "paused"),
    (NOT_FOUND, "version"),
    (NOT_FOUND, _IN_FLIGHT),
)
_DISPATCH_REASONS: Final[tuple[DispatchReason, ...]] = get_args(DispatchReason)


class BatcherMetrics(CommonMetrics):
    """The metrics of a batcher process."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.queue = Histogram(
            "carpool_queue_seconds",
            "Time from a request's arrival to its dispatch",
            DURATIONS_US,
            1e-6,
            registry,
        )
        self.size = Histogram(
            "carpool_batch_requests", "Requests in a batch, except of stepping models", SIZES, 1, registry
        )
        self.fill = Histogram(
            "carpool_batch_fill_ratio",
            "Batch size divided by max_batch_size, or batch cost by max_batch_cost, whichever is larger; "
            "except of stepping models",
            PERCENTS,
            0.01,
            registry,
        )
        self.batches = Counter(
            "carpool_batches",
            "Batches dispatched, by the reason for dispatching them",
            ("model", "reason"),
            registry=registry,
        )
        self.missed = Counter(
            "carpool_missed_deadlines",
            "Requests that missed their deadlines, by cause",
            ("model", "cause"),
            registry=registry,
        )
        self.version_requests = Counter(
            "carpool_version_requests",
            "Requests that workers of a version answered: ok or failed",
            ("model", "version", "outcome"),
            registry=registry,
        )
        self.sequences = SequenceMetrics(registry)
        self.gauges = [Gauge(name, text, ("model",), registry=registry) for name, text in _GAUGES.items()]
        self.wanted = Gauge(
            "carpool_wanted_workers", "Workers that the model needs now (docs/scaling.md)",
            ("model",), registry=registry,
        )  # fmt: skip
        self.active = Gauge(
            "carpool_batcher_active", "1 if this batcher forms the model's batches, 0 if it is on standby",
            ("model",), registry=registry,
        )  # fmt: skip
        self.paused = Gauge(
            "carpool_paused", "1 if an operator has paused the model, else 0", ("model",), registry=registry
        )


class _Totals(NamedTuple):
    """Everything that was counted for a model since this process began."""

    batches: Mapping[str, int]
    requests: int
    fill_percent: int
    refused: Mapping[str, int]
    missed: Mapping[str, int]


class Meter:
    """One model's share of the metrics. A batch costs about 4 µs, and each run in it 0.5.

    `spans`: makes spans of its requests; None if none are exported.
    """

    def __init__(self, metrics: BatcherMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._queue = metrics.queue.of(model)
        self._size = metrics.size.of(model)
        self._fill = metrics.fill.of(model)
        self._lateness = metrics.lease_lateness.of(model)
        self._answered: dict[tuple[str, str], Counter] = {}
        for status, reason in _ANSWERS:
            self._counter_of(status, reason)
        self._batches = {reason: metrics.batches.labels(model, reason) for reason in _DISPATCH_REASONS}
        self._requests_for_slots = 0  # each alone in its batch, so it is not in the histogram of sizes
        self._missed = {cause: metrics.missed.labels(model, cause) for cause in CAUSES}
        self._failed: Counts[str] = Counts()
        self._last_error: tuple[str, int] | None = None  # and when it was raised
        self._totals_known: _Totals | None = None  # None: something was counted since
        self._exported: tuple[Gauges, bool] | None = None
        self._wanted: int | None = None  # workers, as exported
        record = metrics.record_spans
        self.spans = None if record is None else BatcherSpans(model, record, self._queue.exemplify)
        self._sequences = SequenceMeter(metrics.sequences, model)
        self.versions = VersionMeter(metrics.version_requests, model)
        self.activated(0)
        self.deactivated()

    def dispatched(self, batches: Sequence[Dispatch], scheduler: Scheduler, now_us: int) -> None:
        """These batches are in flight now."""
        self._totals_known = None
        for batch in batches:
            self._batches[batch.reason].inc()
        if scheduler.kind is ModelKind.STEPPING:
            self._requests_for_slots += len(batches)
        else:
            self._size.observe([batch.size for batch in batches])
            self._fill.observe([_fill_percent(scheduler.settings, batch.runs) for batch in batches])
        for arrival_us, number in count_equal((run.arrival_us, len(run)) for b in batches for run in b.runs):
            self._queue.observe_equal(max(0, now_us - arrival_us), number)

    def read(self, entries: Sequence[Entry], now_us: int) -> None:
        """These entries were read, and were awaited when they arrived. One of them, from the middle, says how
        long reading takes."""
        self._reading.observe(now_us - entries[len(entries) // 2].arrival_us)

    def woken(self, late_us: int) -> None:
        """A time had come at which the batcher was to act."""
        self._waking.observe(late_us)

    def refused(self, refusals: Sequence[Refusal]) -> None:
        """These requests were answered without being dispatched."""
        self._totals_known = None
        for refusal in refusals:
            self._counter_of(refusal.status, refusal.reason).inc(len(refusal.correlation_ids))

    def answered_in_flight(self, status: str, requests: int) -> None:
        """`requests` requests were answered while their batch was in flight: expired or withdrawn."""
        self._totals_known = None
        self._counter_of(status, _IN_FLIGHT).inc(requests)

    def missed(self, causes: Mapping[Cause, int]) -> None:
        """Requests missed their deadlines: how many for each cause."""
        self._totals_known = None
        for cause, number in causes.items():
            self._missed[cause].inc(number)

    def settled(self, batch: InFlightBatch, now_us: int) -> None:
        """This batch is settled."""
        self._recent.observe(batch.arrivals, now_us)

    def failed(self, failures: Failures, now_us: int) -> None:
        """Requests of a batch that settled have errors as their results."""
        self._failed.update(failures.statuses)
        if failures.error:
            self._last_error = failures.error, now_us

    def stream_ended(self, streamed: Streamed, now_us: int) -> None:
        """The request of a batch that settled was streamed."""
        self._chunks.stream_ended(streamed.chunks)
        self._recent_first.observe_one(streamed.first_us, now_us)
        if streamed.gap_us is not None:
            self._recent_gap.observe_one(streamed.gap_us, now_us)

    def chunks_written(self, written: Mapping[str, int]) -> None:
        """How many chunks of the streams in flight are written, by batch."""
        self._chunks.written(written)

    def renewed(self, late_us: int) -> None:
        """The lease was renewed, `late_us` later than planned."""
        self._lateness.observe([max(0, late_us)])

    def update_gauges(self, scheduler: Scheduler, now_us: int) -> None:
        """Update the gauges; called regularly while this batcher is active."""
        self._sequences.export(sequences_report(scheduler))
        if scheduler.wanted.now.workers != self._wanted:
            self._wanted = scheduler.wanted.now.workers
            self._metrics.wanted.labels(self._model).set(self._wanted)
        values, is_paused = gauges(scheduler, now_us), scheduler.pause is not None
        if (values, is_paused) == self._exported:  # of an idle model nothing changes, and this takes 30 µs
            return
        self._exported = values, is_paused
        for gauge, value in zip(self._metrics.gauges, values, strict=True):
            gauge.labels(self._model).set(value)
        self._metrics.active.labels(self._model).set(1)
        self._metrics.paused.labels(self._model).set(int(is_paused))

    def report(
        self,
        batcher: str,
        scheduler: Scheduler,
        now_us: int,
        *,
        rejected_settings: str = "",
        policies: Sequence[str] = (),
    ) -> BatcherReport:
        """What this batcher did since it took over, and what it sees now."""
        curve = scheduler.learned.latency.curve
        totals, before = self._totals(), self._totals_before
        return BatcherReport(
            batcher,
            self._began_us,
            now_us,
            gauges(scheduler, now_us),
            _increase(before.batches, totals.batches),
            totals.requests - before.requests,
            totals.fill_percent - before.fill_percent,
            _increase(before.refused, totals.refused),
            () if curve is None else tuple(curve.shown),
            self._recent.quantiles_us(now_us),
            rejected_settings,
            tuple(policies),
            scheduler.settings.policy,
            scheduler.learned.transit_us,
            missed=_increase(before.missed, totals.missed),
            stepping=self._stepping_report(scheduler, now_us),
            delays_us=(self._reading.median_us, self._waking.median_us),
            sequences=sequences_report(scheduler),
            failed=dict(self._failed),
            last_error=self._last_error,
            versions=self.versions.reports,
            wanted=WantedReport(*scheduler.wanted.now),
        )

    def _stepping_report(self, scheduler: Scheduler, now_us: int) -> SteppingReport | None:
        if scheduler.kind is not ModelKind.STEPPING:
            return None
        return SteppingReport(
            scheduler.model_processes * scheduler.settings.max_batch_size,
            self._chunks.total(),
            self._recent_first.quantiles_us(now_us),
            self._recent_gap.quantiles_us(now_us),
        )

    def activated(self, now_us: int) -> None:
        """This batcher is active from now on; its report counts from here."""
        self._began_us = now_us
        self._totals_before = self._totals()
        self._recent = RecentLatency(now_us)
        self._reading, self._waking = RecentTimes(), RecentTimes()
        self._failed.clear()
        self.versions.reset()
        self._last_error = None
        self._recent_first, self._recent_gap = RecentLatency(now_us), RecentLatency(now_us)
        self._chunks = ChunkCount()

    def deactivated(self) -> None:
        """This batcher is on standby; the gauges are exported by the active one."""
        self._exported = None
        if self._wanted is not None:
            self._wanted = None
            self._metrics.wanted.remove(self._model)
        self._sequences.deactivated()
        self._metrics.active.labels(self._model).set(0)
        for gauge in (*self._metrics.gauges, self._metrics.paused):
            gauge.remove(self._model)

    def forget(self) -> None:
        """The model is removed: export nothing of it any more. After `deactivated`."""
        metrics = self._metrics
        for histogram in (metrics.queue, metrics.size, metrics.fill, metrics.lease_lateness):
            histogram.forget(self._model)
        counters = (metrics.batches, metrics.missed, metrics.answered, metrics.sequences.changes)
        metrics.version_requests.remove_by_labels({"model": self._model})
        for family in (*counters, metrics.active):
            family.remove_by_labels({"model": self._model})

    def _counter_of(self, status: str, reason: str) -> Counter:
        counter = self._answered.get((status, reason))
        if counter is None:
            counter = self._answered[status, reason] = self._metrics.answered.labels(
                self._model, status, reason
            )
        return counter

    def _totals(self) -> _Totals:
        """Reading them takes 200 µs, so those of an idle model are remembered."""
        if self._totals_known is None:
            answered = self._answered.items()
            self._totals_known = _Totals(
                {reason: counter_value(counter) for reason, counter in self._batches.items()},
                self._size.sum + self._requests_for_slots,
                self._fill.sum,
                {f"{status}/{reason}": counter_value(counter) for (status, reason), counter in answered},
                {cause: counter_value(counter) for cause, counter in self._missed.items()},
            )
        return self._totals_known


def gauges(scheduler: Scheduler, now_us: int) -> Gauges:
    """The model as it is now. O(batches in flight)."""
    oldest_us = scheduler.oldest_arrival_us()
    queue, in_flight = scheduler.queue, scheduler.in_flight.batches
    return Gauges(
        queue.count,
        queue.bytes,
        0.0 if oldest_us is None else max(0, now_us - oldest_us) / 1e6,
        len(in_flight),
        sum(batch.size for batch in in_flight.values()),
        scheduler.model_processes,
        queue.withheld,
        queue.delayed.requests,
    )


def _fill_percent(settings: ModelSettings, runs: Sequence[Run]) -> int:
    """How full a batch of these runs is, by size or by cost, whichever is nearer to its limit."""
    percent = 100 * sum(map(len, runs)) // settings.max_batch_size
    if settings.max_batch_cost is not None:
        percent = max(percent, 100 * sum(run.cost * len(run) for run in runs) // settings.max_batch_cost)
    return min(percent, 100)


def sequences_report(scheduler: Scheduler) -> SequencesReport | None:
    """What is reported of a model's sequences; None if it has none."""
    if not scheduler.kind.has_sequences:
        return None
    slots = scheduler.processes.slots if scheduler.kind is ModelKind.BOUND else None
    return SequencesReport(*scheduler.sequences.census(), slots)


def _increase(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What was added to each total; those to which nothing was added are left out."""
    return {name: added for name, total in now.items() if (added := total - before.get(name, 0))}


class ChunkCount:
    """How many chunks of streams were written since a batcher became active.

    Counts a stream while it is in flight, as often as Redis is asked, and exactly when it ends.
    """

    def __init__(self) -> None:
        self._of_ended = 0
        self._in_flight: int | None = None  # None: not known yet
        self._shown = 0

    def stream_ended(self, chunks: int) -> None:
        """A stream with this many chunks ended. The next `written` does not have it."""
        self._of_ended += chunks

    def written(self, chunks: Mapping[str, int]) -> None:
        """How many chunks of the streams in flight are written, by batch. Those of the first call were
        written in the time of a previous batcher."""
        in_flight = sum(chunks.values())
        if self._in_flight is None:
            self._of_ended -= in_flight
        self._in_flight = in_flight

    def total(self) -> int:
        """All of them. It never falls: a stream that was just committed is in neither sum, and one that was
        lost never will be."""
        self._shown = max(self._shown, self._of_ended + (self._in_flight or 0))
        return self._shown


_CHANGES: Final = ("started", "ended", "broken")  # the counters of SequencesReport


class SequenceMetrics:
    """The metrics of sequences, of all models of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.kept = Gauge(
            "carpool_kept_sequences",
            "Sequences that were begun, and neither ended nor broke",
            ("model",),
            registry=registry,
        )
        self.waiting_to_start = Gauge(
            "carpool_sequences_waiting_to_start",
            "Sequences that wait to start, because max_candidate_sequences are kept",
            ("model",),
            registry=registry,
        )
        self.changes = Counter(
            "carpool_sequences",
            "Sequences that started, ended or broke",
            ("model", "change"),
            registry=registry,
        )


class SequenceMeter:
    """One model's share of them."""

    def __init__(self, metrics: SequenceMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._exported: SequencesReport | None = None

    def export(self, report: SequencesReport | None) -> None:
        """Export what changed since the last report of this batcher. None: the model is not stateful."""
        before = self._exported
        if report is None or report == before:
            return
        self._exported = report
        self._metrics.kept.labels(self._model).set(report.kept)
        self._metrics.waiting_to_start.labels(self._model).set(report.waiting_to_start)
        for change in _CHANGES:
            counted = 0 if before is None else getattr(before, change)
            self._metrics.changes.labels(self._model, change).inc(getattr(report, change) - counted)

    def deactivated(self) -> None:
        """This batcher is on standby, and counts from 0 when it takes over again."""
        if self._exported is not None:
            self._exported = None
            self._metrics.kept.remove(self._model)
            self._metrics.waiting_to_start.remove(self._model)
