"""How much memory batches need beside the loaded model: of this process, and of a GPU that torch uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_RESET_PEAK: Final = b"5"  # man 5 proc: sets VmHWM, the peak, to what is used
_PEAK: Final = "VmHWM:"


@dataclass
class Needed:
    """The peaks during some executions, in bytes above what was used before the first one. None: this system
    does not tell, or there is no GPU."""

    host_bytes: int | None = None
    gpu_bytes: int | None = None


class Memory:
    """What is used when this is made is that of the loaded model.

    Allocators keep what is freed, and use it again. So smaller batches are to be measured before larger ones.
    """

    def __init__(self) -> None:
        self._host_bytes = _reset_host_peak()
        self._gpu_bytes = _reset_gpu_peak()

    @contextmanager
    def measured(self) -> Iterator[Needed]:
        """What is needed within; set at its end."""
        needed = Needed()
        _reset_host_peak()
        _reset_gpu_peak()
        yield needed
        if self._host_bytes is not None:
            needed.host_bytes = max(0, _host_peak() - self._host_bytes)
        gpu = _gpu()
        if gpu is not None:
            needed.gpu_bytes = max(0, gpu.max_memory_allocated() - self._gpu_bytes)


def _reset_host_peak() -> int | None:
    """Forget the peak so far. Returns what is used; None where the system does not tell."""
    try:
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
        try:
            os.write(descriptor, _RESET_PEAK)
        finally:
            os.close(descriptor)
        return _host_peak()
    except OSError:
        return None


def _host_peak() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(_PEAK)]
    return int(kibibytes) * 1024


def _reset_gpu_peak() -> int:
    """The same of the GPU: 0 if there is none."""
    gpu = _gpu()
    if gpu is None:
        return 0
    gpu.reset_peak_memory_stats()
    used_bytes: int = gpu.memory_allocated()
    return used_bytes


def _gpu() -> Any:
    """torch's functions for the memory of a GPU, if the model has imported torch and uses one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None
