"""Models that do what those of Triton's examples do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carpool import StateSpec, TensorSpec

Array = np.ndarray[Any, Any]


class Sum:
    """The sum and the difference of two rows, as `simple` of Triton."""

    max_batch_size = 8
    inputs = (TensorSpec("INPUT0", "INT32", (16,)), TensorSpec("INPUT1", "INT32", (16,)))
    outputs = (TensorSpec("OUTPUT0", "INT32", (16,)), TensorSpec("OUTPUT1", "INT32", (16,)))

    def predict(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        first, second = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": first + second, "OUTPUT1": first - second}


class Identity:
    """Numbers of any length, unchanged."""

    inputs = (TensorSpec("INPUT0", "FP32", (-1,)),)
    outputs = (TensorSpec("OUTPUT0", "FP32", (-1,)),)

    def predict(self, batch: Array) -> Array:
        return batch


class Strings:
    """Elements of BYTES, unchanged, and of which type they are."""

    inputs = (TensorSpec("INPUT0", "BYTES", (-1,)),)
    outputs = (TensorSpec("OUTPUT0", "BYTES", (-1,)), TensorSpec("types", "BYTES", ()))

    def predict(self, batch: Array) -> dict[str, Any]:
        types = [",".join(sorted({type(element).__name__ for element in row})) for row in batch]
        return {"OUTPUT0": batch, "types": types}


class Labelled:
    """Scores of three classes."""

    inputs = outputs = (TensorSpec("scores", "FP32", (3,), labels=("cat", "dog", "bird")),)

    def predict(self, batch: Array) -> Array:
        return batch


class Starting:
    """Adds 1 to the first number of a sequence, as `simple_sequence` of Triton."""

    inputs = (TensorSpec("INPUT", "INT32", (1,)),)
    outputs = (TensorSpec("OUTPUT", "INT32", (1,)),)
    states = (StateSpec("has_started", "INT32", (-1,)),)

    def predict(self, batch: Array, states: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        is_first = states["has_started"] == 0
        return batch + is_first.astype(np.int32)[:, None], {"has_started": np.ones(len(batch), np.int32)}


class MockLLM:
    """Repeats the prompt, as `mock_llm` of Triton.

    Fields of a request: `REPETITION`, how often it does; `DELAY`, seconds before each; `FAIL_LAST`: then it
    fails; `OUTPUT_0_DIM`: its output has no elements. And of its own: `GATE`, a file for which it waits
    after the first one.
    """

    max_batch_size = 64
    inputs = (
        TensorSpec("PROMPT", "BYTES", (1,)),
        TensorSpec("STREAM", "BOOL", (1,)),
        TensorSpec("input_ids", "INT32", (-1,), optional=True),
    )
    outputs = (TensorSpec("TEXT", "BYTES", (-1,)),)

    def begin(self, requests: Sequence[Any]) -> None:
        for request in requests:
            streams, fields = bool(request.body["STREAM"][0]), request.fields
            request.state = {
                "left": (int(fields.get("REPETITION", 1)) if streams else 1) - len(request.chunks),
                "next_s": time.monotonic() + float(fields.get("DELAY", 0)),
                "fails": streams and fields.get("FAIL_LAST") == b"1",
            }

    def step(self, requests: Sequence[Any]) -> None:
        time.sleep(0.001)
        for request in requests:
            state, fields = request.state, request.fields
            gate = fields.get("GATE", b"").decode()
            if time.monotonic() < state["next_s"] or (request.emitted and gate and not Path(gate).exists()):
                continue
            state["next_s"] += float(fields.get("DELAY", 0))
            if state["left"] > 0:
                request.emit([] if fields.get("OUTPUT_0_DIM") == b"1" else request.body["PROMPT"])
                state["left"] -= 1
            elif state["fails"]:
                request.fail("An Error Occurred")
            if state["left"] <= 0 and not state["fails"]:
                request.finish()


class Counter:
    """Emits the numbers below its input, each with its square; `KILLS_AT`: where it ends its process, once
    `GATE` exists."""

    max_batch_size = 64
    inputs = (TensorSpec("count", "INT32", (1,)),)
    outputs = (TensorSpec("number", "INT32", (1,)), TensorSpec("square", "FP32", (1,)))

    def begin(self, requests: Sequence[Any]) -> None:
        pass

    def step(self, requests: Sequence[Any]) -> None:
        for request in requests:
            at = request.emitted
            if str(at).encode() == request.fields.get("KILLS_AT") and request.delivery_count == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if at < request.body[0]:
                request.emit({"number": at, "square": float(at * at)})
            else:
                request.finish()


def shout(text: str) -> Iterator[str]:
    """The words of a text in capitals, one by one."""
    for word in text.split(" "):
        yield f"{word.upper()} "
