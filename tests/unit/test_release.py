"""What a release consists of: its version, in each place that has it; the files of wheel and sdist; licences.

Why: docs/decisions/0122.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

import pytest

from support import licences, release

ROOT: Final = Path(__file__).parents[2]
VERSION: Final = release.version()
PACKAGES: Final = (
    "shared/carpool",
    *(f"services/{path.name}" for path in sorted((ROOT / "services").glob("carpool_*"))),
)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# --- the version: pyproject.toml has it, and these repeat it because they cannot read it -------------------


def versions(path: str, pattern: str) -> Iterator[tuple[str, str]]:
    found = re.findall(pattern, read(path), re.MULTILINE)
    assert found, f"{path} has nothing like {pattern}"
    yield from ((path, each) for each in found)


def test_the_version_is_the_same_everywhere() -> None:
    tag = r"carpool-(?:batcher|worker|gateway|console|tools):([\w.]+)"
    places = [
        *versions("ops/helm/carpool/Chart.yaml", r"^(?:version|appVersion): \"?([^\"\n]+)"),
        *versions("docker-compose.yml", tag),
        *versions("ops/docker/Dockerfile", r"image\.version=\"([^\"]+)\""),
        *versions("docs/operating.md", tag),
        *versions("docs/kubernetes.md", tag),
        *versions("docs/upgrading.md", r"carpool-([\d.]+)-py3-none-any\.whl"),
        *versions("CHANGELOG.md", r"\A(?:.*\n)*?## (\d[\w.]*)"),
    ]
    for name in ("onnx", "shout", "torch"):
        places += versions(f"ops/docker/examples/{name}/Dockerfile", tag)
    differing = [f"{path} has {found}" for path, found in places if found != VERSION]
    assert not differing, f"pyproject.toml has {VERSION}, but {'; '.join(differing)}"
    assert installed_version("carpool") == VERSION, "run make install again"


def test_each_image_of_the_project_has_the_version_as_its_tag() -> None:
    images = set(re.findall(r"image: (\$\{CARPOOL_.*\})", read("docker-compose.yml")))
    assert len(images) >= 4
    for image in images:
        assert re.fullmatch(rf"\$\{{CARPOOL_\w+_IMAGE:-carpool-\w+:{re.escape(VERSION)}\}}", image), image
    targets = set(re.findall(r"^FROM .* AS (\w+)$", read("ops/docker/Dockerfile"), re.MULTILINE)) - {"build"}
    assert {re.split("[-:]", image)[-2] for image in images} == targets


# --- wheel and sdist ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> release.Built:
    return release.build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: release.Built) -> None:
    expected = {
        path.relative_to((ROOT / package).parent).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"carpool/py.typed", "carpool_testing/py.typed", "carpool_cli/demo/writer_weights.npz"} < expected
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = f"carpool-{VERSION}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert names == expected
    assert "carpool = carpool_cli.__main__:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    assert read("README.md").strip() in metadata


def test_the_sdist_can_be_built_and_read_and_has_no_tests(built: release.Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "docs/operating.md",
        "docs/licences.md",
    } < names
    assert {"ops/docker/Dockerfile", "ops/helm/carpool/files/alerts.yml", "requirements.lock"} < names
    assert not [name for name in names if name.startswith(("tests/", "ops/bench", ".ci", "build", "dist"))]


def test_a_wheel_is_the_same_each_time(built: release.Built, tmp_path: Path) -> None:
    again = release.build(tmp_path, targets=["wheel"])
    assert again.wheel.read_bytes() == built.wheel.read_bytes()


def test_a_folder_with_another_version_is_refused(built: release.Built, tmp_path: Path) -> None:
    (tmp_path / "carpool-0.0.1-py3-none-any.whl").touch()
    with pytest.raises(release.ReleaseError, match="files of several versions"):
        release.build(tmp_path, targets=["wheel"])


# --- licences ----------------------------------------------------------------------------------------------


def test_each_locked_package_has_its_licence_in_the_list() -> None:
    """Else: cd tests && python -m support.licences"""
    rows = licences.rows_in(read("docs/licences.md"))
    locked = {name for lock in licences.LOCKS for name in licences.locked(lock)}
    assert rows.keys() == locked, "see the docstring of this test"
    for name, (licence, _) in rows.items():
        assert licence != licences.UNKNOWN, name
        try:
            found = licences.licence_of(distribution(name))
        except PackageNotFoundError:  # for another system
            continue
        assert found in (licence, licences.UNKNOWN), f"{name}: see the docstring of this test"


def test_what_images_contain_is_in_the_list_as_such() -> None:
    rows = licences.rows_in(read("docs/licences.md"))
    in_images = {name for name, (_, where) in rows.items() if "images" in where}
    others = {name for name, (_, where) in rows.items() if where == "other systems"}
    assert in_images | others >= set(licences.locked(licences.RUNTIME_LOCK))
    assert {"redis", "numpy", "pydantic"} <= {
        name for name, (_, where) in rows.items() if where.startswith("always")
    }


def test_licences_are_read_from_metadata_of_any_age() -> None:
    class Package:
        def __init__(self, **fields: str) -> None:
            self.metadata = Metadata({name.replace("_", "-"): value for name, value in fields.items()})

    class Metadata(dict[str, str]):
        def get_all(self, name: str, default: Any) -> Any:
            return self[name].split(";") if name in self else default

    def licence(**fields: str) -> str:
        package: Any = Package(**fields)
        return licences.licence_of(package)

    assert licence(License_Expression="MIT", License="other") == "MIT"
    assert licence(Classifier="Topic :: X;License :: OSI Approved :: MIT License") == "MIT"
    assert licence(License="Apache License 2.0\nand its text") == "Apache-2.0"
    assert licence(Classifier="Topic :: X") == licences.UNKNOWN


# --- what is installed for the check -----------------------------------------------------------------------


def test_what_is_needed_is_pinned_by_hash() -> None:
    lines = release.locked_lines(
        licences.needed(["redis[hiredis]>=7", "opentelemetry-exporter-otlp-proto-http"])
    )
    names = re.findall(licences.PINNED, lines, re.MULTILINE)
    assert {"redis", "hiredis", "requests", "opentelemetry-exporter-http-transport"} <= set(names)
    assert "pytest" not in names
    assert all("--hash=sha256:" in part for part in re.split(r"^(?=\w)", lines, flags=re.MULTILINE)[1:])
