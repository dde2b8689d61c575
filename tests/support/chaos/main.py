"""Faults under load: `make chaos`, or `make chaos CHAOS='--faults "*killed*" --runs 10 --seed 7'`.

Each run prints its seed; with --runs 1 and that seed it is repeated. What a machine of many processes does is
not the same each time, but the faults come in the same order, and at the same number of requests.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path
from typing import Final

from support.chaos import nodes
from support.chaos.faults import FAULTS, Fault
from support.chaos.gateway_faults import GATEWAY_FAULTS, GatewayFault
from support.chaos.gateway_run import GatewayOutcome
from support.chaos.gateway_run import started as gateways_started
from support.chaos.report import (
    document,
    gateway_progress,
    gateway_tables,
    is_kept,
    is_kept_by_gateways,
    progress,
    quoted,
    table,
    with_gateways,
)
from support.chaos.run import SPEC, Outcome, started

ROOT: Final = Path(__file__).parents[3]
DOCUMENT: Final = ROOT / "docs/reliability.md"
README: Final = ROOT / "README.md"
RUNS: Final = 3


def carry_out(fault: Fault, home: Path, seed: int, times: int, spec: str = SPEC) -> Outcome:
    """One run. `spec`: the argument of the workers."""
    with started(home, seed, servers=fault.servers, always_on_disk=fault.always_on_disk, spec=spec) as run:
        for _ in range(times):
            run.wait_for_load()
            fault.inflict(run)
        run.wait_for_load()
        return run.finish()


def carry_out_with_gateways(fault: GatewayFault, home: Path, seed: int, times: int) -> GatewayOutcome:
    """One run with gateways."""
    of_run = {"resends": fault.resends, "has_readers": fault.has_readers}
    with gateways_started(home, seed, servers=fault.servers, **of_run) as run:
        for _ in range(times):
            run.wait_for_load()
            fault.inflict(run)
        run.wait_for_load()
        return run.finish_all()


def main() -> int:
    """Do the runs, and print the tables. Returns 1 if a run did not keep what is promised."""
    names = "; ".join([*FAULTS, *GATEWAY_FAULTS])
    parser = argparse.ArgumentParser(
        prog="make chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default="*", help=f"a pattern; the faults: {names}")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each fault (default: {RUNS})")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones have the next")
    parser.add_argument("--times", type=int, help="that a fault is inflicted in a run")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {DOCUMENT.name}, the tables of which all faults are chosen",
    )
    parser.add_argument(
        "--nodes", action="store_true", help="replace versions on nodes while these are killed, instead"
    )
    options = parser.parse_args()
    if options.nodes:
        return _with_nodes(range(options.seed, options.seed + options.runs), options.times)
    chosen = fnmatch.filter(FAULTS, options.faults)
    of_gateways = fnmatch.filter(GATEWAY_FAULTS, options.faults)
    is_whole = len(chosen) == len(FAULTS), len(of_gateways) == len(GATEWAY_FAULTS)
    if not chosen and not of_gateways:
        parser.error(f"--faults: none is called {options.faults!r}")
    if options.write and not any(is_whole):
        parser.error("--write needs all faults of a table")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    gateway_outcomes: dict[str, list[GatewayOutcome]] = {name: [] for name in of_gateways}
    are_kept = True
    for seed in range(options.seed, options.seed + options.runs):
        for name in chosen:
            fault = FAULTS[name]
            with tempfile.TemporaryDirectory(prefix="carpool-chaos-") as home:
                outcome = carry_out(fault, Path(home), seed, options.times or fault.times)
            outcomes[name].append(outcome)
            are_kept &= is_kept(name, outcome)
            print(progress(name, outcome, seed), file=sys.stderr, flush=True)
        for name in of_gateways:
            with_gateway = GATEWAY_FAULTS[name]
            times = options.times or with_gateway.times
            with tempfile.TemporaryDirectory(prefix="carpool-chaos-") as home:
                result = carry_out_with_gateways(with_gateway, Path(home), seed, times)
            gateway_outcomes[name].append(result)
            are_kept &= is_kept_by_gateways(name, result)
            print(gateway_progress(name, result, seed), file=sys.stderr, flush=True)
    print("\n".join([*table(outcomes), "", *gateway_tables(gateway_outcomes)]))
    seeds = f"{options.seed} to {options.seed + options.runs - 1}"
    if options.write and is_whole[0]:
        DOCUMENT.write_text(document(outcomes, seeds, DOCUMENT.read_text()))
        README.write_text(quoted(outcomes, README.read_text()))
        print(f"written: {DOCUMENT} and a part of it to {README}", file=sys.stderr)
    if options.write and is_whole[1]:
        DOCUMENT.write_text(with_gateways(gateway_outcomes, seeds, DOCUMENT.read_text()))
        print(f"written: the part of {DOCUMENT} about gateways", file=sys.stderr)
    return 0 if are_kept else 1


def _with_nodes(seeds: range, times: int | None) -> int:
    """Runs of `support.chaos.nodes`. Returns 1 if one did not keep what is promised."""
    are_kept = True
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="carpool-chaos-") as home:
            outcome = nodes.carry_out(Path(home), seed, replacements=times or nodes.REPLACEMENTS)
        are_kept &= outcome.is_kept
        print(nodes.summary(outcome, seed), flush=True)
    return 0 if are_kept else 1


if __name__ == "__main__":
    sys.exit(main())
