"""A model of sequences whose every answer depends on all requests before it, in their order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from carpool import StateSpec

GATE_S = 240.0  # longer than anything that a test waits for


def folded(numbers: Iterable[int]) -> list[int]:
    """What the model answers to these numbers of one sequence."""
    answers, state = [], 0
    for number in numbers:
        state = (state * 1_000_003 + number) % (1 << 31)
        answers.append(state)
    return answers


class Folding:
    """Folds the numbers of a sequence. A body is a number; the path of a file for which it waits, and which
    counts as 0; or "raise"."""

    max_batch_size = 16
    states = (StateSpec("folded", "INT64", (-1,)),)

    def predict(
        self, batch: list[Any], states: Mapping[str, np.ndarray[Any, Any]]
    ) -> tuple[list[int], dict[str, np.ndarray[Any, Any]]]:
        numbers = np.array([_number(body) for body in batch])
        new = (states["folded"] * 1_000_003 + numbers) % (1 << 31)
        return new.tolist(), {"folded": new}


def _number(body: Any) -> int:
    if isinstance(body, int):
        return body
    if body == "raise":
        raise RuntimeError("this one is spoilt")
    until_s = time.monotonic() + GATE_S
    while not Path(body).exists() and time.monotonic() < until_s:
        time.sleep(0.002)
    return 0
