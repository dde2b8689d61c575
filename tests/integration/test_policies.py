"""A custom policy on a running stack: the batcher loads it by `--policies`, an operator selects it."""

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


def test_custom_policy_forms_batches_and_fails_only_the_request_it_raised_for(stack: Stack) -> None:
    stack.configure(MODEL, policy=PAIRS)
    requests = [{"correlation_id": f"p{position}", "body": b"7"} for position in range(9)]
    requests[4]["raise"] = b"yes"
    stack.send_packed(MODEL, requests)
    results = {position: stack.result(MODEL, f"p{position}") for position in range(9)}
    failed = results.pop(4)
    assert failed["status"] == "INTERNAL"
    assert failed["detail"] == "the model's batching policy raised RuntimeError in include"
    assert {result["status"] for result in results.values()} == {"OK"}
    assert {result["batch_size"] for result in results.values()} == {2}
    (event,) = stack.events("policy raised an exception")
    assert event["policy"] == PAIRS
    assert event["reason"].startswith("include raised RuntimeError: ")


def test_policy_that_was_not_loaded_is_rejected_and_reported(stack: Stack) -> None:
    stack.redis.hset(Keys(MODEL).config, "policy", "policies.py:Others")
    wait_until(lambda: stack.events("settings rejected, not applied"), description="the batcher rejects it")
    (event,) = stack.events("settings rejected, not applied")
    assert event["reason"] == "policy: 'policies.py:Others' is not one of this batcher's --policies"
    entry_id = stack.send(MODEL, body="7")
    assert stack.result(MODEL, entry_id)["status"] == "OK"

    def is_reported() -> bool:
        report = json.loads(stack.redis.get(Keys(MODEL).report) or b"{}")
        return bool(report.get("unheeded") == event["reason"])

    wait_until(is_reported, description="the batcher's report has the reason")


def test_batcher_that_takes_over_uses_registered_settings_if_an_override_is_rejected(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.worker("plain.py:Echo")
        stack.redis.hset(Keys(MODEL).config, "policy", "policies.py:Others")
        requests = [{"correlation_id": f"p{position}", "body": b"7"} for position in range(20)]
        stack.send_packed(MODEL, requests)
        stack.batcher()
        sizes = [stack.result(MODEL, f"p{position}")["batch_size"] for position in range(20)]
        assert max(sizes) == 16, "the registered max_batch_size"


def test_batcher_does_not_start_if_a_policy_cannot_be_found(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        batcher = stack.batcher("--policies", "policies.py:Nobody", ready=False)
        assert batcher.process.wait(20) == 1
        (event,) = batcher.events("batcher cannot start")
        assert event["reason"] == "'policies.py:Nobody': policies.py has no 'Nobody'"
