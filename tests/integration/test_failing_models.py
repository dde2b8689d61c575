"""A model that raises is seen: in its worker's log, in `carpool top`, and in `carpool models`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from carpool.client.sync import Client
from carpool.errors import InternalError
from carpool.messages.requests import JSON, MSGPACK
from support.command import carpool
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until

FAILED = 40


def run(stack: Stack, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    return carpool(stack.url, *arguments, check=True).stdout


def of_model(stack: Stack, model: str) -> dict[str, Any]:
    states: list[dict[str, Any]] = json.loads(run(stack, "models", "--json"))
    return next(state for state in states if state["model"] == model)


def wait_for_state(stack: Stack, model: str, is_met: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    wait_until(lambda: is_met(of_model(stack, model)), description="the batcher has reported it")
    return of_model(stack, model)


def test_model_that_raises_does_not_look_healthy(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")
    worker = stack.served_by("Faulty")
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        for _ in range(FAILED):
            with pytest.raises(InternalError, match="this one is spoilt"):
                client.infer("Faulty", "raise")
        assert client.infer("Faulty", "fine") is not None
    state = wait_for_state(stack, "Faulty", lambda state: state["failed"].get("INTERNAL") == FAILED)
    assert state["last_error"].startswith("RuntimeError at faulty.py:")
    shown = run(stack, "models")
    assert f"Requests of Faulty that failed: {FAILED} INTERNAL" in shown
    assert "RuntimeError at faulty.py:" in shown
    (model,) = json.loads(run(stack, "top", "--once", "--json"))["models"]
    assert model["failed"]["INTERNAL"]["total"] == FAILED
    assert model["last_error"] == state["last_error"]
    logged = [event for event in worker.events("model raised") if "spoilt" in event["exception"]]
    assert logged
    assert len(logged) < FAILED // 4, "a traceback in ten seconds, not one for each request"
    first = logged[0]
    assert (first["service"], first["model"], first["level"]) == ("worker", "Faulty", "error")
    assert (first["requests"], len(first["correlation_ids"])) == (1, 1)
    assert first["replica"] in stack.live_workers("Faulty") and first["batch"]


def test_what_batchers_refuse_and_overrides_are_in_models(stack: Stack) -> None:
    stack.serve("plain.py:Echo")
    stack.configure("Echo", max_batch_size="5")
    assert stack.result("Echo", stack.send("Echo", body="1", priority="11"))["status"] == "INVALID_ARGUMENT"
    state = wait_for_state(stack, "Echo", lambda state: state["refused"])
    assert state["refused"] == {"INVALID_ARGUMENT/input": 1}
    assert state["max_batch_size"] == 5
    assert "Requests of Echo that the batcher refused: 1 INVALID_ARGUMENT/input" in run(stack, "models")


def test_result_that_cannot_be_written_is_seen(stack: Stack) -> None:
    stack.serve("plain.py:Echo")
    with (
        Client(stack.url, timeout=EVENTUALLY_S) as client,
        pytest.raises(InternalError, match="neither NaN nor infinity"),
    ):
        client.infer("Echo", float("nan"), content_type=MSGPACK, accept=JSON)
    state = wait_for_state(stack, "Echo", lambda state: state["failed"].get("INTERNAL"))
    assert "neither NaN nor infinity" in state["last_error"]
    wait_until(
        lambda: any("NaN" in event.get("error", "") for event in stack.served_by("Echo").events("batches")),
        description="the worker logs it",
    )


def test_dead_letters_are_shown_by_top(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")
    with Client(stack.url, timeout=60) as client, pytest.raises(Exception, match=r"dead letter|died"):
        client.infer("Faulty", "kill")
    wait_until(lambda: of_model(stack, "Faulty")["dead"] == 1, description="it is a dead letter")
    assert "dead letters" in run(stack, "top", "--once")


def test_generator_that_raises(stack: Stack) -> None:
    stack.serve("stepping.py:countdown")
    with Client(stack.url, timeout=EVENTUALLY_S) as client, pytest.raises(InternalError):
        client.infer("countdown", "three", correlation_id="mine")
    state = wait_for_state(stack, "countdown", lambda state: state["failed"])
    assert state["failed"] == {"INTERNAL": 1}
    (line,) = stack.served_by("countdown").events("model raised")
    assert (line["model"], line["correlation_ids"]) == ("countdown", ["mine"])
    assert line["replica"] and line["batch"]
    assert line["error"] == state["last_error"]
