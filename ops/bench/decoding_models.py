"""Models of images whose device takes time but no CPU, as an accelerator does: JPEG in, when it was busy out.

`BENCH_DEVICE_MS`: how long a batch takes there. `BENCH_BATCH_SIZE`, `BENCH_WORKERS`: max_batch_size and
decode_workers.
"""

from __future__ import annotations

import io
import os
import time
from typing import Any, Final

import numpy as np
from PIL import Image

from carpool import TensorSpec

FETCH_S: Final = 0.02
SIDE: Final = 224  # pixels of the square that the network would take


def pixels(body: bytes) -> Any:
    """A JPEG as uint8 (SIDE, SIDE, 3)."""
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB").resize((SIDE, SIDE)))


class Device:
    """Answers each request with when its batch began and ended on the device (ns, monotonic)."""

    max_batch_size = int(os.environ.get("BENCH_BATCH_SIZE", "16"))
    seconds = float(os.environ.get("BENCH_DEVICE_MS", "100")) / 1000

    def compute(self, count: int) -> list[list[int]]:
        """What the device does for a batch."""
        began_ns = time.monotonic_ns()
        time.sleep(self.seconds)
        return [[began_ns, time.monotonic_ns()]] * count


class Preprocessing(Device):
    """Decodes in `preprocess`, before each batch, in the same process."""

    def preprocess(self, bodies: list[bytes]) -> Any:
        """bytes -> uint8 (n, SIDE, SIDE, 3)."""
        return np.stack([pixels(body) for body in bodies])

    def predict(self, batch: Any) -> list[list[int]]:
        """See Device."""
        return self.compute(len(batch))


class Threads(Device):
    """Decodes in threads, beside the batches."""

    decode_in = "threads"
    decode_workers = int(os.environ.get("BENCH_WORKERS", "2"))
    decoded = (TensorSpec("pixels", "UINT8", (SIDE, SIDE, 3)),)

    def decode(self, body: bytes) -> Any:
        """bytes -> uint8 (SIDE, SIDE, 3)."""
        return pixels(body)

    def predict(self, batch: Any) -> list[list[int]]:
        """See Device."""
        return self.compute(len(batch))


class Processes(Threads):
    """Decodes in processes of their own."""

    decode_in = "processes"


# --- bodies that name what is elsewhere --------------------------------------------------------------------


def fetched(name: bytes) -> bytes:
    """What an object store has under this name. It takes FETCH_S and no CPU."""
    time.sleep(FETCH_S)
    return name


class FetchingBefore(Device):
    """Fetches in `preprocess`, one after the other."""

    def preprocess(self, names: list[bytes]) -> list[bytes]:
        """Names -> what they name."""
        return [fetched(name) for name in names]

    def predict(self, batch: list[bytes]) -> list[list[int]]:
        """See Device."""
        return self.compute(len(batch))


class FetchingBeside(Device):
    """Fetches in threads, beside the batches."""

    decode_in = "threads"
    decode_workers = Threads.decode_workers

    def decode(self, name: bytes) -> bytes:
        """A name -> what it names."""
        return fetched(name)

    def predict(self, batch: list[bytes]) -> list[list[int]]:
        """See Device."""
        return self.compute(len(batch))
