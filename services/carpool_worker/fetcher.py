"""Fetching for one replica: ask for the next batches without waiting, or reclaim one of a dead worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from carpool.errors import INVALID_ARGUMENT
from carpool.store.connection import CommandError, LinkError
from carpool.store.worker import WorkerStore
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics

BLOCK_MS: Final = 500  # a drain waits as long for the reply to a fetch
RECLAIMS_PER_LEASE: Final = 4


class Reclaimer:
    """Takes over batches of dead workers, which are looked for regularly."""

    def __init__(
        self, consumer: str, store: WorkerStore, lease_ms: int, metrics: WorkerMetrics, interval_ms: float
    ) -> None:
        self.consumer = consumer
        self._metrics = metrics
        self._store = store
        self._lease_ms = lease_ms
        self._interval_s = interval_ms / 1000
        self._due_at_s = 0.0
        self._log = structlog.get_logger()

    def reclaim_if_due(self) -> Execution | None:
        """A batch whose worker's lease ran out, if one is due to be looked for, and there is one."""
        now_s = time.monotonic()
        if now_s < self._due_at_s:
            return None
        reclaimed = self._store.reclaim(self.consumer, self._lease_ms)
        if reclaimed is None:
            self._due_at_s = now_s + self._interval_s
            return None
        batch, progress = reclaimed
        self._metrics.redelivered()
        self._log.warning(
            "batch reclaimed",
            model=self._store.keys.model,
            batch=batch.id,
            epoch=batch.epoch,
            size=batch.size,
            answered=len(progress.answered),
        )
        # A start without a result is a death during that request. The first one does not count: a worker may
        # die for reasons of its own.
        deaths = {position: starts - 1 for position, starts in progress.started.items() if starts > 1}
        return Execution(
            batch,
            progress.answered | batch.answered,
            deaths,
            dict(progress.started),
            chunks=progress.chunks,
            first_us=progress.first_us,
        )


class Fetcher:
    """`start` asks for a batch, or several; once `descriptor` is readable, `finish` takes them."""

    def __init__(
        self,
        consumer: str,
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
        block_ms: int | None = None,
    ) -> None:
        """`block_ms`: how long Redis waits for a batch, and how often batches of dead workers are looked for.
        None: half a second, and a few times in each lease."""
        self._consumer = consumer
        self._store = store
        self._block_ms = block_ms or BLOCK_MS
        self._register = register
        interval_ms = block_ms or lease_ms / RECLAIMS_PER_LEASE
        self._reclaimer = Reclaimer(consumer, store, lease_ms, metrics, interval_ms)
        self.waiting = False  # for the reply to a fetch
        self.descriptor: int | None = None  # the socket to wait on for it; None if `finish` would not wait
        self._asked_us = 0  # when the fetch was sent, by Redis's clock
        self._unloaded: list[Execution] = []  # their stored bodies and states could not be loaded yet

    def start(self, count: int = 1, *, wait: bool = True) -> list[Execution]:
        """Reclaim a batch if that is due and there is one; else ask for the next ones, at most `count`.

        Without `wait`, only for those that are there.
        """
        if self._unloaded:
            return self._load()
        try:
            execution = self._reclaimer.reclaim_if_due()
            if execution is not None:
                self._unloaded = [execution]
                return self._load()
            self._asked_us = self._store.clock.now_us()
            self._store.start_fetch(self._consumer, self._block_ms if wait else None, count)
            self.waiting, self.descriptor = True, self._store.descriptor
        except CommandError as error:
            self._register_again(error)
        return []

    def finish(self) -> list[Execution]:
        """The batches that were asked for; none if there was none within half a second."""
        self.waiting = False
        try:
            batches = self._store.finish_fetch()
        except CommandError as error:
            self._register_again(error)
            return []
        self._unloaded = [
            Execution(batch, batch.answered, waited_us=max(0, self._asked_us - batch.dispatched_us))
            for batch in batches
        ]
        return self._load()

    def check_overdue(self) -> None:
        """Whether what was asked for may still come. Raises LinkError if Redis should have answered."""
        try:
            self._store.check_overdue()
        except LinkError:
            self.waiting = False
            raise

    def unloaded(self) -> list[tuple[str, int]]:
        """ID and epoch of the batches that were fetched, and that the next `start` returns."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self._unloaded]

    def _load(self) -> list[Execution]:
        """Load stored bodies and states. A request whose body cannot be loaded gets its result.

        If Redis cannot be reached, the next `start` continues here.
        """
        for execution in self._unloaded:
            load(self._store, execution)
        loaded, self._unloaded = self._unloaded, []
        return loaded

    def _register_again(self, error: CommandError) -> None:
        """Redis was emptied."""
        if error.code != "NOGROUP":
            raise error
        self._register(self._store)


def load(store: WorkerStore, execution: Execution) -> None:
    """Load stored bodies and states of a batch. A request whose body cannot be loaded gets its result."""
    failures, execution.states = store.load(execution.batch, execution.answered)
    for position, detail in failures.items():
        execution.fail(position, INVALID_ARGUMENT, detail)
