"""The languages in which producers are tested: what each needs on this machine, and how to run a program.

A language is tested only where each part of its toolchain works. To find out, a tiny program that uses the
part is compiled or run: a version number or an installed file does not show that a library can be loaded.

Nothing is written beside the sources. Downloads and compiler caches go to `build/clients`, everything else to
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
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Final

HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parents[1] / "build" / "clients"
ERROR_CHARS_MAX: Final = 200
BUILD_S: Final = 180.0  # a cold compiler and an empty cache on a busy machine

# redis-cli may be installed by a wheel only, beside this interpreter.
PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
GO: Final = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(CACHE / "go")}


class CommandFailedError(Exception):
    """A command is not installed or failed. The message says which command, and what it printed."""


@dataclass(frozen=True)
class Part:
    """One part of a toolchain. `check` raises CommandFailedError where the part does not work."""

    name: str
    packages: str  # of Debian and Ubuntu
    check: Callable[[], object]


@dataclass(frozen=True)
class Language:
    """A language. `build` turns a source and an empty directory into the command that runs the program.

    The first part is the compiler or interpreter: where it does not work, no other part can be checked.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    build: Callable[[Path, Path], list[str]]


@cache
def missing(language: Language) -> str | None:
    """Name the parts that do not work, why, and the packages to install. None if all parts work."""
    broken: dict[str, str] = {}
    packages: list[str] = []
    for part in language.parts:
        try:
            part.check()
        except CommandFailedError as error:
            broken[part.name] = str(error)
            packages += part.packages.split()
            if part is language.parts[0]:
                packages = [package for each in language.parts for package in each.packages.split()]
                break
    if not broken:
        return None
    return (
        f"{language.name}: not usable here: {'; '.join(f'{part} ({why})' for part, why in broken.items())}. "
        f"On Debian and Ubuntu: apt-get install {' '.join(dict.fromkeys(packages))}"
    )


def environment(**variables: str) -> dict[str, str]:
    """The environment of a test program."""
    return {**os.environ, "PATH": PATH, **variables}


def run(*command: str, variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return what it printed. Raises CommandFailedError."""
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
        raise CommandFailedError(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise CommandFailedError(f"{command[0]} did not end within {BUILD_S:g} s") from None
    if done.returncode:
        raise CommandFailedError(f"{command[0]} failed: {_error_line(done.stderr, done.stdout)}")
    return done.stdout


def _error_line(*outputs: str) -> str:
    """The line that says what is wrong: the first one with the word "error", else the first one."""
    lines = [line.strip() for output in outputs for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return shorten(next(iter(errors or lines), "it printed nothing"), ERROR_CHARS_MAX, placeholder=" ...")


# --- interpreters ----------------------------------------------------------------------------------------


def interpreted(*command: str) -> Callable[[Path, Path], list[str]]:
    """Build for a language whose sources run as they are."""
    return lambda source, _directory: [*command, str(source)]


def runs(*command: str) -> Callable[[], str]:
    """A check: the command succeeds."""
    return partial(run, *command)


def on_path(*tools: str) -> Callable[[], None]:
    """A check: these programs are installed."""

    def check() -> None:
        absent = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
        if absent:
            raise CommandFailedError(f"not on PATH: {', '.join(absent)}")

    return check


# --- Node.js ---------------------------------------------------------------------------------------------


def node(source: Path, directory: Path) -> list[str]:
    """Node.js looks for modules beside the source."""
    (directory / "node_modules").symlink_to(_node_modules())
    return ["node", str(shutil.copy(source, directory))]


def _run_node_and_npm() -> None:
    run("node", "--version")
    run("npm", "--version")


def _load_node_modules() -> None:
    script = 'import "redis"; import "@msgpack/msgpack"'
    run("node", "--input-type=module", "--eval", script, cwd=_node_modules().parent)


@cache
def _node_modules() -> Path:
    """The packages that package-lock.json pins, installed once for each version of that file."""
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
            run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=fresh)
            with suppress(OSError):  # a parallel run of the tests may have installed them meanwhile
                fresh.rename(installed)
    return installed / "node_modules"


# --- Go --------------------------------------------------------------------------------------------------


def go(source: Path, directory: Path) -> list[str]:
    program = directory / "program"
    run("go", "build", "-o", str(program), str(source), variables=GO)
    return [str(program)]


def go_builds(*imports: str) -> Callable[[], None]:
    """A check: a program that imports these packages can be built. Generics need Go 1.18."""
    lines = "".join(f'import _ "{name}"\n' for name in imports)
    return partial(
        _build_and_run,
        go,
        "probe.go",
        f"package main\n{lines}func main() {{ f(1) }}\nfunc f[T any](T) {{}}\n",
    )


# --- C ---------------------------------------------------------------------------------------------------


def c(source: Path, directory: Path) -> list[str]:
    flags = run("pkg-config", "--cflags", "--libs", "hiredis", _msgpack_c()).split()
    return _compile_c(flags, source, directory)


def _compile_c(flags: list[str], source: Path, directory: Path) -> list[str]:
    program = str(directory / "program")
    run("cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", program, str(source), *flags)
    return [program]


def _compile_nothing() -> None:
    run("pkg-config", "--version")
    _build_and_run(
        partial(_compile_c, []), "probe.c", "#include <stdlib.h>\nint main(void) { return abs(0); }\n"
    )


def c_links(library: Callable[[], str], header: str, call: str) -> Callable[[], None]:
    """A check: a program that calls a function of a library compiles, links and starts.

    `library` returns the library's name for pkg-config.
    """

    def check() -> None:
        flags = run("pkg-config", "--cflags", "--libs", library()).split()
        source = f"#include <stddef.h>\n#include <{header}>\nint main(void) {{ {call}; return 0; }}\n"
        _build_and_run(partial(_compile_c, flags), "probe.c", source)

    return check


def _msgpack_c() -> str:
    """The name of msgpack-c for pkg-config. It was `msgpack` before release 4."""
    try:
        run("pkg-config", "--exists", "msgpack-c")
    except CommandFailedError:
        return "msgpack"
    return "msgpack-c"


def _build_and_run(build: Callable[[Path, Path], list[str]], file: str, code: str) -> None:
    """Build a program from its code, and run it."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / file
        source.write_text(code, encoding="utf-8")
        run(*build(source, Path(scratch)))


# --- all of them -----------------------------------------------------------------------------------------

_LANGUAGES: Final = (
    Language(
        "shell",
        "producer.sh",
        (
            Part("bash 4", "bash", runs("bash", "-c", "mapfile -t lines </dev/null")),
            Part("redis-cli", "redis-tools", runs("redis-cli", "--version")),
            Part("text tools", "coreutils grep sed", on_path("grep", "mktemp", "od", "paste", "sed", "tr")),
        ),
        interpreted("bash"),
    ),
    Language(
        "node",
        "producer.mjs",
        (
            Part("Node.js and npm", "nodejs npm", _run_node_and_npm),
            Part("the packages of package-lock.json, from a registry", "nodejs npm", _load_node_modules),
        ),
        node,
    ),
    Language(
        "go",
        "producer.go",
        (
            Part("Go 1.18", "golang-go", go_builds()),
            Part(
                "redigo",
                "golang-github-gomodule-redigo-dev",
                go_builds("github.com/gomodule/redigo/redis"),
            ),
            Part(
                "msgpack",
                "golang-github-vmihailenco-msgpack.v5-dev",
                go_builds("github.com/vmihailenco/msgpack/v5"),
            ),
        ),
        go,
    ),
    Language(
        "ruby",
        "producer.rb",
        (
            Part("Ruby 3.1", "ruby", runs("ruby", "-e", "def one = 1; one = 1; { one: }")),
            Part("the gem redis", "ruby-redis", runs("ruby", "-r", "redis", "-e", "Redis.new")),
            Part("the gem msgpack", "ruby-msgpack", runs("ruby", "-r", "msgpack", "-e", "1.to_msgpack")),
        ),
        interpreted("ruby"),
    ),
    Language(
        "php",
        "producer.php",
        (
            Part("PHP 8.1", "php-cli", runs("php", "-r", "[...['a' => 1]];")),
            Part("the extension redis", "php-redis", runs("php", "-r", "new Redis();")),
            Part("the extension msgpack", "php-msgpack", runs("php", "-r", "msgpack_pack(1);")),
        ),
        interpreted("php", "-d", "display_errors=stderr"),
    ),
    Language(
        "perl",
        "producer.pl",
        (
            Part("Perl 5.30", "perl", runs("perl", "-MJSON::PP", "-e", "use v5.30;")),
            Part("Redis", "libredis-perl", runs("perl", "-MRedis", "-e", "")),
            Part(
                "Data::MessagePack",
                "libdata-messagepack-perl",
                runs("perl", "-MData::MessagePack", "-e", "Data::MessagePack->pack(1)"),
            ),
        ),
        interpreted("perl"),
    ),
    Language(
        "c",
        "producer.c",
        (
            Part("a C compiler and pkg-config", "gcc libc6-dev pkg-config", _compile_nothing),
            Part(
                "hiredis",
                "libhiredis-dev",
                c_links(lambda: "hiredis", "hiredis/hiredis.h", "redisFree(NULL)"),
            ),
            Part(
                "msgpack-c",
                "libmsgpack-dev",
                c_links(_msgpack_c, "msgpack.h", "msgpack_zone_free(msgpack_zone_new(64))"),
            ),
        ),
        c,
    ),
)
LANGUAGES: Final = {language.name: language for language in _LANGUAGES}
