"""Models whose processes are replaced: each tells which process executed a request."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from carpool import AsyncRequestClient, metrics

MIB: Final = 1 << 20


class Renewed:
    """Is replaced after a few requests."""

    max_batch_size = 4
    max_requests_per_process = 20

    def predict(self, batch: list[Any]) -> list[int]:
        time.sleep(0.005)  # so that it is nearly always executing
        metrics.counter("executed", "Requests that were executed").inc(len(batch))
        return [os.getpid() for _ in batch]


class RenewedAsync:
    """Executes several batches at a time, calls another model for each request, and is replaced after a few.
    Tells its process, how many batches it executes, and what the other model said."""

    max_batch_size = 2
    max_concurrent_batches = 4
    max_requests_per_process = 20

    def load(self, device: str, *, salt: str) -> None:
        self.salt = salt
        self.batches = 0

    async def predict(self, batch: list[Any], clients: list[AsyncRequestClient]) -> list[list[int]]:
        metrics.counter("begun", "Requests whose execution began").inc(len(batch))
        self.batches += 1
        together = self.batches
        answers = [await client.infer("Inner", body) for body, client in zip(batch, clients, strict=True)]
        self.batches -= 1
        metrics.counter("ended", "Requests whose execution ended").inc(len(batch))
        return [[os.getpid(), together, answer, len(self.salt)] for answer in answers]


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


class LeakingDecoder:
    """Keeps a MiB for each request in its decoder process, and tells which model process executed it."""

    max_batch_size = 4
    max_process_memory = "240MiB"
    decode_in = "processes"
    decode_workers = 1

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def decode(self, body: Any) -> Any:
        self.kept.append(os.urandom(1024) * 1024)
        return body

    def predict(self, batch: list[Any]) -> list[int]:
        return [os.getpid() for _ in batch]


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


class Measuring:
    """Has metrics of its own, and is replaced after a few requests: what was counted stays."""

    max_batch_size = 4
    max_requests_per_process = 20

    def load(self, device: str) -> None:
        self.words = metrics.counter("words", "Words that were read", "language")
        self.longest = metrics.gauge("longest", "Letters of the longest word")
        self.letters = metrics.histogram("letters", "Letters of a word", buckets=(2, 4))

    def predict(self, batch: list[str]) -> list[int]:
        for word in batch:
            self.words.inc(language="en")
            self.letters.observe(len(word))
        self.longest.set(max(map(len, batch)))
        return [os.getpid() for _ in batch]


def measured_steps(body: int) -> Iterator[int]:
    for number in range(body):
        metrics.counter("steps_taken", "Steps").inc()
        yield number
