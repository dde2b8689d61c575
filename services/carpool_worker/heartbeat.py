"""The heartbeat: the slots live, and still own the batches in hand. It starts first and stops last.

It has a connection and a thread of its own, in a process that runs no model: a computation that holds the GIL
or sleeps in C for an hour is renewed all the same, and nobody needs to guess how long it may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from carpool.store.worker import WorkerStore
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica import Slot


class Heartbeat:
    """`run_once` renews every slot's lease, then waits for a third of it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._slots = slots
        self._metrics = metrics
        self._beaten_us: int | None = None  # by this host's monotonic clock
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        self._missing: set[str] = set()  # batches that were not ours any more at the last beat
        self._draining = False
        self._stopping = threading.Event()
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """One beat."""
        self.beat()
        self._stopping.wait(self._lease_ms / 3000)

    def beat(self) -> None:
        """Renew everything now."""
        self._store.look_at_clock()
        missing: set[str] = set()
        for slot in self._slots:
            if self._draining and not slot.held():
                self._store.leave(slot.consumer)
                continue
            registered, lost = self._store.renew(slot.consumer, self._lease_ms, slot.held())
            if not registered:
                self._register(self._store)
            missing |= lost
        # One that is missing may have been committed a moment ago. One that still is, a beat later, was lost.
        for batch_id in missing & self._missing:
            self._log.warning("batch lost", model=self._store.keys.model, batch=batch_id)
        self._missing = missing
        self._measure()

    def _measure(self) -> None:
        """How late this beat was: what is left of the lease is the margin before others take our batches."""
        now_us = time.monotonic_ns() // 1000
        if self._beaten_us is not None:
            self._metrics.beat(now_us - self._beaten_us - self._lease_ms * 1000 // 3)
        self._beaten_us = now_us
        self._metrics.in_hand.set(sum(len(slot.held()) for slot in self._slots))

    def drain(self) -> None:
        """From now on a slot leaves once it holds nothing, and not before: a batch that is in flight takes up
        the room of a process, and if its own were not counted, another's would stay empty."""
        self._draining = True

    def stop(self) -> None:
        """Wake up from the wait between two beats."""
        self._stopping.set()
