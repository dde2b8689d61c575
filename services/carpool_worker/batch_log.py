"""The log of committed batches: a summary a second at info, and a line for each batch at debug.

A line costs 30 µs and a system call, and adding to the summary 5 µs.

Why: docs/decisions/0048.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from carpool.messages.batches import Batch
from carpool_worker.summary_log import SummaryLog


class _Totals:
    """What was committed since the last summary."""

    def __init__(self) -> None:
        self.batches = 0
        self.requests = 0
        self.dead = 0
        self.error = ""
        self.statuses: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.queue_us_total = self.queue_us_max = 0
        self.compute_us_total = self.compute_us_max = 0


class BatchLog(SummaryLog):
    """One for a worker. Its committers call `committed`, and its main thread `summarize_if_due`."""

    def __init__(self, model: str, worker: str) -> None:
        super().__init__(model, worker)
        self._totals = _Totals()

    def committed(
        self,
        replica: str,
        batch: Batch,
        statuses: Mapping[str, int],
        compute_us: int,
        dead: int,
        error: str = "",
        waited_us: int = 0,
        trace: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`replica` committed a batch. `statuses` counts its results by status, `dead` its dead letters.
        `error`: what failed last in it. `waited_us`: for how long it waited for a model process. `trace`: the
        IDs of its span, if it has one.

        The queue delay of a batch is that of its oldest request, with that wait.
        """
        oldest_us = min((run.arrival_us for run in batch.runs), default=batch.dispatched_us)
        queue_us = max(0, batch.dispatched_us - oldest_us) + waited_us
        size = batch.size
        with self._lock:
            totals = self._totals
            totals.batches += 1
            totals.requests += size
            totals.dead += dead
            totals.error = error or totals.error
            totals.reasons[batch.reason] += 1
            for status, count in statuses.items():
                totals.statuses[status] += count
            totals.queue_us_total += queue_us
            totals.queue_us_max = max(totals.queue_us_max, queue_us)
            totals.compute_us_total += compute_us
            totals.compute_us_max = max(totals.compute_us_max, compute_us)
        if self._is_debug:
            self._log.debug(
                "batch",
                batch=batch.id,
                reason=batch.reason,
                size=size,
                **statuses,
                queue_ms=queue_us / 1000,
                compute_ms=compute_us / 1000,
                epoch=batch.epoch,
                dead=dead,
                replica=replica,
                **trace,
            )

    def _summarize(self) -> None:
        with self._lock:
            totals, self._totals = self._totals, _Totals()
        if totals.batches:
            self._log.info(
                "batches",
                batches=totals.batches,
                requests=totals.requests,
                size_mean=round(totals.requests / totals.batches, 1),
                statuses=dict(totals.statuses),
                reasons=dict(totals.reasons),
                queue_ms_mean=round(totals.queue_us_total / totals.batches / 1000, 3),
                queue_ms_max=totals.queue_us_max / 1000,
                compute_ms_mean=round(totals.compute_us_total / totals.batches / 1000, 3),
                compute_ms_max=totals.compute_us_max / 1000,
                dead=totals.dead,
                **({"error": totals.error} if totals.error else {}),
                worker=self._worker,
            )
