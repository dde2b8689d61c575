"""The documents of the Open Inference Protocol beside responses to infer requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.errors import NotFoundError
from carpool.model_settings import ModelKind
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip import documents
from carpool_gateway.oip.documents import BatchFigures, Duration, IndexEntry, ModelFigures
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from support.oip import offered

SIMPLE = offered(
    [TensorSpec("INPUT0", "INT32", (16,)), TensorSpec("INPUT1", "BYTES", (-1,))],
    [TensorSpec("OUTPUT0", "FP16", ())],
    max_batch_size="8",
    max_queue_delay_ms="1.5",
    preferred_batch_sizes="4,8",
)


def parsed(document: bytes) -> Any:
    return json.loads(document)


def test_health_has_the_names_of_all_clients() -> None:
    assert parsed(documents.health(live=True, ready=True)) == {"live": True, "ready": True}
    assert parsed(documents.health(live=True, ready=False)) == {"live": True, "ready": False}


def test_server_metadata() -> None:
    found = parsed(documents.server_metadata("triton", "0.1.0"))
    assert (found["name"], found["version"]) == ("triton", "0.1.0")
    assert {"binary_tensor_data", "schedule_policy", "sequence(string_id)"} <= set(found["extensions"])
    assert not {"statistics", "model_repository"} & set(found["extensions"])  # no routes serve these


def test_shapes_of_model_metadata_have_the_batch_first() -> None:
    assert parsed(documents.model_metadata(SIMPLE)) == {
        "name": "m",
        "versions": ["1"],
        "platform": "carpool",
        "inputs": [
            {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]},
            {"name": "INPUT1", "datatype": "BYTES", "shape": [-1, -1]},
        ],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP16", "shape": [-1]}],
    }


def test_a_model_without_tensors_has_a_body_and_a_result() -> None:
    found = parsed(documents.model_metadata(offered()))
    assert found["inputs"] == [{"name": "body", "datatype": "BYTES", "shape": [-1, 1]}]
    assert found["outputs"] == [{"name": "result", "datatype": "BYTES", "shape": [-1, 1]}]
    found = parsed(documents.model_metadata(offered([TensorSpec("body", "INT8", (2,))])))
    assert found["inputs"] == [{"name": "body", "datatype": "INT8", "shape": [-1, 2]}]
    assert found["outputs"][0]["name"] == "result"


def test_the_configuration_of_a_model() -> None:
    found = parsed(documents.model_config(SIMPLE))
    assert found["max_batch_size"] == 8
    assert found["input"] == [
        {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]},
        {"name": "INPUT1", "data_type": "TYPE_STRING", "dims": [-1]},
    ]
    assert found["output"] == [{"name": "OUTPUT0", "data_type": "TYPE_FP16", "dims": []}]
    assert found["dynamic_batching"] == {
        "preferred_batch_size": [4, 8],
        "max_queue_delay_microseconds": 1500,
        "preserve_ordering": False,
        "priority_levels": 10,
        "default_priority_level": 6,
    }
    assert found["model_transaction_policy"] == {"decoupled": False}
    assert found["version_policy"] == {"latest": {"num_versions": 1}}


def test_the_configuration_of_other_kinds_of_models() -> None:
    for kind in (ModelKind.STATEFUL, ModelKind.BOUND):
        found = parsed(documents.model_config(offered(kind=kind, max_sequence_idle_ms="5s")))
        assert found["sequence_batching"] == {"max_sequence_idle_microseconds": 5_000_000}
        assert "dynamic_batching" not in found
    found = parsed(documents.model_config(offered(kind=ModelKind.STEPPING)))
    assert found["model_transaction_policy"] == {"decoupled": True}


def test_overrides_of_an_operator_count() -> None:
    model = OfferedModel.of("m", {"max_batch_size": "8"}, {"max_batch_size": "4"})
    assert parsed(documents.model_config(model))["max_batch_size"] == 4


def test_registered_tensors_that_cannot_be_read() -> None:
    for name in ("inputs", "outputs"):
        with pytest.raises(ValueError, match=f"registered {name}"):
            OfferedModel.of("m", {name: "[1]"})


def test_statistics() -> None:
    compute = Duration(3, 900)
    figures = ModelFigures(
        1_700_000_000_000, 10, 3, Duration(10, 5000), Duration(1, 7), Duration(10, 400), compute,
        [BatchFigures(4, Duration(2, 600))],
    )  # fmt: skip
    (found,) = parsed(documents.model_statistics({"m": figures}))["model_stats"]
    assert (found["name"], found["version"], found["last_inference"]) == ("m", "1", 1_700_000_000_000)
    assert (found["inference_count"], found["execution_count"]) == (10, 3)
    stats = found["inference_stats"]
    assert stats["success"] == {"count": 10, "ns": 5000}
    assert stats["compute_infer"] == {"count": 3, "ns": 900}
    assert stats["compute_input"]["ns"] == stats["compute_output"]["ns"] == 0
    assert {stats[name]["count"] for name in ("compute_input", "compute_infer", "compute_output")} == {3}
    assert found["batch_stats"] == [
        {
            "batch_size": 4,
            "compute_input": {"count": 2, "ns": 0},
            "compute_infer": {"count": 2, "ns": 600},
            "compute_output": {"count": 2, "ns": 0},
        }
    ]
    assert parsed(documents.model_statistics({})) == {"model_stats": []}


def test_the_index_is_a_list() -> None:
    entries = [IndexEntry("a", documents.READY), IndexEntry("b", documents.LOADING, "a worker loads it")]
    a = {"name": "a", "version": "1", "state": "READY", "reason": ""}
    b = {"name": "b", "version": "1", "state": "LOADING", "reason": "a worker loads it"}
    assert parsed(documents.repository_index(entries)) == [a, b]
    assert parsed(documents.repository_index(entries, ready_only=True)) == [a]
    assert parsed(documents.repository_index([])) == []


@pytest.mark.parametrize(
    ("body", "ready"),
    [
        (b"", False),
        (b" \n", False),
        (b"{}", False),
        (b'{"ready":true}', True),
        (b'{"ready":false,"x":1}', False),
    ],
)
def test_requests_for_the_index(body: bytes, ready: bool) -> None:
    assert documents.decode_index_request(body) is ready


@pytest.mark.parametrize(
    "body",
    [b"[]", b'{"ready":1}', b"{", b'{"ready":' + b"[" * 250_000, b'{"ready":true,"ready":true}', b"\xff"],
)
def test_requests_for_the_index_that_are_none(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        documents.decode_index_request(body)


def test_parameters_of_a_load() -> None:
    assert documents.decode_parameters(b"") == documents.decode_parameters(b'{"parameters":{}}') == {}
    given = {"config": "{}", "unload_dependents": True, "file:1/model.onnx": "YQ=="}
    assert documents.decode_parameters(json.dumps({"parameters": given}).encode()) == given
    for body in (b'{"parameters":[]}', b'{"parameters":{"a":null}}', b'{"parameters":{"a":{}}}', b"7"):
        with pytest.raises(ProtocolError):
            documents.decode_parameters(body)


def test_errors() -> None:
    assert parsed(documents.error_document('a "b"')) == {"error": 'a "b"'}
    assert parsed(documents.error_document("\ud800")) == {"error": "?"}
    assert documents.unknown_model("NONE").detail == "Request for unknown model: 'NONE' is not found"
    documents.check_version("m", "1")
    with pytest.raises(NotFoundError, match="version 2 is not found"):
        documents.check_version("m", "2")
    assert parsed(documents.model_ready("m")) == {"name": "m", "ready": True}
