"""The fetcher of one replica: fetch or reclaim a batch -> decode -> pass to the model process.

It works while the model process executes the previous batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from carpool.store.connection import CommandError
from carpool.store.worker import WorkerStore
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica import Replica

BLOCK_MS: Final = 500
RECLAIMS_PER_LEASE: Final = 4


class Fetcher:
    """`run_once` adds at most one execution to the replica."""

    def __init__(
        self,
        replica: Replica,
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._replica = replica
        self._metrics = metrics
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        self._reclaim_at_s = 0.0
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """Wait for capacity, then for a batch, up to half a second each."""
        if not self._replica.wait_for_capacity(BLOCK_MS / 1000):
            return
        try:
            execution = self._reclaim() or self._fetch()
        except CommandError as error:
            if error.code != "NOGROUP":
                raise
            self._register(self._store)  # Redis was emptied
            return
        if execution is not None:
            assert self._replica.codec is not None
            started_ns = time.monotonic_ns()
            self._replica.codec.prepare(execution, self._store.clock.now_us())
            execution.input_us = (time.monotonic_ns() - started_ns) // 1000
            self._replica.add(execution)

    def _fetch(self) -> Execution | None:
        batch = self._store.fetch(self._replica.consumer, BLOCK_MS)
        return None if batch is None else Execution(batch)

    def _reclaim(self) -> Execution | None:
        """A batch whose worker's lease ran out, looked for a few times in each lease."""
        now_s = time.monotonic()
        if now_s < self._reclaim_at_s:
            return None
        reclaimed = self._store.reclaim(self._replica.consumer, self._lease_ms)
        if reclaimed is None:
            self._reclaim_at_s = now_s + self._lease_ms / 1000 / RECLAIMS_PER_LEASE
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
        # A start without a result is a death during that request. The first one does not count: a worker may
        # die for reasons of its own.
        deaths = {position: starts - 1 for position, starts in started.items() if starts > 1}
        return Execution(batch, answered, deaths)
