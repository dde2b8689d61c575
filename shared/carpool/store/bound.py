"""What a worker of a bound model does in Redis beside `WorkerStore`: read the inbox of a process, drain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from carpool.keys import WORKERS_GROUP
from carpool.messages.batches import Batch
from carpool.store.connection import Command, CommandError, Script
from carpool.store.worker import Reclaimed, WorkerStore
from carpool.wire.batches import decode_batch
from carpool.wire.inbox import InboxMessage, decode_message

INBOX_START: Final = "0"  # the ID after which the first message is
_MESSAGES_MAX: Final = 100  # in one reply
_PENDING_MAX: Final = 100
_ASSIGN: Final = Script("assign")


class BoundStore(WorkerStore):
    """A worker's connection to one bound model, for one of its loops."""

    def start_reading(self, process: str, last_id: str, block_ms: int) -> None:
        """Ask for the messages to a process after `last_id`, for which Redis waits up to `block_ms`. Until
        `finish_reading` or `stop_reading`, nothing else may be called."""
        self._link.send(
            "XREAD", "COUNT", _MESSAGES_MAX, "BLOCK", block_ms, "STREAMS", self.keys.inbox(process), last_id
        )
        self._link.expect_reply(block_ms / 1000)

    def finish_reading(self) -> list[tuple[str, InboxMessage]]:
        """The messages with their IDs; none if there was none. Waits until `descriptor` is readable."""
        reply = self._link.receive()
        entries = reply[0][1] if reply else ()
        return [(entry_id.decode(), decode_message(flat)) for entry_id, flat in entries]

    def stop_reading(self) -> None:
        """Do not wait for the messages that were asked for."""
        self._link.close()

    def fetch(self, process: str, batch_ids: Sequence[str]) -> dict[str, Batch]:
        """The batches of these that are the process's, by ID. Others were reclaimed, or deleted by hand."""
        self._assign(process)
        commands: list[Command] = []
        for batch_id in batch_ids:
            commands.append(("XPENDING", self._batches, WORKERS_GROUP, batch_id, batch_id, 1, process))
            commands.append(("XRANGE", self._batches, batch_id, batch_id))
        replies = self._link.call_many(*commands)
        for reply in replies:
            if isinstance(reply, CommandError):
                raise reply
        owned = [
            _decode(pending, entries)
            for pending, entries in zip(replies[::2], replies[1::2], strict=True)
            if pending and entries
        ]
        return {batch.id: batch for batch in owned}

    def pending(self, process: str) -> list[Batch]:
        """Batches that the process has, oldest first, at most 100."""
        try:
            self._assign(process)
            pending = self._link.call(
                "XPENDING", self._batches, WORKERS_GROUP, "-", "+", _PENDING_MAX, process
            )
        except CommandError as error:
            if error.code != "NOGROUP":  # Redis was emptied
                raise
            return []
        return list(self.fetch(process, [batch_id.decode() for batch_id, *_ in pending]).values())

    def reclaim(self, consumer: str, lease_ms: int) -> Reclaimed | None:
        """As of any model: also a batch whose process died before it learned of it."""
        self._assign(consumer)
        return super().reclaim(consumer, lease_ms)

    def _assign(self, process: str) -> None:
        """Put what was dispatched into the pending lists of the processes that it is for."""
        self._link.run(_ASSIGN, [self._batches], [process])


def _decode(pending: Sequence[Any], entries: Sequence[Any]) -> Batch:
    """A batch, from what Redis tells of its delivery, and its entry."""
    ((_, _, _, deliveries),) = pending
    ((entry_id, flat),) = entries
    return decode_batch(entry_id, flat, epoch=deliveries)
