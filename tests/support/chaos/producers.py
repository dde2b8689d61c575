"""Starts producers, and gives what they recorded to a checker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from support.chaos.producer import ACCEPTED, SENT
from support.checker import Checker
from support.forking import ForkedProcess, ForkServer
from support.waiting import wait_until

TESTS: Final = Path(__file__).parents[2]


class ProducerProcess:
    """One producer, which may be killed and started again."""

    def __init__(self, url: str, model: str, name: str, home: Path, speed: float = 1) -> None:
        self._file = home / f"{name}.jsonl"
        arguments = [url, model, name, str(self._file), str(speed)]
        self._arguments = arguments
        self._process: ForkedProcess | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        server = ForkServer.of_this_process()
        with Path(os.devnull).open("wb") as nowhere:
            self._process = server.start(
                "support.chaos.producer", self._arguments, TESTS, os.environ, nowhere, nowhere
            )

    def kill(self) -> None:
        """SIGKILL; return once it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def accepted(self) -> int:
        """How many entries Redis has confirmed."""
        return self._file.read_text().count(f'"{ACCEPTED}"') if self._file.exists() else 0

    def wait_for_more(self, entries: int) -> None:
        """Wait until that many more entries are confirmed."""
        target = self.accepted() + entries
        wait_until(lambda: self.accepted() >= target, description="Redis confirms entries")

    def tell(self, checker: Checker) -> None:
        """Give the checker the history of a producer that has ended."""
        for line in self._file.read_text().splitlines():
            if not line.endswith("}"):
                continue  # it was killed while it wrote this, before it sent the entry
            record = json.loads(line)
            for correlation_id, payload in record["payloads"].items():
                if record["what"] == SENT:
                    checker.attempt(correlation_id, payload)
                elif record["what"] == ACCEPTED:
                    checker.accept(correlation_id)
                else:
                    checker.refuse(correlation_id)
