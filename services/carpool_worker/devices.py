"""Which device each model process gets, and how many CPUs they may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Final, Literal

_DEV: Final = "/dev"
_CGROUPS: Final = "/sys/fs/cgroup"
_OWN_CGROUPS: Final = "/proc/self/cgroup"
_NO_GPU: Final = frozenset({"void", "none"})  # of NVIDIA's container runtime
# Each is read by a library of its own, which uses the first one if its own is not set.
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


# --- GPUs --------------------------------------------------------------------------------------------------


def devices(names: str, replicas: int | Literal["auto"]) -> list[str]:
    """The device of each model process, assigned in turn from `names`.

    `names` is a list such as `cpu` or `cuda:0,cuda:1`, or `auto`: every GPU that this process may use, the
    CPU if there is none. With `replicas` auto there is one process for each device.
    """
    if names == "auto":
        found = sum(path.name[6:].isdigit() for path in Path(_DEV).glob("nvidia*"))
        available = [f"cuda:{index}" for index in range(visible_gpus(os.environ, found))] or ["cpu"]
    else:
        available = [name.strip() for name in names.split(",") if name.strip()] or ["cpu"]
    count = len(available) if replicas == "auto" else replicas
    return [available[index % len(available)] for index in range(count)]


def visible_gpus(environment: Mapping[str, str], found: int) -> int:
    """How many of the GPUs that were found CUDA shows to a process with this environment. It numbers them
    from 0.

    As CUDA does: the list in CUDA_VISIBLE_DEVICES ends before the first entry that names no GPU, or one that
    was named before. Entries are indexes, or UUIDs of GPUs and of their MIG parts.
    """
    if environment.get("NVIDIA_VISIBLE_DEVICES") in _NO_GPU:
        return 0
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    named: set[str] = set()
    for name in map(str.strip, listed.split(",")):
        is_index = name.isascii() and name.isdigit() and int(name) < found
        if name in named or not (is_index or name.startswith(("GPU-", "MIG-"))):
            break
        named.add(name)
    return len(named) if found else 0


# --- CPUs --------------------------------------------------------------------------------------------------


def with_threads(environment: Mapping[str, str], processes: int) -> dict[str, str]:
    """The environment of each of these model processes, in which numeric libraries start as many threads as
    there are CPUs for it. What the user has set stays: of OMP_NUM_THREADS, which all of them read, nothing
    else is set, of another one its own value."""
    own = dict(environment)
    if "OMP_NUM_THREADS" not in own:
        threads = str(max(1, usable_cpus() // processes))
        own |= {name: threads for name in THREAD_VARIABLES if name not in own}
    return own


def threads_of(environment: Mapping[str, str], processes: int) -> str:
    """How many threads numeric libraries start in each of these model processes, for the log."""
    return with_threads(environment, processes)[THREAD_VARIABLES[0]]


def usable_cpus(cgroups: Path | None = None, own: Path | None = None) -> int:
    """How many CPUs this process may use at the same time, rounded up: by its affinity, and by the CPUs and
    the quota of its control groups, of version 1 or 2. Containers have these."""
    cgroups, own = cgroups or Path(_CGROUPS), own or Path(_OWN_CGROUPS)
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not on Linux
        lines = []
    limits = chain.from_iterable(_limits(cgroups, line) for line in lines)
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, ceil(min([cpus, *limits])))


def _limits(cgroups: Path, line: str) -> Iterator[float]:
    """The numbers of CPUs that one line of /proc/self/cgroup stands for."""
    _, controllers, path = line.split(":", 2)
    names = controllers.split(",")
    if controllers and not {"cpu", "cpuset"} & set(names):
        return
    mounts = [cgroups / name for name in (controllers, *names)] if controllers else [cgroups]
    mount = next((folder for folder in mounts if folder.is_dir()), None)
    if mount is None:
        return
    # In a container, the path may be that on its host, which is not to be seen: then the root is its own.
    inner = mount / path.lstrip("/")
    folder = inner if inner.is_dir() else mount
    while True:
        yield from _quota(folder)
        yield from _cpuset(folder)
        if folder == mount:
            return
        folder = folder.parent


def _quota(folder: Path) -> Iterator[float]:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are no limit
        yield int(quota) / int(period)


def _cpuset(folder: Path) -> Iterator[int]:
    """Such as 0-3,8."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    listed = next(filter(None, (_read(folder / name) for name in names)), "")
    ends = [part.partition("-") for part in listed.split(",") if part]
    if ends:
        yield sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
