"""An entry of Carpool's own form: carpool.toml beside its versions, or nothing where what it has is clear.

object = "model.py:Echo"      # in the folder of the version; a model.onnx or model.py need not be named
replicas = 2                  # as is all that follows, it is optional and as in any file of a model

[parameters]
weights = "weights.pt"        # paths start in the folder of the version

[settings]
max_batch_size = 16
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from carpool_worker.model_file import DEFAULT_FILE, DeclaredModel, read_entry, read_toml
from carpool_worker.model_process.loader import format_of, objects_of
from carpool_worker.repository.layout import TRITON_CLASS, check_inside

_ONNX_FILE: Final = "model.onnx"
_PYTHON_FILE: Final = "model.py"


def declared_by_toml(entry: Path, version: Path) -> DeclaredModel:
    """A version of an entry with or without carpool.toml. Raises ValueError."""
    file = entry / DEFAULT_FILE
    check_inside(file, entry, f"{file}")
    table = read_toml(file) if file.is_file() else {}
    if "models" in table:
        raise ValueError(
            f"{file}: models: the entry is one model: write its keys at the top of the file, without "
            "[models.NAME]"
        )
    if "object" not in table:
        table["object"] = _clear_object(file, version)
    declared = read_entry(table, version, f"{file}: ")
    _check_file(file, declared.location, entry)
    return declared


def _clear_object(file: Path, version: Path) -> str:
    """The model of a folder that has only one. Raises ValueError."""
    onnx_file, python_file = version / _ONNX_FILE, version / _PYTHON_FILE
    if onnx_file.is_file() and python_file.is_file():
        raise ValueError(
            f"{version} has {_ONNX_FILE} and {_PYTHON_FILE}: name the model in {file}, as in object = "
            f'"onnx:{_ONNX_FILE}"'
        )
    if onnx_file.is_file():
        return f"onnx:{_ONNX_FILE}"
    if not python_file.is_file():
        raise ValueError(
            f"{version} has neither {_ONNX_FILE} nor {_PYTHON_FILE}: put one there, or name the model in "
            f'{file}, as in object = "classifier.py:Classifier"'
        )
    found = objects_of(python_file)
    if not found:
        raise ValueError(
            f"{python_file} has no class and no function without an underscore in front: name the model in "
            f'{file}, as in object = "{_PYTHON_FILE}:NAME"'
        )
    if TRITON_CLASS in found:
        raise ValueError(
            f"{python_file} has a {TRITON_CLASS}: declare it in a config.pbtxt in place of {file}"
        )
    if len(found) > 1:
        raise ValueError(
            f"{python_file} has {', '.join(found)}: name the model in {file}, as in object = "
            f'"{_PYTHON_FILE}:{found[0]}"'
        )
    return f"{_PYTHON_FILE}:{found[0]}"


def _check_file(file: Path, location: str, entry: Path) -> None:
    """Raise ValueError for files of a model that are not inside its entry, or that are missing."""
    prefix = format_of(location)
    source, _, _ = location.rpartition(":")
    path = Path(location.removeprefix(prefix) if prefix else source)
    if not path.is_absolute() and not path.exists():
        return  # a module, the name of a ready-made model, or one on a hub
    check_inside(path, entry, f"{file}: object: {path}")
    if not path.exists():
        raise ValueError(f"{file}: object: there is no file {path}")
