"""The licences of all packages that the locks pin, from their metadata, and which of them are shipped.

cd tests && python -m support.licences      # writes docs/licences.md

A package for another system or Python is not installed here: its row stays as it is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs/licences.md"
LOCK: Final = ROOT / "requirements.lock"
RUNTIME_LOCK: Final = ROOT / "ops/docker/runtime.lock"
LOCKS: Final = (LOCK, RUNTIME_LOCK, ROOT / "tests/tools.lock")
DEVELOPMENT: Final = ("dev", "docs", "pages", "tools")  # extras that are for working on Carpool
UNKNOWN: Final = "unknown"
PINNED: Final = r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?=="  # a package, perhaps with extras, in a lock
HEAD: Final = """\
# Licences

Carpool is under Apache-2.0. Its wheel and sdist contain no other package. They need, and its images contain,
the packages below, under the licences that their metadata name. The extra `transformers` is in no lock, and
not here. Written by `python -m support.licences` in `tests/`.

| package | licence | where |
|---|---|---|
"""
# As SPDX names what metadata say in other words.
_NAMES: Final = {
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "The MIT License": "MIT",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_CLASSIFIER: Final = "License :: OSI Approved :: "


def normal(name: str) -> str:
    """A package's name as locks have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> list[str]:
    """The names of the packages that a lock pins, in its order, each once."""
    return list(dict.fromkeys(re.findall(PINNED, lock.read_text(encoding="utf-8"), re.MULTILINE)))


def licence_of(package: Distribution) -> str:
    """The licence that a package's metadata name, as SPDX has it; UNKNOWN if there is none."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classified = [
        each.removeprefix(_CLASSIFIER)
        for each in metadata.get_all("Classifier", [])
        if each.startswith(_CLASSIFIER)
    ]
    text = metadata["License"].strip().partition("\n")[0] if "License" in metadata else ""
    found = classified or ([text] if text else [])
    return " AND ".join(dict.fromkeys(_NAMES.get(each, each) for each in found)) or UNKNOWN


def needed(requirements: Iterable[str], extras: Iterable[str] = ()) -> set[str]:
    """The installed packages that these requirements need here, themselves included."""
    found: set[str] = set()
    waiting = [(text, frozenset(extras)) for text in requirements]
    while waiting:
        text, of = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": one}) for one in of or {""}):
            continue
        name = normal(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            found.discard(name)
            continue
        waiting += [(one, frozenset(requirement.extras)) for one in requires]
    return found


def places() -> dict[str, str]:
    """Where each package is that is not only for development: always, with extras, in images."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = {}
    for name in needed(project["dependencies"]):
        found[name] = ["always"]
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in DEVELOPMENT:
            for name in needed(requirements):
                if found.get(name) != ["always"]:
                    found.setdefault(name, []).append(f"`{extra}`")
    in_images = set(locked(RUNTIME_LOCK))
    return {
        name: ", ".join([*where, *(["images"] if name in in_images else [])]) for name, where in found.items()
    }


def rows_in(document: str) -> dict[str, tuple[str, str]]:
    """The rows of docs/licences.md: of each package its licence, and where it is."""
    return {
        name: (licence, where)
        for name, licence, where in re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \|$", document, re.M)
    }


def document() -> str:
    """The text of docs/licences.md."""
    before = rows_in(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT.exists() else {}
    return HEAD + "".join(f"| `{name}` | {licence} | {where} |\n" for name, licence, where in _rows(before))


def _rows(before: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    where = places()
    for name in sorted({name for lock in LOCKS for name in locked(lock)}):
        try:
            licence = licence_of(distribution(name))
        except PackageNotFoundError:
            licence, place = before.get(name, (UNKNOWN, "other systems"))
            yield name, licence, place
            continue
        if licence == UNKNOWN:
            licence = before.get(name, (UNKNOWN, ""))[0]
        yield name, licence, where.get(name, "development")


def main() -> None:
    """Write docs/licences.md."""
    text = document()
    DOCUMENT.write_text(text, encoding="utf-8")
    for name, (licence, _) in rows_in(text).items():
        if licence == UNKNOWN:
            print(f"{name}: its metadata name no licence; write it into {DOCUMENT.name}")


if __name__ == "__main__":
    main()
