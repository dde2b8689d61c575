"""Models that return a hash of correlation ID and payload, so that a swapped result is detected."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo

RECORDED: Final = "http-"  # what the payloads begin with whose executions are recorded


def digest(correlation_id: str, payload: str | bytes) -> str:
    """H(correlation ID, payload)."""
    data = payload.encode() if isinstance(payload, str) else payload
    return hashlib.sha256(correlation_id.encode() + b"\0" + data).hexdigest()[:32]


class Hashing:
    """A batch takes about one millisecond, like a small network's."""

    max_batch_size = 32
    seconds = 0.001

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        time.sleep(self.seconds)
        return [
            digest(info.correlation_id, payload).encode()
            if isinstance(payload, bytes)
            else digest(info.correlation_id, payload)
            for info, payload in zip(requests, batch, strict=True)
        ]


class Busy(Hashing):
    """Slow enough to have a batch in hand nearly always, while requests keep arriving."""

    version = os.environ.get("VERSION", "1")
    seconds = 0.02


class Shuffled(Hashing):
    """A deliberate fault: each result is another request's."""

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        rows = super().predict(batch, requests)
        return rows[1:] + rows[:1]


class Recorded(Busy):
    """Adds a line to the file EXECUTIONS for each execution of a request of HTTP: its correlation ID, and the
    first word of its payload. Refuses what is neither text nor bytes, as a batch in which a request raises is
    executed in parts."""

    def validate(self, body: object) -> None:
        if not isinstance(body, str | bytes):
            raise TypeError("must be text or bytes")

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        lines = [
            f"{info.correlation_id} {word}\n"
            for info, payload in zip(requests, batch, strict=True)
            if (word := first_word(payload)).startswith(RECORDED)
        ]
        if lines:
            # All at once, and before they are executed: what a process did not finish counts, too.
            file = os.open(os.environ["EXECUTIONS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, "".join(lines).encode())
            os.close(file)
        return super().predict(batch, requests)


def first_word(payload: object) -> str:
    """Of a payload that is text or bytes; of another one nothing."""
    text = payload.decode() if isinstance(payload, bytes) else payload if isinstance(payload, str) else ""
    return text.partition(" ")[0]
