"""What the figures depend on: the interpreter, Redis, the machine and how busy it is."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from carpool.store.connection import Link
from grid.redis_server import RedisServer

_PINGS: Final = 1000

# Runs in the interpreter that the services use. Debian's and Ubuntu's are built with PGO, and do not tell.
_PROBE: Final = """
import json, platform, sys, sysconfig, time
variables = ("CONFIG_ARGS", "PY_CORE_CFLAGS", "PY_CORE_LDFLAGS")
flags = " ".join(str(sysconfig.get_config_var(name)) for name in variables)
def built_with(*options):
    return any(option in flags for option in options)
def loop():
    started_s = time.perf_counter()
    sum(number * number for number in range(100_000))
    return time.perf_counter() - started_s
print(json.dumps({
    "python": platform.python_version(),
    "interpreter": getattr(sys, "_base_executable", sys.executable),
    "pgo": built_with("--enable-optimizations", "-fprofile-use", "-fprofile-instr-use"),
    "of_distribution": sys.base_prefix == "/usr",
    "lto": built_with("--with-lto", "-flto"),
    "loop_ms": min(loop() for _ in range(10)) * 1e3,
}))
"""


def describe(python: Path) -> dict[str, Any]:
    """The machine, and its yardsticks: how long a PING and a fixed loop of Python take."""
    output = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=True).stdout
    with RedisServer() as redis:
        return {
            **json.loads(output),
            "redis": redis.version,
            "ping_us": _ping_us(redis.url),
            "ping_unix_us": _ping_us(redis.unix_url),
            "cores": os.cpu_count(),
            "processor": _processor(),
            "system": f"{platform.system()} {platform.release()}",
            "load": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d"),
        }


def sentences(machine: dict[str, Any]) -> list[str]:
    """The description for people."""
    if machine["pgo"]:
        build = "built with profile-guided optimisation (PGO)"
    elif machine["of_distribution"]:
        build = "built by the distribution (Debian's and Ubuntu's are built with PGO)"
    else:
        build = "built without profile-guided optimisation (PGO), which costs about a fifth"
    return [
        f"{machine['cores']} cores ({machine['processor']}), {machine['system']}; load before the start: "
        f"{machine['load']:.1f}.",
        f"Python {machine['python']}, {build}; a fixed loop takes {machine['loop_ms']:.1f} ms.",
        f"Redis {machine['redis']}; a PING takes {machine['ping_us']:.0f} us over TCP and "
        f"{machine['ping_unix_us']:.0f} us over a Unix socket.",
    ]


def _ping_us(url: str) -> float:
    """The median of single calls."""
    link = Link(url, name="yardstick")

    def once_s() -> float:
        started_s = time.perf_counter()
        link.call("PING")
        return time.perf_counter() - started_s

    try:
        return statistics.median(once_s() for _ in range(_PINGS)) * 1e6
    finally:
        link.close()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
