"""A configuration of Triton's in Carpool's words: what a model declares, and what a worker is told. Pure.

Used twice: where a repository is read, for what is wrong, and in the model process, after the model's own
`auto_complete_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from carpool.model_settings import ModelKind, ModelSettings
from carpool_worker.triton.config import Config
from carpool_worker.triton.refused import refused
from carpool_worker.triton.scheduling import Sequences, batching_settings, sequence_settings, sequences_of
from carpool_worker.triton.tensors import Tensors, tensors_of


class Backend(StrEnum):
    """What executes a model."""

    ONNX = "onnxruntime"
    PYTHON = "python"


FILES: Final = {Backend.ONNX: "model.onnx", Backend.PYTHON: "model.py"}
_PLATFORMS: Final = {"onnxruntime_onnx": Backend.ONNX}
_OF_BATCHES: Final = {  # fields of `dynamic_batching` that say when and how batches are formed
    "preferred_batch_size": "preferred_batch_sizes",
    "max_queue_delay_microseconds": "max_queue_delay_ms",
    "preserve_ordering": "preserve_ordering",
}
_ENSEMBLE: Final = "ensemble"
_WITHOUT_BACKEND: Final = 'write backend: "onnxruntime" or "python"'
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"


class ConfigError(ValueError):
    """A configuration cannot be served. `problems`: all that is wrong with it, a sentence each. As text it is
    the first of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        more = len(problems) - 1
        super().__init__(f"{problems[0]} (and {more} more)" if more else problems[0])
        self.problems = list(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """What a configuration says. `kind`: how the model takes requests. `settings`: by name. `rows`: how many
    are executed at a time."""

    backend: Backend
    kind: ModelKind
    tensors: Tensors
    settings: dict[str, Any]
    rows: int
    sequences: Sequences | None = None


def backend_of(config: Config, files: Sequence[str], problems: list[str]) -> Backend | None:
    """What executes a model that has these files in its version's folder; None if that is nothing here."""
    backend, platform = config["backend"], config["platform"]
    if platform == _ENSEMBLE or "ensemble_scheduling" in config:
        return None  # as an ensemble it is refused as a whole
    if not backend and not platform:
        found = [one for one, file in FILES.items() if (config["default_model_filename"] or file) in files]
        if len(found) == 1:
            return found[0]
        problems.append(f"backend: is missing; {_WITHOUT_BACKEND}")
        return None
    if backend in list(Backend) and (not platform or _PLATFORMS.get(platform) == backend):
        return Backend(backend)
    if not backend and platform in _PLATFORMS:
        return _PLATFORMS[platform]
    if backend in list(Backend):
        problems.append(f"platform: {platform} does not go with backend {backend}; remove it")
        return None
    name = "backend" if backend else "platform"
    problems.append(
        f"{name}: {backend or platform} has no counterpart: export the model to ONNX, or load it in a Python "
        "model"
    )
    return None


def translate(config: Config, backend: Backend) -> Translated:
    """A configuration for a model of this backend. Raises ConfigError."""
    problems = list(refused(config))
    tensors = tensors_of(config, problems)
    kind, rows = _kind_of(config, backend, problems), max(1, config["max_batch_size"])
    if config["max_batch_size"] < 0:
        problems.append(f"max_batch_size: {config['max_batch_size']} must be 0 or more")
    settings: dict[str, Any] = {}
    if config["max_batch_size"] or tensors.inputs or backend is Backend.PYTHON:
        settings["max_batch_size"] = rows
    sequences = None
    if "sequence_batching" in config:
        has_lead = config["max_batch_size"] == 0 and tensors.has_batch
        sequences = sequences_of(config, rows, has_lead=has_lead, problems=problems)
        settings |= sequence_settings(config["sequence_batching"], rows)
        if kind is ModelKind.BOUND:
            settings["max_batch_size"] = sequences.slots
            settings.pop("max_candidate_sequences", None)
    elif "dynamic_batching" in config:
        settings |= batching_settings(config["dynamic_batching"], problems)
        if kind is ModelKind.STEPPING:
            problems += _without_batches(config["dynamic_batching"], settings)
    if kind is ModelKind.STEPPING and rows == 1:
        settings.pop("max_batch_size", None)  # requests that wait for others do not hold a process up
    problems += _OF_BACKEND[backend](config, tensors, kind)
    problems += _of_settings(settings, kind)
    if problems:
        raise ConfigError(problems)
    return Translated(
        backend=backend, kind=kind, tensors=tensors, settings=settings, rows=rows, sequences=sequences
    )


def _kind_of(config: Config, backend: Backend, problems: list[str]) -> ModelKind:
    is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    if not is_decoupled:
        if "sequence_batching" not in config:
            return ModelKind.PLAIN
        return ModelKind.BOUND if backend is Backend.PYTHON else ModelKind.STATEFUL
    if backend is not Backend.PYTHON:
        problems.append("model_transaction_policy.decoupled: only a Python model is; remove it")
    if "sequence_batching" in config:
        problems.append(
            "model_transaction_policy.decoupled: a decoupled model has no sequences here; remove "
            "sequence_batching, or decoupled"
        )
    return ModelKind.STEPPING


def _without_batches(batching: Mapping[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """A sentence for each field of `dynamic_batching` that a decoupled model cannot have. Its setting is
    taken out."""
    for name, setting in _OF_BATCHES.items():
        if batching[name]:
            del settings[setting]
            yield (
                f"dynamic_batching.{name}: has no counterpart in a decoupled model, whose requests begin as "
                "they come; remove it"
            )


def _of_settings(settings: dict[str, Any], kind: ModelKind) -> list[str]:
    """What the settings themselves say: in their own words."""
    try:
        read = ModelSettings.from_mapping(settings)
        read.check_sizes()
        read.check_kind(kind)
    except ValueError as error:
        return [str(error)]
    return []


def _of_onnx(config: Config, tensors: Tensors, kind: ModelKind) -> list[str]:
    problems = [
        f"input {tensor.name}: optional: has no counterpart: a batch is one array of each input; remove it"
        for tensor in tensors.inputs
        if tensor.optional
    ]
    problems += [
        f"input {one['name']}: allow_ragged_batch: has no counterpart: declare sizes to pad to in the TOML "
        "file beside the ONNX file"
        for one in config["input"]
        if one["allow_ragged_batch"]
    ]
    if config["parameters"]:
        problems.append(
            f"parameters: {', '.join(config['parameters'])} have no effect on an ONNX file; remove them, and "
            "set OMP_NUM_THREADS for its threads"
        )
    if tensors.inputs and not tensors.has_batch:
        problems.append(
            "max_batch_size: 0 needs dims, or a reshape, that begin with 1: the first dimension of a graph "
            "is the batch; export it with one"
        )
    if kind is ModelKind.STATEFUL and not config["sequence_batching"]["state"]:
        problems.append(
            "sequence_batching: a graph keeps nothing itself; declare its states, or write a Python model"
        )
    problems += [
        f"model_warmup {sample['name']}: input_data_file: has no counterpart: an ONNX file is tried out with "
        "made-up requests when it is loaded; remove it"
        for sample in config["model_warmup"]
        if any("input_data_file" in one for one in sample["inputs"].values())
    ]
    return problems


def _of_python(config: Config, tensors: Tensors, kind: ModelKind) -> list[str]:
    problems = []
    if kind is not ModelKind.STEPPING:
        problems += [
            f"input {tensor.name}: optional: has no counterpart but in decoupled models: a batch is one "
            "array of each input; remove it"
            for tensor in tensors.inputs
            if tensor.optional
        ]
    if _ENVIRONMENT in config["parameters"]:
        problems.append(
            f"parameters: {_ENVIRONMENT} has no counterpart: install the packages where the worker runs; "
            "remove it"
        )
    if kind is ModelKind.BOUND and config["sequence_batching"]["state"]:
        problems.append(
            "sequence_batching.state: is for ONNX files: a Python model keeps its states itself; remove it"
        )
    if kind is not ModelKind.PLAIN and config["model_warmup"]:
        problems.append(
            "model_warmup: has no counterpart in a decoupled model, or one of sequences; call the model in "
            "`initialize`"
        )
    return problems


_OF_BACKEND: Final = {Backend.ONNX: _of_onnx, Backend.PYTHON: _of_python}
