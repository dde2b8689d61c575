"""CPU time and memory of process trees, from /proc. Standard library only: it runs in every environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_TICK_US: Final = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PROC: Final = Path("/proc")


def tree(pid: int) -> Iterator[int]:
    """A process and all its descendants, those first."""
    try:
        children = [
            int(child)
            for thread in (_PROC / str(pid) / "task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except FileNotFoundError:  # it ended
        return
    yield pid
    for child in children:
        yield from tree(child)


def cpu_us(pid: int) -> int:
    """User and system time of a process so far, and of its children that ended; 0 if it has ended itself."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return 0
    fields = stat.rsplit(")", 1)[1].split()
    return sum(int(field) for field in fields[11:15]) * _TICK_US


def user_and_system_us(pid: int) -> tuple[int, int]:
    """The CPU time of a process in its own code, and in the kernel."""
    fields = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) * _TICK_US, int(fields[12]) * _TICK_US


def memory_kib(pid: int, figure: str = "VmRSS") -> int:
    """Resident memory of a process; with `figure` VmHWM its peak. 0 if it has ended."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(figure)), 0)


def name_of(pid: int) -> str:
    """The name of a process's program, as the kernel knows it."""
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except FileNotFoundError:
        return ""


def by_role(roots: Mapping[str, int], child_roles: Mapping[str, Mapping[str, str]]) -> dict[str, list[int]]:
    """All processes of the trees below `roots`, grouped by role.

    A descendant has the role of its root, unless `child_roles[root's role]` has a role for the beginning of
    its name; '' matches every name.
    """
    roles: dict[str, list[int]] = {role: [] for role in roots}
    for role, root in roots.items():
        names = child_roles.get(role, {})
        for pid in tree(root):
            name = name_of(pid)
            of_child = next(
                (to for prefix, to in names.items() if pid != root and name.startswith(prefix)), role
            )
            roles.setdefault(of_child, []).append(pid)
    return roles


def cpu_us_by_role(roles: Mapping[str, list[int]]) -> dict[str, int]:
    """CPU time so far."""
    return {role: sum(map(cpu_us, pids)) for role, pids in roles.items()}


def memory_mib_by_role(roles: Mapping[str, list[int]], figure: str = "VmRSS") -> dict[str, float]:
    """Resident memory. Pages that processes share are counted in each of them."""
    return {role: sum(memory_kib(pid, figure) for pid in pids) / 1024 for role, pids in roles.items()}
