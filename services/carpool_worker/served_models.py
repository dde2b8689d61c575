"""From the words of a command line, and files of models, to the models that a machine serves.

Everything that serves or tries out a model resolves it here: `carpool worker`, `up` and `check`. A setting or
parameter that a command line gives replaces that of a file, and a setting of a file that of the model.

Why: docs/decisions/0095.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from carpool.keys import MODEL_NAME
from carpool.settings import NO_OPTIONS, ModelOptions
from carpool_worker.model_file import SUFFIX, DeclaredModel, read_model_file
from carpool_worker.model_process.loader import model_name
from carpool_worker.repository.layout import PREFIX
from carpool_worker.served_model import NAMED_FILE, ServedModel, served_model

__all__ = ["ServedModel", "served_model", "served_models"]

_OPTION_OF: Final[Mapping[str, str]] = {name: f"--{name.replace('_', '-')}" for name in ModelOptions._fields}


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


# --- names -------------------------------------------------------------------------------------------------


def _named(spec: str) -> Iterator[_Named]:
    """The models that one word names: FILE.toml has several, FILE.toml:NAME is one, and so is
    repository:DIR/NAME, or a version of it."""
    name, equals, location = spec.partition("=")
    if not (equals and MODEL_NAME.fullmatch(name)):
        name, location = "", spec
    if location.startswith(PREFIX):
        from carpool_worker.repository.repository import addressed  # noqa: PLC0415 (others need none of it)

        of_entry, declared = addressed(location)
        yield _Named(name or of_entry, f"{name or of_entry}={location}", declared)
        return
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
    match = NAMED_FILE.fullmatch(word)
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
