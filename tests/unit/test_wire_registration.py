"""Registrations: settings and declared tensors come back as a worker registered them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.kinds import kind_of
from carpool.wire.registration import decode_inputs, encode_registration
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
    assert kind_of(encode_registration({}, [], [], kind)) is kind


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
        "[" * 100_000,
    ],
)
def test_malformed_tensors_are_a_value_error_that_names_the_field(text: str) -> None:
    with pytest.raises(ValueError, match=r"^registered inputs are not a list of tensors: "):
        decode_inputs({"inputs": text})
