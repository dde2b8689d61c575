"""The stack of the fixture `carpool_stack`: that of `carpool up`, with logs in files and no gateway."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from carpool_cli.local.supervisor import StackPlan, StartError, Supervisor

START_S_MAX: Final = 60.0
POLL_S: Final = 0.02
DRAIN_S: Final = 5.0
_LINES_SHOWN: Final = 20


class TestStack:
    """Use it as `with TestStack(models, logs) as stack:`, from the main thread.

    `models`: written as for `carpool up`. `logs`: a directory, in which each service writes its log. `url`:
    the address of Redis, for clients.
    """

    __test__ = False  # it is no test

    def __init__(self, models: Sequence[str], logs: Path) -> None:
        self.logs = logs
        self._supervisor = Supervisor(StackPlan(models=models, device="cpu", drain_s=DRAIN_S, logs=logs))

    @property
    def url(self) -> str:
        """The address of Redis."""
        return self._supervisor.url

    def __enter__(self) -> Self:
        try:
            self._supervisor.start()
            self._wait_until_served()
        except BaseException:
            self._supervisor.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.stop()

    def _wait_until_served(self) -> None:
        end_s = time.monotonic() + START_S_MAX
        supervisor = self._supervisor
        while not supervisor.serving:
            try:
                supervisor.run_once()
            except StartError as error:
                raise StartError(f"{error}; the logs end with:\n{self.end_of_logs()}") from None
            if time.monotonic() > end_s:
                raise StartError(
                    f"no model was served within {START_S_MAX:g} s; the logs end with:\n{self.end_of_logs()}"
                )
            time.sleep(POLL_S)

    def end_of_logs(self) -> str:
        """The last lines of the log of each service."""
        shown: list[str] = []
        for log in sorted(self.logs.glob("*.log")):
            lines = log.read_text("utf-8", "replace").splitlines()
            shown += [f"--- {log.name}", *lines[-_LINES_SHOWN:]]
        return "\n".join(shown)
