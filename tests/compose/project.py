"""A Compose project of a test's own: up from docker-compose.yml, looked at with `docker`, and gone after it.

Compose 1.29 (`docker-compose`) and 2 (`docker compose`) differ in what they print and which flags they have:
what is asked here is what both do alike, and the rest is read by the containers' labels.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
UP_S: Final = 150.0  # builds and health checks beside whatever else the machine does
BASES: Final = {
    "PYTHON_IMAGE": "python:3.11-slim",
    "REDIS_IMAGE": "redis:7-alpine",
    "PROMETHEUS_IMAGE": "prom/prometheus:v3.5.0",
}

Container = dict[str, Any]  # as `docker inspect` describes it


@cache
def compose() -> Sequence[str]:
    """The Compose of this machine. Skips the test where it, the engine or an image to build on is missing."""
    if shutil.which("docker") is None:
        pytest.skip("there is no docker on PATH")
    if not _succeeds(["docker", "info"]):
        pytest.skip("no Docker engine answers: `docker info` says why")
    commands = (["docker", "compose"], ["docker-compose"])
    found = [one for one in commands if shutil.which(one[0]) and _succeeds([*one, "version"])]
    if not found:
        pytest.skip("there is no Compose: neither `docker compose` nor docker-compose")
    for variable, default in BASES.items():
        image = os.environ.get(variable, default)
        if not _succeeds(["docker", "image", "inspect", image]) and not _succeeds(["docker", "pull", image]):
            pytest.skip(f"the image {image} is not here and cannot be pulled; name another with {variable}")
    return found[0]


def _succeeds(argv: Sequence[str]) -> bool:
    return subprocess.run(argv, check=False, capture_output=True).returncode == 0


def run(argv: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = UP_S) -> str:
    """Run a command; its output. Fails with all that it said if it fails."""
    done = subprocess.run(
        argv,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def built(tag: str, context: Path) -> Iterator[str]:
    """An image from a directory, inside the block."""
    run(["docker", "build", "--tag", tag, str(context)], timeout_s=300)
    try:
        yield tag
    finally:
        run(["docker", "image", "rm", "--force", tag])


class Project:
    """See the module. `files` come on top of docker-compose.yml; `settings` are its variables.

    Ports are free ones, so that a stack that somebody uses stays what it is. When the block ends everything
    of the project is removed.
    """

    def __init__(self, *files: str, **settings: str) -> None:
        self.name = f"carpool-test-{secrets.token_hex(3)}"
        chosen = [word for file in ("docker-compose.yml", *files) for word in ("-f", file)]
        self._command = [*compose(), "--project-name", self.name, *chosen]
        self._environment = {"REDIS_PORT": "0", "PROMETHEUS_PORT": "0", **settings}
        self._since_s = time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # what they logged is about to go
            for container in self.containers():
                print(f"--- {container['Name']}: {container['State']}\n{self.log(container)[-2000:]}")
        self("down", "--volumes", "--timeout", "1")

    def __call__(self, *words: str, timeout_s: float = UP_S) -> str:
        """A Compose command; its output."""
        return run([*self._command, *words], self._environment, timeout_s)

    def up(self, *words: str) -> None:
        """`up -d`; returns once every container is healthy."""
        self("up", "-d", *words)
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """All containers run and say that they are well; the one that runs once has ended with 0."""

        def unwell() -> list[str]:
            states = {one["Name"]: one["State"] for one in self.containers()}
            return [
                name
                for name, state in states.items()
                if state.get("Health", {}).get("Status") != "healthy"
                and not ("locks" in name and state["Status"] == "exited" and state["ExitCode"] == 0)
            ]

        wait_until(lambda: not unwell(), description="every container is healthy", timeout_s=UP_S)

    def containers(self, service: str | None = None) -> list[Container]:
        """The containers there are, running or not, of one service or of all."""
        ids = self._ids("ps", "--all", service=service)
        return list(json.loads(run(["docker", "inspect", *ids]))) if ids else []

    def left_over(self) -> list[str]:
        """IDs of the project's containers, and names of its networks and volumes."""
        return [*self._ids("ps", "--all"), *self._ids("network", "ls"), *self._ids("volume", "ls")]

    def _ids(self, *listing: str, service: str | None = None) -> list[str]:
        labels = {"project": self.name, **({"service": service} if service else {})}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return run(["docker", *listing, "--quiet", *filters]).split()

    def exit_codes(self, service: str) -> list[int]:
        """How the containers of a service ended so far, those that are removed included."""
        labels = {"project": self.name, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        span = [f"--since={self._since_s:.3f}", f"--until={time.time():.3f}"]
        lines = run(["docker", "events", *span, "--filter=event=die", *filters, "--format={{json .}}"])
        return [int(json.loads(line)["Actor"]["Attributes"]["exitCode"]) for line in lines.splitlines()]

    def events(self, service: str, name: str) -> list[dict[str, Any]]:
        """What the containers of a service, those that are left, have logged under this name."""
        lines = [line for one in self.containers(service) for line in self.log(one).splitlines()]
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in parsed if event["event"] == name]

    @staticmethod
    def log(container: Container) -> str:
        """All that a container has said."""
        command = ["docker", "logs", container["Id"]]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout

    @staticmethod
    def inside(container: Container, *argv: str) -> str:
        """Run a command in a running container; its output."""
        return run(["docker", "exec", container["Id"], *argv])

    def password(self, role: str) -> str:
        """A role's password, from its volume."""
        mount = f"{self.name}_lock-{role}:/lock:ro"
        image = os.environ.get("PYTHON_IMAGE", BASES["PYTHON_IMAGE"])
        return run(["docker", "run", "--rm", "--volume", mount, image, "cat", "/lock/password"]).strip()

    def address(self, service: str, port: int) -> str:
        """Where a container's port is published."""
        (container,) = self.containers(service)
        (published,) = container["NetworkSettings"]["Ports"][f"{port}/tcp"]
        return f"{published['HostIp']}:{published['HostPort']}"
