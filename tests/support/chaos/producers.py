"""Starts producers, and gives what they recorded to a checker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from carpool.lifecycle import command_that_dies_with_parent
from support.chaos.producer import ACCEPTED, SENT
from support.checker import Checker
from support.waiting import wait_until

TESTS: Final = Path(__file__).parents[2]


class ProducerProcess:
    """One producer, which may be killed and started again."""

    def __init__(self, url: str, model: str, name: str, home: Path, speed: float = 1) -> None:
        self._file = home / f"{name}.jsonl"
        arguments = [url, model, name, str(self._file), str(speed)]
        self._command = [sys.executable, "-m", "support.chaos.producer", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self._process = subprocess.Popen(
            command_that_dies_with_parent(self._command), cwd=TESTS, stderr=subprocess.DEVNULL
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
