"""What a scheduler decides: to dispatch a batch, to refuse a request, or to expire one in flight."""

from __future__ import annotations

from typing import NamedTuple

from carpool.messages import Dispatch, Refusal, Request


class Expire(NamedTuple):
    """Answer the request at `position` of a batch in flight with DEADLINE_EXCEEDED."""

    batch_id: str
    position: int
    request: Request


Decision = Dispatch | Refusal | Expire


def refusal(request: Request, status: str, reason: str, detail: str) -> Refusal:
    """The Refusal of a waiting or arriving request."""
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
