"""Spans of what a batcher does with requests whose traces are recorded.

    queue M     from the arrival of a request until it is dispatched or refused, in the requester's trace
    settle M    from then on, if the batcher answers it before its worker does: it expired, or was withdrawn

Other requests cost a comparison each, and without a collector nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.tracing import (
    CLIENT,
    INTERNAL,
    Attribute,
    Context,
    Record,
    Span,
    about_requests,
    operation,
    sampled_context,
)


class BatcherSpans:
    """Makes spans for one model. `on_queued` is told how long each request waited (us) that has one."""

    def __init__(self, model: str, record: Record, on_queued: Callable[[int, Context], None]) -> None:
        self._model = model
        self._record = record
        self._on_queued = on_queued

    def dispatched(self, batches: Iterable[tuple[str, Dispatch]], now_us: int) -> None:
        """These batches, with their IDs, are in flight since `now_us`."""
        spans: list[Span] = []
        for batch_id, batch in batches:
            for run in batch.runs:
                if run.extra is None or (parent := sampled_context(run.extra)) is None:
                    continue
                attributes = self._queue(run.correlation_ids)
                attributes |= {"carpool.batch.id": batch_id, "carpool.batch.reason": batch.reason}
                spans.append(self._queued(run, parent, now_us, attributes))
                self._on_queued(max(0, now_us - run.arrival_us), spans[-1].context)
        if spans:
            self._record(spans)

    def refused(self, refusals: Sequence[Refusal], now_us: int) -> None:
        """These requests were answered without being dispatched."""
        spans: list[Span] = []
        for refusal in refusals:
            run = refusal.run
            parent = sampled_context(refusal.fields if run is None else run.extra)
            if parent is None:
                continue
            attributes = self._queue(refusal.correlation_ids) | {"carpool.refused": refusal.reason}
            span = self._queued(run or refusal.entry, parent, now_us, attributes)
            spans.append(span._replace(error=refusal.status))
        if spans:
            self._record(spans)

    def answered_in_flight(
        self, batch_id: str, runs: Iterable[Run], status: str, dispatched_us: int, now_us: int
    ) -> None:
        """These requests of a batch in flight were answered by the batcher, with this status."""
        spans: list[Span] = []
        for run in runs:
            parent = sampled_context(run.extra)
            if parent is None:
                continue
            attributes = operation("settle", self._model, "settle") | about_requests(run.correlation_ids)
            attributes["carpool.batch.id"] = batch_id
            name, since_us = f"settle {self._model}", min(dispatched_us, now_us)
            spans.append(
                Span(name, CLIENT, parent.child(), parent, since_us, now_us, attributes, error=status)
            )
        if spans:
            self._record(spans)

    def _queue(self, correlation_ids: Sequence[str]) -> dict[str, Attribute]:
        return operation("queue", self._model) | about_requests(correlation_ids)

    def _queued(
        self, waiting: object, parent: Context, now_us: int, attributes: dict[str, Attribute]
    ) -> Span:
        """`waiting`: the run, or the entry of what could not be decoded."""
        if isinstance(waiting, Run):
            if waiting.lane:
                attributes["carpool.lane"] = waiting.lane
            attributes["carpool.priority"] = waiting.priority
        arrival_us = min(getattr(waiting, "arrival_us"), now_us)  # noqa: B009 (a run or an entry)
        return Span(f"queue {self._model}", INTERNAL, parent.child(), parent, arrival_us, now_us, attributes)
