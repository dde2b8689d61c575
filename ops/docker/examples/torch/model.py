"""A PyTorch model on a GPU of its own, or without a GPU on the CPU with a warning."""

from __future__ import annotations

from typing import Any

import structlog
import torch

from carpool.wire.tensors import TensorSpec

FEATURES, SIZE = 128, 16


class Embedder:
    """Turns features into an embedding of length 1. The network is a placeholder for your own."""

    max_batch_size = 64
    inputs = (TensorSpec("features", "FP32", (FEATURES,)),)
    outputs = (TensorSpec("embedding", "FP32", (SIZE,)),)

    def load(self, device: str) -> None:
        """`device` is cpu, or this process's GPU: cuda:0, cuda:1, ..."""
        self.device = usable(device)
        torch.manual_seed(0)  # the same placeholder in every process
        self.net = torch.nn.Linear(FEATURES, SIZE).eval().to(self.device)

    def predict(self, batch: Any) -> Any:
        """`batch` and the result are numpy arrays on the CPU, with a row for each request."""
        with torch.inference_mode():
            features = torch.from_numpy(batch).to(self.device)
            return torch.nn.functional.normalize(self.net(features)).cpu().numpy()


def usable(device: str) -> str:
    """The device if PyTorch can use it, else the CPU; then it logs a warning with the reason."""
    if device == "cpu":
        reason = "no GPU is in this container: start it with ops/docker/gpu.yml, or docker run --gpus all"
    elif not torch.cuda.is_available():
        reason = "PyTorch finds no CUDA: is this its CUDA build, and the host's driver new enough for it?"
    else:
        return device
    structlog.get_logger().warning("running on the CPU", device=device, reason=reason)
    return "cpu"
