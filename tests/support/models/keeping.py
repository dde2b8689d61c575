"""A model of sequences whose answers can be computed without it: each depends on all requests before it.

    answer k = "k:" + a hash of the sequence's ID, and of the texts from the start to this one

So a request that was lost, executed twice or in another order, or with the state of another sequence, shows
in every later answer. A body is a map: `text`; `sleep_s`, how long the request takes; `gate`, a file for
which it waits; and the faults `raises` and `kills`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool.wire.tensors import Array, StateSpec

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo

DIGEST_BYTES = 32
INITIAL = bytes(DIGEST_BYTES)
GATE_S = 240.0  # longer than anything that a test waits for


def digest_after(sequence_id: str, digest: bytes, text: str) -> bytes:
    """The state after a request with this text. `digest`: the state before; INITIAL at a start."""
    return hashlib.sha256(sequence_id.encode() + b"\0" + digest + text.encode()).digest()


def answer_of(count: int, digest: bytes) -> str:
    """The answer to the request number `count`, from 1, after which the state is `digest`."""
    return f"{count}:{digest.hex()[:16]}"


class Keeping:
    """Keeps a digest and a count, which are stacked along different axes."""

    max_batch_size = 8
    max_candidate_sequences = 64
    states = (StateSpec("digest", "UINT8", (-1, DIGEST_BYTES)), StateSpec("count", "INT64", (1, -1), axis=1))

    def predict(
        self, batch: list[dict[str, Any]], states: Mapping[str, Array], requests: Sequence[RequestInfo]
    ) -> tuple[list[str], dict[str, Array]]:
        time.sleep(max(float(body.get("sleep_s", 0)) for body in batch))
        for body in batch:
            wait_at_gate(body)
            if body.get("kills"):
                os.kill(os.getpid(), signal.SIGKILL)
            if body.get("raises"):
                raise ValueError(f"{body['text']} is not possible")
        counts = states["count"] + 1
        digests = [
            digest_after(str(request.sequence_id), digest.tobytes(), body["text"])
            for request, digest, body in zip(requests, states["digest"], batch, strict=True)
        ]
        answers = [answer_of(int(count), digest) for count, digest in zip(counts[0], digests, strict=True)]
        stacked = np.stack([np.frombuffer(digest, np.uint8) for digest in digests])
        return answers, {"digest": stacked, "count": counts}


def wait_at_gate(body: Mapping[str, Any]) -> None:
    """Return once the file exists that the body names, if it names one; raise after GATE_S."""
    until_s = time.monotonic() + GATE_S
    while "gate" in body and not Path(body["gate"]).exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the gate was not opened")
        time.sleep(0.002)
