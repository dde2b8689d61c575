"""What a batcher measures: BatcherMetrics for the process, a Meter for each of its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, get_args

from prometheus_client import Counter, Gauge

from carpool.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
)
from carpool.messages import Dispatch, DispatchReason, Refusal
from carpool.metrics import DURATIONS_US, PERCENTS, SIZES, CommonMetrics, Histogram
from carpool.wire.report import BatcherReport
from carpool_batcher.core.capacity import InFlightBatch
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.tally import Tally, gauges

_GAUGES: Final = {  # of status.Gauges, in that order
    "carpool_waiting_requests": "Requests that wait",
    "carpool_waiting_bytes": "Bytes of what waits",
    "carpool_oldest_request_seconds": "How long the oldest waiting request has waited",
    "carpool_in_flight_batches": "Batches dispatched and not settled",
    "carpool_in_flight_requests": "Requests in those batches",
    "carpool_model_processes": "Model processes whose lease runs",
    "carpool_held_results": "Results that are held until those before them are done",
}
_IN_FLIGHT: Final = "in_flight"
# What a batcher says, and why a batch leaves. Shown from zero: Prometheus notices no first value.
_ANSWERS: Final = (
    (INVALID_ARGUMENT, "input"),
    (INVALID_ARGUMENT, "cost"),
    (UNIMPLEMENTED, "input"),
    (RESOURCE_EXHAUSTED, "queue_size"),
    (RESOURCE_EXHAUSTED, "queue_bytes"),
    (CANCELLED, "withdrawn"),
    (DEADLINE_EXCEEDED, "waiting"),
    (DEADLINE_EXCEEDED, "early"),
    (DEADLINE_EXCEEDED, _IN_FLIGHT),
    (INTERNAL, "policy"),
)
_DISPATCH_REASONS: Final = get_args(DispatchReason)


class BatcherMetrics(CommonMetrics):
    """The families of a batcher process."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.queue = Histogram(
            "carpool_queue_seconds", "From a request's arrival to its dispatch", DURATIONS_US, 1e-6, registry
        )
        self.size = Histogram("carpool_batch_requests", "Requests in a batch", SIZES, 1, registry)
        self.fill = Histogram(
            "carpool_batch_fill_ratio",
            "How full a batch was of what max_batch_size, or max_batch_cost, allows",
            PERCENTS,
            0.01,
            registry,
        )
        self.batches = Counter(
            "carpool_batches",
            "Batches dispatched, by the reason they left",
            ("model", "reason"),
            registry=registry,
        )
        self.gauges = [Gauge(name, text, ("model",), registry=registry) for name, text in _GAUGES.items()]
        self.active = Gauge(
            "carpool_batcher_active", "1 where this batcher forms a model's batches, 0 where it stands by",
            ("model",), registry=registry,
        )  # fmt: skip


class Meter:
    """One model's share of it. A batch costs some 4 µs here, and each request in it 0.2."""

    def __init__(self, metrics: BatcherMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._queue = metrics.queue.of(model)
        self._size = metrics.size.of(model)
        self._fill = metrics.fill.of(model)
        self._lateness = metrics.lease_lateness.of(model)
        for status, reason in _ANSWERS:
            metrics.answered.labels(model, status, reason)
        for why in _DISPATCH_REASONS:
            metrics.batches.labels(model, why)
        self.took_over(0)
        self.stood_by()

    def dispatched(self, batches: Sequence[Dispatch], scheduler: Scheduler, now_us: int) -> None:
        """These batches are in flight."""
        reasons = [batch.reason for batch in batches]
        sizes = [len(batch.requests) for batch in batches]
        fill_percents = [scheduler.fill_percent(batch.requests) for batch in batches]
        for reason in reasons:
            self._metrics.batches.labels(self._model, reason).inc()
        self._size.observe(sizes)
        self._fill.observe(fill_percents)
        self._tally.dispatched(reasons, sizes, fill_percents)
        requests = chain.from_iterable(batch.requests for batch in batches)
        self._queue.observe([max(0, now_us - request.arrival_us) for request in requests])

    def refused(self, refusals: Sequence[Refusal]) -> None:
        """Requests were answered without a ride."""
        for one in refusals:
            self._metrics.answered.labels(self._model, one.status, one.reason).inc()
        self._tally.refused(refusals)

    def expired_in_flight(self, requests: int) -> None:
        """Requests were answered by their deadline while their batch was under way."""
        self._metrics.answered.labels(self._model, DEADLINE_EXCEEDED, _IN_FLIGHT).inc(requests)
        self._tally.expired_in_flight(f"{DEADLINE_EXCEEDED}/{_IN_FLIGHT}", requests)

    def settled(self, batch: InFlightBatch, now_us: int) -> None:
        """A batch is heard of as settled."""
        self._tally.settled(batch.arrivals_us, now_us)

    def renewed(self, late_us: int) -> None:
        """The lease was renewed, so much later than planned."""
        self._lateness.observe([max(0, late_us)])

    def looked(self, scheduler: Scheduler, now_us: int) -> None:
        """What an active batcher sees of its model, a few times a second."""
        for gauge, value in zip(self._metrics.gauges, gauges(scheduler, now_us), strict=True):
            gauge.labels(self._model).set(value)
        self._metrics.active.labels(self._model).set(1)

    def status(
        self,
        batcher: str,
        scheduler: Scheduler,
        now_us: int,
        *,
        rejected_settings: str = "",
        policies: tuple[str, ...] = (),
    ) -> BatcherReport:
        """What it did since it took over, and what it sees."""
        report = self._tally.status(batcher, scheduler, now_us)
        return replace(report, unheeded=rejected_settings, policies=policies)

    def took_over(self, now_us: int) -> None:
        """This batcher sees to the model from now on."""
        self._tally = Tally(now_us)

    def stood_by(self) -> None:
        """Another batcher sees to this model: what it sees is for it to say."""
        self._metrics.active.labels(self._model).set(0)
        for gauge in self._metrics.gauges:
            gauge.remove(self._model)
