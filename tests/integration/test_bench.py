"""The benchmark grid and goodput measure: tiny rounds, whose figures mean nothing."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import host
import numpy as np
import pytest
import service_processes
from deadlines import plans, runs
from deadlines.measure import do_runs
from deadlines.plans import FLOODED_POINTS, NO_FLOOD, Plan
from deadlines.runs import Run
from grid import environments, http_servers, runner
from grid.catalog import HTTP_SYSTEMS, SYSTEMS, System
from grid.environments import Environments, wrk
from grid.load import Sent
from grid.runner import run_grid
from grid.systems.client_wrk import Call, WrkClient
from grid.workloads import Workload

from support.forking import forked_children

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


def test_carpool_is_measured_until_it_fails_and_then_left_out_with_the_reason() -> None:
    """The last order cannot be carried out, so there is one round of two."""
    orders = {**TINY.orders, "broken": {"load": "closed", "in_flight": "no number"}}
    progress: list[str] = []
    results = run_grid(
        [system("carpool")], [replace(TINY, orders=orders)], ThisEnvironment(), 2, progress.append
    )
    assert "TypeError" in results.left_out["tiny", "Carpool"]
    assert ["TypeError" in line for line in progress] == [True]
    assert results.cell("tiny", "Carpool", "broken") == []
    [closed], [lone], [poisson], [burst] = (results.cell("tiny", "Carpool", cell) for cell in TINY.orders)
    assert closed["per_second"] > 0
    assert set(closed["cpu_us"]) == {"redis", "batcher", "worker", "model", "producer"}
    assert 0 < lone["p50_ms"] <= lone["p99_ms"]
    assert 0 <= poisson["within"] <= 1
    assert burst["answered"] == 50
    assert all(mib > 1 for mib in burst["peak_mib"].values())


@pytest.mark.skipif(not shutil.which("wrk"), reason="needs wrk: apt-get install wrk")
def test_a_round_of_the_gateway_is_measured() -> None:
    """One row and many in a call: CPU time is that of a row, and a latency that of a call."""
    ours = [system for system in HTTP_SYSTEMS if system.key in ("gateway", "gateway-rows")]
    workload = http_servers.workloads([8], 1)["http"]
    results = run_grid(ours, [workload], ThisEnvironment(), 1, lambda _: None)
    assert results.left_out == {}
    of_rows: list[float] = []
    for system in ours:
        [figures] = results.cell("http", system.name, "8")
        assert (figures["refused"], figures["broken"]) == (0, 0)
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
        assert set(figures["cpu_us"]) == {"redis", "batcher", "worker", "model", "gateway", "producer"}
        of_rows.append(figures["cpu_us"]["gateway"])
    one, many = of_rows
    assert 0 < many < one
    text = "\n".join(http_servers.document(results, [workload], ["A machine."], 1, 1))
    assert text.count("| Carpool") == 2
    assert "| 0 + 0 |" in text


@pytest.mark.skipif(not shutil.which("wrk"), reason="needs wrk: apt-get install wrk")
@pytest.mark.parametrize(("status", "failed"), [(503, "refused"), (None, "broken")])
def test_calls_that_fail_are_counted(status: int | None, failed: str) -> None:
    """A server that refuses each call, and one that closes the connection."""

    class Failing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to standard error."""

    async def sent(port: int) -> Sent:
        client = WrkClient(wrk() / "usr/bin/wrk", f"http://127.0.0.1:{port}", Call("/", {}, b"body"))
        try:
            return await client.closed_loop(np.zeros(1), 2, 1)
        finally:
            await client.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        counted = asyncio.run(sent(server.server_port))
        server.shutdown()
        thread.join()
    assert counted.requests == 0
    assert {"refused": counted.refused, "broken": counted.broken}[failed] > 0
    assert counted.refused + counted.broken == getattr(counted, failed)


def test_without_wrk_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "BUILD", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["http_servers"])
    with pytest.raises(SystemExit, match="wrk is not on PATH"):
        http_servers.main()


@contextmanager
def answering(system: System, *_: object) -> Iterator[runner.Running]:
    """In place of a system: `cat`, which answers an order with that order as the figures."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        yield runner.Running(system, producer, {}, None)


def test_what_the_host_disturbed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STOLEN_MAX", -1.0)
    monkeypatch.setattr(runner, "started", answering)
    lone = Workload("lone", "", "", "noop", 8, {"1": {"load": "closed", "in_flight": 1, "seconds": 0.1}})
    progress: list[str] = []
    results = run_grid([system("carpool")], [lone], ThisEnvironment(), 1, progress.append)
    assert ["disturbed" in line for line in progress] == [True, True]
    assert len(results.cell("lone", "Carpool", "1")) == 2


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
    with forked_children(service_processes):
        do_runs(asked, 0.3, done.append)
    assert [run.plan for run in done] == asked
    for run in done:
        assert run.good + sum(run.missed.values()) == run.sent > 0
        assert 0 <= run.good <= run.bound
        assert 0 <= run.stolen + run.busy <= 1
