"""Which folders of a repository are entries and versions. Nothing outside of the repository is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from carpool.keys import MODEL_NAME
from carpool_worker.model_file import DEFAULT_FILE

PREFIX: Final = "repository:"  # of a location: repository:DIR/NAME or repository:DIR/NAME/VERSION
VERSION: Final = re.compile(r"[1-9]\d{0,17}", re.ASCII)  # as Triton reads it: a positive INT64
CONFIG_FILE: Final = "config.pbtxt"
TRITON_CLASS: Final = "TritonPythonModel"
_ALMOST_A_VERSION: Final = re.compile(r"\d+", re.ASCII)


def folders(folder: Path) -> list[Path]:
    """The folders in a folder by their names, without hidden ones and those of Python. Raises ValueError."""
    try:
        found = [path for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(path for path in found if not path.name.startswith((".", "__")))


def version_folders(entry: Path) -> list[Path]:
    """The folders of versions, the oldest first. Raises ValueError."""
    found = [path for path in folders(entry) if VERSION.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name))


def is_entry(folder: Path) -> bool:
    """Whether a folder is meant as an entry: it has a declaration or a version, or cannot be read."""
    try:
        return any((folder / file).is_file() for file in (DEFAULT_FILE, CONFIG_FILE)) or bool(
            version_folders(folder)
        )
    except (OSError, ValueError):
        return True


def check_inside(path: Path, folder: Path, what: str) -> None:
    """Raise ValueError if a path, or a link on it, leads out of this folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{what} leads out of {folder}: copy what it leads to into that folder")


def problems_of_names(entry: Path) -> Iterator[str]:
    """A sentence for each folder of an entry, and for itself, whose name keeps it from being served."""
    if not MODEL_NAME.fullmatch(entry.name):
        yield (
            f"{entry}: its name is no valid name of a model: rename it, with letters, digits and . _ - only, "
            "the first one a letter or a digit"
        )
    for folder in folders(entry):
        if _ALMOST_A_VERSION.fullmatch(folder.name) and not VERSION.fullmatch(folder.name):
            yield (
                f"{folder} is no version: rename it to a number from 1 on of at most 18 digits, without "
                "zeros in front"
            )
