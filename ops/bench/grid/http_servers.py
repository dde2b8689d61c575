"""HTTP servers side by side, all of them under wrk: tables for docs/benchmarks_http.md.

    make http                          # or, from ops/bench: .venv/bin/python -m grid.http_servers --help

wrk keeps a call in flight on each of its connections. What it does not know is measured as in the rest of the
grid: CPU time by process, and how much of it the host withheld. Calls that fail are counted, not errors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from host import STOLEN_MAX, Figures

from grid import machine
from grid.__main__ import chosen
from grid.catalog import HTTP_SYSTEMS, WAIT_MS
from grid.environments import ROOT, Environments, UnavailableError, wrk
from grid.report import MARK, NONE, Table, by_process, cpu_us, median, per_second, spread, thousands, wrapped
from grid.runner import Results, progress_to_stderr, run_grid
from grid.workloads import IN_FLIGHT, Workload

DOCUMENT: Final = ROOT / "docs/benchmarks_http.md"
_BATCH_SIZE: Final = 64
_OWN: Final = HTTP_SYSTEMS[0].name  # the others are compared with it
_HEAD: Final = ("requests/s", f"times {_OWN}'s", "p50, ms", "p99, ms", "errors", "CPU µs", "by process")

_EXPLANATION: Final = (
    "wrk, with one thread, shares the cores with what it measures. Batches have up to "
    f"{_BATCH_SIZE} requests; where a system has a setting for how long a batch waits until it is full, it "
    f"is {WAIT_MS:g} ms.",
    "Carpool is Redis, on a Unix socket as with `carpool up`, a batcher, a worker with its model process, "
    "and a gateway. It is sent raw bytes at /carpool/v1, and at /v2 binary tensors, as is PyTriton. mosec is "
    "sent raw bytes, and LitServe its JSON, with the bytes in base64.",
    "Where a call has 64 rows, each row is a request, and latencies are those of calls.",
    "Errors, of all rounds: calls that were refused (a status of 400 or more) + calls without an answer (a "
    "connection that broke, or more than 20 s). Only what was answered without an error counts as a request.",
    "CPU µs: user and system time of a request, of all processes of the system and of wrk (producer).",
    f"Rounds are repeated in which the host withheld more than {STOLEN_MAX:.0%} of the CPU time from this "
    f"virtual machine. {MARK} marks a figure that has no other round.",
)


def workloads(connections: Sequence[int], seconds: float) -> dict[str, Workload]:
    """What is measured, for whole seconds at each number of connections."""
    orders: dict[str, dict[str, Any]] = {
        str(number): {"load": "closed", "in_flight": number, "seconds": seconds, "counts_errors": True}
        for number in connections
    }
    of = (
        (
            "http",
            "512 bytes",
            "A model that does nothing, on float32[128]: bodies and results of 512 bytes.",
            "noop",
        ),
        ("http-pictures", "50 kB", "Bodies of 50,000 bytes, as of an image, and results of 8.", "picture"),
    )
    return {
        name: Workload(name, title, description, model, _BATCH_SIZE, orders)
        for name, title, description, model in of
    }


def table(results: Results, workload: Workload, connections: str) -> Table:
    """All systems with one number of connections."""
    own = results.cell(workload.name, _OWN, connections)
    measured = [
        (system.name, results.cell(workload.name, system.name, connections)) for system in HTTP_SYSTEMS
    ]
    rows = [_row(name, rounds, own) for name, rounds in measured if rounds]
    return Table([f"{thousands(connections)} in flight", *_HEAD], rows)


def _row(name: str, rounds: Sequence[Figures], own: Sequence[Figures]) -> list[str]:
    """The figures of a system, and those of Carpool, with which it is compared if there are any."""
    answered = [figures for figures in rounds if figures["per_second"]]
    ratio = f"{median(rounds, per_second) / median(own, per_second):.2f}" if own else NONE
    return [
        name,
        spread(rounds, per_second, ",.0f"),
        ratio,
        *(spread(answered, itemgetter(key), ",.2f") for key in ("p50_ms", "p99_ms")),
        " + ".join(f"{sum(map(itemgetter(key), rounds)):,}" for key in ("refused", "broken")),
        spread(answered, cpu_us, ",.1f"),
        by_process(answered, "cpu_us", ",.1f") if answered else NONE,
    ]


def document(
    results: Results, of_workloads: Sequence[Workload], described: Sequence[str], seconds: float, rounds: int
) -> Iterator[str]:
    """The lines of the document."""
    yield from ("# HTTP servers side by side", "")
    yield from wrapped(
        f"Written by `make http`: {rounds} rounds of {seconds:g} s for each figure, one system after "
        "another, with the order reversed from round to round. Figures are medians; the range of the rounds "
        "is in brackets. Trust the ratios more than the values."
    )
    yield ""
    for sentence in (*described, *_EXPLANATION):
        yield from wrapped(sentence, "- ")
    for workload in of_workloads:
        yield from ("", f"## {workload.title}", "", *wrapped(workload.description))
        for connections in workload.orders:
            yield from ("", *table(results, workload, connections).markdown())
    left_out = [f"{system}, {name}: {reason}" for (name, system), reason in results.left_out.items()]
    for system in HTTP_SYSTEMS:
        for cell, reason in system.cells_left_out.items():
            left_out.append(f"{system.name}, {thousands(cell)} in flight: {reason}")
    yield from ("", "## Left out", "")
    for line in left_out:
        yield from wrapped(line, "- ")
    yield ""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="make http",
        description="Measure Carpool's gateway and other HTTP servers, side by side, under wrk.",
    )
    systems = {system.key: system for system in HTTP_SYSTEMS}
    parser.add_argument("--systems", default="*", help=f"of {', '.join(systems)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each figure")
    parser.add_argument(
        "--python",
        default=getattr(sys, "_base_executable", sys.executable),
        help="the interpreter that runs all systems (default: the one of .venv)",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}; needs all systems"
    )
    options = parser.parse_args()
    of_systems = chosen("system", options.systems, systems)
    if options.write and len(of_systems) != len(systems):
        parser.error("--write needs all systems")
    try:
        wrk()
        environments = Environments(options.python)
        described = machine.sentences(machine.describe(environments.get("carpool") / "python"))
    except UnavailableError as error:
        raise SystemExit(str(error)) from error
    of_workloads = list(workloads(IN_FLIGHT, options.seconds).values())
    results = run_grid(of_systems, of_workloads, environments, options.rounds, progress_to_stderr)
    text = "\n".join(document(results, of_workloads, described, options.seconds, options.rounds))
    print(text)
    if options.write:
        DOCUMENT.write_text(text)
        print(f"written: {DOCUMENT}", file=sys.stderr)


if __name__ == "__main__":
    main()
