"""The benchmark grid and goodput measure: tiny rounds, whose figures mean nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import host
import pytest
from deadlines import plans, runs
from deadlines.measure import do_runs
from deadlines.plans import FLOODED_POINTS, NO_FLOOD, Plan
from deadlines.runs import Run
from grid import runner
from grid.catalog import SYSTEMS, System
from grid.environments import Environments
from grid.runner import run_grid
from grid.workloads import Workload

TINY = Workload(
    "tiny",
    "Tiny",
    "",
    "noop",
    8,
    {
        "8": {"load": "closed", "in_flight": 8, "seconds": 0.1},
        "1": {"load": "closed", "in_flight": 1, "seconds": 0.1},
        "200": {"load": "poisson", "per_second": 200, "seconds": 0.2},
        "50": {"load": "burst", "requests": 50, "distinct": 10, "limit_s": 30.0},
    },
)


class ThisEnvironment(Environments):
    """Runs everything in the environment of the tests."""

    def __init__(self) -> None:
        super().__init__(sys.executable)

    def get(self, name: str) -> Path:
        return Path(sys.executable).parent


def system(key: str) -> System:
    return next(system for system in SYSTEMS if system.key == key)


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else this machine and its host do plays no part, nor that a rate may be too high for it."""
    monkeypatch.setattr(host, "STOLEN_MAX", 1.0)
    monkeypatch.setattr(runner, "OVERLOADED", 0.0)


def test_a_round_of_carpool_is_measured() -> None:
    progress: list[str] = []
    results = run_grid([system("carpool")], [TINY], ThisEnvironment(), 1, progress.append)
    assert results.left_out == {}
    assert len(progress) == 1
    [closed], [lone], [poisson], [burst] = (results.cell("tiny", "Carpool", cell) for cell in TINY.orders)
    assert closed["per_second"] > 0
    assert set(closed["cpu_us"]) == {"redis", "batcher", "worker", "model", "producer"}
    assert 0 < lone["p50_ms"] <= lone["p99_ms"]
    assert 0 <= poisson["within"] <= 1
    assert burst["answered"] == 50
    assert all(mib > 1 for mib in burst["peak_mib"].values())


def test_what_the_host_disturbed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STOLEN_MAX", -1.0)
    lone = Workload("lone", "", "", "noop", 8, {"1": {"load": "closed", "in_flight": 1, "seconds": 0.1}})
    progress: list[str] = []
    results = run_grid([system("carpool")], [lone], ThisEnvironment(), 1, progress.append)
    assert ["disturbed" in line for line in progress] == [True, True]
    assert len(results.cell("lone", "Carpool", "1")) == 2


def test_a_system_that_fails_is_left_out_with_the_reason() -> None:
    broken = Workload("broken", "Broken", "", "noop", 8, {"1": {"load": "closed", "in_flight": "no number"}})
    results = run_grid([system("carpool")], [broken], ThisEnvironment(), 2, lambda _: None)
    assert "TypeError" in results.left_out["broken", "Carpool"]
    assert results.rounds == {}


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="needs a C compiler: gcc")
@pytest.mark.parametrize(("name", "model", "in_flight"), [("overhead", "noop", 64), ("images", "image", 32)])
def test_the_floor_replays_a_burst(name: str, model: str, in_flight: int) -> None:
    """Also of large bodies, which are sent in transactions. It fails if a request is left behind."""
    burst = Workload(
        name, "", "", model, in_flight, {"x": {"load": "closed", "in_flight": in_flight, "seconds": 0.1}}
    )
    results = run_grid([system("floor")], [burst], ThisEnvironment(), 1, lambda _: None)
    assert results.left_out == {}
    [figures] = results.cell(name, system("floor").name, "x")
    assert figures["per_second"] > 0


def test_goodput_is_measured_with_and_without_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plans, runs):
        monkeypatch.setattr(module, "LEARNING_S", 0.2)
    done: list[Run] = []
    asked = [Plan(FLOODED_POINTS[0], "deferred", flood) for flood in (NO_FLOOD, "refused", "raising")]
    do_runs(asked, 0.3, done.append)
    assert [run.plan for run in done] == asked
    for run in done:
        assert run.good + sum(run.missed.values()) == run.sent > 0
        assert 0 <= run.good <= run.bound
        assert 0 <= run.stolen + run.busy <= 1
