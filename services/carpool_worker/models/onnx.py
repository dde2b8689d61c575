"""The model for `onnx:FILE`: any ONNX file with a batch dimension, run by onnxruntime.

Inputs, outputs and their types are read from the file. States of sequences, constants and control inputs
are declared beside it (`onnx_declaration`). Whether its outputs have the batch first is found when it is
loaded (`onnx_probe`). onnxruntime is optional (the extra `onnx`) and is imported only when a model is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from carpool.keys import MODEL_NAME
from carpool.wire.padding import lengths_array
from carpool.wire.tensors import Array, StateSpec, TensorSpec, from_bytes, to_bytes
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.models.onnx_declaration import read_declaration, toml_path
from carpool_worker.models.onnx_probe import (
    Filling,
    Probed,
    batch_mates_matter,
    count_of,
    made_up,
    outputs_found,
    probe,
    shown,
)
from carpool_worker.models.onnx_signature import ResultOutput, Signature, read_signature, with_cuts

_CUDA: Final = "CUDAExecutionProvider"
_CPU: Final = "CPUExecutionProvider"
_BFLOAT16: Final = 16  # TensorProto.DataType
_ERRORS_ONLY, _FATAL_ONLY = 3, 4  # onnxruntime's severities: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal
_COUNTING: Final = ("NonZero", "Compress", "Unique", "NonMaxSuppression")
_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d+))?")
# File names that do not identify a model: NAME/model.onnx, NAME/1/model.onnx, NAME/onnx/model.onnx.
_GENERIC_NAME: Final = re.compile(r"model|network|onnx|weights|\d+", re.IGNORECASE)

Batch = Array | Mapping[str, Array]
Outputs = Array | dict[str, Array] | list[Any]
WithStates = tuple[Outputs, dict[str, Array]]


class OnnxModel:
    """A batched model over one ONNX file.

    Row i of the outputs belongs to row i of the inputs. If the graph computes its rows independently, a row's
    output does not depend on the other rows, except for rounding (onnxruntime may sum in another order).
    Dynamic quantization scales by the whole batch, so there it does depend on them: `load` logs a warning.

    `inputs` and `outputs` describe one request and its result, in the file's order; empty until loaded. With
    maps among the outputs (ZipMap) there are no `outputs`, because a map is no tensor. With `states`, it is a
    model of sequences. `declared` has the keys of the TOML file beside the ONNX file, and replaces those that
    it has. `declared_in`: the file that they are from, for errors; empty for code.

    `predict` takes a batch of n: the stacked input (n, *shape), or a dict name -> stacked input if the file
    has several; the returned outputs likewise, or, if there are maps among them, a list with the result of
    each request: the map, or a dict name -> value. BF16 is float32 on both sides. Once loaded, it also takes
    `states` if there are any, each with n rows along its axis, and returns (outputs, new states). With
    control inputs it takes `requests` after them. Raises RuntimeError if an output does not have n rows, and
    what onnxruntime raises for inputs that the graph cannot take.
    """

    max_batch_size = 32

    def __init__(
        self, path: str | Path, declared: Mapping[str, Any] | None = None, *, declared_in: str = ""
    ) -> None:
        self.path = Path(path)
        self.name = model_name(self.path)
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.states: tuple[StateSpec, ...] = ()
        self.predict: Callable[..., Any] = self._predict
        self._declared, self._declared_in = declared, declared_in
        self._signature = Signature((), ())
        self._output_names: list[str] = []
        self._session: Any = None

    def load(self, device: str) -> None:
        """Open the file on `device`: "cpu", or "cuda:N" (without CUDA: the CPU, and a warning).

        Raises ValueError for an unsuitable file, declaration or device name, RuntimeError if onnxruntime is
        missing or cannot load the file. Each message says what to do.
        """
        if not self.path.is_file():
            raise ValueError(
                f"file {self.path} does not exist: write onnx:PATH with the path of an ONNX file"
            )
        runtime = _import_onnxruntime(self.path)
        providers = _providers(device, runtime.get_available_providers())
        session = _open_session(runtime, self.path, providers)
        metadata = session.get_modelmeta().custom_metadata_map
        declaration = read_declaration(self.path, metadata, self._declared, self._declared_in)
        self._signature = signature = read_signature(session, declaration, self.path)
        self.inputs, self.states = signature.inputs, signature.states
        for name, value in declaration.settings.items():
            setattr(self, name, value)
        self._output_names = [result.name for result in signature.results]
        self._output_names += [state.output or state.name for state in self.states]
        self.predict = self._predict
        if self.states:
            self.predict = self._predict_controlled if signature.controls else self._predict_states
        _warn_of_device(session, self.path, device)
        self.outputs = with_cuts(self._probe(session, _quietly(runtime)), declaration.cut)
        self._session = session

    def _probe(self, session: Any, options: Any) -> tuple[TensorSpec, ...]:
        """The outputs, after a look at what comes. Raises ValueError for one that has not the batch first."""
        began = time.perf_counter()

        def execute(rows: Sequence[int], filling: Filling) -> dict[str, Any]:
            batch = {spec.name: made_up(spec, rows, filling) for spec in self.inputs}
            for spec in self.inputs:
                if spec.lengths:
                    shape = batch[spec.name].shape[1:]
                    batch[spec.lengths] = lengths_array(
                        [[shape[axis] for axis, _ in spec.buckets]] * len(rows)
                    )
            states = {
                spec.name: spec.split(np.stack([np.frombuffer(spec.row(spec.initial), np.uint8)] * len(rows)))
                for spec in self.states
            }
            starts = [RequestInfo("", "", {}, sequence_id=str(row), sequence_start=True) for row in rows]
            feeds = self._feeds(batch, states, starts)
            return dict(zip(self._output_names, self._run(session, feeds, options), strict=True))

        results = self._signature.results
        probed = probe(self.inputs, execute, self.max_batch_size)
        is_doubtful = self.max_batch_size > 1 and any(result.rows for result in results)
        operator = _counting_operator(self.path) if is_doubtful else ""
        outputs = outputs_found(results, probed, self.path, operator)
        structlog.get_logger().debug(
            "tried out which outputs have the batch first",
            file=str(self.path),
            batches=[len(run.rows) for run in probed.runs],
            ms=round((time.perf_counter() - began) * 1e3, 1),
            error=probed.error,
        )
        _warn_of_batches(self.path, results, probed)
        return () if any(result.is_maps for result in results) else outputs

    def _predict(self, batch: Batch) -> Outputs:
        return self._execute(batch, {}, ())[0]

    def _predict_states(self, batch: Batch, states: Mapping[str, Array]) -> WithStates:
        return self._execute(batch, states, ())

    def _predict_controlled(
        self, batch: Batch, states: Mapping[str, Array], requests: Sequence[RequestInfo]
    ) -> WithStates:
        return self._execute(batch, states, requests)

    def _execute(
        self, batch: Batch, states: Mapping[str, Array], requests: Sequence[RequestInfo]
    ) -> WithStates:
        if self._session is None:
            raise RuntimeError(f"{self.path} is not loaded: call load() first")
        feeds = self._feeds(batch, states, requests)
        rows = len(feeds[self.inputs[0].name])
        arrays = dict(zip(self._output_names, self._run(self._session, feeds), strict=True))
        results = self._signature.results
        outputs = {result.name: _checked(arrays[result.name], result, rows, self.path) for result in results}
        new_states = {spec.name: _checked_state(arrays, spec, rows, self.path) for spec in self.states}
        if len(outputs) == 1:
            return outputs[results[0].name], new_states
        return outputs if self.outputs else _by_request(outputs), new_states

    def unload(self) -> None:
        """Free the session and its memory; `load` may be called again."""
        self._session = None

    def _feeds(
        self, batch: Batch, states: Mapping[str, Array], requests: Sequence[RequestInfo]
    ) -> dict[str, Array]:
        """All inputs of the graph by name."""
        names = [spec.name for spec in self.inputs]
        lengths = {spec.name: spec for spec in self._signature.lengths}
        if not isinstance(batch, Mapping):
            batch = {names[0]: batch}
        if batch.keys() != {*names, *lengths}:
            raise ValueError(
                f"{self.path} takes the inputs {', '.join([*names, *lengths])}, but got {', '.join(batch)}"
            )
        if states.keys() != {spec.name for spec in self.states}:
            wanted = ", ".join(spec.name for spec in self.states) or "none"
            raise ValueError(f"{self.path} takes the states {wanted}, but got {', '.join(states) or 'none'}")
        feeds = {**batch, **states}
        for name, spec in lengths.items():
            feeds[name] = spec.value(batch[name])
        for constant in self._signature.constants:
            feeds[constant.name] = constant.value(len(batch[names[0]]))
        for control in self._signature.controls:
            feeds[control.name] = control.value(requests)
        return feeds

    def _run(self, session: Any, feeds: dict[str, Array], options: Any = None) -> list[Any]:
        """The outputs of results and of states. With BF16, which numpy lacks, all are passed as OrtValues."""
        datatypes = self._signature.datatypes
        if "BF16" not in datatypes.values():
            arrays: list[Any] = session.run(self._output_names, feeds, options)
            return arrays
        values = {name: _to_ort_value(array, datatypes[name]) for name, array in feeds.items()}
        found = session.run_with_ort_values(self._output_names, values, options)
        return [_from_ort_value(value) for value in found]


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
            "'PATH[onnx]', where PATH is a checkout of Carpool"
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


def _quietly(runtime: Any) -> Any:
    """Options of a run that may raise, and is not to log that as an error."""
    options = runtime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    return options


def _counting_operator(path: Path) -> str:
    """An operator of the graph whose output has as many rows as its numbers say; empty if it has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for operator in _COUNTING:  # as the protobuf has it: the field, its length, the name
            if content.find(b'"%c%b' % (len(operator), operator.encode())) >= 0:
                return operator
    return ""


def _warn_of_batches(path: Path, results: Sequence[ResultOutput], probed: Probed) -> None:
    """Log a warning if a result depends on its batch, or if batches cannot be executed.

    Operators that scale by the whole batch do not show it with every input, so they are looked for."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        is_quantized = content.find(b"DynamicQuantize") >= 0
    log = structlog.get_logger()
    if is_quantized:
        reason = "the model is dynamically quantized; quantize it statically, or give it batches of 1"
        log.warning("results depend on the other requests in the batch", reason=reason, file=str(path))
    elif batch_mates_matter(results, probed):
        reason = "the graph computes across the batch; export it in inference mode, or give it batches of 1"
        log.warning("results depend on the other requests in the batch", reason=reason, file=str(path))
    if probed.runs and not probed.has_batch:
        reason = (
            f"the graph raises for batches: export it again, or set max_batch_size = 1 in {toml_path(path)}"
        )
        log.warning("each request is executed alone", reason=reason, file=str(path), error=probed.error)


def _checked(value: Any, result: ResultOutput, rows: int, path: Path) -> Any:
    """One output, after checking that it has a row for each request; strings as numpy's own."""
    if count_of(value) != rows:
        raise RuntimeError(
            f"{path}: output {result.name!r} has {shown(value)} for a batch of {rows}; "
            "its first dimension must be the batch"
        )
    return value.astype(np.str_) if result.datatype == "BYTES" else value


def _by_request(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Outputs, some of them maps, as a dict for each request; a text as a str, and a number as it is."""
    columns = [
        value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind == "U" else value
        for value in outputs.values()
    ]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def _checked_state(arrays: Mapping[str, Array], spec: StateSpec, rows: int, path: Path) -> Array:
    """The new states of a batch, after checking their shape."""
    array = arrays[spec.output or spec.name]
    shape = tuple(rows if axis == spec.axis else size for axis, size in enumerate(spec.shape))
    if array.shape != shape:
        raise RuntimeError(
            f"{path}: output {spec.output!r} has shape {list(array.shape)} for a batch of {rows}; as "
            f"the state {spec.name!r} it must have {list(shape)}"
        )
    return array


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
