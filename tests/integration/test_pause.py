"""A model that an operator pauses and resumes, on real stacks: `carpool pause`, `resume`, `audit`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from carpool import Client
from carpool.errors import UnavailableError
from carpool.keys import Keys
from support.command import Done, carpool
from support.http import call
from support.models.stateful import folded
from support.stack import Stack
from support.status import get
from support.waiting import EVENTUALLY_S, wait_until

ECHO: Final = "Echo"
CHAIN: Final = "Chain"
SUM: Final = "Folding"
BOUND: Final = "Hearing"
KEYS: Final = Keys(ECHO)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("served")) as stack:
        stack.batcher("--http-port", "0")
        stack.serve(f"plain.py:{ECHO}", f"stepping.py:{CHAIN}", f"stateful.py:{SUM}", f"bound.py:{BOUND}")
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    """The stack, in which nothing is paused before and after the test."""
    yield served
    for model in (ECHO, CHAIN, SUM, BOUND):
        if served.redis.exists(Keys(model).paused):
            resume(served, model)


def run(stack: Stack, *arguments: str) -> str:
    done = carpool(stack.url, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(stack: Stack, event: str, model: str) -> int:
    return sum(one["model"] == model for one in stack.events(event))


def pause(stack: Stack, model: str, *flags: str) -> str:
    """Pause a model; return what the command printed, once the batcher knows."""
    before = told(stack, "model paused", model)
    printed = run(stack, "pause", model, *flags)
    wait_until(lambda: told(stack, "model paused", model) > before, description=f"{model} is paused")
    return printed


def resume(stack: Stack, model: str) -> str:
    before = told(stack, "model resumed", model)
    printed = run(stack, "resume", model)
    wait_until(lambda: told(stack, "model resumed", model) > before, description=f"{model} is resumed")
    return printed


def one_entry(stack: Stack, stream: str) -> bool:
    return int(stack.redis.xlen(stream)) == 1


def is_exported(stack: Stack, line: str) -> bool:
    return line in get(stack.services[0], "/metrics")[1]


def audit(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(stack, "audit", *arguments, "--json"))
    return found


def test_what_is_in_flight_finishes_and_the_rest_waits(stack: Stack, gate: Path) -> None:
    held = stack.send(ECHO, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.pending(ECHO) == 1, description="its batch is in hand")
    printed = pause(stack, ECHO, "--reason", "new weights")
    assert printed.startswith("Echo is paused since ") and printed.endswith(": new weights\n")
    waiting = stack.send(ECHO, body="7")
    expiring = stack.send(ECHO, body="8", expiration="300")
    stack.send(ECHO, body="9", correlation_id="withdrawn")
    stack.send(ECHO, withdraw="withdrawn")
    gate.touch()
    assert stack.result(ECHO, held)["status"] == "OK"
    expired = stack.result(ECHO, expiring)
    assert expired["status"] == "DEADLINE_EXCEEDED"
    assert expired["detail"].endswith("; its model is paused by an operator: new weights")
    assert stack.result(ECHO, "withdrawn")["status"] == "CANCELLED"
    assert stack.redis.xlen(KEYS.requests) == 1 and stack.redis.xlen(KEYS.batches) == 0
    assert resume(stack, ECHO).startswith("Echo is resumed; it was paused since ")
    assert stack.result(ECHO, waiting)["body"] == 7


def test_batcher_that_takes_over_knows_of_the_pause(tmp_path: Path) -> None:
    """Given a model that refuses requests, and one that waited before, when the batcher is killed, expect
    that the next one refuses and lets wait the same."""
    with Stack(tmp_path) as stack:
        killed = stack.batcher()
        stack.worker(f"plain.py:{ECHO}")
        stack.wait_for_model(ECHO)
        pause(stack, ECHO)
        before = stack.send(ECHO, body="1")
        wait_until(lambda: stack.redis.hget(KEYS.paused, "mode") == b"wait", description="it is paused")
        run(stack, "pause", ECHO, "--refuse", "--reason", "moving")
        killed.kill()
        while_none_is_active = stack.send(ECHO, body="2")
        stack.batcher()
        refused = stack.result(ECHO, while_none_is_active)
        assert refused["status"] == "UNAVAILABLE"
        assert refused["detail"] == "its model is paused by an operator: moving"
        assert stack.redis.xlen(KEYS.requests) == 1
        resume(stack, ECHO)
        assert stack.result(ECHO, before)["body"] == 1


def test_clients_are_refused_with_the_reason(stack: Stack) -> None:
    gateway = stack.gateway()
    pause(stack, ECHO, "--refuse", "--reason", "back at noon")
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        with pytest.raises(UnavailableError, match="paused by an operator: back at noon"):
            client.infer(ECHO, 7)
        answer = call(gateway.url, "POST", f"/carpool/v1/models/{ECHO}/infer", b"7")
        assert answer.code == 503 and answer.headers["retry-after"] == "1"
        assert "back at noon" in answer.json["error"]
        assert call(gateway.url, "GET", f"/v2/models/{ECHO}/ready").code == 503
        pause(stack, ECHO)
        assert call(gateway.url, "GET", f"/v2/models/{ECHO}/ready").code == 200
        waiting = client.submit(ECHO, 7)
        wait_until(partial(one_entry, stack, KEYS.requests), description="it waits")
        resume(stack, ECHO)
        assert waiting.result() == 7


def test_streams_and_sequences_go_on(stack: Stack) -> None:
    """Given a stream and sequences that have begun, expect that the stream goes on, that followers wait, and
    that no other one begins, although what arrives is refused."""
    with (
        Client(stack.url, timeout=EVENTUALLY_S) as client,
        client.sequence(SUM) as stateful,
        client.sequence(BOUND) as bound,
    ):
        assert [stateful.infer(5)] == folded([5])
        first = bound.infer(1)
        stream = client.stream(CHAIN, {"length": 40, "step_s": 0.02})
        chunks = [next(stream)]
        for model in (CHAIN, SUM, BOUND):
            pause(stack, model, "--refuse")
        for model in (SUM, BOUND):
            refused = client.sequence(model)
            refused.__enter__()
            with pytest.raises(UnavailableError, match="paused"):
                refused.infer(1)
        chunks += list(stream)
        assert len(chunks) == 40
        following = [stateful.submit(3), bound.submit(2)]
        for model in (SUM, BOUND):
            requests = Keys(model).requests
            wait_until(partial(one_entry, stack, requests), description="what follows waits")
        for model in (CHAIN, SUM, BOUND):
            resume(stack, model)
        assert [following[0].result()] == folded([5, 3])[1:]
        assert following[1].result()[1] == first[1], "it is in the same slot"


def test_commands_show_the_pause(stack: Stack) -> None:
    pause(stack, ECHO, "--reason", "why not")
    shown = "paused since 20"
    for command in (("models",), ("top", "--once"), ("config", ECHO)):
        assert shown in run(stack, *command) and "why not" in run(stack, *command), command
    (models,) = [one for one in json.loads(run(stack, "models", "--json")) if one["model"] == ECHO]
    assert models["paused"]["reason"] == "why not" and not models["paused"]["refuses"]
    (figures,) = json.loads(run(stack, "top", "--once", "--json", "--model", ECHO))["models"]
    assert figures["paused"] == models["paused"]
    tuned = carpool(stack.url, "tune", ECHO, "7", "--latency-ms", "30")
    assert tuned.returncode == 2 and "Echo is paused since" in tuned.stderr
    for number in (1, 0):
        line = f'carpool_paused{{model="Echo"}} {number}.0'
        wait_until(
            partial(is_exported, stack, line),
            description=f"it exports {number}",
        )
        if number:
            resume(stack, ECHO)


def test_audit_says_what_was_really_done(stack: Stack) -> None:
    """Each entry has what changed; what changes nothing has none."""
    stack.redis.delete(KEYS.audit)
    for arguments in (
        ("pause", ECHO),
        ("pause", ECHO),
        ("pause", ECHO, "--refuse", "--reason", "moving"),
        ("resume", ECHO),
        ("config", ECHO, "max_batch_size=9", "max_queue_size=77"),
        ("config", ECHO, "max_batch_size=9"),
        ("config", ECHO, "max_batch_size=", "max_queue_size=78"),
        ("config", ECHO, "max_queue_size="),
        ("share", ECHO, "2=10%"),
        ("promote", ECHO),
        ("share", ECHO, "--none"),
    ):
        run(stack, *arguments)
    assert carpool(stack.url, "resume", ECHO).returncode == 1
    found = audit(stack, ECHO)
    assert [(one["action"], one["details"]) for one in reversed(found) if one["action"] != "resume"] == [
        ("pause", {"mode": "wait"}),
        ("pause", {"mode": "wait -> refuse", "reason": "moving"}),
        ("config", {"max_batch_size": "none -> 9", "max_queue_size": "none -> 77"}),
        ("config", {"max_batch_size": "9 -> none", "max_queue_size": "77 -> 78"}),
        ("config", {"max_queue_size": "78 -> none"}),
        ("share", {"2": "none -> 10"}),
        ("promote", {"2": "10 -> 100"}),
        ("share", {"2": "100 -> none"}),
    ]
    (resumed,) = [one for one in found if one["action"] == "resume"]
    assert resumed["details"]["mode"] == "refuse" and resumed["details"]["reason"] == "moving"
    assert {(one["via"], "@" in one["who"]) for one in found} == {("command", True)}
    assert audit(stack, ECHO, "--count", "2", "--before", found[0]["id"]) == found[1:3]
    assert "78 -> none" in run(stack, "audit", ECHO)
    assert "`carpool audit MODEL` shows" in run(
        stack, "audit"
    )  # this one is of nodes: nothing was done there


def test_unknown_models_and_long_reasons_are_refused(stack: Stack) -> None:
    def error_of(*arguments: str) -> Done:
        done = carpool(stack.url, *arguments)
        assert done.returncode and not done.stdout
        return done

    assert "model 'Eco' is not registered; registered models: Chain, Echo" in error_of("pause", "Eco").stderr
    assert error_of("pause", ECHO, "--reason", "x" * 301).returncode == 2
    assert error_of("resume", "Eco").stderr == "carpool resume: Eco is not paused\n"
    assert "must have 1 to 128 characters" in error_of("audit", "no/model").stderr
