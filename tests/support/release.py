"""A release: wheel and sdist, checked where there is no checkout, and a list of what they need (SBOM).

cd tests && python -m support.release ../dist     # what `make release` does

    build() --> wheel, sdist --> check_metadata()   twine, and README.md as its readers see it
                                 check_sdist()      a wheel made from the sdist has the same files
                                 Environment        has the locked packages and the wheel, and nothing else
                                   check_runs()     `carpool up square`, a request, `carpool demo`
                                   write_sbom()     what is installed there

What is built is the same each time: neither the wheel nor the SBOM has a time in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from carpool_cli.local.embedded import free_port
from support.licences import LOCK, PINNED, needed, normal
from support.waiting import wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
TOOLS: Final = ROOT / "build/release-tools/bin"
EXTRAS: Final = ("console", "embedded", "gateway", "grpc", "onnx", "otel", "plot", "uvloop", "voice")
STARTS_S: Final = 60.0
DEMO_S: Final = 300.0


class ReleaseError(Exception):
    """A step failed. The message says which, and shows its output."""


class Built(NamedTuple):
    """The files of a release."""

    wheel: Path
    sdist: Path


def version() -> str:
    """The version of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def run(
    command: Sequence[str | Path],
    *,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Run a command, and return what it printed. Raises ReleaseError if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise ReleaseError(f"{shown}: exited with {done.returncode}\n{done.stdout}")
    return done.stdout


def build(folder: Path, source: Path = ROOT, targets: Sequence[str] = ("wheel", "sdist")) -> Built:
    """Build wheel and sdist of a source tree into a folder, without a network."""
    flags = [flag for target in targets for flag in ("--target", target)]
    run([sys.executable, "-m", "hatchling", "build", "--directory", folder.resolve(), *flags], folder=source)
    wheels, sdists = list(folder.glob("carpool-*.whl")), list(folder.glob("carpool-*.tar.gz"))
    if len(wheels) != 1 or len(sdists) > 1:
        raise ReleaseError(f"{folder} has files of several versions: remove it, and build again")
    return Built(wheels[0], sdists[0] if sdists else Path())


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel with their checksums (CRC-32)."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def check_metadata(built: Built) -> None:
    """What a package index would refuse, and whether README.md can be shown."""
    run([TOOLS / "twine", "check", "--strict", built.wheel, built.sdist])


def check_sdist(built: Built) -> None:
    """A wheel that is built from the sdist alone has the same files."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(built.sdist, folder, filter="data")
        (source,) = Path(folder).iterdir()
        again = build(Path(folder) / "dist", source, targets=["wheel"])
        if contents(again.wheel) != contents(built.wheel):
            differing = contents(again.wheel).items() ^ contents(built.wheel).items()
            raise ReleaseError(f"the wheel of the sdist differs in {sorted({name for name, _ in differing})}")


def locked_lines(names: set[str]) -> str:
    """The parts of requirements.lock that pin these packages, with their hashes."""
    parts = re.split(r"^(?=[A-Za-z0-9])", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pinned = {found[1]: part for part in parts if (found := re.match(PINNED, part))}
    return "".join(pinned[name] for name in sorted(names))


class Environment:
    """A new environment with the wheel: with the locked packages (`install_locked`), or beside them."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin/python"
        self.carpool = folder / "bin/carpool"
        self.home = folder / "home"
        self.home.mkdir()

    def install_locked(self, extras: Sequence[str] = EXTRAS) -> None:
        """Install what Carpool needs with these extras, as requirements.lock pins it, by hash."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = [one for extra in extras for one in project["optional-dependencies"][extra]]
        lock = self.folder / "locked.txt"
        lock.write_text(locked_lines(needed([*project["dependencies"], *optional])), encoding="utf-8")
        self._pip("--require-hashes", "--requirement", lock)

    def borrow(self) -> None:
        """Use the packages of the environment that runs this, without Carpool, which is editable there: files
        with paths to other folders count in an environment's own folder only."""
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (theirs,) = self.folder.glob("lib/python3*/site-packages")
        (theirs / "borrowed.pth").write_text(f"{ours}\n", encoding="utf-8")

    def install(self, wheel: Path) -> None:
        """Install a wheel, and nothing that it needs."""
        self._pip("--no-deps", "--no-index", wheel)

    def _pip(self, *arguments: str | Path) -> None:
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--no-compile",
            "--quiet",
        ]
        run([*pip, "--disable-pip-version-check", "--no-input", *arguments])

    @property
    def variables(self) -> dict[str, str]:
        """What commands find in their environment: nothing of this checkout."""
        search = f"{self.folder}/bin:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": search, "HOME": str(self.home), "LANG": "C.UTF-8"}

    def run(self, *command: str | Path, timeout_s: float = STARTS_S) -> str:
        """Run a command there. Raises ReleaseError."""
        return run(command, folder=self.home, environment=self.variables, timeout_s=timeout_s)


def check_runs(environment: Environment, *, demo: bool) -> None:
    """`carpool up square` answers over HTTP, and `carpool demo` finds no problem. Raises ReleaseError."""
    shown = environment.run(environment.carpool, "version").strip()
    if shown != f"carpool {version()}":
        raise ReleaseError(f"`carpool version` printed {shown!r}, and pyproject.toml has {version()}")
    port = free_port()
    log = environment.home / "up.log"
    with log.open("wb") as output:
        stack = subprocess.Popen(
            [environment.carpool, "up", "square", "--redis-port", "0", "--gateway-port", str(port)],
            cwd=environment.home,
            env=environment.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_answer(port, stack, log)
        finally:
            stack.terminate()
            status = stack.wait(STARTS_S)
    if status:
        raise ReleaseError(f"carpool up exited with {status}\n{log.read_text(encoding='utf-8')}")
    if demo:
        environment.run(environment.carpool, "demo", "--queries", "500", timeout_s=DEMO_S)


def _wait_for_answer(port: int, stack: subprocess.Popen[bytes], log: Path) -> None:
    url = f"http://127.0.0.1:{port}/carpool/v1/models/square/infer"

    def is_answered() -> bool:
        if stack.poll() is not None:
            raise ReleaseError(f"carpool up ended\n{log.read_text(encoding='utf-8')}")
        try:
            with urllib.request.urlopen(url, data=b"7", timeout=STARTS_S) as reply:
                return bool(reply.read() == b"49")
        except OSError:
            return False

    wait_until(is_answered, description="carpool up serves square", timeout_s=STARTS_S)


def write_sbom(environment: Environment, path: Path) -> int:
    """Write what is installed there as CycloneDX in JSON; return how many packages that are."""
    document: Any = json.loads(
        run(
            [
                *(TOOLS / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON"),
                *("--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", environment.python),
            ]
        )
    )
    names = {normal(each["name"]) for each in document["components"]}
    if lacking := needed(["redis", "numpy"]) - names:
        raise ReleaseError(f"the list of packages lacks {', '.join(sorted(lacking))}")
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return len(names)


def main() -> None:
    """Make the release in the folder that is named."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        print("[1/4] Building")
        built = build(folder)
        check_metadata(built)
        check_sdist(built)
        with tempfile.TemporaryDirectory(prefix="carpool-release-") as home:
            print("[2/4] Installing it with the locked packages")
            environment = Environment(Path(home) / "venv")
            environment.install_locked()
            environment.install(built.wheel)
            run([sys.executable, "-m", "pip", "--python", environment.python, "check"])
            print("[3/4] Running it")
            check_runs(environment, demo=True)
            print("[4/4] Listing what it needs")
            sbom = folder / f"carpool-{version()}.cdx.json"
            number = write_sbom(environment, sbom)
        shutil.copy(ROOT / "docs/licences.md", folder / f"carpool-{version()}-licences.md")
    except ReleaseError as error:
        sys.exit(f"make release: {error}")
    print(f"{os.path.relpath(folder, ROOT)}: wheel, sdist, SBOM of {number} packages, licences")


if __name__ == "__main__":
    main()
