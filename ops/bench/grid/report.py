"""Writes what was measured: for a terminal, as JSON, and as docs/benchmarks.md with its plots.

Every figure is the median of the rounds; the range is in brackets.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from host import STOLEN_MAX, Figures, is_disturbed

from grid import machine, plots
from grid.catalog import WAIT_MS, System
from grid.environments import ROOT
from grid.runner import Results
from grid.workloads import Workload

DOCUMENT: Final = ROOT / "docs/benchmarks.md"
QUOTING: Final = (ROOT / "README.md", ROOT / "docs/costs.md")  # documents that quote some of the figures
PLOTS: Final = ROOT / "docs/benchmarks"
NONE: Final = "–"
MARK: Final = "~"  # before a figure that says little
LINE_MAX: Final = 115

_EXPLANATION: Final = (
    "Producer, services and Redis share the cores. The producer is one process. CPU time is user and system "
    "time of each process and its children.",
    f"Where a system has a setting for how long a batch waits until it is full, it is {WAIT_MS:g} ms.",
    "How each system is used, and what its documents say about it, is at the top of its file in "
    "[ops/bench/grid/systems](../ops/bench/grid/systems). The Redis floor is a program in C that replays "
    "the commands of Carpool over one connection, and does nothing else.",
    f"Rounds are left out in which the host withheld more than {STOLEN_MAX:.0%} of the CPU time from this "
    f"virtual machine, and repeated. {MARK} marks a figure that has no other round.",
)

Row = list[str]
Value = Callable[[Figures], float]


@dataclass(frozen=True)
class Table:
    """A table, before it is formatted. The first column is text, the others are figures."""

    head: Row
    rows: list[Row]

    def markdown(self) -> Iterator[str]:
        """As lines of Markdown."""
        yield f"| {' | '.join(self.head)} |"
        yield f"|---|{'---:|' * (len(self.head) - 1)}"
        for row in self.rows:
            yield f"| {' | '.join(row)} |"

    def text(self) -> Iterator[str]:
        """As lines for a terminal."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        for first, *others in lines:
            figures = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            yield "  ".join([first.ljust(widths[0]), *figures])


def wrapped(text: str, first: str = "") -> list[str]:
    """Lines of Markdown, the first with a prefix such as '- '."""
    return textwrap.wrap(
        text,
        LINE_MAX,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def spread(rounds: Sequence[Figures], value: Value, form: str) -> str:
    """The median of a figure, and the range in brackets; a dash if there is none."""
    values = [value(figures) for figures in rounds]
    if not values:
        return NONE
    text = f"{_mark(rounds)}{statistics.median(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}} .. {max(values):{form}}]"


def _mark(rounds: Sequence[Figures]) -> str:
    return f"{MARK} " if all(map(is_disturbed, rounds)) else ""


def median(rounds: Sequence[Figures], value: Value) -> float:
    """The median of a figure."""
    return statistics.median(value(figures) for figures in rounds)


def cpu_us(figures: Figures) -> float:
    """CPU us a request, of all processes."""
    return float(sum(figures["cpu_us"].values()))


def by_process(rounds: Sequence[Figures], name: str, form: str) -> str:
    """A figure of each process, such as CPU us a request: the medians, without those that are 0."""
    medians = {role: statistics.median(figures[name][role] for figures in rounds) for role in rounds[0][name]}
    return ", ".join(f"{role} {value:{form}}" for role, value in medians.items() if value)


class Report:
    """Everything that is written about one run of the grid."""

    def __init__(
        self,
        description: Mapping[str, Any],
        systems: Sequence[System],
        workloads: Sequence[Workload],
        results: Results,
        rounds: int,
    ) -> None:
        self._description, self._rounds = dict(description), rounds
        self._systems, self._workloads, self._results = systems, workloads, results

    # --- forms ---------------------------------------------------------------------------------------------

    def text(self) -> str:
        """For a terminal."""
        lines: list[str] = []
        for workload in self._workloads:
            lines += ["", workload.title.upper()]
            for table in self._tables(workload):
                lines += ["", *table.text()]
        ahead = list(self._ahead())
        lines += ["", "WHERE ANOTHER SYSTEM IS AHEAD OF CARPOOL", "", *(ahead or ["nowhere"])]
        if left_out := list(self._left_out()):
            lines += ["", "LEFT OUT", "", *left_out]
        return "\n".join(lines)

    def json(self) -> str:
        """Everything, with the figures of each round."""
        rounds = [
            {"workload": workload, "system": system, "cell": cell, "rounds": figures}
            for (workload, system, cell), figures in self._results.rounds.items()
        ]
        left_out = [
            {"workload": workload, "system": system, "reason": reason}
            for (workload, system), reason in self._results.left_out.items()
        ]
        return json.dumps({"machine": self._description, "results": rounds, "left_out": left_out}, indent=1)

    def write(self) -> list[Path]:
        """Write docs/benchmarks.md and its plots."""
        PLOTS.mkdir(exist_ok=True)
        written = []
        for name, drawing in self._plots().items():
            path = PLOTS / f"{name}.svg"
            path.write_text(drawing)
            written.append(path)
        DOCUMENT.write_text("\n".join(self._document()))
        for path in QUOTING:
            path.write_text(self._requoted(path.read_text()))
        return [DOCUMENT, *QUOTING, *written]

    def _requoted(self, text: str) -> str:
        """A document with the rows of its table replaced that begin as those of `_quoted_rows`."""
        for name, figures in self._quoted_rows():
            text, count = re.subn(
                rf"^\| {re.escape(name)} \|.*$", f"| {name} | {figures} |", text, flags=re.MULTILINE
            )
            if count != 1:
                raise ValueError(f"{count} rows begin with {name!r}, but one should")
        return text

    def _quoted_rows(self) -> Iterator[tuple[str, str]]:
        if lone := self._results.cell("overhead", "Carpool", "1"):
            ping_ms = self._description["ping_us"] / 1000
            p50_ms = spread(lone, itemgetter("p50_ms"), ".2f")
            yield "a lone request, p50", f"{p50_ms} ms (a bare `PING`: {ping_ms:.2f} ms)"
        for name, system, cell in QUOTED:
            if rounds := self._results.cell("overhead", system, cell):
                rate, cost_us = spread(rounds, per_second, ",.0f"), median(rounds, cpu_us)
                yield name, f"{rate} requests/s, {cost_us:.0f} µs of CPU each"

    def _document(self) -> Iterator[str]:
        yield "# Benchmarks"
        yield ""
        yield from wrapped(
            "Written by `make bench`, which runs everything below on one machine, one system after another, "
            f"in {self._rounds} rounds, with the order reversed from round to round. Figures are medians; "
            "the range of the rounds is in brackets. Trust the ratios more than the values."
        )
        yield ""
        for sentence in (*machine.sentences(self._description), *_EXPLANATION):
            yield from wrapped(sentence, "- ")
        for workload in self._workloads:
            yield from ("", f"## {workload.title}", "", *wrapped(workload.description))
            for table in self._tables(workload):
                yield from ("", *table.markdown())
            if workload.name in ("overhead", "accelerator"):
                yield from ("", f"![{workload.title}](benchmarks/{workload.name}.svg)")
            if workload.name == "overhead":
                yield from ("", "![CPU time of a request by process](benchmarks/cpu.svg)")
        yield from ("", "## Where another system is ahead of Carpool", "")
        yield from ([f"- {line}" for line in self._ahead()] or ["Nowhere."])
        if left_out := [f"- {line}" for line in self._left_out()]:
            yield from ("", "## Left out", "", *left_out)
        yield ""

    # --- tables --------------------------------------------------------------------------------------------

    def _tables(self, workload: Workload) -> list[Table]:
        tables = {
            "overhead": self._overhead,
            "accelerator": self._accelerator,
            "images": self._images,
            "squares": self._squares,
            "burst": self._burst,
        }
        return tables[workload.name](workload)

    def _measured(self, workload: Workload, cell: str) -> Iterator[tuple[System, Sequence[Figures]]]:
        """The systems with figures in a cell."""
        for system in self._systems:
            if rounds := self._results.cell(workload.name, system.name, cell):
                yield system, rounds

    def _rows_of(self, workload: Workload) -> list[System]:
        """The systems with figures in any cell."""
        return [
            system
            for system in self._systems
            if any(self._results.cell(workload.name, system.name, cell) for cell in workload.orders)
        ]

    def _overhead(self, workload: Workload) -> list[Table]:
        throughput = Table(["requests/s with this many in flight", *map(thousands, workload.orders)], [])
        latency = Table(["a lone request", "p50, ms", "p99, ms", "p99 / p50"], [])
        for system in self._rows_of(workload):
            cells = [self._results.cell(workload.name, system.name, cell) for cell in workload.orders]
            throughput.rows.append([system.name, *(spread(cell, per_second, ",.0f") for cell in cells)])
            if lone := cells[0]:
                ratio = median(lone, lambda figures: figures["p99_ms"] / figures["p50_ms"])
                latencies = [spread(lone, itemgetter(key), ".2f") for key in ("p50_ms", "p99_ms")]
                latency.rows.append([system.name, *latencies, f"{ratio:.1f}"])
        return [throughput, *(self._cpu(workload, cell) for cell in list(workload.orders)[1:]), latency]

    def _cpu(self, workload: Workload, cell: str) -> Table:
        title = f"CPU us a request, {thousands(cell)} in flight"
        rows = [
            [system.name, spread(rounds, cpu_us, ".1f"), by_process(rounds, "cpu_us", ".1f")]
            for system, rounds in self._measured(workload, cell)
        ]
        return Table([title, "all", "by process"], rows)

    def _accelerator(self, workload: Workload) -> list[Table]:
        def cell_text(rounds: Sequence[Figures]) -> str:
            if not rounds:
                return NONE
            p50, p99 = (median(rounds, itemgetter(key)) for key in ("p50_ms", "p99_ms"))
            within = median(rounds, itemgetter("within"))
            return f"{_mark(rounds)}{p50:.1f} / {p99:.1f} ms, {within:.1%}"

        head = ["p50 / p99, within 50 ms", *(f"{thousands(rate)}/s" for rate in workload.orders)]
        rows = [
            [
                system.name,
                *(
                    cell_text(self._results.cell(workload.name, system.name, cell))
                    for cell in workload.orders
                ),
            ]
            for system in self._rows_of(workload)
        ]
        return [Table(head, rows)]

    def _images(self, workload: Workload) -> list[Table]:
        cell = next(iter(workload.orders))
        rows = [
            [
                system.name,
                spread(rounds, per_second, ",.0f"),
                spread(rounds, cpu_us, ",.0f"),
                by_process(rounds, "cpu_us", ",.0f"),
            ]
            for system, rounds in self._measured(workload, cell)
        ]
        return [Table(["32 in flight", "requests/s", "CPU us a request", "by process"], rows)]

    def _squares(self, workload: Workload) -> list[Table]:
        cell = next(iter(workload.orders))
        rows = [
            [system.name, spread(rounds, lambda figures: figures["seconds"] * 1e3, ",.1f")]
            for system, rounds in self._measured(workload, cell)
        ]
        return [Table(["880 squares", "ms"], rows)]

    def _burst(self, workload: Workload) -> list[Table]:
        cell = next(iter(workload.orders))
        rows = [
            [
                system.name,
                f"{int(rounds[0]['answered']):,}",
                spread(rounds, lambda figures: figures["seconds"], ",.2f"),
                spread(rounds, lambda figures: sum(figures["peak_mib"].values()), ",.0f"),
                by_process(rounds, "peak_mib", ",.0f"),
            ]
            for system, rounds in self._measured(workload, cell)
        ]
        return [Table(["100,000 at once", "answered", "s", "peak MiB", "by process"], rows)]

    # --- comparisons ---------------------------------------------------------------------------------------

    def _ahead(self) -> Iterator[str]:
        """Each cell in which a peer's median is better than that of plain Carpool."""
        for workload in self._workloads:
            for cell in workload.orders:
                for name, better in _COMPARED[workload.orders[cell]["load"]].items():
                    yield from self._ahead_in(workload, cell, name, better)

    def _ahead_in(self, workload: Workload, cell: str, name: str, sign: int) -> Iterator[str]:
        own = self._results.cell(workload.name, "Carpool", cell)
        for system, rounds in self._measured(workload, cell):
            if not own or not system.is_peer:
                continue
            theirs, ours = (median(of, lambda figures: figures[name]) for of in (rounds, own))
            if sign * theirs > sign * ours:
                where = f"{workload.title}, {thousands(cell)}"
                why = f": {system.ahead_because}" if system.ahead_because else ""
                yield f"{where}: {system.name} ({name} {theirs:,.4g}; Carpool {ours:,.4g}){why}"

    def _left_out(self) -> Iterator[str]:
        for (workload, name), reason in self._results.left_out.items():
            yield f"{name}, {workload}: {reason}"
        for system in self._systems:
            for cell, reason in system.cells_left_out.items():
                yield f"{system.name}, {cell} in flight: {reason}"

    # --- plots ---------------------------------------------------------------------------------------------

    def _plots(self) -> dict[str, str]:
        overhead, accelerator = (
            next(workload for workload in self._workloads if workload.name == name)
            for name in ("overhead", "accelerator")
        )
        return {
            "overhead": plots.bars(
                "requests/s",
                {
                    f"{thousands(cell)} in flight": {
                        system.name: median(rounds, per_second)
                        for system, rounds in self._measured(overhead, cell)
                    }
                    for cell in ("64", "1024")
                },
            ),
            "cpu": plots.stacked_bars(
                "CPU us a request, 64 in flight",
                {
                    system.name: {
                        role: statistics.median(figures["cpu_us"][role] for figures in rounds)
                        for role in rounds[0]["cpu_us"]
                    }
                    for system, rounds in self._measured(overhead, "64")
                },
            ),
            "accelerator": plots.lines(
                "requests/s",
                "p99 latency, ms",
                {
                    system.name: [
                        (float(cell), median(rounds, lambda figures: figures["p99_ms"]))
                        for cell in accelerator.orders
                        if (rounds := self._results.cell(accelerator.name, system.name, cell))
                    ]
                    for system in self._rows_of(accelerator)
                },
            ),
        }


def per_second(figures: Figures) -> float:
    """requests/s."""
    return float(figures["per_second"])


def thousands(number: str) -> str:
    """A number of a cell's name, with separators."""
    return f"{int(number):,}"


# Rows of the table in the documents that quote figures: system and cell.
QUOTED: Final = (
    ("64 in flight", "Carpool", "64"),
    ("1,024 in flight", "Carpool", "1024"),
    ("1,024 in flight, batches of 256", "Carpool, batches of 256", "1024"),
    ("1,024 in flight, `infer_many`", "Carpool, packed", "1024"),
)

# For each kind of load the figures in which Carpool is compared: 1 if more is better, -1 if less is.
_COMPARED: Final[Mapping[str, Mapping[str, int]]] = {
    "closed": {"per_second": 1},
    "poisson": {"p50_ms": -1, "p99_ms": -1, "within": 1},
    "burst": {"seconds": -1},
}
