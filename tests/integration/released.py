"""Producers, workers and batchers of a released wheel, with those of this tree: `make compat`.

It is not named like a test, so that `make test` leaves it out: it starts many new interpreters.

The wheel is that of CARPOOL_RELEASED_WHEEL (`make compat WHEEL=PATH`), or built from the newest tag `v...`,
or, where there is none, from this tree: then this shows that a wheel works without its checkout.

All sign in with their roles, under the rules of this tree (`carpool acl`): an upgrade begins with these.

Why: docs/decisions/0122.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.lifecycle import command_that_dies_with_parent
from carpool_cli import acl
from conftest import SERVERS
from support import release
from support.configured import NO_PERSISTENCE, ConfiguredRedis, major
from support.http import Connection
from support.stack import Stack
from support.waiting import EVENTUALLY_S

TESTER: Final = "password-of-the-tester"  # its user may do everything

# What a producer does, with public names only. It prints what it got.
PRODUCER: Final = """
import json, sys
import numpy
import carpool
from carpool import Client
from carpool.errors import CarpoolError

with Client(sys.argv[1]) as client:
    got = {
        "home": carpool.__file__,
        "one": client.infer("Square", 7, timeout=30),
        "many": [float(one) for one in client.infer_many("Square", numpy.arange(3.0), timeout=30)],
        "chunks": list(client.stream("countdown", 3, timeout=30)),
    }
    try:
        client.infer("Square", "seven", timeout=30)
    except CarpoolError as error:
        got["error"] = error.status
print(json.dumps(got))
"""
MODELS_OF_BOTH: Final = '''
"""Models that any version can serve."""


class Square:
    max_batch_size = 8

    def predict(self, batch):
        return [body * body for body in batch]


def countdown(body):
    yield from range(body, 0, -1)
'''


def newest_tag() -> str:
    listed = release.run(["git", "tag", "--list", "v[0-9]*", "--sort=-version:refname"])
    return (listed.split() or [""])[0]


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    say = request.config.get_terminal_writer().line
    if given := os.environ.get("CARPOOL_RELEASED_WHEEL"):
        say(f"\nThe released wheel is {given}.")
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    tag = newest_tag()
    if not tag:
        say("\nThere is no tag v...: the released wheel is of this tree.")
        return release.build(folder, targets=["wheel"]).wheel
    say(f"\nThe released wheel is of the tag {tag}.")
    release.run(["git", "archive", "--output", folder / "source.tar", tag])
    with tarfile.open(folder / "source.tar") as files:
        files.extractall(folder / "source", filter="data")
    return release.build(folder / "dist", folder / "source", ["wheel"]).wheel


@pytest.fixture(scope="module")
def released(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> release.Environment:
    """An environment with the wheel, and with the packages of this one but for Carpool."""
    environment = release.Environment(tmp_path_factory.mktemp("released") / "venv")
    environment.borrow()
    environment.install(wheel)
    (environment.home / "model.py").write_text(MODELS_OF_BOTH)
    return environment


class Secured:
    """A Redis whose users have the rights that this tree gives its roles, and services of this tree."""

    def __init__(self, home: Path) -> None:
        self._secrets, users = home / "secrets", home / "users.acl"
        binary = max(SERVERS, key=major)
        rules = "7" if major(binary) >= 7 else "6"
        assert acl.main(["--secrets", str(self._secrets), "--output", str(users), "--redis", rules]) == 0
        with users.open("a") as file:
            file.write(f"user tester on >{TESTER} ~* &* +@all\n")
        url = f"redis://tester:{TESTER}@127.0.0.1:{{port}}/0"
        options = (*NO_PERSISTENCE, "--aclfile", str(users))
        server = ConfiguredRedis(home / "redis", *options, binary=binary, url=url)
        self._address = f"127.0.0.1:{server.port}/0"
        services = {role: self.environment(role) for role in ("batcher", "worker", "gateway")}
        self.stack = Stack(home / "logs", server=server, environment=services)

    def environment(self, role: str) -> dict[str, str]:
        return {
            "CARPOOL_REDIS_URL": f"redis://{self._address}",
            "CARPOOL_REDIS_USER": role,
            "CARPOOL_REDIS_PASSWORD_FILE": str(self._secrets / role / "password"),
        }

    def url(self, role: str) -> str:
        return f"redis://{role}:{(self._secrets / role / 'password').read_text()}@{self._address}"

    def denied(self) -> list[tuple[str, str]]:
        """Which roles were denied which commands or keys."""
        return [(event["username"], event["object"]) for event in self.stack.redis.acl_log()]


@contextmanager
def running(released: release.Environment, secured: Secured, *command: str) -> Iterator[None]:
    """A service of the wheel, with its role. It has to end well."""
    log = released.home / f"{command[0]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_that_dies_with_parent([str(released.carpool), *command]),
            cwd=released.home,
            env={**released.variables, **secured.environment(command[0])},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
        process.terminate()
        assert process.wait(EVENTUALLY_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    made = Secured(tmp_path)
    with made.stack:
        yield made
        assert made.denied() == []


def model(released: release.Environment, name: str) -> str:
    return f"{released.home}/model.py:{name}"


def produced(released: release.Environment, url: str) -> Any:
    got = json.loads(released.run(released.python, "-c", PRODUCER, url))
    home = Path(got.pop("home"))
    assert home.is_relative_to(released.folder), f"this is no producer of the wheel: {home}"
    return got


RESULTS: Final = {
    "one": 49,
    "many": [0.0, 1.0, 4.0],
    "chunks": [3, 2, 1],
    "error": "INTERNAL",
}


def test_producers_and_commands_of_the_wheel_are_served_by_this_tree(
    released: release.Environment, secured: Secured
) -> None:
    stack = secured.stack
    stack.batcher()
    for name in ("Square", "countdown"):
        stack.worker(model(released, name), ready=False)
    for name in ("Square", "countdown"):
        stack.wait_for_model(name)
    assert produced(released, secured.url("producer")) == RESULTS
    listed = released.run(released.carpool, "models", "--json", "--redis-url", secured.url("admin"))
    assert "countdown" in listed


def test_workers_of_the_wheel_serve_batchers_and_gateways_of_this_tree(
    released: release.Environment, secured: Secured
) -> None:
    secured.stack.batcher()
    gateway = secured.stack.gateway()
    with running(released, secured, "worker", model(released, "Square")):
        secured.stack.wait_for_model("Square")
        with Connection(gateway.url) as connection:
            for body in range(5):
                answer = connection.request("POST", "/carpool/v1/models/Square/infer", b"%d" % body)
                assert answer.json == body * body


def test_a_batcher_of_the_wheel_serves_workers_of_this_tree_and_hands_over_to_one(
    released: release.Environment, secured: Secured
) -> None:
    stack = secured.stack
    stack.worker(model(released, "Square"), ready=False)
    with running(released, secured, "batcher"):
        stack.wait_for_model("Square")
        first = stack.send("Square", body="3")
        assert stack.result("Square", first)["body"] == 9
        new = stack.batcher()
    second = stack.send("Square", body="4")
    assert stack.result("Square", second)["body"] == 16
    assert stack.active_batcher("Square") is new


def test_the_wheel_serves_a_model_without_a_checkout(released: release.Environment) -> None:
    if os.environ.get("CARPOOL_RELEASED_WHEEL") or newest_tag():
        pytest.skip("the wheel was released: `make release` has checked it")
    release.check_runs(released, demo=False)
