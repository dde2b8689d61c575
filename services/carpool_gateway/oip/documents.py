"""The documents of the protocol beside responses to infer requests: all are JSON, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from carpool.errors import NotFoundError
from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS
from carpool.model_settings import ModelKind
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.models import VERSION, OfferedModel, shown_shape

PLATFORM: Final = "carpool"
EXTENSIONS: Final = (  # those that the gateway serves, and no others
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "sequence",
    "sequence(string_id)",
)
READY: Final = "READY"
UNAVAILABLE: Final = "UNAVAILABLE"
LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"


class Duration(NamedTuple):
    """How often something was done, and how long that took together."""

    count: int = 0  # type: ignore[assignment]  # hides tuple.count
    ns: int = 0


_NONE: Final = Duration()


class BatchFigures(NamedTuple):
    """Batches of one size that were executed."""

    batch_size: int
    compute: Duration


class ModelFigures(NamedTuple):
    """What a model has done: requests that succeeded and that failed, with all of their time; their time in
    the queue; and that of the execution, in which what comes before and after the model is part.

    `inferences`: requests that were executed. `executions`: batches. `last_inference_ms`: since 1970.
    """

    last_inference_ms: int = 0
    inferences: int = 0
    executions: int = 0
    success: Duration = _NONE
    fail: Duration = _NONE
    queue: Duration = _NONE
    compute: Duration = _NONE
    batches: Sequence[BatchFigures] = ()


class IndexEntry(NamedTuple):
    """A model in the index of the repository: its state, and why, if it is not READY."""

    name: str
    state: str
    reason: str = ""


def _encode(document: Any) -> bytes:
    return msgspec.json.encode(document)


def error_document(detail: str) -> bytes:
    """Why a request failed."""
    return _encode({"error": detail.encode("utf-8", "replace").decode()})


def unknown_model(name: str) -> NotFoundError:
    """The error for a model that is not registered, in words for which clients look."""
    return NotFoundError(f"Request for unknown model: '{name}' is not found")


def check_version(name: str, version: str) -> None:
    """Raise NotFoundError unless a model has this version; each has one."""
    if version != VERSION:
        raise NotFoundError(
            f"Request for unknown model: '{name}' version {version} is not found; it has version {VERSION}"
        )


def health(*, live: bool, ready: bool) -> bytes:
    """Whether the server lives, and whether it can serve. Some clients look for one name, some for the
    other."""
    return _encode({"live": live, "ready": ready})


def server_metadata(name: str, version: str) -> bytes:
    """What the server is and can do."""
    return _encode({"name": name, "version": version, "extensions": EXTENSIONS})


def model_metadata(model: OfferedModel) -> bytes:
    """The inputs and outputs of a model, whose shapes have the batch first."""
    return _encode(
        {
            "name": model.name,
            "versions": [VERSION],
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
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": spec.shape}


def model_statistics(figures: Mapping[str, ModelFigures]) -> bytes:
    """What models have done, by their names."""
    return _encode({"model_stats": [_statistics(name, of_model) for name, of_model in figures.items()]})


def _statistics(name: str, figures: ModelFigures) -> dict[str, Any]:
    # What comes before and after the model is in its process, and not measured apart.
    around = Duration(figures.compute.count, 0)
    return {
        "name": name,
        "version": VERSION,
        "last_inference": figures.last_inference_ms,
        "inference_count": figures.inferences,
        "execution_count": figures.executions,
        "inference_stats": {
            "success": figures.success._asdict(),
            "fail": figures.fail._asdict(),
            "queue": figures.queue._asdict(),
            "compute_input": around._asdict(),
            "compute_infer": figures.compute._asdict(),
            "compute_output": around._asdict(),
            "cache_hit": _NONE._asdict(),
            "cache_miss": _NONE._asdict(),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": batch.batch_size,
                "compute_input": Duration(batch.compute.count)._asdict(),
                "compute_infer": batch.compute._asdict(),
                "compute_output": Duration(batch.compute.count)._asdict(),
            }
            for batch in figures.batches
        ],
        "memory_usage": [],
    }


def repository_index(entries: Sequence[IndexEntry], *, ready_only: bool = False) -> bytes:
    """The models, with their states."""
    return _encode(
        [
            {"name": entry.name, "version": VERSION, "state": entry.state, "reason": entry.reason}
            for entry in entries
            if entry.state == READY or not ready_only
        ]
    )


def decode_index_request(body: bytes) -> bool:
    """Whether only models that are ready are wanted in the index. Raises ProtocolError."""
    ready = _object_of(body).get("ready", False)
    if type(ready) is not bool:
        raise ProtocolError("ready: must be true or false")
    return ready


def decode_parameters(body: bytes) -> dict[str, Any]:
    """The parameters of a request to load or unload a model: of `config` and `file:...` the texts. Raises
    ProtocolError."""
    parameters = _object_of(body).get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise ProtocolError("parameters: must be a JSON object")
    for name, value in parameters.items():
        if type(value) not in (bool, int, float, str):
            raise ProtocolError(f"parameters: {name!r:.60} must be a text, a number, true or false")
    return parameters


def _object_of(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object, or empty."""
    value = parse(body) if body.strip() else {}
    if type(value) is not dict:
        raise ProtocolError("the request: must be a JSON object")
    return value
