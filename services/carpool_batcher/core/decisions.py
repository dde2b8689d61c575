"""What a scheduler decides: to dispatch a batch, to refuse requests, to answer some in flight, to change what
Redis keeps of a sequence, or to tell a model process that a slot is free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import UNANSWERED, Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed


class Expire(NamedTuple):
    """Answer a run of a batch in flight with DEADLINE_EXCEEDED. `position` is that of its first request."""

    batch_id: str
    position: int
    run: Run


class Cancel(NamedTuple):
    """Answer a run of a batch in flight with CANCELLED. `position` is that of its first request."""

    batch_id: str
    position: int
    run: Run


class Abandon(NamedTuple):
    """Answer all requests of a batch in flight with NOT_FOUND, and remove it: no worker has its version."""

    batch_id: str
    runs: Sequence[Run]
    detail: str


# Status and detail: of requests that expire in flight; of those that producers or operators withdraw.
EXPIRED: Final = (DEADLINE_EXCEEDED, "expired: it was dispatched, but not executed by its deadline")
WITHDRAWN: Final = (CANCELLED, "it was withdrawn")

Decision = Dispatch | Refusal | Expire | Abandon | SequenceChange | SlotFreed


def refusal(run: Run, status: str, reason: str, detail: str) -> Refusal:
    """The Refusal of a waiting or arriving run."""
    return Refusal(
        run.entry,
        run.correlation_ids,
        run.reply_to,
        run.content_type,
        status,
        reason,
        detail,
        run,
    )


def copy_refusal(run: Run) -> Refusal:
    """The removal of requests that were sent twice, and are answered once."""
    return refusal(run, UNANSWERED, "duplicate", "")
