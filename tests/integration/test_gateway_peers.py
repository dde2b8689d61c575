"""What clients of Triton and KServe expect, with the models of Triton's examples."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from support.http import Answer, Connection, call, request
from support.oip import with_binary
from support.stack import Service, Stack

TWO: Final = 2


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(*(f"triton.py:{name}" for name in ("Sum", "Identity", "Strings", "Labelled", "Starting")))
        yield stack.gateway()


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [1, len(data)], "data": data}


def infer(gateway: Service, model: str, *inputs: dict[str, Any], **more: Any) -> Answer:
    body = json.dumps({"inputs": inputs, **more}).encode()
    return call(gateway.url, "POST", f"/v2/models/{model}/infer", body)


SUMMANDS: Final = (tensor("INPUT0", "INT32", list(range(16))), tensor("INPUT1", "INT32", [1] * 16))


def test_outputs_come_in_the_order_and_form_that_was_asked(gateway: Service) -> None:
    answer = infer(gateway, "Sum", *SUMMANDS, id="7")
    assert answer.json["id"] == "7"
    assert [(of["name"], of["data"]) for of in answer.json["outputs"]] == [
        ("OUTPUT0", list(range(1, 17))),
        ("OUTPUT1", list(range(-1, 15))),
    ]
    wanted = [{"name": "OUTPUT1", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}]
    answer = infer(gateway, "Sum", *SUMMANDS, outputs=wanted)
    size = int(answer.headers["inference-header-content-length"])
    first, second = json.loads(answer.body[:size])["outputs"]
    assert (first["name"], first["parameters"]) == ("OUTPUT1", {"binary_data_size": 64})
    assert (second["name"], second["data"], "parameters" in second) == ("OUTPUT0", list(range(1, 17)), False)
    assert np.frombuffer(answer.body[size:], "<i4").tolist() == list(range(-1, 15))
    classes = [{"name": "OUTPUT0", "parameters": {"classification": TWO}}]
    (output,) = infer(gateway, "Sum", *SUMMANDS, outputs=classes).json["outputs"]
    assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [1, TWO], ["16:15", "15:14"])
    twice = infer(gateway, "Sum", *SUMMANDS, outputs=[{"name": "OUTPUT0"}] * TWO)
    assert "output 'OUTPUT0' already exists in request" in twice.json["error"]


def test_raw_requests(gateway: Service) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    answer = call(gateway.url, "POST", "/v2/models/Identity/infer", data, Inference_Header_Content_Length="0")
    size = int(answer.headers["inference-header-content-length"])
    assert answer.body[size:] == data
    for model in ("Sum", "Strings"):  # two inputs; any number of texts
        path = f"/v2/models/{model}/infer"
        assert call(gateway.url, "POST", path, data, Inference_Header_Content_Length="0").code == 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-0.0", "1e-45"])
def test_every_float_comes_back(gateway: Service, value: str) -> None:
    answer = infer(gateway, "Identity", tensor("INPUT0", "FP32", [float(value), 1]))
    (output,) = answer.json["outputs"]
    assert np.float32(output["data"][0]).tobytes() == np.float32(value).tobytes()


@pytest.mark.parametrize("data", [[1e39], [1e400], ["1"], [True], [None], [[1], {}]])
def test_what_is_no_fp32_is_refused_by_name(gateway: Service, data: list[Any]) -> None:
    text = json.dumps({"inputs": [tensor("INPUT0", "FP32", data)]}).replace("Infinity", "1e400")
    answer = call(gateway.url, "POST", "/v2/models/Identity/infer", text.encode())
    assert (answer.code, answer.headers["content-type"]) == (400, "application/json")
    assert "1e400" in answer.json["error"] or "'INPUT0'" in answer.json["error"]


def test_tensors_without_elements_and_texts(gateway: Service) -> None:
    (output,) = infer(gateway, "Identity", tensor("INPUT0", "FP32", [], [8, 0])).json["outputs"]
    assert (output["shape"], output["data"]) == ([8, 0], [])
    texts = ["", "a\0b", "\u4e2d\U0001f600"]
    output, types = infer(gateway, "Strings", tensor("INPUT0", "BYTES", texts)).json["outputs"]
    assert (output["data"], types["data"]) == (texts, ["bytes"])


def test_bytes_are_any_bytes(gateway: Service) -> None:
    """As tritonclient writes arrays of bytes objects: each with its length before it, little-endian."""
    rows = [[bytes(range(256)), b""], [b"\xff\xd8 a picture", b"text"]]
    data = b"".join(struct.pack("<I", len(element)) + element for row in rows for element in row)
    body, length = with_binary(
        ("INPUT0", "BYTES", [2, 2], data),
        outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "types"}],
    )
    path = "/v2/models/Strings/infer"
    answer = call(gateway.url, "POST", path, body, Inference_Header_Content_Length=length.decode())
    size = int(answer.headers["inference-header-content-length"])
    assert (answer.code, answer.body[size:]) == (200, data)
    assert json.loads(answer.body[:size])["outputs"][1]["data"] == ["bytes", "bytes"]
    in_json = infer(gateway, "Strings", tensor("INPUT0", "BYTES", ["a"]), outputs=[{"name": "OUTPUT0"}])
    assert in_json.json["outputs"][0]["data"] == ["a"]
    body, length = with_binary(("INPUT0", "BYTES", [1, 1], b"\1\0\0\0\xff"))
    answer = call(gateway.url, "POST", path, body, Inference_Header_Content_Length=length.decode())
    assert (answer.code, "binary_data" in answer.json["error"]) == (400, True)


def test_classes_have_labels(gateway: Service) -> None:
    wanted = [{"name": "scores", "parameters": {"classification": TWO}}]
    (output,) = infer(gateway, "Labelled", tensor("scores", "FP32", [0.5, 3, 1]), outputs=wanted).json[
        "outputs"
    ]
    assert output["data"] == ["3.000000:1:dog", "1.000000:2:bird"]


@pytest.mark.parametrize("sequence_id", [1001, "a-text"])
def test_sequences(gateway: Service, sequence_id: Any) -> None:
    answers = []
    for at, number in enumerate((10, 20, 30)):
        parameters = {"sequence_id": sequence_id, "sequence_start": at == 0, "sequence_end": at == TWO}
        answer = infer(gateway, "Starting", tensor("INPUT", "INT32", [number]), parameters=parameters)
        answers += answer.json["outputs"][0]["data"]
    assert answers == [11, 20, 30]


def test_a_half_closed_client_gets_its_result(gateway: Service) -> None:
    with Connection(gateway.url) as connection:
        body = json.dumps({"inputs": SUMMANDS}).encode()
        connection.send(request("POST", "/v2/models/Sum/infer", body))
        connection.socket.shutdown(socket.SHUT_WR)
        answer = connection.answer()
        assert (answer if answer.code != 100 else connection.answer()).code == 200
