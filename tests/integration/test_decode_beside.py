"""Bodies decoded and results encoded beside the batches, in threads and processes, on a whole stack."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.client import Client
from carpool.keys import Keys
from support.http import call
from support.stack import Stack
from support.waiting import wait_until

DIED = "decoder process died"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def results_of(stack: Stack, model: str, bodies: dict[str, Any], **shared: Any) -> dict[str, Any]:
    """The result of each, or its status and detail. All are in one entry."""
    requests = [{"correlation_id": name, "body": json.dumps(body)} for name, body in bodies.items()]
    stack.send_packed(model, requests, **shared)
    return {name: answer(stack, model, name) for name in bodies}


def answer(stack: Stack, model: str, name: str) -> Any:
    result = stack.result(model, name)
    return result["body"] if result["status"] == "OK" else (result["status"], result["detail"])


@pytest.mark.parametrize("name", ["InThreads", "InProcesses"])
def test_each_body_is_decoded_and_each_result_encoded_and_fails_alone(stack: Stack, name: str) -> None:
    model = stack.serve(f"beside.py:{name}")
    bodies: dict[str, Any] = {f"{name}{number}": number for number in range(8)}
    bad = ["refuse", "reject", "raise it", "unencodable"]
    results = results_of(
        stack, model, bodies | {f"{name}-{body.split()[0]}": body for body in [*bad, "text"]}
    )
    assert {key: results[key] for key in bodies} == {
        key: {"square": number * number} for key, number in bodies.items()
    }
    refused, rejected, raised, unencodable = (results[f"{name}-{body.split()[0]}"] for body in bad)
    assert refused == ("INVALID_ARGUMENT", "the model rejected this body: refused")
    assert rejected == ("INVALID_ARGUMENT", "no such number")
    assert raised == ("INVALID_ARGUMENT", "the model rejected this body: KeyError: 'it'")
    assert unencodable == ("INTERNAL", "the model failed on this request: cannot be encoded")
    text = results[f"{name}-text"]
    assert (text["text"], text["id"]) == ("text", f"{name}-text")
    assert (text["decoder"] in stack.served_by(model).children()) is (name == "InThreads")
    events = stack.served_by(model).events("model raised")
    logged = {event["error"].partition(" ")[0]: event["level"] for event in events}
    assert logged == {"KeyError": "warning", "RuntimeError": "error"}  # of `decode`, and of `encode`


@pytest.mark.parametrize("name", ["InThreads", "InProcesses"])
def test_what_the_model_changed_is_decoded_again_when_a_batch_is_halved(stack: Stack, name: str) -> None:
    model = stack.serve(f"beside.py:{name}")
    bodies: dict[str, Any] = {f"{name}s{number}": number for number in range(7)}
    results = results_of(stack, model, bodies | {f"{name}spoil": "spoil"})
    assert results.pop(f"{name}spoil") == ("INTERNAL", "the model failed on this request: spoilt")
    assert results == {key: {"square": number * number} for key, number in bodies.items()}


@pytest.mark.parametrize("name", ["InThreads", "InProcesses"])
def test_the_next_batch_is_decoded_while_one_is_executed(stack: Stack, tmp_path: Path, name: str) -> None:
    model = stack.serve(f"beside.py:{name}")
    results_of(stack, model, {"before": 0})  # a worker fetches ahead once it knows that bodies are decoded
    held, decoding = tmp_path / "held", tmp_path / "decoding"
    stack.send(model, correlation_id="first", body=json.dumps(f"hold {held}"))
    wait_until(Path(f"{held}.started").exists, description="the first batch is executed")
    stack.send_packed(
        model,
        [{"correlation_id": f"next{n}", "body": json.dumps(n)} for n in range(15)]
        + [{"correlation_id": "next", "body": json.dumps(f"wait {decoding}")}],
    )
    wait_until(Path(f"{decoding}.started").exists, description="the next one is decoded")
    decoding.touch()
    held.touch()
    assert answer(stack, model, "first")["text"] == f"hold {held}"
    assert answer(stack, model, "next")["text"] == f"wait {decoding}"
    assert [answer(stack, model, f"next{n}")["square"] for n in range(15)] == [n * n for n in range(15)]


def test_a_deadline_passes_while_a_body_is_decoded(stack: Stack, tmp_path: Path) -> None:
    """The others of its batch do not wait for it."""
    model = stack.serve("beside.py:InThreads")
    never = tmp_path / "never"
    requests = [{"correlation_id": f"in-time{number}", "body": str(number)} for number in range(3)]
    late = {"correlation_id": "late", "body": json.dumps(f"wait {never}"), "expiration": 300}
    stack.send_packed(model, [*requests, late])
    assert answer(stack, model, "late")[0] == "DEADLINE_EXCEEDED"
    assert [answer(stack, model, f"in-time{number}")["square"] for number in range(3)] == [0, 1, 4]
    assert not never.exists()
    never.touch()  # ends the thread's wait


@pytest.mark.parametrize("name", ["LateInThreads", "LateInProcesses"])
def test_decoding_that_hangs_beyond_its_deadline_does_not_keep_its_place(
    stack: Stack, tmp_path: Path, name: str
) -> None:
    """All threads of the pool hang, for requests that nobody waits for, so that no batch takes too long."""
    model = stack.serve(f"beside.py:{name}")
    worker = stack.served_by(model)
    process = worker.children()
    never = [tmp_path / f"never{number}" for number in range(2)]
    numbers, attempts = itertools.count(), itertools.count()

    def hang() -> bool:
        next(attempts)
        hanging = {f"{name}{next(numbers)}": str(path) for path in never}
        late = results_of(stack, model, hanging, expiration=200)
        assert {status for status, _ in late.values()} == {"DEADLINE_EXCEEDED"}
        return all(Path(f"{path}.started").exists() for path in never)

    wait_until(hang, description="both are decoded, and do not expire before that")

    def is_executed() -> bool:
        correlation_id = f"{name}-after{next(numbers)}"
        return bool(results_of(stack, model, {correlation_id: 3}, expiration=400)[correlation_id] == 4)

    wait_until(is_executed, description="a body is decoded in the place of those that hang")
    reason = "decode of a late request took longer than max_execution_ms, 1000 ms"
    attempted = next(attempts)
    if name == "LateInThreads":
        died = [event["how"] for event in worker.events("model process died")]
        assert set(died) == {f"unhealthy, {reason}"} and len(died) <= attempted
    else:
        assert {event["how"] for event in worker.events(DIED)} == {reason}
        assert len(worker.events(DIED)) <= 2 * attempted
        assert worker.children() == process


def test_a_padded_batch_that_needs_too_much_memory_fails_alone(stack: Stack) -> None:
    model = stack.serve("beside.py:LateInProcesses")
    results = results_of(stack, model, {"small0": 1, "vast0": 5, "small1": 2, "vast1": 6})
    vast = (
        "RESOURCE_EXHAUSTED",
        f"the model process has not enough memory for 'zeros' of shape [{10**15}]",
    )
    assert results == {"small0": 4, "vast0": vast, "small1": 4, "vast1": vast}


@pytest.mark.parametrize("command", ["die", "segfault"])
def test_a_body_that_kills_decoders_is_given_up_and_nothing_else_fails(stack: Stack, command: str) -> None:
    model = stack.serve("beside.py:InProcesses")
    worker = stack.served_by(model)
    before = len(worker.events("model process died"))
    process, died, dead = worker.children(), len(worker.events(DIED)), stack.redis.xlen(Keys(model).dead)
    bodies: dict[str, Any] = {f"{command}{number}": number for number in range(10)}
    results = results_of(stack, model, bodies | {f"{command}-it": command})
    status, detail = results.pop(f"{command}-it")
    number = {"die": "SIGKILL", "segfault": "SIGSEGV"}[command]
    assert (status, detail) == (
        "ABORTED",
        "given up, and kept as a dead letter: its decoder process died 2 times in decode; the last time: "
        + number,
    )
    assert results == {key: {"square": number * number} for key, number in bodies.items()}
    assert stack.redis.xlen(Keys(model).dead) == dead + 1
    assert len(worker.events(DIED)) == died + 2
    assert worker.children() == process
    assert len(worker.events("model process died")) == before


def test_a_body_whose_decoder_is_killed_by_chance_succeeds(stack: Stack, tmp_path: Path) -> None:
    model = stack.serve("beside.py:InProcesses")
    once = f"die-once {tmp_path / 'once'}"
    results = results_of(stack, model, {"once": once, "other": 3})
    assert (results["once"]["text"], results["other"]) == (once, {"square": 9})


def test_decoders_end_with_their_model_process_and_another_one_has_its_own(stack: Stack) -> None:
    model = stack.serve("beside.py:InProcesses")
    worker = stack.served_by(model)
    (process,) = worker.children()
    decoders = descendants(process)
    assert len(decoders) == 2
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, decoders)), description="the decoders have ended")
    assert results_of(stack, model, {"after": 12}) == {"after": {"square": 144}}


def descendants(pid: int) -> list[int]:
    """The children of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


def test_results_of_tensors_are_encoded_and_a_batch_that_raises_is_halved_as_it_was_sent(
    stack: Stack,
) -> None:
    model = stack.serve("beside.py:Encoded")
    bodies: dict[str, Any] = {f"e{number}": [number, 1] for number in (1, 2, 13, 4, 5)}
    results = results_of(stack, model, bodies)
    assert results.pop("e13") == ("INTERNAL", "the model failed on this request: unlucky")
    assert results == {
        name: {"sum": 2 * sum(body), "id": name} for name, body in bodies.items() if name != "e13"
    }


def test_a_batch_is_halved_while_results_of_the_one_before_it_are_encoded(
    stack: Stack, tmp_path: Path
) -> None:
    """Its frame is asked for once more, although it is not the oldest one without an outcome."""
    model = stack.serve("beside.py:HeldEncoded")
    results_of(stack, model, {"before": [0, 0]})
    until, halved = tmp_path / "until", tmp_path / "halved"
    stack.send(model, correlation_id="held", body="[1, 2]", until=str(until))
    results = {"h1": [1, 1], "h13": [13, 1], "h2": [2, 1]}
    requests = [{"correlation_id": name, "body": json.dumps(body)} for name, body in results.items()]
    stack.send_packed(model, requests, halved=str(halved))
    wait_until(halved.exists, description="the second batch is halved")
    until.touch()
    assert answer(stack, model, "held") == {"sum": 6, "id": "held"}
    assert [
        answer(stack, model, name)[0] if name == "h13" else answer(stack, model, name)["sum"]
        for name in results
    ] == [4, "INTERNAL", 6]
    assert not stack.served_by(model).events("model process died")


def test_decoder_processes_have_the_parameters_and_hide_secrets(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret-of-decoders")
    given = ("--param", "joined_by=+", "--param-file", f"token={tmp_path / 'token'}")
    stack.serve("beside.py:Encoded")  # and with it a batcher, if no test has started one
    stack.worker("given=beside.py:Given", *given, ready=False)
    wrong = stack.worker("wrong=beside.py:Given", *given, "--param", "refuses=true", ready=False)
    stack.wait_for_model("given")
    pair = {"datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
    assert results_of(stack, "given", {"g": pair}) == {"g": "a+b"}
    event = wrong.wait_for("model cannot be loaded")
    assert event["reason"] == (
        "the model cannot be loaded in a decoder process: ValueError: nothing decodes with ***"
    )
    assert "load_decoder" in event["exception"]
    assert "s3cret" not in wrong.log.read_text()


@pytest.mark.parametrize("name", ["CountedInThreads", "Counted"])
def test_what_hooks_measure_is_exported_and_processes_that_decode_are_replaced(
    stack: Stack, name: str
) -> None:
    stack.serve("beside.py:InThreads")  # and a batcher
    worker = stack.worker(f"beside.py:{name}", "--http-port", "0")
    sent = 0
    with Client(stack.url, timeout=60.0) as client:
        while len(worker.events("model process replaced")) < 2:
            assert client.infer_many(name, range(200), in_flight=40) == [*range(200)]
            sent += 1
    expected = {
        f'bodies_total{{model="{name}"}} {sent * sum(range(200))}.0',
        f'results_total{{model="{name}"}} {sent * 200}.0',
    }
    wait_until(
        lambda: expected <= {*call(worker.status_url, "GET", "/metrics").body.decode().splitlines()},
        description="all that was counted is exported",
        timeout_s=20,
    )
    assert not worker.events("model process died")


def test_bodies_of_sequences_are_decoded_and_a_result_that_cannot_be_encoded_breaks_its_own(
    stack: Stack,
) -> None:
    model = stack.serve("beside.py:Remembering")

    def send(sequence: str, body: str, **fields: Any) -> Any:
        name = f"{sequence}-{body}"
        stack.send(model, correlation_id=name, body=json.dumps(body), sequence_id=sequence, **fields)
        return answer(stack, model, name)

    assert [send("a", "5", sequence_start=1), send("b", "1", sequence_start=1)] == ["5 in all", "1 in all"]
    assert send("a", "3") == "8 in all"
    assert send("b", "200") == ("INTERNAL", "the model failed on this request: too much")
    assert send("a", "x")[0] == "INVALID_ARGUMENT"
    assert [send(sequence, "7")[0] for sequence in ("a", "b")] == ["ABORTED", "ABORTED"]


def test_decoded_tensors_are_padded_and_share_a_batch(stack: Stack) -> None:
    model = stack.serve("beside.py:Stacked")
    texts = {f"t{size}": "x" * size for size in range(17, 64)} | {"long": "x" * 65, "loud": "loud!"}
    results = results_of(stack, model, texts)
    assert results.pop("long") == (
        "INVALID_ARGUMENT",
        "body.letters.shape: dimension 0 has the size 65, but this model takes at most 64, its "
        "largest bucket",
    )
    assert results.pop("loud") == ("INTERNAL", "the model failed on this request: one is loud")
    assert {name: result["doubled"]["data"] for name, result in results.items()} == {
        name: [2 * ord("x")] * len(text) for name, text in texts.items() if name not in ("long", "loud")
    }
    assert {tuple(result["shape"]["data"]) for result in results.values()} == {(47, 64)}


def test_requests_of_64_lengths_are_executed_together(stack: Stack) -> None:
    model = stack.serve("beside.py:Bucketed")
    bodies: dict[str, Any] = {f"b{size}": list(range(size)) for size in range(1, 65)}
    results = results_of(stack, model, bodies)
    assert {name: result["doubled"]["data"] for name, result in results.items()} == {
        name: [2 * number for number in numbers] for name, numbers in bodies.items()
    }
    shapes = {tuple(result["shape"]["data"]) for result in results.values()}
    assert shapes == {(16, 16), (48, 64)}
    wrong = results_of(stack, model, {"long": [1] * 65, "negative": [1, -1], "good": [7]})
    assert [wrong[name] for name in ("long", "negative")] == [
        (
            "INVALID_ARGUMENT",
            "body.ids.shape: dimension 0 has the size 65, but this model takes at most 64, its "
            "largest bucket",
        ),
        ("INVALID_ARGUMENT", "the model rejected this body: an id is negative"),
    ]
    assert wrong["good"]["doubled"]["data"] == [14]
