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

The fork server has one thread, and is this module, too: `python -m support.forking`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, ClassVar, Final, NoReturn
from unittest import mock

from carpool.lifecycle import command_that_dies_with_parent, die_with_parent
from carpool_cli.commands import GROUPS
from support.child_forking import (
    DESCRIPTORS_MAX,
    ORDER_BYTES_MAX,
    Order,
    Program,
    become,
    fork_orphan,
    forking_subprocess,
)
from support.one_thread import compute_in_one_thread

TESTS: Final = Path(__file__).parents[1]
PRELOADED: Final = (
    "carpool_worker.model_process.main",
    "carpool_worker.node.seat",
    "carpool_cli.__main__",
    "support.chaos.client",
    "support.chaos.enqueuer",
    "support.chaos.producer",
    *sorted(command.module for group in GROUPS for command in group if command.module),
    # What services import once they run.
    "anyio._backends._asyncio",
    "encodings.idna",
    "encodings.unicode_escape",
    "encodings.utf_8_sig",
    "uvicorn.lifespan.on",
)
_MADV_COLLAPSE: Final = 25  # linux/mman.h
_HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024


class ForkedProcess:
    """A process that the fork server started, with those methods of `subprocess.Popen` that tests use.

    `status` is a socket on which the fork server sends the pid, then the exit status. The process remains a
    zombie until the latter was read, so its pid is not given to another one before.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.returncode: int | None = None
        self.pid = self._receive()

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
            self.returncode = self._receive()
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

    def _receive(self) -> int:
        data = self._status.recv(32)
        if not data:
            raise RuntimeError("the fork server of the tests ended; its standard error says why")
        return int(data)


class ForkServer:
    """The fork server of this process, which ends with it."""

    _running: ClassVar[ForkServer | None] = None

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner_pid = os.getpid()
        command = [sys.executable, "-m", "support.forking", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command_that_dies_with_parent(command),
            cwd=TESTS,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()

    @classmethod
    def of_this_process(cls) -> ForkServer:
        """The running fork server, started at the first call."""
        if cls._running is None or cls._running.owner_pid != os.getpid() or not cls._running.is_alive:
            cls._running = cls()
        return cls._running

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

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
        socket.send_fds(self.orders, [json.dumps([False, *order]).encode()], descriptors)
        theirs.close()
        return ForkedProcess(ours)


@contextlib.contextmanager
def forked_children(starting: ModuleType) -> Iterator[None]:
    """Inside the block, the interpreters that this module starts in this process are forked."""
    namespace = forking_subprocess(ForkServer.of_this_process().orders)
    with mock.patch.object(starting, "subprocess", namespace):
        yield


# --- the fork server ----------------------------------------------------------------------------------------


class _Server:
    """Receives orders, forks, and reports how processes ended. One thread, one loop."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)

    def run(self) -> Program:
        """Serve until the tests end. Returns in each forked process, with what that is to run."""
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Child):
                    self._follow(key.data)
                    continue
                program = self._take_order()
                if program is not None:
                    return program

    def _take_order(self) -> Program | None:
        """Fork. Returns None in this process, and in the new one what that is to run."""
        data, descriptors, _, _ = socket.recv_fds(self._orders, ORDER_BYTES_MAX, DESCRIPTORS_MAX)
        if not data:  # the tests ended
            os._exit(0)
        is_child_of_tests, *fields = json.loads(data)
        order = Order(*fields)
        if is_child_of_tests:
            return fork_orphan(order, descriptors, self._close)
        status, *streams = descriptors
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(server_pid)
            self._close()
            return become(order, *streams)
        for descriptor in streams:
            os.close(descriptor)
        child = _Child(pid, socket.socket(fileno=status))
        child.status.send(str(pid).encode())
        self._selector.register(child.descriptor, selectors.EVENT_READ, child)
        return None

    def _follow(self, child: _Child) -> None:
        """Report how the process ended; later, once that was read, give up its pid."""
        if not child.has_ended:
            self._selector.unregister(child.descriptor)
            self._selector.register(child.status, selectors.EVENT_READ, child)
            child.report()
            return
        self._selector.unregister(child.status)
        child.close()

    def _close(self) -> None:
        """Close all that belongs to the fork server, in a forked process."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Child):
                key.data.close_descriptors()
        self._selector.close()
        self._orders.close()


class _Child:
    """A process and the socket on which its test learns of it."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.status = status
        self.descriptor = os.pidfd_open(pid)  # readable once the process has ended
        self.has_ended = False

    def report(self) -> None:
        """Send the exit status, and leave the process a zombie."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        by_signal = ended.si_code != os.CLD_EXITED
        self.has_ended = True
        with contextlib.suppress(BrokenPipeError):  # the test does not want to know
            self.status.send(str(-ended.si_status if by_signal else ended.si_status).encode())

    def close(self) -> None:
        os.waitpid(self.pid, 0)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        os.close(self.descriptor)
        self.status.close()


def _main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    compute_in_one_thread()
    del sys.path[0]  # the folder of the tests, which no service has
    gc.collect()
    gc.freeze()  # so that collecting does not copy the pages which all have in common
    _use_huge_pages()
    _run(_Server(orders).run())


def _use_huge_pages() -> None:
    """Put the memory of this process into huge pages, because to fork and to end a forked process then takes
    half of the time: 5 ms less. A forked process that writes copies 4 KiB all the same. Kernels before Linux
    6.1 refuse, and then all works as well."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access != "rw-p" or inode != "0":  # it is shared with all processes, or with other programs
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-first // _HUGE_PAGE_BYTES), end // _HUGE_PAGE_BYTES):
            madvise(page * _HUGE_PAGE_BYTES, _HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _run(program: Program) -> NoReturn:
    """Run a program, and end as an interpreter does, but for its last step: it destroys all modules, and with
    that would copy all of the pages that this process has in common with others, which takes 70 ms."""
    try:
        status = program()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _main()
