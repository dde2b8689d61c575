"""The documents of the Open Inference Protocol beside responses to infer requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.errors import NotFoundError
from carpool.model_settings import ModelKind
from carpool.wire.statistics import BatchStatistics, Durations, ModelStatistics
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip import documents
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
    found = parsed(documents.server_metadata("triton", "0.1.0", controls_models=False))
    assert (found["name"], found["version"]) == ("triton", "0.1.0")
    assert {"binary_tensor_data", "schedule_policy", "sequence(string_id)"} <= set(found["extensions"])
    more = parsed(documents.server_metadata("triton", "0.1.0", controls_models=True))["extensions"]
    assert set(more) - set(found["extensions"]) == {
        "model_repository",
        "model_repository(unload_dependents)",
    }


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


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((3, 224, 224), "NCHW"), ((224, 224, 1), "NHWC"), ((5, 5, 5), "NONE"), ((3, 4), "NONE"), ((), "NONE")],
)
def test_inputs_of_images_have_a_format(shape: tuple[int, ...], layout: str) -> None:
    found = parsed(documents.model_config(offered([TensorSpec("x", "FP32", shape)])))
    assert found["input"][0]["format"] == f"FORMAT_{layout}"


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
        {"name": "INPUT0", "data_type": "TYPE_INT32", "format": "FORMAT_NONE", "dims": [16]},
        {"name": "INPUT1", "data_type": "TYPE_STRING", "format": "FORMAT_NONE", "dims": [-1]},
    ]
    assert found["output"] == [
        {"name": "OUTPUT0", "data_type": "TYPE_FP16", "format": "FORMAT_NONE", "dims": []}
    ]
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


def test_errors() -> None:
    assert documents.unknown_model("NONE").detail == "Request for unknown model: 'NONE' is not found"
    unnamed, named = (OfferedModel.of("m", registered) for registered in ({}, {"versions": "1 2"}))
    assert unnamed.of_version("1").asked == "" and unnamed.of_version("").version == "1"
    assert named.of_version("2") is named.of_version("2")
    assert (named.of_version("2").asked, named.of_version("2").version, named.asked) == ("2", "2", "")
    for model, has in ((unnamed, "it has version 1"), (named, "it has versions 1, 2")):
        with pytest.raises(NotFoundError, match=f"version 3 is not found; {has}"):
            model.of_version("3")
    assert parsed(documents.model_ready("m")) == {"name": "m", "ready": True}


def test_statistics_are_in_nanoseconds_and_add_up() -> None:
    batches = [
        BatchStatistics(2, 3, 6, 600, 60, 3, 30, 9, 5_000_999),
        BatchStatistics(256, 2, 300, 3000, 30, 2, 20, 4, 4_000_000),
    ]
    streams = {"first_chunks": Durations(2, 20), "later_chunks": Durations(8, 40)}
    (found,) = parsed(
        documents.model_statistics({"m": ModelStatistics(Durations(1, 7), batches, **streams)})
    )["model_stats"]
    assert (found["name"], found["version"], found["last_inference"]) == ("m", "1", 5000)
    assert (found["inference_count"], found["execution_count"]) == (306, 5)
    assert found["inference_stats"] == {
        "success": {"count": 306, "ns": 3_600_000},
        "fail": {"count": 1, "ns": 7000},
        "queue": {"count": 306, "ns": 90_000},
        "compute_input": {"count": 306, "ns": (6 + 300) * 1000},
        "compute_infer": {"count": 306, "ns": (60 + 3000) * 1000},
        "compute_output": {"count": 306, "ns": (18 + 600) * 1000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    sizes = [(of["batch_size"], of["compute_infer"]) for of in found["batch_stats"]]
    assert sizes == [(2, {"count": 3, "ns": 30_000}), (256, {"count": 2, "ns": 20_000})]
    chunks = {index: of["success"] for index, of in found["response_stats"].items()}
    assert chunks == {"0": {"count": 2, "ns": 20_000}, "1": {"count": 8, "ns": 40_000}}


def test_statistics_that_were_never_counted_or_cannot_be_read_are_0() -> None:
    spoiled = {"fail": b"x", "batches:1": b"short", "batches:0": bytes(64), "batches:2": b"\xff" * 64}
    assert ModelStatistics.of({}) == ModelStatistics.of(spoiled) == ModelStatistics(Durations(), [])
    (found,) = parsed(documents.model_statistics({"m": ModelStatistics()}))["model_stats"]
    assert (found["last_inference"], found["batch_stats"], found["response_stats"]) == (0, [], {})
    assert all(of == {"count": 0, "ns": 0} for of in found["inference_stats"].values())
