"""The heartbeat: renews the leases of the replicas and of the batches that they have in hand.

Each beat also reads Redis's clock, and registers the model again if Redis was emptied, or if workers that
declare something else came or went. During a drain it lets each replica leave when it is no longer needed:
most when they have no batch in hand. Once a minute it has dead letters dropped that are too old.

It starts first and stops last. It has a thread and a connection of its own, in a process that runs no model:
a model may hold the GIL or block in C for an hour, and its batch is still renewed. Therefore no limit on the
execution time is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from carpool.store.worker import WorkerStore
from carpool_worker.committer import trim_dead_letters
from carpool_worker.member import BEATS_PER_LEASE
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica_loop import AnyReplica

MEMORY_INTERVAL_S: Final = 2.0
TRIM_INTERVAL_S: Final = 60.0  # dead letters become too old


class Heartbeat:
    """`run_once` renews everything once, then waits for a third of the lease."""

    def __init__(
        self,
        replicas: Sequence[AnyReplica],
        store: WorkerStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
        follow_others: Callable[[WorkerStore], None] | None = None,
        tell_memory: Callable[[WorkerStore], None] | None = None,
    ) -> None:
        """`follow_others`: register the model anew if what other workers declare has changed. `tell_memory`:
        tell what model processes take."""
        self._tell_memory = tell_memory
        self._memory_at_s = 0.0
        self._replicas = replicas
        self._metrics = metrics
        self._last_beat_us: int | None = None  # by this host's monotonic clock
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        self._follow_others = follow_others
        self._not_owned: set[str] = set()  # batches that this worker did not own at the last beat
        self._dead_letters_at_s = 0.0
        self._draining = False
        self._stopping = threading.Event()
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """One beat, and the wait until the next."""
        self.beat()
        self._stopping.wait(self._lease_ms / 1000 / BEATS_PER_LEASE)

    def beat(self) -> None:
        """Renew everything now."""
        self._store.read_clock()
        not_owned: set[str] = set()
        for replica in self._replicas:
            member, name = replica.member, replica.name
            if not member.is_joined:
                continue
            if self._draining and replica.may_leave:
                self._store.leave(name)
                continue
            batches = replica.batches()
            renewal = self._store.renew(name, self._lease_ms, batches, revive=member.can_be_revived)
            member.model_processes = renewal.model_processes
            if not renewal.had_lease:
                member.lost_lease(name)
            if not renewal.is_registered:
                self._register(self._store)
            if member.name != name:  # it left meanwhile, and has joined again under another name
                self._store.leave(name)
            not_owned |= renewal.lost
        # A batch that is not owned may have been committed a moment ago. If it is still in hand at the next
        # beat, it is lost.
        for batch_id in not_owned & self._not_owned:
            self._log.warning(
                "batch taken over by another worker", model=self._store.keys.model, batch=batch_id
            )
        self._not_owned = not_owned
        self._measure()
        if self._follow_others is not None and not self._draining:
            self._follow_others(self._store)
        now_s = time.monotonic()
        if self._tell_memory is not None and now_s >= self._memory_at_s and not self._draining:
            self._memory_at_s = now_s + MEMORY_INTERVAL_S
            self._tell_memory(self._store)
        if now_s >= self._dead_letters_at_s:  # after the leases, which must not wait for it
            self._dead_letters_at_s = now_s + TRIM_INTERVAL_S
            trim_dead_letters(self._store, self._metrics)

    def _measure(self) -> None:
        """Measure how late this beat is. A lease that runs out lets other workers reclaim the batches."""
        now_us = time.monotonic_ns() // 1000
        if self._last_beat_us is not None:
            self._metrics.beat(now_us - self._last_beat_us - self._lease_ms * 1000 // BEATS_PER_LEASE)
        self._last_beat_us = now_us
        self._metrics.in_hand.set(sum(len(replica.batches()) for replica in self._replicas))

    def drain(self) -> None:
        """From now on deregister each replica when it is no longer needed, and not before.

        A batch in flight occupies the capacity of one model process. If its own process were no longer
        counted, it would occupy another's, which would stay idle.
        """
        self._draining = True

    def stop(self) -> None:
        """End the wait between two beats."""
        self._stopping.set()
