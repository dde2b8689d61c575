"""Fetching for one replica: ask for the next batch without waiting, or reclaim one of a dead worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from carpool.errors import INVALID_ARGUMENT
from carpool.store.connection import CommandError
from carpool.store.worker import WorkerStore
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics

BLOCK_MS: Final = 500  # a drain waits as long for the reply to a fetch
RECLAIMS_PER_LEASE: Final = 4


class Fetcher:
    """`start` asks for a batch; once `descriptor` is readable, `finish` takes it."""

    def __init__(
        self,
        consumer: str,
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._consumer = consumer
        self._metrics = metrics
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        self._reclaim_at_s = 0.0
        self.waiting = False  # for the reply to a fetch
        self.descriptor: int | None = None  # the socket to wait on for it; None if `finish` would not wait
        self._asked_us = 0  # when the fetch was sent, by Redis's clock
        self._unloaded: Execution | None = None  # its stored bodies could not be loaded yet
        self._log = structlog.get_logger()

    def start(self) -> Execution | None:
        """Reclaim a batch if that is due and there is one; else ask for the next."""
        if self._unloaded is not None:
            return self._load(self._unloaded)
        try:
            execution = self._reclaim()
            if execution is None:
                self._asked_us = self._store.clock.now_us()
                self._store.start_fetch(self._consumer, BLOCK_MS)
                self.waiting, self.descriptor = True, self._store.descriptor
            return execution
        except CommandError as error:
            self._register_again(error)
            return None

    def finish(self) -> Execution | None:
        """The batch that was asked for; None if there was none within half a second."""
        self.waiting = False
        try:
            batch = self._store.finish_fetch()
        except CommandError as error:
            self._register_again(error)
            return None
        if batch is None:
            return None
        return self._load(Execution(batch, waited_us=max(0, self._asked_us - batch.dispatched_us)))

    def _load(self, execution: Execution) -> Execution:
        """Load the stored bodies of a batch. A request whose body cannot be loaded gets its result.

        If Redis cannot be reached, the next `start` continues here.
        """
        self._unloaded = execution
        failures = self._store.load_bodies(execution.batch, execution.answered)
        self._unloaded = None
        for position, detail in failures.items():
            execution.fail(position, INVALID_ARGUMENT, detail)
        return execution

    def _register_again(self, error: CommandError) -> None:
        """Redis was emptied."""
        if error.code != "NOGROUP":
            raise error
        self._register(self._store)

    def _reclaim(self) -> Execution | None:
        """A batch whose worker's lease ran out, looked for a few times in each lease."""
        now_s = time.monotonic()
        if now_s < self._reclaim_at_s:
            return None
        reclaimed = self._store.reclaim(self._consumer, self._lease_ms)
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
            size=batch.size,
            answered=len(answered),
        )
        # A start without a result is a death during that request. The first one does not count: a worker may
        # die for reasons of its own.
        deaths = {position: starts - 1 for position, starts in started.items() if starts > 1}
        return self._load(Execution(batch, answered, deaths))
