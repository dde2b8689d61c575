"""The GPU examples in ops/docker/examples, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from structlog.testing import capture_logs

from carpool_worker.model_process.model import adapt
from support import tiny_onnx
from support.tiny_onnx import Node, Value

EXAMPLES: Final = Path(__file__).parents[2] / "ops/docker/examples"


def example(path: Path) -> Any:
    """An example's module, loaded again for each test."""
    spec = importlib.util.spec_from_file_location("example_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- onnx: with the installed onnxruntime, which has no CUDA


@pytest.fixture
def classifier(tmp_path: Path) -> Any:
    """The example, beside an ONNX file that turns three numbers into scores."""
    shutil.copy(EXAMPLES / "onnx/model.py", tmp_path)
    scores = tiny_onnx.model(
        [Value("x", ["N", 3])], [Value("scores", ["N", 3])], [Node("Softmax", ["x"], ["scores"])]
    )
    (tmp_path / "model.onnx").write_bytes(scores)
    return example(tmp_path / "model.py").Classifier


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "no GPU is in this container"), ("cuda:0", "onnxruntime has no CUDA")]
)
def test_onnx_example_runs_on_the_cpu_with_a_warning(classifier: Any, device: str, reason: str) -> None:
    with capture_logs() as logs:
        model = adapt(classifier, device)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "running on the CPU"
    assert reason in warning["reason"]
    assert [spec.name for spec in model.inputs] == ["x"]
    results = model.run(np.array([[0, 9, 0], [9, 0, 0]], np.float32), [])
    assert [result["class"] for result in results] == [1, 0]
    assert all(0.99 < result["score"] <= 1 for result in results)


# --- torch: with a fake module, because the wheel is a hundred times as large as all other dependencies


def embedder(monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> Any:
    torch = ModuleType("torch")
    torch.__dict__["cuda"] = SimpleNamespace(is_available=lambda: cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return example(EXAMPLES / "torch/model.py")


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "no GPU is in this container"), ("cuda:1", "PyTorch finds no CUDA")]
)
def test_torch_example_without_a_gpu_runs_on_the_cpu_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, device: str, reason: str
) -> None:
    with capture_logs() as logs:
        assert embedder(monkeypatch, cuda=False).usable(device) == "cpu"
    (warning,) = logs
    assert (warning["log_level"], warning["event"]) == ("warning", "running on the CPU")
    assert reason in warning["reason"]


def test_torch_example_runs_on_the_given_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as logs:
        assert embedder(monkeypatch, cuda=True).usable("cuda:1") == "cuda:1"
    assert logs == []


def test_torch_example_with_real_pytorch() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    model = adapt(example(EXAMPLES / "torch/model.py").Embedder, "cpu")
    batch = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    rows = model.run(batch, [])
    assert (rows.shape, rows.dtype) == ((3, 16), np.float32)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(model.run(batch[1:2], [])[0], rows[1], rtol=1e-5)
