"""A worker process for each model of a file, so that none disturbs another.

They are forked, with what was read of the file. If one ends by itself, the others drain, and this process
ends: what started it starts all of them again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from carpool.lifecycle import die_with_parent, stop_on_signals

_POLL_S: Final = 0.2


def run_each(names: Sequence[str], run: Callable[[int], int]) -> int:
    """Call `run` with the number of each model in a process of its own; in that, return its status.

    To be called while the process has one thread. In this process, return 0 if all ended with 0 after a
    signal, else 1.
    """
    parent, children = os.getpid(), dict[int, str]()
    for number, name in enumerate(names):
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            return run(number)
        children[pid] = name
    stop, is_clean = stop_on_signals(), True
    while not stop.wait(_POLL_S):
        if (ended := _ended(children)) is not None:
            name, status = ended
            structlog.get_logger().error(
                "worker of a model ended, stopping the others", model=name, status=status
            )
            is_clean = False
            break
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    for pid in children:
        is_clean &= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return 0 if is_clean else 1


def _ended(children: dict[int, str]) -> tuple[str, int] | None:
    """One of these that has ended, and how; it is removed from them."""
    for pid, name in children.items():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del children[pid]
            return name, os.waitstatus_to_exitcode(status)
    return None
