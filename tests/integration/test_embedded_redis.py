"""The embedded server: found, started, restarted, and gone whichever way its parent ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from carpool_cli.local import embedded
from carpool_cli.local.embedded import EmbeddedRedis, EmbeddedRedisError, find_servers
from support.waiting import wait_until

PARENT = """
import threading
from carpool_cli.local.embedded import EmbeddedRedis
with EmbeddedRedis() as redis:
    print(redis.pid, redis.port, flush=True)
    threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers of these tests, and of the parents they start, have their directories."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"carpool-{os.getuid()}"


@pytest.fixture(params=find_servers(), ids=str)
def redis(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=request.param) as server:
        yield server


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    return True


def client_of(server: EmbeddedRedis) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


# --- Starting and stopping


def test_every_server_of_this_machine_starts_and_stops(
    redis: EmbeddedRedis, temporary_directory: Path
) -> None:
    with client_of(redis) as client:
        info = client.info("server")
        settings = client.config_get("*")
    assert (info["process_id"], info["tcp_port"]) == (redis.pid, redis.port)
    assert redis.version in info.values()
    assert redis.url == f"redis://127.0.0.1:{redis.port}/0"
    assert (
        settings.items()
        >= {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "bind": "127.0.0.1",
            "protected-mode": "yes",
        }.items()
    )
    assert redis.alive

    redis.stop()
    redis.stop()
    assert not redis.alive
    assert not answers(redis.port)
    assert list(temporary_directory.iterdir()) == []


def test_a_server_without_the_append_only_file() -> None:
    with EmbeddedRedis(append_only=False) as server, client_of(server) as client:
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_two_servers_side_by_side() -> None:
    with EmbeddedRedis() as one, EmbeddedRedis() as other:
        assert one.port != other.port
        assert one.alive
        assert other.alive


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP, None])
def test_a_restart_keeps_the_port_and_the_data(redis: EmbeddedRedis, death: signal.Signals | None) -> None:
    redis.stop_timeout_s = 0.1  # a frozen server does not hear SIGTERM
    with client_of(redis) as client:
        client.set("kept", "yes")
    port, pid = redis.port, redis.pid
    if death:
        os.kill(pid, death)
    if death == signal.SIGKILL:
        wait_until(lambda: not redis.alive, description="the killed server is gone")

    redis.restart()

    assert (redis.port, redis.alive) == (port, True)
    assert redis.pid != pid
    with client_of(redis) as client:
        assert client.get("kept") == "yes"


def test_a_given_directory_outlives_its_server(tmp_path: Path) -> None:
    data_dir = tmp_path / "made" / "on demand"
    with EmbeddedRedis(data_dir=data_dir) as server, client_of(server) as client:
        client.set("kept", "yes")
    with EmbeddedRedis(data_dir=data_dir) as server, client_of(server) as client:
        assert client.get("kept") == "yes"


# --- Ports


def test_a_given_port_that_is_taken_is_an_error_that_says_so() -> None:
    with (
        EmbeddedRedis() as server,
        pytest.raises(EmbeddedRedisError, match=f"Port {server.port} .* is taken"),
    ):
        EmbeddedRedis(port=server.port)


def test_a_port_taken_between_the_choice_and_the_start_is_chosen_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EmbeddedRedis() as first:
        free = embedded._free_port()
        choices = iter([first.port, first.port, free])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(choices))
        with EmbeddedRedis() as second:
            assert second.port == free


# --- What goes wrong


def test_a_machine_without_redis_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_servers", list)
    with pytest.raises(
        EmbeddedRedisError, match=r"apt-get install redis-server.*pip install 'carpool\[embedded\]'"
    ):
        EmbeddedRedis()


def test_the_server_in_the_wheel_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (server,) = find_servers()
    assert "site-packages" in server.parts


def test_a_server_that_ends_is_an_error_with_its_last_words(temporary_directory: Path) -> None:
    with pytest.raises(
        EmbeddedRedisError, match=r"(?s)/no/such/server ended with status 1 .*FileNotFoundError"
    ):
        EmbeddedRedis(binary=Path("/no/such/server"))
    assert list(temporary_directory.iterdir()) == []


def test_a_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "mute-server"
    mute.write_text("#!/bin/sh\necho 'I say nothing.'\nexec sleep 1000\n")
    mute.chmod(0o700)
    monkeypatch.setattr(EmbeddedRedis, "start_timeout_s", 0.2)
    with pytest.raises(
        EmbeddedRedisError, match=r"(?s)did not answer on 127.*within 0\.2 s.*I say nothing\."
    ):
        EmbeddedRedis(binary=mute)


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedRedisError, match=r"cannot have its data in .*file/data"):
        EmbeddedRedis(data_dir=tmp_path / "file" / "data")


# --- The end of the parent


def start_parent() -> tuple[subprocess.Popen[str], int]:
    """A process with a server of its own, and the server's port."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        _pid, port = parent.stdout.readline().split()
    return parent, int(port)


def test_the_server_dies_with_a_killed_parent_and_the_next_one_cleans_up(temporary_directory: Path) -> None:
    parent, port = start_parent()
    (left_behind,) = temporary_directory.glob(f"redis-{parent.pid}-*")
    parent.kill()
    parent.wait()
    wait_until(lambda: not answers(port), description="the server of the killed parent is gone")

    with EmbeddedRedis():
        assert not left_behind.exists()


def test_ctrl_c_stops_the_server_in_good_order(temporary_directory: Path) -> None:
    parent, port = start_parent()
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    parent.wait(10)
    assert not answers(port)
    assert list(temporary_directory.iterdir()) == []


def test_the_directory_of_a_living_parent_is_left_alone(temporary_directory: Path) -> None:
    with EmbeddedRedis(), EmbeddedRedis():
        assert len(list(temporary_directory.iterdir())) == 2
