"""A policy of a user's own on a running stack: an operator names it, the batcher was told to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until

MODEL = "Echo"
PAIRS = "policies.py:Pairs"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        stack.batcher("--policies", PAIRS)
        stack.worker("plain.py:Echo")
        stack.wait_for_model(MODEL)
        yield stack


def test_it_says_who_rides_together_and_fails_alone(stack: Stack) -> None:
    stack.configure(MODEL, policy=PAIRS)
    requests = [{"correlation_id": f"p{at}", "body": b"7"} for at in range(9)]
    requests[4]["raise"] = b"yes"
    stack.send_packed(MODEL, requests)
    results = {at: stack.result(MODEL, f"p{at}") for at in range(9)}
    refused = results.pop(4)
    assert refused["status"] == "INTERNAL"
    assert refused["detail"] == "the batching policy's include raised RuntimeError"
    assert {one["status"] for one in results.values()} == {"OK"}
    assert {one["batch_size"] for one in results.values()} == {2}
    (said,) = stack.events("policy raised")
    assert said["policy"] == PAIRS
    assert said["reason"].startswith("include raised RuntimeError: ")


def test_one_that_no_batcher_was_told_of_changes_nothing(stack: Stack) -> None:
    stack.redis.hset(Keys(MODEL).config, "policy", "policies.py:Others")
    wait_until(lambda: stack.events("settings rejected"), description="the batcher refuses it")
    (said,) = stack.events("settings rejected")
    assert said["reason"] == "policy: 'policies.py:Others' is none of this batcher's --policies"
    entry_id = stack.send(MODEL, body="7")
    assert stack.result(MODEL, entry_id)["status"] == "OK"

    def shown() -> bool:
        status = json.loads(stack.redis.get(Keys(MODEL).report) or b"{}")
        return bool(status.get("unheeded") == said["reason"])

    wait_until(shown, description="whoever watches is told")


def test_a_batcher_that_takes_over_goes_by_the_rest_of_what_the_model_says(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.worker("plain.py:Echo")
        stack.redis.hset(Keys(MODEL).config, "policy", "policies.py:Others")
        stack.send_packed(MODEL, [{"correlation_id": f"p{at}", "body": b"7"} for at in range(20)])
        stack.batcher()
        sizes = [stack.result(MODEL, f"p{at}")["batch_size"] for at in range(20)]
        assert max(sizes) == 16, "the model's own max_batch_size"


def test_one_that_cannot_be_found_ends_the_batcher_with_a_sentence(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        batcher = stack.batcher("--policies", "policies.py:Nobody", ready=False)
        assert batcher.process.wait(20) == 1
        (said,) = batcher.events("batcher cannot start")
        assert said["reason"] == "'policies.py:Nobody': policies.py has no 'Nobody'"
