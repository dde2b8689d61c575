"""What a configuration of Triton's becomes: settings, tensors, devices, versions. And what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.model_settings import ModelKind
from carpool_worker.triton.config import read_config
from carpool_worker.triton.instances import chosen_versions, devices_of
from carpool_worker.triton.refused import REFUSED
from carpool_worker.triton.translation import Backend, ConfigError, Translated, translate

TENSORS = """
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def translated(text: str, backend: Backend = Backend.PYTHON) -> Translated:
    return translate(read_config(text, "f"), backend)


def settings(text: str, backend: Backend = Backend.PYTHON) -> dict[str, Any]:
    return translated(f"max_batch_size: 8 {TENSORS} {text}", backend).settings


def refused(text: str, backend: Backend = Backend.PYTHON) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translated(f"max_batch_size: 8 {TENSORS} {text}", backend)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("dynamic_batching { }", {}),
        (
            "dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 1500 }",
            {"preferred_batch_sizes": [2, 4], "max_queue_delay_ms": 1.5},
        ),
        ("dynamic_batching { preserve_ordering: true }", {"preserve_ordering": True}),
        ("dynamic_batching { default_queue_policy { } }", {"allow_expiration_override": False}),
        (
            """dynamic_batching { default_queue_policy {
                 timeout_action: DELAY default_timeout_microseconds: 1001 allow_timeout_override: true
                 max_queue_size: 9 } }""",
            {
                "allow_expiration_override": True,
                "expiration_action": "delay",
                "default_expiration_ms": 2,
                "max_queue_size": 9,
            },
        ),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 2 }", {}),
        (
            """dynamic_batching { priority_levels: 3 default_priority_level: 3
                 priority_queue_policy { key: 1 value { max_queue_size: 5 } }
                 priority_queue_policy { key: 3 value { timeout_action: DELAY } } }""",
            {
                "priority_policies": {
                    9: {"allow_expiration_override": False, "max_queue_size": 5},
                    7: {"allow_expiration_override": False, "expiration_action": "delay"},
                    4: {"allow_expiration_override": False, "expiration_action": "delay"},
                }
            },
        ),
        ("dynamic_batching { priority_levels: 10 default_priority_level: 6 }", {}),
        ("response_cache { enable: false } optimization { priority: PRIORITY_DEFAULT }", {}),
        ("optimization { input_pinned_memory { enable: true } }", {}),
    ],
)
def test_dynamic_batching_becomes_settings(text: str, expected: dict[str, Any]) -> None:
    assert settings(text) == {"max_batch_size": 8} | expected


STATE = 'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 2 ] }'


@pytest.mark.parametrize(
    ("backend", "text", "expected"),
    [
        (Backend.ONNX, STATE, {"max_batch_size": 8, "max_sequence_idle_ms": 1000}),
        (
            Backend.ONNX,
            f"{STATE} max_sequence_idle_microseconds: 2500 oldest {{ max_candidate_sequences: 99 "
            "preferred_batch_size: 4 max_queue_delay_microseconds: 100 }",
            {
                "max_batch_size": 8,
                "max_sequence_idle_ms": 3,
                "max_candidate_sequences": 99,
                "preferred_batch_sizes": [4],
                "max_queue_delay_ms": 0.1,
            },
        ),
        (
            Backend.PYTHON,
            "direct { minimum_slot_utilization: 0.3 max_queue_delay_microseconds: 2000 }",
            {
                "max_batch_size": 8,
                "max_sequence_idle_ms": 1000,
                "preferred_batch_sizes": [3],
                "max_queue_delay_ms": 2.0,
            },
        ),
        (
            Backend.PYTHON,
            "direct { max_queue_delay_microseconds: 2000 }",
            {"max_batch_size": 8, "max_sequence_idle_ms": 1000},
        ),
        (
            Backend.PYTHON,
            "oldest { max_candidate_sequences: 64 }",
            {"max_batch_size": 64, "max_sequence_idle_ms": 1000},
        ),
    ],
)
def test_sequence_batching_becomes_settings(backend: Backend, text: str, expected: dict[str, Any]) -> None:
    assert settings(f"sequence_batching {{ {text} }}", backend) == expected


def test_the_kind_of_a_model() -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    assert translated(f"max_batch_size: 8 {TENSORS} {decoupled}").kind is ModelKind.STEPPING
    assert translated(f"max_batch_size: 0 {TENSORS} {decoupled}").settings == {}
    assert translated(f"max_batch_size: 8 {TENSORS}").kind is ModelKind.PLAIN
    sequences = f"max_batch_size: 8 {TENSORS} sequence_batching {{ {STATE} }}"
    assert translated(sequences, Backend.ONNX).kind is ModelKind.STATEFUL
    assert translated(sequences.replace(STATE, "")).kind is ModelKind.BOUND


@pytest.mark.parametrize(
    ("text", "shape", "model_shape", "has_batch"),
    [
        ("max_batch_size: 8 dims: [ 4, -1 ]", (4, -1), (4, -1), True),
        ("max_batch_size: 8 dims: [ 4 ] reshape { shape: [ 2, 2 ] }", (4,), (2, 2), True),
        ("max_batch_size: 8 dims: [ 1 ] reshape { shape: [ ] }", (1,), (), True),
        ("max_batch_size: 0 dims: [ 1, 4 ]", (4,), (4,), True),
        ("max_batch_size: 0 dims: [ 3, 2 ] reshape { shape: [ 1, 3, 2 ] }", (3, 2), (3, 2), True),
        ("max_batch_size: 0 dims: [ 3, 2 ]", (3, 2), (3, 2), False),
    ],
)
def test_shapes_are_those_of_one_row(
    text: str, shape: tuple[int, ...], model_shape: tuple[int, ...], has_batch: bool
) -> None:
    size, _, dims = text.partition(" dims")
    tensors = translated(f'{size} input {{ name: "x" data_type: TYPE_STRING dims{dims} }}').tensors
    (tensor,) = tensors.inputs
    assert (tensor.shape, tensor.model_shape, tensors.has_batch) == (shape, model_shape, has_batch)
    assert tensor.spec().datatype == "BYTES"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", None),
        ("instance_group { kind: KIND_CPU count: 2 }", ["cpu", "cpu"]),
        ("instance_group { kind: KIND_MODEL }", ["cpu"]),
        ("instance_group { kind: KIND_GPU }", ["cuda:0", "cuda:1"]),
        ("instance_group { count: 2 gpus: [ 1 ] }", ["cuda:1", "cuda:1"]),
        ("instance_group { gpus: [ 1, 3 ] }", ["cpu"]),
        ("instance_group { kind: KIND_GPU gpus: [ 3 ] }", ["cuda:3"]),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU gpus: 1 } ]", ["cpu", "cuda:1"]),
    ],
)
def test_instance_groups_become_devices(groups: str, expected: list[str] | None) -> None:
    problems: list[str] = []
    assert devices_of(read_config(groups, "f"), lambda: ["cuda:0", "cuda:1"], problems) == expected
    assert problems == []


def test_a_group_for_gpus_does_not_move_to_the_cpu() -> None:
    config = read_config("instance_group { kind: KIND_GPU }", "f")
    assert devices_of(config, lambda: ["cpu"], []) == ["cuda:0"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", ["10"]),
        ("latest { }", ["10"]),
        ("latest { num_versions: 2 }", ["2", "10"]),
        ("all { }", ["1", "2", "10"]),
        ("specific { versions: [ 2, 1 ] }", ["1", "2"]),
    ],
)
def test_the_policy_chooses_versions(policy: str, expected: list[str]) -> None:
    text = f"version_policy {{ {policy} }}" if policy else ""
    assert chosen_versions(read_config(text, "f"), ["1", "2", "10"], []) == expected


@pytest.mark.parametrize(
    ("backend", "text", "sentence"),
    [
        (
            Backend.PYTHON,
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
            "dynamic_batching.default_priority_level: 1 has no counterpart: a request that names none has "
            "level 6 here; let clients name theirs, and write 2",
        ),
        (
            Backend.PYTHON,
            "dynamic_batching { priority_levels: 11 default_priority_level: 6 }",
            "dynamic_batching.priority_levels: 11 are more than the 10 that there are",
        ),
        (
            Backend.PYTHON,
            "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
            "priority_queue_policy { key: 3 value { } } }",
            "dynamic_batching.priority_queue_policy: 3 must be 1 to 2, as priority_levels says",
        ),
        (
            Backend.PYTHON,
            "dynamic_batching { preferred_batch_size: 16 }",
            "preferred_batch_sizes: 16 can never be filled, because max_batch_size is 8",
        ),
        (
            Backend.PYTHON,
            "model_transaction_policy { decoupled: true } dynamic_batching { preserve_ordering: true }",
            "dynamic_batching.preserve_ordering: has no counterpart in a decoupled model, whose requests "
            "begin as they come; remove it",
        ),
        (
            Backend.ONNX,
            "model_transaction_policy { decoupled: true }",
            "model_transaction_policy.decoupled: only a Python model is; remove it",
        ),
        (
            Backend.ONNX,
            'sequence_batching { control_input { name: "START" '
            "control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }",
            "sequence_batching: a graph keeps nothing itself; declare its states, or write a Python model",
        ),
        (
            Backend.PYTHON,
            f"sequence_batching {{ {STATE} }}",
            "sequence_batching.state: is for ONNX files: a Python model keeps its states itself; remove it",
        ),
        (
            Backend.ONNX,
            f"sequence_batching {{ {STATE.replace('[ 2 ]', '[ -1 ]')} }}",
            "sequence_batching.state s: dims: [-1] must be fixed, because a state is stored as bytes",
        ),
        (
            Backend.ONNX,
            'parameters { key: "intra_op_thread_count" value { string_value: "2" } }',
            "parameters: intra_op_thread_count have no effect on an ONNX file; remove them, and set "
            "OMP_NUM_THREADS for its threads",
        ),
        (
            Backend.PYTHON,
            'input { name: "z" data_type: TYPE_FP32 dims: 1 optional: true }',
            "input z: optional: has no counterpart but in decoupled models: a batch is one array of each "
            "input; remove it",
        ),
        (
            Backend.PYTHON,
            'input { name: "z" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 4, 2 ] } }',
            "input z: reshape: [4, 2] must have as many elements as dims, [6], and as many sizes that vary",
        ),
        (
            Backend.PYTHON,
            'input { name: "z" dims: 1 }',
            "input z: data_type: is missing; write one such as TYPE_FP32",
        ),
        (
            Backend.PYTHON,
            "response_cache { enable: true }",
            "response_cache.enable: has no counterpart: every request is executed; put a cache in front, and "
            "write false",
        ),
        (
            Backend.PYTHON,
            "instance_group { rate_limiter { priority: 1 } }",
            "instance_group.rate_limiter: has no counterpart: each process executes one batch at a time; set "
            "the count, and remove it",
        ),
        (
            Backend.ONNX,
            'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
            "optimization.execution_accelerators: has no counterpart: ONNX files run on the CPU or CUDA of "
            "onnxruntime; remove it",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(backend: Backend, text: str, sentence: str) -> None:
    assert refused(text, backend) == [sentence]


def test_a_minimal_configuration_is_refused_by_name_too() -> None:
    with pytest.raises(ConfigError, match="only a Python model is"):
        translated("model_transaction_policy { decoupled: true }", Backend.ONNX)


def test_the_document_lists_all_that_is_refused() -> None:
    document = (Path(__file__).parents[2] / "docs" / "repository.md").read_text()
    assert [path for path in REFUSED if f"`{path}`" not in document] == []


def test_all_that_is_wrong_is_told_at_once() -> None:
    problems = refused('metric_tags { key: "a" value: "b" } runtime: "x.so" input { dims: 1 }')
    assert [problem.partition(":")[0] for problem in problems] == ["runtime", "metric_tags", "input 1"]
