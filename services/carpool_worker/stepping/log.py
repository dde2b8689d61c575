"""The log of a stepping model: a summary a second at info, and a line for each request at debug.

Steps are not counted here: a summary shows what the metrics have counted since the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from carpool.store.steps import StepWrite
from carpool_worker.meter import WorkerMetrics
from carpool_worker.stepping.execution import StepExecution
from carpool_worker.summary_log import SummaryLog


class StepLog(SummaryLog):
    """One for a worker. Its replicas call `ended` and `dropped`, and its main thread `summarize_if_due`.

    `slots_in_use`: how many slots are in use, in all of its model processes.
    """

    def __init__(
        self, model: str, worker: str, metrics: WorkerMetrics, slots_in_use: Callable[[], int]
    ) -> None:
        super().__init__(model, worker)
        self._metrics = metrics
        self._slots_in_use = slots_in_use
        self._ended: Counter[str] = Counter()  # requests since the last summary, by status
        self._dropped = 0
        self._counted = metrics.step_counts()  # at the last summary

    def ended(self, replica: str, request: StepExecution, write: StepWrite) -> None:
        """A request has its final result, which `write` wrote."""
        assert write.result is not None
        status = write.result.status
        with self._lock:
            self._ended[status] += 1
        if self._is_debug:
            trace = request.execution.logged_trace
            self._log.debug("batch", **{status: 1}, **_figures(request, write), replica=replica, **trace)

    def dropped(self, requests: Sequence[StepExecution]) -> None:
        """Requests were answered by a batcher, because they expired or were withdrawn."""
        with self._lock:
            self._dropped += len(requests)

    def _summarize(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, Counter()
            dropped, self._dropped = self._dropped, 0
        before, counted = self._counted, self._metrics.step_counts()
        self._counted = counted
        steps = counted.steps - before.steps
        if steps or ended or dropped:
            self._log.info(
                "steps",
                steps=steps,
                step_ms_mean=round((counted.step_us - before.step_us) / max(1, steps) / 1000, 3),
                chunks=counted.chunks - before.chunks,
                ended=dict(ended),
                expired_or_withdrawn=dropped,
                slots_in_use=self._slots_in_use(),
                worker=self._worker,
            )


def _figures(request: StepExecution, write: StepWrite) -> dict[str, Any]:
    batch, streamed = write.batch, write.streamed
    figures: dict[str, Any] = {
        "batch": batch.id,
        "reason": batch.reason,
        "size": 1,
        "queue_ms": max(0, batch.dispatched_us - request.run.arrival_us) / 1000,
        "compute_ms": write.compute_us / 1000,
        "epoch": batch.epoch,
        "dead": 0 if write.dead_letter is None else 1,
    }
    if streamed is not None:
        figures["chunks"] = streamed.chunks
        figures["first_ms"] = streamed.first_us / 1000
        figures["gap_ms_mean"] = None if streamed.gap_us is None else streamed.gap_us / 1000
    return figures
