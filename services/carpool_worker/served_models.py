"""From the words of a command line, and files of models, to the models that a machine serves.

Everything that serves or tries out a model resolves it here: `carpool worker`, `up` and `check`. A setting or
parameter that a command line gives replaces that of a file, and a setting of a file that of the model.

Why: docs/decisions/0095.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from carpool.keys import MODEL_NAME
from carpool.settings import NO_OPTIONS, ModelOptions
from carpool_worker.devices import devices
from carpool_worker.model_file import (
    SUFFIX,
    DeclaredModel,
    read_model_file,
    read_parameter,
    read_settings_of,
    read_toml,
)
from carpool_worker.model_process.configuration import Configuration, Parameter
from carpool_worker.model_process.loader import model_name

_NAMED_FILE: Final = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)
_OPTION_OF: Final[Mapping[str, str]] = {name: f"--{name.replace('_', '-')}" for name in ModelOptions._fields}


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


class _Named(NamedTuple):
    """A model that is to be served: its name, as it was written for this model alone, and what it is."""

    name: str
    spec: str
    entry: DeclaredModel


def served_models(
    specs: Sequence[str],
    options: ModelOptions = NO_OPTIONS,
    *,
    replicas: int | Literal["auto"] | None = None,
    device: str | None = None,
) -> list[ServedModel]:
    """The models that these words name, with what `options` say of them.

    `replicas` and `device` replace what a file declares; None for what it declares, or else one process on
    the devices of `auto`. Raises ValueError, for example for two models of one name. Nothing of a user's code
    is imported: the parameters are checked in the model process.
    """
    named = [one for spec in specs for one in _named(spec)]
    names = [one.name for one in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two models are named {name}; write NAME=MODEL to rename one")
    divided = _divide(options, names)
    return [
        served_model(name, entry, divided[name], spec=spec, replicas=replicas, device=device)
        for name, spec, entry in named
    ]


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


# --- names -------------------------------------------------------------------------------------------------


def _named(spec: str) -> Iterator[_Named]:
    """The models that one word names: FILE.toml has several, FILE.toml:NAME is one."""
    name, equals, location = spec.partition("=")
    if not (equals and MODEL_NAME.fullmatch(name)):
        name, location = "", spec
    file, colon, key = location.rpartition(":")
    if location.endswith(SUFFIX):
        file, key = location, ""
    elif not (colon and file.endswith(SUFFIX)):
        served_as, location = model_name(spec)
        yield _Named(served_as, spec, DeclaredModel(location))
        return
    entries = read_model_file(Path(file))
    if key and key not in entries:
        raise ValueError(f"{file} has no model {key!r}; it has {', '.join(entries)}")
    chosen = {key: entries[key]} if key else entries
    if name and len(chosen) > 1:
        raise ValueError(
            f"{file} has several models: write {name}={file}:MODEL with one of {', '.join(chosen)}"
        )
    for of_file, entry in chosen.items():
        served_as = name or of_file
        if not MODEL_NAME.fullmatch(served_as):
            raise ValueError(f"{file}: {served_as!r} is no valid name of a model; write NAME={file}")
        yield _Named(served_as, f"{served_as}={file}:{of_file}", entry)


# --- options -----------------------------------------------------------------------------------------------


def _divide(options: ModelOptions, names: Sequence[str]) -> dict[str, ModelOptions]:
    """The options of each model, without its name in front of them. Raises ValueError."""
    of_each: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for kind, words in options._asdict().items():
        split = _whole_or_named_file if kind == "param_file" else _named_value
        for word in words:
            model, rest = split(word, names, _OPTION_OF[kind])
            of_each[model].setdefault(kind, []).append(rest)
    return {name: ModelOptions(**own) for name, own in of_each.items()}


def _named_value(word: str, names: Sequence[str], flag: str) -> tuple[str, str]:
    """The model that [MODEL.]NAME=VALUE is for, and NAME=VALUE."""
    key, equals, value = word.partition("=")
    model, _, name = key.rpartition(".")
    if not (equals and name):
        raise ValueError(f"{flag}: {word!r:.60} is not NAME=VALUE")
    return _model_of(model, names, f"{flag} {key:.60}", name), f"{name}={value}"


def _whole_or_named_file(word: str, names: Sequence[str], flag: str) -> tuple[str, str]:
    """The model that a file is for, and [NAME=]FILE. Of several models MODEL=FILE is for all of one."""
    match = _NAMED_FILE.fullmatch(word)
    if match is None:
        return _model_of("", names, f"{flag} {word:.60}", ""), word
    key, file = match.groups()
    if len(names) > 1 and key in names:
        return key, file
    return _named_value(f"{key}={file}", names, flag)


def _model_of(model: str, names: Sequence[str], where: str, name: str) -> str:
    if model in names:
        return model
    if model:
        raise ValueError(f"{where}: there is no model {model!r}; there are {', '.join(names)}")
    if len(names) > 1:
        dot = f".{name}" if name else "=FILE"
        examples = " or ".join(f"{one}{dot}" for one in names[:2])
        raise ValueError(f"{where}: there are several models; say which one: {examples}")
    return names[0]


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
    if _NAMED_FILE.fullmatch(word):
        return [_pair(word, lambda file: read_parameter(Path(file), source))]
    path = Path(word)
    own = str(path.resolve().parent)
    return [(name, Parameter(value, source, own, is_secret=True)) for name, value in read_toml(path).items()]


def _settings(options: ModelOptions) -> dict[str, str]:
    pairs = [word.partition("=")[::2] for word in options.set]
    return read_settings_of(dict(pairs), "--set ")
