"""OpenAI's API as functions of bytes: requests for a model, and answers of what it wrote."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InternalError
from carpool.messages.requests import JSON, MSGPACK
from carpool.spoken import Spoken
from carpool.wire.bodies import encode_body
from carpool_gateway.answers import HttpError, failure
from carpool_gateway.openai import answers, embeddings
from carpool_gateway.openai.errors import RequestError, after_acceptance, error_answer
from carpool_gateway.openai.pieces import Usage, Written, extras_of, usage_of
from carpool_gateway.openai.requests import Asked, model_of, read_document, read_request

ALL = Spoken(("completions", "chat", "embeddings"), ("image_url", "presence_penalty", "top_k"))
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = {"prompt": "Once"}


def read(interface: str, document: dict[str, Any], spoken: Spoken = ALL) -> Asked:
    return read_request(interface, read_document(json.dumps(document).encode()), spoken, "m")


def bodies(interface: str, document: dict[str, Any]) -> list[Any]:
    """What the model gets."""
    return [json.loads(body) for body in read(interface, document).bodies]


def refusal(interface: str, document: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as raised:
        read(interface, document)
    return raised.value


# --- requests


def test_each_prompt_is_a_request_of_its_own_with_the_same_parameters() -> None:
    shared = {"max_tokens": 5, "temperature": 0, "top_p": 1, "seed": -3, "stop": ["x"]}
    given = {"model": "m", "user": "u", "stream": None, "n": 1, **shared, "stop": "x"}
    for prompt in ("a", "", [1, 2], [0]):
        assert bodies("completions", {**given, "prompt": prompt}) == [{"prompt": prompt, **shared}]
    for prompts in (["a", ""], [[1], [2, 3]], ["a", [1]]):
        expected = [{"prompt": prompt, **shared} for prompt in prompts]
        assert bodies("completions", {**given, "prompt": prompts}) == expected
    assert read("completions", {"prompt": [[1], [2]]}).has_tokens
    assert not read("completions", {"prompt": ["1"]}).has_tokens


def test_parameters_without_a_value_or_an_effect_are_left_out() -> None:
    without = {
        "max_tokens": None, "stop": [], "n": 1, "logit_bias": {}, "frequency_penalty": 0.0, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "unheard_of": [1],
        "modalities": ["text"], "parallel_tool_calls": True, "metadata": {"a": "b"}, "store": False,
    }  # fmt: skip
    assert bodies("chat", {**CHAT, **without}) == [CHAT]
    assert bodies("completions", {**TEXT, "best_of": 1, "echo": False, "suffix": ""}) == [TEXT]


def test_max_completion_tokens_wins() -> None:
    assert bodies("chat", {**CHAT, "max_tokens": 9, "max_completion_tokens": 4})[0]["max_tokens"] == 4
    assert bodies("chat", {**CHAT, "max_completion_tokens": 4})[0]["max_tokens"] == 4


def test_what_the_model_understands_reaches_it_as_it_came() -> None:
    given = {"presence_penalty": 1.5, "top_k": 7}
    assert bodies("completions", {**TEXT, **given}) == [{**TEXT, **given}]
    assert bodies("embeddings", {"input": "a", **given}) == [{"input": "a", **given}]


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "Ann"}
    assert bodies("chat", {"messages": [message]})[0]["messages"] == [{**message, "content": "a\nb"}]
    picture = {"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "data:"}}]}
    assert bodies("chat", {"messages": [picture]})[0]["messages"] == [picture]
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    assert bodies("chat", {"messages": [called]})[0]["messages"] == [called]


def test_streams() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert read("chat", {**CHAT, **options})[1:3] == (True, True)
    assert read("chat", {**CHAT, "stream": True})[1:3] == (True, False)
    assert read("chat", {**CHAT, "stream": False, "stream_options": None})[1:3] == (False, False)


@pytest.mark.parametrize(
    ("interface", "document", "param", "reason"),
    [
        ("completions", {}, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": []}, "prompt", "invalid_value"),
        ("completions", {"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
        ("completions", {"prompt": [1, -1]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [1, True]}, "prompt", "invalid_value"),
        ("completions", {"prompt": ["a", None]}, "prompt[1]", "invalid_type"),
        ("completions", {"prompt": {"a": 1}}, "prompt", "invalid_type"),
        ("completions", {"prompt": ["a"] * 2049}, "prompt", "invalid_value"),
        ("completions", {**TEXT, "max_tokens": 0}, "max_tokens", "invalid_value"),
        ("completions", {**TEXT, "max_tokens": 1.0}, "max_tokens", "invalid_type"),
        ("completions", {**TEXT, "max_tokens": 2**63}, "max_tokens", "invalid_value"),
        ("completions", {**TEXT, "temperature": 2.1}, "temperature", "invalid_value"),
        ("completions", {**TEXT, "temperature": True}, "temperature", "invalid_type"),
        ("completions", {**TEXT, "top_p": 0}, "top_p", "invalid_value"),
        ("completions", {**TEXT, "presence_penalty": -2.1}, "presence_penalty", "invalid_value"),
        ("completions", {**TEXT, "seed": "1"}, "seed", "invalid_type"),
        ("completions", {**TEXT, "stop": ["a"] * 5}, "stop", "invalid_value"),
        ("completions", {**TEXT, "stop": ["a", ""]}, "stop", "invalid_value"),
        ("completions", {**TEXT, "stop": [1]}, "stop[0]", "invalid_type"),
        ("completions", {**TEXT, "stream": "yes"}, "stream", "invalid_type"),
        ("completions", {**TEXT, "stream_options": {}}, "stream_options", "invalid_value"),
        ("completions", {**TEXT, "stream": True, "stream_options": 1}, "stream_options", "invalid_type"),
        ("completions", {**TEXT, "n": 2}, "n", "unsupported_parameter"),
        ("completions", {**TEXT, "n": True}, "n", "unsupported_parameter"),
        ("completions", {**TEXT, "logprobs": 0}, "logprobs", "unsupported_parameter"),
        ("completions", {**TEXT, "echo": True}, "echo", "unsupported_parameter"),
        ("completions", {**TEXT, "suffix": "."}, "suffix", "unsupported_parameter"),
        ("chat", {}, "messages", "missing_required_parameter"),
        ("chat", {"messages": "hello"}, "messages", "invalid_type"),
        ("chat", {"messages": []}, "messages", "invalid_value"),
        ("chat", {"messages": ["hello"]}, "messages[0]", "invalid_type"),
        ("chat", {"messages": [{"content": "a"}]}, "messages[0].role", "invalid_type"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
        (
            "chat",
            {"messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0]",
            "invalid_type",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ("chat", {**CHAT, "tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ("chat", {**CHAT, "logprobs": True}, "logprobs", "unsupported_parameter"),
        ("chat", {**CHAT, "logit_bias": {"1": 5}}, "logit_bias", "unsupported_parameter"),
        ("chat", {**CHAT, "frequency_penalty": 0.1}, "frequency_penalty", "unsupported_parameter"),
        (
            "chat",
            {**CHAT, "response_format": {"type": "json_object"}},
            "response_format",
            "unsupported_parameter",
        ),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ("embeddings", {"input": [[]]}, "input[0]", "invalid_value"),
    ],
)
def test_what_is_refused_names_the_parameter(
    interface: str, document: dict[str, Any], param: str, reason: str
) -> None:
    error = refusal(interface, document)
    assert (error.code, error.param, error.reason) == (400, param, reason)
    assert error.detail.startswith(f"{param}: ")


def test_a_model_that_does_not_speak_this_says_what_it_speaks() -> None:
    with pytest.raises(RequestError, match="'m' does not speak chat: use /v1/completions and /v1/embeddings"):
        read("chat", CHAT, Spoken(("completions", "embeddings")))
    with pytest.raises(RequestError, match="declares no `speaks`"):
        read("chat", CHAT, Spoken())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_body_must_be_a_json_object(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body must be a JSON object"):
        read_document(body)


@pytest.mark.parametrize(
    ("document", "code"), [({}, 400), ({"model": 7}, 400), ({"model": "a/b"}, 404), ({"model": ""}, 404)]
)
def test_a_model_must_be_named(document: dict[str, Any], code: int) -> None:
    with pytest.raises(RequestError) as raised:
        model_of(document)
    assert (raised.value.code, raised.value.param) == (code, "model")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "role", "text", "content", "a")), inner, max_size=3)
    ),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    (
        "prompt",
        "messages",
        "input",
        "max_tokens",
        "stop",
        "stream",
        "stream_options",
        "n",
        "tools",
        "seed",
        "top_p",
    )
)


@given(st.sampled_from(ALL.speaks), st.dictionaries(_NAMES, _JSON, max_size=5))
def test_any_document_is_read_or_refused(interface: str, document: dict[str, Any]) -> None:
    try:
        asked = read_request(interface, document, ALL, "m")
    except RequestError as error:
        assert error.detail
    else:
        assert all(isinstance(json.loads(body), dict) for body in asked.bodies)


# --- answers


def written(*pieces: Any) -> tuple[str, Written]:
    """What is written by these results, and the text."""
    whole = Written()
    return "".join(whole.add(JSON, json.dumps(piece).encode()) for piece in pieces), whole


def test_a_text_is_made_of_pieces() -> None:
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "token": 17}
    text, whole = written(
        "a", {"text": "b", "finish_reason": "length"}, ["c", {"text": "d"}, None], {}, counts
    )
    assert (text, whole.finish_reason, whole.usage) == ("abcd", "length", Usage(3, 2))
    assert written("a")[1].finish_reason == "stop"
    assert written("a", {"prompt_tokens": 3})[1].usage is None


@pytest.mark.parametrize(
    "piece",
    [
        7,
        True,
        {"text": 7},
        {"finish_reason": "end"},
        {"finish_reason": []},
        {"prompt_tokens": -1},
        {"completion_tokens": True},
    ],
)
def test_what_is_no_piece_is_an_error_of_the_model(piece: Any) -> None:
    with pytest.raises(InternalError, match="the model's result"):
        written(piece)


@pytest.mark.parametrize(
    "piece",
    [
        {"logprobs": 0.5},
        {"tool_calls": {}},
        {"tool_calls": ["f"]},
        {"tool_calls": [{"index": -1}]},
        {"tool_calls": [{"index": "0"}]},
    ],
)
def test_what_the_model_does_not_understand_is_its_own(piece: dict[str, Any]) -> None:
    body = json.dumps({"text": "a", **piece}).encode()
    assert Written(extras_of("chat", ("seed",))).add(JSON, body) == "a"
    with pytest.raises(InternalError, match=f"the model's result has a {next(iter(piece))}"):
        Written(extras_of("chat", ("logprobs", "tools"))).add(JSON, body)


def test_what_came_beside_the_text_is_taken_once() -> None:
    whole = Written(extras_of("chat", ("logprobs", "tools")))
    calls = [
        {"index": 1, "id": "b", "function": {"arguments": "{"}},
        {"index": 1, "function": {"arguments": "}"}},
    ]
    whole.add(JSON, json.dumps([{"logprobs": {"content": [1], "n": 1}, "tool_calls": calls}, "a"]).encode())
    whole.add(
        JSON, json.dumps({"logprobs": {"content": [2], "n": None}, "tool_calls": [{"id": "c"}]}).encode()
    )
    assert whole.take_extras() == (
        {"content": [1, 2], "n": 1},
        {1: {"id": "b", "function": {"arguments": "{}"}}, 2: {"id": "c"}},
    )
    assert (whole.take_extras(), whole.finish_reason) == (None, "tool_calls")
    assert extras_of("completions", ("logprobs", "tools")) == ("logprobs",)


def test_usage_is_told_if_all_of_it_is_known() -> None:
    known, unknown = written({"prompt_tokens": 3, "completion_tokens": 2})[1], written("a")[1]
    assert usage_of([known, known]) == Usage(6, 4)
    assert usage_of([known, unknown]) is None


@given(st.text())
def test_a_text_in_an_event_is_the_text(text: str) -> None:
    """However its JSON was written; and no client takes anything in it for the end of a line."""
    for body in (json.dumps(text), json.dumps(text, ensure_ascii=False), json.dumps([text])):
        try:
            encoded = answers.text_of(JSON, body.encode(), Written())
        except UnicodeEncodeError:
            assert any("\ud800" <= character <= "\udfff" for character in text)
            return
        assert json.loads(encoded or b'""') == text
        assert len(encoded.decode().splitlines()) <= 1


def test_a_vector_is_the_same_in_both_encodings() -> None:
    vector = np.array([1 / 3, -2.5, 1e-40], np.float32)
    body = encode_body(MSGPACK, {"embedding": vector, "prompt_tokens": 2})
    embedded = [embeddings.read_embedding(MSGPACK, body)] * 2
    floats = json.loads(embeddings.document(embedded, model="m", is_base64=False))
    texts = json.loads(embeddings.document(embedded, model="m", is_base64=True))
    assert floats["usage"] == texts["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    for one, other in zip(floats["data"], texts["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert decoded.tolist() == one["embedding"] == vector.tolist()
    assert [one["index"] for one in floats["data"]] == [0, 1]


@pytest.mark.parametrize("value", [[1, 2.5], {"embedding": [1, 2.5]}, np.array([1, 2.5])])
def test_vectors_are_arrays_or_lists(value: Any) -> None:
    embedded = embeddings.read_embedding(MSGPACK, encode_body(MSGPACK, value))
    assert (embedded.vector.tolist(), embedded.prompt_tokens) == ([1.0, 2.5], None)


@pytest.mark.parametrize(
    "value",
    [7, "a", [], ["a"], [[1.0]], [1, None], {}, {"embedding": None}, [1e39], np.array([np.nan]), [True]],
)
def test_what_is_no_vector_is_an_error_of_the_model(value: Any) -> None:
    with pytest.raises(InternalError, match="vector"):
        embeddings.read_embedding(MSGPACK, encode_body(MSGPACK, value))


# --- errors


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (HttpError(400, "no"), "invalid_request_error", None),
        (HttpError(401, "no"), "authentication_error", "invalid_api_key"),
        (HttpError(403, "no"), "permission_error", None),
        (HttpError(413, "no"), "invalid_request_error", "content_too_large"),
        (HttpError(429, "no"), "rate_limit_error", "rate_limit_exceeded"),
        (HttpError(504, "no"), "server_error", "deadline_exceeded"),
        (RequestError("no", "n", "invalid_value"), "invalid_request_error", "invalid_value"),
    ],
)
def test_the_shape_of_errors(error: HttpError, kind: str, reason: str | None) -> None:
    _, body = error_answer(error)
    param = "n" if isinstance(error, RequestError) else None
    assert json.loads(body) == {"error": {"message": "no", "type": kind, "param": param, "code": reason}}


def test_clients_send_again_only_what_was_not_accepted() -> None:
    full = error_answer(after_acceptance(failure("RESOURCE_EXHAUSTED", "full", "id-1")))[0]
    assert b"retry-after: 1\r\nretry-after-ms: 1000\r\n" in full
    assert b"carpool-correlation-id: id-1\r\n" in full
    for status in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"):
        headers = error_answer(after_acceptance(failure(status, "late", "id-1")))[0]
        assert b"x-should-retry: false\r\n" in headers and b"retry-after" not in headers
    assert b"retry-after-ms: 1000\r\n" in error_answer(failure("UNAVAILABLE", "no Redis", ""))[0]
