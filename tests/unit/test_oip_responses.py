"""Responses of the Open Inference Protocol: results of rows as outputs, in JSON and as binary data."""

from __future__ import annotations

import math
import re
import struct
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from carpool.errors import CarpoolError, InternalError, error_for
from carpool.wire.bodies import encode_result_body
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip import responses
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import plan
from carpool_gateway.oip.requests import decode_request
from carpool_gateway.oip.responses import Response, RowResult, encode_response, join_results
from support.oip import binary_part, document, echo, identity, offered, packed, tensor, with_binary, written

ANYTHING = offered()
TEXTS = offered([], [TensorSpec("y", "BYTES", (-1,))])


def returned(
    model: OfferedModel, values: list[Any], wanted: list[dict[str, Any]] | None = None, **more: Any
) -> Response:
    """The response of a model that takes BYTES and returns these values, one for each row."""
    body = written(tensor(["a"] * len(values), "BYTES", [len(values), 1], "body"), outputs=wanted, **more)
    request = decode_request(body)
    joined = join_results(model, plan(model, request), [packed(value) for value in values])
    return encode_response(model.name, request.id, joined)


def numbers(shape: tuple[int, ...] = (-1,), datatype: str = "FP32") -> OfferedModel:
    return offered([], [TensorSpec("y", datatype, shape)])


def classes(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "y", "parameters": {"classification": count, **more}}]


# --- form --------------------------------------------------------------------------------------------------


def test_json() -> None:
    response = echo(identity("INT32"), written(tensor([[1, 2], [3, 4]], "INT32", [2, 2]), id="42"))
    assert b"".join(response.parts) == (
        b'{"id":"42","model_name":"m","model_version":"1","outputs":'
        b'[{"name":"x","datatype":"INT32","shape":[2,2],"data":[1,2,3,4]}]}'
    )
    assert (response.header_length, response.content_type) == (None, "application/json")


def test_without_an_id_there_is_none() -> None:
    for given in ({}, {"id": ""}, {"id": None}):
        assert "id" not in document(echo(identity("INT32"), written(tensor([1], "INT32"), **given)))


def test_binary_data() -> None:
    body, length = with_binary(("x", "INT16", [2, 1], b"abcd"), parameters={"binary_data_output": True})
    response = echo(identity("INT16"), body, length)
    assert response.header_length == len(response.parts[0])
    assert response.content_type == "application/octet-stream"
    assert document(response)["outputs"] == [
        {"name": "x", "datatype": "INT16", "shape": [2, 1], "parameters": {"binary_data_size": 4}}
    ]
    assert binary_part(response) == b"abcd"


def test_outputs_are_in_the_order_in_which_they_are_wanted() -> None:
    specs = [TensorSpec(name, "INT8", (1,)) for name in "abc"]
    wanted: list[dict[str, Any]] = [
        {"name": "c", "parameters": {"binary_data": True}},
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": True}},
    ]
    values = [{name: np.array([ord(name)], "i1") for name in "abc"}]
    response = returned(offered([], specs), values, wanted)
    outputs = document(response)["outputs"]
    assert [output["name"] for output in outputs] == ["c", "a", "b"]
    assert ["parameters" in output for output in outputs] == [True, False, True]
    assert binary_part(response) == b"cb"
    assert [output["name"] for output in document(returned(offered([], specs), values))["outputs"]] == [
        *"abc"
    ]


@pytest.mark.parametrize("shape", [[0], [0, 2]])
def test_no_rows(shape: list[int]) -> None:
    model = identity("FP32", shape[1:])
    nothing = {"name": "x", "datatype": "FP32", "shape": shape, "data": []}
    assert document(echo(model, written(nothing)))["outputs"] == [nothing]
    response = echo(model, written(nothing, parameters={"binary_data_output": True}))
    assert document(response)["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert response.header_length is None
    texts = {"name": "x", "datatype": "BYTES", "shape": [0, 3], "data": []}
    assert document(echo(identity("BYTES"), written({**texts, "shape": [0, 3]})))["outputs"][0]["data"] == []


def test_rows_without_elements() -> None:
    nothing = {"name": "x", "datatype": "FP32", "shape": [3, 0], "data": []}
    assert document(echo(identity("FP32"), written(nothing)))["outputs"] == [nothing]


# --- numbers and texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_json_has_no_number_for(datatype: str) -> None:
    response = echo(identity(datatype), written(tensor([math.nan, math.inf, -math.inf, 0.5], datatype)))
    assert b'"data":[NaN,Infinity,-Infinity,0.5]' in response.parts[0]


def test_integers_of_64_bits() -> None:
    for datatype, data in (("INT64", [9007199254740993, -(2**63)]), ("UINT64", [2**64 - 1])):
        assert (
            document(echo(identity(datatype), written(tensor(data, datatype))))["outputs"][0]["data"] == data
        )


def test_bools() -> None:
    assert b'"data":[true,false]' in echo(identity("BOOL"), written(tensor([True, False], "BOOL"))).parts[0]


def test_texts() -> None:
    values = [np.array(["é", ""], object), np.array(["b", "c"], object)]
    assert document(returned(TEXTS, values))["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [2, 2], "data": ["é", "", "b", "c"]}
    ]
    alone = offered([], [TensorSpec("y", "BYTES", ())])
    assert document(returned(alone, ["a", "b"]))["outputs"][0] == tensor(["a", "b"], "BYTES", [2], "y")
    pair = offered([], [TensorSpec("y", "BYTES", ()), TensorSpec("z", "INT8", ())])
    assert document(returned(pair, [{"y": "a", "z": np.array(7, "i1")}]))["outputs"] == [
        tensor(["a"], "BYTES", [1], "y"),
        tensor([7], "INT8", [1], "z"),
    ]
    response = echo(
        identity("BYTES"), written(tensor(["é", ""], "BYTES"), parameters={"binary_data_output": True})
    )
    assert binary_part(response) == struct.pack("<I2sI", 2, "é".encode(), 0)


def test_bytes_that_are_no_text_are_not_written_in_json() -> None:
    request = decode_request(written(tensor(["a", "b"], "BYTES", [2, 1], "body")))
    found = [RowResult("OK", "image/png", b"a"), RowResult("OK", "image/png", b"\xff\xd8")]
    joined = join_results(ANYTHING, plan(ANYTHING, request), found)
    with pytest.raises(ProtocolError, match=r"element 1 is not UTF-8.* ask for binary_data"):
        encode_response("m", "", joined)
    binary = encode_response("m", "", [joined[0]._replace(binary=True)])
    assert binary_part(binary) == b"\x01\0\0\0a\x02\0\0\0\xff\xd8"


# --- failures ----------------------------------------------------------------------------------------------


def test_one_failed_row_fails_the_response() -> None:
    request = decode_request(written(tensor([1.0, 2.0], shape=[2, 1])))
    found = plan(identity("FP32"), request)
    good = packed(np.array([1.0], "f4"))
    for status in ("INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "ABORTED"):
        with pytest.raises(type(error_for(status, ""))) as caught:
            join_results(identity("FP32"), found, [good, RowResult(status, detail="it is wrong")])
        assert (caught.value.status, caught.value.detail) == (status, "row 1: it is wrong")
    with pytest.raises(CarpoolError, match=r"^INTERNAL: it is wrong$"):
        join_results(identity("FP32"), found, [RowResult("INTERNAL", detail="it is wrong")])


def test_rows_that_begin_alike_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[bytes] = []

    def unpackb(body: bytes) -> Any:
        unpacked.append(body)
        return msgpack.unpackb(body)

    monkeypatch.setattr(responses, "msgpack", SimpleNamespace(unpackb=unpackb))
    values = [np.full(2, number, "f4") for number in range(50)]
    (output,) = document(returned(numbers(), values))["outputs"]
    assert (output["shape"], output["data"][-3:]) == ([50, 2], [48, 49, 49])
    assert len(unpacked) == 1


def test_rows_as_long_that_begin_otherwise() -> None:
    with pytest.raises(ProtocolError, match=re.escape("shape [1, 4] for row 0 and [2, 2] for row 1")):
        returned(numbers((-1, -1)), [np.zeros((1, 4), "f4"), np.zeros((2, 2), "f4")])


def test_rows_of_different_shapes_are_no_batch() -> None:
    with pytest.raises(ProtocolError, match=re.escape("shape [1] for row 0 and [2] for row 1")):
        returned(numbers(), [np.zeros(1, "f4"), np.zeros(2, "f4")])


@pytest.mark.parametrize(
    "value",
    [7, "a", {"z": np.zeros(1, "f4")}, np.zeros(1, "f8"), np.zeros((1, 1), "f4"), np.array(["a"]),
     {"datatype": "FP32", "shape": [1], "data": b"abc"}, {"datatype": "FP32", "shape": [1], "data": [1]}],
)  # fmt: skip
def test_results_that_are_not_as_declared(value: Any) -> None:
    model, good = numbers(), packed(np.zeros(1, "f4"))
    found = RowResult("OK", "application/msgpack", _unchecked(value))
    request = decode_request(written(tensor(["a", "a"], "BYTES", [2, 1], "body")))
    for rows in ([found, found], [good, found]):
        with pytest.raises((InternalError, ProtocolError), match=r"declares|no batch"):
            join_results(model, plan(model, request), rows)


def _unchecked(value: Any) -> bytes:
    if isinstance(value, dict) and "data" in value:
        return bytes(msgpack.packb(value))
    return encode_result_body("application/msgpack", value)


def test_results_of_another_content_type() -> None:
    request = decode_request(written(tensor(["a"], "BYTES", name="body")))
    for found in (RowResult("OK", "application/json", b"7"), RowResult("OK", "application/msgpack", b"\xc1")):
        with pytest.raises(InternalError):
            join_results(numbers(), plan(numbers(), request), [found])


# --- models without outputs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "body", "element"),
    [
        ("application/json", b"49", "49"),
        ("application/json", b'"c\\u00e9"', "cé"),
        ("application/json", b'{"a":"b"}', '{"a":"b"}'),
        ("application/json", b'["b"]', '["b"]'),
        ("application/octet-stream", b"abc", "abc"),
        ("text/plain", b'"', '"'),
        ("application/msgpack", b"\xa1a", "a"),
        ("application/msgpack", b"\xc4\x01a", "a"),
        ("application/msgpack", b"\x92\x07\xa1a", '[7,"a"]'),
    ],
)
def test_a_result_is_an_element(content_type: str, body: bytes, element: str) -> None:
    request = decode_request(written(tensor(["a"], "BYTES", name="body")))
    joined = join_results(ANYTHING, plan(ANYTHING, request), [RowResult("OK", content_type, body)])
    assert document(encode_response("m", "", joined))["outputs"] == [
        {"name": "result", "datatype": "BYTES", "shape": [1, 1], "data": [element]}
    ]


def test_a_result_of_the_content_type_that_was_asked_for_is_its_bytes() -> None:
    request = decode_request(
        written(tensor(["a"], "BYTES", name="body"), parameters={"accept": "application/json"})
    )
    joined = join_results(ANYTHING, plan(ANYTHING, request), [RowResult("OK", "application/json", b'"a"')])
    assert joined[0].data == [b'"a"']


# --- classification ----------------------------------------------------------------------------------------


def test_classes_are_values_and_indexes() -> None:
    values = [np.array([0.25, 3, -1, 3], "f4"), np.array([-5, 0, 1e9, -0.5], "f4")]
    response = returned(numbers((4,)), values, classes(3))
    assert document(response)["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [2, 3],
            "data": [
                "3.000000:1",
                "3.000000:3",
                "0.250000:0",
                "1000000000.000000:2",
                "0.000000:1",
                "-0.500000:3",
            ],
        }
    ]


def test_classes_of_integers_and_floats_that_are_no_numbers() -> None:
    found = returned(numbers(datatype="UINT8"), [np.array([7, 255, 0], "u1")], classes(5))
    assert document(found)["outputs"][0]["data"] == ["255:1", "7:0", "0:2"]
    found = returned(numbers(datatype="INT64"), [np.array([-(2**63), 2**63 - 1], "i8")], classes(1))
    assert document(found)["outputs"][0]["data"] == [f"{2**63 - 1}:1"]
    odd = np.array([math.nan, -math.inf, 1, math.inf], "f4")
    found = returned(numbers(), [odd], classes(4))
    assert document(found)["outputs"][0]["data"] == ["inf:3", "1.000000:2", "nan:0", "-inf:1"]


def test_classes_as_binary_data() -> None:
    response = returned(numbers(datatype="BOOL"), [np.array([False, True])], classes(1, binary_data=True))
    assert binary_part(response) == b"\x03\0\0\x001:1"


def test_classes_of_a_matrix_count_its_elements() -> None:
    found = returned(numbers((2, 2), "INT8"), [np.array([[1, 2], [4, 3]], "i1")], classes(2))
    assert document(found)["outputs"][0]["data"] == ["4:2", "3:3"]


def test_classes_have_labels_where_the_model_declares_them() -> None:
    """Given labels for some of the elements, and an empty one, expect no label for the others."""
    model = offered([], [TensorSpec("y", "FP32", (4,), labels=("cat", "", "Käfer: 2"))])
    found = returned(model, [np.array([1, 2, 3, 4], "f4"), np.array([4, 0, 0, 0], "f4")], classes(4))
    assert document(found)["outputs"][0]["data"][:5] == [
        "4.000000:3", "3.000000:2:Käfer: 2", "2.000000:1", "1.000000:0:cat", "4.000000:0:cat",
    ]  # fmt: skip


def test_too_many_elements_to_classify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "CLASSIFIED_ELEMENTS_MAX", 3)
    with pytest.raises(ProtocolError, match="at most 3"):
        returned(numbers(), [np.zeros(4, "f4")], classes(1))
