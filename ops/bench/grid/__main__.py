"""The command line of the grid."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import TypeVar

from grid import machine, report
from grid.catalog import SYSTEMS
from grid.environments import BUILD, Environments, UnavailableError
from grid.runner import progress_to_stderr, run_grid
from grid.workloads import WORKLOADS

_Item = TypeVar("_Item")


def chosen(kind: str, patterns: str, items: Mapping[str, _Item]) -> list[_Item]:
    """The items whose keys match one of the patterns, such as 'carpool*,mosec'. Exits if a pattern matches
    none."""
    words = [word.strip() for word in patterns.split(",") if word.strip()]
    for word in words:
        if not any(fnmatch(key, word) for key in items):
            raise SystemExit(f"no {kind} matches {word!r}; there are: {', '.join(items)}")
    return [item for key, item in items.items() if any(fnmatch(key, word) for word in words)]


def main() -> None:
    """Measure, print, write."""
    systems = {system.key: system for system in SYSTEMS}
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Measure Carpool and other systems under the same workloads, side by side.",
        epilog=f"Systems: {', '.join(systems)}. Workloads: {', '.join(WORKLOADS)}.",
    )
    parser.add_argument("--systems", default="*", help="such as 'carpool*,mosec' (default: all)")
    parser.add_argument("--workloads", default="*", help="such as 'overhead,images' (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--python",
        default=getattr(sys, "_base_executable", sys.executable),
        help="the interpreter that runs all systems (default: the one of .venv)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/benchmarks.md and its plots; needs all systems and workloads",
    )
    options = parser.parse_args()
    of_systems = chosen("system", options.systems, systems)
    of_workloads = chosen("workload", options.workloads, WORKLOADS)
    if options.write and (len(of_systems), len(of_workloads)) != (len(systems), len(WORKLOADS)):
        parser.error("--write needs all systems and workloads")
    started_s = time.monotonic()
    try:
        environments = Environments(options.python)
        description = machine.describe(environments.get("carpool") / "python")
    except UnavailableError as error:
        raise SystemExit(str(error)) from error
    print("\n".join(machine.sentences(description)), file=sys.stderr)
    results = run_grid(of_systems, of_workloads, environments, options.rounds, progress_to_stderr)
    document = report.Report(description, of_systems, of_workloads, results, options.rounds)
    print(document.text())
    path = BUILD / "results.json"
    path.write_text(document.json())
    print(f"written: {path}, after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if options.write:
        for written in document.write():
            print(f"written: {written}", file=sys.stderr)


if __name__ == "__main__":
    main()
