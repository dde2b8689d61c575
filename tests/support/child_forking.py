"""Lets a process of a test fork the interpreters that it starts, instead of starting each anew.

So a worker forks its model processes, `carpool up` its services, and the process of the tests what it starts
inside `forking.forked_children`.

Such a process has threads, so it must not fork itself. While it has only one, it forks as many processes as
it will usually start, which wait until they are told what to become, and a *starter*, which forks all others.
That of the tests is an interpreter (see `support.fork_server`).

What is started is the child of the process that asked all the same, and ends with it: the starter forks
twice, and the kernel gives a process whose parent has ended to the next ancestor that asked for such orphans
(PR_SET_CHILD_SUBREAPER), here the process that asked.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final, NamedTuple

from carpool.lifecycle import die_with_parent

STARTER: Final = "starter"  # the name of a process that waits for orders, in /proc/PID/comm
ORDER_BYTES_MAX: Final = 256 * 1024
DESCRIPTORS_MAX: Final = 4  # with an order: for the reply, two streams, and what is inherited

_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # not loaded anew in each process, which takes 0.2 ms
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_OF_GROUPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # are sent to all processes of a group
Program = Callable[[], int]  # what a forked process runs; returns its exit status


class Order(NamedTuple):
    """What to run: what `python -P -m module arguments` runs. `folder`: its working directory; None for that
    of the starter. `inherited`: the number of a descriptor that it gets besides its streams; 0 for none.
    `parent_pid`: the process with which it ends; 0 if it sees to that itself, or another does. `packages`: a
    folder; packages of Carpool in it are imported in place of the real ones."""

    module: str
    arguments: list[str]
    folder: str | None
    environment: dict[str, str]
    inherited: int = 0
    parent_pid: int = 0
    has_session: bool = False
    packages: str = ""


class Starting(NamedTuple):
    """How a program starts interpreters: which modules do it, with which first argument of the program, if
    not with any, and how many processes it usually starts."""

    modules: Sequence[str]
    first: str | None
    processes: int


_STARTING: Final = {
    "carpool_worker": Starting(
        ["carpool_worker.process_handle", "carpool_worker.node.seat_process"], None, 1
    ),
    "carpool_worker.node.seat": Starting(["carpool_worker.process_handle"], None, 1),
    "carpool_cli": Starting(["carpool_cli.local.supervisor"], "up", 4),
}


def become(order: Order, output: int, errors: int, *inherited: int) -> Program:
    """Make of this process, which was just forked, what the order says. Returns what it is to run.

    Its standard streams are these descriptors, and it has no others but for the inherited one."""
    if order.has_session:
        os.setsid()
    if order.parent_pid:
        die_with_parent(order.parent_pid)
    _name_this_process(order.module.partition(".")[0])
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in inherited:
        os.dup2(descriptor, order.inherited)
    kept = order.inherited or 2
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _program(order)


def fork_orphan(order: Order, descriptors: list[int], release: Callable[[], None]) -> Program | None:
    """Fork a process that the next ancestor which wants orphans adopts; tell its pid on the first descriptor.

    Returns None, and in that process what it is to run. `release` closes what belongs to this one, there.
    """
    pid = os.fork()
    if pid != 0:
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    between = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    release()
    while os.getppid() == between:
        time.sleep(0.0005)
    return _become_child(order, descriptors)


def _become_child(order: Order, descriptors: list[int]) -> Program:
    """Tell the pid of this process on the first descriptor, and become what the order says."""
    for number in _OF_GROUPS:  # before others know the pid: a signal must not be lost
        signal.signal(number, signal.SIG_DFL)
    reply, *others = descriptors
    os.write(reply, str(os.getpid()).encode())
    return become(order, *others)


def serve_children(orders: socket.socket, prepare: Callable[[str], None] | None = None) -> Program:
    """The starter, until its process ends. Returns in each forked process, with what that is to run.

    `prepare` is called with the module of an order before a process is forked for it."""
    while True:
        order, descriptors = _receive_order(orders)
        if prepare is not None:
            prepare(order.module)
        program = fork_orphan(order, descriptors, orders.close)
        if program is not None:
            return program


def _serve_one(orders: socket.socket) -> Program:
    """What this process is to become, once that is ordered."""
    order, descriptors = _receive_order(orders)
    orders.close()
    _prctl(_PR_SET_PDEATHSIG, 0)  # whether it ends with its parent is for the program to say
    return _become_child(order, descriptors)


def _receive_order(orders: socket.socket) -> tuple[Order, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, DESCRIPTORS_MAX)
    if not data:
        os._exit(0)
    return Order(*json.loads(data)), descriptors


def forking_subprocess(starters: list[socket.socket]) -> SimpleNamespace:
    """In place of the module `subprocess`: sends orders to these. Each takes one, the last one all others.

    Output must go to files: a forked process has the streams of its starter's interpreter, which cannot be
    made those of a pipe.
    """

    class Popen(_ForkingPopen):
        orders = starters

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    return SimpleNamespace(Popen=Popen, **names)


class _ForkingPopen(subprocess.Popen[bytes]):
    """Has an interpreter forked. All but starting is as in `subprocess.Popen`."""

    orders: list[socket.socket]
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def _execute_child(self, command: list[str], *more: Any) -> None:
        # In the order of CPython's arguments.
        _executable, _preexec, _close, inherited, folder, environment = more[:6]
        pipes, has_session = more[9:15], more[20]
        _, _, _, output, _, errors = pipes
        at = command.index("-m")
        is_launched = command[1:3] == ["-I", "-S"]  # see `carpool.lifecycle.command_that_dies_with_parent`
        order = Order(
            command[at + 1],
            command[at + 2 :],
            None if folder is None else str(folder),
            dict(os.environ if environment is None else environment),
            inherited=inherited[0] if inherited else 0,
            parent_pid=int(command[5]) if is_launched else 0,
            has_session=has_session,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        streams = [1 if output == -1 else output, 2 if errors == -1 else errors]
        message = json.dumps(order).encode()
        with self._lock, ours:  # only now: else this process got the children of those that it kills
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            starter = self.orders.pop(0) if len(self.orders) > 1 else self.orders[0]
            socket.send_fds(starter, [message], [theirs.fileno(), *streams, *inherited])
            theirs.close()
            pid = ours.recv(32)
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise RuntimeError(f"{order.module} was not forked; the standard error of its starter says why")
        self.pid = int(pid)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program(order: Order) -> Program:
    """Load the module, and let it fork what it starts. Returns what is to run."""
    os.environ.clear()
    os.environ.update(order.environment)
    if order.packages:
        _replace_packages(order.packages)
    if order.folder is None:
        main = main_module(order.module)
    else:
        os.chdir(order.folder)
        sys.path.insert(0, order.folder)  # for programs that are files of a test
        main = main_module(order.module)
        sys.path.remove(order.folder)
    sys.argv = [str(main.__file__), *order.arguments]
    starting = _STARTING.get(order.module)
    if starting and starting.first in (None, *order.arguments[:1]) and not _is_worker_of_a_file(order):
        child = fork_children(starting)
        if child is not None:
            return child
    return lambda: main.main(order.arguments)


def _is_worker_of_a_file(order: Order) -> bool:
    """Whether this process will fork a worker for each model. What a starter forked for one of them would be
    the child of this process, so their model processes are new interpreters."""
    return order.module == "carpool_worker" and any(text.endswith(".toml") for text in order.arguments[:1])


def _replace_packages(folder: str) -> None:
    """Have all of Carpool imported anew, from this folder first. As in an interpreter, its `sitecustomize`,
    if it has one, is imported before."""
    for name in [name for name in sys.modules if name.startswith("carpool")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    if Path(folder, "sitecustomize.py").exists():
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def main_module(name: str) -> ModuleType:
    """What `python -m name` runs."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


def fork_children(starting: Starting) -> Program | None:
    """From now on the interpreters that this process starts are forked.

    Returns None in this process, and in each of those what it is to run.
    """
    modules = [importlib.import_module(name) for name in starting.modules]
    parent_pid = os.getpid()
    starters: list[socket.socket] = []
    for serve in [*[_serve_one] * starting.processes, serve_children]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        starters.append(ours)
        if os.fork() == 0:
            for number in _OF_GROUPS:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent_pid)
            for other in starters:
                other.detach()  # stays open: this process does not run when its parent ends, but is killed
            _name_this_process(STARTER)
            return serve(theirs)
        theirs.close()
    for module in modules:
        vars(module)["subprocess"] = forking_subprocess(starters)
    return None


def _name_this_process(name: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: Any) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
