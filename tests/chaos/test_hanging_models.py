"""A model that hangs: its process is ended after `max_execution_ms`, and what made it hang is given up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool.keys import Keys
from support.stack import Stack

pytestmark = pytest.mark.chaos

LIMIT_MS: Final = 2500  # longer than a process is held up on a busy machine


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        yield stack


def test_a_request_that_hangs_is_given_up_and_others_are_served(stack: Stack, tmp_path: Path) -> None:
    model = stack.serve("plain.py:Echo")
    stack.configure(model, max_execution_ms=str(LIMIT_MS))
    bodies = {"a": 1, "hangs": {"gate": str(tmp_path / "never")}, "b": 2}
    stack.send_packed(
        model, [{"correlation_id": name, "body": json.dumps(body)} for name, body in bodies.items()]
    )
    results = {name: stack.result(model, name) for name in bodies}
    assert [results[name]["status"] for name in ("a", "b", "hangs")] == ["OK", "OK", "ABORTED"]
    assert "max_execution_ms, 2500 ms" in results["hangs"]["detail"]
    assert stack.redis.xlen(Keys(model).dead) == 1
    stack.send(model, correlation_id="later", body="3")
    assert stack.result(model, "later")["status"] == "OK"


def test_a_step_that_hangs_is_given_up_and_other_requests_go_on(stack: Stack) -> None:
    model = stack.serve("stepping.py:Chain")
    stack.configure(model, max_execution_ms=str(LIMIT_MS))
    bodies = {"a": {"length": 3}, "hangs": {"length": 3, "step_s": 1000}, "b": {"length": 3}}
    for name, body in bodies.items():
        stack.send(model, correlation_id=name, body=json.dumps(body))
    results = {name: stack.result(model, name) for name in bodies}
    assert [results[name]["status"] for name in ("a", "b", "hangs")] == ["OK", "OK", "ABORTED"]


def test_a_model_that_steps_without_effect_does_not_hang(stack: Stack, tmp_path: Path) -> None:
    """Its process says now and then that it lives."""
    gate = tmp_path / "gate"
    model = stack.serve("stepping.py:Chain")
    stack.configure(model, max_execution_ms=str(LIMIT_MS))
    stack.send(
        model, correlation_id="waits", body=json.dumps({"length": 1, "gate": str(gate), "step_s": 0.01})
    )
    stack.send(model, correlation_id="long", body=json.dumps({"length": LIMIT_MS // 7, "step_s": 0.01}))
    assert stack.result(model, "long")["status"] == "OK"  # later than the limit
    gate.touch()
    assert stack.result(model, "waits")["status"] == "OK"
    assert stack.events("model process died") == []


def test_sequences_of_a_process_that_hangs_are_aborted_and_can_begin_again(
    stack: Stack, tmp_path: Path
) -> None:
    model = stack.serve("bound.py:Hearing")
    stack.configure(model, max_execution_ms=str(LIMIT_MS))

    def send(name: str, sequence: str, body: str, **fields: int) -> str:
        stack.send(model, correlation_id=name, sequence_id=sequence, body=json.dumps(body), **fields)
        status: str = stack.result(model, name)["status"]
        return status

    assert send("a0", "a", "hello", sequence_start=1) == "OK"
    assert send("b0", "b", "hello", sequence_start=1) == "OK"
    assert send("a1", "a", f"wait {tmp_path / 'never'}") == "ABORTED"
    assert send("b1", "b", "again") == "ABORTED"
    assert send("b2", "b", "begin", sequence_start=1) == "OK"  # in the process that replaced it
