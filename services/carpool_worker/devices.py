"""Which device each model process gets, and how many CPUs they may use.

Why: docs/decisions/0087.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, takewhile
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal

_DEV: Final = "/dev"
_CGROUPS: Final = "/sys/fs/cgroup"
_OWN_CGROUPS: Final = "/proc/self/cgroup"
# Each is read by a library of its own, which uses the first one if its own is not set.
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",  # of macOS
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

    As CUDA does: entries of CUDA_VISIBLE_DEVICES are indexes, or UUIDs of GPUs or of MIG parts; the first
    one says which. The list ends before the first entry that names none. It also ends before one that was
    there before, of which CUDA's documents say nothing: to count no GPU would be to use the CPU silently.

    NVIDIA_VISIBLE_DEVICES is for a container's runtime, and CUDA does not read it. "none" is heeded. "void"
    says nothing: the Container Device Interface (CDI) sets it also where it adds GPUs.
    """
    if not found or environment.get("NVIDIA_VISIBLE_DEVICES") == "none":
        return 0
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    entries = [entry.strip() for entry in listed.split(",")]
    prefix = entries[0][:4]
    if prefix == "MIG-":
        return _distinct_before(entries, lambda entry: entry.startswith(prefix))
    if prefix == "GPU-":
        return min(found, _distinct_before(entries, lambda entry: entry.startswith(prefix)))
    return _distinct_before(map(_index, entries), lambda index: 0 <= index < found)


def _distinct_before(entries: Iterable[Any], names_one: Callable[[Any], bool]) -> int:
    """How many entries there are before the first that names none, or is there twice."""
    named: set[Any] = set()
    for entry in entries:
        if entry in named or not names_one(entry):
            break
        named.add(entry)
    return len(named)


def _index(entry: str) -> int:
    """The number at the beginning of an entry, which CUDA reads; -1 if there is none."""
    digits = "".join(takewhile("0123456789".__contains__, entry.removeprefix("+")))
    return int(digits) if digits else -1


# --- CPUs --------------------------------------------------------------------------------------------------


def with_threads(environment: Mapping[str, str], processes: int) -> dict[str, str]:
    """The environment of each of these model processes, in which numeric libraries start as many threads as
    there are CPUs for it. What the user has set stays: with OMP_NUM_THREADS, which all but macOS's read,
    nothing is added; another one keeps its own value. What is no number of threads, such as an empty text,
    counts as not set, because libraries ignore it."""
    own = dict(environment)
    if not _are_threads(own.get("OMP_NUM_THREADS", "")):
        threads = str(max(1, usable_cpus() // processes))
        own |= {name: threads for name in THREAD_VARIABLES if not _are_threads(own.get(name, ""))}
    return own


def _are_threads(value: str) -> bool:
    """Whether it is a number of threads, or one for each level of nesting: "4,2"."""
    first = value.partition(",")[0].strip()
    return first.isascii() and first.isdigit() and int(first) > 0


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
