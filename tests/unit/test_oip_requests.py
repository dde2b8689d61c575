"""Infer requests of the Open Inference Protocol: what is read, and why the rest is refused."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest

from carpool_gateway.oip import elements, json_text, requests
from carpool_gateway.oip.elements import OBJECTS_MAX
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.requests import InferRequest, InputTensor, RequestedOutput, decode_request
from support.oip import tensor, with_binary, written


def refused(body: bytes, header_length: bytes | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_request(body, header_length)
    return caught.value.detail


def of_parameters(**parameters: Any) -> InferRequest:
    return decode_request(written(parameters=parameters))


def only(body: bytes, header_length: bytes | None = None) -> InputTensor:
    (found,) = decode_request(body, header_length).inputs
    return found


def numbers(found: InputTensor, dtype: str) -> list[Any]:
    assert not isinstance(found.data, list)
    values: list[Any] = np.frombuffer(found.data, dtype).tolist()
    return values


# --- the whole ---------------------------------------------------------------------------------------------


def test_an_empty_id_is_none() -> None:
    assert decode_request(written(id="42")).id == "42"
    assert decode_request(written(id="")).id == decode_request(written()).id == ""


def test_unknown_names_and_null_are_ignored() -> None:
    body = written(tensor([1.0], x=1, parameters={"unknown": 1}), id=None, y={"z": [1]}, outputs=None)
    assert only(body).shape == (1, 1)


def test_a_request_of_json_may_tell_its_length() -> None:
    body = written(tensor([1.0]))
    assert decode_request(body, str(len(body)).encode()) == decode_request(body)


@pytest.mark.parametrize(
    "length", [b"-1", b"abc", b"+5", b"99999999999", b"9" * 30, b"", b" 5", b"1_0", b"\xff"]
)
def test_a_length_that_is_none(length: bytes) -> None:
    assert "Inference-Header-Content-Length" in refused(written(), length)


def test_a_length_of_zero_makes_the_whole_body_a_tensor() -> None:
    request = decode_request(b"\x01\x02", b"0")
    assert request.raw is not None
    assert bytes(request.raw) == b"\x01\x02"
    assert request.binary_output
    assert decode_request(b"", b"0").raw is not None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is empty"),
        (b" \n" * 100_000, "the body is empty"),
        (b"[]", "must be a JSON object"),
        (b"{}", "inputs is missing"),
        (b'{"inputs": 1}', "inputs must be a list"),
        (b'{"inputs": [1]}', "inputs[0]: must be a JSON object"),
        (b'{"inputs": [{}]}', "inputs[0]: name is missing"),
        (b'{"inputs": [{"name": 1}]}', "name must be a text"),
        (b'{"inputs": [{"name": "x"}]}', "datatype is missing"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32"}]}', "shape is missing"),
        (b'{"inputs": [], "id": 7}', "id must be a text"),
        (b'{"inputs": [], "outputs": [{}]}', "outputs[0]: name is missing"),
        (b'{"inputs": [], "outputs": {}}', "outputs must be a list"),
        (b'{"inputs": [], "parameters": []}', "parameters: must be a JSON object"),
        (b'{"inputs": []', "not JSON"),
        (b'{"inputs": []} x', "not JSON"),
        (b'{"inputs": [],}', "not JSON"),
        (b"\xef\xbb\xbf" + b'{"inputs": []}', "byte order mark"),
        (b'{"inputs": [], "id": "\xff"}', "not UTF-8: byte 22 is ff"),
        (b'{"inputs": [], "id": "\\ud800"}', "lone surrogate"),
        (b'{"inputs": [], "id": "a", "id": "a"}', "'id' is in a map more than once"),
        (b'{"inputs": [], "inputs": []}', "'inputs' is in a map more than once"),
        (b'{"inputs": [], "x": {"y": 1, "y": 2}}', "'y' is in a map more than once"),
        (b'{"inputs": [], "parameters": {"a:b": 1, "a:b": 1}}', "'a:b' is in a map more than once"),
        (b'{"inputs": [], "x": 1e400}', "outside the range of FP64"),
        (b'{"inputs": [], "x": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
        (b'{"inputs": [], "x": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 64"),
        (b'{"inputs": [], "x": ' + b"[" * 250_000 + b"]" * 250_000 + b"}", "nested deeper than 64"),
        (b"[" * 250_000, "nested deeper than 64"),
    ],
)
def test_what_is_no_request(body: bytes, sentence: str) -> None:
    assert sentence in refused(body)


def test_a_name_twice_is_seen_beside_texts_with_colons() -> None:
    body = written(tensor(["a:b", "c"], "BYTES"), id="1:2")
    assert decode_request(body).inputs[0].data == [b"a:b", b"c"]
    twice = body.replace(b'"id": "1:2"', b'"id": "1", "id": "2"')
    assert "more than once" in refused(twice)


@pytest.mark.parametrize("where", ["name", "datatype", "shape", "data"])
def test_a_name_twice_in_an_input(where: str) -> None:
    body = written(tensor([1.0])).replace(f'"{where}"'.encode(), f'"{where}": null, "{where}"'.encode())
    assert f"{where!r} is in a map more than once" in refused(body)


def test_the_usual_request_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the standard library parses all of it, which takes some five times as long."""
    for module in (json_text, elements, requests):
        monkeypatch.setattr(module, "parse", None)
    body, length = with_binary(
        ("x", "FP32", [1, 1], bytes(4)), id="7", parameters={"binary_data_output": True}
    )
    decode_request(body, length)
    decode_request(
        written(
            tensor([[1.0, 2], [-3e5, 0.1]], shape=[2, 2]),
            tensor([[[2**64 - 1]]], "UINT64", [1], "u"),
            tensor([[True], [False]], "BOOL", [2], "b"),
            tensor(["a:b"], "BYTES", name="y"),
            outputs=[{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
            parameters={"a": 1},
        )
    )


# --- parameters --------------------------------------------------------------------------------------------


def test_what_the_protocol_does_not_define_is_for_the_model() -> None:
    request = of_parameters(a="b", n=7, x=1.5, yes=True, priority=1, timeout=5, binary_data_output=False)
    assert request.parameters == {"a": "b", "n": 7, "x": 1.5, "yes": True}


@pytest.mark.parametrize("value", [None, [], {}, [1]])
def test_a_parameter_is_a_scalar(value: Any) -> None:
    assert "parameter 'a' must be a text, a number, true or false" in refused(
        written(parameters={"a": value})
    )
    assert "parameter 'a'" in refused(written(tensor([1.0], parameters={"a": value})))


@pytest.mark.parametrize("name", ["triton_final_response", "triton_", "headers"])
def test_reserved_parameters(name: str) -> None:
    assert f"{name!r}: is reserved" in refused(written(parameters={name: True}))


@pytest.mark.parametrize(("priority", "carpool"), [(0, None), (1, 9), (4, 6), (10, 0)])
def test_priorities_count_the_other_way_round(priority: int, carpool: int | None) -> None:
    assert of_parameters(priority=priority).priority == carpool


def test_a_timeout_is_microseconds() -> None:
    assert of_parameters(timeout=1_500_000).timeout_us == 1_500_000
    assert of_parameters(timeout=0).timeout_us is of_parameters().timeout_us is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": "a"},
        {"priority": 11},
        {"priority": -1},
        {"priority": True},
        {"priority": 1.0},
        {"timeout": -1},
        {"timeout": "1"},
        {"timeout": 2**63},
        {"timeout": 10**400},
        {"sequence_start": 1, "sequence_id": 1},
        {"sequence_end": "yes", "sequence_id": 1},
        {"sequence_id": -1},
        {"sequence_id": 2**64},
        {"sequence_id": 1.0},
        {"sequence_id": True},
        {"sequence_id": "a b"},
        {"sequence_id": "a" * 129},
        {"sequence_id": "ä"},
        {"binary_data_output": 1},
        {"binary_data_output": "true"},
    ],
)
def test_a_parameter_of_the_wrong_kind_is_named(parameters: dict[str, Any]) -> None:
    assert next(iter(parameters)) in refused(written(parameters=parameters))


@pytest.mark.parametrize(
    ("given", "sequence_id"),
    [(7, "7"), (2**64 - 1, str(2**64 - 1)), ("mic:7", "mic:7"), (0, ""), ("", "")],
)
def test_sequence_ids(given: Any, sequence_id: str) -> None:
    request = of_parameters(sequence_id=given)
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (sequence_id, False, False)


def test_the_first_and_last_request_of_a_sequence() -> None:
    request = of_parameters(sequence_id=1, sequence_start=True, sequence_end=True)
    assert (request.sequence_start, request.sequence_end) == (True, True)
    assert not of_parameters(sequence_start=False).sequence_start
    for nowhere in ({}, {"sequence_id": 0}, {"sequence_id": ""}):
        assert "sequence_id" in refused(written(parameters={"sequence_end": True, **nowhere}))


# --- outputs -----------------------------------------------------------------------------------------------


def test_outputs_are_as_their_own_parameters_say_or_those_of_the_request() -> None:
    outputs = [
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": False}},
        {"name": "c", "parameters": {"binary_data": True, "classification": 3}},
    ]
    request = decode_request(written(outputs=outputs, parameters={"binary_data_output": True}))
    assert request.outputs == (
        RequestedOutput("a", True),
        RequestedOutput("b", False),
        RequestedOutput("c", True, 3),
    )
    assert decode_request(written(outputs=[{"name": "a"}])).outputs == (RequestedOutput("a", False),)


def test_without_outputs_all_are_wanted() -> None:
    assert decode_request(written()).outputs is decode_request(written(outputs=[])).outputs is None
    assert of_parameters(binary_data_output=True).binary_output


@pytest.mark.parametrize(
    "parameters",
    [{"binary_data": 1}, {"classification": 0}, {"classification": -1}, {"classification": "1"},
     {"shared_memory_region": "r"}],
)  # fmt: skip
def test_an_output_that_cannot_be_had(parameters: dict[str, Any]) -> None:
    assert "output 'y'" in refused(written(outputs=[{"name": "y", "parameters": parameters}]))


# --- numbers in JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "dtype", "data"),
    [
        ("BOOL", "?", [True, False]),
        ("UINT8", "u1", [0, 255]),
        ("UINT16", "<u2", [0, 65535]),
        ("UINT32", "<u4", [0, 2**32 - 1]),
        ("UINT64", "<u8", [0, 2**64 - 1, 9007199254740993]),
        ("INT8", "i1", [-128, 127]),
        ("INT16", "<i2", [-(2**15), 2**15 - 1]),
        ("INT32", "<i4", [-(2**31), 2**31 - 1]),
        ("INT64", "<i8", [-(2**63), 2**63 - 1, 9007199254740993]),
        ("FP32", "<f4", [0.5, -1, 16777216, 3.4028234663852886e38]),
        ("FP64", "<f8", [0.1, 2**53, 1.7976931348623157e308, 5e-324]),
    ],
)
def test_numbers_are_exact(datatype: str, dtype: str, data: list[Any]) -> None:
    found = only(written(tensor(data, datatype)))
    assert numbers(found, dtype) == data
    assert found.shape == (1, len(data))


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_json_has_no_number_for(datatype: str) -> None:
    found = only(written(tensor([math.nan, math.inf, -math.inf, 1, 2**70], datatype)))
    assert str(numbers(found, "<f4" if datatype == "FP32" else "<f8")[:4]) == "[nan, inf, -inf, 1.0]"


def test_floats_are_rounded_once() -> None:
    just_above_middle = (1 << 62) + (1 << 38) + 1  # in FP64 it is the middle of two numbers of FP32
    for others in ([], [math.nan]):
        found = only(written(tensor([just_above_middle, *others], "FP32")))
        assert numbers(found, "<f4")[0] == float((1 << 62) + (1 << 39))
    assert numbers(only(written(tensor([2**53 + 1], "FP64"))), "<f8") == [float(2**53)]


REFUSED_ELEMENTS = [
    ("UINT8", "256"), ("UINT8", "257"), ("UINT8", "-1"), ("UINT16", "-1"), ("UINT16", "65536"),
    ("UINT32", "4294967296"), ("UINT64", "-1"), ("UINT64", "18446744073709551616"), ("INT8", "128"),
    ("INT16", "-32769"), ("INT32", "2147483648"), ("INT64", "9223372036854775808"),
    ("INT64", "-9223372036854775809"), ("INT32", "1.5"), ("INT32", "1.0"), ("INT32", "1e3"), ("INT32", '"1"'),
    ("INT32", "true"), ("INT32", "null"), ("INT32", "NaN"), ("INT32", "{}"), ("BOOL", "1"), ("BOOL", "0"),
    ("BOOL", '"true"'), ("BOOL", "null"), ("FP32", "1e39"), ("FP32", "-3.5e38"), ("FP32", "true"),
    ("FP32", '"1"'), ("FP32", "null"), ("FP64", '"NaN"'), ("FP64", "false"), ("FP64", "1" + "0" * 400),
    ("BYTES", "1"), ("BYTES", "null"), ("BYTES", "true"),
]  # fmt: skip


@pytest.mark.parametrize(("datatype", "element"), REFUSED_ELEMENTS)
@pytest.mark.parametrize("form", ["[%s, %s, %s]", "[[%s], [%s, %s]]", "[%s, [%s, %s]]"])
def test_an_element_that_is_none_is_named(datatype: str, element: str, form: str) -> None:
    right = {"BOOL": "true", "BYTES": '"a"'}.get(datatype, "1")
    body = written(tensor([0] * 3, datatype)).replace(b"[0, 0, 0]", (form % (right, right, element)).encode())
    shown = {"{}": "an object", "1e3": "1000.0", "1e39": "1e+39", "-3.5e38": "-3.5e+38"}.get(element, element)
    sentence = refused(body)
    assert sentence.startswith("input 'x': element 2 is ")
    assert shown[:40] in sentence
    assert datatype in sentence


def test_the_first_of_several_is_named() -> None:
    data = [1] * 1000
    data[700] = data[800] = 300
    assert "element 700 is 300" in refused(written(tensor(data, "UINT8")))


def test_a_number_beyond_fp64() -> None:
    body = written(tensor([0], "FP64")).replace(b'"data": [0]', b'"data": [1e400]')
    assert "1e400 is outside the range of FP64" in refused(body)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_are_not_written_in_json(datatype: str) -> None:
    assert f"input 'x': {datatype} is not written in JSON" in refused(written(tensor([1.0], datatype)))
    assert "not written in JSON" in refused(written(tensor([1.0, math.nan], datatype)))
    body, length = with_binary(("x", datatype, [1, 2], b"\x01\x02\x03\x04"))
    assert only(body, length).data == b"\x01\x02\x03\x04"


@pytest.mark.parametrize(
    "data",
    [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]], [[[1], [2], [3]], [[4], [5], [6]]], [[1, 2], [3, 4], [5, 6]],
     [[1], [2, 3, 4, 5, 6]], [1, [2, [3]], 4, 5, 6], [[[[[[1, 2, 3, 4, 5, 6]]]]]]],
)  # fmt: skip
@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_nesting_is_not_compared_with_the_shape(data: list[Any], datatype: str) -> None:
    found = only(written(tensor(data, datatype, [2, 3])))
    assert numbers(found, "<i4" if datatype == "INT32" else "<f4") == [1, 2, 3, 4, 5, 6]
    assert found.shape == (2, 3)


def test_texts_are_utf_8() -> None:
    found = only(written(tensor([["é", ""], ["\x00a", "😀"]], "BYTES", [2, 2])))
    assert found.data == ["é".encode(), b"", b"\x00a", "😀".encode()]
    assert "lone surrogate" in refused(written(tensor(["\ud800"], "BYTES")))
    assert "data must be a list" in refused(written(tensor("YWJj", "BYTES", [1, 1])))


# --- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_elements(count: int) -> None:
    for data in ([1.0] * count, [math.nan] * count):
        sentence = refused(written(tensor(data, shape=[1, 2])))
        assert f"input 'x': data has {count} elements, but its shape has 2 of FP32" in sentence
    body, length = with_binary(("x", "FP32", [1, 2], bytes(4 * count)))
    assert f"has {4 * count} bytes of binary data, but its shape takes 8" in refused(body, length)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ([-1, 2], "negative"),
        ([2**33, 2**33], "more than"),
        ([0, 2**60], "more than"),
        ([10**400], "more than"),
        ([1] * 101, "101 dimensions"),
        (["1"], "whole numbers"),
        ([1.0], "whole numbers"),
        ([True], "whole numbers"),
        ([None], "whole numbers"),
        ([[1]], "whole numbers"),
        ("1", "shape must be a list"),
        (None, "shape must be a list"),
    ],
)
def test_a_shape_that_is_none(shape: Any, sentence: str) -> None:
    body = json.dumps({"inputs": [{**tensor([1.0]), "shape": shape}]}).encode()
    assert sentence in refused(body)
    header = json.dumps(
        {"inputs": [{"name": "x", "datatype": "INT8", "shape": shape, "parameters": {"binary_data_size": 1}}]}
    )
    assert sentence in refused(header.encode() + b"a", str(len(header)).encode())


def test_shapes_at_their_limits() -> None:
    assert only(written(tensor([7], "INT8", [1] * 32))).shape == (1,) * 32
    assert "33 dimensions" in refused(written(tensor([7], "INT8", [1] * 33)))
    assert only(written(tensor([], "INT8", [0, 1 << 40]))).shape == (0, 1 << 40)
    assert "more than 1099511627776" in refused(written(tensor([], "INT8", [0, (1 << 40) + 1])))


@pytest.mark.parametrize("shape", [[0], [0, 16], [1, 0], [16, 0, 3]])
def test_no_elements(shape: list[int]) -> None:
    for datatype, nothing in (("FP32", b""), ("BYTES", [])):
        found = only(written({"name": "x", "datatype": datatype, "shape": shape, "data": []}))
        assert (found.shape, found.data) == (tuple(shape), nothing)
        body, length = with_binary(("x", datatype, shape, b""))
        assert only(body, length).data == nothing


def test_unknown_datatypes() -> None:
    for datatype in ("FP8", "", "fp32", "STRING"):
        assert f"datatype {datatype!r} is not one of BF16, BOOL, BYTES" in refused(
            written(tensor([1], datatype))
        )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"inputs": [{"data": [' + b"1," * OBJECTS_MAX + b"1]}]}", "send large tensors as binary data"),
        (b'{"inputs": [{"data": [' + b"[" * OBJECTS_MAX, "send large tensors as binary data"),
        (written({"name": "x", "datatype": "BYTES", "shape": [OBJECTS_MAX + 1], "data": []}), "of BYTES"),
        (written(*[tensor([], name=str(number)) for number in range(1001)]), "inputs: the request has 1001"),
        (written(outputs=[{"name": "x"}] * 1001), "outputs: the request has 1001"),
        (written(parameters={str(number): 1 for number in range(1001)}), "parameters: the request has 1001"),
    ],
)
def test_what_would_hold_up_others(body: bytes, sentence: str) -> None:
    with pytest.raises(TooLargeError, match=sentence) as caught:
        decode_request(body)
    assert caught.value.http_status == 413


# --- binary data -------------------------------------------------------------------------------------------


def test_binary_data_is_not_copied() -> None:
    body, length = with_binary(("x", "UINT8", [2, 2], b"abcd"), ("y", "BYTES", [1], b"\x01\0\0\0z"))
    x, y = decode_request(body, length).inputs
    assert isinstance(x.data, memoryview)
    assert x.data.obj is body
    assert (bytes(x.data), y.data) == (b"abcd", [b"z"])


def test_inputs_in_json_among_binary_ones() -> None:
    header = written(
        {"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        tensor([7], "INT8", [1], "b"),
        {"name": "c", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}},
    )
    request = decode_request(header + b"xyz", str(len(header)).encode())
    assert [bytes(found.data) for found in request.inputs if not isinstance(found.data, list)] == [
        b"xy",
        b"\x07",
        b"z",
    ]


def test_bytes_are_lengths_and_bytes() -> None:
    elements = [b"", b"\xff\xfe", b"abc", b"\x00" * 300]
    data = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    body, length = with_binary(("x", "BYTES", [2, 2], data))
    assert only(body, length).data == elements


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "too few for 2 elements"),
        (b"\x01\0\0\0a\x01\0\0", "ends in the length of element 1"),
        (b"\x03\0\0\0abc\x05\0\0\0ab", "element 1 has 5 bytes, but only 2"),
        (b"\xff\xff\xff\xff" * 2, "element 0 has 4294967295 bytes"),
        (b"\x01\0\0\0a\x01\0\0\0bx", "input 'x': 1 bytes of binary data are left after its 2 elements"),
    ],
)
def test_bytes_that_do_not_add_up(data: bytes, sentence: str) -> None:
    assert sentence in refused(*with_binary(("x", "BYTES", [2], data)))


def test_more_elements_than_bytes_take_no_memory() -> None:
    assert "too few" in refused(*with_binary(("x", "BYTES", [OBJECTS_MAX], b"\0\0\0\0")))


def test_bools_are_0_and_1() -> None:
    assert only(*with_binary(("x", "BOOL", [2], b"\x00\x01"))).data == b"\x00\x01"
    assert "element 1 is 2, which is no BOOL" in refused(*with_binary(("x", "BOOL", [3], b"\x01\x02\x03")))


def test_data_is_there_once() -> None:
    both = {**tensor([1], "INT8"), "parameters": {"binary_data_size": 1}}
    header = written(both)
    assert "has both" in refused(header + b"a", str(len(header)).encode())
    neither = {"name": "x", "datatype": "INT8", "shape": [1]}
    assert "has neither" in refused(written(neither))
    assert "shared memory" in refused(written({**neither, "parameters": {"shared_memory_region": "r"}}))
    assert "data must be a list, and is null" in refused(written({**neither, "data": None}))


@pytest.mark.parametrize("size", [-1, 2, "1", 1.0, True, 10**300])
def test_a_size_that_is_none(size: Any) -> None:
    header = written(
        {"name": "x", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": size}}
    )
    assert "binary_data_size" in refused(header + b"a", str(len(header)).encode())


def test_more_binary_data_than_is_left() -> None:
    body, length = with_binary(("x", "INT8", [2], b"ab"), ("y", "INT8", [2], b"cd"))
    sentence = refused(body[:-1], length)
    assert (
        sentence == "input 'y': binary_data_size 2 must be a number of bytes, and 1 of binary data are left"
    )


def test_binary_data_without_an_input() -> None:
    header = written(tensor([1], "INT8"))
    assert "3 bytes of binary data are left" in refused(header + b"abc", str(len(header)).encode())
