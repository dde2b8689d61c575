"""The languages whose producers are tried here: what each needs, and how a program of it is run.

Nothing is written beside the sources: what is downloaded or compiled once is in `build/clients`, the rest in
the directory of a test.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parents[1] / "build" / "clients"
BUILD_S: Final = 180.0  # a cold compiler and an empty cache, on a machine that is busy with something else

# The redis-cli that came in a wheel serves where none is installed.
PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
GO: Final = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(CACHE / "go")}


class MissingError(Exception):
    """Part of a toolchain is not there. The message says which."""


@dataclass(frozen=True)
class Language:
    """`program` makes a command of a source and a directory of its own; `packages` are Debian's."""

    name: str
    source: str
    packages: str
    probes: tuple[tuple[str, ...], ...]
    program: Callable[[Path, Path], list[str]]


@cache
def lack(language: Language) -> str | None:
    """What of its toolchain is not there; None if nothing is."""
    try:
        for probe in language.probes:
            _succeed(*probe)
    except MissingError as error:
        return str(error).splitlines()[0]
    return None


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PATH": PATH, **variables}


def interpreted(*command: str) -> Callable[[Path, Path], list[str]]:
    """A language whose sources are run as they are."""
    return lambda source, _home: [*command, str(source)]


def node(source: Path, home: Path) -> list[str]:
    """Node looks for modules beside the source."""
    (home / "node_modules").symlink_to(_node_modules())
    return ["node", str(shutil.copy(source, home))]


def go(source: Path, home: Path) -> list[str]:
    _succeed("go", "build", "-o", str(home / "program"), str(source), variables=GO)
    return [str(home / "program")]


def c(source: Path, home: Path) -> list[str]:
    flags = _succeed("pkg-config", "--cflags", "--libs", "hiredis", _msgpack_c()).split()
    warnings = ["-Wall", "-Wextra", "-Werror"]
    _succeed("cc", "-std=gnu11", *warnings, "-o", str(home / "program"), str(source), *flags)
    return [str(home / "program")]


LANGUAGES: Final = {
    one.name: one
    for one in (
        Language(
            "shell",
            "producer.sh",
            "bash redis-tools",
            (("bash", "--version"), ("redis-cli", "--version")),
            interpreted("bash"),
        ),
        Language("node", "producer.mjs", "nodejs npm", (("node", "--version"), ("npm", "--version")), node),
        Language(
            "go",
            "producer.go",
            "golang-go golang-github-gomodule-redigo-dev golang-github-vmihailenco-msgpack.v5-dev",
            (
                ("go", "version"),
                ("test", "-d", "/usr/share/gocode/src/github.com/gomodule/redigo/redis"),
                ("test", "-d", "/usr/share/gocode/src/github.com/vmihailenco/msgpack/v5"),
            ),
            go,
        ),
        Language(
            "ruby",
            "producer.rb",
            "ruby ruby-redis ruby-msgpack",
            (("ruby", "-r", "redis", "-r", "msgpack", "-e", ""),),
            interpreted("ruby"),
        ),
        Language(
            "php",
            "producer.php",
            "php-cli php-redis php-msgpack",
            (("php", "--re", "redis"), ("php", "--re", "msgpack")),
            interpreted("php", "-d", "display_errors=stderr"),
        ),
        Language(
            "perl",
            "producer.pl",
            "libredis-perl libdata-messagepack-perl",
            (("perl", "-MRedis", "-MData::MessagePack", "-e", ""),),
            interpreted("perl"),
        ),
        Language(
            "c",
            "producer.c",
            "gcc libc6-dev pkg-config libhiredis-dev libmsgpack-dev",
            (("cc", "--version"), ("pkg-config", "--exists", "hiredis")),
            c,
        ),
    )
}


def _succeed(*command: str, variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a command prints that must succeed."""
    try:
        done = subprocess.run(
            command,
            env=environment(**(variables or {})),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except FileNotFoundError:
        raise MissingError(f"{command[0]} is not on PATH") from None
    if done.returncode:
        raise MissingError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@cache
def _node_modules() -> Path:
    """What package-lock.json pins, installed once for each state of that file."""
    project = HERE / "node"
    lock = (project / "package-lock.json").read_bytes()
    installed = CACHE / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not installed.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / "node"
            fresh.mkdir()
            for file in ("package.json", "package-lock.json"):
                shutil.copy(project / file, fresh)
            _succeed("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=fresh)
            with suppress(OSError):  # another run of the tests was faster
                fresh.rename(installed)
    return installed / "node_modules"


def _msgpack_c() -> str:
    """The library's name, which was shorter once."""
    try:
        _succeed("pkg-config", "--exists", "msgpack-c")
    except MissingError:
        return "msgpack"
    return "msgpack-c"
