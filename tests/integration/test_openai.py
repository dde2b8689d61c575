"""OpenAI's API through the gateway, with real workers: what clients rely on, byte by byte, and faults."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from carpool.keys import Keys
from carpool_gateway.openapi import CONTENTS
from integration.test_first_model import blocks
from support.http import Answer, Connection, call, request
from support.models.speaking import piece_of, text_of
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
CANCELLED: Final = 200  # clients that go away


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        models = ("Story", "tell", "repeat", "call_tools", "Vectors")
        stack.serve(*[f"speaking.py:{name}" for name in models], "plain.py:Echo")
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway("--body-bytes-max", "100000")


def post(gateway: Service, path: str, document: Any, **headers: str) -> Answer:
    return call(gateway.url, "POST", path, json.dumps(document).encode(), **headers)


def complete(gateway: Service, prompt: Any, model: str = "Story", **more: Any) -> Answer:
    return post(gateway, COMPLETIONS, {"model": model, "prompt": prompt, **more})


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "Story", "messages": [{"role": "user", "content": text}], **more}


def parts_of(gateway: Service, path: str, document: dict[str, Any]) -> list[bytes]:
    """The events of a stream, as they were written."""
    with Connection(gateway.url) as connection:
        connection.send(request("POST", path, json.dumps({**document, "stream": True}).encode()))
        answer = connection.answer(has_body=False)
        assert answer.code == 200, answer
        return list(iter(connection.part, b""))


def events_of(parts: list[bytes]) -> list[Any]:
    """The documents of events."""
    found = []
    for part in parts:
        assert part.startswith(b"data: ") and part.endswith(b"\n\n") and part.count(b"\n") == 2
        data = part[len(b"data: ") : -2]
        found.append(data.decode() if data == b"[DONE]" else json.loads(data))
    return found


def text_in(events: list[Any]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    )


def error_of(answer: Answer) -> dict[str, Any]:
    """The error in an answer, which has the shape that clients read."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json["error"]
    assert answer.json.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    return error


# --- whole answers -----------------------------------------------------------------------------------------


def test_models_that_speak_are_listed(gateway: Service) -> None:
    listed = call(gateway.url, "GET", "/v1/models").json
    speaks = {one["id"]: one["speaks"] for one in listed["data"]}
    assert "Echo" not in speaks
    assert speaks.items() >= {"Story": ["completions", "chat"], "Vectors": ["embeddings"]}.items()
    one = call(gateway.url, "GET", "/v1/models/Story").json
    assert one in listed["data"] and one["object"] == "model"
    for name in ("Echo", "none"):
        answer = call(gateway.url, "GET", f"/v1/models/{name}")
        assert (answer.code, error_of(answer)["code"]) == (404, "model_not_found")


def test_documents_are_as_the_openapi_document_says(gateway: Service) -> None:
    for name, answer in (
        ("v1_completions", complete(gateway, ["a", "b"])),
        ("v1_completions", complete(gateway, "a", "tell")),
        ("v1_chat", post(gateway, CHAT, chat("a"))),
        ("v1_chat", post(gateway, CHAT, {**chat("a", tools=TOOLS), "model": "call_tools"})),
        ("v1_embeddings", post(gateway, EMBEDDINGS, {"model": "Vectors", "input": ["a"]})),
    ):
        kind = CONTENTS["POST", name].responses[200]["application/json"]
        assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=kind)) == answer.json


def test_prompts_of_a_list_are_choices_in_order(gateway: Service) -> None:
    prompts = ["a length=2", "b length=4", "c length=1"]
    answer = complete(gateway, prompts, max_tokens=3).json
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": text_of(prompts[0], 2), "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": text_of(prompts[1], 3), "logprobs": None, "finish_reason": "length"},
        {"index": 2, "text": text_of(prompts[2], 1), "logprobs": None, "finish_reason": "stop"},
    ]
    assert answer["usage"] == {"prompt_tokens": 30, "completion_tokens": 6, "total_tokens": 36}


def test_generators_and_functions_speak_as_well(gateway: Service) -> None:
    told = complete(gateway, "x", "tell").json
    assert (told["choices"][0]["text"], told["usage"]) == (text_of("x", 3), None)
    for prompt in ("short", "rather long"):
        assert complete(gateway, prompt, "repeat").json["choices"][0]["text"] == prompt
        parts = parts_of(gateway, COMPLETIONS, {"model": "repeat", "prompt": prompt})
        assert text_in(events_of(parts)) == prompt


def test_a_chat(gateway: Service) -> None:
    answer = post(gateway, CHAT, chat("hello length=2", presence_penalty=0.5)).json
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of("hello length=2", 2)}
    assert (answer["object"], choice["finish_reason"]) == ("chat.completion", "stop")


def test_vectors_are_the_same_as_numbers_and_as_base64_and_share_a_batch(gateway: Service) -> None:
    inputs = ["a", "bc", "def"]
    asked = {"model": "Vectors", "input": inputs, "dimensions": 5}
    floats = post(gateway, EMBEDDINGS, asked).json
    packed = post(gateway, EMBEDDINGS, {**asked, "encoding_format": "base64"}).json
    assert floats["usage"] == packed["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    for at, (one, other) in enumerate(zip(floats["data"], packed["data"], strict=True)):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist()
        assert one["embedding"] == vector == [3.0, at + 1, np.float32(1 / 3), 0.0, 0.0]
        assert one["index"] == other["index"] == at


def test_what_is_large_is_read_and_written_beside_the_event_loop(gateway: Service) -> None:
    text = "x" * 90_000
    many = post(gateway, EMBEDDINGS, {"model": "Vectors", "input": text, "dimensions": 40_000}).json
    assert many["data"][0]["embedding"][:2] == [1.0, 90_000.0]
    assert len(many["data"][0]["embedding"]) == 40_000
    packed = gzip.compress(json.dumps({"model": "Vectors", "input": [text] * 2}).encode())
    answer = call(gateway.url, "POST", EMBEDDINGS, packed, Content_Encoding="gzip")
    assert (answer.code, error_of(answer)["code"]) == (413, "content_too_large")
    packed = gzip.compress(json.dumps(chat(f"{text} length=2", stream=True)).encode())
    answer = call(gateway.url, "POST", CHAT, packed, Content_Encoding="gzip")
    assert answer.body.endswith(b"data: [DONE]\n\n")
    refused = complete(gateway, [*range(15_000)])
    assert (refused.code, "text, not token IDs" in error_of(refused)["message"]) == (400, True)


def test_models_of_the_page(gateway: Service, shared: Stack, tmp_path: Path) -> None:
    """Those of docs/models.md, as printed."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("\n## Models that speak OpenAI's API\n")
    file = tmp_path / "page.py"
    file.write_text("\n\n".join([*blocks(rest.partition("\n## ")[0])][:3]))
    shared.serve(*[f"{file}:{name}" for name in ("Repeater", "countdown", "letters")])
    asked = {"model": "Repeater", "prompt": "a b c d", "max_tokens": 3}
    answer = post(gateway, COMPLETIONS, asked).json
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a b c ", "length")
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    for more, text in (({}, "a b c "), ({"stop": ["b c"]}, "a ")):
        assert text_in(events_of(parts_of(gateway, COMPLETIONS, {**asked, **more}))) == text
    talk = {"model": "Repeater", "messages": [{"role": "user", "content": "hello there"}]}
    assert post(gateway, CHAT, talk).json["choices"][0]["message"]["content"] == "hello there "
    assert complete(gateway, "3", "countdown").json["choices"][0]["text"] == "3 2 1 "
    vectors = post(gateway, EMBEDDINGS, {"model": "letters", "input": ["tea", "no"]}).json
    assert [one["embedding"][:2] for one in vectors["data"]] == [[1.0, 1.0], [0.0, 0.0]]


# --- streams -----------------------------------------------------------------------------------------------


def golden(parts: list[bytes]) -> list[str]:
    """Events without what differs in each stream, which must be alike in all of its events."""
    pattern = re.compile(rb'"id":"(?:chat)?cmpl-([\w-]+)","object":"([\w.]+)","created":\d+,"model":"Story",')
    (head,) = {found[0] for part in parts if (found := pattern.search(part)) is not None}
    return [part.replace(head, b"").decode().removeprefix("data: ").removesuffix("\n\n") for part in parts]


def test_events_of_a_completion(gateway: Service) -> None:
    parts = parts_of(gateway, COMPLETIONS, {"model": "Story", "prompt": "a length=2"})
    texts = [piece_of("a length=2", at) for at in range(2)]
    assert golden(parts) == [
        f'{{"choices":[{{"index":0,"text":"{texts[0]}","logprobs":null,"finish_reason":null}}]}}',
        f'{{"choices":[{{"index":0,"text":"{texts[1]}","logprobs":null,"finish_reason":null}}]}}',
        '{"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}',
        "[DONE]",
    ]


def test_events_of_a_chat_with_usage(gateway: Service) -> None:
    asked = chat("a length=9", max_completion_tokens=1, stream_options={"include_usage": True})
    parts = parts_of(gateway, CHAT, asked)
    content = piece_of("a length=9", 0)
    assert golden(parts) == [
        '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        '"finish_reason":null}],"usage":null}',
        f'{{"choices":[{{"index":0,"delta":{{"content":"{content}"}},"logprobs":null,'
        '"finish_reason":null}],"usage":null}',
        '{"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}',
        '{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}',
        "[DONE]",
    ]


def test_headers_of_a_stream(gateway: Service) -> None:
    body = json.dumps(chat("a", stream=True)).encode()
    answer = call(gateway.url, "POST", CHAT, body, X_Request_Id="mine")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine"


def test_prompts_of_a_list_are_streamed_side_by_side(gateway: Service) -> None:
    prompts = ["a length=2", "b length=4"]
    asked = {"model": "Story", "prompt": prompts, "stream_options": {"include_usage": True}}
    *events, usage, done = events_of(parts_of(gateway, COMPLETIONS, asked))
    for index, length in enumerate((2, 4)):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert text_in(own) == text_of(prompts[index], length)
        assert [event["choices"][0]["finish_reason"] for event in own] == [*[None] * length, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 6, "[DONE]")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_ends_before_a_stop_text_with_and_without_a_stream(gateway: Service, path: str) -> None:
    prompt = "stopping length=6"
    whole = text_of(prompt, 6)
    stop = whole[9:18]  # it begins in a piece and ends in another one
    asked = {**chat(prompt), "prompt": prompt, "stop": [stop, "never"]}
    (choice,) = post(gateway, path, asked).json["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == (whole[:9], "stop")
    assert text_in(events_of(parts_of(gateway, path, asked))) == whole[:9]


TOOLS: Final = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("one", "two")]


def test_log_probabilities_and_tool_calls_are_those_of_the_model(gateway: Service) -> None:
    asked = {**chat("a", logprobs=True, top_logprobs=1, tools=TOOLS), "model": "call_tools"}
    (choice,) = post(gateway, CHAT, asked).json["choices"]
    arguments = '{"at": 1}'
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate(("one", "two"))
    ]
    texts = [piece_of("a", at) for at in range(2)]
    content = [
        {"token": text, "logprob": -0.5 * at, "bytes": [*text.encode()], "top_logprobs": []}
        for at, text in enumerate(texts)
    ]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(texts), "tool_calls": calls},
        "logprobs": {"content": content, "refusal": None},
        "finish_reason": "tool_calls",
    }
    *events, last, done = events_of(parts_of(gateway, CHAT, asked))
    told = [event["choices"][0] for event in events]
    assert [one["logprobs"] for one in told[1:3]] == [
        {"content": [one], "refusal": None} for one in content
    ] and not any(one["logprobs"] for one in told[3:])
    assert [one["delta"]["content"] for one in told[:3]] == ["", *texts]
    first, second = calls
    begun = {**first, "index": 0, "function": {"name": "one", "arguments": '{"at":'}}
    assert [one["delta"] for one in told[3:]] == [
        {"tool_calls": [begun]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"tool_calls": [{**second, "index": 1}]},
    ]
    assert (last["choices"][0]["finish_reason"], done) == ("tool_calls", "[DONE]")

    (choice,) = complete(gateway, "a", "call_tools", logprobs=1).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("".join(texts), "stop")
    assert choice["logprobs"] == {"tokens": texts, "text_offset": [0, 7]}
    (choice,) = complete(gateway, "a", "call_tools").json["choices"]
    assert choice["logprobs"] is None


# --- errors ------------------------------------------------------------------------------------------------


def test_errors_have_the_shape_of_this_api(gateway: Service) -> None:
    def sent(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, Any]:
        answer = call(gateway.url, method, path, body, **headers)
        error = error_of(answer)
        return answer.code, error["param"], error["code"]

    def asked(path: str, **document: Any) -> tuple[int, Any, Any]:
        return sent("POST", path, json.dumps(document).encode())

    assert sent("GET", "/v1") == sent("GET", "/v1/engines") == (404, None, None)
    assert sent("GET", COMPLETIONS) == (405, None, None)
    assert (
        sent("POST", CHAT, b"") == sent("POST", CHAT, b"[]") == sent("POST", CHAT, b"{") == (400, None, None)
    )
    assert sent("POST", CHAT, bytes(200_000)) == (413, None, "content_too_large")
    assert sent("POST", CHAT, b"{}", Content_Encoding="br")[0] == 415
    assert sent("POST", CHAT, b"{}", Carpool_Prority="1")[0] == 400
    assert sent("POST", CHAT, b"{}", Prefer="respond-async")[0] == 400
    assert asked(CHAT, messages=[]) == (400, "model", "missing_required_parameter")
    assert asked(COMPLETIONS, model="none", prompt="a") == (404, "model", "model_not_found")
    assert asked(COMPLETIONS, model="Echo", prompt="a") == (400, "model", "unsupported_interface")
    assert asked(EMBEDDINGS, model="Story", input="a") == (400, "model", "unsupported_interface")
    assert asked(COMPLETIONS, model="Story", prompt="a", n=2) == (400, "n", "unsupported_parameter")
    assert asked(COMPLETIONS, model="Story", prompt="a", stream_options={})[1] == "stream_options"


def test_the_model_refuses_what_it_does_not_take(gateway: Service) -> None:
    answer = post(gateway, EMBEDDINGS, {"model": "Vectors", "input": [[1, 2], [3]]})
    error = error_of(answer)
    assert (answer.code, error["type"]) == (400, "invalid_request_error")
    assert "input: must be text" in error["message"] and "check_embedding_ctx_length" in error["message"]
    answer = complete(gateway, ["a", "b", [1]])
    assert (answer.code, error_of(answer)["message"]) == (
        400,
        "prompt 2: prompt: must be text, not token IDs",
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_before_the_first_text_is_an_answer(gateway: Service, is_stream: bool) -> None:
    answer = complete(gateway, "raise=0", stream=is_stream)
    assert (answer.code, answer.headers["x-should-retry"]) == (500, "false")
    assert error_of(answer)["type"] == "server_error"
    late = post(gateway, CHAT, chat("gate=/nowhere/at/all", stream=is_stream), Carpool_Timeout_Ms="300")
    assert (late.code, late.headers["x-should-retry"]) == (504, "false")
    assert (error_of(late)["code"], "retry-after" in late.headers) == ("deadline_exceeded", False)


def test_an_error_behind_it_is_the_last_event(gateway: Service) -> None:
    *texts, last = events_of(parts_of(gateway, CHAT, chat("length=5 raise=2")))
    assert text_in(texts) == text_of("length=5 raise=2", 2)
    assert last["error"]["type"] == "server_error" and "piece 2 is not possible" in last["error"]["message"]
    assert "choices" not in last


# --- keys, and sending again -------------------------------------------------------------------------------


def test_a_key_is_checked_for_the_model_in_the_body(shared: Stack, tmp_path: Path) -> None:
    file, digest = tmp_path / "keys.toml", hashlib.sha256(b"sesame").hexdigest()
    file.write_text(f'[[keys]]\nname = "web"\nsha256 = "{digest}"\nmodels = ["S*", "Echo"]\nrate = 0.1\n')
    gateway, bearer = shared.gateway("--keys", str(file)), {"Authorization": "Bearer sesame"}
    listed = call(gateway.url, "GET", "/v1/models", b"", **bearer).json["data"]
    assert [one["id"] for one in listed] == ["Story"]
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = post(gateway, CHAT, chat("a"), **headers)
        assert (answer.code, error_of(answer)["code"]) == (401, "invalid_api_key")
    refused = post(gateway, EMBEDDINGS, {"model": "Vectors", "input": "a"}, **bearer)
    assert (refused.code, error_of(refused)["type"]) == (403, "permission_error")
    answers = [post(gateway, CHAT, chat("a length=1"), **bearer) for _ in range(2)]
    assert answers[0].code == 200
    limited = answers[-1]
    assert (limited.code, error_of(limited)["code"]) == (429, "rate_limit_exceeded")
    assert int(limited.headers["retry-after-ms"]) == 1000 * int(limited.headers["retry-after"])
    assert gateway.terminate() == 0


def test_a_request_with_an_idempotency_key_is_executed_once(gateway: Service) -> None:
    key = {"Idempotency_Key": "order-17"}
    first, again = (post(gateway, COMPLETIONS, {"model": "Story", "prompt": "once"}, **key) for _ in range(2))
    assert first.json["id"] == again.json["id"]
    assert first.json["choices"] == again.json["choices"] == complete(gateway, "once").json["choices"]
    other = post(gateway, COMPLETIONS, {"model": "Story", "prompt": "twice"}, **key)
    assert (other.code, error_of(other)["message"]) == (
        422,
        "Idempotency-Key: another request was sent with this key",
    )
    for more in ({"stream": True}, {"prompt": ["a", "b"]}):
        answer = post(gateway, COMPLETIONS, {"model": "Story", "prompt": "a", **more}, **key)
        assert (answer.code, "one prompt" in error_of(answer)["message"]) == (400, True)


# --- clients that go away ----------------------------------------------------------------------------------


def test_clients_that_go_away_leave_the_slots_to_others(
    gateway: Service, shared: Stack, tmp_path: Path
) -> None:
    """Given 200 clients with texts without an end, some of which are being written, expect that one that
    comes when they have gone is served at once, and that nothing of theirs is left."""
    closed = tmp_path / "closed"
    prompt = f"length=1000000 step_s=0.001 closed={closed}"
    with ExitStack() as clients:
        for at in range(CANCELLED):
            client = clients.enter_context(Connection(gateway.url))
            document = {"model": "tell", "prompt": prompt, "stream": at % 2 == 0}
            client.send(request("POST", COMPLETIONS, json.dumps(document).encode()))
            if at == 0:  # before the others, which may keep it from being executed
                assert client.answer(has_body=False).code == 200 and client.part()
    assert complete(gateway, "quick", "tell").json["choices"][0]["text"] == text_of("quick", 3)
    wait_until(closed.exists, description="a generator was closed")
    shared.wait_until_idle("tell")
    assert shared.pending("tell") == 0
    assert list(shared.redis.scan_iter(match=Keys("tell").progress("*"))) == []


# --- faults ------------------------------------------------------------------------------------------------


def read_on(connection: Connection) -> list[bytes]:
    return list(iter(connection.part, b""))


def begin(gateway: Service, prompt: str) -> tuple[Connection, list[bytes]]:
    """A stream, of which the first texts were read."""
    connection = Connection(gateway.url)
    connection.send(request("POST", CHAT, json.dumps(chat(prompt, stream=True)).encode()))
    assert connection.answer(has_body=False).code == 200
    return connection, [connection.part() for _ in range(4)]


def test_a_text_goes_on_when_the_process_of_its_model_is_killed(
    gateway: Service, shared: Stack, gate: Path
) -> None:
    prompt = f"killed length=60 step_s=0.01 gate={gate} gate_at=30"
    worker = shared.served_by("Story")
    connection, parts = begin(gateway, prompt)
    with connection:
        for pid in worker.children():
            os.kill(pid, signal.SIGKILL)
        gate.touch()
        parts += read_on(connection)
    assert worker.events("model process replaced")
    events = events_of(parts)
    assert text_in(events) == text_of(prompt, 60)
    assert events[-1] == "[DONE]"


def test_a_gateway_that_drains_writes_its_streams_to_their_ends(shared: Stack) -> None:
    prompt = "drained length=80 step_s=0.01"
    gateway = shared.gateway()
    connection, parts = begin(gateway, prompt)
    with connection:
        gateway.process.terminate()
        parts += read_on(connection)
        assert connection.rest() == b""
    events = events_of(parts)
    assert text_in(events) == text_of(prompt, 80)
    assert events[-1] == "[DONE]"
    assert gateway.process.wait(EVENTUALLY_S) == 0
