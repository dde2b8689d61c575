"""A stream whose largest ID was used up: once an operator has set the IDs back, its model is served again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from redis.exceptions import ResponseError

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until

KEYS: Final = Keys("Echo")
LARGEST: Final = f"{2**64 - 1}-{2**64 - 1}"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        yield stack


def exhaust(stack: Stack) -> None:
    """Use up the IDs, and set them back once the batcher has read the last one, as an operator does."""
    stack.redis.xadd(KEYS.requests, {"withdraw": "nothing"}, id=LARGEST)
    wait_until(lambda: not stack.redis.xlen(KEYS.requests), description="the batcher has read the last ID")
    with pytest.raises(ResponseError):
        stack.send("Echo", body="1")
    stack.redis.delete(KEYS.requests)


def test_an_idle_model_is_served_again(stack: Stack) -> None:
    stack.serve("plain.py:Echo")
    exhaust(stack)
    for number in range(3):
        entry_id = stack.send("Echo", body=str(number))
        assert stack.result("Echo", entry_id)["status"] == "OK"
    (event,) = stack.events("batcher failed, starting over")
    assert event["kind"] == "IdsSetBackError"


def test_a_model_with_requests_in_flight_is_served_again(stack: Stack, tmp_path: Path) -> None:
    """And those are not lost."""
    stack.serve("plain.py:Echo")
    gate = tmp_path / "gate"
    first = stack.send("Echo", body=f'{{"gate": "{gate}"}}')
    wait_until(lambda: stack.redis.xlen(KEYS.batches), description="it is dispatched")
    exhaust(stack)
    later = [stack.send("Echo", body=str(number)) for number in range(3)]
    wait_until(
        lambda: stack.events("batcher failed, starting over"), description="the batcher reads from the start"
    )
    gate.touch()
    for entry_id in (first, *later):
        assert stack.result("Echo", entry_id)["status"] == "OK"
