"""A Compose project for a test: started from docker-compose.yml, inspected, and removed afterwards.

Compose 1.29 (`docker-compose`) and 2 (`docker compose`) differ in their output and flags. Only commands that
both have are used here; everything else is found by the labels of the containers.
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
UP_S: Final = 150.0  # builds and health checks on a busy machine
BASES: Final = {
    "PYTHON_IMAGE": "python:3.11-slim",
    "REDIS_IMAGE": "redis:7-alpine",
    "PROMETHEUS_IMAGE": "prom/prometheus:v3.5.0",
}

Container = dict[str, Any]  # the output of `docker inspect`


@cache
def compose() -> Sequence[str]:
    """The Compose command. Skips the test if Compose, the engine or a base image is missing."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not on PATH")
    if not _succeeds(["docker", "info"]):
        pytest.skip("the Docker engine does not answer: see `docker info`")
    commands = (["docker", "compose"], ["docker-compose"])
    found = [command for command in commands if shutil.which(command[0]) and _succeeds([*command, "version"])]
    if not found:
        pytest.skip("Compose is missing: neither `docker compose` nor docker-compose works")
    for variable, default in BASES.items():
        image = os.environ.get(variable, default)
        if not _succeeds(["docker", "image", "inspect", image]) and not _succeeds(["docker", "pull", image]):
            pytest.skip(f"the image {image} is missing and cannot be pulled; set {variable} to another")
    return found[0]


def _succeeds(argv: Sequence[str]) -> bool:
    return subprocess.run(argv, check=False, capture_output=True).returncode == 0


def run(argv: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = UP_S) -> str:
    """Run a command, and return its output. Fails with the output if the command fails."""
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
    assert done.returncode == 0, (
        f"{' '.join(argv)} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


@contextmanager
def built(tag: str, context: Path) -> Iterator[str]:
    """An image built from a directory, removed at the end of the block."""
    run(["docker", "build", "--tag", tag, str(context)], timeout_s=300)
    try:
        yield tag
    finally:
        run(["docker", "image", "rm", "--force", tag])


class Project:
    """See the module. `files` extend docker-compose.yml; `settings` are its variables.

    Free ports are used, so that a running stack on this machine is not disturbed. At the end of the block
    everything of the project is removed.
    """

    def __init__(self, *files: str, **settings: str) -> None:
        self.name = f"carpool-test-{secrets.token_hex(3)}"
        flags = [argument for file in ("docker-compose.yml", *files) for argument in ("-f", file)]
        self._command = [*compose(), "--project-name", self.name, *flags]
        self._environment = {
            "REDIS_PORT": "0",
            "PROMETHEUS_PORT": "0",
            "GATEWAY_PORT": "0",
            "GRPC_PORT": "0",
            "CONSOLE_PORT": "0",
            **settings,
        }
        self._since_s = time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the logs are about to be removed
            for container in self.containers():
                print(f"--- {container['Name']}: {container['State']}\n{self.log(container)[-2000:]}")
        self("down", "--volumes", "--timeout", "1")

    def __call__(self, *arguments: str, timeout_s: float = UP_S) -> str:
        """Run a Compose command, and return its output."""
        return run([*self._command, *arguments], self._environment, timeout_s)

    def up(self, *arguments: str) -> None:
        """`up -d`; return once all containers are healthy."""
        self("up", "-d", *arguments)
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Wait until all containers are healthy, and the one that runs only once has exited with 0."""

        def unhealthy() -> list[str]:
            states = {container["Name"]: container["State"] for container in self.containers()}
            return [
                name
                for name, state in states.items()
                if state.get("Health", {}).get("Status") != "healthy"
                and not ("locks" in name and state["Status"] == "exited" and state["ExitCode"] == 0)
            ]

        wait_until(lambda: not unhealthy(), description="every container is healthy", timeout_s=UP_S)

    def containers(self, service: str | None = None) -> list[Container]:
        """All containers of one service or of all, running or not."""
        ids = self._ids("ps", "--all", service=service)
        return list(json.loads(run(["docker", "inspect", *ids]))) if ids else []

    def left_over(self) -> list[str]:
        """The IDs of the project's containers and networks, and the names of its volumes."""
        return [*self._ids("ps", "--all"), *self._ids("network", "ls"), *self._ids("volume", "ls")]

    def _ids(self, *listing: str, service: str | None = None) -> list[str]:
        labels = {"project": self.name, **({"service": service} if service else {})}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return run(["docker", *listing, "--quiet", *filters]).split()

    def exit_codes(self, service: str) -> list[int]:
        """The exit codes of a service's containers so far, including those already removed."""
        labels = {"project": self.name, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        span = [f"--since={self._since_s:.3f}", f"--until={time.time():.3f}"]
        lines = run(["docker", "events", *span, "--filter=event=die", *filters, "--format={{json .}}"])
        return [int(json.loads(line)["Actor"]["Attributes"]["exitCode"]) for line in lines.splitlines()]

    def events(self, service: str, name: str) -> list[dict[str, Any]]:
        """The events of this name in the logs of a service's existing containers."""
        lines = [line for container in self.containers(service) for line in self.log(container).splitlines()]
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in parsed if event["event"] == name]

    @staticmethod
    def log(container: Container) -> str:
        """The log of a container."""
        command = ["docker", "logs", container["Id"]]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout

    @staticmethod
    def inside(container: Container, *argv: str) -> str:
        """Run a command in a running container, and return its output."""
        return run(["docker", "exec", container["Id"], *argv])

    def password(self, role: str) -> str:
        """The password of a role, from its volume."""
        mount = f"{self.name}_lock-{role}:/lock:ro"
        image = os.environ.get("PYTHON_IMAGE", BASES["PYTHON_IMAGE"])
        return run(["docker", "run", "--rm", "--volume", mount, image, "cat", "/lock/password"]).strip()

    def address(self, service: str, port: int) -> str:
        """The address at which a container's port is published."""
        (container,) = self.containers(service)
        (published,) = container["NetworkSettings"]["Ports"][f"{port}/tcp"]
        return f"{published['HostIp']}:{published['HostPort']}"
