"""A sequence whose last commit is lost, as on a failover to a replica without it: what PROTOCOL.md says."""

from __future__ import annotations

from typing import Final

from carpool.keys import Keys
from support.models.stateful import folded
from support.stack import Stack

MODEL: Final = "Folding"
KEYS: Final = Keys(MODEL)
NUMBERS: Final = (5, 3, 8)


def send(stack: Stack, index: int, *, is_numbered: bool) -> str:
    number: dict[str, int] = {"sequence_index": index} if is_numbered else {}
    return stack.send(MODEL, sequence_id="s", sequence_start=int(index == 0), body=NUMBERS[index], **number)


def lose_second_commit(stack: Stack, *, is_numbered: bool, max_sequence_idle_ms: int = 60_000) -> None:
    """Two requests succeed. Then Redis has the state between them, and another batcher takes over, with this
    setting: for so long a request waits for a missing one."""
    stack.serve(f"stateful.py:{MODEL}")
    before: bytes | None = None
    for index in range(2):
        before = stack.redis.dump(KEYS.sequence("s"))
        result = stack.result(MODEL, send(stack, index, is_numbered=is_numbered))
        assert result["body"] == folded(NUMBERS)[index]
    assert before is not None
    stack.wait_until_idle(MODEL)
    stack.active_batcher(MODEL).kill()
    stack.redis.hset(KEYS.overrides, "max_sequence_idle_ms", max_sequence_idle_ms)
    stack.redis.restore(KEYS.sequence("s"), 3_600_000, before, replace=True)
    stack.redis.delete(KEYS.batcher)  # its lease
    stack.batcher()


def test_lost_commit_does_not_show_where_requests_have_no_numbers(stack: Stack) -> None:
    lose_second_commit(stack, is_numbered=False)
    result = stack.result(MODEL, send(stack, 2, is_numbered=False))
    assert (result["status"], result["body"]) == ("OK", folded((NUMBERS[0], NUMBERS[2]))[-1])


def test_lost_commit_shows_where_requests_are_numbered(stack: Stack) -> None:
    lose_second_commit(stack, is_numbered=True, max_sequence_idle_ms=1000)
    result = stack.result(MODEL, send(stack, 2, is_numbered=True))
    assert result["status"] in ("ABORTED", "INVALID_ARGUMENT")  # the second if its sequence was idle too long


def test_missing_request_may_be_sent_again(stack: Stack) -> None:
    """While the one behind it waits. Both have the results that they would have had."""
    lose_second_commit(stack, is_numbered=True)
    last = send(stack, 2, is_numbered=True)
    missing = send(stack, 1, is_numbered=True)
    assert stack.result(MODEL, missing)["body"] == folded(NUMBERS)[1]
    assert stack.result(MODEL, last)["body"] == folded(NUMBERS)[2]
