"""The names of Carpool's processes, in Redis and in logs.

    HOST-PID-RANDOM              a batcher or a worker
    HOST-PID-RANDOM/REPLICA      one replica of a worker; its consumer name in Redis
    HOST-PID-RANDOM/REPLICA.LIFE the same, in its second life or a later one

RANDOM (six hex digits) keeps a process apart from an earlier one with the same pid, as in containers. A life
of a replica of a bound model ends when the states of the sequences in its model process are lost.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Final, NamedTuple

HOST_CHARS_MAX: Final = 40


class ProcessName(NamedTuple):
    """The parts of a name. `replica` is None for a batcher or a worker."""

    host: str
    pid: int
    replica: int | None = None


def new_process_name() -> str:
    """A name for the calling process, different at each call."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(3)}"


def replica_name(worker: str, replica: int) -> str:
    """The name of a worker's replica, counted from 0."""
    return f"{worker}/{replica}"


def name_of_life(replica: str, life: int) -> str:
    """The name of a replica in one of its lives, counted from 1."""
    return replica if life == 1 else f"{replica}.{life}"


def worker_of(replica: str) -> str:
    """The name of the worker whose replica has this name, in any of its lives."""
    return replica.partition("/")[0]


def replica_of(name: str) -> int:
    """The number of the replica that has this name; -1 if it has another form."""
    parsed = parse_process_name(name)
    return -1 if parsed is None or parsed.replica is None else parsed.replica


def parse_process_name(name: str) -> ProcessName | None:
    """The parts of a name; None if it has another form. A host's name may contain hyphens."""
    process, slash, life = name.partition("/")
    replica, dot, number = life.partition(".")
    host, _, pid = process.rpartition("-")[0].rpartition("-")
    is_complete = bool(slash) == replica.isdecimal() and bool(dot) == number.isdecimal()
    if not (host and pid.isdecimal() and is_complete):
        return None
    return ProcessName(host, int(pid), int(replica) if slash else None)


def is_local_process(name: str, pid: int | None) -> bool:
    """Whether `name` belongs to the process `pid` of this host, or to one of its replicas."""
    parsed = parse_process_name(name)
    return parsed is not None and (parsed.host, parsed.pid) == (_host(), pid)


def _host() -> str:
    return socket.gethostname()[:HOST_CHARS_MAX]
