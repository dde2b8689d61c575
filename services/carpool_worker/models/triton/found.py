"""From a file of a repository of Triton's, and its configuration, to the model."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from carpool.model_settings import ModelKind
from carpool.plugins import UnusableError, find_object
from carpool.text_files import read_text
from carpool_worker.models.triton import backend_utils
from carpool_worker.models.triton.decoupled import DecoupledModel
from carpool_worker.models.triton.onnx_model import TritonOnnxModel
from carpool_worker.models.triton.python_model import BoundModel, CallingModel, Described, PlainModel
from carpool_worker.triton.translation import Backend, ConfigError, translate

_MODULE: Final = "triton_python_backend_utils"
_CLASS: Final = "TritonPythonModel"
_CALLS: Final = ("exec", "async_exec")
_COMPLETE: Final = "auto_complete_config"


def find(file: str, declared: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Any:
    """The model of a file. `declared`: `config`, the configuration, and `name`, `version` and `entry`, the
    entry's folder. `settings`: those of an ONNX file, in place of what is declared.

    Raises UnusableError, and whatever the model's module and its `auto_complete_config` raise.
    """
    config, entry = declared["config"], Path(declared["entry"])
    try:
        if declared["backend"] == Backend.ONNX:
            return TritonOnnxModel(file, translate(config, Backend.ONNX), entry, settings)
        sys.modules[_MODULE] = backend_utils
        python_class = find_object(f"{file}:{_CLASS}")
        config = _completed(python_class, config)
        translated = translate(config, Backend.PYTHON)
    except ConfigError as error:
        raise UnusableError(f"{entry / 'config.pbtxt'}: {'; '.join(error.problems)}") from None
    described = Described(python_class, config, translated, entry, declared["name"], declared["version"])
    for kind in ("inputs", "outputs"):
        if not getattr(translated.tensors, kind):
            raise UnusableError(
                f"{entry / 'config.pbtxt'}: {kind.removesuffix('s')}: there is none; declare all {kind} "
                f"there, or in {_COMPLETE} of {_CLASS}"
            )
    if translated.kind is ModelKind.STEPPING:
        return DecoupledModel(described)
    if translated.kind is ModelKind.BOUND:
        return BoundModel(described)
    return CallingModel(described) if _calls_others(Path(file)) else PlainModel(described)


def _calls_others(file: Path) -> bool:
    """Whether the code of a file has a call such as `request.exec()`."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS
        for node in ast.walk(ast.parse(read_text(file)))
    )


def _completed(python_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as the model itself completes it, if it does."""
    complete = getattr(python_class, _COMPLETE, None)
    if complete is None:
        return config
    completed = complete(backend_utils.ModelConfig(config))
    if not isinstance(completed, backend_utils.ModelConfig):
        raise UnusableError(f"{_COMPLETE} of {_CLASS} must return the ModelConfig that it gets")
    for kind in ("input", "output"):
        for tensor in completed.as_dict()[kind]:
            for name, default in _OF_TENSORS[kind].items():
                tensor.setdefault(name, default)
    return completed.as_dict()


_OF_TENSORS: Final[dict[str, dict[str, Any]]] = {
    "input": {"format": "FORMAT_NONE", "optional": False, "allow_ragged_batch": False},
    "output": {"label_filename": ""},
}
