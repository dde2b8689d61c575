"""The extension "generate": plain JSON as a request for a model, and outputs as plain JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from carpool.messages.requests import JSON, MSGPACK
from carpool.messages.results import Chunk
from carpool.model_settings import ModelKind
from carpool.wire.bodies import encode_result_body
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.generate import decode_generate, encode_generate
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import plan
from carpool_gateway.oip.responses import join_results, responses_of_chunk
from support.oip import as_one, identity, offered, packed, tensor, values_of, written

LLM = offered(
    [
        TensorSpec("PROMPT", "BYTES", (1,)),
        TensorSpec("STREAM", "BOOL", (1,)),
        TensorSpec("ids", "INT32", (-1,), optional=True),
    ],
    [TensorSpec("TEXT", "BYTES", (-1,))],
    ModelKind.STEPPING,
)
ANYTHING = offered()


def refused(model: OfferedModel, body: Any) -> str:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ProtocolError) as caught:
        plan(model, decode_generate(model, text).request)
    return caught.value.detail


# --- requests ----------------------------------------------------------------------------------------------


def test_names_are_inputs_or_else_parameters() -> None:
    document = {"id": "42", "PROMPT": "a", "ids": [7, 8], "STREAM": True, "top": 0.5, "parameters": {"n": 1}}
    request, is_whole, _ = decode_generate(LLM, json.dumps(document).encode())
    assert not is_whole
    assert (request.id, dict(request.parameters)) == ("42", {"top": 0.5, "n": 1})
    planned = plan(LLM, request)
    (body,) = values_of(planned)
    assert {name: list(items) for name, items in body.items()} == {
        "PROMPT": [b"a"],
        "STREAM": [True],
        "ids": [7, 8],
    }
    assert dict(planned.fields) == {"top": 0.5, "n": 1}


def test_parameters_of_the_protocol_have_their_meaning() -> None:
    request, _, _ = decode_generate(ANYTHING, b'{"text_input": "a", "priority": 1, "timeout": 5000}')
    assert (request.priority, request.timeout_us, request.parameters) == (9, 5000, {})
    assert "reserved" in refused(ANYTHING, {"text_input": "a", "triton_x": 1})


@pytest.mark.parametrize("value", ["a", {"prompt": "a", "n": [1]}, None, 7])
def test_a_model_without_inputs_gets_the_value(value: Any) -> None:
    name = "text_input" if isinstance(value, str) else "body"
    request, _, _ = decode_generate(ANYTHING, json.dumps({name: value}).encode())
    planned = plan(ANYTHING, request)
    assert planned.content_type == JSON
    assert values_of(planned) == [value]


def test_a_whole_infer_request_is_one() -> None:
    model = identity("INT32")
    request, is_whole, _ = decode_generate(model, written(tensor([1, 2], "INT32"), id="7"))
    assert is_whole
    assert request.id == "7"
    assert "binary data" in refused(
        model, written(tensor([1], "INT32"), parameters={"binary_data_output": True})
    )


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((), 1, (1,)),
        ((1, 1), 1, (1, 1, 1)),
        ((2, -1), 6, (1, 2, 3)),
        ((-1, -1), 6, (1, 1, 6)),
        ((-1, 3), 0, (1, 0, 3)),
        ((0,), 0, (1, 0)),
    ],
)
def test_shapes_are_those_that_the_elements_fill(shape: Any, count: int, expected: Any) -> None:
    model = offered([TensorSpec("x", "INT32", shape)], [])
    request, _, _ = decode_generate(model, json.dumps({"x": list(range(count))}).encode())
    assert request.inputs[0].shape == expected


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "expected number of inputs between 2 and 3 but got 0"),
        ({"STREAM": False, "other": "x"}, "expected number of inputs between 2 and 3 but got 1"),
        ({"PROMPT": 123, "STREAM": False}, "input 'PROMPT': attempt to access JSON non-string as string"),
        ({"STREAM": 1, "PROMPT": 2}, "input 'STREAM': attempt to access JSON non-boolean as boolean"),
        ({"PROMPT": {"a": 1}}, "attempt to access JSON non-string as string"),
        (
            {"PROMPT": ["a", "b"], "STREAM": True},
            "can not convert input 'PROMPT' to tensor with proper shape",
        ),
        ({"PROMPT": "a", "STREAM": True, "ids": [1.5]}, "input 'ids': element 0 is 1.5, which is no INT32"),
        ({"more": {"a": 1}}, "parameter 'more' has invalid type"),
        ({"parameters": 1}, "Expected JSON object for keyword: 'parameters'"),
        ({"parameters": {"n": {}}}, "Converting keyword: 'parameters': parameter 'n' has invalid type."),
        ({"id": 7}, "id: must be a text"),
        ([], "must be a JSON object"),
        (b'{"PROMPT": "a", "STREAM": true, "STREAM": true, "PROMPT": 1}', "input 'STREAM' already exists in"),
        (b'{"PROMPT": "a", "parameters": {"PROMPT": "b"}}', "input 'PROMPT' already exists in request"),
        (b'{"parameters": {"n": 1, "n": 2}}', "'n' already exists in request"),
        (b'{"PROMPT": ', "not JSON"),
    ],
)
def test_what_is_wrong_is_named(body: Any, why: str) -> None:
    assert why in refused(LLM, body)


@pytest.mark.parametrize("body", [{"text_input": 7}, {"text_input": "a", "body": 1}, {"other": 1}])
def test_a_model_without_inputs_takes_one_value(body: Any) -> None:
    refused(ANYTHING, body)


# --- responses ---------------------------------------------------------------------------------------------


def encoded(model: OfferedModel, *values: Any) -> bytes:
    request, _, _ = decode_generate(model, as_one(model))
    return encode_generate(model, request.id, join_results(model, plan(model, request), [packed(*values)]))


def test_an_output_of_one_element_is_no_list() -> None:
    model = offered([], [TensorSpec("a", "FP32", (1,)), TensorSpec("b", "INT32", (-1,))])
    value = {"a": np.array([0.5], np.float32), "b": np.array([1, 2], np.int32)}
    assert json.loads(encoded(model, value)) == {
        "model_name": "m",
        "model_version": "1",
        "a": 0.5,
        "b": [1, 2],
    }
    value["b"] = np.array([], np.int32)
    assert json.loads(encoded(model, value))["b"] == []


def test_what_a_model_without_outputs_returns_is_text() -> None:
    assert json.loads(encoded(ANYTHING, "caf\u00e9"))["text_output"] == "caf\u00e9"
    assert json.loads(encoded(ANYTHING, {"label": 1}))["text_output"] == '{"label":1}'
    with pytest.raises(ProtocolError, match="UTF-8"):
        encoded(ANYTHING, b"\xff")


# --- chunks ------------------------------------------------------------------------------------------------


def chunk(value: Any, merged: int = 1, *, is_list: bool = False) -> Chunk:
    return Chunk("id", MSGPACK, encode_result_body(MSGPACK, value), 0, merged, is_list)


def responses(model: OfferedModel, one: Chunk) -> list[Any]:
    planned = plan(model, decode_generate(model, as_one(model)).request)
    return [
        json.loads(encode_generate(model, "", outputs)) for outputs in responses_of_chunk(model, planned, one)
    ]


def test_values_that_were_put_end_to_end_are_responses_of_their_own() -> None:
    pairs = offered([], [TensorSpec("y", "INT32", (2,))], ModelKind.STEPPING)
    assert [one["y"] for one in responses(pairs, chunk(np.array([1, 2, 3, 4, 5, 6], np.int32), 3))] == [
        [1, 2],
        [3, 4],
        [5, 6],
    ]
    texts = offered([], [TensorSpec("y", "BYTES", (1,))], ModelKind.STEPPING)
    assert [one["y"] for one in responses(texts, chunk(np.array(["a", "b"], object), 2))] == ["a", "b"]


def test_values_of_any_length_stay_together() -> None:
    varying = offered([], [TensorSpec("y", "INT32", (-1,))], ModelKind.STEPPING)
    assert [one["y"] for one in responses(varying, chunk(np.array([1, 2, 3], np.int32), 2))] == [[1, 2, 3]]
    text = offered([], [TensorSpec("y", "BYTES", ())], ModelKind.STEPPING)
    assert [one["y"] for one in responses(text, chunk("ab", 2))] == ["ab"]


def test_lists_of_values_are_divided() -> None:
    model = offered([], [TensorSpec("a", "INT32", (1,)), TensorSpec("b", "BYTES", (1,))], ModelKind.STEPPING)
    value = {"a": np.array([1], np.int32), "b": np.array(["x"], object)}
    found = responses(model, chunk([value, {**value, "a": np.array([2], np.int32)}], 2, is_list=True))
    assert [(one["a"], one["b"]) for one in found] == [(1, "x"), (2, "x")]
    found = responses(ANYTHING, chunk([{"n": 1}, "text"], 2, is_list=True))
    assert [one["text_output"] for one in found] == ['{"n":1}', "text"]
