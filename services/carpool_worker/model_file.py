"""TOML files of models: what a machine serves, or one model of a folder.

    [models.small]
    object = "model.py:Classifier"      # as on a command line
    replicas = 2                        # optional, as is all that follows
    device = "cuda:0,cuda:1"

    [models.small.parameters]
    weights = "small.pt"

    [models.small.parameter_files]      # parameters that are the texts of files, and are never shown
    token = "secrets/token"

    [models.small.settings]
    max_batch_size = 16

A file of one model has the keys of its table at the top: `object`, `[parameters]` and so on. That model has
the name of the folder if the file is called carpool.toml, else that of the file.

Paths are relative to the folder of the file, where also modules are found.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from carpool.model_settings import ModelSettings
from carpool.settings import Devices, Replicas
from carpool.text_files import read_text
from carpool_worker.model_process.configuration import Parameter
from carpool_worker.model_process.loader import format_of

DEFAULT_FILE: Final = "carpool.toml"
SUFFIX: Final = ".toml"
PARAMETER_BYTES_MAX: Final = 1024 * 1024


class DeclaredModel(NamedTuple):
    """A model as it is declared, before a command line is taken into account. None: not declared."""

    location: str
    folder: Path | None = None
    parameters: Mapping[str, Parameter] = {}
    settings: Mapping[str, str] = {}
    replicas: int | Literal["auto"] | None = None
    device: str | None = None
    parameters_in: str = ""  # the file and the table that they are in, for errors; empty without a file
    version: str = ""  # in place of what the model declares
    declared: Mapping[str, Any] = {}  # what a repository says of a file that is nothing without it


def read_model_file(path: Path) -> dict[str, DeclaredModel]:
    """The models of a file, by name. Raises ValueError, which names the file and the key."""
    table, folder = read_toml(path), path.resolve().parent
    if "models" not in table:
        name = folder.name if path.name == DEFAULT_FILE else path.stem
        return {name: read_entry(table, folder, f"{path}: ")}
    _check_keys(table, ["models"], f"{path}: ")
    models = _table(table, "models", f"{path}: ")
    if not models:
        raise ValueError(f"{path}: models: there are none; write [models.NAME] with object = ...")
    return {
        name: read_entry(_table(models, name, f"{path}: models."), folder, f"{path}: models.{name}.")
        for name in models
    }


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ValueError."""
    text = _read(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a TOML file: it is nested too deeply") from None


def read_parameter(path: Path, source: str) -> Parameter:
    """A parameter that is the text of a file, without white space around it. Raises ValueError."""
    return Parameter(_read(path).strip(), source, str(Path.cwd()), is_secret=True)


def read_entry(table: Mapping[str, Any], folder: Path, where: str) -> DeclaredModel:
    """A model from its table. `folder`: where paths start. `where` begins each error: the file and the table.

    Raises ValueError.
    """
    _check_keys(table, _KEYS, where)
    location = table.get("object")
    if not isinstance(location, str) or not location:
        raise ValueError(f'{where}object must be the model, as in object = "model.py:Name"')
    toml_file, _, prefix = where.partition(": ")
    source = f"{toml_file}: [{prefix}parameters]"
    parameters = {
        name: Parameter(value, source, str(folder))
        for name, value in _table(table, "parameters", where).items()
    }
    for name, file in _table(table, "parameter_files", where).items():
        if name in parameters:
            raise ValueError(f"{where}parameter_files.{name}: parameters has it as well; remove one of them")
        if not isinstance(file, str):
            raise ValueError(f"{where}parameter_files.{name}: {file!r:.80} must be the path of a file")
        parameters[name] = read_parameter(folder / file, f"{toml_file}: [{prefix}parameter_files]")
    return DeclaredModel(
        _located(location, folder),
        folder,
        parameters,
        read_settings_of(_table(table, "settings", where), f"{where}settings."),
        _checked(table, "replicas", Replicas, where),
        _device(table, where),
        source,
    )


_KEYS: Final = ("object", "parameters", "parameter_files", "settings", "replicas", "device")


def read_settings_of(values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Settings of a model as text, checked one by one. `where` begins each error. Raises ValueError."""
    _check_keys(values, ModelSettings.names(), where, "setting")
    texts = {}
    for name, value in values.items():
        try:
            texts[name] = ModelSettings.from_mapping({name: value}).as_text()[name]
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    return texts


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > PARAMETER_BYTES_MAX:
            raise ValueError(f"{path} has more than {PARAMETER_BYTES_MAX} bytes")
        return read_text(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _located(location: str, folder: Path) -> str:
    """A location whose path, if it has one, starts at this folder. One without a file may be on a hub."""
    if prefix := format_of(location):
        path = folder / location.removeprefix(prefix)
        return f"{prefix}{path}" if prefix == "onnx:" or path.exists() else location
    source, colon, name = location.rpartition(":")
    return f"{folder / source}{colon}{name}" if source.endswith(".py") else location


def _device(table: Mapping[str, Any], where: str) -> str | None:
    value = table.get("device")
    joined = ",".join(map(str, value)) if isinstance(value, list) else value
    device: str | None = _checked({**table, "device": joined}, "device", Devices, where)
    return device


def _checked(table: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    """The value of a key, checked as that of the flag of this name is. None if there is none."""
    if table.get(key) is None:
        return None
    try:
        return TypeAdapter(kind).validate_python(table[key])
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
        raise ValueError(f"{where}{key} is {table[key]!r:.80}: {message}") from None


def _table(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ValueError(f"{where}{key} is {found!r:.80}: it must be a table, as in [{key}]")
    return found


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str, what: str = "key") -> None:
    for key in table:
        if key not in known:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(known)}"
            raise ValueError(f"{where}{key}: unknown {what}; {hint}")
