"""The `carpool` command, in a process forked from one that has imported it (see `support.forking`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from support.forking import ForkedProcess, ForkServer

_ENDS_WITHIN_S = 60.0


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit status, and the bytes that it wrote."""

    returncode: int
    output: bytes
    errors: bytes

    @property
    def stdout(self) -> str:
        return self.output.decode()

    @property
    def stderr(self) -> str:
        return self.errors.decode()


class Running:
    """A command that runs."""

    def __init__(self, process: ForkedProcess, output: IO[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._output = output
        self._errors = errors

    def end(self, timeout_s: float = _ENDS_WITHIN_S) -> Done:
        """Wait until it ends. Raises TimeoutExpired after `timeout_s`."""
        status = self._process.wait(timeout_s)
        self._output.seek(0)
        self._errors.seek(0)
        return Done(status, self._output.read(), self._errors.read())


def carpool(
    url: str | None,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    check: bool = False,
    timeout_s: float = _ENDS_WITHIN_S,
) -> Done:
    """Run a command until it ends, with whatever status, or with 0 if `check`.

    `url` is that of Redis, unless `arguments` or `environment` name it. `environment` has variables that the
    command gets beside `clean_environment()`. `folder` is its working directory. It is killed after
    `timeout_s`.
    """
    with running(url, *arguments, environment=environment, folder=folder) as command:
        done = command.end(timeout_s)
    status = done.returncode
    assert status == 0 or not check, f"carpool {' '.join(arguments)} ended with {status}:\n{done.stderr}"
    return done


@contextmanager
def running(
    url: str | None,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Running]:
    """Start a command, as `carpool` does. It is killed if it still runs at the end of the block."""
    variables = {**clean_environment(), **(environment or {})}
    if url is not None:
        variables["CARPOOL_REDIS_URL"] = url
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        server = ForkServer.of_this_process()
        process = server.start("carpool_cli", arguments, folder or Path.cwd(), variables, output, errors)
        try:
            yield Running(process, output, errors)
        finally:
            process.kill()
            process.wait()


def clean_environment() -> dict[str, str]:
    """The variables of this process that do not configure Carpool."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
