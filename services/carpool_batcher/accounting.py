"""Accounts for what becomes of requests: in the metrics, in the log and in the count of missed deadlines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, NOT_FOUND
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.missed_deadlines import Cause, MissedDeadlines, causes_of_refusals
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.meter import Meter
from carpool_batcher.recent import Recent

SUMMARY_INTERVAL_S: Final = 1.0


class Accounting:
    """Is told each event of one model's requests once, while this batcher holds the lease."""

    def __init__(self, meter: Meter, log: Any, scheduler: Scheduler) -> None:
        self._meter = meter
        self._log = AnswerLog(log)
        self._scheduler = scheduler
        self._missed = MissedDeadlines(scheduler.learned, scheduler.in_flight.batches)
        self.versions: Mapping[str, str] = {}  # by model process, that of its model, if it names one
        self.recent = Recent()
        self._settled: list[tuple[BatchSettled, InFlightBatch]] = []  # and not counted yet
        self.missed_deadlines = 0  # of all requests so far

    def refused(self, refusals: Sequence[Refusal], now_us: int) -> None:
        """These requests were answered without being dispatched."""
        self._meter.refused(refusals)
        self.recent.refused(refusals, now_us)
        statuses: Counter[str] = Counter()
        for refusal in refusals:
            statuses[refusal.status] += len(refusal.correlation_ids)
        self._log.refused(statuses)
        self._count_missed(causes_of_refusals(refusals))

    def dispatched(self, batches: Sequence[Dispatch], now_us: int) -> None:
        """These batches are in flight now."""
        self._meter.dispatched(batches, self._scheduler, now_us)

    def expired(
        self, batch_id: str, runs: Sequence[tuple[int, Run]], answered: Collection[int] | None
    ) -> None:
        """The deadlines of these runs passed in flight: see `MissedDeadlines.expired`."""
        self._answered_in_flight(DEADLINE_EXCEEDED, answered)
        self._missed.expired(batch_id, runs, answered)

    def cancelled(self, answered: Collection[int] | None) -> None:
        """Requests at these positions of a batch in flight were withdrawn. None: the batch has settled."""
        self._answered_in_flight(CANCELLED, answered)

    def abandoned(self, answered: Collection[int] | None) -> None:
        """Requests at these positions of a batch in flight were answered, because no worker has its
        version."""
        self._answered_in_flight(NOT_FOUND, answered)

    def settled(self, event: BatchSettled, batch: InFlightBatch) -> None:
        """A batch settled. This comes before its times are learned; see `MissedDeadlines.settled`."""
        self._count_missed(self._missed.settled(event, batch))
        self._settled.append((event, batch))

    def count_settled(self) -> None:
        """Count the batches that settled. Nobody waits for that, so it comes after what is urgent."""
        settled, self._settled = self._settled, []
        for event, batch in settled:
            self._meter.settled(batch, event.settled_us)
            self.recent.settled(event, batch)
            if version := self.versions.get(event.worker):
                self._meter.versions.settled(version, event, batch)
            if event.failures is not None:
                self._meter.failed(event.failures, event.settled_us)
            if event.streamed is not None:
                self._meter.stream_ended(event.streamed, event.settled_us)

    def compared(self, model_processes: Collection[str], now_us: int) -> None:
        """The scheduler was compared with Redis, where these model processes are alive."""
        self._missed.forget_missing(model_processes)
        self._meter.update_gauges(self._scheduler, now_us)
        self._log.summarize_if_due()

    def end(self) -> None:
        """This batcher does not hold the lease any more."""
        self._log.summarize()
        self._meter.deactivated()

    def _answered_in_flight(self, status: str, answered: Collection[int] | None) -> None:
        if answered:
            self._log.answered_in_flight(status, len(answered))
            self._meter.answered_in_flight(status, len(answered))

    def _count_missed(self, causes: Mapping[Cause, int]) -> None:
        if causes:
            self.missed_deadlines += sum(causes.values())
            self._meter.missed(causes)
            self._log.missed(causes)


class AnswerLog:
    """The log of what one model's batcher answers itself: a summary a second, because a flood is refused one
    by one. `summarize_if_due` is called a few times a second."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._refused: Counter[str] = Counter()
        self._expired_requests = 0
        self._expired_batches = 0
        self._cancelled_requests = 0
        self._missed: Counter[str] = Counter()
        self._summarized_at_s = time.monotonic()

    def refused(self, statuses: Mapping[str, int]) -> None:
        """Requests were refused; `statuses` counts them by status."""
        self._refused.update(statuses)

    def answered_in_flight(self, status: str, requests: int) -> None:
        """That many requests of one batch in flight were answered: expired or withdrawn."""
        if status == DEADLINE_EXCEEDED:
            self._expired_requests += requests
            self._expired_batches += 1
        elif status == NOT_FOUND:
            self._refused[status] += requests
        else:
            self._cancelled_requests += requests

    def missed(self, causes: Mapping[Cause, int]) -> None:
        """Requests missed their deadlines: how many for each cause (`core.missed_deadlines`)."""
        self._missed.update(causes)

    def summarize_if_due(self) -> None:
        """Log a summary, if the last was a second ago."""
        if time.monotonic() - self._summarized_at_s >= SUMMARY_INTERVAL_S:
            self.summarize()

    def summarize(self) -> None:
        """Log what was answered since the last summary; nothing if nothing was."""
        self._summarized_at_s = time.monotonic()
        if self._refused:
            self._log.info("requests refused", **self._refused)
            self._refused = Counter()
        if self._expired_batches:
            self._log.info(
                "requests expired in flight", requests=self._expired_requests, batches=self._expired_batches
            )
            self._expired_requests = self._expired_batches = 0
        if self._cancelled_requests:
            self._log.info("requests cancelled in flight", requests=self._cancelled_requests)
            self._cancelled_requests = 0
        if self._missed:
            self._log.info("deadlines missed", **self._missed)
            self._missed = Counter()
