"""What a configuration may have that has no counterpart, and what to do instead. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from carpool_worker.triton.config import Config
from carpool_worker.triton.schema import ENUMS

# By the path of the field. A field with its default is as if it were not there.
REFUSED: Final = {
    "ensemble_scheduling": "write a Python model in place of the ensemble, that calls the others "
    "(docs/composition.md)",
    "runtime": "the backend is Carpool's own; remove it",
    "batch_input": "declare inputs that are padded in the TOML file beside an ONNX file, with `lengths`",
    "batch_output": "declare outputs that are cut in the TOML file beside an ONNX file, with `cut`",
    "optimization.graph": "onnxruntime optimizes each graph when it is loaded; remove it",
    "optimization.priority": "no model has precedence on a device; remove it, and give each its own devices",
    "optimization.cuda": "it is for TensorRT; remove it",
    "optimization.execution_accelerators": "ONNX files run on the CPU or CUDA of onnxruntime; remove it",
    "optimization.gather_kernel_buffer_threshold": "it is for TensorRT; remove it",
    "optimization.eager_batching": "it is for TensorRT; remove it",
    "cc_model_filenames": "one file is for all GPUs; remove it",
    "metric_tags": "add labels in Prometheus, with relabel_configs; remove it",
    "model_operations": "export the model with operators that onnxruntime has",
    "model_repository_agents": "no program is run for a load; do its work before the files are copied",
    "response_cache.enable": "every request is executed; put a cache in front, and write false",
    "model_metrics": "the buckets of Carpool's histograms are fixed; remove it",
    "sequence_batching.iterative_sequence": "write a decoupled model, or one that steps (docs/models.md)",
    "sequence_batching.oldest.preserve_ordering": "the results of a sequence come in its order, and those of "
    "different ones are not ordered; remove it",
    "sequence_batching.state.use_growable_memory": "a state has a fixed size; remove it",
    "input.is_shape_tensor": "it is for TensorRT; remove it",
    "input.is_non_linear_format_io": "it is for TensorRT; remove it",
    "output.is_shape_tensor": "it is for TensorRT; remove it",
    "output.is_non_linear_format_io": "it is for TensorRT; remove it",
    "instance_group.rate_limiter": "each process executes one batch at a time; set the count, and remove it",
    "instance_group.secondary_devices": "a process has one device; remove it",
    "instance_group.profile": "it is for TensorRT; remove it",
    "instance_group.passive": "each process takes requests; remove the group",
    "instance_group.host_policy": "start the worker on the CPUs that it may use (taskset); remove it",
}


def refused(config: Config) -> Iterator[str]:
    """A sentence for each field that has no counterpart. It begins with the field."""
    if config["platform"] == "ensemble" and "ensemble_scheduling" not in config:
        yield f"platform: ensemble has no counterpart: {REFUSED['ensemble_scheduling']}"
    for path, remedy in REFUSED.items():
        if any(map(_is_given, _found(config, path.split(".")))):
            yield f"{path}: has no counterpart: {remedy}"


def _found(value: Any, names: list[str]) -> Iterator[Any]:
    """The values at this path, of all elements of lists."""
    if isinstance(value, list):
        for one in value:
            yield from _found(one, names)
    elif not names:
        yield value
    elif isinstance(value, Mapping) and names[0] in value:
        yield from _found(value[names[0]], names[1:])


def _is_given(value: Any) -> bool:
    return bool(value) and not any(value == names[0] for names in ENUMS.values())
