"""Starts services and commands of tests by forking a process that has imported them.

A new interpreter needs 0.3 to 0.6 s of CPU for imports before it does anything, and the tests start more than
a thousand. `ForkServer.start` does what `python -P -m MODULE ARGUMENTS` does, in about 20 ms:

    server = ForkServer.of_this_process()
    worker = server.start("carpool_worker", ["echo.py:Echo"], folder, environment, output, output)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0

A forked process has its own pid, signals, environment, working directory and standard streams, ends as an
interpreter does, and is killed when the process of the tests ends. The one difference: its modules were
imported in the environment of the tests. Where that matters (a variable that a library reads when it is
imported, tests of starting), tests start new interpreters. Packages that replace those of Carpool are
imported in a forked process: see `ForkServer.start`.

The processes that fork are those of `support.fork_server`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, ClassVar, Final
from unittest import mock

from support.child_forking import Order, forking_subprocess

TESTS: Final = Path(__file__).parents[1]
_PID_BYTES_MAX: Final = 32


class ForkedProcess:
    """A process that the fork server started, with those methods of `subprocess.Popen` that tests use.

    `status` is a socket on which the fork server sends the pid, then the exit status. The process remains a
    zombie until the latter was read, so its pid is not given to another one before.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.returncode: int | None = None
        self.pid = _number_from(self._status)

    def poll(self) -> int | None:
        """The exit status, -N if signal N ended the process, or None if it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Returns its status, or raises TimeoutExpired after `timeout` s."""
        if self.returncode is None:
            with selectors.PollSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = _number_from(self._status)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported all, from which the fork servers of a test run are forked. It ends with
    the process that started it: the one that starts all processes of tests, if there are several."""

    _address: ClassVar[str] = ""
    _process: ClassVar[subprocess.Popen[bytes] | None] = None

    @classmethod
    def of_this_run(cls) -> str:
        """The address where it listens; it is started at the first call if `use` has named none."""
        if not cls._address:
            address = f"\0carpool-tests-{uuid.uuid4()}"  # of no file, so nothing of it can remain
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(address)
                listener.listen()
                cls._process = _launch("template", listener)
            cls._address = address
        return cls._address

    @classmethod
    def use(cls, address: str) -> None:
        """Use the one that another process of this test run has started."""
        cls._address = address


class ForkServer:
    """The fork server of this process, which ends with it."""

    _running: ClassVar[ForkServer | None] = None

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.orders.connect(Template.of_this_run())
        self.pid = _number_from(self.orders)

    @classmethod
    def of_this_process(cls) -> ForkServer:
        """The running fork server, started at the first call."""
        if cls._running is None or cls._running.owner_pid != os.getpid() or not cls._running.is_alive:
            cls._running = cls()
        return cls._running

    @property
    def is_alive(self) -> bool:
        try:
            return bool(self.orders.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes],
        *,
        has_session: bool = False,
        packages: Path | None = None,
    ) -> ForkedProcess:
        """Run `main(arguments)` of a module, or of `__main__` in a package, in a process of its own.

        `folder` is its working directory, which is not on its `sys.path`, as with `python -P -m`, and
        `environment` all of its environment. `output` and `errors` get what it writes; it reads nothing.
        `packages` is a folder with packages that replace those of Carpool, in its model processes, too.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = Order(
            module,
            list(arguments),
            str(folder),
            dict(environment),
            has_session=has_session,
            packages=str(packages or ""),
        )
        descriptors = [theirs.fileno(), output.fileno(), errors.fileno()]
        socket.send_fds(self.orders, [json.dumps(order).encode()], descriptors)
        theirs.close()
        return ForkedProcess(ours)


@contextlib.contextmanager
def forked_children(starting: ModuleType) -> Iterator[None]:
    """Inside the block, the interpreters that this module starts in this process are forked: as children of
    this process, by its starter."""
    namespace = forking_subprocess([_Starter.of(os.getpid()).orders])
    with mock.patch.object(starting, "subprocess", namespace):
        yield


class _Starter:
    """The process that forks children for this one, and ends with it."""

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _launch("starter", theirs)

    @classmethod
    @functools.cache
    def of(cls, _pid: int) -> _Starter:
        """That of the process with this pid, which is this one; started at the first call."""
        return cls()


def _launch(role: str, given: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process of `support.fork_server` that ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "support.fork_server", role, str(os.getpid()), str(given.fileno())],
        cwd=TESTS,
        pass_fds=(given.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _number_from(fork_server: socket.socket) -> int:
    data = fork_server.recv(_PID_BYTES_MAX)
    if not data:
        raise RuntimeError("the fork server of the tests ended; its standard error says why")
    return int(data)
