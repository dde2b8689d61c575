"""`carpool health`: what it requests, what it prints, and its exit status."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from carpool.health_server import HealthServer
from carpool_cli.__main__ import main


class Service:
    """A service whose health the test sets."""

    def __init__(self, unhealthy: list[str], unready: list[str]) -> None:
        self._unhealthy = unhealthy
        self._unready = unready

    def unhealthy(self) -> list[str]:
        return self._unhealthy

    def unready(self) -> list[str]:
        return self._unready

    def warnings(self) -> list[str]:
        return []


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> Ask:
    """Run the command without this machine's CARPOOL_* settings. Returns exit status, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["health", *map(str, arguments)])
        except SystemExit as exits:
            assert isinstance(exits.code, int)
            code = exits.code
        return code, *capsys.readouterr()

    return run


@contextmanager
def serving(unhealthy: list[str], unready: list[str]) -> Iterator[int]:
    """Serve this health on a free port; yields the port."""
    server = HealthServer("127.0.0.1", 0, CollectorRegistry(), Service(unhealthy, unready))
    server.start()
    try:
        yield int(server.url.rpartition(":")[2])
    finally:
        server.stop()


def test_ready_service_exits_with_0(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([], []) as port:
        assert ask("--http-port", port) == (0, "ok\n", "")
        monkeypatch.setenv("CARPOOL_HTTP_PORT", str(port))
        monkeypatch.setenv("CARPOOL_HTTP_HOST", "0.0.0.0")  # noqa: S104 (as a container's service has it)
        assert ask() == (0, "ok\n", "")


def test_unready_service_is_still_alive(ask: Ask) -> None:
    with serving([], ["the model is loading"]) as port:
        assert ask("--http-port", port) == (1, "", "carpool health: not ready: the model is loading\n")
        assert ask("--http-port", port, "--alive") == (0, "ok\n", "")


def test_unhealthy_service_is_not_alive(ask: Ask) -> None:
    with serving(["heartbeat: ended"], []) as port:
        assert ask("--http-port", port) == (0, "ok\n", "")
        assert ask("--http-port", port, "--alive") == (1, "", "carpool health: not alive: heartbeat: ended\n")


def test_closed_port_is_an_error(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, output, errors = ask("--http-port", port)
    assert (code, output) == (1, "")
    assert errors.startswith(f"carpool health: nothing answers at 127.0.0.1:{port}: ")


def test_silent_server_times_out(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, _, errors = ask("--http-port", server.getsockname()[1], "--timeout-s", "0.05")
    assert (code, "timed out" in errors) == (1, True)


def test_port_is_required(ask: Ask) -> None:
    code, _, errors = ask()
    assert (code, "--http-port is missing" in errors) == (2, True)
