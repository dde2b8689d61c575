"""Answers with a hash of the correlation ID and the payload, so that a result given to another shows."""

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
    """A batch takes a millisecond and a bit, as a small network's does."""

    max_batch_size = 32
    seconds = 0.001

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        time.sleep(self.seconds)
        return [
            digest(about.correlation_id, payload).encode()
            if isinstance(payload, bytes)
            else digest(about.correlation_id, payload)
            for about, payload in zip(requests, batch, strict=True)
        ]


class Busy(Hashing):
    """Slow enough to have a batch in hand at nearly all times, where requests keep coming."""

    seconds = 0.02


class Shuffled(Hashing):
    """A planted fault: rows that belong to their neighbours."""

    def predict(self, batch: list[str | bytes], requests: Sequence[RequestInfo]) -> list[str | bytes]:
        rows = super().predict(batch, requests)
        return rows[1:] + rows[:1]
