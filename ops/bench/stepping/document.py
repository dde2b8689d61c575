"""docs/streaming.md: tables, aims and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from grid import plots as svg
from host import STOLEN_MAX

from stepping.runs import MARK, NETWORKS, Cell, Results
from stepping.systems import CARPOOL, ONE_PROCESS, STATIC, SYSTEMS
from stepping.workloads import BURST, FULL, LENGTH_MEAN, POISSON, WORKLOADS

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "streaming.md"
NONE: Final = "-"
SUBMIT_MS_MAX: Final = 0.05
TTFT_MS_MORE_MAX: Final = 3.0
TOKENS_RATIO_MIN: Final = 0.95
STATIC_RATIO_MIN: Final = 2.0
GAP_MS_MORE_MAX: Final = 2.0
HEAD: Final = """\
# Streams of stepping models

Written by `.venv/bin/python ops/bench/streaming.py --write`.

Requests want tokens, one at a time. "Carpool" is Redis, a batcher, a worker with one model process of 32
slots, and an AsyncClient that reads a stream for each request, all on one machine. The services use Redis's
Unix socket, as those of `carpool up` do, and the client TCP. "One process" is the loop of a model process
by itself, without Redis: requests are handed over by a function call. "Static" executes batches of up to 32
with `predict`, each until its longest request has ended, and answers at the end.

- submit: what the producer's call takes for a request, until it has handed it over, with all that are due
  at the same time.
- TTFT: from the time at which a request is due to its first token.
- gap: between two tokens of a request, as they are read; step: as the model emits them. In static batches
  all tokens of a request are read together.
- way: of a token, from the model to its reader.
- tokens/s: those read, from {warm:.0%} of a run to its end.

Rounds: {rounds}, of {seconds:g} s each; figures are medians. Lengths are geometric with a mean of
{length}, cut at 128, but for the burst. {mark} marks figures during which the host withheld more than
{stolen:.0%} of the CPU time.

{facts}
"""
POST: Final = """\
The first rows are those of a post on admission to a scheduler of GPT-2 (with PyTorch, on another machine):
prefill as a part of the producer's call; requests wait in a queue and are begun one by one; they are begun
together.
"""
BURST_PROFILE: Final = """\
Where the time to a first token goes: measured apart, with marks in all processes, in two runs of 30 bursts
with a pause of 0.25 s in between. The processes had real-time priority (`chrt -r 1`), because others used the
machine. One process takes 10.7 ms then, Carpool 16.2. CPU time was not measured where there is a hyphen.

| | process | passed ms | CPU ms |
|---|---|---:|---:|
| 32 calls of `stream` | producer | 0.55 | 0.55 |
| XADD, until the batcher has read the entry | Redis | 0.35 | - |
| decodes, admits and decides | batcher | 0.45 | 0.45 |
| encodes; `dispatch.lua`, until the worker has a reply | batcher, Redis | 0.9 | 0.45 + 0.4 |
| decodes | worker | 0.55 | 0.55 |
| encodes for the model process | worker | 0.6 | 0.6 |
| reads the requests | model process | 0.45 | 0.4 |
| prefill and step | model process | 10.2 | - |
| Step to the worker | model process | 0.25 | - |
| decodes, encodes what is to be written | worker | 0.55 | 0.5 |
| `step.lua`, until the producer has a reply | worker, Redis | 1.15 | 0.4 + 0.45 |
| decodes, its tasks run | producer | 0.2 | - |

Beside prefill and step 6 ms pass, and at least 4.7 of them are CPU time of one process after the other: all
32 requests are begun together, so each process does its part for all of them before the next one can. A
second core cannot shorten that. To be at most 3 ms later than one process, half of this CPU time would have
to go. To overlap two of the parts was tried: the worker sent the requests in four groups, and the model
process read each while the next one was encoded. In four pairs of runs that made no difference that could be
told from noise.
"""


class Published(NamedTuple):
    """A row of the post: submit (ms a request), TTFT p50, p95, p99 (ms) and tokens/s; None if not given."""

    name: str
    submit_ms: float | None
    ttft_p50_ms: float
    ttft_p95_ms: float | None
    ttft_p99_ms: float
    tokens_per_s: float


PUBLISHED: Final = (
    Published("post, prefill in the call", 1626 / 32, 71.87, 121.18, 141.16, 143),
    Published("post, queue", 85.8 / 32, 403.11, 750.30, 775.59, 165),
    Published("post, prefill together", None, 132, None, 247, 259),
)
COLUMNS: Final = {
    "submit_ms": "submit ms",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "p95",
    "ttft_p99_ms": "p99",
    "gap_p99_ms": "gap p99 ms",
    "step_p99_ms": "step p99",
    "way_p50_ms": "way p50",
    "way_p99_ms": "p99",
    "tokens_per_s": "tokens/s",
}


class Aim(NamedTuple):
    """What was aimed at: a figure of Carpool against a limit."""

    text: str
    network: str
    workload: str
    measured: str
    is_met: bool
    mark: str


def document(results: Results, seconds: float, rounds: int, described: Sequence[str]) -> str:
    """The whole text, of what was measured on the machine that is `described` in sentences."""
    head = HEAD.format(
        warm=0.2, rounds=rounds, seconds=seconds, length=LENGTH_MEAN, mark=MARK, stolen=STOLEN_MAX,
        facts="\n".join(f"- {sentence}" for sentence in described),
    )  # fmt: skip
    parts = [head, *_aims_section(results)]
    for network in results.capacities:
        parts += _network_section(results, network)
    return "\n".join(parts).rstrip() + "\n"


def _aims_section(results: Results) -> Iterator[str]:
    yield "## Aims"
    yield ""
    yield "| aim | model | requests | measured | met |"
    yield "|---|---|---|---:|---|"
    for text, network, workload, measured, is_met, mark in aims(results):
        yield f"| {text} | {network} | {workload} | {measured}{mark} | {'yes' if is_met else 'no'} |"
    yield ""


def aims(results: Results) -> Iterator[Aim]:
    """The aims of what was measured. Those for tokens/s in all slots are for steps of 5 ms."""
    for network, workload in _measured(results):
        carpool, alone, static = (
            Cell(network, workload, system.name) for system in (CARPOOL, ONE_PROCESS, STATIC)
        )

        def aim(text: str, measured: str, is_met: bool, *cells: Cell) -> Aim:
            return Aim(text, network, workload, measured, is_met, results.mark(*cells))  # noqa: B023

        value = results.value
        if workload == BURST.name:
            submit_ms = value(carpool, "submit_ms")
            is_met = submit_ms <= SUBMIT_MS_MAX
            yield aim(f"submit at most {SUBMIT_MS_MAX:g} ms", f"{submit_ms:.3f} ms", is_met, carpool)
        if workload != FULL.name:
            ttft_ms_more = [
                value(carpool, name) - value(alone, name) for name in COLUMNS if name.startswith("ttft_")
            ]
            yield aim(
                f"TTFT p50, p95, p99 at most one process + {TTFT_MS_MORE_MAX:g} ms",
                ", ".join(f"{ms:+.1f}" for ms in ttft_ms_more) + " ms",
                max(ttft_ms_more) <= TTFT_MS_MORE_MAX,
                carpool,
                alone,
            )
        gap_ms_more = value(carpool, "gap_p99_ms") - value(carpool, "step_p99_ms")
        text = f"gap p99 at most step p99 + {GAP_MS_MORE_MAX:g} ms"
        yield aim(text, f"{gap_ms_more:+.1f} ms", gap_ms_more <= GAP_MS_MORE_MAX, carpool)
        if workload == FULL.name and network == "sleeper":
            ratio = value(carpool, "tokens_per_s") / value(alone, "tokens_per_s")
            text = f"tokens/s at least {TOKENS_RATIO_MIN:.0%} of one process"
            yield aim(text, f"{ratio:.1%}", ratio >= TOKENS_RATIO_MIN, carpool, alone)
        if workload == "80%":
            ratio, of_alone = (
                value(cell, "tokens_per_s") / value(static, "tokens_per_s") for cell in (carpool, alone)
            )
            text = f"tokens/s at least {STATIC_RATIO_MIN:g} times static"
            measured = f"{ratio:.1f} times (one process: {of_alone:.1f})"
            yield aim(text, measured, ratio >= STATIC_RATIO_MIN, carpool, static, alone)


def _network_section(results: Results, network: str) -> Iterator[str]:
    description = NETWORKS[network].description
    yield f"## {description[0].upper()}{description[1:]}"
    yield ""
    yield f"One process generates {results.capacities[network]:,.0f} tokens/s if all slots are always in use."
    yield ""
    workloads = [workload for of, workload in _measured(results) if of == network]
    if any(workload.name in workloads for workload in POISSON):
        yield f"![time to first token over load](streaming_{network}.svg)"
        yield ""
    for workload in workloads:
        yield f"### {WORKLOADS[workload].description[0].upper()}{WORKLOADS[workload].description[1:]}"
        yield ""
        if workload == BURST.name:
            yield POST
        yield from _table(results, network, workload)
        yield ""
        if workload == BURST.name and network == "sleeper":
            yield BURST_PROFILE
    yield "### CPU time of a token"
    yield ""
    yield "In us, by process."
    yield ""
    yield from _cpu_table(results, network, workloads)
    yield ""


def _table(results: Results, network: str, workload: str) -> Iterator[str]:
    columns = {
        name: title
        for name, title in COLUMNS.items()
        if not (workload == FULL.name and name.startswith("ttft_"))
    }
    yield f"| system | {' | '.join(columns.values())} |"
    yield "|---|" + "---:|" * len(columns)
    for published in PUBLISHED if workload == BURST.name else ():
        fields = published._asdict()
        yield f"| {published.name} | {' | '.join(_text(name, fields.get(name)) for name in columns)} |"
    for system in SYSTEMS:
        cell = Cell(network, workload, system.name)
        of_chunks = system in (CARPOOL, ONE_PROCESS)
        texts = [
            NONE if name == "gap_p99_ms" and not of_chunks else _text(name, results.value(cell, name))
            for name in columns
        ]
        yield f"| {system.name}{results.mark(cell)} | {' | '.join(texts)} |"


def _text(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):  # nothing ended in time
        return NONE
    return f"{value:.3f}" if name == "submit_ms" else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _cpu_table(results: Results, network: str, workloads: Sequence[str]) -> Iterator[str]:
    of_carpool = {workload: results.cpu_us(Cell(network, workload, CARPOOL.name)) for workload in workloads}
    roles = list(next(iter(of_carpool.values())))
    yield f"| requests | {' | '.join(roles)} | all | one process |"
    yield "|---|" + "---:|" * (len(roles) + 2)
    for workload, by_role in of_carpool.items():
        alone = sum(results.cpu_us(Cell(network, workload, ONE_PROCESS.name)).values())
        mark = results.mark(Cell(network, workload, CARPOOL.name))
        costs = [*by_role.values(), sum(by_role.values()), alone]
        yield f"| {workload}{mark} | {' | '.join(f'{us:,.1f}' for us in costs)} |"


def plots(results: Results) -> dict[str, str]:
    """The plots, by the name of the file."""
    return {
        f"streaming_{network}.svg": svg.lines(
            "load, % of the capacity",
            "time to first token, p99, ms",
            {
                system.name: [
                    (
                        100 * (workload.load or 0.0),
                        results.value(Cell(network, workload.name, system.name), "ttft_p99_ms"),
                    )
                    for workload in POISSON
                ]
                for system in SYSTEMS
            },
        )
        for network in results.capacities
    }


def _measured(results: Results) -> list[tuple[str, str]]:
    """Network and workload of each table."""
    return list(dict.fromkeys((cell.network, cell.workload) for cell in results.rounds))
