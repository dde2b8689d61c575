"""Processes that live, and in which nothing succeeds any more: they are replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until

pytestmark = pytest.mark.chaos


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        yield stack


Send = Callable[..., tuple[str, str]]


def sender(stack: Stack, model: str) -> Send:
    """Sends one request, waits for its result, and returns its status and detail."""

    def send(name: str, body: str, **fields: str | int) -> tuple[str, str]:
        stack.send(model, correlation_id=name, body=json.dumps(body), **fields)
        result = stack.result(model, name)
        return result["status"], result.get("detail", "")

    return send


@pytest.mark.parametrize("name", ["OnDevice", "SaysSo"])
def test_a_broken_accelerator_is_replaced_and_what_was_in_hand_succeeds(
    stack: Stack, tmp_path: Path, name: str
) -> None:
    model = stack.serve(f"broken.py:{name}")
    bodies = {"a": "a", "breaks": f"assert {tmp_path / 'broken'}", "b": "b"}
    stack.send_packed(
        model, [{"correlation_id": name, "body": json.dumps(body)} for name, body in bodies.items()]
    )
    results = {name: stack.result(model, name) for name in bodies}
    assert {name: (result["status"], result["body"]) for name, result in results.items()} == {
        name: ("OK", body) for name, body in bodies.items()
    }
    assert sender(stack, model)("later", "c") == ("OK", "")
    assert len(stack.events("model process died")) == 1
    assert stack.redis.xlen(Keys(model).dead) == 0


def test_a_request_that_breaks_accelerators_is_given_up(stack: Stack) -> None:
    model = stack.serve("broken.py:OnDevice")
    send = sender(stack, model)
    status, detail = send("breaks", "assert")
    assert (status, detail.rpartition(": ")[2]) == ("ABORTED", "device-side assert triggered")
    assert send("later", "b") == ("OK", "")
    assert len(stack.events("model process died")) == 2
    assert stack.redis.xlen(Keys(model).dead) == 1


def test_streams_go_on_where_an_accelerator_broke(stack: Stack, tmp_path: Path) -> None:
    model = stack.serve("broken.py:StepsOnDevice")
    send = sender(stack, model)
    assert send("early", "a b", stream=1)[0] == "OK"
    status, detail = send("breaks", "a assert c")
    assert (status, detail.rpartition(": ")[2]) == ("ABORTED", "device-side assert triggered")
    assert send("later", "a b c") == ("OK", "")


def test_sequences_of_a_broken_accelerator_are_aborted_and_can_begin_again(
    stack: Stack, tmp_path: Path
) -> None:
    model = stack.serve("broken.py:BoundToDevice")
    send = sender(stack, model)
    assert send("a0", "a", sequence_id="a", sequence_start=1)[0] == "OK"
    assert send("b0", "b", sequence_id="b", sequence_start=1)[0] == "OK"
    assert send("a1", "assert", sequence_id="a")[0] == "ABORTED"
    assert send("b1", "b", sequence_id="b")[0] == "ABORTED"
    assert send("b2", "b", sequence_id="b", sequence_start=1)[0] == "OK"


SILENT = ["Silent", "SilentSteps", "SilentStates", "SilentSlots"]
RETIRED = "model process retired, all that it executes fails"


def silent_sender(stack: Stack, name: str) -> tuple[str, Callable[..., str]]:
    """A model, and what sends it a request, which is a sequence if it takes these; and returns the status."""
    model = stack.serve(f"broken.py:{name}")
    send = sender(stack, model)
    part = {"sequence_start": 1, "sequence_end": 1} if name in ("SilentStates", "SilentSlots") else {}

    def send_one(body: str, **fields: str | int) -> str:
        number = f"r{stack.redis.incr('number')}"
        parts = {"sequence_id": number, **part} if part else {}
        status, _ = send(number, body, **parts, **fields)
        return status

    return model, send_one


@pytest.mark.parametrize("name", SILENT)
def test_a_process_of_which_all_fails_is_replaced_once(stack: Stack, name: str) -> None:
    """In a way of which no text is known. It takes some seconds: failures at once may pass."""
    model, send = silent_sender(stack, name)
    assert send("a") == "OK"
    assert send("break") == "INTERNAL"

    def fails_until_retired() -> bool:
        send("b")  # nothing that would break the next process, which may be there already
        return bool(stack.events(RETIRED))

    wait_until(fails_until_retired, description="the process is retired")
    assert send("b") in ("OK", "ABORTED")  # a process of slots may lose what was dispatched to it meanwhile
    assert send("b") == "OK"
    assert len(stack.events(RETIRED)) == 1
    assert stack.events("model process died") == []
    assert stack.redis.xlen(Keys(model).dead) == 0


@pytest.mark.parametrize("name", SILENT)
def test_a_producer_of_many_names_has_no_process_retired(stack: Stack, tmp_path: Path, name: str) -> None:
    """Until the process was tried: it executes the request that succeeded a second time."""
    _, send = silent_sender(stack, name)
    executed = tmp_path / "executed"
    assert send(f"good {executed}") == "OK"
    once = len(executed.read_text().splitlines())

    def fails_until_tried() -> bool:
        number = stack.redis.incr("number")
        assert send("bad", tenant=f"t{number % 3}", lane=f"l{number % 2}") == "INTERNAL"
        return len(executed.read_text().splitlines()) > once

    wait_until(fails_until_tried, description="the process is tried")
    assert send("good") == "OK"
    assert send("bad") == "INTERNAL"
    assert send("good") == "OK"
    assert stack.events(RETIRED) == stack.events("model process died") == []
