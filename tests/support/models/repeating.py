"""A stepping model with declared tensors, as `repeat_int32` of Triton."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool import TensorSpec


class Repeat:
    """Emits the numbers of its input one by one, each with its index.

    Fields: `GATE`, a file for which it waits after the first one; `KILLS_AT`, where it ends its process once;
    `BURST`, how many it emits in a step.
    """

    max_batch_size = 64
    inputs = (
        TensorSpec("IN", "INT32", (-1,)),
        TensorSpec("DELAY", "UINT32", (-1,)),
        TensorSpec("WAIT", "UINT32", (1,)),
    )
    outputs = (TensorSpec("OUT", "INT32", (1,)), TensorSpec("IDX", "UINT32", (1,)))

    def begin(self, requests: Sequence[Any]) -> None:
        pass

    def step(self, requests: Sequence[Any]) -> None:
        for request in requests:
            numbers, at = request.body["IN"], request.emitted
            gate = request.fields.get("GATE", b"").decode()
            if at and gate and not Path(gate).exists():
                continue
            if str(at).encode() == request.fields.get("KILLS_AT") and request.delivery_count == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for index in range(at, min(len(numbers), at + int(request.fields.get("BURST", 1)))):
                request.emit({"OUT": numbers[index : index + 1], "IDX": [index]})
            if at >= len(numbers):
                request.finish()
