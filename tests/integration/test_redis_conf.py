"""ops/redis/redis.conf: each Redis server starts with it unchanged, applies it, and runs a stack."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from redis.exceptions import OutOfMemoryError

from carpool import Client
from carpool.keys import Keys
from carpool_cli import acl
from carpool_cli.local.embedded import EmbeddedRedisError
from support.configured import ConfiguredRedis, major
from support.redis_client import redis_at
from support.stack import Stack
from support.waiting import EVENTUALLY_S

FOLDER: Final = Path(__file__).parents[2] / "ops" / "redis"
CONF: Final = FOLDER / "redis.conf"
TESTER_PASSWORD: Final = "password-of-the-test"  # noqa: S105
UNITS: Final = {"mb": 1024**2, "gb": 1024**3}
# Directives that the tests override.
OVERRIDDEN: Final = {"aclfile", "port"}


def directives(path: Path) -> dict[str, str]:
    """The directives of the file, by name."""
    lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    return {name: " ".join(value) for name, *value in filter(None, lines)}


def in_bytes(value: str) -> str:
    """Convert sizes to bytes, as CONFIG GET prints them."""
    return re.sub(r"\b(\d+)(mb|gb)\b", lambda size: str(int(size[1]) * UNITS[size[2]]), value)


@pytest.fixture
def users(server: Path, tmp_path: Path) -> Path:
    """An ACL file with an additional user for the test, which has all permissions."""
    path = tmp_path / "users.acl"
    version = ["--redis", "6" if major(server) < 7 else "7"]
    assert acl.main(["--secrets", str(tmp_path / "secrets"), "--output", str(path), *version]) == 0
    with path.open("a") as file:
        file.write(f"user tester on >{TESTER_PASSWORD} ~* &* +@all\n")
    return path


@pytest.fixture
def stack(server: Path, users: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack on a Redis with this configuration; only paths and `maxmemory` are overridden."""
    redis = ConfiguredRedis(
        tmp_path / "redis",
        str(CONF),
        *("--aclfile", str(users), "--maxmemory", "512mb"),
        binary=server,
        url=f"redis://tester:{TESTER_PASSWORD}@127.0.0.1:{{port}}/0",
    )
    environment = {
        role: {
            "CARPOOL_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            "CARPOOL_REDIS_USER": role,
            "CARPOOL_REDIS_PASSWORD_FILE": str(tmp_path / "secrets" / role / "password"),
        }
        for role in ("batcher", "worker")
    }
    with Stack(tmp_path / "logs", server=redis, environment=environment) as stack:
        yield stack


def url_of(stack: Stack, role: str) -> str:
    """The URL to connect as the user of a role."""
    password = (stack.home.parent / "secrets" / role / "password").read_text()
    return f"redis://{role}:{password}@127.0.0.1:{stack.server.port}/0"


def test_all_directives_are_in_force(stack: Stack) -> None:
    for name, value in directives(CONF).items():
        (actual,) = stack.redis.config_get(name).values()
        if name == "maxmemory":
            assert actual == str(512 * 1024**2)
        elif name not in OVERRIDDEN:
            assert in_bytes(value) in actual, name
            assert value or not actual, name


def test_accepted_request_survives_a_crash_of_redis(stack: Stack) -> None:
    """A request is accepted, Redis is killed at once and restarted, and then the request is served."""
    producer = redis_at(url_of(stack, "producer"), protocol=2, driver_info=None)
    entry_id = producer.xadd(Keys("square").requests, {"body": "7"}).decode()
    producer.close()
    stack.server.restart()
    stack.serve("square")
    assert stack.result("square", entry_id)["body"] == 49
    with Client(url_of(stack, "producer"), timeout=EVENTUALLY_S) as client:
        assert list(client.map("square", range(100))) == [n * n for n in range(100)]


def test_backlog_of_large_bodies_is_served(stack: Stack) -> None:
    """A batcher reads it with one command: 96 MiB, which a tight limit on the output buffer would prevent."""
    body = bytes(8 * 1024 * 1024)
    names = [f"large-{number}" for number in range(12)]
    for name in names:
        stack.send("Lengths", correlation_id=name, content_type="application/octet-stream", body=body)
    stack.serve("plain.py:Lengths")
    for name in names:
        assert stack.result("Lengths", name, timeout_s=60)["body"] == len(body)


def test_full_redis_rejects_new_requests_and_keeps_accepted_ones(stack: Stack) -> None:
    stack.serve("square")
    used = stack.redis.info("memory")["used_memory"]
    stack.redis.config_set("maxmemory", used + 64 * 1024**2)  # less to write than with the usual limit
    key, accepted = Keys("not-served").requests, 0
    producer = redis_at(url_of(stack, "producer"), protocol=2, driver_info=None)
    with producer, pytest.raises(OutOfMemoryError):
        for _ in range(100):
            producer.xadd(key, {"body": bytes(1024 * 1024)})
            accepted += 1
    assert stack.redis.xlen(key) == accepted > 40
    stack.redis.delete(key)
    with Client(url_of(stack, "producer"), timeout=EVENTUALLY_S) as client:
        assert client.infer("square", 7) == 49


def test_redis_does_not_start_without_acl_file(server: Path, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match="ACL"):
        ConfiguredRedis(tmp_path / "redis", str(CONF), "--aclfile", str(tmp_path / "none"), binary=server)
