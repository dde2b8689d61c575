"""A PyTorch model on whatever there is: a GPU of its own, or the CPU and a warning."""

from __future__ import annotations

from typing import Any

import structlog
import torch  # not for those who only look

from carpool.wire.tensors import TensorSpec

FEATURES, SIZE = 128, 16


class Embedder:
    """Features in, an embedding of length 1 out. The network is a stand-in: put your own in its place."""

    max_batch_size = 64
    inputs = (TensorSpec("features", "FP32", (FEATURES,)),)
    outputs = (TensorSpec("embedding", "FP32", (SIZE,)),)

    def load(self, device: str) -> None:
        """`device` is cpu, or the GPU that is this process's: cuda:0, cuda:1, ..."""
        self.device = usable(device)
        torch.manual_seed(0)  # every process the same stand-in
        self.net = torch.nn.Linear(FEATURES, SIZE).eval().to(self.device)

    def predict(self, batch: Any) -> Any:
        """One array in, one out: a row for each request. numpy, on the CPU, on both sides."""
        with torch.inference_mode():
            features = torch.from_numpy(batch).to(self.device)
            return torch.nn.functional.normalize(self.net(features)).cpu().numpy()


def usable(device: str) -> str:
    """The device, if PyTorch can use it; else the CPU, and a warning that says why."""
    if device == "cpu":
        reason = "no GPU is in this container: start it with ops/docker/gpu.yml, or docker run --gpus all"
    elif not torch.cuda.is_available():
        reason = "PyTorch finds no CUDA: is this its CUDA build, and the host's driver new enough for it?"
    else:
        return device
    structlog.get_logger().warning("running on the CPU", device=device, reason=reason)
    return "cpu"
