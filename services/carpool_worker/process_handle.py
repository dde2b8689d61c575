"""The worker's handle of a model process: start it, exchange frames and outcomes, restart it.

Why: docs/decisions/0044.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NoReturn, TypeVar

import structlog

from carpool.child_processes import exit_cause, wait_or_kill
from carpool.descriptor_wait import wait_until_ready
from carpool.parts import PARTS_MAX, Buffer, drop_sent
from carpool.prometheus import OF_WEB_PROGRAMS
from carpool_worker.devices import with_threads
from carpool_worker.model_process.configuration import CONFIGURATION, Configuration
from carpool_worker.model_process.frames import (
    Again,
    Ending,
    FrameHeader,
    LoadFailed,
    Measured,
    MessageReader,
    ModelSpans,
    OutcomeHeader,
    ProcessGoneError,
    Raised,
    Ready,
    StrayBytesError,
    message_parts,
    read_answer,
    read_load_result,
)

_SOCKET_BYTES: Final = 4 * 1024 * 1024  # two batches of tensors, so that sending seldom blocks
STOP_S: Final = 10.0
_ALIVE_S: Final = 0.5  # how often it is looked, while a model is loaded, whether its process is alive
_OF_THE_WORKER: Final = (
    "CARPOOL_REDIS_",
    "CARPOOL_PARAM",
    "CARPOOL_OTLP_",
)  # what these variables begin with
_WROTE: Final = "its model wrote into the connection to its worker"
Message = TypeVar("Message")


def _ignore(_measured: Measured) -> None:
    """Until the worker has set `on_measured`."""


def _ignore_spans(_spans: ModelSpans) -> None:
    """Nothing exports them."""


class ModelLoadError(Exception):
    """The model cannot be loaded. `trace` is the traceback if the model's own code raised, else empty."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace

    def logged_trace(self) -> dict[str, str]:
        """The traceback as a field of a log line, which shows it as that of an exception; none if empty."""
        return {"exception": self.trace} if self.trace else {}


class ProcessHandle:
    """One model process. `start` is `spawn` and `wait_ready`. To replace it, `hang_up`, and do both once it
    `has_ended`.

    Sending never waits. What does not fit into the pipe stays unsent until `flush`, which is called once
    `descriptor` is writable. A worker that waited here would not receive outcomes meanwhile, and the process
    cannot take the next frame before it has sent its outcome: both would wait. Frames for a process that has
    ended are lost, and `receive` reports it.

    Nor does receiving wait: a process may stop within a message. One that sends what is no message is ended.
    Its model wrote into the connection, for example to a descriptor that it had closed.
    """

    def __init__(
        self,
        location: str,
        device: str,
        load_s_max: float | None = None,
        *,
        configuration: Configuration | None = None,
        processes: int = 1,
        replica: str = "",
    ) -> None:
        """`load_s_max`: how long the model may take to load; None: without a limit. `configuration`: what it
        is loaded with. `processes`: how many share the CPUs, this one included. `replica`: its name, for the
        log."""
        self._location = location
        self._configuration = (configuration or Configuration()).encode()
        self._replica = replica
        self.device = device
        self._load_s_max = load_s_max
        self._sharing = processes
        self._spawned_s = 0.0
        self._ended_because = ""  # why `kill` ended it, or what it told before it ended
        self._end_by_s = 0.0  # until when it may take to end, after `hang_up`
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader: MessageReader | None = None
        self._unsent: deque[Buffer] = deque()
        self.descriptor: int | None = None  # the socket to wait on; None until started, and after `close`
        self.ready = False  # the model is loaded
        self.on_measured: Callable[[Measured], None] = _ignore  # is told what the model measures of itself
        self.has_measured = False  # it was told something by this process
        self.on_spans: Callable[[ModelSpans], None] = _ignore_spans  # is told what the model records
        self.raised: list[Raised] = []  # what the process told; for the log, which takes it
        self._sent = 0  # the number of the last frame
        # Frames without an outcome by number, oldest first. Outcomes of an async model come in any order.
        self._unanswered: dict[int, tuple[FrameHeader, tuple[Buffer, ...]]] = {}
        self._is_async = False

    def new_like(self) -> ProcessHandle:
        """A handle for another process of the same model on the same device. It is not started."""
        new = ProcessHandle(
            self._location, self.device, self._load_s_max, processes=self._sharing, replica=self._replica
        )
        new._configuration = self._configuration
        new.on_measured, new.on_spans = self.on_measured, self.on_spans
        return new

    def exchange(self, other: ProcessHandle) -> None:
        """Take the process of a handle that was made by `new_like`, which gets this one's. Neither has a
        frame without an outcome."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def start(self) -> Ready:
        """Start the process and load the model. Raises ModelLoadError."""
        self.spawn()
        return self.wait_ready()

    def spawn(self) -> None:
        """Start the process, without waiting for its model. One that has not ended is killed."""
        self.close(wait_s=0)
        self.ready = False
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        arguments = [str(os.getpid()), str(theirs.fileno()), self._location, self.device, self._replica]
        # -P: nothing is imported from the working directory, where files of any name may be.
        command = [sys.executable, "-P", "-m", "carpool_worker.model_process.main", *arguments]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=with_threads(_environment(), self._sharing),
        )
        theirs.close()
        self._sock, self._reader = ours, MessageReader(ours)
        self.descriptor = ours.fileno()
        self._sent, self.has_measured = 0, False
        self._unanswered.clear()
        self._unsent.clear()
        self._spawned_s, self._ended_because = time.monotonic(), ""
        self.send_message((CONFIGURATION,), self._configuration)

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded. Raises ModelLoadError."""
        while (ready := self.receive_ready()) is None:
            self.check_loading()
            left_s = self._load_s_left()
            assert self.descriptor is not None  # it was started
            writers = [self.descriptor] if self.has_unsent else []
            wait_s = _ALIVE_S if left_s is None else min(_ALIVE_S, left_s)
            if wait_until_ready([self.descriptor], writers, wait_s)[1]:
                self.flush()
        return ready

    def receive_ready(self) -> Ready | None:
        """What the model declares, once it is loaded; None: it is still loading. Raises ModelLoadError."""
        try:
            message = self._receive(read_load_result)
        except ProcessGoneError:
            reason = f"the model process ended ({self.exit_cause()}) while it loaded the model"
            self.close(wait_s=0)
            raise ModelLoadError(reason, trace="") from None
        if message is None:
            return None
        result, _ = message
        if isinstance(result, LoadFailed):
            self.close()
            raise ModelLoadError(result.reason, result.trace)
        self.ready, self._is_async = True, result.is_async
        return result

    def _load_s_left(self) -> float | None:
        """How long the model may still take to load; None: without a limit."""
        if self._load_s_max is None:
            return None
        return max(0.0, self._spawned_s + self._load_s_max - time.monotonic())

    def check_loading(self) -> None:
        """End a process whose model takes too long to load. Raises ModelLoadError then."""
        if self.descriptor is not None and not self.ready and self._load_s_left() == 0:
            self._give_up_loading()

    def _give_up_loading(self) -> NoReturn:
        self.close(wait_s=0)
        reason = f"the model was not loaded within {self._load_s_max:g} s (--load-s-max)"
        raise ModelLoadError(reason, trace="")

    def kill(self, reason: str) -> None:
        """End a process that hangs. `receive` reports it."""
        if self._process is not None:
            self._ended_because = reason
            self._process.kill()

    @property
    def pid(self) -> int | None:
        """The process's ID; None before it is started and after it is closed."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait until the pipe has room."""
        return bool(self._unsent)

    @property
    def has_buffered(self) -> bool:
        """Whether an outcome can be received without waiting on the socket first."""
        return self._reader is not None and self._reader.has_buffered

    def send(self, header: FrameHeader, *payload: Buffer) -> int:
        """Send a frame, or keep unsent what does not fit into the pipe. Returns its number."""
        self._sent += 1
        self._unanswered[self._sent] = (header, payload)
        self.send_message((*header[:-1], self._sent), *payload)
        return self._sent

    def send_message(self, header: object, *payload: Buffer) -> None:
        """Send a message that no outcome answers, as those to a stepping model are (`stepping.frames`)."""
        self.put_message(header, *payload)
        self.flush()

    def put_message(self, header: object, *payload: Buffer) -> None:
        """Add a message to what is unsent only: `flush` sends it, together with others."""
        self._unsent += message_parts(header, *payload)

    def flush(self) -> None:
        """Send what the pipe has room for."""
        unsent, sock = self._unsent, self._sock
        try:
            while unsent and sock is not None:
                drop_sent(unsent, sock.sendmsg(islice(unsent, PARTS_MAX), (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except OSError:
            unsent.clear()

    def receive(self) -> tuple[OutcomeHeader, Buffer] | None:
        """The outcome of the oldest frame that has none, of an async model of any; None if it has not
        arrived.

        Raises ProcessGoneError, also for an outcome out of order: the frames of all later ones would be
        unknown.
        """
        message = self.receive_message(read_answer)
        if message is None:
            return None
        header, payload = message
        if isinstance(header, Again):
            self._send_again(header)
            return None
        if not self._is_awaited(header.number):
            self._end("it sent an outcome out of order, as a process does that the model forked")
        del self._unanswered[header.number]
        return header, payload

    def _is_awaited(self, number: int) -> bool:
        """Whether the next outcome may be that of the frame with this number."""
        if self._is_async:
            return number in self._unanswered
        return number == next(iter(self._unanswered), None)

    def _send_again(self, wanted: Again) -> None:
        """Send a frame without an outcome once more. Raises ProcessGoneError for another one.

        One that is not the oldest is executed while results of the one before it are encoded.
        """
        if wanted.number not in self._unanswered:
            self._end("it asked for a frame out of order, as a process does that the model forked")
        header, payload = self._unanswered[wanted.number]
        self.send_message((*header[:-1], wanted.number), *payload)

    def receive_message(self, read: Callable[[Sequence[Any]], Message]) -> tuple[Message, Buffer] | None:
        """The next message, as `read` makes it from its header's fields, and its payload; None if it has not
        arrived yet. What the model raised is put into `raised`. Raises ProcessGoneError, also if the process
        tells that it ends."""

        def read_or_end(fields: Sequence[Any]) -> Message | None:
            raised = Raised.read(fields)
            if raised is not None:
                self.raised.append(raised)
                return None
            measured = Measured.read(fields)
            if measured is not None:
                self.has_measured = True
                self.on_measured(measured)
                return None
            spans = ModelSpans.read(fields)
            if spans is not None:
                self.on_spans(spans)
                return None
            ending = Ending.read(fields)
            if ending is not None:
                self._ended_because = f"unhealthy, {ending.reason}"
                raise ProcessGoneError(self._ended_because)
            return read(fields)

        message, payload = self._receive(read_or_end) or (None, b"")
        return None if message is None else (message, payload)

    def _receive(self, read: Callable[[Sequence[Any]], Message]) -> tuple[Message, Buffer] | None:
        reader = self._reader
        if reader is None:
            raise ProcessGoneError("not started")
        try:
            message = reader.receive_arrived()
            if message is None:
                if self.alive:
                    return None
                # It has ended, and another process that it started holds the connection open.
                message = reader.receive_arrived()  # what it sent last
                if message is None:
                    raise ProcessGoneError("the process ended")
            fields, payload = message
            return read(fields), payload
        except MemoryError:
            self._end("its worker has not enough memory for what it sent")
        except (StrayBytesError, LookupError, TypeError, ValueError):
            structlog.get_logger().error(
                "model wrote into the connection to its worker, ending its process",
                replica=self._replica,
                pid=self.pid,
            )
            self._end(_WROTE)

    def _end(self, reason: str) -> NoReturn:
        """End a process of which nothing more can be read."""
        self.kill(reason)
        raise ProcessGoneError(reason)

    def exit_cause(self) -> str:
        """How the process ended, for logs and errors."""
        if self._process is None:
            return "not started"
        try:
            cause = exit_cause(self._process.wait(timeout=1.0))
            return self._ended_because or cause
        except subprocess.TimeoutExpired:
            return self._ended_because or "connection closed"

    def hang_up(self, within_s: float = STOP_S) -> None:
        """Close the connection, so that the process unloads its model and ends, which is not waited for.

        The next one may need the memory that it still holds, on its device too: see `has_ended`.
        """
        self.ready = False
        self._close_connection()
        self._end_by_s = time.monotonic() + within_s

    def has_ended(self) -> bool:
        """Whether there is no process. One that has not ended in time after `hang_up` is killed."""
        process = self._process
        if process is None or process.poll() is not None:
            return True
        if time.monotonic() >= self._end_by_s:
            process.kill()
        return False

    def _close_connection(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = self._reader = self.descriptor = None

    def close(self, wait_s: float = STOP_S) -> None:
        """Close the connection, so that the process unloads its model and ends; kill it after `wait_s`."""
        self._close_connection()
        if self._process is not None:
            wait_or_kill(self._process, wait_s)
            self._process = None


def _environment() -> dict[str, str]:
    """The variables of a model process: not how its worker signs in to Redis, nor parameters, which processes
    that the model starts would get as well. In place of the former is the address that a model may use, if
    there is one. `Client()` and `AsyncClient()` read these two, and no others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_WORKER)}
    own |= OF_WEB_PROGRAMS  # a model may use prometheus-client itself
    own["CARPOOL_MODEL_PROCESS"] = "1"
    if url := own.get("CARPOOL_MODEL_REDIS_URL"):
        own["CARPOOL_REDIS_URL"] = url
    return own
