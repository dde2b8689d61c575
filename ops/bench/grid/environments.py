"""The Python environment of each system, made under build/bench from pinned versions."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
BUILD: Final = ROOT / "build/bench"
_REQUIREMENTS: Final = HERE / "requirements"
_RUNTIME_LOCK: Final = ROOT / "ops/docker/runtime.lock"
_WRK_PACKAGES: Final = ("wrk", "libluajit-5.1-2", "libluajit-5.1-common")


class UnavailableError(Exception):
    """Something cannot be installed. The message is the reason, in one line."""


class Environments:
    """The environments for one interpreter. Each is made when it is first asked for, and kept."""

    def __init__(self, interpreter: str) -> None:
        """`interpreter` is a path or a name on PATH."""
        self.interpreter = interpreter
        probe = "import sys; print(*sys.version_info[:3], sep='.')"
        try:
            version = _run([interpreter, "-c", probe]).strip()
        except UnavailableError as error:
            raise UnavailableError(f"{interpreter} is not a usable Python: {error}") from error
        self._directory = BUILD / f"python{version}"

    def get(self, name: str) -> Path:
        """The directory of an environment's programs. Raises UnavailableError."""
        requirements = [*([_RUNTIME_LOCK] if name == "carpool" else []), _REQUIREMENTS / f"{name}.txt"]
        text = "".join([self.interpreter, *(path.read_text() for path in requirements)])
        mark = hashlib.sha256(text.encode()).hexdigest()
        directory = self._directory / name
        stamp = directory / ".installed"
        if not stamp.exists() or stamp.read_text() != mark:
            print(f"installing {name} in {directory.relative_to(ROOT)}", file=sys.stderr)
            shutil.rmtree(directory, ignore_errors=True)
            _run([self.interpreter, "-m", "venv", str(directory)])
            install = [str(directory / "bin/pip"), "install", "--quiet", "--no-input"]
            for path in requirements:
                _run([*install, "--requirement", str(path)])
            if name == "carpool":
                _run([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
            stamp.write_text(mark)
        return directory / "bin"


def wrk() -> Path:
    """A directory with usr/bin/wrk: the one on PATH, or Debian's, for which no root is needed.

    Raises UnavailableError.
    """
    directory = BUILD / "wrk"
    program = directory / "usr/bin/wrk"
    if program.exists():
        return directory
    program.parent.mkdir(parents=True, exist_ok=True)
    if found := shutil.which("wrk"):
        program.symlink_to(found)
        return directory
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise UnavailableError("wrk is not on PATH, and this is not Debian, where it could be fetched")
    print(f"fetching wrk into {directory.relative_to(ROOT)}", file=sys.stderr)
    _run(["apt-get", "download", *_WRK_PACKAGES], cwd=directory)
    for package in directory.glob("*.deb"):
        _run(["dpkg", "--extract", str(package), str(directory)])
    return directory


def compiled(source: Path) -> Path:
    """A program compiled from C, unless it was before. Raises UnavailableError."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnavailableError("it needs a C compiler (gcc or cc)")
    program = BUILD / source.stem
    program.parent.mkdir(parents=True, exist_ok=True)
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    _run([compiler, "-O2", "-Wall", "-Wextra", "-o", str(program), str(source)])
    return program


def _run(command: list[str], cwd: Path | None = None) -> str:
    """The output of a command. Raises UnavailableError with the last line of its errors."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UnavailableError(f"{Path(command[0]).name} {command[1]}: {errors[-1]}")
    return done.stdout
