"""The model for `onnx:FILE`: any ONNX file with a batch dimension, run by onnxruntime.

Inputs, outputs and their types are read from the file. onnxruntime is optional (the extra `onnx`) and
is imported only when a model is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from carpool.keys import MODEL_NAME
from carpool.wire.tensors import Array, TensorSpec, from_bytes, to_bytes

DATATYPES: Final = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
MAX_BATCH_SIZE_KEY: Final = "carpool.max_batch_size"

_CUDA: Final = "CUDAExecutionProvider"
_CPU: Final = "CPUExecutionProvider"
_BFLOAT16: Final = 16  # TensorProto.DataType
_ERRORS_ONLY: Final = 3  # onnxruntime's severities: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal
_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d+))?")
# File names that do not identify a model: NAME/model.onnx, NAME/1/model.onnx, NAME/onnx/model.onnx.
_GENERIC_NAME: Final = re.compile(r"model|network|onnx|weights|\d+", re.IGNORECASE)

Batch = Array | Mapping[str, Array]


class OnnxModel:
    """A batched model over one ONNX file.

    Row i of the outputs belongs to row i of the inputs. If the graph computes its rows independently, a row's
    output does not depend on the other rows, except for rounding (onnxruntime may sum in another order).
    Dynamic quantization scales by the whole batch, so there it does depend on them: `load` logs a warning.

    `inputs` and `outputs` describe one request and its result, in the file's order; empty until loaded.
    """

    max_batch_size = 32

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = model_name(self.path)
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self._session: Any = None

    def load(self, device: str) -> None:
        """Open the file on `device`: "cpu", or "cuda:N" (without CUDA: the CPU, and a warning).

        Raises ValueError for an unsuitable file or device name, RuntimeError if onnxruntime is missing or
        cannot load the file. Each message says what to do.
        """
        if not self.path.is_file():
            raise ValueError(
                f"file {self.path} does not exist: write onnx:PATH with the path of an ONNX file"
            )
        runtime = _import_onnxruntime(self.path)
        providers = _providers(device, runtime.get_available_providers())
        session = _open_session(runtime, self.path, providers)
        self.inputs, self.outputs = _read_specs(session, self.path)
        self.max_batch_size = _read_max_batch_size(session, self.path, type(self).max_batch_size)
        self._session = session
        _warn_of_device(session, self.path, device)
        _warn_of_dynamic_quantization(self.path)

    def predict(self, batch: Batch) -> Array | dict[str, Array]:
        """Run the graph on a batch of n.

        `batch` is the stacked input (n, *shape), or a dict name -> stacked input if the file has several; the
        returned outputs likewise. BF16 is float32 on both sides. Raises RuntimeError if an output does not
        have n rows, and what onnxruntime raises for inputs that the graph cannot take.
        """
        if self._session is None:
            raise RuntimeError(f"{self.path} is not loaded: call load() first")
        feeds = self._feeds(batch)
        rows = len(feeds[self.inputs[0].name])
        arrays = self._run(feeds)
        outputs = {
            spec.name: _checked(array, spec, rows, self.path)
            for spec, array in zip(self.outputs, arrays, strict=True)
        }
        return outputs if len(outputs) > 1 else outputs[self.outputs[0].name]

    def unload(self) -> None:
        """Free the session and its memory; `load` may be called again."""
        self._session = None

    def _feeds(self, batch: Batch) -> dict[str, Array]:
        """The batch by input name."""
        names = [spec.name for spec in self.inputs]
        if not isinstance(batch, Mapping):
            batch = {names[0]: batch}
        if batch.keys() != set(names):
            raise ValueError(f"{self.path} takes the inputs {', '.join(names)}, but got {', '.join(batch)}")
        return dict(batch)

    def _run(self, feeds: dict[str, Array]) -> list[Array]:
        """The graph's outputs in order. With BF16, which numpy lacks, they are passed as OrtValues."""
        if all(spec.datatype != "BF16" for spec in (*self.inputs, *self.outputs)):
            arrays: list[Array] = self._session.run(None, feeds)
            return arrays
        values = {spec.name: _to_ort_value(feeds[spec.name], spec.datatype) for spec in self.inputs}
        return [_from_ort_value(value) for value in self._session.run_with_ort_values(None, values)]


def model_name(path: Path) -> str:
    """A valid model name for a file: its stem, or its folder's name if the stem is generic (model.onnx)."""
    if _GENERIC_NAME.fullmatch(path.stem):
        for folder in path.absolute().parents[:2]:
            if MODEL_NAME.fullmatch(folder.name) and not _GENERIC_NAME.fullmatch(folder.name):
                return folder.name
    valid = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-").rstrip("-")
    return valid[:128] or "model"


def _import_onnxruntime(path: Path) -> Any:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise RuntimeError(
            f"{path} needs onnxruntime, which cannot be imported ({error}): install it with pip install "
            "'carpool[onnx]'"
        ) from error
    runtime.set_default_logger_severity(_ERRORS_ONLY)
    runtime.disable_telemetry_events()
    return runtime


def _providers(device: str, available: Sequence[str]) -> list[Any]:
    """The execution providers for a device, the preferred one first, of those that onnxruntime has."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ValueError(f"device {device!r}: must be cpu or cuda:N, such as cuda:0")
    if device == "cpu" or _CUDA not in available:
        return [_CPU]
    # Batch sizes vary, and by default cuDNN searches all its convolution algorithms for each new size.
    return [(_CUDA, {"device_id": int(match[1] or 0), "cudnn_conv_algo_search": "HEURISTIC"}), _CPU]


def _open_session(runtime: Any, path: Path, providers: Sequence[Any]) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = _threads()
    try:
        return runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions have no common base class
        if type(error).__name__ == "InvalidProtobuf" or "No graph was found" in str(error):
            raise ValueError(
                f"{path} is not an ONNX file, or is incomplete: export or download it again"
            ) from error
        raise RuntimeError(
            f"onnxruntime {runtime.__version__} cannot load {path}: {error}. Export it with an opset and "
            "operators that this version supports, or install a newer onnxruntime"
        ) from error


def _threads() -> int:
    """The first number in OMP_NUM_THREADS ("4", "4,2"), else 0: onnxruntime's default."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _read_specs(session: Any, path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The file's inputs and outputs without their batch dimension. Raises ValueError if one has none."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if not inputs:
        raise ValueError(f"{path} has no inputs, so it cannot serve requests")
    specs = (
        tuple(_spec("input", value, path) for value in inputs),
        tuple(_spec("output", value, path) for value in outputs),
    )
    _check_inputs(inputs, path)
    _check_outputs(inputs, outputs, path)
    return specs


def _spec(role: str, value: Any, path: Path) -> TensorSpec:
    """The TensorSpec of one of onnxruntime's NodeArgs."""
    datatype = DATATYPES.get(value.type)
    if datatype is None:
        raise ValueError(
            f"{path}: {role} {value.name!r} is of type {value.type}, which Carpool cannot send; "
            f"export the model with tensors of one of the types {', '.join(sorted(DATATYPES.values()))}"
        )
    if not value.shape:
        raise ValueError(
            f"{path}: {role} {value.name!r} is a scalar or has no declared shape, so it has no "
            "batch dimension; export the model with a dynamic first dimension"
        )
    return TensorSpec(value.name, datatype, tuple(_size(size) for size in value.shape[1:]))


def _size(size: int | str | None) -> int:
    """A declared size; -1 for a dimension that varies: it has a name ("sequence"), or nothing."""
    return size if isinstance(size, int) else -1


def _check_inputs(inputs: Sequence[Any], path: Path) -> None:
    """Raise ValueError unless the first dimension of every input varies."""
    fixed = {value.name: value.shape[0] for value in inputs if isinstance(value.shape[0], int)}
    if not fixed:
        return
    fix = "export the model with a dynamic first dimension (dynamic_shapes or dynamic_axes in PyTorch)"
    if len(fixed) == len(inputs) and set(fixed.values()) == {1}:
        raise ValueError(
            f"{path} takes one item at a time and cannot be batched: the batch dimension of "
            f"{', '.join(map(repr, fixed))} is fixed at 1; {fix}"
        )
    name, size = next(iter(fixed.items()))
    raise ValueError(f"{path}: the batch dimension (the first) of input {name!r} is fixed at {size}; {fix}")


def _check_outputs(inputs: Sequence[Any], outputs: Sequence[Any], path: Path) -> None:
    """Raise ValueError for an output whose declared first dimension cannot be the batch."""
    batch = {value.shape[0] for value in inputs}
    inner = {size for value in inputs for size in value.shape[1:] if isinstance(size, str)} - batch
    for value in outputs:
        first = value.shape[0]
        if isinstance(first, int) or first in inner:
            raise ValueError(
                f"{path}: the first dimension of output {value.name!r} is {first}, not the batch; "
                "export the model with outputs that have a row for each item"
            )


def _read_max_batch_size(session: Any, path: Path, default: int) -> int:
    """The limit in the file's metadata (`carpool.max_batch_size`), else `default`."""
    text = session.get_modelmeta().custom_metadata_map.get(MAX_BATCH_SIZE_KEY)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{path}: metadata {MAX_BATCH_SIZE_KEY} is {text!r}; must be a whole number of at least 1"
        )
    return int(text)


def _warn_of_device(session: Any, path: Path, device: str) -> None:
    if device != "cpu" and _CUDA not in session.get_providers():
        structlog.get_logger().warning(
            "running on the CPU",
            reason=(
                "the installed onnxruntime has no CUDA, or could not start it; install onnxruntime-gpu, "
                "or check CUDA"
            ),
            file=str(path),
            device=device,
        )


def _warn_of_dynamic_quantization(path: Path) -> None:
    """Log a warning for operators that scale by the whole batch: a result then depends on its batch."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = content.find(b"DynamicQuantize") >= 0
    if found:
        structlog.get_logger().warning(
            "results depend on the other requests in the batch",
            reason="the model is dynamically quantized; quantize it statically, or give it batches of 1",
            file=str(path),
        )


def _checked(array: Array, spec: TensorSpec, rows: int, path: Path) -> Array:
    """One output, after checking that it has a row for each request; strings as numpy's own."""
    if array.ndim == 0 or len(array) != rows:
        raise RuntimeError(
            f"{path}: output {spec.name!r} has shape {list(array.shape)} for a batch of {rows}; "
            "its first dimension must be the batch"
        )
    return array.astype(np.str_) if spec.datatype == "BYTES" else array


def _to_ort_value(array: Array, datatype: str) -> Any:
    """An array as an OrtValue; float32 is rounded to BF16 for an input of that type."""
    ort_value = importlib.import_module("onnxruntime").OrtValue
    if datatype != "BF16":
        return ort_value.ortvalue_from_numpy(np.ascontiguousarray(array))
    bits = np.frombuffer(to_bytes(array, "BF16"), np.uint16).reshape(array.shape)
    return ort_value.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


def _from_ort_value(value: Any) -> Array:
    """An output as an array in CPU memory; BF16 as float32."""
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = value.shape()
    return from_bytes("BF16", shape, ctypes.string_at(value.data_ptr(), 2 * math.prod(shape)))
