"""A process of a seat, as its node sees it: a worker of one model process, in an interpreter of its own.

It gets its order on a socket, because all users of a machine can read command lines, and answers there: that
it serves, or why it cannot. It ends with its node, however that ends.

Why: docs/decisions/0111.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from carpool.child_processes import exit_cause, wait_or_kill

SERVES: Final = "serves"
DRAINED: Final = "drained by an operator"
UNDRAINED: Final = "takes batches again"
REASON_CHARS_MAX: Final = 500


class Order(NamedTuple):
    """What a process of a seat is to serve, and how.

    `device`: if the entry declares none; `turn`: which of those that it declares. `settings`: of the worker.
    `model_settings`: of the model, in place of those that it declares.
    """

    repository: str
    entry: str
    version: str
    parameters: dict[str, str]
    model: str
    device: str
    turn: int
    settings: dict[str, Any]
    model_settings: dict[str, str] = {}  # noqa: RUF012 (never changed)

    def encode(self) -> bytes:
        """As JSON, for the process."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, text: bytes) -> Order:
        """The inverse of `encode`."""
        return cls(**json.loads(text))


class SeatProcess(Protocol):
    """A process that loads a model and serves it. `poll` first, then look."""

    serves: bool
    is_drained: bool  # by an operator: it takes nothing more, and stays
    ended: str  # why it is over, for people; empty while it runs
    cannot_load: bool  # it ended because the model cannot be loaded, so another try would end in the same way

    def poll(self) -> None:
        """See what has become of it."""

    def drain(self) -> None:
        """Let it finish what it has, and end."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, within_s: float) -> bool:
        """Wait until it has ended, and kill it after this time. Whether it ended by itself."""


class WorkerProcess:
    """A real one, started with an order. Its `descriptor` is readable when there is something to poll."""

    def __init__(self, order: Order, environment: Mapping[str, str]) -> None:
        self.serves = False
        self.is_drained = False
        self.ended = ""
        self.cannot_load = False
        self._told = b""
        self._sock, theirs = socket.socketpair()
        arguments = [str(os.getpid()), str(theirs.fileno())]
        with theirs:
            # -P: nothing is imported from the working directory, where files of any name may be.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "carpool_worker.node.seat", *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only the node, which drains it
            )
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.sendall(order.encode() + b"\n")
        self._sock.setblocking(False)

    @property
    def descriptor(self) -> int:
        """Is -1 once the process has ended."""
        return self._sock.fileno()

    def poll(self) -> None:
        if self.ended:
            return
        self._read()
        code = self._process.poll()
        if code is None:
            return
        self._read()
        self._sock.close()
        told = self._told.decode("utf-8", "replace").splitlines()
        reason = "\n".join([line for line in told if line not in (SERVES, DRAINED, UNDRAINED)]).strip()
        self.cannot_load = bool(reason)
        self.ended = reason or f"its worker process ended with {exit_cause(code)}"

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while part := self._sock.recv(65_536):
                self._told += part
        if self._told.startswith(SERVES.encode()):
            self.serves = True
        self.is_drained = self._told.rfind(DRAINED.encode()) > self._told.rfind(UNDRAINED.encode())

    def drain(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, within_s: float) -> bool:
        is_clean = wait_or_kill(self._process, within_s)
        self.poll()
        return is_clean
