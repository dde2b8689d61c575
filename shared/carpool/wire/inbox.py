"""What the batcher of a bound model tells one of its processes: entries of a stream, read in their order.

    batch BATCH_ID      `dispatch.lua` dispatched this batch to the process; it is in its pending list
    end SEQUENCE_ID     `refuse.lua`: the sequence has no slot there any more, if it had one. Requests of it
                        that are dispatched later begin with a start

It is a stream, and not a list, so that nothing is lost with a reply: a process reads on after the last entry
that it knows. It reads its inbox from the beginning, because no name of a process is used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BatchDispatched(NamedTuple):
    """A batch for this process is in flight."""

    batch_id: str


class SequenceFreed(NamedTuple):
    """A sequence ended without a request of its own: its slot is free."""

    sequence_id: str


InboxMessage = BatchDispatched | SequenceFreed


def decode_inbox(flat: Sequence[bytes]) -> InboxMessage:
    """An entry of an inbox as Redis returns it. Only batchers write there, so a malformed one raises."""
    name, value = flat
    return _MESSAGES[name](value.decode())


_MESSAGES: dict[bytes, type[BatchDispatched] | type[SequenceFreed]] = {
    b"batch": BatchDispatched,
    b"end": SequenceFreed,
}
