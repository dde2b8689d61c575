"""A repository: a folder of models by their names, each in versions, and what a worker serves for one.

Everything is read again with each call: an entry may come, change and go while a process uses it.

Why: docs/decisions/0110.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from carpool.keys import MODEL_NAME
from carpool.settings import ModelOptions
from carpool_worker.model_file import DEFAULT_FILE, DeclaredModel
from carpool_worker.model_process.configuration import Parameter
from carpool_worker.repository.layout import (
    CONFIG_FILE,
    PREFIX,
    VERSION,
    check_inside,
    folders,
    is_entry,
    problems_of_names,
    version_folders,
)
from carpool_worker.repository.of_triton import available_versions, declared_by_config, is_of_triton
from carpool_worker.repository.own import declared_by_toml
from carpool_worker.served_model import ServedModel, served_model
from carpool_worker.triton.translation import ConfigError


class Repository:
    """The models of a folder. Raises ValueError for a folder that is none.

    Names from outside are only compared with those of entries: no path is made of anything else.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is no folder: name that of a repository, which has a folder per model"
            )
        self.folder = folder

    def names(self) -> list[str]:
        """The names of all entries, sorted. What is no entry, or has no valid name, is left out."""
        return [
            path.name for path in folders(self.folder) if MODEL_NAME.fullmatch(path.name) and is_entry(path)
        ]

    def listing(self) -> dict[str, list[str]]:
        """The versions of all entries that can be read, as of `names` and `versions`, in one pass."""
        found = {}
        for path in folders(self.folder):
            if MODEL_NAME.fullmatch(path.name) and is_entry(path):
                with suppress(ValueError):
                    check_inside(path, self.folder, f"{path}")
                    found[path.name] = _versions(path)
        return found

    def versions(self, name: str) -> list[str]:
        """The versions of a model that may be served, in ascending order. Raises ValueError, also for a name
        that is none of an entry."""
        return _versions(self._entry(name))

    def served_model(
        self,
        name: str,
        version: str | None,
        parameters: Mapping[str, str],
        *,
        as_name: str | None = None,
    ) -> ServedModel:
        """What a worker serves for a version of a model; None for the newest one.

        `parameters`: as those of `--param`; they replace what the entry declares. They may be of somebody far
        away, so a path must be in the repository. `as_name`: the name under which it is served. Raises
        ValueError.
        """
        declared, served_as = self.declared(name, version), name if as_name is None else as_name
        if not MODEL_NAME.fullmatch(served_as):
            raise ValueError(f"{served_as!r:.140} is no valid name of a model")
        folder = str(self.folder / name / declared.version)
        within = str(self.folder.resolve())
        given = {key: Parameter(value, "--param", folder, within=within) for key, value in parameters.items()}
        declared = declared._replace(parameters={**declared.parameters, **given})
        spec = f"{served_as}={PREFIX}{self.folder / name / declared.version}"
        served = served_model(served_as, declared, ModelOptions(), spec=spec)
        return replace(served, options=ModelOptions([f"{key}={value}" for key, value in parameters.items()]))

    def declared(self, name: str, version: str | None = None) -> DeclaredModel:
        """A version of a model as it is declared; None for the newest one. Raises ValueError."""
        entry, versions = self._entry(name), self.versions(name)
        if not versions:
            raise ValueError(f"{entry} has no version: put the files of the model into {entry / '1'}")
        if version is not None and version not in versions:
            raise ValueError(
                f"{name} has no version {version!r:.40} in {self.folder}; it has {_list(versions)}"
            )
        folder = entry / (version or versions[-1])
        check_inside(folder, entry, f"{folder}")
        read = declared_by_config if is_of_triton(entry, folder) else declared_by_toml
        return read(entry, folder)._replace(version=folder.name)

    def problems(self) -> dict[str, list[str]]:
        """All that is wrong with the entries, by their names, a sentence each. Nothing is loaded."""
        found = {}
        for folder in folders(self.folder):
            if is_entry(folder) and (sentences := self._problems_of(folder)):
                found[folder.name] = sentences
        return found

    def _problems_of(self, entry: Path) -> list[str]:
        sentences: list[str] = []
        try:
            sentences += problems_of_names(entry)
            if not MODEL_NAME.fullmatch(entry.name):
                return sentences
            versions: list[str | None] = [*self.versions(entry.name)]
        except ValueError as error:
            return [*sentences, str(error)]
        for version in versions or [None]:
            try:
                self.declared(entry.name, version)
            except ConfigError as error:
                sentences += [problem for problem in error.problems if problem not in sentences]
            except ValueError as error:
                if str(error) not in sentences:
                    sentences.append(str(error))
        return sentences

    def _entry(self, name: str) -> Path:
        entry = next((path for path in folders(self.folder) if path.name == name), None)
        if entry is None or not MODEL_NAME.fullmatch(name) or not is_entry(entry):
            raise ValueError(
                f"there is no model {name!r:.140} in {self.folder}; there are {_list(self.names())}"
            )
        check_inside(entry, self.folder, f"{entry}")
        return entry


def _versions(entry: Path) -> list[str]:
    """Those of an entry that may be served. Raises ValueError."""
    if (entry / CONFIG_FILE).is_file() and (entry / DEFAULT_FILE).is_file():
        raise ValueError(f"{entry} has {DEFAULT_FILE} and {CONFIG_FILE}: remove one of them")
    versions = [path.name for path in version_folders(entry)]
    return available_versions(entry, versions) if (entry / CONFIG_FILE).is_file() else versions


class Addressed(NamedTuple):
    """A version of an entry that a location names: the name of the entry, and what is declared."""

    name: str
    declared: DeclaredModel


def addressed(location: str) -> Addressed:
    """The entry that `repository:DIR/NAME` or `repository:DIR/NAME/VERSION` names. Raises ValueError."""
    path, version = Path(location.removeprefix(PREFIX)), None
    if VERSION.fullmatch(path.name) and not (path.is_dir() and is_entry(path)):
        path, version = path.parent, path.name
    if not path.name:
        raise ValueError(f"{location}: write {PREFIX}DIR/NAME, or {PREFIX}DIR/NAME/VERSION")
    return Addressed(path.name, Repository(path.parent).declared(path.name, version))


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"
