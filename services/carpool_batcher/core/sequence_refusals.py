"""Why requests of a sequence are refused: a status and a sentence for each reason."""

from __future__ import annotations

from typing import Final

from carpool.errors import ABORTED, CANCELLED, INVALID_ARGUMENT
from carpool.messages import Refusal, Run
from carpool_batcher.core.decisions import duplicate, refusal
from carpool_batcher.core.sequence import part_of

# Why a sequence is broken.
ENDED_BY_FORCE: Final = "it was ended (end_sequences)"
PROCESS_GONE: Final = "its model process ended"
FAILED_BEFORE: Final = "an earlier request of it did not succeed"


def did_not_succeed(correlation_id: str) -> str:
    """Why a sequence is broken: because of this request."""
    return f"its request {correlation_id} did not succeed"


def did_not_arrive(index: int, within_ms: int) -> str:
    """Why a sequence is broken: its other requests waited for one with this index."""
    return f"its request with the index {index} did not arrive within {within_ms} ms"


def aborted(run: Run, reason: str) -> Refusal:
    """Its sequence is broken."""
    detail = f"sequence {part_of(run).sequence_id}: {reason}; begin it again with sequence_start"
    return _refusal(run, ABORTED, detail)


def never_begun(run: Run) -> Refusal:
    """There is no state for it."""
    name = part_of(run).sequence_id
    detail = f"sequence_id: {name} was never begun, or has ended: begin it with sequence_start"
    return _refusal(run, INVALID_ARGUMENT, detail)


def processed_already(run: Run, next_index: int) -> Refusal:
    """Another request had its index."""
    detail = f"sequence_index: {part_of(run).index} was sent before; the next to be processed is {next_index}"
    return _refusal(run, INVALID_ARGUMENT, detail)


def sent_twice(run: Run) -> Refusal:
    """It has come before, with the same correlation ID: it is removed without an answer."""
    return duplicate(run)


def ended_by_force(run: Run) -> Refusal:
    """It waited when its sequence was ended by force."""
    return _refusal(run, CANCELLED, f"sequence {part_of(run).sequence_id}: {ENDED_BY_FORCE}")


def _refusal(run: Run, status: str, detail: str) -> Refusal:
    return refusal(run, status, "sequence", detail)
