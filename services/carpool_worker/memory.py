"""How much memory a process takes, and how much is free, as Linux and the driver of NVIDIA tell it.

What they do not tell is None: on other systems, without the driver, or in a container whose processes the
driver knows by other IDs.

Why: docs/decisions/0103.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

LOOK_FOR_CHILDREN_S: Final = 1.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MEMORY: Final = "/proc/meminfo"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NVML: Final = "libnvidia-ml.so.1"
_NVML_PROCESSES_MAX: Final = 256  # of one GPU


def resident_bytes(pid: int | None) -> int | None:
    """The resident memory of a process: without what is swapped out, with what it shares."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


class FamilyMemory:
    """What processes take together with those that they started, such as decoder processes. For one thread.

    It looks for these once a second: a process may have many threads, and each has its own list of them.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._children: list[int] = []
        self._look_at_s = 0.0

    def resident_bytes(self, pid: int | None) -> int | None:
        """The resident memory of a process and of its children; what they share counts for each."""
        own_bytes = resident_bytes(pid)
        if own_bytes is None:
            return None
        now_s = time.monotonic()
        if pid != self._pid or now_s >= self._look_at_s:
            self._pid, self._look_at_s = pid, now_s + LOOK_FOR_CHILDREN_S
            self._children = _children(pid)
        return own_bytes + sum(resident_bytes(child) or 0 for child in self._children)


def _children(pid: int | None) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


def available_bytes() -> int | None:
    """How much this process and its children may still take: of the machine, and of their control group."""
    try:
        lines = Path(_MEMORY).read_text().splitlines()
        of_machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    of_group = _left_in_group()
    return of_machine if of_group is None else min(of_machine, of_group)


def _left_in_group() -> int | None:
    """What is left of the memory of this process's control group (version 2); None if that has no limit."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = _CGROUPS / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")
        most, used = [(group / f"memory.{name}").read_text().strip() for name in ("max", "current")]
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(most) - int(used) + int(stat["inactive_file"])  # the kernel drops that first
    return None


# --- GPUs --------------------------------------------------------------------------------------------------


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t, as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuUse(NamedTuple):
    """Of all GPUs that a process uses: how much it takes there, and the least that is free on any of them."""

    used_bytes: int
    free_bytes: int


class Gpus:
    """The GPUs that NVIDIA's management library (NVML) shows."""

    def __init__(self, library: Any) -> None:
        """`library`: NVML. Raises OSError if it cannot be used."""
        self._library = library
        number = ctypes.c_uint()
        self._check(library.nvmlInit_v2())
        self._check(library.nvmlDeviceGetCount_v2(ctypes.byref(number)))
        self._handles = [self._handle(index) for index in range(number.value)]

    def use_of(self, pid: int) -> GpuUse | None:
        """What a process uses; None if it is on none of them, as far as is known."""
        found: list[GpuUse] = []
        try:
            for handle in self._handles:
                used_bytes = self._used(handle, pid)
                if used_bytes is not None:
                    memory = _MemoryInfo()
                    self._check(self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
                    found.append(GpuUse(used_bytes, memory.free))
        except OSError:
            return None
        return (
            GpuUse(sum(use.used_bytes for use in found), min(use.free_bytes for use in found))
            if found
            else None
        )

    def _used(self, handle: Any, pid: int) -> int | None:
        processes, number = (_ProcessInfo * _NVML_PROCESSES_MAX)(), ctypes.c_uint(_NVML_PROCESSES_MAX)
        ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        self._check(ask(handle, ctypes.byref(number), processes))
        unknown = ctypes.c_ulonglong(-1).value  # Windows, and parts of GPUs of others
        for process in processes[: number.value]:
            if process.pid == pid and process.used_bytes != unknown:
                return int(process.used_bytes)
        return None

    def _handle(self, index: int) -> Any:
        handle = ctypes.c_void_p()
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
        return handle

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"NVML says {status}")


@cache
def gpus() -> Gpus | None:
    """The GPUs of this machine; None if there is no driver that shows them."""
    try:
        return Gpus(ctypes.CDLL(_NVML))
    except (OSError, AttributeError):  # no driver, or one older than these functions
        return None


def gpu_use(pid: int | None) -> GpuUse | None:
    """What a process uses of the GPUs of this machine, as far as is known."""
    found = gpus() if pid is not None else None
    return None if found is None or pid is None else found.use_of(pid)
