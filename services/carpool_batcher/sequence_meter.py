"""What a batcher measures of the sequences of stateful models. The numbers are the scheduler's."""

from __future__ import annotations

from typing import Final

from carpool.prometheus import CollectorRegistry, Counter, Gauge
from carpool.wire.report import SequencesReport

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
