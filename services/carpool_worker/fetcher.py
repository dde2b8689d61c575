"""The intake of one slot: fetch or reclaim -> decode -> hand to the model process, while that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from carpool.store.connection import CommandError
from carpool.store.worker import WorkerStore
from carpool_worker.codec import Job
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica import Slot

BLOCK_MS: Final = 500


class Intake:
    """`run_once` brings at most one batch into the slot."""

    def __init__(
        self,
        slot: Slot,
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._slot = slot
        self._metrics = metrics
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        self._reclaim_at_s = 0.0
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """Wait for room, then for a batch, half a second at the most for each."""
        if not self._slot.wait_for_room(BLOCK_MS / 1000):
            return
        try:
            job = self._reclaimed() or self._fetched()
        except CommandError as error:
            if error.code != "NOGROUP":
                raise
            self._register(self._store)  # somebody emptied Redis
            return
        if job is not None:
            assert self._slot.codec is not None
            began_ns = time.monotonic_ns()
            self._slot.codec.prepare(job, self._store.clock.now_us())
            job.input_us = (time.monotonic_ns() - began_ns) // 1000
            self._slot.take(job)

    def _fetched(self) -> Job | None:
        batch = self._store.fetch(self._slot.consumer, BLOCK_MS)
        return None if batch is None else Job(batch)

    def _reclaimed(self) -> Job | None:
        """A batch of a worker that died, looked for a few times in each lease."""
        now_s = time.monotonic()
        if now_s < self._reclaim_at_s:
            return None
        reclaimed = self._store.reclaim(self._slot.consumer, self._lease_ms)
        if reclaimed is None:
            self._reclaim_at_s = now_s + self._lease_ms / 4000
            return None
        batch, answered, started = reclaimed
        self._metrics.redelivered()
        self._log.warning(
            "batch reclaimed",
            model=self._store.keys.model,
            batch=batch.id,
            epoch=batch.epoch,
            size=len(batch.requests),
            answered=len(answered),
        )
        # A worker may die for reasons of its own: the first time that it did so while a request was executed
        # alone says nothing against that request.
        return Job(batch, answered, {position: times - 1 for position, times in started.items() if times > 1})
