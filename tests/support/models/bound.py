"""Models that bind sequences. Their answers reveal every mix of states, and every row that was not ready."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carpool import TensorSpec


def digest(sequence_id: str, bodies: Sequence[Any]) -> str:
    """What the last of these bodies is answered with: of all that the sequence was sent since its start."""
    return hashlib.sha256(json.dumps([sequence_id, *bodies]).encode()).hexdigest()[:16]


class Hearing:
    """A slot has a sequence and all bodies that it heard; the answer is their digest, and the slot.

    A body may be a command: "raise", "return" (an exception), "die", "wait FILE" (until it exists).
    `validate` rejects "refuse", and `start` raises for a sequence whose ID begins with "bad". `start` and
    `end` are written to the file that CARPOOL_TEST_HOOKS names.
    """

    max_batch_size = 4
    binds_sequences = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[Any]] | None] = [None] * self.max_batch_size

    def validate(self, body: Any) -> None:
        if body == "refuse":
            raise ValueError("refused")

    def start(self, sequence: Any) -> None:
        log_hook(f"start {sequence.sequence_id}")
        assert self.heard[sequence.slot] is None, "the slot is not free"
        self.heard[sequence.slot] = (sequence.sequence_id, [])
        if sequence.sequence_id.startswith("bad"):
            raise ValueError("bad sequence")

    def end(self, sequence: Any) -> None:
        log_hook(f"end {sequence.sequence_id}")
        heard = self.heard[sequence.slot]
        assert heard is not None and heard[0] == sequence.sequence_id
        self.heard[sequence.slot] = None

    def predict(self, batch: list[Any], requests: list[Any]) -> list[Any]:
        assert len(batch) == len(requests) == self.max_batch_size
        return [self._hear(slot, *of_slot) for slot, of_slot in enumerate(zip(batch, requests, strict=True))]

    def _hear(self, slot: int, body: Any, request: Any) -> Any:
        if request is None:
            assert body is None
            return None
        heard = self.heard[slot]
        assert request.slot == slot and heard is not None and heard[0] == request.sequence_id
        heard[1].append(body)
        verb, _, argument = body.partition(" ") if isinstance(body, str) else (body, "", "")
        if verb == "raise":
            raise ValueError("told to raise")
        if verb == "return":
            return ValueError("told to return")
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "wait":
            Path(argument + ".started").touch()
            wait_until(Path(argument).exists)
        return [digest(*heard), slot]


class HearingTwo(Hearing):
    max_batch_size = 2


class Adding:
    """Adds each row to the sum of its slot; rows that are not ready are zeros."""

    max_batch_size = 3
    binds_sequences = True
    inputs = (TensorSpec("x", "INT64", (2,)),)

    def __init__(self) -> None:
        self.sums = np.zeros((self.max_batch_size, 2), np.int64)

    def start(self, sequence: Any) -> None:
        self.sums[sequence.slot] = 0

    def predict(self, batch: Any) -> Any:
        assert batch.shape == self.sums.shape
        self.sums += batch
        return self.sums.copy()


def log_hook(line: str) -> None:
    """For the test to read."""
    path = os.environ.get("CARPOOL_TEST_HOOKS")
    if path:
        with Path(path).open("a") as file:
            file.write(line + "\n")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait in the model process."""
    while not condition():
        time.sleep(0.002)
