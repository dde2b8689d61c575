"""Fixtures for tests with real services: Redis servers and stacks. Failed tests show the services' logs.

Here are plugins registered, too: which tests run together and when, and what ends a test that hangs.

Why: docs/decisions/0039.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
from xdist.workermanage import WorkerController

from carpool_cli.local.embedded import find_servers
from support.forking import Template
from support.hangs import HangWatch
from support.one_thread import compute_in_one_thread
from support.scheduling import Scheduling
from support.stack import Stack

SERVERS: Final = find_servers()
_TEMPLATE: Final = "template_address"


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # in the background of a script; tests interrupt programs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long it takes to draw an example depends on the machine. Each run draws others: few in each of many
    # runs find as much as many in each, and `make fuzz` tries a million.
    hypothesis.settings.register_profile(
        "any machine",
        max_examples=50,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("any machine")
    compute_in_one_thread()
    if ours := getattr(config, "workerinput", {}):
        Template.use(ours[_TEMPLATE])
    config.pluginmanager.register(HangWatch(config))
    config.pluginmanager.register(Scheduling())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """If several processes run the tests, what they fork is forked from one template."""
    node.workerinput[_TEMPLATE] = Template.of_this_run()


def pytest_collection() -> None:
    """Collected tests and imported modules are a million objects, which remain. To look among them for
    garbage takes a tenth of the time of collecting, and a quarter of a second each time after that."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def name_of(server: Path) -> str:
    if server.name == "valkey-server":
        return "valkey"
    return "wheel" if "site-packages" in server.parts else "path"


@pytest.fixture(params=SERVERS, ids=name_of)
def server(request: pytest.FixtureRequest) -> Path:
    """Each Redis server on this machine in turn."""
    binary: Path = request.param
    return binary


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """An empty stack for this test, on the preferred server."""
    with Stack(tmp_path) as started:
        yield started


@pytest.fixture
def stack_on(server: Path, tmp_path: Path) -> Iterator[Stack]:
    """An empty stack for this test, on each server in turn."""
    with Stack(tmp_path, binary=server) as started:
        yield started


@pytest.fixture
def onnx_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX models in this process compute in one thread. Others would spin while they wait for work."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file for which models wait, if a request names it; created when the test ends, if not before."""
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Stack]]:
    """Returns the stack on a server, which is started on first use and shared by the tests of a module."""
    started: dict[Path, Stack] = {}

    def stack_on_server(binary: Path) -> Stack:
        if binary not in started:
            started[binary] = Stack(tmp_path_factory.mktemp("stack"), binary=binary)
        return started[binary]

    yield stack_on_server
    for stack in started.values():
        stack.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Add the end of the logs of all running stacks to the report of a failed test, and mark these stacks: it
    may have left things in them."""
    report = yield
    if report.failed:
        for number, stack in enumerate(Stack.running):
            stack.is_spoiled = True
            report.sections.append((f"logs of stack {number}", stack.end_of_logs()))
    return report
