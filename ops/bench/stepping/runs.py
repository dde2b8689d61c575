"""Runs all systems in turn, on each workload of each network; repeats what the host disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from host import CpuTime, Figures, is_disturbed, turns, usable

from stepping import workloads
from stepping.heard import Sent, figures
from stepping.systems import ONE_PROCESS, SYSTEMS, Serve, System
from stepping.workloads import FULL, Workload

BURSTS_MAX: Final = 20  # of one run
MARK: Final = "~"  # of figures during which the host withheld CPU time


class Network(NamedTuple):
    """What is served, and how long runs are: a slow one needs longer ones, but fewer."""

    name: str
    description: str
    seconds_ratio: float = 1.0
    rounds_max: int = 99


NETWORKS: Final = {
    network.name: network
    for network in (
        Network("sleeper", "a sleeper: 5 ms for a step, and 5 ms for a prefill, of any number of requests"),
        Network(
            "gpt2",
            "a network of GPT-2's shape: 12 layers of 768, random weights, numpy with one thread",
            3.0,
            1,
        ),
    )
}


class Cell(NamedTuple):
    """What a run is of, by name."""

    network: str
    workload: str
    system: str


@dataclass
class Results:
    """The figures of each round, and the capacities (tokens/s) of the networks."""

    rounds: dict[Cell, list[Figures]] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)

    def value(self, cell: Cell, name: str) -> float:
        """The median of a figure over rounds."""
        return float(median(of_round[name] for of_round in usable(self.rounds[cell])))

    def cpu_us(self, cell: Cell) -> Mapping[str, float]:
        """The CPU time of a token, by process."""
        of_rounds = [of_round["cpu_us"] for of_round in usable(self.rounds[cell])]
        return {role: median(one[role] for one in of_rounds) for role in of_rounds[0]}

    def mark(self, *cells: Cell) -> str:
        """MARK if the host disturbed all rounds of one of these cells."""
        return MARK * any(all(map(is_disturbed, self.rounds[cell])) for cell in cells)

    def undisturbed(self, cell: Cell) -> int:
        """How many of the rounds were not disturbed."""
        return sum(not is_disturbed(of_round) for of_round in self.rounds.get(cell, ()))


def measure(
    networks: Sequence[Network],
    chosen: Sequence[Workload],
    seconds: float,
    rounds: int,
    on_progress: Callable[[str], None],
) -> Results:
    """Measure everything, each run for about `seconds`."""
    results = Results()
    started_s = time.monotonic()
    for network in networks:
        wanted = min(rounds, network.rounds_max)
        run_s = seconds * network.seconds_ratio
        capacity = results.capacities[network.name] = _capacity(network, run_s)
        on_progress(f"{network.name}: one process generates {capacity:,.0f} tokens/s")

        def is_done(pair: tuple[Workload, System], network: Network = network, wanted: int = wanted) -> bool:
            workload, system = pair
            return results.undisturbed(Cell(network.name, workload.name, system.name)) >= wanted

        pairs = [(workload, system) for workload in chosen for system in SYSTEMS]
        for number, (workload, system) in turns(pairs, wanted, is_done):
            cell = Cell(network.name, workload.name, system.name)
            with system.started(network.name) as serve:
                figures_of_run = _run(serve, workload, capacity, run_s, number)
            results.rounds.setdefault(cell, []).append(figures_of_run)
            on_progress(_progress(cell, figures_of_run, number, time.monotonic() - started_s))
    return results


def _capacity(network: Network, seconds: float) -> float:
    """How many tokens/s one process generates if all slots are always in use."""
    guess_per_s = 32 / 0.005  # more than either network reaches: requests must not run out
    with ONE_PROCESS.started(network.name) as serve:
        return float(_run(serve, FULL, guess_per_s, seconds, 0)["tokens_per_s"])


def _run(serve: Serve, workload: Workload, capacity_per_s: float, seconds: float, seed: int) -> Figures:
    """One run, after a burst that warms up; or bursts for that long."""
    asks, window = workloads.asks(workload, capacity_per_s, seconds, seed), workload.window(seconds)
    warm_up = workloads.asks(workloads.BURST, capacity_per_s, seconds, seed)
    serve(warm_up, None)
    cpu, end_s = CpuTime(), time.monotonic() + seconds
    sent: list[Sent] = []
    while not sent or (workload.is_burst and len(sent) < BURSTS_MAX and time.monotonic() < end_s):
        sent.append(serve(asks, window))
    return {**figures(sent), "stolen": cpu.shares().stolen}


def _progress(cell: Cell, of_run: Figures, number: int, passed_s: float) -> str:
    disturbed = f" (disturbed: {of_run['stolen']:.0%} stolen)" if is_disturbed(of_run) else ""
    return (
        f"{passed_s:4.0f} s  round {number + 1}  {cell.network:8} {cell.workload:6} {cell.system:20} "
        f"TTFT p50 {of_run['ttft_p50_ms']:.1f} p99 {of_run['ttft_p99_ms']:.1f} ms, "
        f"gap p99 {of_run['gap_p99_ms']:.1f} ms, {of_run['tokens_per_s']:,.0f} tokens/s{disturbed}"
    )
