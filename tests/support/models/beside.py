"""Models that decode bodies, and encode results, beside their batches. Bodies are commands."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from carpool import InvalidArgumentError, StateSpec, TensorSpec, metrics

BODIES = metrics.counter("bodies", "Bodies that were decoded")
RESULTS = metrics.counter("results", "Results that were encoded")


class InThreads:
    """Answers a number with its square, and what `encode` adds to it. In a body the words of a command."""

    max_batch_size = 16
    decode_in = "threads"
    decode_workers = 2

    def load_decoder(self) -> None:
        self.decoder = os.getpid()

    def validate(self, body: Any) -> None:
        if body == "refuse":
            raise ValueError("refused")

    def decode(self, body: Any, request: Any) -> Any:
        assert self.decoder == os.getpid()
        if not isinstance(body, str):
            return np.full(3, body, np.int64)
        verb, _, where = body.partition(" ")
        if verb == "reject":
            raise InvalidArgumentError("no such number")
        if verb == "raise":
            raise KeyError(where)
        if verb == "wait":
            Path(where + ".started").touch()
            while not Path(where).exists():
                time.sleep(0.001)
        elif verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "segfault":
            ctypes.string_at(0)
        elif verb == "die-once" and not Path(where).exists():
            Path(where).touch()
            os._exit(7)
        return {"text": body, "id": request.correlation_id, "decoder": os.getpid()}

    def predict(self, batch: list[Any]) -> list[Any]:
        results = []
        for value in batch:
            if isinstance(value, dict):
                verb, _, where = value["text"].partition(" ")
                if verb == "hold":
                    Path(where + ".started").touch()
                    while not Path(where).exists():
                        time.sleep(0.001)
                results.append(value)
                continue
            value[...] = value * value  # what was decoded is the model's own
            results.append(value)
        if any(isinstance(value, dict) and value["text"] == "spoil" for value in batch):
            raise RuntimeError("spoilt")
        return results

    def encode(self, result: Any) -> Any:
        if isinstance(result, dict):
            if result["text"] == "unencodable":
                raise RuntimeError("cannot be encoded")
            return {**result, "encoder": os.getpid()}
        return {"square": int(result.sum()) // 3}


class InProcesses(InThreads):
    """The same in processes."""

    decode_in = "processes"


class LateInThreads:
    """Answers with the sizes to which zeros are padded; waits for a file that a body names, beside which it
    makes one that says so.

    The bucket for more than four is larger than any memory.
    """

    max_batch_size = 8
    max_execution_ms = 1000
    decode_in = "threads"
    decode_workers = 2
    decoded = (TensorSpec("zeros", "INT32", (-1,), buckets=[4, 10**15]),)

    def decode(self, body: Any) -> Any:
        if isinstance(body, str):
            Path(f"{body}.started").touch()
        while isinstance(body, str) and not Path(body).exists():
            time.sleep(0.001)
        return np.zeros(body, np.int32)

    def predict(self, batch: Any) -> list[int]:
        return [len(row) for row in batch]


class LateInProcesses(LateInThreads):
    """The same in processes."""

    decode_in = "processes"


class Stacked:
    """Texts as numbers of letters, padded: answers them doubled, and the shape of their batch."""

    max_batch_size = 64
    decode_in = "processes"
    decode_workers = 2
    decoded = (TensorSpec("letters", "INT32", (-1,), pad=-1, buckets=[16, 64], lengths="lengths"),)
    outputs = (TensorSpec("doubled", "INT32", (-1,), cut="letters"), TensorSpec("shape", "INT64", (2,)))

    def decode(self, body: str) -> Any:
        return np.frombuffer(body.encode(), np.uint8)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        letters, lengths = batch["letters"], batch["lengths"]
        assert ((letters == -1).sum(axis=1) == letters.shape[1] - lengths).all()
        letters *= 2
        if (letters == 2 * ord("!")).any():
            raise ValueError("one is loud")
        return {"doubled": letters, "shape": np.array([letters.shape] * len(letters))}


class Encoded:
    """Doubles tensors where they are, and encodes their sums; raises on a 13."""

    max_batch_size = 8
    decode_in = "threads"
    inputs = (TensorSpec("x", "INT64", (2,)),)

    def predict(self, batch: Any) -> Any:
        batch *= 2
        if (batch == 26).any():
            raise ValueError("unlucky")
        return batch

    def encode(self, result: Any, request: Any) -> Any:
        return {"sum": int(result.sum()), "id": request.correlation_id}


class Remembering:
    """Adds the decoded numbers of a sequence."""

    max_batch_size = 8
    decode_in = "processes"
    decode_workers = 1
    states = (StateSpec("sum", "INT64", (-1,)),)

    def decode(self, body: str) -> int:
        return int(body)

    def predict(self, batch: list[int], states: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        sums = states["sum"] + np.array(batch)
        return sums.tolist(), {"sum": sums}

    def encode(self, result: int) -> str:
        if result > 100:
            raise ValueError("too much")
        return f"{result} in all"


class Bucketed:
    """Answers the doubled numbers of each request, and the shape of the batch that it was in."""

    max_batch_size = 64
    inputs = (TensorSpec("ids", "INT64", (-1,), pad=-1, buckets=[16, 64], lengths="lengths"),)
    outputs = (TensorSpec("doubled", "INT64", (-1,), cut="ids"), TensorSpec("shape", "INT64", (2,)))

    def validate(self, ids: Any) -> None:
        if (ids == -1).any():
            raise ValueError("an id is negative")

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids, lengths = batch["ids"], batch["lengths"]
        assert ((ids == -1).sum(axis=1) == ids.shape[1] - lengths).all()
        return {"doubled": ids * 2, "shape": np.array([ids.shape] * len(ids))}


class HeldEncoded(Encoded):
    """The same. Encodes a result once the file `until` exists; makes the file `halved` when it executes fewer
    than three."""

    def predict(self, batch: Any, requests: Any = ()) -> Any:
        halved = requests[0].fields.get("halved")
        if halved and len(batch) < 3:
            Path(halved.decode()).touch()
        return super().predict(batch)

    def encode(self, result: Any, request: Any) -> Any:
        until = request.fields.get("until")
        while until and not Path(until.decode()).exists():
            time.sleep(0.001)
        return super().encode(result, request)


class Given:
    """Joins two elements of bytes with what it is given. If it `refuses`, it cannot be loaded to decode."""

    max_batch_size = 8
    decode_in = "processes"
    decode_workers = 1
    inputs = (TensorSpec("pair", "BYTES", (2,)),)

    def __init__(self, *, joined_by: str, token: str = "", refuses: bool = False) -> None:
        self.joined_by, self.token, self.refuses = joined_by.encode(), token, refuses
        self.is_loaded = False

    def load(self, _device: str) -> None:
        self.is_loaded = True

    def load_decoder(self) -> None:
        if self.refuses and not self.is_loaded:
            raise ValueError(f"nothing decodes with {self.token}")

    def decode(self, pair: Any) -> Any:
        assert not self.is_loaded
        return np.array([*pair, self.joined_by], object)

    def predict(self, batch: list[Any]) -> list[str]:
        return [by.join([first, second]).decode() for first, second, by in batch]


class Counted:
    """Counts what it decodes and encodes, and is replaced now and then."""

    max_batch_size = 8
    max_requests_per_process = 50
    decode_in = "processes"
    decode_workers = 2

    def decode(self, body: int) -> int:
        BODIES.inc(body)
        return body

    def predict(self, batch: list[int]) -> list[int]:
        return batch

    def encode(self, result: int) -> int:
        RESULTS.inc()
        return result


class CountedInThreads(Counted):
    """The same in threads."""

    decode_in = "threads"
