"""Registrations: settings and declared tensors come back as a worker registered them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.registration import (
    FIELDS,
    combined,
    decode_inputs,
    decode_outputs,
    describe_differing,
    differing,
    encode_registration,
    versions_of,
)
from carpool.wire.tensors import DATATYPES, TensorSpec

KINDS = ("stepping", "stateful", "bound")

specs = st.builds(
    TensorSpec,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(sorted(DATATYPES)),
    st.lists(st.integers(-1, 1 << 40), max_size=4).map(tuple),
)


@pytest.mark.parametrize("kind", ModelKind)
def test_the_kind_of_a_model_is_registered(kind: ModelKind) -> None:
    assert ModelKind.of(encode_registration({}, [], [], kind)) is kind


@settings(deadline=None)
@given(st.lists(specs, max_size=3), st.lists(specs, max_size=3), st.integers(1, 1000))
def test_registration_is_decoded_as_it_was_encoded(
    inputs: list[TensorSpec], outputs: list[TensorSpec], size: int
) -> None:
    model = ModelSettings(max_batch_size=size, tenant_weights={"gold": 4})
    registration = encode_registration(model.as_text(), inputs, outputs)
    assert all(type(text) is str for text in registration.values())
    assert decode_inputs(registration) == inputs
    assert decode_inputs({"inputs": registration.get("outputs", "[]")}) == outputs  # the same format
    assert ModelSettings.from_mapping(registration) == model


def test_tensors_are_registered_as_json_with_the_open_inference_names() -> None:
    inputs, outputs = [TensorSpec("x", "FP32", (2, -1))], [TensorSpec("y", "INT8", ())]
    registration = encode_registration({"max_batch_size": "8"}, inputs, outputs)
    assert registration.keys() == {"max_batch_size", *KINDS, "inputs", "outputs"}
    assert json.loads(registration["inputs"]) == [{"name": "x", "datatype": "FP32", "shape": [2, -1]}]
    assert json.loads(registration["outputs"]) == [{"name": "y", "datatype": "INT8", "shape": []}]


def test_what_a_tensor_declares_beside_its_shape_is_registered() -> None:
    inputs = [TensorSpec("t", "BYTES", (1,), text=True)]
    outputs = [TensorSpec("y", "FP32", (2,), labels=("no", "yes"))]
    registration = encode_registration({}, inputs, outputs)
    assert (decode_inputs(registration), decode_outputs(registration)) == (inputs, outputs)
    assert '"text": true' in registration["inputs"] and '"labels": ["no", "yes"]' in registration["outputs"]


def test_model_without_declared_tensors_has_none() -> None:
    assert encode_registration({}, [], []) == dict.fromkeys(KINDS, "false")
    assert decode_inputs({}) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "null",
        "[7]",
        '["x"]',
        "[{}]",
        '[{"name": "x", "datatype": "FP8", "shape": []}]',
        '[{"name": "x", "datatype": "FP32", "shape": 7}]',
        '[{"name": "x", "datatype": "FP32", "shape": ["a"]}]',
        '[{"name": "x", "datatype": "FP32", "shape": [-2]}]',
        '[{"name": "x", "datatype": ["FP32"], "shape": []}]',
        '[{"name": "x", "datatype": "FP32", "shape": [], "unit": "m"}]',
        '[{"name": "x", "datatype": "FP32", "shape": [], "text": true}]',
        '[{"name": "x", "datatype": "BYTES", "shape": [], "text": 1}]',
        '[{"name": "x", "datatype": "FP32", "shape": [], "labels": "ab"}]',
        '[{"name": "x", "datatype": "FP32", "shape": [], "labels": [1]}]',
        '[{"name": "x", "datatype": "BYTES", "shape": [], "labels": ["a"]}]',
        "[" * 100_000,
    ],
)
def test_malformed_tensors_are_a_value_error_that_names_the_field(text: str) -> None:
    with pytest.raises(ValueError, match=r"^registered inputs are not a list of tensors: "):
        decode_inputs({"inputs": text})


# --- of several workers ------------------------------------------------------------------------------------


def declared(kind: ModelKind = ModelKind.PLAIN, tensor: str = "", **given: Any) -> dict[str, str]:
    tensors = [TensorSpec(tensor, "FP32", (2,))] if tensor else []
    return encode_registration(ModelSettings(**given).as_text(), tensors, [], kind)


def test_one_worker_registers_what_it_declares() -> None:
    own = declared(tensor="x", max_batch_size=4, tenant_weights={"gold": 4})
    assert combined(own, []) == own
    assert combined(own, [], declared(max_batch_size=64)) == own  # of a worker that is gone
    others = {"outputs", "parameters", "settings_from", "version", "versions", "speaks", "understands"}
    assert set(own) | others == set(FIELDS)


def test_version_is_that_of_the_worker_that_registered_last_while_one_has_it() -> None:
    old, new, unnamed = (
        encode_registration({"max_batch_size": "4"}, [], [], version=version) for version in ("1", "2", "")
    )
    assert combined(new, [old])["version"] == combined(old, [new], new)["version"] == "2"
    assert combined(old, [], new)["version"] == "1"  # the other one has gone
    assert "version" not in combined(unnamed, [], new) and "version" not in combined(unnamed, [new])
    assert combined(new, [old, unnamed])["versions"] == "1 2" and "versions" not in combined(unnamed, [])
    assert (differing([old, new]), versions_of([new, old, unnamed, new])) == ({}, {"": 1, "1": 1, "2": 2})


def test_the_worker_that_registered_last_decides_what_has_no_order_while_one_declares_it() -> None:
    old, new = (
        declared(tensor="x", max_batch_size=4),
        declared(tensor="y", max_batch_size=64, policy="deferred"),
    )
    both = new | {"max_batch_size": "4"}
    assert combined(new, [old]) == both
    assert combined(new, [old], both) == both  # at a heartbeat of either
    assert combined(old, [new], both) == both
    assert combined(old, [], both) == old  # once the new one is gone
    assert combined(new, [], both) == new


def test_settings_are_those_of_workers_of_the_registered_kind() -> None:
    """Those of another kind may have no meaning for it."""
    plain = declared(max_batch_size=4, preserve_ordering=True)
    stepping = declared(ModelKind.STEPPING, max_batch_size=64)
    assert combined(stepping, [plain]) == stepping
    assert combined(plain, [stepping], stepping) == stepping
    assert combined(plain, [], stepping) == plain


def test_tensors_that_no_worker_declares_any_more_are_not_registered() -> None:
    assert "inputs" not in combined(declared(), [], declared(tensor="x"))


def test_what_workers_declare_differently_is_described() -> None:
    one, other = declared(max_batch_size=4), declared(max_batch_size=64, tensor="x")
    found = differing([one, other, other])
    assert found.keys() == {"inputs", "max_batch_size"}
    assert found["max_batch_size"] == {"4": 1, "64": 2}
    described = describe_differing(found)
    assert described.startswith("inputs: none (1 worker), [{")
    assert described.endswith("; max_batch_size: 4 (1 worker), 64 (2 workers)")
    sizes = differing([declared(max_batch_size=size) for size in (16, 2)])
    assert describe_differing(sizes) == "max_batch_size: 2 (1 worker), 16 (1 worker)"
    assert differing([one, one]) == {} == differing([])
