"""A decoder process, as the model process has it: start it, have it call a method, see that it ended.

It executes one call at a time, and belongs to the thread that started it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from carpool.child_processes import exit_cause, wait_or_kill
from carpool_worker.model_process import frames
from carpool_worker.model_process.apart import set_apart
from carpool_worker.model_process.configuration import CONFIGURATION
from carpool_worker.model_process.decoding.exchange import SharedMemory, Written
from carpool_worker.model_process.frames import (
    Failure,
    Measured,
    MessageReader,
    ProcessGoneError,
    StrayBytesError,
)

STOP_S: Final = 5.0
_THREADS: Final = ("_NUM_THREADS", "_MAXIMUM_THREADS")  # ends of the names of variables
READY, LOAD_FAILED, RETURNED, RAISED, ENDING = "ready", "load failed", "returned", "raised", "ending"


class DecoderLoadError(Exception):
    """The model cannot be loaded in a decoder process. `trace`: the traceback, if its own code raised."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class HookRaisedError(Exception):
    """A method of the model raised in a decoder process. `name` and `trace` are those of `raised`; the name
    is empty if it raised on purpose, with a status."""

    def __init__(self, failure: Failure, name: str, trace: str) -> None:
        super().__init__(failure[1])
        self.failure = failure
        self.name = name
        self.trace = trace


class DecoderProcess:
    """One decoder process, of the thread that started it. `memory`: what both processes read and write."""

    def __init__(
        self, location: str, replica: str, configuration: bytes, on_measured: Callable[[Measured], object]
    ) -> None:
        """`configuration`: what the model is made with, encoded. `on_measured` is told what it measures."""
        self._location = location
        self._configuration = configuration
        self._on_measured = on_measured
        self._replica = replica
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader: MessageReader | None = None
        self._ended_because = ""
        self.memory = SharedMemory.create()

    def start(self) -> None:
        """Start it, and wait until the model is loaded in it. Raises DecoderLoadError."""
        self._end(wait_s=0)
        self._ended_because = ""
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self.memory.descriptor)
        arguments = [str(os.getpid()), *map(str, descriptors), self._location, self._replica]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "carpool_worker.model_process.decoding.child", *arguments],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        theirs.close()
        self._sock = set_apart(ours.detach())
        self._reader = MessageReader(self._sock)
        try:
            frames.send_message(self._sock, (CONFIGURATION,), self._configuration)
            kind, *fields = self._reader.receive()[0]
        except ProcessGoneError:
            raise DecoderLoadError(f"it ended ({self.exit_cause()}) while it loaded the model") from None
        if kind != READY:
            self._end()
            raise DecoderLoadError(*fields)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process is not None and self._process.poll() is None

    def call(
        self, hook: str, write: Callable[[SharedMemory], Written], request: Sequence[Any] | None
    ) -> Written:
        """Have it call a method of the model with what `write` writes. Where it wrote what that returned.

        Raises HookRaisedError, ProcessGoneError if the process ends, and what `write` raises.
        """
        sock, reader = self._sock, self._reader
        if sock is None or reader is None:
            raise ProcessGoneError("not started")
        self.memory.trim()
        try:
            frames.send_message(sock, (hook, write(self.memory), request))
            while (measured := Measured.read(answer := reader.receive()[0])) is not None:
                self._on_measured(measured)
            kind, *fields = answer
        except StrayBytesError:
            self._give_up("its model wrote into the connection to its model process")
        if kind == ENDING:
            self._give_up(f"unhealthy, {fields[0]}")
        if kind == RAISED:
            failure, name, trace = fields
            raise HookRaisedError((failure[0], failure[1]), name, trace)
        written: Written = fields[0]
        return written

    def _give_up(self, reason: str) -> NoReturn:
        self._ended_because = reason
        self._end(wait_s=0)
        raise ProcessGoneError(reason)

    def kill(self, reason: str) -> None:
        """End it in the middle of a call, which raises ProcessGoneError then. For another thread."""
        process = self._process
        if process is not None:
            self._ended_because = reason
            process.kill()

    def exit_cause(self) -> str:
        """How it ended, for logs and errors."""
        if self._ended_because or self._process is None:
            return self._ended_because or "not started"
        try:
            code = self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            return "connection closed"
        return exit_cause(code)

    def close(self) -> None:
        """End it for good."""
        self._end()
        self.memory.close()

    def _end(self, wait_s: float = STOP_S) -> None:
        """Close the connection, which ends it; kill it after `wait_s`."""
        if self._sock is not None:
            self._sock.close()
            self._sock = self._reader = None
        if self._process is not None:
            wait_or_kill(self._process, wait_s)
            self._process = None


def _environment() -> dict[str, str]:
    """The variables of a decoder process: numeric libraries start one thread, because there are several such
    processes."""
    return {name: "1" if name.endswith(_THREADS) else value for name, value in os.environ.items()}
