"""`carpool health`: what it asks, what it says, and its exit status."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from carpool.metrics import StatusServer
from carpool_cli.__main__ import main


class Service:
    """A service that is as it is told to be."""

    def __init__(self, unhealthy: list[str], unready: list[str]) -> None:
        self._unhealthy = unhealthy
        self._unready = unready

    def unhealthy(self) -> list[str]:
        return self._unhealthy

    def unready(self) -> list[str]:
        return self._unready


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> Ask:
    """Run the command, without settings of this machine; its exit status, output and errors."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main(["health", *map(str, words)])
        except SystemExit as exits:
            assert isinstance(exits.code, int)
            code = exits.code
        return code, *capsys.readouterr()

    return run


@contextmanager
def serving(unhealthy: list[str], unready: list[str]) -> Iterator[int]:
    """A service on a port of its own."""
    server = StatusServer("127.0.0.1", 0, CollectorRegistry(), Service(unhealthy, unready))
    server.start()
    try:
        yield int(server.url.rpartition(":")[2])
    finally:
        server.stop()


def test_a_ready_service(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([], []) as port:
        assert ask("--http-port", port) == (0, "ok\n", "")
        monkeypatch.setenv("CARPOOL_HTTP_PORT", str(port))
        monkeypatch.setenv("CARPOOL_HTTP_HOST", "0.0.0.0")  # noqa: S104 (as a container's service has it)
        assert ask() == (0, "ok\n", "")


def test_a_service_that_is_not_ready_but_alive(ask: Ask) -> None:
    with serving([], ["the model is loading"]) as port:
        assert ask("--http-port", port) == (1, "", "carpool health: not ready: the model is loading\n")
        assert ask("--http-port", port, "--alive") == (0, "ok\n", "")


def test_a_service_that_only_a_restart_would_mend(ask: Ask) -> None:
    with serving(["heartbeat: ended"], []) as port:
        assert ask("--http-port", port) == (0, "ok\n", "")
        assert ask("--http-port", port, "--alive") == (1, "", "carpool health: not alive: heartbeat: ended\n")


def test_nobody_there(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, said, wrong = ask("--http-port", port)
    assert (code, said) == (1, "")
    assert wrong.startswith(f"carpool health: nothing answers at 127.0.0.1:{port}: ")


def test_somebody_who_says_nothing(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, _, wrong = ask("--http-port", server.getsockname()[1], "--timeout-s", "0.05")
    assert (code, "timed out" in wrong) == (1, True)


def test_a_port_is_needed(ask: Ask) -> None:
    code, _, wrong = ask()
    assert (code, "--http-port is missing" in wrong) == (2, True)
