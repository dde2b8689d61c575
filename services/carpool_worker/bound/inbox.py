"""The inbox of one process of a bound model: batches that were dispatched to it, and sequences that ended.

It is read from the last message that was taken, so a reply that was lost costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from carpool.store.bound import INBOX_START, BoundStore
from carpool.store.worker import WorkerStore
from carpool.wire.inbox import BatchSent, InboxMessage, SequenceEnded
from carpool_worker.batch_sources import BLOCK_MS, Reclaimer, Source
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics


class BatchLost:
    """A batch that was dispatched to this process is another's now, or was deleted by hand."""


Item = Execution | SequenceEnded | BatchLost
_LOST: Final = BatchLost()


class Inbox(Source[Item, BoundStore]):
    """What its messages are about, in their order. While Redis cannot be reached, they stay in it."""

    def __init__(
        self,
        member: Member,
        store: BoundStore,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        super().__init__(member, store, Reclaimer(member, store, lease_ms, metrics), register)
        self._last_id = INBOX_START  # of the messages that were taken

    def start(self) -> list[Execution]:
        return self._reclaim_or(self._ask)

    def _ask(self) -> None:
        self._store.start_reading(self._member.name, self._last_id, BLOCK_MS)

    def _read(self) -> list[Item]:
        messages = self._store.finish_reading()
        if not messages:
            return []
        sent = [message.batch_id for _, message in messages if isinstance(message, BatchSent)]
        batches = self._store.fetch(self._member.name, sent)
        executions = {batch_id: self._load_one(Execution(batch)) for batch_id, batch in batches.items()}
        self._last_id, _ = messages[-1]
        return [_item(message, executions) for _, message in messages]

    def pending(self) -> list[Execution]:
        """What the process has in Redis, whether it was taken from the inbox or not."""
        return [self._load_one(Execution(batch)) for batch in self._store.pending(self._member.name)]

    def start_over(self) -> None:
        """The process has another name, and another inbox."""
        self.stop()
        self._last_id, self._unloaded = INBOX_START, []

    def stop(self) -> None:
        """Wait for no messages any more."""
        if self.waiting:
            self.waiting = False
            self._store.stop_reading()


def _item(message: InboxMessage, executions: dict[str, Execution]) -> Item:
    return message if isinstance(message, SequenceEnded) else executions.get(message.batch_id, _LOST)
