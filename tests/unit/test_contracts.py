"""The contracts in pyproject.toml, which lint-imports checks, have a place for every package and module."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ("shared", "services")
CONFIGURATION: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMPORT_LINTER: Final[dict[str, Any]] = CONFIGURATION["tool"]["importlinter"]
CONTRACTS: Final[list[dict[str, Any]]] = IMPORT_LINTER["contracts"]
LAYERS: Final = [contract for contract in CONTRACTS if contract["type"] == "layers"]
EXHAUSTIVE: Final = [contract for contract in LAYERS if contract.get("exhaustive")]

# Each contract beside the exhaustive ones has a line here that it forbids.
FORBIDDEN_IMPORTS: Final = (
    ("carpool.wire", "carpool_cli"),
    ("carpool_batcher", "carpool_worker.worker"),
    ("carpool_batcher", "numpy"),
    ("carpool_batcher.core", "time"),
    ("carpool_batcher.core", "carpool.clock"),
    ("carpool_batcher.core", "carpool_batcher.meter"),
    ("carpool_worker.model_process", "redis"),
    ("carpool_worker.model_process", "carpool_worker.replica_loop"),
    ("carpool_worker.model_process", "carpool.health_server"),
    ("carpool_worker", "carpool_worker.model_process.executor"),
    ("carpool.store", "hiredis"),
    ("carpool_worker", "prometheus_client"),
    ("carpool_worker", "rich"),
    ("carpool_gateway.oip", "carpool.client"),
    ("carpool_cli.demo", "onnxruntime"),
    ("carpool_cli", "importlib"),
    ("carpool_cli", "starlette"),
)


def python_packages() -> dict[str, set[str]]:
    """The name of each folder with modules or packages, and theirs."""
    packages: dict[str, set[str]] = {}
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            *parents, module = path.relative_to(ROOT / source).with_suffix("").parts
            children = packages.setdefault(".".join(parents), set())
            if module != "__init__":
                children.add(module)
            elif parents[:-1]:
                packages.setdefault(".".join(parents[:-1]), set()).add(parents[-1])
    return {package: children for package, children in packages.items() if children}


def layered(contract: dict[str, Any]) -> set[str]:
    return set(re.findall(r"[\w.]+", " ".join(contract["layers"])))


def copy_sources(to: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", to)
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            copied = to / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def add_module(to: Path, package: str, imported: Iterable[str]) -> None:
    """A module `unplaced` of this package, in a copy."""
    folders = [to / source / package.replace(".", "/") for source in SOURCES]
    (folder,) = [folder for folder in folders if folder.is_dir()]
    text = "".join(f"import {module}\n" for module in imported)
    (folder / "unplaced.py").write_text(text, encoding="utf-8")


def lint_imports(folder: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    path = os.pathsep.join(str(folder / source) for source in SOURCES)
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "300"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout + done.stderr


def test_every_package_has_a_contract_in_which_every_module_has_a_place() -> None:
    containers = [container for contract in EXHAUSTIVE for container in contract["containers"]]
    assert sorted(containers) == sorted(python_packages())


def test_no_module_is_excepted() -> None:
    assert not [contract["name"] for contract in EXHAUSTIVE if "exhaustive_ignores" in contract]


def test_contracts_see_every_folder_with_python_files() -> None:
    folders = {
        ROOT / source / package.replace(".", "/") for source in SOURCES for package in python_packages()
    }
    assert not [path for path in folders if path.is_dir() and not (path / "__init__.py").is_file()]
    top = {package.partition(".")[0] for package in python_packages()}
    assert set(IMPORT_LINTER["root_packages"]) == top
    assert [contract["name"] for contract in LAYERS if layered(contract) == top]


def test_new_modules_and_what_they_import_are_refused_by_name(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    for package in python_packages():
        add_module(
            tmp_path, package, [imported for module, imported in FORBIDDEN_IMPORTS if module == package]
        )
    report = lint_imports(tmp_path)
    without_place = re.findall(r"^- (\S+)\.unplaced$", report, re.MULTILINE)
    assert sorted(without_place) == sorted(python_packages()), report
    for package, imported in FORBIDDEN_IMPORTS:
        assert f"{package}.unplaced -> {imported} (" in report, report
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in report, report  # so each of them can fail
