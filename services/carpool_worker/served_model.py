"""A model as a machine serves it: from what is declared of it, and the options of a command line.

Why: docs/decisions/0095.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from carpool.settings import ModelOptions
from carpool_worker.devices import devices
from carpool_worker.model_file import DeclaredModel, read_parameter, read_settings_of, read_toml
from carpool_worker.model_process.configuration import Configuration, Parameter

NAMED_FILE: Final = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a worker serves.

    `devices`: of each of its model processes. `spec` and `options` are for another command: as MODEL and the
    flags for it, they name this model alone.
    """

    name: str
    location: str
    configuration: Configuration
    devices: Sequence[str]
    spec: str
    options: ModelOptions


def served_model(
    name: str,
    entry: DeclaredModel,
    options: ModelOptions,
    *,
    spec: str = "",
    replicas: int | Literal["auto"] | None = None,
    device: str | None = None,
) -> ServedModel:
    """A model that is declared, with what the options of this model alone say of it. Raises ValueError."""
    of_flags = _settings(options)
    configuration = Configuration(
        parameters={**entry.parameters, **_parameters(options)},
        settings={**entry.settings, **of_flags},
        folder=entry.folder,
        parameters_in=entry.parameters_in,
        version=entry.version,
        declared=entry.declared,
        settings_from={**dict.fromkeys(entry.settings, "file"), **dict.fromkeys(of_flags, "--set")},
    )
    return ServedModel(
        name=name,
        location=entry.location,
        configuration=configuration,
        devices=devices(device or entry.device or "auto", replicas or entry.replicas or 1),
        spec=spec,
        options=options,
    )


def _parameters(options: ModelOptions) -> dict[str, Parameter]:
    """What one model is given. Raises ValueError."""
    folder, found = str(Path.cwd()), dict[str, Parameter]()
    given = [_pair(word, lambda text: Parameter(text, "--param", folder)) for word in options.param]
    for word in options.param_file:
        given += _of_file(word, folder)
    for name, parameter in given:
        if name in found:
            raise ValueError(
                f"the parameter {name} is given twice, by {found[name].source} and {parameter.source}"
            )
        found[name] = parameter
    return found


def _pair(word: str, make: Callable[[str], Parameter]) -> tuple[str, Parameter]:
    name, _, value = word.partition("=")
    return name, make(value)


def _of_file(word: str, folder: str) -> Iterable[tuple[str, Parameter]]:
    """The parameters of [NAME=]FILE."""
    source = f"--param-file {word}"
    if NAMED_FILE.fullmatch(word):
        return [_pair(word, lambda file: read_parameter(Path(file), source))]
    path = Path(word)
    own = str(path.resolve().parent)
    return [(name, Parameter(value, source, own, is_secret=True)) for name, value in read_toml(path).items()]


def _settings(options: ModelOptions) -> dict[str, str]:
    pairs = [word.partition("=")[::2] for word in options.set]
    return read_settings_of(dict(pairs), "--set ")
