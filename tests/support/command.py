"""The `carpool` command, in a process forked from one that has imported it (see `support.forking`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.forking import ForkServer

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


def carpool(
    url: str | None,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    check: bool = False,
) -> Done:
    """Run a command until it ends, with whatever status, or with 0 if `check`.

    `url` is that of Redis, unless `arguments` or `environment` name it. `environment` has variables that the
    command gets beside `clean_environment()`. `folder` is its working directory.
    """
    variables = {**clean_environment(), **(environment or {})}
    if url is not None:
        variables["CARPOOL_REDIS_URL"] = url
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        server = ForkServer.of_this_process()
        process = server.start("carpool_cli", arguments, folder or Path.cwd(), variables, output, errors)
        try:
            status = process.wait(_ENDS_WITHIN_S)
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        errors.seek(0)
        done = Done(status, output.read(), errors.read())
    assert status == 0 or not check, f"carpool {' '.join(arguments)} ended with {status}:\n{done.stderr}"
    return done


def clean_environment() -> dict[str, str]:
    """The variables of this process that do not configure Carpool."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
