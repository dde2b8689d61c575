"""Sets a process in which a user's code runs apart from what that code does to sockets and signals."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import signal
import socket
from typing import Final

DESCRIPTORS_MAX: Final = 4096  # that of the socket is below: the kernel keeps a table up to the highest


def set_apart(descriptor: int) -> socket.socket:
    """The socket to another process of Carpool under another descriptor (`moved`).

    Processes that the model starts must not inherit the socket: they could write to it, and while they hold
    it open, the end of this process does not end the connection.
    """
    sock = socket.socket(fileno=moved(descriptor))
    os.register_at_fork(after_in_child=sock.close)
    return sock


def moved(descriptor: int) -> int:
    """Another descriptor in place of this one, that the model is not likely to write to.

    A program that writes to a descriptor which it does not own, or closes one twice, means a low one: the
    kernel gives out the lowest. This one is not known to it beforehand.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_MAX)
    lowest = limit // 2 + secrets.randbelow(max(1, limit // 4))
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(descriptor)
    return other


def leave_signals_to_the_worker() -> None:
    """Ctrl-C, a closed terminal, and systemd's SIGTERM reach all processes of a group: the worker drains
    first, then ends this process. Processes that the model starts can still be terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that are executed inherit
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
