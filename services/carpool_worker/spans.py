"""Spans of what a worker does with batches that have requests whose traces are recorded.

    process M   of each such request, in the requester's trace: from fetch to commit
    batch M     of the batch, with a link to each such request
    predict M   what the model took, a child of the batch's: made by the model process (`model_process.spans`)

If a batch has one such request, the batch's span is a child of that request's. Else it begins a trace of its
own, because a span has one parent: links lead from one to the other. Of a model that steps, whose batches are
single requests, there are only spans `process M`, with an event for each chunk that was written.

The ID of a batch's span is made when it is taken, because the model process needs it. What that records comes
back through the worker, which exports it with its own.

Why: docs/decisions/0119.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from carpool.clock import RedisClock
from carpool.errors import OK
from carpool.messages.batches import Batch
from carpool.tracing import (
    CONSUMER,
    EVENTS_MAX,
    Attribute,
    Context,
    Event,
    Link,
    Record,
    Span,
    about_requests,
    new_trace,
    operation,
    sampled_context,
)
from carpool_worker.execution import BatchTrace, Execution, TracedRun
from carpool_worker.model_process.frames import ModelSpans

FENCED: Final = "fenced"  # the outcome of an execution whose batch another worker has
ANSWERED_AHEAD: Final = "answered_ahead"  # by a batcher: it expired, or was withdrawn
HANDED_OVER: Final = "handed_over"  # to another worker


class WorkerSpans:
    """Makes spans for one model. `on_ended` is told how long each request that has one took from its arrival
    (us), and `on_executed` how long the model took."""

    def __init__(
        self,
        model: str,
        record: Record,
        on_ended: Callable[[int, Context], None],
        on_executed: Callable[[int, Context], None],
        on_dropped: Callable[[int], None],
    ) -> None:
        """`on_dropped` is told how many spans of the model were not recorded."""
        self._model = model
        self._record = record
        self._on_ended, self._on_executed, self._on_dropped = on_ended, on_executed, on_dropped

    def take(self, batch: Batch, now_us: int) -> BatchTrace | None:
        """The trace of a batch that this worker takes at this time; None if no request of it has one."""
        traced = [
            TracedRun(number, parent, parent.child())
            for number, run in enumerate(batch.runs)
            if run.extra is not None and (parent := sampled_context(run.extra)) is not None
        ]
        if not traced:
            return None
        parent = traced[0].context if len(traced) == 1 else None
        own = new_trace() if parent is None else parent.child()
        return BatchTrace(traced, own, parent, now_us)

    def chunks_written(self, trace: BatchTrace, now_us: int, written: Sequence[tuple[int, int]]) -> None:
        """Chunks of a stream were written: the index of each, and how many values it has."""
        for index, values in written:
            trace.chunks += 1
            if len(trace.events) < EVENTS_MAX:
                trace.events.append(
                    Event("chunk", now_us, {"carpool.chunk": index, "carpool.values": values})
                )

    def ended(self, execution: Execution, now_us: int, outcome: str = "", *, is_step: bool = False) -> None:
        """An execution is over. `outcome`: why it was not committed, if it was not. `is_step`: it is that of
        a model that steps."""
        trace = execution.trace
        if trace is None:
            return
        execution.trace = None
        failed = {at: result.status for at, result in execution.results.items() if result.status != OK}
        batch = execution.batch
        spans = [
            self._process(batch, trace, traced, failed, now_us, outcome, is_step) for traced in trace.runs
        ]
        if not is_step:
            spans.append(self._batch(execution, trace, failed, now_us, outcome))
        self._record(spans)
        if not outcome:
            for traced in trace.runs:
                arrival_us = batch.runs[traced.number].arrival_us
                self._on_ended(max(0, now_us - arrival_us), traced.context)
            self._on_executed(execution.compute_us, trace.runs[0].context if is_step else trace.batch)

    def model_recorded(self, told: ModelSpans, clock: RedisClock) -> None:
        """A model process has handed over spans, whose times are those of this host's wall clock."""
        by_us = -clock.wall_ahead_us
        self._record([span.moved(by_us) for span in told.spans])
        if told.dropped:
            self._on_dropped(told.dropped)

    def _process(
        self,
        batch: Batch,
        trace: BatchTrace,
        traced: TracedRun,
        failed: dict[int, str],
        now_us: int,
        outcome: str,
        is_step: bool,
    ) -> Span:
        """The span of the requests of one run: nearly always of one request."""
        number, parent, context = traced
        run, start = batch.runs[number], batch.first_positions[number]
        attributes = operation("process", self._model, "process") | about_requests(run.correlation_ids)
        attributes |= _of_batch(batch)
        if run.sequence is not None:
            attributes["carpool.sequence.id"] = run.sequence.sequence_id
        if outcome:
            attributes["carpool.outcome"] = outcome
        if trace.chunks:
            attributes["carpool.chunks"] = trace.chunks
        statuses = Counter(
            [failed[at] for at in range(start, start + len(run.correlation_ids)) if at in failed]
        )
        error = outcome if outcome == FENCED else max(statuses, key=statuses.__getitem__, default="")
        links = () if is_step else (Link(trace.batch),)
        return Span(
            f"process {self._model}", CONSUMER, context, parent, trace.taken_us, now_us, attributes, links,
            trace.events, error,
        )  # fmt: skip

    def _batch(
        self, execution: Execution, trace: BatchTrace, failed: dict[int, str], now_us: int, outcome: str
    ) -> Span:
        """The span of the batch."""
        batch, model = execution.batch, self._model
        attributes = operation("batch", model, "process") | _of_batch(batch)
        attributes["messaging.batch.message_count"] = batch.size
        attributes["carpool.batch.reason"] = batch.reason
        attributes["carpool.executions"] = execution.frames_executed
        attributes["carpool.input_us"] = execution.input_us
        attributes["carpool.compute_us"] = execution.compute_us
        attributes["carpool.waited_us"] = execution.waited_us
        if failed:
            attributes["carpool.failed"] = len(failed)
        if execution.deaths:
            attributes["carpool.model_process_deaths"] = max(execution.deaths.values())
        if outcome:
            attributes["carpool.outcome"] = outcome
        error = outcome if outcome == FENCED else ""
        if failed and len(failed) >= batch.size - len(execution.answered_before):
            statuses = Counter(failed.values())
            error = error or max(statuses, key=statuses.__getitem__)
        links = _links(batch, trace)
        return Span(
            f"batch {model}", CONSUMER, trace.batch, trace.parent, trace.taken_us, now_us, attributes, links,
            error=error,
        )  # fmt: skip


def _of_batch(batch: Batch) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "carpool.batch.id": batch.id,
        "carpool.batch.size": batch.size,
    }
    deliveries = batch.epoch + batch.redelivered
    if deliveries > 1:
        attributes["carpool.deliveries"] = deliveries
    if batch.lane:
        attributes["carpool.lane"] = batch.lane
    if batch.version:
        attributes["carpool.version"] = batch.version
    return attributes


def _links(batch: Batch, trace: BatchTrace) -> list[Link]:
    """A link to the span of each request's producer, once for each span."""
    links: dict[tuple[bytes, bytes], Link] = {}
    for number, parent, _ in trace.runs:
        about = about_requests(batch.runs[number].correlation_ids)
        links.setdefault((parent.trace_id, parent.span_id), Link(parent, about))
    return list(links.values())
