"""The processes that fork for the tests: template, fork servers and starters (see `support.forking`).

    python -m support.fork_server template PARENT DESCRIPTOR
    python -m support.fork_server starter PARENT DESCRIPTOR

The *template* imports what tests start, and forks itself for each process of tests that connects to the
socket with this descriptor: a *fork server*, which gets that process's orders on the connection. So modules
are imported, and are in memory, once for all processes of tests.

The *starter* of a process of tests forks its children (see `support.child_forking`), which the template
cannot, because it is no descendant. Few modules are started so: it imports one when it is first asked for it.

Each has one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

from carpool.lifecycle import die_with_parent
from carpool_cli.commands import GROUPS
from support.child_forking import (
    DESCRIPTORS_MAX,
    ORDER_BYTES_MAX,
    Order,
    Program,
    become,
    main_module,
    serve_children,
)
from support.one_thread import compute_in_one_thread

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


def _main() -> NoReturn:
    role, parent_pid, descriptor = sys.argv[1:]
    die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
    given = socket.socket(fileno=int(descriptor))
    if role == "template":
        _run(_serve_tests(given))
    del sys.path[0]  # the folder of the tests, which no service has
    _run(serve_children(given, _import_once))


def _import_all(modules: Iterable[str]) -> None:
    """Import modules for all processes that are forked from now on."""
    for module in modules:
        main_module(module)
    compute_in_one_thread()
    gc.collect()
    gc.freeze()  # so that collecting does not copy the pages which all have in common
    _use_huge_pages()


@functools.cache
def _import_once(module: str) -> None:
    with contextlib.suppress(ModuleNotFoundError):  # a file of a test
        _import_all([module])


# --- the template -------------------------------------------------------------------------------------------


def _serve_tests(listener: socket.socket) -> Program:
    """Until the test run ends. Returns in each forked process, with what that is to run."""
    select.select([listener], [], [])  # many test runs of a few files start no service
    _import_all(PRELOADED)
    del sys.path[0]  # the folder of the tests, which no service has
    while True:
        orders, _ = listener.accept()
        if _is_of_this_user(orders) and os.fork() == 0:
            listener.close()
            orders.send(str(os.getpid()).encode())
            return _Server(orders).run()
        orders.close()


def _is_of_this_user(connection: socket.socket) -> bool:
    """Others may connect as well, because the address is not that of a file."""
    _pid, user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


# --- a fork server ------------------------------------------------------------------------------------------


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
        order = Order(*json.loads(data))
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


# --- what all have in common -------------------------------------------------------------------------------


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
