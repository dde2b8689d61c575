"""What the benchmarks share: the services of a stack, and the CPU time of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Final

NOOP: Final = f"noop={Path(__file__).with_name('noop.py')}:Noop"


def start(
    url: str, log: IO[bytes], module: str, *arguments: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a service, such as `carpool_batcher`, beside the Redis at `url`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "CARPOOL_REDIS_URL": url, **environment},
        stdout=log,
        stderr=log,
    )


def stop(services: Collection[subprocess.Popen[bytes]]) -> None:
    """Stop services, all at once."""
    for service in services:
        service.terminate()
    for service in services:
        service.wait()


def cpu_time_us(pid: int) -> float:
    """User and system time of a process so far, of all its threads: more exact than /proc/PID/stat."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1000


def child_of(pid: int) -> int:
    """The first child of a process: the model process of a worker."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class CpuMeter:
    """The CPU time of processes since this was made, until it is first stopped."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._used_us: dict[str, float] = {}
        self._before_us = self._now_us()

    def stop(self) -> dict[str, float]:
        """By name, in us."""
        if not self._used_us:
            self._used_us = {name: us - self._before_us[name] for name, us in self._now_us().items()}
        return self._used_us

    def _now_us(self) -> dict[str, float]:
        return {name: cpu_time_us(pid) for name, pid in self._pids.items()}
