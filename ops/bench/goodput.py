"""Goodput: requests per second that are answered OK within their deadline.

    .venv/bin/python ops/bench/goodput.py [--requests 6000] [--write]
    .venv/bin/python ops/bench/goodput.py --real [--models line,square,steps] [--workers 1,2,4]
        [--deadlines 15,50] [--arrivals Poisson,bursty] [--loads 0.6,0.9,1.2,1.5]
        [--policies deferred,eager] [--floods refused,bursts,raising] [--seconds 12] [--rounds 1]
        [--runs FILE] [--write]

Without --real, in virtual time, with the production scheduler: each policy as a share of a bound, and its
mean latency at low load. Triton's policy and count-or-timeout use the best of several delays at each point.
Policies and bounds count the same requests (`deadlines.bounds`, `deadlines.virtual`).

With --real, Redis, a batcher, a worker and a client: the share of the bound that is really answered in time,
beside virtual time; the causes of what was missed; and what a flood of bodies that fail does to other
requests (`deadlines.measure`). All of it takes an hour and a half a round. A run says nothing, and is marked,
if the host withheld more than 5% of the CPU time, the machine was busy for more than 90% of it, or the
producer did not keep up. With --runs, runs are added to a file, those that it has count too, and those that
say nothing are repeated: call it again until all runs are valid.

--write puts the tables into GOODPUT.md and goodput.svg, or GOODPUT_REAL.md, beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from deadlines import real_document, virtual_document
from deadlines.flood import FLOODS
from deadlines.measure import do_runs
from deadlines.plans import REAL_MODELS, Choice
from deadlines.points import ARRIVALS
from deadlines.runs import Run, read_runs
from deadlines.virtual import mean_latencies, measure_all
from grid import machine

HERE: Final = Path(__file__).parent
REQUESTS: Final = 6000


def simulate(requests: int, *, write: bool) -> None:
    """Measure in virtual time."""
    results = measure_all(requests)
    lines = list(virtual_document.body(results, mean_latencies(requests)))
    print("\n".join(lines))
    if write:
        (HERE / "GOODPUT.md").write_text("\n".join([virtual_document.HEAD, *lines, ""]))
        virtual_document.plot(results, HERE / "goodput.svg")


def measure(choice: Choice, file: Path | None, *, write: bool) -> None:
    """Measure on the real system."""
    runs = [] if file is None else read_runs(file)
    described = machine.sentences(machine.describe(Path(sys.executable))) if write else []

    def keep(run: Run) -> None:
        runs.append(run)
        if file is not None:
            with file.open("a") as to:
                to.write(run.to_json() + "\n")

    plans = choice.plans([run.plan for run in runs if run.is_valid])
    do_runs(plans, choice.seconds, keep)
    lines = list(real_document.body(runs))
    print("\n".join(lines))
    if write:
        facts = [f"- {sentence}" for sentence in described]
        (HERE / "GOODPUT_REAL.md").write_text("\n".join([real_document.HEAD, *facts, "", *lines, ""]))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the documents")
    parser.add_argument("--requests", type=int, help=f"number at each point in virtual time ({REQUESTS})")
    parser.add_argument("--real", action="store_true", help="measure on the real system")
    real = parser.add_argument_group("with --real").add_argument
    real("--models", type=_names(REAL_MODELS))
    real("--workers", type=_numbers(int))
    real("--deadlines", type=_numbers(int), help="in ms")
    real("--arrivals", type=_names(ARRIVALS))
    real("--loads", type=_numbers(float), help="1: the highest rate at which deadlines can be met")
    real("--policies", type=lambda text: text.split(","))
    real("--floods", type=_names(FLOODS), help="empty: none")
    real("--seconds", type=float, help="of each run, at most, without those of learning")
    real("--rounds", type=int, help="runs of each policy at each point")
    real("--runs", type=Path, metavar="FILE", help="keep runs here")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    chosen = {name: given[name] for name in Choice._fields if name in given}
    if not given["real"]:
        if chosen or "runs" in given:
            parser.error(f"--{next(iter(chosen), 'runs')} needs --real")
        simulate(given.get("requests", REQUESTS), write=given["write"])
    elif "requests" in given:
        parser.error("--requests is for virtual time: use --seconds")
    else:
        measure(Choice(**chosen), given.get("runs"), write=given["write"])


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(number) for number in text.split(",")]


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",") if text else []
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names


if __name__ == "__main__":
    main()
