"""Models whose processes are replaced: each tells which process executed a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

MIB: Final = 1 << 20


class Renewed:
    """Is replaced after a few requests."""

    max_batch_size = 4
    max_requests_per_process = 20

    def predict(self, batch: list[Any]) -> list[int]:
        return [os.getpid() for _ in batch]


class Leaking:
    """Keeps a MiB for each request, and tells what its process takes."""

    max_batch_size = 4
    max_process_memory = "140MiB"

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def predict(self, batch: list[Any]) -> list[list[int]]:
        self.kept += [os.urandom(1024) * 1024 for _ in batch]
        resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return [[os.getpid(), resident_bytes] for _ in batch]


class Steps:
    """Emits the ID of its process with each step. It cannot go on from chunks."""

    max_batch_size = 2
    max_requests_per_process = 6
    continues = False

    def begin(self, requests: list[Any]) -> None:
        for request in requests:
            request.state = request.body

    def step(self, requests: list[Any]) -> None:
        for request in requests:
            request.emit(os.getpid())
            request.state -= 1
            if not request.state:
                request.finish()


def counted(body: int) -> Iterator[int]:
    yield from range(body)
