"""Names of processes: made and parsed by one module."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.process_names import (
    HOST_CHARS_MAX,
    ProcessName,
    is_local_process,
    new_process_name,
    parse_process_name,
    replica_name,
)


def test_new_name_has_host_pid_and_random_digits() -> None:
    name = new_process_name()
    assert parse_process_name(name) == ProcessName(socket.gethostname()[:HOST_CHARS_MAX], os.getpid())
    assert new_process_name() != name


def test_name_with_long_host_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-" * 100)
    name = new_process_name()
    assert name.startswith("a-" * (HOST_CHARS_MAX // 2) + f"-{os.getpid()}-")
    assert is_local_process(name, os.getpid())


@given(st.from_regex(r"[A-Za-z0-9.-]{1,40}", fullmatch=True), st.integers(1, 4_194_304), st.integers(0, 255))
def test_replica_name_is_parsed(host: str, pid: int, replica: int) -> None:
    worker = f"{host}-{pid}-0f1e2d"
    assert parse_process_name(worker) == ProcessName(host, pid)
    assert parse_process_name(replica_name(worker, replica)) == ProcessName(host, pid, replica)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "w",
        "w/0",
        "host-1",
        "host-x-0f1e2d",
        "-1-0f1e2d",
        "host-1-0f1e2d/",
        "host-1-0f1e2d/x",
        "a-1-b/0/1",
    ],
)
def test_other_name_is_not_parsed(name: str) -> None:
    assert parse_process_name(name) is None
    assert not is_local_process(name, 1)


def test_replicas_belong_to_their_process_only() -> None:
    name = replica_name(new_process_name(), 3)
    assert is_local_process(name, os.getpid())
    assert not is_local_process(name, os.getpid() + 1)
    assert not is_local_process(name, None)
    assert not is_local_process(f"other-{name}", os.getpid())
