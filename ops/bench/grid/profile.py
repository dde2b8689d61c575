"""Where each microsecond of a request goes, by process: a table for docs/profile.md.

    make profile                       # or, from ops/bench: .venv/bin/python -m grid.profile --help

Two measurements of the same stack, one right after the other. The first reads from the kernel, undisturbed,
how long each process ran its own code, and how long the kernel ran for it. In the second py-spy looks at each
Python process 200 times a second, at the thread that holds the interpreter's lock (the GIL): a function's
share of these samples (its own, not of what it called) is its share of the process's own time. C code such as
numpy, hiredis and msgpack counts for the Python function that called it. Redis reports the time of each
command itself (INFO commandstats).

Samples of all running threads would be worth more, but not every kernel lets py-spy see which threads run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grid import machine, processes
from grid.catalog import SYSTEMS
from grid.environments import ROOT, Environments, UnavailableError
from grid.load import WARM_UP_S
from grid.redis_server import RedisServer
from grid.report import Table, wrapped
from grid.runner import FailedError, Running, started
from grid.workloads import WORKLOADS

DOCUMENT: Final = ROOT / "docs/profile.md"
_SAMPLES_PER_S: Final = 200
_ROWS_MAX: Final = 12
_FUNCTIONS_MAX: Final = 3
_US_MIN: Final = 0.05
KERNEL: Final = "system calls, in the kernel"
_XADD_OF_REQUESTS: Final = 1 / 3  # of the time in XADD: bodies are added as requests, as a batch, as results
_FRAME: Final = re.compile(r"(?P<function>.+) \((?P<file>.+?)(:\d+)?\)$")
_OURS: Final = re.compile(r"(?:.*/)?(?P<path>carpool(?:_\w+)?/.+)\.py$")

_EXPLANATION: Final = (
    "How long each process ran its own code, and the kernel for it, is read from the kernel, undisturbed. "
    "Then py-spy samples the Python stacks of the same processes, and a function gets its share of the "
    "process's own time: its own, without the functions that it calls. C code (numpy, hiredis, msgpack) "
    "counts for the Python function that calls it.",
    "Redis reports the time in each command. XADD is called by producers and by scripts; a third is counted "
    "for producers, because the bodies are added three times: as requests, as a batch, as results.",
)
_LIBRARY: Final = re.compile(r".*/(site-packages|python3\.\d+)/")

Costs = Mapping[str, float]  # us a request, by function


def group(frame: str) -> str:
    """The row of a stack frame, such as `carpool/wire/requests: decode_entry` or `asyncio: _run_once`."""
    match = _FRAME.match(frame)
    if match is None:
        return frame
    path, function = match["file"], match["function"]
    if ours := _OURS.match(path):
        return f"{ours['path']}: {function}"
    parts = _LIBRARY.sub("", path).strip("/").removesuffix(".py").split("/")
    return f"{parts[0] if not path.startswith('/') or _LIBRARY.search(path) else parts[-1]}: {function}"


def shares(stacks: str) -> dict[str, float]:
    """Of py-spy's raw output, a line for each stack and its number of samples: the share of each leaf."""
    samples: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        samples[group(stack.rpartition(";")[2])] += int(count)
    total = sum(samples.values())
    return {name: count / total for name, count in samples.most_common()} if total else {}


def measure(environments: Environments, in_flight: int, seconds: float) -> dict[str, Costs]:
    """us a request by process and function."""
    spy = environments.get("py-spy") / "py-spy"
    carpool = next(system for system in SYSTEMS if system.key == "carpool")
    order = {"load": "closed", "in_flight": in_flight, "seconds": seconds}
    with started(carpool, WORKLOADS["overhead"], environments) as running:
        assert running.redis is not None
        pids = _pids(running)
        commands_us, times_us = _command_us(running.redis), _times_us(pids)
        requests = running.order(order)["per_second"] * (seconds + WARM_UP_S)
        commands_us = {
            name: (us - commands_us.get(name, 0.0)) / requests
            for name, us in _command_us(running.redis).items()
        }
        times_us = {
            role: (user_us - times_us[role][0], system_us - times_us[role][1])
            for role, (user_us, system_us) in _times_us(pids).items()
        }
        sampled = _sampled(running, spy, pids, order, seconds)
    costs: dict[str, Costs] = {"redis": redis_costs(commands_us, sum(times_us["redis"]) / requests)}
    for role, of_role in sampled.items():
        user_us, system_us = times_us[role]
        own = {name: share * user_us / requests for name, share in of_role.items()}
        costs[role] = {KERNEL: system_us / requests, **own}
    return costs


def _pids(running: Running) -> dict[str, int]:
    """The process of each role: none has more than one that does work."""
    roots = {**running.pids, "producer": running.producer_pid}
    roles = processes.by_role(roots, {"worker": {"": "model"}})
    return {role: of_role[-1] if role == "model" else of_role[0] for role, of_role in roles.items()}


def _times_us(pids: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {role: processes.user_and_system_us(pid) for role, pid in pids.items()}


def redis_costs(command_us: Costs, cpu_us: float) -> dict[str, float]:
    """What Redis reports by command, and the rest. Commands in scripts are reported twice, as themselves
    too."""
    costs = {
        "EVALSHA, with the commands in the scripts": command_us.get("evalsha", 0.0),
        "XREAD": command_us.get("xread", 0.0),
        "XREADGROUP": command_us.get("xreadgroup", 0.0),
        "XADD of requests": command_us.get("xadd", 0.0) * _XADD_OF_REQUESTS,
    }
    return {**costs, "sockets, protocol, event loop": max(0.0, cpu_us - sum(costs.values()))}


def _command_us(redis: RedisServer) -> dict[str, float]:
    """The time in each command so far."""
    stats = redis.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): float(dict(pair.split("=") for pair in text.split(","))["usec"])
        for name, text in stats.items()
    }


def _sampled(
    running: Running, spy: Path, pids: Mapping[str, int], order: Mapping[str, Any], seconds: float
) -> dict[str, dict[str, float]]:
    """The shares of the functions of each Python process, sampled during an order."""
    options = [
        "--gil",
        "--format",
        "raw",
        "--rate",
        str(_SAMPLES_PER_S),
        "--duration",
        str(max(1, round(seconds))),
    ]
    with tempfile.TemporaryDirectory() as directory:
        spies = {
            role: subprocess.Popen(
                [str(spy), "record", "--pid", str(pid), "--output", f"{directory}/{role}", *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for role, pid in pids.items()
            if role != "redis"
        }
        running.order({**order, "seconds": seconds + 2.0})
        found = {}
        for role, process in spies.items():
            _, errors = process.communicate()
            if process.returncode != 0:
                raise SystemExit(f"py-spy failed (may it trace other processes?): {errors.strip()[-300:]}")
            found[role] = shares((Path(directory) / role).read_text())
        return found


# --- writing -----------------------------------------------------------------------------------------------


def by_module(costs: Costs) -> list[tuple[str, float, str]]:
    """The functions of each module together: name, us, and its largest functions. The largest modules
    first."""
    modules: dict[str, dict[str, float]] = {}
    for name, us in costs.items():
        module, _, function = name.partition(": ")
        modules.setdefault(module, {})[function] = us
    rows = []
    for module, functions in modules.items():
        largest = sorted(functions.items(), key=lambda item: -item[1])[:_FUNCTIONS_MAX]
        listed = ", ".join(f"{function} {us:.1f}" for function, us in largest if function and us >= _US_MIN)
        rows.append((module, sum(functions.values()), listed))
    return sorted(rows, key=lambda row: -row[1])


def tables(costs: Mapping[str, Costs]) -> Iterator[Table]:
    """A table for each process."""
    for role, of_role in costs.items():
        modules, total = by_module(of_role), sum(of_role.values())
        rows = [
            [module, f"{us:.1f}", f"{us / total:.0%}", functions]
            for module, us, functions in modules[:_ROWS_MAX]
        ]
        if rest := sum(us for _, us, _ in modules[_ROWS_MAX:]):
            rows.append([f"{len(modules) - _ROWS_MAX} others", f"{rest:.1f}", f"{rest / total:.0%}", ""])
        yield Table([f"{role}: {total:.1f} us", "us a request", "share", "largest functions"], rows)


def document(costs: Mapping[str, Costs], in_flight: int, description: Sequence[str]) -> str:
    """The text of docs/profile.md."""
    total = sum(sum(of_role.values()) for of_role in costs.values())
    lines = ["# Where each microsecond goes", ""]
    lines += wrapped(
        "Written by `make profile`. CPU time of a request, by process and module: a no-op model on "
        f"float32[128], {in_flight} requests in flight, batches of up to 64, {total:.1f} us in all."
    )
    lines += ["", *(line for sentence in (*description, *_EXPLANATION) for line in wrapped(sentence, "- "))]
    for table in tables(costs):
        lines += ["", *table.markdown()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, and perhaps write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--python", default=getattr(sys, "_base_executable", sys.executable))
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args()
    try:
        environments = Environments(options.python)
        description = machine.sentences(machine.describe(environments.get("carpool") / "python"))
        costs = measure(environments, options.in_flight, options.seconds)
    except (FailedError, UnavailableError) as error:
        raise SystemExit(str(error)) from error
    for table in tables(costs):
        print("\n".join(["", *table.text()]))
    if options.write:
        DOCUMENT.write_text(document(costs, options.in_flight, description))


if __name__ == "__main__":
    main()
