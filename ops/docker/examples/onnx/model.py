"""An ONNX file on whatever there is: a GPU of its own, or the CPU and a warning.

Where there is nothing to add to the file no model.py is needed: MODEL=onnx:model.onnx.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import structlog

from carpool_worker.models.onnx import OnnxModel

NO_GPU = "no GPU is in this container: start it with ops/docker/gpu.yml, or docker run --gpus all"


class Classifier:
    """Answers with the most likely class and its score, where the file has scores of all."""

    max_batch_size = 64

    def load(self, device: str) -> None:
        """`device` is cpu, or the GPU that is this process's: cuda:0, cuda:1, ..."""
        if device == "cpu":
            structlog.get_logger().warning("running on the CPU", device=device, reason=NO_GPU)
        else:
            onnxruntime.preload_dlls()  # CUDA came in wheels, where nobody looks for it
        self.network = OnnxModel(Path(__file__).with_name("model.onnx"))
        self.network.load(device)  # warns if there is a GPU that onnxruntime cannot use
        self.inputs = self.network.inputs

    def predict(self, batch: Any) -> list[dict[str, Any]]:
        """One array in, a row for each request; a map for each out."""
        scores: Any = self.network.predict(batch)
        return [{"class": int(np.argmax(row)), "score": float(np.max(row))} for row in scores]
