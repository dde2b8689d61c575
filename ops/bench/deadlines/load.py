"""A producer on the real system: sends requests at given times; what became of each, and why.

Each request that was missed has one cause, found where its answer was given:

    given up   the batcher refused it early: it expected that the request could not be in time
    waiting    it was never dispatched, and its deadline passed
    in flight  it was dispatched, and its deadline passed before its batch was executed or committed
    executed   it was answered OK, but it waited and was executed for longer than the deadline
    delivered  it was answered OK: waiting and execution were within the deadline, transit was not
    client     the client's own timer ended before any answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.client.aio import AsyncClient
from carpool.errors import DeadlineExceededError

CAUSES: Final = ("given up", "waiting", "in flight", "executed", "delivered", "client")
_CAUSES_BY_DETAIL: Final = {
    "refused early": "given up",
    "expired: still waiting": "waiting",
    "expired: it was dispatched": "in flight",
    "expired: its deadline passed before a worker": "in flight",
    "expired: its deadline passed before its batch was executed": "in flight",
    "expired: the model raised on its batch": "executed",
    "no result within": "client",
}


class Sent(NamedTuple):
    """A request: when it was sent, None if it was good, else the cause, and how late it was sent."""

    at_us: int
    missed: str | None
    late_us: int = 0


async def send(client: AsyncClient, model: str, due_us: Sequence[int], deadline_ms: int) -> list[Sent]:
    """Send requests at these times, without waiting for earlier results, and return them in this order.

    Each has the deadline as its `timeout`.
    """
    loop, sent = asyncio.get_running_loop(), list[Sent]()
    started_s = loop.time()

    async def ask(due_us: int) -> None:
        sent_s = loop.time()
        missed = None
        try:
            reply = await client.request(model, 1, timeout=deadline_ms / 1000)
        except DeadlineExceededError as error:
            missed = cause_named_by(error)
        else:
            if loop.time() - sent_s > deadline_ms / 1000:
                is_executed_late = reply.queue_us + reply.compute_us > 1000 * deadline_ms
                missed = "executed" if is_executed_late else "delivered"
        at_us = round((sent_s - started_s) * 1e6)
        sent.append(Sent(at_us, missed, at_us - due_us))

    async with asyncio.TaskGroup() as unanswered:
        for at_us in due_us:
            while (wait_s := started_s + at_us / 1e6 - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            unanswered.create_task(ask(at_us))
    return sorted(sent, key=lambda request: request.at_us)


def cause_named_by(error: DeadlineExceededError) -> str:
    """The cause that an answer names. Raises RuntimeError for one that is not known."""
    for text, cause in _CAUSES_BY_DETAIL.items():
        if text in error.detail:
            return cause
    raise RuntimeError(f"an answer of unknown cause: {error.detail}")
