"""Where a replica has its batches from: asked for without waiting, or reclaimed from a dead worker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

import structlog

from carpool.errors import INVALID_ARGUMENT
from carpool.messages.batches import Batch
from carpool.store.connection import CommandError, LinkError
from carpool.store.worker import WorkerStore
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics

BLOCK_MS: Final = 500  # a drain waits as long for the reply to a fetch
HURRIED_BLOCK_MS: Final = 100
RECLAIMS_PER_LEASE: Final = 4
Item = TypeVar("Item")
Store = TypeVar("Store", bound=WorkerStore)


class Reclaimer:
    """Takes over batches of dead workers, which are looked for regularly."""

    def __init__(
        self,
        member: Member,
        store: WorkerStore,
        lease_ms: int,
        metrics: WorkerMetrics,
        interval_ms: float | None = None,
    ) -> None:
        """`interval_ms`: how often they are looked for. None: a few times in each lease."""
        self._member = member
        self.metrics = metrics
        self._store = store
        self._lease_ms = lease_ms
        self._interval_s = (lease_ms / RECLAIMS_PER_LEASE if interval_ms is None else interval_ms) / 1000
        self._due_at_s = 0.0
        self._log = structlog.get_logger()

    def reclaim_if_due(self) -> Execution | None:
        """A batch whose worker's lease ran out, if one is due to be looked for, and there is one."""
        now_s = time.monotonic()
        if now_s < self._due_at_s:
            return None
        reclaimed = self._store.reclaim(self._member.name, self._lease_ms)
        if reclaimed is None:
            self._due_at_s = now_s + self._interval_s
            return None
        batch, progress = reclaimed
        self.metrics.redelivered()
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


class Source(ABC, Generic[Item, Store]):
    """Once it is `waiting`, `finish` takes what was asked for: when `descriptor` is readable, or at once if
    that is None."""

    def __init__(
        self, member: Member, store: Store, reclaimer: Reclaimer, register: Callable[[WorkerStore], None]
    ) -> None:
        """`register` is called if Redis was emptied."""
        self._member = member
        self._store = store
        self._reclaimer = reclaimer
        self._spans = reclaimer.metrics.spans
        self._register = register
        self.waiting = False  # for the reply to a question
        self.descriptor: int | None = None  # the socket to wait on for it
        self._unloaded: list[Execution] = []  # their stored bodies and states could not be loaded yet

    @abstractmethod
    def start(self) -> list[Execution]:
        """Reclaim a batch if that is due and there is one; else ask for more."""

    def hurry(self, *, is_hurried: bool = True) -> None:
        """From now on wait for a short time only, or as before."""

    def finish(self) -> list[Item]:
        """What was asked for; nothing if there was none within the time that Redis waits."""
        self.waiting = False
        try:
            return self._read()
        except CommandError as error:
            self._register_again(error)
            return []

    @abstractmethod
    def _read(self) -> list[Item]:
        """Read the reply to what was asked."""

    def check_overdue(self) -> None:
        """Raises LinkError if there should have been an answer by now, and waits for it no more."""
        try:
            self._store.check_overdue()
        except LinkError:
            self.waiting = False
            raise

    def _reclaim_or(self, ask: Callable[[], None]) -> list[Execution]:
        try:
            if not self._unloaded:
                reclaimed = self._reclaimer.reclaim_if_due()
                self._unloaded = [] if reclaimed is None else [reclaimed]
            if self._unloaded:
                return self._load()
            ask()
            self.waiting, self.descriptor = True, self._store.descriptor
        except CommandError as error:
            self._register_again(error)
        return []

    def _load(self) -> list[Execution]:
        """Load what the batches do not have with them. If Redis cannot be reached, the next `start` continues
        here."""
        for execution in self._unloaded:
            self._load_one(execution)
        loaded, self._unloaded = self._unloaded, []
        return loaded

    def _load_one(self, execution: Execution) -> Execution:
        """Load stored bodies and states. A request whose body cannot be loaded gets its result."""
        batch, clock = execution.batch, self._store.clock
        clock.reached(batch.dispatched_us)
        failures, execution.states = self._store.load(batch, execution.answered_before)
        for position, detail in failures.items():
            execution.fail(position, INVALID_ARGUMENT, detail)
        if self._spans is not None:
            execution.trace = self._spans.take(batch, clock.now_us())
        return execution

    def _register_again(self, error: CommandError) -> None:
        """Redis was emptied."""
        if error.code != "NOGROUP":
            raise error
        self._register(self._store)


class Fetcher(Source[Execution, WorkerStore]):
    """Fetches batches that are for any worker."""

    def __init__(
        self,
        member: Member,
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
        block_ms: int | None = None,
    ) -> None:
        """`block_ms`: how long Redis waits for a batch, and how often batches of dead workers are looked for.
        None: half a second, and a few times in each lease."""
        super().__init__(member, store, Reclaimer(member, store, lease_ms, metrics, block_ms), register)
        self._usual_block_ms = self._block_ms = block_ms or BLOCK_MS
        self._asked_us = 0  # when the fetch was sent, by Redis's clock

    def start(self, count: int = 1, *, wait: bool = True) -> list[Execution]:
        """At most `count` are asked for; without `wait`, only those that are there."""
        return self._reclaim_or(partial(self._ask, count, self._block_ms if wait else None))

    def hurry(self, *, is_hurried: bool = True) -> None:
        self._block_ms = HURRIED_BLOCK_MS if is_hurried else self._usual_block_ms

    def _ask(self, count: int, block_ms: int | None) -> None:
        self._asked_us = self._store.clock.now_us()
        self._store.start_fetch(self._member.name, block_ms, count)

    def _read(self) -> list[Execution]:
        self._unloaded = [self._fetched(batch) for batch in self._store.finish_fetch()]
        return self._load()

    def _fetched(self, batch: Batch) -> Execution:
        waited_us = max(0, self._asked_us - batch.dispatched_us)
        return Execution(batch, batch.answered, waited_us=waited_us)

    def unloaded(self) -> list[tuple[str, int]]:
        """ID and epoch of the batches that were fetched, and that the next `start` returns."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self._unloaded]

    def forget_unloaded(self) -> None:
        """Others have these batches now."""
        self._unloaded = []
