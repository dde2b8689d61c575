"""Models that return a hash of correlation ID and payload, so that a swapped result is detected."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo


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

    seconds = 0.02


class Shuffled(Hashing):
    """A deliberate fault: each result is another request's."""

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        rows = super().predict(batch, requests)
        return rows[1:] + rows[:1]
