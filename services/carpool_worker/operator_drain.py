"""A drain that an operator ordered: the worker takes no more batches, finishes what it has, and stays.

The heartbeat reads the order. What follows is as when a worker stops: replicas fetch nothing more, the
batcher is told so in the set `draining`, the last process of a version takes what was dispatched before that,
and a stepping model's requests go to other processes, if there are any. But nothing ends: the leases are
renewed, the model stays loaded, and when the order is undone the replicas fetch again.

Why: docs/decisions/0114.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import structlog

from carpool.store.worker import WorkerStore
from carpool_worker.replica_loop import AnyReplica

MARKED_AGAIN_S: Final = 3600.0  # the set `draining` expires after a day
LAST_BATCH_MS: Final = 1000  # after a drain began: batchers know of it long before


class OperatorDrain:
    """For the thread of the heartbeat. `is_ordered`: whether an operator drains this worker."""

    def __init__(self, worker: str) -> None:
        self.is_ordered = False
        self._worker = worker
        self._marked_at_s = 0.0
        self._lost_leases = 0
        self._log = structlog.get_logger()

    def follow(self, replicas: Sequence[AnyReplica], store: WorkerStore, *, is_ordered: bool) -> None:
        """Begin or end the drain if that is ordered. What failed is tried again at the next heartbeat. Raises
        CommandError."""
        if is_ordered:
            lost_leases = sum(replica.member.lost_leases for replica in replicas)
            age_s = time.monotonic() - self._marked_at_s
            if self.is_ordered and age_s < MARKED_AGAIN_S and lost_leases == self._lost_leases:
                return
            is_new, self.is_ordered = not self.is_ordered, True
            for replica in replicas:
                replica.begin_drain()
            self._mark(replicas, store, is_new=is_new)
            self._marked_at_s, self._lost_leases = time.monotonic(), lost_leases
            if is_new:
                self._log.info("worker drained by an operator", model=store.keys.model, worker=self._worker)
        elif self.is_ordered:
            for replica in replicas:
                if not replica.marks_its_drain:
                    store.undrain(replica.name)
                replica.end_drain()
            self.is_ordered, self._marked_at_s = False, 0.0
            self._log.info("worker serves again", model=store.keys.model, worker=self._worker)

    def _mark(self, replicas: Sequence[AnyReplica], store: WorkerStore, *, is_new: bool) -> None:
        """Tell the batcher. None of them is to get another batch."""
        marked = [replica for replica in replicas if not replica.marks_its_drain]
        others = True
        for replica in marked:
            others = store.drain(replica.name) > 0  # all of this worker drain when the last one was told
        if others and store.version:
            others = store.others_take_its_version(self._worker)
        until_ms = store.clock.now_us() // 1000 + LAST_BATCH_MS
        for replica in marked if is_new else ():
            if others:
                replica.hand_over_to_others()
            else:
                replica.fetch_last(until_ms)
