"""Starts producers, and gives what they recorded to a checker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from support.chaos.producer import ACCEPTED, SENT
from support.checker import Checker
from support.forking import ForkedProcess, ForkServer
from support.waiting import wait_until

PRODUCER: Final = "support.chaos.producer"
ENQUEUER: Final = "support.chaos.enqueuer"
TESTS: Final = Path(__file__).parents[2]


class ProducerProcess:
    """One producer, which may be killed and started again. `program`: the module that it runs."""

    def __init__(
        self, url: str, model: str, name: str, home: Path, speed: float = 1, program: str = PRODUCER
    ) -> None:
        self._file = home / f"{name}.jsonl"
        self._counted_bytes, self._accepted = 0, 0
        arguments = [url, model, name, str(self._file), str(speed)]
        self._arguments = arguments
        self._program = program
        self._process: ForkedProcess | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        server = ForkServer.of_this_process()
        with Path(os.devnull).open("wb") as nowhere:
            self._process = server.start(self._program, self._arguments, TESTS, os.environ, nowhere, nowhere)

    def kill(self) -> None:
        """SIGKILL; return once it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def accepted(self) -> int:
        """How many entries Redis has confirmed."""
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._counted_bytes)
                complete, newline, _ = file.read().rpartition(b"\n")  # the rest is being written
            self._counted_bytes += len(complete) + len(newline)
            self._accepted += complete.count(b'"%b"' % ACCEPTED.encode())
        return self._accepted

    def wait_for_more(self, entries: int) -> None:
        """Wait until that many more entries are confirmed."""
        target = self.accepted() + entries
        wait_until(lambda: self.accepted() >= target, description="Redis confirms entries")

    def tell(self, checker: Checker) -> None:
        """Give the checker the history of a producer that has ended."""
        for record in self._records():
            for correlation_id, payload in record["payloads"].items():
                if record["what"] == SENT:
                    checker.attempt(correlation_id, payload)
                elif record["what"] == ACCEPTED:
                    checker.accept(correlation_id)
                else:
                    checker.refuse(correlation_id)

    def confirmed(self) -> dict[str, str]:
        """The payloads of the requests that Redis has confirmed, by correlation ID."""
        accepted = [record["payloads"] for record in self._records() if record["what"] == ACCEPTED]
        return {name: payload for payloads in accepted for name, payload in payloads.items()}

    def _records(self) -> Iterator[Mapping[str, Any]]:
        for line in self._file.read_text().splitlines():
            if line.endswith("}"):  # else it was killed while it wrote this, before it sent the entry
                yield json.loads(line)
