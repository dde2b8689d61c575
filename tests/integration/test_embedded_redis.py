"""The embedded server: found, started, restarted, and stopped however its parent ends."""

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
from structlog.testing import capture_logs

from carpool import lifecycle
from carpool.store.connection import CommandError, Link
from carpool.store.server_version import ServerVersion, of_hello, of_info
from carpool_cli.local import embedded
from carpool_cli.local.embedded import EmbeddedRedis, EmbeddedRedisError, find_servers
from support.redis_client import redis_at
from support.waiting import EVENTUALLY_S, growing_s, wait_until

PARENT = """
import threading
from carpool_cli.local.embedded import EmbeddedRedis
with EmbeddedRedis() as redis:
    print(redis.pid, redis.port, flush=True)
    threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The directory for the data of all servers that these tests start. Short, for the paths of sockets."""
    tmp_path_factory.getbasetemp()  # now: else pytest would make its own in the one that one test has
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name) / f"carpool-{os.getuid()}"


@pytest.fixture(params=find_servers(), ids=str)
def redis(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=request.param) as server:
        yield server


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it ends at this very moment
        return False
    return True


def client_of(server: EmbeddedRedis) -> Redis:
    client: Redis = redis_at(server.url, decode_responses=True)
    return client


# --- starting and stopping


def test_each_installed_server_starts_and_stops(redis: EmbeddedRedis, temporary_directory: Path) -> None:
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


def test_append_only_file_can_be_turned_off() -> None:
    with EmbeddedRedis(append_only=False) as server, client_of(server) as client:
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_two_servers_run_side_by_side() -> None:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        assert first.port != second.port
        assert first.alive
        assert second.alive


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP, None])
def test_restart_keeps_the_port_and_the_data(redis: EmbeddedRedis, death: signal.Signals | None) -> None:
    redis.stop_timeout_s = 0.1  # a stopped process does not handle SIGTERM
    with client_of(redis) as client:
        client.set("kept", "yes")
    port, pid = redis.port, redis.pid
    if death:
        os.kill(pid, death)
    if death == signal.SIGKILL:
        wait_until(lambda: not redis.alive, description="the killed server has ended")

    redis.restart()

    assert (redis.port, redis.alive) == (port, True)
    assert redis.pid != pid
    with client_of(redis) as client:
        assert client.get("kept") == "yes"


def test_data_directory_has_one_server(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server:
        with pytest.raises(EmbeddedRedisError, match=f"{tmp_path} is in use by .* process {os.getpid()}"):
            EmbeddedRedis(data_dir=tmp_path)
        server.restart()
        with pytest.raises(EmbeddedRedisError, match="is in use by"):
            EmbeddedRedis(data_dir=tmp_path)
    with EmbeddedRedis(data_dir=tmp_path) as server:
        assert server.alive


def test_data_directory_is_locked_as_long_as_its_server_lives(tmp_path: Path) -> None:
    """The lock of its parent is not enough: the server may end later."""
    server = EmbeddedRedis(data_dir=tmp_path)
    assert server._lock is not None
    server._lock.release()  # as the end of the parent would
    with pytest.raises(EmbeddedRedisError, match="is in use by"):
        EmbeddedRedis(data_dir=tmp_path)
    server.stop()
    with EmbeddedRedis(data_dir=tmp_path) as successor:
        assert successor.alive


def test_given_data_directory_is_kept(tmp_path: Path) -> None:
    data_dir = tmp_path / "made" / "on demand"
    with EmbeddedRedis(data_dir=data_dir) as server, client_of(server) as client:
        client.set("kept", "yes")
    with EmbeddedRedis(data_dir=data_dir) as server, client_of(server) as client:
        assert client.get("kept") == "yes"


# --- ports


def test_given_port_that_is_taken_is_an_error() -> None:
    with (
        EmbeddedRedis() as server,
        pytest.raises(EmbeddedRedisError, match=f"Port {server.port} .* is taken"),
    ):
        EmbeddedRedis(port=server.port)


def test_another_port_is_chosen_if_the_first_is_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EmbeddedRedis() as first:
        taken, free_port, chosen = iter([first.port, first.port]), embedded.free_port, []

        def choose() -> int:
            chosen.append(next(taken, None) or free_port())
            return chosen[-1]

        monkeypatch.setattr(embedded, "free_port", choose)
        with EmbeddedRedis() as second:
            assert chosen[:2] == [first.port] * 2
            assert second.port == chosen[-1] != first.port


# --- errors


def test_error_without_redis_names_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_installed_servers", list)
    with pytest.raises(
        EmbeddedRedisError, match=r"apt-get install redis-server.*pip install 'PATH\[embedded\]'"
    ):
        EmbeddedRedis()


def installed_as(folder: Path, name: str, banner: str) -> Path:
    """A program that says which server it is, and is none."""
    folder.mkdir()
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{banner}'\n")
    program.chmod(0o700)
    return program


def test_server_on_path_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = installed_as(tmp_path / "bin", "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=libc")
    monkeypatch.setenv("PATH", str(old.parent))
    usable = find_servers()
    assert usable and old not in usable
    with capture_logs() as logs, EmbeddedRedis() as server:
        assert server.binary == usable[0]
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["old"] == f"{old} is Redis 6.0.16"


def test_error_names_each_server_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = installed_as(tmp_path / "bin", "redis-server", "Redis server v=5.0.6 sha=00000000:0 malloc=libc")
    monkeypatch.setattr(embedded, "_installed_servers", lambda: [old])
    with pytest.raises(EmbeddedRedisError, match=r"redis-server is Redis 5\.0\.6\. Carpool needs Redis 6\.2"):
        EmbeddedRedis()


def test_server_says_which_it_is_to_every_user(redis: EmbeddedRedis) -> None:
    """In HELLO, which needs no permission, as in INFO; and before it is started."""
    admin, guest = Link(redis.url, name="admin"), Link(redis.url.replace("//", "//guest:x@"), name="guest")
    admin.call("ACL", "SETUSER", "guest", "on", ">x", "-@all", "+ping", "+client|setname")
    assert guest.call("PING") == b"PONG"
    with pytest.raises(CommandError, match="NOPERM"):
        guest.call("INFO", "server")
    name = "Valkey" if redis.binary.name == "valkey-server" else "Redis"
    expected = ServerVersion(name, redis.version)
    assert of_hello(guest.call("HELLO")) == of_info(admin.call("INFO", "server")) == expected
    assert embedded._version_of(redis.binary) == expected
    for link in (admin, guest):
        link.close()


def test_server_in_a_wheel_is_found_without_one_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    servers = find_servers()
    assert servers
    assert all("site-packages" in server.parts for server in servers)


def test_error_of_a_server_that_ends_has_the_end_of_its_log(temporary_directory: Path) -> None:
    by_shell, by_python = "127 .*not found", "1 .*FileNotFoundError"
    cause = by_shell if lifecycle._setpriv() else by_python
    with pytest.raises(EmbeddedRedisError, match=f"(?s)/no/such/server ended with status {cause}"):
        EmbeddedRedis(binary=Path("/no/such/server"))
    assert list(temporary_directory.iterdir()) == []


def test_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent-server"
    silent.write_text("#!/bin/sh\necho 'no answer from here'\nexec sleep 1000\n")
    silent.chmod(0o700)
    for timeout_s in growing_s(0.2):
        monkeypatch.setattr(EmbeddedRedis, "start_timeout_s", timeout_s)
        with pytest.raises(
            EmbeddedRedisError, match=rf"did not answer on 127.* within {timeout_s:g} s, and was stopped"
        ) as stopped:
            EmbeddedRedis(binary=silent)
        if "no answer from here" in str(stopped.value):  # what it wrote before that
            break


def test_error_names_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedRedisError, match=r"cannot keep its data in .*file/data"):
        EmbeddedRedis(data_dir=tmp_path / "file" / "data")


# --- the end of the parent


def start_parent() -> tuple[subprocess.Popen[str], int]:
    """Start a process that starts a server; the process and the server's port."""
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


def test_server_ends_with_a_killed_parent_and_the_next_one_removes_its_data(
    temporary_directory: Path,
) -> None:
    parent, port = start_parent()
    (abandoned,) = temporary_directory.glob(f"redis-{parent.pid}-*")
    parent.kill()
    parent.wait()
    wait_until(lambda: not answers(port), description="the server of the killed parent has ended")

    with EmbeddedRedis():
        assert not abandoned.exists()


def test_ctrl_c_stops_the_server_and_removes_its_data(temporary_directory: Path) -> None:
    parent, port = start_parent()
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    parent.wait(EVENTUALLY_S)
    assert not answers(port)
    assert list(temporary_directory.iterdir()) == []


def test_directory_of_a_running_parent_is_not_removed(temporary_directory: Path) -> None:
    with EmbeddedRedis(), EmbeddedRedis():
        assert len(list(temporary_directory.iterdir())) == 2


# --- the Unix socket


def test_server_also_listens_on_a_socket_that_only_its_user_may_use(
    redis: EmbeddedRedis, temporary_directory: Path
) -> None:
    assert redis.unix_url is not None
    with redis_at(redis.unix_url) as client:
        assert client.info("server")["process_id"] == redis.pid
    (socket_file,) = temporary_directory.glob("redis-*/redis.sock")
    assert socket_file.stat().st_mode & 0o077 == socket_file.parent.stat().st_mode & 0o077 == 0
    redis.restart()
    with redis_at(redis.unix_url) as client:
        assert client.ping()


def test_socket_is_not_in_a_given_data_directory(temporary_directory: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path / "data") as server:
        assert server.unix_url is not None and "/data/" not in server.unix_url
    assert list(temporary_directory.iterdir()) == []


def test_long_path_has_no_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EmbeddedRedis() as server, client_of(server) as client:
        assert server.unix_url is None
        assert client.config_get("unixsocket") == {"unixsocket": ""}
