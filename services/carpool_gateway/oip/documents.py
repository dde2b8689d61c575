"""The documents of the protocol beside responses to infer requests: all are JSON, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from carpool.errors import NotFoundError
from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS
from carpool.model_settings import ModelKind
from carpool.wire.statistics import BatchStatistics, Durations, ModelStatistics
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.models import VERSION, OfferedModel, shown_shape

PLATFORM: Final = "carpool"
EXTENSIONS: Final = (  # those that each gateway serves, and no others
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "sequence",
    "sequence(string_id)",
    "statistics",
)
CONTROL_EXTENSIONS: Final = ("model_repository", "model_repository(unload_dependents)")
READY: Final = "READY"
UNAVAILABLE: Final = "UNAVAILABLE"
LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"
UNKNOWN: Final = "UNKNOWN"  # of a version in a repository that was not loaded
NO_REPOSITORY_NAMES: Final = "'repository_name' specification is not supported: leave it out"
_IMAGE_CHANNELS: Final = (1, 3, 4)


class IndexEntry(NamedTuple):
    """A version of a model in the index of the repository: its state, and why, if it is not READY."""

    name: str
    state: str
    reason: str = ""
    version: str = VERSION


def _encode(document: Any) -> bytes:
    return msgspec.json.encode(document)


def unknown_model(name: str) -> NotFoundError:
    """The error for a model that is not registered, in words for which clients look."""
    return NotFoundError(f"Request for unknown model: '{name}' is not found")


def health(*, live: bool, ready: bool) -> bytes:
    """Whether the server lives, and whether it can serve. Some clients look for one name, some for the
    other."""
    return _encode({"live": live, "ready": ready})


def server_metadata(name: str, version: str, *, controls_models: bool) -> bytes:
    """What the server is and can do. `controls_models`: whether that is to load and unload models."""
    more = CONTROL_EXTENSIONS if controls_models else ()
    return _encode({"name": name, "version": version, "extensions": sorted([*EXTENSIONS, *more])})


def model_metadata(model: OfferedModel) -> bytes:
    """The inputs and outputs of a model, whose shapes have the batch first."""
    return _encode(
        {
            "name": model.name,
            "versions": list(model.versions) or [model.version],
            "platform": PLATFORM,
            "inputs": [_tensor_metadata(spec) for spec in model.inputs],
            "outputs": [_tensor_metadata(spec) for spec in model.outputs],
        }
    )


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": shown_shape(spec)}


def model_ready(name: str) -> bytes:
    """That a model is ready. One that is not is an error."""
    return _encode({"name": name, "ready": True})


def model_config(model: OfferedModel) -> bytes:
    """A model's settings, in Triton's words."""
    settings, kind = model.settings, model.kind
    config: dict[str, Any] = {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": settings.max_batch_size,
        "input": [_tensor_config(spec) for spec in model.inputs],
        "output": [_tensor_config(spec) for spec in model.outputs],
        "model_transaction_policy": {"decoupled": kind is ModelKind.STEPPING},
    }
    if kind.has_sequences:
        config["sequence_batching"] = {"max_sequence_idle_microseconds": settings.max_sequence_idle_ms * 1000}
    else:
        config["dynamic_batching"] = {
            "preferred_batch_size": settings.preferred_batch_sizes,
            "max_queue_delay_microseconds": int(settings.max_queue_delay_ms * 1000),
            "preserve_ordering": settings.preserve_ordering,
            "priority_levels": PRIORITY_LEVELS,
            "default_priority_level": PRIORITY_LEVELS - PRIORITY_DEFAULT,
        }
    return _encode(config)


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    config = {
        "name": spec.name, "data_type": f"TYPE_{datatype}", "format": _format(spec), "dims": spec.shape,
    }  # fmt: skip
    return {**config, "optional": True} if spec.optional else config


def _format(spec: TensorSpec) -> str:
    """How an image would be laid out in a tensor of this shape: clients of image models ask for that."""
    if len(spec.shape) != 3:
        return "FORMAT_NONE"
    if spec.shape[0] in _IMAGE_CHANNELS:
        return "FORMAT_NCHW"
    return "FORMAT_NHWC" if spec.shape[2] in _IMAGE_CHANNELS else "FORMAT_NONE"


def model_statistics(
    of_models: Mapping[str, ModelStatistics], versions: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """What became of the requests of models, by their names; of all versions together. `versions`: the one to
    name, where it is not "1". Times are in nanoseconds."""
    return _encode(
        {
            "model_stats": [
                _statistics(name, versions.get(name, VERSION), found) for name, found in of_models.items()
            ]
        }
    )


def _statistics(name: str, version: str, found: ModelStatistics) -> dict[str, Any]:
    times = [
        sum(of_size.weighted_us(batches_us[at]) for of_size, batches_us in _times(found.batches))
        for at in range(3)
    ]
    compute_input, compute_infer, compute_output = (_duration(found.requests, total_us) for total_us in times)
    responses = {"0": found.first_chunks, "1": found.later_chunks} if found.first_chunks.number else {}
    return {
        "name": name,
        "version": version,
        "last_inference": found.last_us // 1000,
        "inference_count": found.requests,
        "execution_count": found.executions,
        "inference_stats": {
            "success": _duration(*found.success),
            "fail": _duration(*found.fail),
            "queue": _duration(*found.queue),
            "compute_input": compute_input,
            "compute_infer": compute_infer,
            "compute_output": compute_output,
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
        "response_stats": {index: _response(of_chunks) for index, of_chunks in responses.items()},
        "batch_stats": [
            {
                "batch_size": of_size.size,
                "compute_input": _duration(of_size.batches, of_size.input_us),
                "compute_infer": _duration(of_size.batches, of_size.infer_us),
                "compute_output": _duration(of_size.batches, of_size.output_us),
            }
            for of_size in found.batches
        ],
        "memory_usage": [],
    }


def _times(batches: Sequence[BatchStatistics]) -> list[tuple[BatchStatistics, tuple[int, int, int]]]:
    return [(of_size, (of_size.input_us, of_size.infer_us, of_size.output_us)) for of_size in batches]


def _duration(count: int, total_us: int) -> dict[str, int]:
    return {"count": count, "ns": total_us * 1000}


def _response(of_chunks: Durations) -> dict[str, Any]:
    """The chunks of streams, which have no times of their own before and after the model."""
    written, none = _duration(*of_chunks), _duration(0, 0)
    around = _duration(of_chunks.number, 0)
    return {
        "compute_infer": written, "compute_output": around, "success": written, "fail": none,
        "empty_response": none, "cancel": none,
    }  # fmt: skip


def repository_index(entries: Sequence[IndexEntry], *, ready_only: bool) -> bytes:
    """The models, with their states."""
    return _encode(
        [
            {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
            for entry in entries
            if entry.state == READY or not ready_only
        ]
    )


def ready_names(entries: Sequence[IndexEntry]) -> list[str]:
    """The names of the models in an index that can be used."""
    return list(dict.fromkeys(entry.name for entry in entries if entry.state == READY))


def model_list(names: Sequence[str]) -> bytes:
    """The names of models."""
    return _encode({"models": names})


def decode_index_request(body: bytes) -> bool:
    """Whether only models that are ready are wanted in the index. Raises ProtocolError."""
    value = parse(body) if body.strip() else {}
    if type(value) is not dict:
        raise ProtocolError("the request: must be a JSON object")
    ready = value.get("ready", False)
    if type(ready) is not bool:
        raise ProtocolError("ready: must be true or false")
    return ready
