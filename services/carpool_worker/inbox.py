"""The inbox of one process of a bound model: batches that were dispatched to it, and sequences that ended.

It is read from the last message that was taken, so a reply that was lost costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from carpool.store.bound import INBOX_START, BoundStore
from carpool.store.connection import CommandError, LinkError
from carpool.store.worker import WorkerStore
from carpool.wire.inbox import BatchSent, SequenceEnded
from carpool_worker.execution import Execution
from carpool_worker.fetcher import BLOCK_MS, RECLAIMS_PER_LEASE, Reclaimer, load
from carpool_worker.meter import WorkerMetrics


class BatchLost:
    """A batch that was dispatched to this process is another's now, or was deleted by hand."""


Item = Execution | SequenceEnded | BatchLost
_LOST: Final = BatchLost()


class Inbox:
    """`start` asks for messages; once `descriptor` is readable, `finish` takes them."""

    def __init__(
        self,
        consumer: str,
        store: BoundStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._consumer = consumer
        self._store = store
        self._register = register
        self._reclaimer = Reclaimer(consumer, store, lease_ms, metrics, lease_ms / RECLAIMS_PER_LEASE)
        self._last_id = INBOX_START  # of the messages that were taken
        self.waiting = False  # for the reply to `start`
        self.descriptor: int | None = None  # the socket to wait on for it; None if `finish` would not wait

    def start(self) -> Execution | None:
        """Reclaim a batch if that is due and there is one; else ask for messages."""
        try:
            reclaimed = self._reclaimer.reclaim_if_due()
            if reclaimed is not None:
                load(self._store, reclaimed)
                return reclaimed
            self._store.start_reading(self._consumer, self._last_id, BLOCK_MS)
            self.waiting, self.descriptor = True, self._store.descriptor
        except CommandError as error:
            self._register_again(error)
        return None

    def finish(self) -> list[Item]:
        """What the messages are about, in their order; nothing if there was none within half a second.

        If Redis cannot be reached, they are still in the inbox.
        """
        self.waiting = False
        messages = self._store.finish_reading()
        if not messages:
            return []
        items: list[Item] = []
        try:
            sent = [message.batch_id for _, message in messages if isinstance(message, BatchSent)]
            batches = self._store.fetch(self._consumer, sent)
            for _, message in messages:
                if isinstance(message, SequenceEnded):
                    items.append(message)
                elif message.batch_id in batches:
                    execution = Execution(batches[message.batch_id])
                    load(self._store, execution)
                    items.append(execution)
                else:
                    items.append(_LOST)
        except CommandError as error:
            self._register_again(error)
            return []
        self._last_id, _ = messages[-1]
        return items

    def check_overdue(self) -> None:
        """Whether what was asked for may still come. Raises LinkError if Redis should have answered."""
        try:
            self._store.check_overdue()
        except LinkError:
            self.waiting = False
            raise

    def pending(self) -> list[Execution]:
        """What the process has in Redis, whether it was taken from the inbox or not."""
        pending = [Execution(batch) for batch in self._store.pending(self._consumer)]
        for execution in pending:
            load(self._store, execution)
        return pending

    def begin_life(self, consumer: str) -> None:
        """The process has another name, and another inbox."""
        self.stop()
        self._consumer = self._reclaimer.consumer = consumer
        self._last_id = INBOX_START

    def stop(self) -> None:
        """Wait for no messages any more."""
        if self.waiting:
            self.waiting = False
            self._store.stop_reading()

    def _register_again(self, error: CommandError) -> None:
        """Redis was emptied."""
        if error.code != "NOGROUP":
            raise error
        self._register(self._store)
