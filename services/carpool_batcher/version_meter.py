"""What workers of each version of a model did: figures by which two versions are compared."""

from __future__ import annotations

from typing import Final

from carpool.messages.settled import BatchSettled
from carpool.prometheus import Counter
from carpool.wire.report import VersionReport
from carpool_batcher.core.in_flight_batch import InFlightBatch

VERSIONS_MAX: Final = 16  # of a model in the metrics; what others did counts for OTHER
OTHER: Final = "other"
_NOTHING: Final = VersionReport(0, 0, 0, 0, 0)


class VersionMeter:
    """Counts for one model since `reset`, and in the metrics. About 2 us for each batch of a model whose
    workers name versions; nothing for others."""

    def __init__(self, requests: Counter, model: str) -> None:
        self._requests = requests
        self._model = model
        self._exported: set[str] = set()
        self.reports: dict[str, VersionReport] = {}

    def reset(self) -> None:
        """Count from 0."""
        self.reports = {}

    def settled(self, version: str, event: BatchSettled, batch: InFlightBatch) -> None:
        """A worker of this version committed a batch."""
        if version not in self.reports and len(self.reports) >= VERSIONS_MAX:
            version = OTHER
        failed = 0 if event.failures is None else sum(event.failures.statuses.values())
        total_us = sum([number * max(0, event.settled_us - at_us) for at_us, number in batch.arrivals])
        of = self.reports.get(version, _NOTHING)
        self.reports[version] = VersionReport(
            of.requests + batch.size,
            of.failed + failed,
            of.batches + 1,
            of.total_us + total_us,
            of.compute_us + event.compute_us,
        )
        labels = (self._model, version if self._is_exported(version) else OTHER)
        self._requests.labels(*labels, "ok").inc(max(0, batch.size - failed))
        if failed:
            self._requests.labels(*labels, "failed").inc(failed)

    def _is_exported(self, version: str) -> bool:
        """The process exports the first versions that it knew."""
        if len(self._exported) < VERSIONS_MAX:
            self._exported.add(version)
        return version in self._exported
