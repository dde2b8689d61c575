"""A custom policy on a running stack: the batcher loads it by `--policies`, an operator selects it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool_batcher.effective_settings import RETRY_S
from support.command import Done, carpool
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL = "Echo"
PAIRS = "policies.py:Pairs"
FICKLE = "policies.py:Fickle"


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
    assert re.fullmatch(r"include raised RuntimeError: .*\.py, line \d+", event["reason"])


def run(stack: Stack, *arguments: str, status: int = 0) -> Done:
    """A finished command, which must have this exit status."""
    done = carpool(stack.url, *arguments)
    assert done.returncode == status, done.stderr
    return done


def report(stack: Stack, model: str = MODEL) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.redis.get(Keys(model).report) or b"{}")
    return found


def expect_not_in_force(stack: Stack, model: str, reason: str) -> None:
    """The batcher's report says that the policy is not in force, and why."""
    wait_until(lambda: report(stack, model).get("rejected_settings") == reason, description="it is reported")
    assert report(stack, model)["policy"] == "eager"


def expect_reason_shown(stack: Stack, model: str, reason: str) -> None:
    """Each command that shows a model says what the report says."""
    assert f"serves it with others: {reason}" in run(stack, "models").stdout
    (row,) = json.loads(run(stack, "models", "--json").stdout)
    assert (row["policy"], row["rejected_settings"]) == ("eager", reason)

    assert f"under the policy eager: {reason}" in run(stack, "config", model).stdout
    as_json = run(stack, "config", model, "--json")
    assert reason in as_json.stderr and list(json.loads(as_json.stdout)) == ModelSettings.names()

    page = [" ".join(line.split()) for line in run(stack, "top", "--once").stdout.splitlines()]
    assert "policy eager, not that of the settings" in page
    assert any(line.startswith("settings rejected: policy: ") for line in page)
    (shown,) = json.loads(run(stack, "top", "--once", "--json").stdout)["models"]
    assert (shown["policy"], shown["rejected_settings"]) == ("eager", reason)


def test_policy_in_force_is_shown(stack: Stack) -> None:
    changed = run(stack, "config", MODEL, f"policy={PAIRS}")
    assert "rejects" not in changed.stdout
    assert report(stack)["policy"] == PAIRS, "the command waited for it"
    (row,) = json.loads(run(stack, "models", "--json").stdout)
    assert (row["policy"], row["rejected_settings"]) == (PAIRS, "")
    assert f"policy {PAIRS}" in " ".join(run(stack, "top", "--once").stdout.split())
    assert "rejects" not in run(stack, "config", MODEL).stdout


def test_policy_that_a_model_declares_but_the_batcher_does_not_have_is_not_in_force(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.serve("policies.py:Declaring")
        reason = f"policy: {PAIRS!r} is not one of this batcher's --policies"
        expect_not_in_force(stack, "Declaring", reason)
        expect_reason_shown(stack, "Declaring", reason)
        assert stack.result("Declaring", stack.send("Declaring", body="7"))["status"] == "OK"


def test_policy_whose_constructor_raises_is_not_in_force_until_it_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "fickle"
    with Stack(tmp_path / "stack", environment={"batcher": {"FICKLE_FILE": str(file)}}) as stack:
        stack.batcher("--policies", FICKLE)
        stack.worker("plain.py:Echo")
        stack.wait_for_model(MODEL)
        wait_until(lambda: report(stack).get("policy") == "eager", description="it is reported")
        file.touch()
        reason = (
            f"policy: {FICKLE!r} cannot be created: its constructor, which gets no arguments, raised "
            "RuntimeError: the file exists"
        )
        assert reason in run(stack, "config", MODEL, f"policy={FICKLE}", status=2).stdout
        expect_not_in_force(stack, MODEL, reason)
        # Another change is rejected for the same reason, and says so
        assert reason in run(stack, "config", MODEL, "max_batch_size=4", status=2).stdout
        file.unlink()
        wait_until(
            lambda: report(stack).get("policy") == FICKLE,
            description="the batcher tries it again",
            timeout_s=RETRY_S + 10,
        )
        assert report(stack)["rejected_settings"] == ""


def test_policy_without_a_batcher_is_accepted_with_a_warning(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.worker("plain.py:Echo")
        warning = f"No active batcher reports that the policy {PAIRS} is in force."
        assert warning in run(stack, "config", MODEL, f"policy={PAIRS}").stdout
        assert warning in run(stack, "config", MODEL).stdout


def test_policy_that_was_not_loaded_is_rejected_and_reported(stack: Stack) -> None:
    stack.redis.hset(Keys(MODEL).overrides, "policy", "policies.py:Others")
    wait_until(lambda: stack.events("settings rejected, not applied"), description="the batcher rejects it")
    (event,) = stack.events("settings rejected, not applied")
    assert event["reason"] == "policy: 'policies.py:Others' is not one of this batcher's --policies"
    assert stack.result(MODEL, stack.send(MODEL, body="7"))["status"] == "OK"
    expect_not_in_force(stack, MODEL, event["reason"])


def test_batcher_that_takes_over_uses_registered_settings_if_an_override_is_rejected(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.worker("plain.py:Echo")
        stack.redis.hset(Keys(MODEL).overrides, "policy", "policies.py:Others")
        requests = [{"correlation_id": f"p{position}", "body": b"7"} for position in range(20)]
        stack.send_packed(MODEL, requests)
        stack.batcher()
        sizes = [stack.result(MODEL, f"p{position}")["batch_size"] for position in range(20)]
        assert max(sizes) == 16, "the registered max_batch_size"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("policies.py:Nobody", "--policies: 'policies.py:Nobody': policies.py has no 'Nobody'"),
        (
            "policies.py:Declaring",
            "--policies: 'policies.py:Declaring' has no method 'include': write include",
        ),
    ],
)
def test_batcher_does_not_start_if_a_policy_cannot_be_used(tmp_path: Path, policy: str, reason: str) -> None:
    with Stack(tmp_path) as stack:
        batcher = stack.batcher("--policies", policy, ready=False)
        assert batcher.process.wait(EVENTUALLY_S) == 1
        (event,) = batcher.events("batcher cannot start")
        assert event["reason"].startswith(reason)
