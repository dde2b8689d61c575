"""Models whose answers are exact, whichever requests are executed together: integers, mixed row by row.

`Tiny`, `Small` and `Large` keep a state for each sequence, of which a request changes the beginning.
`Stateless` computes the same without one: what differs is what it costs to keep a state of that size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from carpool.wire.tensors import Array, StateSpec, TensorSpec

WORDS: Final = 16  # of an input, an output, and what is mixed of a state
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(29)


def mixed(words: Array, inputs: Array) -> Array:
    """What follows from these words and inputs, uint64 (n, WORDS) both."""
    product = (words ^ inputs) * _FACTOR
    return product ^ (product >> _SHIFT)


class Stateless:
    """Begins each request with zeros."""

    max_batch_size = 64
    inputs = (TensorSpec("x", "UINT64", (WORDS,)),)
    outputs = (TensorSpec("y", "UINT64", (WORDS,)),)

    def predict(self, batch: Array) -> Array:
        """uint64 (n, WORDS) -> the same."""
        return mixed(np.zeros_like(batch), batch)


class Small:
    """Keeps 1 KiB, and answers with what it mixed."""

    max_batch_size = 64
    max_candidate_sequences = 2048
    inputs = Stateless.inputs
    outputs = Stateless.outputs
    states = (StateSpec("words", "UINT64", (-1, 128)),)

    def predict(self, batch: Array, states: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """uint64 (n, WORDS), and the states -> the same, and the new states."""
        words = states["words"].copy()
        answers = words[:, :WORDS] = mixed(words[:, :WORDS], batch)
        return answers, {"words": words}


class Tiny(Small):
    """Keeps 128 bytes."""

    states = (StateSpec("words", "UINT64", (-1, WORDS)),)


class Large(Small):
    """Keeps 64 KiB."""

    states = (StateSpec("words", "UINT64", (-1, 8192)),)


def answers_of(inputs: Array) -> Array:
    """What a single stream answers to these inputs of one sequence: uint64 (requests, WORDS), in and out."""
    words, answers = np.zeros((1, WORDS), np.uint64), np.empty_like(inputs)
    for at, row in enumerate(inputs):
        words = mixed(words, row[None])
        answers[at] = words[0]
    return answers
