"""Messages of gRPC -> requests of tensors, and results -> messages."""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.requests import InferRequest
from carpool_gateway.oip.responses import OutputTensor
from carpool_gateway.rpc import requests as module
from carpool_gateway.rpc.messages import CONTENTS, INFERENCE
from carpool_gateway.rpc.requests import MessagePreparer, decode_request, split
from carpool_gateway.rpc.responses import encode_response, error_on_stream, of_stream, with_id
from support.oip import bodies_of, identity, offered, packed

Request: Final = INFERENCE["ModelInferRequest"]
Response: Final = INFERENCE["ModelInferResponse"]


def message(*inputs: tuple[str, str, list[int], Any], **fields: Any) -> Any:
    """A request; an input whose data is bytes has them in raw_input_contents."""
    request = Request(model_name="m", **fields)
    for name, datatype, shape, data in inputs:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if isinstance(data, bytes):
            request.raw_input_contents.append(data)
        else:
            getattr(tensor.contents, CONTENTS[datatype]).extend(data)
    return request


def decoded(request: Any) -> InferRequest:
    return decode_request(split(request.SerializeToString()))[0]


def test_other_descriptions_of_these_messages_may_be_in_the_process() -> None:
    """As tritonclient has them, in the pool that all share."""
    file = descriptor_pb2.FileDescriptorProto.FromString(INFERENCE.file.SerializeToString())
    file.name = "grpc_service.proto"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelInferRequest"))
    sent = theirs(model_name="m", id="7").SerializeToString()
    assert (theirs is not Request, Request.FromString(sent).id) == (True, "7")


# --- telling fields apart ----------------------------------------------------------------------------------

FIELDS: Final = st.fixed_dictionaries(
    {
        "model_name": st.text(max_size=200),
        "model_version": st.text(max_size=3),
        "id": st.text(max_size=5),
        "raw_input_contents": st.lists(st.binary(max_size=300), max_size=3),
        "inputs": st.lists(
            st.builds(
                INFERENCE["ModelInferRequest.InferInputTensor"],
                name=st.text(max_size=3),
                shape=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
            ),
            max_size=2,
        ),
    }
)


@given(FIELDS, st.permutations(range(5)), st.binary(max_size=3))
def test_fields_are_those_of_protobuf_in_any_order(
    fields: dict[str, Any], order: list[int], unknown: bytes
) -> None:
    names = list(fields)
    parts = [Request(**{names[at]: fields[names[at]]}).SerializeToString() for at in order]
    parts.insert(len(unknown), b"\x98\x06\x07\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4))  # 99: varint, ...
    found = split(b"".join(parts))
    assert (found.model_name, found.model_version) == (fields["model_name"], fields["model_version"])
    assert found.id.decode() == fields["id"]
    assert [bytes(raw) for raw in found.raw] == fields["raw_input_contents"]
    rest = Request.FromString(found.rest)
    assert list(rest.inputs) == fields["inputs"]
    assert not (rest.id or rest.raw_input_contents)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        decode_request(split(data))
    except ProtocolError as error:
        assert error.detail


def test_a_message_that_ends_within_a_field_is_refused() -> None:
    data = message(("x", "FP32", [1, 300], bytes(1200)), id="an ID").SerializeToString()
    ends = {end for _, _, _, end in module._fields(data)}
    assert len(ends) == 4
    for cut in set(range(1, len(data))) - ends:
        with pytest.raises(ProtocolError, match="ends within a field"):
            split(data[:cut])


@pytest.mark.parametrize("data", [b"\x0a\x01\xff", b"\x0b", b"\x0a" + b"\xff" * 10, b"\x80" * 11])
def test_what_no_client_writes_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the message is no ModelInferRequest"):
        split(data)


# --- inputs ------------------------------------------------------------------------------------------------

NUMBERS: Final[dict[str, tuple[str, list[Any]]]] = {
    "BOOL": ("?", [True, False]),
    "INT8": ("b", [-128, 127]),
    "INT16": ("h", [-32768, 32767]),
    "INT32": ("i", [-(1 << 31), (1 << 31) - 1]),
    "INT64": ("q", [-(1 << 63), (1 << 63) - 1]),
    "UINT8": ("B", [0, 255]),
    "UINT16": ("H", [0, 65535]),
    "UINT32": ("I", [0, (1 << 32) - 1]),
    "UINT64": ("Q", [0, (1 << 64) - 1]),
    "FP32": ("f", [-0.0, float("inf")]),
    "FP64": ("d", [1e-320, 1e308]),
}


def packed_numbers(datatype: str) -> tuple[bytes, list[Any]]:
    """Two numbers of a datatype as raw data, and in a list."""
    kind, values = NUMBERS[datatype]
    return struct.pack(f"<2{kind}", *values), values


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_are_the_same_raw_and_in_contents(datatype: str) -> None:
    data, values = packed_numbers(datatype)
    raw = decoded(message(("x", datatype, [1, 2], data)))
    typed = decoded(message(("x", datatype, [1, 2], values)))
    assert bytes(raw.inputs[0].data) == bytes(typed.inputs[0].data) == data  # type: ignore[arg-type]
    assert raw.binary_output


def test_bytes_are_the_same_raw_and_in_contents() -> None:
    elements = [b"\xff\0", b"", "\u4e2d".encode()]
    data = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    raw, typed = (decoded(message(("x", "BYTES", [3, 1], given))) for given in (data, elements))
    assert raw.inputs[0].data == typed.inputs[0].data == elements


@pytest.mark.parametrize(
    ("datatype", "values", "why"),
    [
        ("INT8", [1, 128], "'x': element 1 is 128, which is no INT8"),
        ("UINT8", [256, 0], "'x': element 0 is 256, which is no UINT8"),
        ("INT16", [0, -32769], "element 1 is -32769"),
        ("INT32", [1], "'x': data has 1 elements, but its shape has 2"),
        ("BYTES", [b"a"], "'x': has 1 elements of BYTES, but its shape has 2"),
        ("FP32", [], "data has 0 elements"),
    ],
)
def test_contents_that_do_not_fit_are_refused_by_name(datatype: str, values: list[Any], why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decoded(message(("x", datatype, [1, 2], values)))
    assert why in caught.value.detail


def test_contents_of_another_datatype_are_refused() -> None:
    request = message(("x", "FP32", [1, 1], [1.5]))
    request.inputs[0].datatype = "INT64"
    with pytest.raises(ProtocolError, match="INT64 is in int64_contents, but the request has fp32_contents"):
        decoded(request)
    request.inputs[0].datatype = "FP16"
    with pytest.raises(ProtocolError, match="FP16 has no contents: send it in raw_input_contents"):
        decoded(request)


def test_raw_data_is_for_all_inputs_or_for_none() -> None:
    data = bytes(4)
    with pytest.raises(ProtocolError, match="there are 1, but 2 inputs"):
        decoded(message(("x", "FP32", [1, 1], data), ("y", "FP32", [1, 1], [1.0])))
    both = message(("x", "FP32", [1, 1], [1.0]))
    both.raw_input_contents.append(data)
    with pytest.raises(ProtocolError, match="'x': has contents, and the request has raw_input_contents"):
        decoded(both)
    with pytest.raises(ProtocolError, match="has 4 bytes of binary data, but its shape takes 8"):
        decoded(message(("x", "FP32", [1, 2], data)))


def test_too_many_elements_in_contents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OBJECTS_MAX", 3)
    with pytest.raises(TooLargeError, match="send raw_input_contents"):
        decoded(message(("x", "FP32", [1, 2], [1.0, 2.0]), ("y", "INT8", [1, 2], [1, 2])))


# --- parameters --------------------------------------------------------------------------------------------


def test_parameters_mean_what_they_mean_over_http() -> None:
    request = message(("x", "FP32", [1, 1], bytes(4)))
    for name, which, value in (
        ("priority", "uint64_param", 1),
        ("timeout", "int64_param", 2_000_000),
        ("sequence_id", "int64_param", -1),
        ("sequence_start", "bool_param", True),
        ("text", "string_param", "t"),
        ("real", "double_param", 0.5),
        ("large", "uint64_param", (1 << 64) - 1),
        ("triton_enable_empty_final_response", "bool_param", True),
    ):
        setattr(request.parameters[name], which, value)
    found, wants_final = decode_request(split(request.SerializeToString()))
    assert (found.priority, found.timeout_us, found.sequence_id) == (9, 2_000_000, str((1 << 64) - 1))
    assert (found.sequence_start, found.sequence_end, wants_final) == (True, False, True)
    assert found.parameters == {"text": "t", "real": 0.5, "large": (1 << 64) - 1}


@pytest.mark.parametrize(
    ("name", "which", "value"),
    [
        ("priority", "string_param", "a"),
        ("triton_final_response", "bool_param", True),
        ("triton_enable_empty_final_response", "int64_param", 1),
        ("sequence_start", "bool_param", True),
        ("empty", "", None),
    ],
)
def test_parameters_that_mean_nothing_are_refused_by_name(name: str, which: str, value: Any) -> None:
    request = message(("x", "FP32", [1, 1], bytes(4)))
    parameter = request.parameters[name]
    if which:
        setattr(parameter, which, value)
    with pytest.raises(ProtocolError, match=name):
        decoded(request)


def test_shared_memory_is_refused() -> None:
    request = message(("x", "FP32", [1, 1], []))
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(ProtocolError, match="shared memory is not offered"):
        decoded(request)


# --- outputs -----------------------------------------------------------------------------------------------


def test_outputs_are_raw_unless_all_are_wanted_in_contents() -> None:
    request = message(("x", "FP32", [1, 1], bytes(4)))
    request.outputs.add(name="x").parameters["classification"].int64_param = 2
    request.outputs.add(name="y")
    found = decoded(request).outputs
    assert found is not None
    assert [(output.binary, output.classes) for output in found] == [(True, 2), (True, 0)]
    request.outputs[0].parameters["binary_data"].bool_param = False
    with pytest.raises(ProtocolError, match="all of them in raw_output_contents, or all in contents"):
        decoded(request)
    request.parameters["binary_data_output"].bool_param = False
    found = decoded(request).outputs
    assert found is not None
    assert not any(output.binary for output in found)


@pytest.mark.parametrize("datatype", [*NUMBERS, "BYTES"])
@pytest.mark.parametrize("binary", [True, False])
def test_a_response_has_the_elements(datatype: str, binary: bool) -> None:
    if datatype == "BYTES":
        values: list[Any] = [b"\xff", b""]
        data: Any = values
        raw = b"\1\0\0\0\xff\0\0\0\0"
    else:
        raw, values = packed_numbers(datatype)
        data = raw
    response = encode_response("m", "", [OutputTensor("y", datatype, (1, 2), data, binary)] * 2, "3")
    found = Response.FromString(with_id(response, b"an ID"))
    assert (found.model_name, found.model_version, found.id) == ("m", "3", "an ID")
    assert [list(output.shape) for output in found.outputs] == [[1, 2], [1, 2]]
    if binary:
        assert list(found.raw_output_contents) == [raw, raw]
    else:
        assert not found.raw_output_contents
        assert list(getattr(found.outputs[1].contents, CONTENTS[datatype])) == values


def test_fp16_has_no_contents() -> None:
    with pytest.raises(ProtocolError, match="FP16 has no contents"):
        encode_response("m", "", [OutputTensor("y", "FP16", (1, 1), bytes(2), False)], "1")


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_messages_on_a_stream(size: int) -> None:
    response = with_id(
        encode_response("m", "", [OutputTensor("y", "UINT8", (1, size), bytes(size), True)], "1"), b"7"
    )
    for is_final in (True, False):
        found = INFERENCE["ModelStreamInferResponse"].FromString(of_stream(response, is_final=is_final))
        assert found.infer_response.raw_output_contents[0] == bytes(size)
        assert found.infer_response.parameters["triton_final_response"].bool_param is is_final
    error = INFERENCE["ModelStreamInferResponse"].FromString(error_on_stream("no", b"7"))
    assert (error.error_message, error.infer_response.id) == ("no", "7")


# --- prepared once -----------------------------------------------------------------------------------------


def test_requests_that_differ_in_numbers_and_id_alone_are_prepared_once() -> None:
    model, preparer = identity("FP32", (2,)), MessagePreparer()
    prepared = []
    for at in range(3):
        numbers = np.array([at, 0.5], np.float32)
        request = split(message(("x", "FP32", [1, 2], numbers.tobytes()), id=str(at)).SerializeToString())
        one, bodies = preparer.prepare(model, request)
        assert bodies[0].endswith(numbers.tobytes())
        response = Response.FromString(with_id(one.respond([packed(numbers)]), request.id))
        assert (response.id, response.raw_output_contents[0]) == (str(at), numbers.tobytes())
        prepared.append(one)
    assert prepared[0] is prepared[1] is prepared[2]
    longer = split(message(("x", "FP32", [2, 2], bytes(16))).SerializeToString())
    assert preparer.prepare(model, longer)[0] is not prepared[0]
    other = identity("FP32", (2,))
    assert preparer.prepare(other, request)[0] is not prepared[0], "the model was replaced"


def test_several_inputs_become_rows() -> None:
    model = offered([TensorSpec("a", "INT8", (1,)), TensorSpec("b", "BYTES", (1,))])
    request = message(("b", "BYTES", [2, 1], [b"x", b"y"]), ("a", "INT8", [2, 1], [1, 2]))
    prepared, _ = MessagePreparer().prepare(model, split(request.SerializeToString()))
    assert len(bodies_of(prepared.plan)) == 2
