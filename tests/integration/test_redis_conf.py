"""ops/redis/redis.conf, as it is: every Redis here starts with it, does what it says, and carries a stack."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError

from carpool import Client
from carpool.keys import Keys
from carpool_cli import acl
from carpool_cli.local.embedded import EmbeddedRedisError
from support.configured import ConfiguredRedis, major
from support.stack import Stack

FOLDER: Final = Path(__file__).parents[2] / "ops" / "redis"
CONF: Final = FOLDER / "redis.conf"
TESTER: Final = "in-the-place-of-an-operator"
UNITS: Final = {"mb": 1024**2, "gb": 1024**3}
# What depends on where it runs.
HERE: Final = {"aclfile", "port"}


def directives(path: Path) -> dict[str, str]:
    """What the file says: name -> value as written."""
    words = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    return {name: " ".join(value) for name, *value in filter(None, words)}


def in_bytes(value: str) -> str:
    """Sizes as CONFIG GET tells them."""
    return re.sub(r"\b(\d+)(mb|gb)\b", lambda size: str(int(size[1]) * UNITS[size[2]]), value)


@pytest.fixture
def users(server: Path, tmp_path: Path) -> Path:
    """An ACL file, with one user more: the test, which may do everything."""
    path = tmp_path / "users.acl"
    which = ["--redis", "6" if major(server) < 7 else "7"]
    assert acl.main(["--secrets", str(tmp_path / "secrets"), "--output", str(path), *which]) == 0
    with path.open("a") as file:
        file.write(f"user tester on >{TESTER} ~* &* +@all\n")
    return path


@pytest.fixture
def stack(server: Path, users: Path, tmp_path: Path) -> Iterator[Stack]:
    """Nothing differs from the file but where it is, and how much memory there may be."""
    redis = ConfiguredRedis(
        tmp_path / "redis",
        str(CONF),
        *("--aclfile", str(users), "--maxmemory", "512mb"),
        binary=server,
        url=f"redis://tester:{TESTER}@127.0.0.1:{{port}}/0",
    )
    environment = {
        role: {
            "CARPOOL_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            "CARPOOL_REDIS_USER": role,
            "CARPOOL_REDIS_PASSWORD_FILE": str(tmp_path / "secrets" / role / "password"),
        }
        for role in ("batcher", "worker")
    }
    with Stack(tmp_path / "logs", server=redis, environment=environment) as one:
        yield one


def signed_in(stack: Stack, role: str) -> str:
    password = (stack.home.parent / "secrets" / role / "password").read_text()
    return f"redis://{role}:{password}@127.0.0.1:{stack.server.port}/0"


def test_all_that_the_file_says_is_in_force(stack: Stack) -> None:
    for name, value in directives(CONF).items():
        (actual,) = stack.redis.config_get(name).values()
        if name == "maxmemory":
            assert actual == str(512 * 1024**2)
        elif name not in HERE:
            assert in_bytes(value) in actual, name
            assert value or not actual, name


def test_a_stack_runs_and_its_requests_outlive_redis(stack: Stack) -> None:
    """Accepted with nobody to serve it, then Redis dies at once; served when all is back."""
    producer: Any = Redis.from_url(signed_in(stack, "producer"), protocol=2, driver_info=None)
    entry_id = producer.xadd(Keys("square").requests, {"body": "7"}).decode()
    producer.close()
    stack.server.restart()
    stack.serve("square")
    assert stack.result("square", entry_id)["body"] == 49
    with Client(signed_in(stack, "producer"), timeout=15) as client:
        assert list(client.map("square", range(100))) == [n * n for n in range(100)]


def test_a_backlog_of_large_bodies_fits_through(stack: Stack) -> None:
    """A batcher asks for it in one piece: 96 MiB, which a tight limit on replies would not let through."""
    body = bytes(8 * 1024 * 1024)
    names = [f"large-{number}" for number in range(12)]
    for name in names:
        stack.send("Echo", correlation_id=name, content_type="application/octet-stream", body=body)
    stack.serve("plain.py:Echo")
    for name in names:
        assert stack.result("Echo", name, timeout_s=60)["body"] == body


def test_a_full_redis_refuses_what_is_new_and_keeps_what_it_has(stack: Stack) -> None:
    stack.serve("square")
    key, accepted = Keys("nobody-serves-this").requests, 0
    filling: Any = Redis.from_url(signed_in(stack, "producer"), protocol=2, driver_info=None)
    with filling, pytest.raises(OutOfMemoryError):
        for _ in range(600):
            filling.xadd(key, {"body": bytes(1024 * 1024)})
            accepted += 1
    assert stack.redis.xlen(key) == accepted > 400
    stack.redis.delete(key)
    with Client(signed_in(stack, "producer"), timeout=15) as client:
        assert client.infer("square", 7) == 49


def test_it_does_not_start_without_its_locks(server: Path, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match="ACL"):
        ConfiguredRedis(tmp_path / "redis", str(CONF), "--aclfile", str(tmp_path / "none"), binary=server)
