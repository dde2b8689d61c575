"""What is sent to a model for an infer request: a body for each row, or why the request does not suit it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from carpool.model_settings import ModelKind
from carpool.rows import Rows
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import ROWS_MAX, Plan, plan
from carpool_gateway.oip.requests import decode_request
from support.oip import bodies_of, identity, offered, tensor, unpacked, values_of, with_binary, written

PAIR = offered(
    [TensorSpec("a", "INT32", (2,)), TensorSpec("b", "FP32", (-1,))], [TensorSpec("y", "FP32", (2,))]
)
ANYTHING = offered()


def planned(model: OfferedModel, body: bytes, header_length: bytes | None = None) -> Plan:
    return plan(model, decode_request(body, header_length))


def refused(model: OfferedModel, body: bytes, header_length: bytes | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        planned(model, body, header_length)
    return caught.value.detail


def as_map(datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"datatype": datatype, "shape": shape, "data": data}


# --- rows --------------------------------------------------------------------------------------------------


def test_rows_of_one_input_are_slices_with_a_common_head() -> None:
    body, length = with_binary(("x", "UINT8", [3, 2], b"abcdef"))
    found = planned(identity("UINT8"), body, length)
    assert isinstance(found.bodies, Rows)
    assert isinstance(found.bodies.data, memoryview)
    assert found.bodies.data.obj is body
    assert [unpacked(row) for row in bodies_of(found)] == [
        as_map("UINT8", [2], b"ab"),
        as_map("UINT8", [2], b"cd"),
        as_map("UINT8", [2], b"ef"),
    ]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_of_several_inputs(rows: int) -> None:
    a = np.arange(2 * rows, dtype="<i4").reshape(rows, 2)
    b = np.linspace(0, 1, 3 * rows, dtype="<f4").reshape(rows, 3)
    body, length = with_binary(
        ("b", "FP32", [rows, 3], b.tobytes()),
        ("a", "INT32", [rows, 2], a.tobytes()),
    )
    found = planned(PAIR, body, length)
    assert [unpacked(row) for row in bodies_of(found)] == [
        {"a": as_map("INT32", [2], a[row].tobytes()), "b": as_map("FP32", [3], b[row].tobytes())}
        for row in range(rows)
    ]


def test_rows_of_texts() -> None:
    model = offered([TensorSpec("t", "BYTES", (2,), text=True), TensorSpec("n", "INT8", ())], [])
    body = written(tensor(["a", "é", "c", "d"], "BYTES", [2, 2], "t"), tensor([7, 8], "INT8", [2], "n"))
    assert [unpacked(row) for row in bodies_of(planned(model, body))] == [
        {"t": as_map("BYTES", [2], ["a", "é"]), "n": as_map("INT8", [], b"\x07")},
        {"t": as_map("BYTES", [2], ["c", "d"]), "n": as_map("INT8", [], b"\x08")},
    ]


def test_rows_of_bytes() -> None:
    alone = planned(identity("BYTES"), written(tensor(["a", "é"], "BYTES", [2, 1])))
    in_utf_8 = [as_map("BYTES", [1], [element]) for element in (b"a", "é".encode())]
    assert [unpacked(row) for row in bodies_of(alone)] == in_utf_8
    body, length = with_binary(("x", "BYTES", [2, 2], struct.pack("<I1sIII2s", 1, b"a", 0, 0, 2, b"\xff\0")))
    assert [unpacked(row) for row in bodies_of(planned(identity("BYTES"), body, length))] == [
        as_map("BYTES", [2], [b"a", b""]),
        as_map("BYTES", [2], [b"", b"\xff\0"]),
    ]


def test_declared_texts_are_utf_8() -> None:
    texts = offered([TensorSpec("x", "BYTES", (-1,), text=True)])
    body, length = with_binary(("x", "BYTES", [2, 1], b"\x01\0\0\0a\x01\0\0\0\xff"))
    assert "element 1 is not UTF-8, and the model takes texts" in refused(texts, body, length)


@pytest.mark.parametrize(("shape", "count"), [([0, 2], 0), ([3, 0], 3), ([0, 0], 0)])
def test_rows_without_numbers(shape: list[int], count: int) -> None:
    found = planned(identity("FP32"), written({"name": "x", "datatype": "FP32", "shape": shape, "data": []}))
    assert bodies_of(found) == [bodies_of(found)[0]] * count if count else bodies_of(found) == []
    for row in bodies_of(found):
        assert unpacked(row) == as_map("FP32", [shape[1]], b"")


def test_a_model_of_single_numbers() -> None:
    found = planned(identity("INT8", ()), written(tensor([1, 2], "INT8", [2])))
    assert values_of(found) == [1, 2]


def test_the_number_of_rows_is_limited() -> None:
    found = planned(identity("INT8"), *with_binary(("x", "INT8", [ROWS_MAX, 1], bytes(ROWS_MAX))))
    assert len(found.bodies) == ROWS_MAX
    sentence = refused(identity("INT8"), *with_binary(("x", "INT8", [ROWS_MAX + 1, 1], bytes(ROWS_MAX + 1))))
    assert "[1025, 1]" in sentence
    assert "[-1, -1] has at most 1024" in sentence


def test_a_row_is_as_large_as_the_model_takes() -> None:
    model = offered([TensorSpec("x", "INT8", (-1,))], [], max_body_bytes="100")
    head_bytes = len(bodies_of(planned(model, written(tensor([1] * 50, "INT8"))))[0]) - 50
    planned(model, written(tensor([1] * (100 - head_bytes), "INT8")))
    with pytest.raises(TooLargeError):
        planned(model, written(tensor([1] * (101 - head_bytes), "INT8")))
    with pytest.raises(TooLargeError, match="takes at most 100") as caught:
        planned(model, written(tensor([1] * 100, "INT8")))
    assert caught.value.http_status == 413
    planned(offered(max_body_bytes="4"), written(tensor(["abcd", "a"], "BYTES", [2], "body")))
    with pytest.raises(TooLargeError):
        planned(offered(max_body_bytes="3"), written(tensor(["abcd", "a"], "BYTES", [2], "body")))


def test_a_request_of_a_sequence_is_one_row() -> None:
    model = offered([TensorSpec("x", "INT8", (1,))], [], ModelKind.STATEFUL)
    more = {"parameters": {"sequence_id": 7, "sequence_start": True}}
    assert len(planned(model, written(tensor([1], "INT8"), **more)).bodies) == 1
    assert "has one row" in refused(model, written(tensor([1, 2], "INT8", [2, 1]), **more))


# --- inputs ------------------------------------------------------------------------------------------------


def test_inputs_that_are_not_those_of_the_model() -> None:
    a, b = tensor([1, 2], "INT32", name="a"), tensor([1.0], name="b")
    for given, said in (
        ([a], ("lacks b", "Got a;", "expected 2 inputs but got 1 inputs")),
        ([], ("lacks a, b", "Got none;")),
        ([a, b, {**a, "name": "c"}], ("has c, which it does not take",)),
        ([a, {**b, "name": "c"}], ("lacks b and has c",)),
        ([a, a], ("input 'a' already exists",)),
    ):
        sentence = refused(PAIR, written(*given))
        assert all(part in sentence for part in said), sentence
    assert "expected a INT32 [-1, 2], b FP32 [-1, -1]" in refused(PAIR, written(a))


def test_another_datatype_is_not_converted() -> None:
    sentence = refused(identity("INT32"), written(tensor([1], "INT64")))
    assert sentence == "input 'x': datatype is INT64, but the model takes INT32"


@pytest.mark.parametrize("shape", [[2], [1, 3], [1, 1, 2], [], [2, 1]])
def test_another_shape(shape: list[int]) -> None:
    count = int(np.prod(shape, dtype=int))
    sentence = refused(identity("INT8", (2,)), written({**tensor([1] * count, "INT8"), "shape": shape}))
    assert str(shape) in sentence
    assert "[-1, 2], of which the first is the batch" in sentence


def test_batches_of_different_sizes() -> None:
    body = written(tensor([1, 2], "INT32", name="a"), tensor([1.0, 2.0], shape=[2, 1], name="b"))
    assert "the batch has 2 rows, but that of 'a' has 1" in refused(PAIR, body)


# --- outputs -----------------------------------------------------------------------------------------------


def test_outputs_that_the_model_has_not() -> None:
    body = written(tensor([1], "INT8"), outputs=[{"name": "y"}])
    assert "unexpected inference output 'y'" in refused(identity("INT8"), body)
    twice = written(tensor([1], "INT8"), outputs=[{"name": "x"}, {"name": "x"}])
    assert "output 'x' already exists" in refused(identity("INT8"), twice)


def test_what_cannot_be_written_in_json_is_refused_before_it_is_computed() -> None:
    body, length = with_binary(("x", "BF16", [1, 1], b"ab"))
    assert "output 'x': BF16 is not written in JSON: ask for binary_data" in refused(
        identity("BF16"), body, length
    )
    body, length = with_binary(("x", "BF16", [1, 1], b"ab"), parameters={"binary_data_output": True})
    assert planned(identity("BF16"), body, length).outputs[0].binary


@pytest.mark.parametrize("datatype", ["BYTES", "FP16"])
def test_what_has_no_classes(datatype: str) -> None:
    wanted = {"binary_data": True, "classification": 1}
    body, length = with_binary(("x", datatype, [1, 0], b""), outputs=[{"name": "x", "parameters": wanted}])
    assert "has no classification" in refused(identity(datatype), body, length)


# --- models without tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_a_model_without_tensors_gets_the_elements_of_body(shape: list[int]) -> None:
    body, length = with_binary(("body", "BYTES", shape, struct.pack("<I2sI3s", 2, b"\xff\xd8", 3, b"abc")))
    found = planned(ANYTHING, body, length)
    assert (found.content_type, found.bodies, found.accept) == (
        "application/octet-stream",
        [b"\xff\xd8", b"abc"],
        "",
    )
    assert "[-1, 1]" in refused(ANYTHING, written(tensor(["a", "b"], "BYTES", [1, 2], "body")))


@pytest.mark.parametrize(
    ("given", "content_type"),
    [
        ("application/json; charset=utf-8", "application/json"),
        ("image/png", "image/png"),
        ("str", "application/octet-stream"),
        (7, "application/octet-stream"),
    ],
)
def test_what_the_elements_of_body_are(given: Any, content_type: str) -> None:
    body = written(tensor(["7"], "BYTES", name="body", parameters={"content_type": given}))
    assert planned(ANYTHING, body).content_type == content_type
    assert values_of(planned(ANYTHING, body)) == [7 if content_type == "application/json" else b"7"]


def test_content_types_that_are_none() -> None:
    body = written(tensor(["7"], "BYTES", name="body", parameters={"content_type": "a/b/c"}))
    assert "content_type 'a/b/c' is none" in refused(ANYTHING, body)
    body = written(tensor(["7"], "BYTES", name="body"), parameters={"accept": 7})
    assert "parameter accept: 7 is no content type" in refused(ANYTHING, body)


def test_results_have_the_content_type_that_is_needed() -> None:
    body = written(tensor(["7"], "BYTES", name="body"), parameters={"accept": "image/png", "a": 1})
    assert (planned(ANYTHING, body).accept, planned(ANYTHING, body).is_chosen) == ("image/png", True)
    assert planned(ANYTHING, body).fields == {"a": 1}
    only_outputs = offered([], [TensorSpec("y", "FP32", (2,))])
    found = planned(only_outputs, written(tensor(["7"], "BYTES", name="body")))
    assert (found.accept, found.is_chosen) == ("application/msgpack", False)
    assert "has no meaning" in refused(only_outputs, body)


# --- raw requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "body", "value"),
    [
        (identity("INT8", (2,)), b"\x01\x02", [1, 2]),
        (identity("INT16", (-1,)), b"\x01\0\x02\0\x03\0", [1, 2, 3]),
        (identity("INT8", (2, -1)), b"\x01\x02\x03\x04", [[1, 2], [3, 4]]),
        (identity("INT8", (-1,)), b"", []),
        (identity("BYTES", (1,)), b"a\xff", [b"a\xff"]),
        (offered([TensorSpec("x", "BYTES", (1,), text=True)]), b"abc", ["abc"]),
        (ANYTHING, b"\xff\xd8", b"\xff\xd8"),
    ],
)
def test_a_raw_request_is_one_row(model: OfferedModel, body: bytes, value: Any) -> None:
    found = planned(model, body, b"0")
    (given,) = values_of(found)
    assert (given.tolist() if isinstance(given, np.ndarray) else given) == value
    assert found.outputs[0].binary


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (PAIR, "model with one input"),
        (identity("INT8", (-1, -1)), "more than one size of input 'x' varies"),
        (identity("INT16", (2,)), "has 3 bytes of binary data, but its shape takes 4"),
        (identity("INT16", (-1,)), "has 3 bytes of binary data, but its shape takes 2"),
        (identity("INT8", (0, -1)), "has 3 bytes"),
        (identity("BYTES", (2,)), "one element of BYTES"),
        (identity("BYTES", (-1,)), "one element of BYTES"),
    ],
)
def test_a_raw_request_that_tells_too_little(model: OfferedModel, sentence: str) -> None:
    assert sentence in refused(model, b"abc", b"0")
