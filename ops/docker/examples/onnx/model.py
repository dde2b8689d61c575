"""An ONNX model on a GPU of its own, or without a GPU on the CPU with a warning.

An ONNX file that needs no code around it needs no model.py: MODEL=onnx:model.onnx.
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
    """Returns the most likely class and its score, from the scores of all classes."""

    max_batch_size = 64

    def load(self, device: str) -> None:
        """`device` is cpu, or this process's GPU: cuda:0, cuda:1, ..."""
        if device == "cpu":
            structlog.get_logger().warning("running on the CPU", device=device, reason=NO_GPU)
        else:
            onnxruntime.preload_dlls()  # CUDA is installed from wheels, where onnxruntime does not search
        self.network = OnnxModel(Path(__file__).with_name("model.onnx"))
        self.network.load(device)  # logs a warning if onnxruntime cannot use the GPU
        self.inputs = self.network.inputs

    def predict(self, batch: Any) -> list[dict[str, Any]]:
        """`batch` is one array with a row for each request; returns one map for each."""
        scores: Any = self.network.predict(batch)
        return [{"class": int(np.argmax(row)), "score": float(np.max(row))} for row in scores]
