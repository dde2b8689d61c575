"""What a worker measures, of the one model it serves."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Final

from prometheus_client import Counter, Gauge

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)
from carpool.metrics import DURATIONS_US, BucketCounts, CommonMetrics, Histogram
from carpool_worker.codec import Job

# Why a request that reached a worker got its status. Shown from zero: Prometheus notices no first value.
_USUAL: Final = {
    OK: "",
    DEADLINE_EXCEEDED: "at_worker",
    INVALID_ARGUMENT: "input",
    ABORTED: "dead_letter",
    INTERNAL: "model",
}
# What only a model says. It may invent a status for each request, and then they are not counted one by one.
_MODELS_OWN: Final = frozenset((RESOURCE_EXHAUSTED, CANCELLED, UNAVAILABLE, UNIMPLEMENTED, NOT_FOUND))


class WorkerMetrics(CommonMetrics):
    """The families of a worker process, and its model's share of them.

    A committed batch costs some 5 µs here, and each request in it 0.3.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._request = self._histogram("carpool_request_seconds", "From a request's arrival to its result")
        self._input = self._histogram(
            "carpool_compute_input_seconds", "Decoding a batch's bodies for the model"
        )
        self._infer = self._histogram("carpool_compute_infer_seconds", "The model's work on a batch")
        self._output = self._histogram(
            "carpool_compute_output_seconds", "Encoding a batch's results and committing them"
        )
        self._lateness = self.lease_lateness.of(model)
        for status, reason in _USUAL.items():
            self.answered.labels(model, status, reason)
        self._executions = self._counter(
            "carpool_executions", "Frames that the model worked on: one for a batch, mostly"
        )
        self._redelivered = self._counter("carpool_redeliveries", "Batches taken over from another worker")
        self._fenced = self._counter(
            "carpool_fenced_commits", "Commits that came too late: the batch was another worker's by then"
        )
        self._dead = self._counter("carpool_dead_letters", "Requests given up, and kept with the reason")
        self._deaths = self._counter("carpool_model_process_deaths", "Model processes that ended unasked")
        self.in_hand: Gauge = Gauge(
            "carpool_batches_in_hand", "Batches that this worker holds", ("model",), registry=self.registry
        ).labels(model)

    def _histogram(self, name: str, documentation: str) -> BucketCounts:
        return Histogram(name, documentation, DURATIONS_US, 1e-6, self.registry).of(self._model)

    def _counter(self, name: str, documentation: str) -> Counter:
        counter: Counter = Counter(name, documentation, ("model",), registry=self.registry).labels(
            self._model
        )
        return counter

    def committed(self, job: Job, output_us: int, now_us: int) -> None:
        """A batch was committed, `output_us` after the model had done its work."""
        requests = job.batch.requests
        for status, count in Tally(result.status for result in job.results.values()).items():
            known = status if status in _USUAL or status in _MODELS_OWN else "other"
            self.answered.labels(self._model, known, _USUAL.get(status, "model")).inc(count)
        self._request.observe([max(0, now_us - requests[at].arrival_us) for at in job.results])
        self._input.observe([job.input_us])
        self._infer.observe([job.compute_us])
        self._output.observe([output_us])
        self._executions.inc(job.executions)
        if job.dead:
            self._dead.inc(len(job.dead))

    def redelivered(self) -> None:
        """A batch was taken over from another worker."""
        self._redelivered.inc()

    def fenced(self) -> None:
        """A commit came too late."""
        self._fenced.inc()

    def process_died(self) -> None:
        """A model process ended unasked."""
        self._deaths.inc()

    def beat(self, late_us: int) -> None:
        """The leases were renewed, so much later than planned."""
        self._lateness.observe([max(0, late_us)])
