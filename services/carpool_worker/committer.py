"""The committer of one slot: outcome -> results -> one atomic commit, while the process computes on."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import structlog

from carpool.store.connection import CommandError
from carpool.store.results import Address, Answer, FencedError
from carpool.store.worker import WorkerStore
from carpool_worker.codec import Job
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica import Slot

WAIT_S: Final = 0.5
COMMIT_BYTES: Final = 256 * 1024 * 1024


class Committer:
    """`run_once` finishes and commits at most one batch. What it could not commit it tries again."""

    def __init__(self, slot: Slot, store: WorkerStore, metrics: WorkerMetrics) -> None:
        self._slot = slot
        self._metrics = metrics
        self._store = store
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """Wait for a finished job, half a second at the most while there is none in hand, and commit it."""
        try:
            job = self._slot.finish_next(self._note, WAIT_S)
            if job is None:
                return
            began_ns = time.monotonic_ns()
            for position in self._commit(job):  # answered by a batcher, when their deadline passed
                del job.results[position]
        except FencedError as fenced:
            self._metrics.fenced()
            lost = next(job for job in self._slot.jobs() if job.batch.id == str(fenced))
            self._log.warning(
                "commit fenced", model=self._store.keys.model, batch=lost.batch.id, epoch=lost.batch.epoch
            )
            self._slot.drop(lost)
            return
        self._slot.drop(job)
        output_us = (time.monotonic_ns() - began_ns) // 1000
        self._metrics.committed(job, output_us, self._store.clock.now_us())
        self._report(job)

    def _commit(self, job: Job) -> set[int]:
        """Settle the job. Returns the positions that were answered by others meanwhile."""
        self._write_ahead(job)
        requests = job.batch.requests
        results = {
            position: (Address.of(requests[position]), result)
            for position, result in job.results.items()
            if position not in job.noted
        }
        try:
            return self._store.commit(self._slot.consumer, job.batch, results, job.dead, job.compute_us)
        except CommandError as error:
            if error.code != "NOGROUP":
                raise
            raise FencedError(job.batch.id) from error  # somebody emptied Redis: there is nothing to settle

    def _write_ahead(self, job: Job) -> None:
        """Results too large for one commit, which is one command of at most 1 GB, go before it."""
        some: list[int] = []
        size_bytes = 0
        total_bytes = sum(len(result.body or b"") for result in job.results.values())
        if total_bytes <= COMMIT_BYTES:
            return
        for position in job.results.keys() - job.noted:
            some.append(position)
            size_bytes += len(job.results[position].body or b"")
            if size_bytes > COMMIT_BYTES // 2:
                self._answer(job, some, None)
                some, size_bytes = [], 0
        self._answer(job, some, None)

    def _note(self, job: Job, starting: int) -> None:
        """A request is about to be executed alone: make durable what is done, and that this one starts."""
        self._answer(job, list(job.results.keys() - job.noted), starting)

    def _answer(self, job: Job, positions: list[int], starting: int | None) -> None:
        requests = job.batch.requests
        answers = [Answer(at, Address.of(requests[at]), job.results[at]) for at in positions]
        written = self._store.answer(self._slot.consumer, job.batch, answers, starting)
        for position in set(positions) - written:  # answered by a batcher, when their deadline passed
            del job.results[position]
        job.noted |= written

    def _report(self, job: Job) -> None:
        """The one line that tells a batch's story. Never its payloads."""
        batch = job.batch
        statuses = Counter(result.status for result in job.results.values())
        oldest_us = min((request.arrival_us for request in batch.requests), default=batch.dispatched_us)
        self._log.info(
            "batch",
            model=self._store.keys.model,
            batch=batch.id,
            reason=batch.reason,
            size=len(batch.requests),
            **statuses,
            queue_ms=max(0, batch.dispatched_us - oldest_us) / 1000,
            compute_ms=job.compute_us / 1000,
            epoch=batch.epoch,
            dead=len(job.dead),
            worker=self._slot.consumer,
        )
