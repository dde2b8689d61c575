"""The model process as its worker sees it: started, spoken to, replaced when it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Literal

from carpool_worker.model_process import frames

_SOCKET_BYTES: Final = 4 * 1024 * 1024
STOP_S: Final = 10.0


class ModelLoadError(Exception):
    """The model could not be loaded; the message says why, `trace` where, if code of its own raised."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class ModelProcess:
    """One process with one model in it. `start` may be called again after it died."""

    def __init__(self, where: str, device: str) -> None:
        self._where = where
        self.device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader: frames.FrameReader | None = None
        self.ready = False  # the model is loaded
        self._sent = self._heard = 0  # frames and outcomes: they are in order, and numbered to be sure of it

    def start(self) -> dict[str, Any]:
        """Start the process and load the model, however long that takes.

        Returns how the model describes itself. Raises ModelLoadError.
        """
        self.spawn()
        return self.wait_ready()

    def spawn(self) -> None:
        """Start the process, without waiting for its model."""
        self.close(wait_s=0)
        self.ready = False
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):  # room for two batches of tensors, so that sending seldom waits
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        about = [str(os.getpid()), str(theirs.fileno()), self._where, self.device]
        command = [sys.executable, "-m", "carpool_worker.model_process.main", *about]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        self._sock, self._reader = ours, frames.FrameReader(ours)
        self._sent = self._heard = 0

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the model is loaded. Raises ModelLoadError."""
        try:
            header, _ = self._receive()
        except frames.ProcessGoneError:
            raise ModelLoadError(f"its process ended with {self.why_gone()} while loading", "") from None
        if "failed" in header:
            self.close()
            raise ModelLoadError(header["failed"], header["traceback"])
        self.ready = True
        return dict(header["ready"])

    @property
    def pid(self) -> int | None:
        """The process's ID."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def send(self, header: frames.Header, payload: bytes) -> None:
        """Send a frame. Raises ProcessGoneError."""
        if self._sock is None:
            raise frames.ProcessGoneError("not started")
        self._sent += 1
        frames.send_frame(self._sock, {**header, "number": self._sent}, payload)

    def receive(self) -> tuple[frames.Header, bytearray]:
        """The outcome of the oldest frame that has none.

        Raises ProcessGoneError, also if another's comes: nobody could know whose the next ones are.
        """
        header, payload = self._receive()
        self._heard += 1
        if header.get("number") != self._heard:
            self.close(wait_s=0)
            raise frames.ProcessGoneError(f"outcome {header.get('number')} came for frame {self._heard}")
        return header, payload

    def _receive(self) -> tuple[frames.Header, bytearray]:
        if self._reader is None:
            raise frames.ProcessGoneError("not started")
        return self._reader.receive()

    def why_gone(self) -> str:
        """How the process ended, for a log."""
        if self._process is None:
            return "not started"
        try:
            return _how(self._process.wait(timeout=1.0))
        except subprocess.TimeoutExpired:
            return "hung up"

    def close(self, wait_s: float = STOP_S) -> None:
        """Hang up, which tells the process to unload and leave; kill it if it does not within `wait_s`."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = self._reader = None
        if self._process is not None:
            try:
                self._process.wait(timeout=wait_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def devices(wanted: str, replicas: int | Literal["auto"]) -> list[str]:
    """A device for each model process: `cpu`, `cuda:0,cuda:1` in turn, or `auto`: every GPU in turn.

    As many as `replicas` says, or as there are devices.
    """
    if wanted == "auto":
        gpus = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
        names = [f"cuda:{index}" for index in range(len(gpus))] or ["cpu"]
    else:
        names = [name.strip() for name in wanted.split(",") if name.strip()] or ["cpu"]
    processes = len(names) if replicas == "auto" else replicas
    return [names[replica % len(names)] for replica in range(processes)]
