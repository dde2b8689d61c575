"""The messages to one process of a model that binds sequences <-> the fields of stream entries.

An inbox is a stream, not a list: a message is still there after a reply that was lost. Its entries are in the
order in which the process is to take them: a batch is in `batches`, pending for this process, and the end of
a sequence frees its slot, before a later batch begins another one in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_BATCH: Final = "batch"  # as in `dispatch.lua`
_ENDED: Final = "ended"


class BatchSent(NamedTuple):
    """This batch was dispatched to the process."""

    batch_id: str


class SequenceEnded(NamedTuple):
    """This sequence ended without a result of the process: it was idle, ended by force, or broken by a
    request that was refused."""

    sequence_id: str


InboxMessage = BatchSent | SequenceEnded


def encode_ended(ended: SequenceEnded) -> list[str]:
    """The fields of the entry."""
    return [_ENDED, ended.sequence_id]


def decode_message(flat: Sequence[bytes]) -> InboxMessage:
    """The message in an entry, of which Redis returned these fields."""
    name, value = (part.decode() for part in flat)
    return BatchSent(value) if name == _BATCH else SequenceEnded(value)
