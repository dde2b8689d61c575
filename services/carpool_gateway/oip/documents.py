"""The documents of the protocol beside responses to infer requests: all are JSON, as bytes."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from carpool.errors import NotFoundError
from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS
from carpool.model_settings import ModelKind
from carpool.wire.tensors import TensorSpec
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


def _encode(document: Any) -> bytes:
    return msgspec.json.encode(document)


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
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "format": "FORMAT_NONE", "dims": spec.shape}
