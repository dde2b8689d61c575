"""What a scheduler may decide: to send a batch, to refuse a request, to answer one that rides."""

from __future__ import annotations

from typing import NamedTuple

from carpool.messages import Dispatch, Refusal, Request


class Expire(NamedTuple):
    """Answer this request, which is at `position` of a batch in flight, DEADLINE_EXCEEDED."""

    batch_id: str
    position: int
    request: Request


Decision = Dispatch | Refusal | Expire


def refusal(request: Request, status: str, reason: str, detail: str) -> Refusal:
    """The answer to a request that will not ride."""
    return Refusal(
        request.entry,
        request.correlation_id,
        request.reply_to,
        request.content_type,
        status,
        reason,
        detail,
        request,
    )
