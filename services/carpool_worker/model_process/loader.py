"""From a model's name on the command line to the model.

A model is `module:Name`, `path/file.py:Name`, files that a ready-made model serves (`onnx:FILE`, `hf:FOLDER`,
`st:FOLDER`), or a name registered by an installed package: an entry point in the group `carpool.models`, such
as `square = "carpool_worker.models.square:Square"` in pyproject.toml.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from carpool.keys import MODEL_NAME
from carpool.plugins import UnusableError, find_object, hide_arguments
from carpool.text_files import read_text
from carpool_worker.model_process.configuration import TRITON

MODELS_GROUP: Final = "carpool.models"
_ONNX, _LANGUAGE, _SENTENCES = "onnx:", "hf:", "st:"
_FORMATS: Final = (_ONNX, _LANGUAGE, _SENTENCES)
_OBJECTS_SHOWN: Final = 8


def format_of(location: str) -> str:
    """What a location begins with if it names files for a ready-made model, such as `onnx:`; else empty."""
    return next((prefix for prefix in _FORMATS if location.startswith(prefix)), "")


def registered_names() -> list[str]:
    """The names of models that installed packages register, sorted."""
    return sorted(entry_points(group=MODELS_GROUP).names)


def model_name(spec: str) -> tuple[str, str]:
    """The name under which a model is served, and its location. `NAME=LOCATION` sets both."""
    name, equals, location = spec.partition("=")
    if equals and MODEL_NAME.fullmatch(name):
        return name, location
    location = spec
    prefix = format_of(location)
    files = location.removeprefix(prefix)
    if prefix == _ONNX:
        from carpool_worker.models import onnx  # noqa: PLC0415 (an optional extra)

        name = onnx.model_name(Path(files))
    elif prefix:
        from carpool_worker.models.hf import source  # noqa: PLC0415 (an optional extra)

        name = source.model_name(files)
    else:
        name = location.rpartition(":")[2]
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"model {spec!r} has no valid name to register it under; write NAME={spec}")
    return name, location


def find_model(
    location: str,
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    declared: Mapping[str, Any] | None = None,
) -> Any:
    """The model object: a class, an instance or a function.

    `folder`: where modules are found in place of the working directory. `settings`: those of an ONNX file, in
    place of what is declared beside it. `declared`: what a repository declares, of a file of Triton's.

    Raises UnusableError for a location of no known form, and whatever the model's module raises. From now on
    `sys.argv` is that of a program without arguments.
    """
    hide_arguments(location)
    prefix = format_of(location)
    files = location.removeprefix(prefix)
    if prefix == _ONNX:
        from carpool_worker.models.onnx import OnnxModel  # noqa: PLC0415 (an optional extra)

        return OnnxModel(files, settings)
    if declared and location.startswith(TRITON):
        from carpool_worker.models.triton.found import find  # noqa: PLC0415 (an optional extra)

        return find(location.removeprefix(TRITON), declared, settings)
    if prefix == _LANGUAGE:
        from carpool_worker.models.hf.language_model import LanguageModel  # noqa: PLC0415 (likewise)

        return LanguageModel(files)
    if prefix == _SENTENCES:
        from carpool_worker.models.hf.sentence_model import SentenceModel  # noqa: PLC0415 (likewise)

        return SentenceModel(files)
    source, colon, name = location.rpartition(":")
    if source and name:
        return find_object(location, folder)
    if not colon:
        for entry_point in entry_points(group=MODELS_GROUP, name=location):
            return entry_point.load()
    if location.endswith(".py") and (file := Path(location)).is_file():
        raise UnusableError(f"model {location!r} is a whole file: {_naming(file)}")
    registered = registered_names()
    similar = difflib.get_close_matches(location, registered, n=1)
    hint = f"did you mean {similar[0]!r}? Or " if similar else ""
    raise UnusableError(
        f"model {location!r} does not exist: {hint}write module:Name, path/file.py:Name, hf:FOLDER, "
        f"st:FOLDER, onnx:FILE, or a registered name ({', '.join(registered) or 'none'})"
    )


def objects_of(file: Path) -> list[str]:
    """The names of the classes and functions of a file that may be models; none of a file that cannot be
    read. Nothing of it is executed."""
    try:
        return [
            one.name
            for one in ast.parse(read_text(file)).body
            if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not one.name.startswith("_")
        ]
    except (OSError, ValueError, SyntaxError):  # what is wrong is said once its object is named
        return []


def _naming(file: Path) -> str:
    """How to name an object of a file, with those that may be models."""
    found = objects_of(file)
    if not found:
        return f"name an object of it, as in {file}:Name"
    more = ", ..." if len(found) > _OBJECTS_SHOWN else ""
    return f"it has {', '.join(found[:_OBJECTS_SHOWN])}{more}; write {file}:{found[0]}"
