"""A Redis that discards keys when its memory is full: services warn, and so do commands that show a state."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool.store.connection import Link
from carpool.store.eviction import eviction_warning
from carpool_batcher import service
from carpool_batcher.meter import BatcherMetrics
from carpool_cli import models
from carpool_cli.top import command
from support.stack import Stack

EVENT: Final = "Redis may lose requests"
WARNING: Final = "its maxmemory-policy is allkeys-lru; set it to noeviction"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        yield stack


def warning(stack: Stack, maxmemory: str, policy: str) -> str:
    stack.redis.config_set("maxmemory", maxmemory)
    stack.redis.config_set("maxmemory-policy", policy)
    link = Link(stack.url, name="test")
    try:
        return eviction_warning(link)
    finally:
        link.close()


def test_only_a_policy_that_takes_effect_is_wrong(stack: Stack) -> None:
    assert warning(stack, "0", "noeviction") == ""
    assert warning(stack, "0", "allkeys-lru") == ""  # without a limit nothing is discarded
    assert warning(stack, "1gb", "noeviction") == ""
    for policy in ("allkeys-lru", "volatile-ttl", "volatile-lru", "allkeys-random"):
        assert f"its maxmemory-policy is {policy};" in warning(stack, "1gb", policy)


def test_it_is_unknown_to_a_user_who_may_not_ask(stack: Stack) -> None:
    warning(stack, "1gb", "allkeys-lru")
    stack.redis.execute_command("ACL", "SETUSER", "old", "on", "nopass", "~*", "+@all", "-info")
    link = Link(stack.url.replace("//", "//old:x@"), name="test")
    try:
        assert eviction_warning(link) == ""
    finally:
        link.close()


def test_services_and_commands_warn(
    stack: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning(stack, "1gb", "allkeys-lru")
    services = [
        stack.batcher("--http-port", "0"),
        stack.worker("plain.py:Echo", "--http-port", "0"),
    ]
    stack.wait_for_model("Echo")
    for of_one in services:
        assert WARNING in of_one.wait_for(EVENT)["reason"]
        connection = http.client.HTTPConnection(of_one.status_url.removeprefix("http://"), timeout=5)
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        assert answer.status == 200  # they serve all the same
        assert WARNING in answer.read().decode()
        connection.close()
    stack.send("Echo", correlation_id="a", body="1")
    assert stack.result("Echo", "a")["status"] == "OK"

    assert models.main(["--redis-url", stack.url]) == 0
    assert WARNING in capsys.readouterr().err
    monkeypatch.setattr(command, "ONCE_INTERVAL_S", 0.0)
    assert command.main(["--redis-url", stack.url, "--once"]) == 0
    assert WARNING in capsys.readouterr().out.replace("\n", " ")
    assert command.main(["--redis-url", stack.url, "--once", "--as-json"]) == 0
    assert WARNING in capsys.readouterr().err


def test_a_batcher_notices_a_change(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again now and then, and warns once."""
    monkeypatch.setattr(service, "EVICTION_INTERVAL_S", 0.0)
    monkeypatch.setattr(service, "LEASES_INTERVAL_S", 0.0)
    batcher = service.BatcherService(stack.url, "carpool", "b", BatcherMetrics(), {})
    try:
        batcher.run_once()
        assert batcher.warnings() == []
        warning(stack, "1gb", "allkeys-lru")
        batcher.run_once()
        assert [WARNING in text for text in batcher.warnings()] == [True]
        warning(stack, "1gb", "noeviction")
        batcher.run_once()
        assert batcher.warnings() == []
    finally:
        batcher.stop()
