"""The reports of the benchmark grid, from figures that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from grid import http_servers, plots, report
from grid.catalog import HTTP_SYSTEMS, SYSTEMS
from grid.runner import Results
from grid.workloads import WORKLOADS

CARPOOL = next(system for system in SYSTEMS if system.key == "carpool")
MOSEC = next(system for system in SYSTEMS if system.key == "mosec")
WRK = next(system for system in SYSTEMS if system.key == "mosec-wrk")
MACHINE: dict[str, Any] = {
    "python": "3.11.7",
    "pgo": False,
    "of_distribution": False,
    "loop_ms": 5.0,
    "redis": "7.0.15",
    "ping_us": 20.0,
    "ping_unix_us": 12.0,
    "cores": 2,
    "processor": "a processor",
    "system": "Linux 6",
    "load": 0.1,
}


def closed(per_second: float, **cpu_us: float) -> dict[str, Any]:
    return {"per_second": per_second, "cpu_us": cpu_us, "stolen": 0.0}


def poisson(p50_ms: float, p99_ms: float, within: float) -> dict[str, Any]:
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "within": within, "cpu_us": {}, "stolen": 0.0}


@pytest.fixture
def results() -> Results:
    """Three rounds of Carpool and two of mosec, which is ahead with 64 in flight and not with 1,024."""
    results = Results()
    for per_second in (10_000, 30_000, 20_000):
        for cell in ("64", "1024"):
            results.add("overhead", "Carpool", cell, closed(per_second, redis=5.0, worker=10.0))
        results.add(
            "overhead", "Carpool", "1", closed(900, redis=90.0, worker=200.0) | {"p50_ms": 1.0, "p99_ms": 1.5}
        )
    for per_second in (25_000, 27_000):
        results.add("overhead", "mosec, aiohttp", "64", closed(per_second, server=30.0))
        results.add("overhead", "mosec, aiohttp", "1024", closed(per_second - 10_000, server=30.0))
    results.left_out["accelerator", "mosec, wrk"] = "it cannot"
    return results


@pytest.fixture
def overhead(results: Results) -> report.Report:
    return report.Report(MACHINE, [CARPOOL, MOSEC, WRK], [WORKLOADS["overhead"]], results, 3)


def line_with(text: str, *words: str) -> str:
    return next(line for line in text.splitlines() if all(word in line for word in words))


def test_a_figure_is_the_median_of_the_rounds_with_their_range(overhead: report.Report) -> None:
    line = line_with(overhead.text(), "Carpool ", "20,000")
    assert line.count("20,000 [10,000 .. 30,000]") == 2
    assert "900" in line


def test_rounds_that_the_host_disturbed_count_only_without_others(results: Results) -> None:
    results.add("overhead", "Carpool", "64", closed(1, worker=10.0) | {"stolen": 0.06})
    results.add("overhead", "mosec, wrk", "64", closed(2, server=10.0) | {"stolen": 0.06})
    text = report.Report(MACHINE, [CARPOOL, WRK], [WORKLOADS["overhead"]], results, 3).text()
    assert "20,000 [10,000 .. 30,000]" in line_with(text, "Carpool ", "20,000")
    assert f"{report.MARK} 2" in line_with(text, "mosec, wrk", "2")


def test_a_cell_without_figures_is_a_dash(overhead: report.Report) -> None:
    assert report.NONE in line_with(overhead.text(), "mosec, aiohttp", "26,000 [25,000 .. 27,000]")


def test_cpu_time_is_given_for_all_processes_and_for_each(overhead: report.Report) -> None:
    line = line_with(overhead.text(), "Carpool", "redis 5.0")
    assert "15.0" in line
    assert "worker 10.0" in line


def test_only_cells_in_which_a_peer_is_ahead_are_named(overhead: report.Report) -> None:
    ahead = overhead.text().split("AHEAD OF CARPOOL")[1]
    assert "Overhead, 64: mosec, aiohttp (per_second 2.6e+04; Carpool 2e+04)" in ahead
    assert "1,024: mosec" not in ahead


def test_less_latency_is_better(results: Results) -> None:
    results.add(
        "accelerator",
        "Carpool",
        "500",
        poisson(9.0, 20.0, 1.0),
    )
    results.add(
        "accelerator",
        "mosec, aiohttp",
        "500",
        poisson(10.0, 19.0, 0.9),
    )
    text = report.Report(MACHINE, [CARPOOL, MOSEC], [WORKLOADS["accelerator"]], results, 1).text()
    assert "9.0 / 20.0 ms, 100.0%" in text
    ahead = text.split("AHEAD OF CARPOOL")[1]
    assert "p99_ms 19" in ahead
    assert "p50_ms" not in ahead
    assert "within" not in ahead


def test_what_is_left_out_is_named_with_its_reason(overhead: report.Report) -> None:
    assert "mosec, wrk, accelerator: it cannot" in overhead.text()


def test_json_has_the_figures_of_each_round(overhead: report.Report) -> None:
    written = json.loads(overhead.json())
    cell = next(cell for cell in written["results"] if (cell["system"], cell["cell"]) == ("Carpool", "64"))
    assert [figures["per_second"] for figures in cell["rounds"]] == [10_000, 30_000, 20_000]
    assert written["machine"]["redis"] == "7.0.15"


def test_documents_and_plots_are_written(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "benchmarks")
    monkeypatch.setattr(report, "QUOTING", ())
    results.add(
        "accelerator",
        "Carpool",
        "500",
        poisson(9.0, 20.0, 1.0),
    )
    workloads = [WORKLOADS["overhead"], WORKLOADS["accelerator"]]
    written = report.Report(MACHINE, [CARPOOL, MOSEC], workloads, results, 3).write()
    assert {path.name for path in written} == {"benchmarks.md", "overhead.svg", "cpu.svg", "accelerator.svg"}
    document = written[0].read_text()
    assert "| Carpool | 900 [900 .. 900] | 20,000 [10,000 .. 30,000] |" in document
    assert "built without profile-guided optimisation" in document
    for path in written[1:]:
        assert f"benchmarks/{path.name}" in document
        assert ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314 (our own file)


def test_documents_that_quote_figures_get_those_of_this_run(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n| a lone request, p50 | x |\n| 64 in flight | x |\n| 1,024 in flight | x |\n| y | x |\n"
    )
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "benchmarks")
    monkeypatch.setattr(report, "QUOTING", (readme,))
    results.add(
        "accelerator",
        "Carpool",
        "500",
        poisson(9.0, 20.0, 1.0),
    )
    workloads = [WORKLOADS["overhead"], WORKLOADS["accelerator"]]
    written = report.Report(MACHINE, [CARPOOL], workloads, results, 3)
    written.write()
    row = "20,000 [10,000 .. 30,000] requests/s, 15 µs of CPU each |"
    assert readme.read_text().splitlines() == [
        "before",
        "| a lone request, p50 | 1.00 [1.00 .. 1.00] ms (a bare `PING`: 0.02 ms) |",
        f"| 64 in flight | {row}",
        f"| 1,024 in flight | {row}",
        "| y | x |",
    ]
    readme.write_text("| 64 in flight | x |")
    with pytest.raises(ValueError, match="a lone request"):
        written.write()


@pytest.mark.parametrize("document", report.QUOTING, ids=lambda path: path.name)
def test_the_quoting_documents_have_every_quoted_row(document: Path) -> None:
    for name in ("a lone request, p50", *(name for name, _, _ in report.QUOTED)):
        assert document.read_text().count(f"\n| {name} |") == 1


def test_bars_are_as_long_as_their_figures() -> None:
    drawing = ET.fromstring(plots.bars("requests/s", {"64": {"Carpool": 200.0, "other": 100.0}}))  # noqa: S314
    _, *drawn = drawing.iter("{http://www.w3.org/2000/svg}rect")  # the first is the background
    widths = [float(bar.attrib["width"]) for bar in drawn]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)


def test_names_in_plots_are_escaped() -> None:
    ET.fromstring(plots.bars("a & b", {"<": {"x > y": 1.0}}))  # noqa: S314


def test_every_system_has_a_file_and_a_key_of_its_own() -> None:
    folder = Path(report.__file__).parent / "systems"
    assert len({system.key for system in SYSTEMS}) == len({system.name for system in SYSTEMS}) == len(SYSTEMS)
    for system in SYSTEMS:
        assert (folder / f"{system.module}.py").exists()


def test_a_workload_that_is_left_out_is_not_run() -> None:
    assert CARPOOL.runs(WORKLOADS["images"])
    assert not replace(CARPOOL, left_out={"images": "a reason"}).runs(WORKLOADS["images"])
    assert not replace(CARPOOL, only=("overhead",)).runs(WORKLOADS["images"])


def test_http_servers_are_compared_with_carpool_and_what_has_no_answers_has_no_costs() -> None:
    results = Results()
    workload = http_servers.workloads([64], 1)["http"]

    def add(key: str, rate: float, **costs: object) -> None:
        system = next(system for system in HTTP_SYSTEMS if system.key == key)
        figures = {"per_second": rate, "p50_ms": 1.5, "p99_ms": 2.0, "refused": 0, "broken": 0, "stolen": 0.0}
        results.add("http", system.name, "64", figures | costs)

    add("gateway", 2000, cpu_us={"gateway": 30.0, "redis": 10.0})
    add("mosec", 1000, cpu_us={"server": 20.0}, refused=7)
    add("mosec", 3000, cpu_us={"server": 30.0}, broken=2)
    add("litserve", 0, cpu_us={})
    carpool, mosec, litserve = http_servers.table(results, workload, "64").rows
    assert carpool[1:] == ["2,000", "1.00", "1.50", "2.00", "0 + 0", "40.0", "gateway 30.0, redis 10.0"]
    assert mosec[1:3] == ["2,000 [1,000 .. 3,000]", "1.00"]
    assert mosec[5:] == ["7 + 2", "25.0 [20.0 .. 30.0]", "server 25.0"]
    assert litserve[1:] == ["0", "0.00", report.NONE, report.NONE, "0 + 0", report.NONE, report.NONE]
