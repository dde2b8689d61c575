"""Requests of the Open Inference Protocol, executed by models as in a worker, but without Redis."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from carpool import InvalidArgumentError, TensorSpec
from carpool.errors import CarpoolError
from carpool.messages.batches import BatchedRun
from carpool.rows import Rows
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import plan
from carpool_gateway.oip.requests import decode_request
from carpool_gateway.oip.responses import Response, RowResult, encode_response, join_results
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.model import LoadedModel, adapt
from support.executions import NOW_US, codec_of, prepared
from support.oip import binary_part, bodies_of, document, offered, tensor, with_binary, written


def served(model: Any, body: bytes, header_length: bytes | None = None) -> Response:
    """The response of a model."""
    loaded = adapt(model, "cpu")
    assert isinstance(loaded, LoadedModel)
    description: OfferedModel = offered(loaded.inputs, loaded.outputs)
    request = decode_request(body, header_length)
    planned = plan(description, request)
    extra = {"accept": planned.accept.encode()} if planned.accept else None
    executed = DryRun(loaded).execute(bodies_of(planned), planned.content_type, extra)
    results = [
        RowResult(result.status, result.content_type, result.body or b"", result.detail or "")
        for result in executed.results
    ]
    return encode_response("m", request.id, join_results(description, planned, results))


class Sums:
    """`simple` of Triton: the sum and the difference of two inputs."""

    inputs: ClassVar = [TensorSpec("INPUT0", "INT32", (16,)), TensorSpec("INPUT1", "INT32", (16,))]
    outputs: ClassVar = [TensorSpec("OUTPUT0", "INT32", (16,)), TensorSpec("OUTPUT1", "INT32", (16,))]

    def predict(self, batch: Any) -> Any:
        a, b = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}


class Identity:
    """A model x -> x."""

    def __init__(self, datatype: str, shape: Sequence[int] = (-1,)) -> None:
        self.inputs = self.outputs = [TensorSpec("x", datatype, tuple(shape))]

    def predict(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("rows", [1, 3])
def test_several_tensors(rows: int) -> None:
    a, b = list(range(16 * rows)), [1] * 16 * rows
    body = written(
        tensor(a, "INT32", [rows, 16], "INPUT0"),
        tensor(b, "INT32", [rows, 16], "INPUT1"),
        outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    )
    response = served(Sums(), body)
    first, second = document(response)["outputs"]
    assert (first["name"], first["data"]) == ("OUTPUT1", [number - 1 for number in a])
    assert second["shape"] == [rows, 16]
    assert np.frombuffer(binary_part(response), "<i4").tolist() == [number + 1 for number in a]


@pytest.mark.parametrize(
    "datatype", ["BOOL", "UINT8", "UINT64", "INT16", "INT64", "FP16", "BF16", "FP32", "FP64"]
)
@pytest.mark.parametrize(("rows", "shape"), [(1, [3]), (4, [2, 2]), (2, []), (2, [0])])
def test_every_datatype(datatype: str, rows: int, shape: list[int]) -> None:
    model = Identity(datatype, [-1] * len(shape))
    width = {"BOOL": 1, "UINT8": 1, "INT16": 2, "FP16": 2, "BF16": 2, "FP32": 4}.get(datatype, 8)
    data = bytes([0, 1] * 64)[: rows * int(np.prod(shape, dtype=int)) * width]
    body, length = with_binary(("x", datatype, [rows, *shape], data), parameters={"binary_data_output": True})
    response = served(model, body, length)
    assert binary_part(response) == data
    assert document(response)["outputs"][0]["shape"] == [rows, *shape]


@pytest.mark.parametrize("shape", [[2, 2], [4]])
def test_texts(shape: list[int]) -> None:
    texts = ["a", "é", "", "\x00\n"]
    response = served(Identity("BYTES", shape[1:]), written(tensor(texts, "BYTES", shape)))
    assert document(response)["outputs"] == [tensor(texts, "BYTES", shape)]


@pytest.mark.parametrize("size", [3, 1])
def test_bytes(size: int) -> None:
    """Given elements of any bytes, also empty ones and texts, expect a model to get bytes objects."""
    elements = [bytes(range(256)), b"", b"a\0"][:size]
    seen: list[Any] = []

    class Seeing(Identity):
        def predict(self, batch: Any) -> Any:
            seen.append(batch.tolist())
            return batch

    data = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    body, length = with_binary(("x", "BYTES", [1, size], data), parameters={"binary_data_output": True})
    assert binary_part(served(Seeing("BYTES"), body, length)) == data
    assert binary_part(served(Seeing("BYTES", (1,)), elements[0], b"0")) == data[: 4 + len(elements[0])]
    assert seen == [[elements], [elements[:1]]]


def test_rows_reach_a_model_process_as_they_came() -> None:
    spec = TensorSpec("x", "FP32", (2,))
    body, length = with_binary(("x", "FP32", [3, 2], bytes(range(24))))
    planned = plan(offered([spec], [spec]), decode_request(body, length))
    assert isinstance(planned.bodies, Rows)
    run = BatchedRun("1-0", ["a", "b", "c"], planned.bodies, planned.content_type, None, NOW_US, None, None)
    (frame,) = prepared(codec_of(spec), run).frames
    (payload,) = frame.payload
    assert payload is planned.bodies.data


def test_classes_of_what_a_model_returns() -> None:
    wanted = [{"name": "x", "parameters": {"classification": 2}}]
    response = served(Identity("FP32"), written(tensor([0.1, 0.7, 0.2]), outputs=wanted))
    assert document(response)["outputs"][0]["data"] == ["0.700000:1", "0.200000:2"]


def kind(bodies: list[Any]) -> list[Any]:
    """What each body is."""
    return [f"{type(body).__name__} {len(body)}" for body in bodies]


def test_a_model_without_tensors() -> None:
    picture = b"\xff\xd8\xff"
    body, length = with_binary(("body", "BYTES", [2, 1], struct.pack("<I3sI1s", 3, picture, 1, b"a")))
    assert document(served(kind, body, length))["outputs"] == [
        tensor(["bytes 3", "bytes 1"], "BYTES", [2, 1], "result")
    ]
    of_json = tensor(
        ["[1, 2]", '"abc"'], "BYTES", [2], "body", parameters={"content_type": "application/json"}
    )
    assert document(served(kind, written(of_json)))["outputs"][0]["data"] == ["list 2", "str 3"]
    response = served(lambda bodies: [1.5, {"a": [None]}], body, length)
    assert document(response)["outputs"][0]["data"] == ["1.5", '{"a":[null]}']


def test_bytes_of_a_model_without_tensors_are_binary_data() -> None:
    body, length = with_binary(
        ("body", "BYTES", [1, 1], b"\x02\0\0\0\xff\xd8"), parameters={"binary_data_output": True}
    )
    assert binary_part(served(lambda bodies: bodies, body, length)) == b"\x02\0\0\0\xff\xd8"


def test_a_raw_request() -> None:
    response = served(Identity("FP32", (2,)), b"\0\0\x80\x3f\0\0\0\x40", b"0")
    assert binary_part(response) == b"\0\0\x80\x3f\0\0\0\x40"
    assert document(response)["outputs"][0]["shape"] == [1, 2]


def test_outputs_of_a_model_that_declares_no_inputs() -> None:
    class Lengths:
        outputs: ClassVar = [TensorSpec("n", "INT64", ()), TensorSpec("t", "BYTES", (1,))]

        def predict(self, batch: Any) -> Any:
            return {"n": [len(body) for body in batch], "t": [["é"] for _ in batch]}

    response = served(Lengths(), written(tensor(["ab", "c"], "BYTES", [2, 1], "body")))
    assert document(response)["outputs"] == [
        tensor([2, 1], "INT64", [2], "n"),
        tensor(["é", "é"], "BYTES", [2, 1], "t"),
    ]


@pytest.mark.parametrize(
    ("datatype", "returned"),
    [("FP32", [0.5, 2]), ("INT8", [1, 2]), ("BOOL", [True, False]), ("BYTES", ["a", "b"])],
)
def test_plain_values_of_outputs_without_dimensions(datatype: str, returned: list[Any]) -> None:
    class Plain(Identity):
        def predict(self, batch: Any) -> Any:
            return returned

    body = written(tensor(returned, datatype, [2]))
    (output,) = document(served(Plain(datatype, ()), body))["outputs"]
    assert output == tensor(returned, datatype, [2])


def test_inputs_of_a_model_that_declares_no_outputs() -> None:
    class Shapes:
        inputs: ClassVar = [TensorSpec("x", "INT8", (-1,))]

        def predict(self, batch: Any) -> Any:
            return [row.tolist() if len(row) > 1 else "alone" for row in batch]

    assert document(served(Shapes(), written(tensor([1, 2, 3, 4], "INT8", [2, 2]))))["outputs"] == [
        tensor(["[1,2]", "[3,4]"], "BYTES", [2, 1], "result")
    ]
    assert document(served(Shapes(), written(tensor([1], "INT8"))))["outputs"][0]["data"] == ["alone"]

    class Rows(Shapes):
        def predict(self, batch: Any) -> Any:
            return batch

    (text,) = document(served(Rows(), written(tensor([1, 2], "INT8"))))["outputs"][0]["data"]
    assert text == '{"datatype":"INT8","shape":[2],"data":[1,2]}'


def test_a_row_that_the_model_refuses() -> None:
    class Careful(Identity):
        def validate(self, body: Any) -> None:
            if body[0] > 1:
                raise InvalidArgumentError("too large")

    with pytest.raises(CarpoolError, match=r"^INVALID_ARGUMENT: row 1: .*too large"):
        served(Careful("INT8"), written(tensor([1, 2], "INT8", [2, 1])))
