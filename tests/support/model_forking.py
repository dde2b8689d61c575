"""Lets a worker of a test fork its model processes, instead of starting an interpreter for each.

A worker has threads, so it must not fork itself. While it has only one, it forks a process that forks for it
later, as often as it is asked: the *starter*. A model process is the worker's child all the same, and ends
with it: the starter forks twice, and the kernel gives a process whose parent has ended to the next ancestor
that asked for such orphans (PR_SET_CHILD_SUBREAPER), here the worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from carpool.lifecycle import die_with_parent
from carpool_worker import process_handle
from carpool_worker.model_process import main as model_process

STARTER: Final = "model-starter"  # the name of the process, in /proc/PID/comm
_PR_SET_NAME: Final = 15  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER: Final = 36
_ORDER_BYTES_MAX: Final = 256 * 1024


def fork_model_processes() -> Callable[[], int] | None:
    """From now on, the model processes of this process, a worker, are forked.

    Returns None in the worker, and in each model process what that is to run.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker_pid = os.getpid()
    if os.fork() == 0:
        die_with_parent(worker_pid)
        ours.close()
        _name_this_process(STARTER)
        return _serve(theirs)
    theirs.close()

    class Popen(_ForkingPopen):
        starter = ours

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    vars(process_handle)["subprocess"] = SimpleNamespace(Popen=Popen, **names)
    return None


class _ForkingPopen(subprocess.Popen[bytes]):
    """Has the starter fork a model process. All but starting is as in `subprocess.Popen`."""

    starter: socket.socket

    def _execute_child(self, command: list[str], *more: Any) -> None:
        # In the order of CPython's arguments.
        _executable, _preexec, _close, (descriptor,), _folder, environment = more[:6]
        pipes = more[9:15]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = command[command.index(model_process.__name__) + 1 :]
        order = json.dumps([arguments, dict(environment), descriptor]).encode()
        socket.send_fds(self.starter, [order], [theirs.fileno(), descriptor])
        theirs.close()
        self.pid = int(ours.recv(32))
        ours.close()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _serve(orders: socket.socket) -> Callable[[], int]:
    """The starter, until the worker ends. Returns in each model process, with what that is to run."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES_MAX, 2)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            orders.close()
            while os.getppid() == between:
                time.sleep(0.0005)
            reply, sock = descriptors
            arguments, environment, number = json.loads(data)
            return _model_process(reply, sock, number, arguments, environment)
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _model_process(
    reply: int, sock: int, number: int, arguments: list[str], environment: dict[str, str]
) -> Callable[[], int]:
    """What a model process is to run. `number` is what its socket is called in `arguments`."""
    _name_this_process("python3")
    os.write(reply, str(os.getpid()).encode())
    os.close(reply)
    if sock != number:
        os.dup2(sock, number)
        os.close(sock)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(model_process.__file__), *arguments]
    return lambda: model_process.main(arguments)


def _name_this_process(name: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
