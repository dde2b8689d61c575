"""`generate` and `generate_stream` on a real stack: what Triton's clients and tests look for."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from support.http import Answer, Connection, call, request
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

LLM: Final = "MockLLM"
PROMPT: Final = {"PROMPT": "hello world", "STREAM": False}
STREAM: Final = {"PROMPT": ["hello world"], "STREAM": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(
            "triton.py:MockLLM", "triton.py:Counter", "triton.py:shout", "plain.py:Echo", "triton.py:Sum"
        )
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def path_of(model: str, route: str = "generate") -> str:
    return f"/v2/models/{model}/{route}"


def generate(gateway: Service, model: str, **fields: Any) -> Answer:
    return call(gateway.url, "POST", path_of(model), json.dumps(fields).encode())


def stream(gateway: Service, model: str, **fields: Any) -> Answer:
    path = path_of(model, "generate_stream")
    return call(gateway.url, "POST", path, json.dumps(fields).encode(), Accept="text/event-stream")


def events_of(answer: Answer) -> list[Any]:
    """The data of all events; each is one line and a blank one."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.body.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


# --- one response ------------------------------------------------------------------------------------------


def test_one_response_is_plain_json(gateway: Service) -> None:
    answer = generate(gateway, LLM, **PROMPT, id="42", input_ids=[100, 200])
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {"id": "42", "model_name": LLM, "model_version": "1", "TEXT": "hello world"}
    assert "id" not in generate(gateway, LLM, **PROMPT, id="").json
    assert generate(gateway, LLM, **PROMPT, OUTPUT_0_DIM=True).json["TEXT"] == []
    versioned = call(gateway.url, "POST", path_of(f"{LLM}/versions/1"), json.dumps(PROMPT).encode())
    assert versioned.json["TEXT"] == "hello world"
    assert call(gateway.url, "POST", path_of(f"{LLM}/versions/2"), b"{}").code == 404


def test_generate_has_exactly_one_response_or_an_error(gateway: Service, shared: Stack) -> None:
    for count in (0, 2, 1000):
        answer = generate(gateway, LLM, **STREAM, REPETITION=count)
        assert answer.code == 501, answer
        assert "generate expects model to produce exactly 1 response" in answer.json["error"]
    shared.wait_until_idle(LLM)


def test_models_that_do_not_step(gateway: Service) -> None:
    numbers = [*range(16)]
    answer = generate(gateway, "Sum", INPUT0=numbers, INPUT1=[1] * 16)
    assert answer.json["OUTPUT0"] == [number + 1 for number in numbers]
    (event,) = events_of(stream(gateway, "Sum", INPUT0=numbers, INPUT1=[1] * 16))
    assert event["OUTPUT1"] == [number - 1 for number in numbers]


def test_models_without_tensors_take_and_give_text(gateway: Service) -> None:
    assert generate(gateway, "shout", text_input="once upon").json["text_output"] == "ONCE UPON "
    events = events_of(stream(gateway, "shout", text_input="once upon a time"))
    assert "".join(event["text_output"] for event in events) == "ONCE UPON A TIME "
    assert generate(gateway, "Echo", body={"a": [1]}).json["text_output"] == '{"a":[1]}'


def test_models_that_speak_completions_get_a_prompt(gateway: Service, shared: Stack) -> None:
    shared.serve("writer")
    order = {"text_input": "Return the", "max_tokens": 20, "parameters": {"seed": 1}, "id": "7"}
    answer = generate(gateway, "writer", **order).json
    assert answer["id"] == "7"
    assert 0 < len(answer["text_output"]) <= 20
    events = events_of(stream(gateway, "writer", **order))
    assert "".join(event["text_output"] for event in events) == answer["text_output"]
    assert len(events) > 1


def test_a_whole_infer_request(gateway: Service) -> None:
    tensor = {"name": "count", "datatype": "INT32", "shape": [1, 1], "data": [3]}
    events = events_of(stream(gateway, "Counter", inputs=[tensor], id="7", outputs=[{"name": "square"}]))
    assert [event["outputs"] for event in events] == [
        [{"name": "square", "datatype": "FP32", "shape": [1, 1], "data": [square]}]
        for square in (0.0, 1.0, 4.0)
    ]
    assert {event["id"] for event in events} == {"7"}
    tensor["data"] = [1]
    (output, _) = generate(gateway, "Counter", inputs=[tensor]).json["outputs"]
    assert output == {"name": "number", "datatype": "INT32", "shape": [1, 1], "data": [0]}
    infer = call(gateway.url, "POST", path_of("Counter", "infer"), json.dumps({"inputs": [tensor]}).encode())
    assert infer.json["outputs"][1]["data"] == [0.0]
    tensor["data"] = [3]
    infer = call(gateway.url, "POST", path_of("Counter", "infer"), json.dumps({"inputs": [tensor]}).encode())
    assert infer.code == 501
    rows = {"inputs": [{**tensor, "shape": [2, 1], "data": [1, 2]}]}
    assert "one row" in stream(gateway, "Counter", **rows).json["error"]


# --- streams -----------------------------------------------------------------------------------------------


def test_each_response_is_an_event(gateway: Service) -> None:
    for fields in ({"REPETITION": 3}, {"parameters": {"REPETITION": 3}}):
        events = events_of(stream(gateway, LLM, **STREAM, **fields))
        texts = [event["TEXT"] for event in events]
        assert [text for one in texts for text in ([one] if isinstance(one, str) else one)] == [
            "hello world"
        ] * 3
    assert events_of(stream(gateway, LLM, **STREAM, REPETITION=0)) == []
    numbers = [event["number"] for event in events_of(stream(gateway, "Counter", count=50))]
    assert numbers == [*range(50)], "values that were merged are responses of their own"


def test_a_response_is_written_before_the_next_is_made(gateway: Service, gate: Path) -> None:
    fields = {**STREAM, "REPETITION": 2, "GATE": str(gate)}
    body = json.dumps(fields).encode()
    with Connection(gateway.url) as connection:
        connection.send(request("POST", path_of(LLM, "generate_stream"), body))
        assert connection.answer(has_body=False).code == 200
        assert json.loads(connection.part().removeprefix(b"data: "))["TEXT"] == "hello world"
        assert not connection.is_readable
        gate.touch()
        assert connection.part().startswith(b"data: ")
        assert connection.part() == b""


def test_errors_before_and_after_the_first_response(gateway: Service) -> None:
    before = stream(gateway, LLM, **STREAM, REPETITION=0, FAIL_LAST=True)
    assert before.code == 500
    (error,) = events_of(before)
    assert "An Error Occurred" in error["error"]
    *responses, error = events_of(stream(gateway, LLM, **STREAM, REPETITION=2, FAIL_LAST=True))
    assert responses
    assert "An Error Occurred" in error["error"]
    assert error["status"] == "INTERNAL"
    for wrong in ({"PROMPT": 1}, {}, {**STREAM, "more": {}}):
        for answer in (stream(gateway, LLM, **wrong), generate(gateway, LLM, **wrong)):
            assert (answer.code, answer.headers["content-type"]) == (400, "application/json")
    assert stream(gateway, "NONE", text_input="a").code == 404


def test_http_1_0_gets_events_without_chunks(gateway: Service) -> None:
    body = json.dumps({"text_input": "once"}).encode()
    head = request("POST", path_of("shout", "generate_stream"), body).replace(b"HTTP/1.1", b"HTTP/1.0")
    with Connection(gateway.url) as connection:
        connection.send(head)
        answer = connection.answer()
    assert events_of(answer)[0]["text_output"] == "ONCE "


def test_a_client_that_goes_withdraws_the_request(gateway: Service, shared: Stack, gate: Path) -> None:
    body = json.dumps({**STREAM, "REPETITION": 5, "GATE": str(gate)}).encode()
    connection = Connection(gateway.url)
    connection.send(request("POST", path_of(LLM, "generate_stream"), body))
    connection.until(b"data: ")
    connection.close()
    shared.wait_until_idle(LLM)  # the gate is still closed


def test_a_client_that_closes_only_its_half_reads_on(gateway: Service, shared: Stack, gate: Path) -> None:
    """A comment tells whether it has closed all."""
    body = json.dumps({**STREAM, "REPETITION": 2, "GATE": str(gate)}).encode()
    with Connection(gateway.url) as connection:
        connection.send(request("POST", path_of(LLM, "generate_stream"), body))
        assert connection.answer(has_body=False).code == 200
        assert connection.part().startswith(b"data: ")
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.part() == b":\n\n"
        gate.touch()
        assert connection.part().startswith(b"data: ")
        assert connection.part() == b""


def test_a_stream_goes_on_after_its_process_was_killed(gateway: Service, shared: Stack) -> None:
    events = events_of(stream(gateway, "Counter", count=20, KILLS_AT=7))
    assert [event["number"] for event in events] == [*range(20)]


# --- readers and ends --------------------------------------------------------------------------------------


def test_a_slow_reader_is_bounded_and_told_so(shared: Stack) -> None:
    limits = ("--memory-bytes-max", str(2 << 20), "--body-bytes-max", "65536")
    gateway = shared.gateway(*limits)
    shared.serve("stepping.py:endless")
    body, before = json.dumps({"text": "x" * 10_000}).encode(), shared.last_batch_id("endless")
    with Connection(gateway.url) as connection:
        connection.send(request("POST", "/carpool/v1/models/endless/infer", body, Accept="text/event-stream"))
        wait_until(lambda: shared.last_batch_id("endless") != before, description="it is dispatched")
        shared.wait_until_idle("endless")  # it was withdrawn
        assert "event: error" not in connection.until(b"\n\n").decode()[:1000]
        rest = connection.answer()
    *_, error = rest.body.split(b"\n\n")[:-1]
    assert error.startswith(b"event: error\n")
    assert b"read too slowly" in error
    assert gateway.terminate() == 0


def test_a_gateway_that_stops_ends_its_streams(shared: Stack, gate: Path) -> None:
    gateway = shared.gateway()
    body = json.dumps({**STREAM, "REPETITION": 3, "GATE": str(gate)}).encode()
    with Connection(gateway.url) as connection:
        connection.send(request("POST", path_of(LLM, "generate_stream"), body))
        assert connection.answer(has_body=False).code == 200
        first = connection.part()
        gateway.signal(signal.SIGTERM)
        gate.touch()
        rest = b"".join(iter(connection.part, b""))
        assert (first + rest).count(b"hello world") == 3
        assert connection.rest() == b""
    assert gateway.process.wait(EVENTUALLY_S) == 0
