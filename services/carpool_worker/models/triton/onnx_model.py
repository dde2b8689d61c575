"""An ONNX file of a repository of Triton's: shapes, labels, states and controls as its configuration says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.plugins import UnusableError
from carpool.text_files import read_text
from carpool.wire.tensors import Array, TensorSpec, from_bytes
from carpool_worker.models.onnx import OnnxModel
from carpool_worker.triton.scheduling import State
from carpool_worker.triton.tensors import Tensor
from carpool_worker.triton.translation import Translated


class TritonOnnxModel(OnnxModel):
    """See OnnxModel. `entry`: the folder with the configuration, its labels and first states. `settings`:
    replace those of the configuration."""

    def __init__(
        self, path: str | Path, translated: Translated, entry: Path, settings: Mapping[str, Any] | None = None
    ) -> None:
        declared = {**_declaration(translated, entry), **(settings or {})}
        super().__init__(path, declared, declared_in=str(entry / "config.pbtxt"))
        self._tensors = translated.tensors
        self._entry = entry
        self._completes = not translated.tensors.inputs and "max_batch_size" not in declared

    def load(self, device: str) -> None:
        """As OnnxModel does; then compare the graph with the configuration. Raises what it does, and
        UnusableError."""
        try:
            super().load(device)
        except ValueError:
            if not self._completes:
                raise
            # As Triton completes a configuration without inputs: a graph with a fixed batch is not batched.
            self._declared = {**(self._declared or {}), "max_batch_size": 1}
            super().load(device)
        where = self._entry / "config.pbtxt"
        inputs = {one.name: one for one in self._tensors.inputs}
        outputs = {one.name: one for one in self._tensors.outputs}
        if inputs:
            self.inputs = tuple(_compared(spec, inputs, f"{where}: input") for spec in self.inputs)
            _check_all_there(inputs, self.inputs, f"{where}: input")
        if outputs:
            specs = [_compared(spec, outputs, f"{where}: output") for spec in self.outputs]
            self.outputs = tuple(self._labelled(spec, outputs[spec.name]) for spec in specs)
        changed = [one for one in (*inputs.values(), *outputs.values()) if one.shape != one.model_shape]
        if changed:
            self.predict = self._reshaping(self.predict)

    def _labelled(self, spec: TensorSpec, tensor: Tensor) -> TensorSpec:
        if not tensor.label_file:
            return spec
        return replace(spec, labels=tuple(read_text(self._entry / tensor.label_file).splitlines()))

    def _reshaping(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """`predict`, between the shapes of clients and those of the graph. Its other arguments are those of
        `execute`."""

        @functools.wraps(execute)
        def predict(batch: Array | dict[str, Array], **others: Any) -> Any:
            returned = execute(_each(batch, self._tensors.inputs, Tensor.to_model), **others)
            if not self.states:
                return _each(returned, self._tensors.outputs, Tensor.from_model)
            results, states = returned
            return _each(results, self._tensors.outputs, Tensor.from_model), states

        return predict


def _each(arrays: Array | dict[str, Array], tensors: Sequence[Tensor], change: Any) -> Any:
    """One array, or all of them by name, changed as these tensors say."""
    by_name = {one.name: one for one in tensors}
    if isinstance(arrays, dict):
        return {
            name: change(by_name[name], array) if name in by_name else array for name, array in arrays.items()
        }
    return change(tensors[0], arrays) if tensors else arrays


def _declaration(translated: Translated, entry: Path) -> dict[str, Any]:
    """What the TOML file beside an ONNX file would declare."""
    found: dict[str, Any] = dict(translated.settings)
    if translated.tensors.outputs:
        found["outputs"] = [one.name for one in translated.tensors.outputs]
    if translated.sequences is None:
        return found
    found["states"] = [_state(one, entry) for one in translated.sequences.states]
    controls = translated.sequences.controls
    if controls:
        found["controls"] = {one.kind: _control(one.name, one.values) for one in controls}
    return found


def _control(name: str, values: tuple[Any, Any] | None) -> dict[str, Any]:
    return {"input": name} if values is None else {"input": name, "false_true": list(values)}


def _state(state: State, entry: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"input": state.input, "output": state.output, "shape": [-1, *state.shape]}
    if not state.file:
        return found
    file = entry / "initial_state" / state.file
    try:
        found["initial"] = from_bytes(state.datatype, state.shape, file.read_bytes()).tolist()
    except (OSError, ValueError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else f"is no {state.datatype}{list(state.shape)}"
        )
        raise UnusableError(f"{file}: {reason}: it must have the first state of {state.input}") from None
    return found


def _compared(spec: TensorSpec, declared: Mapping[str, Tensor], where: str) -> TensorSpec:
    """A tensor of the graph as the configuration declares it. Raises UnusableError if these differ."""
    tensor = declared.get(spec.name)
    if tensor is None:
        raise UnusableError(f"{where}: the graph has {spec.name}, which is missing; declare it")
    if tensor.datatype != spec.datatype:
        raise UnusableError(
            f"{where} {spec.name}: data_type: {tensor.datatype} is {spec.datatype} in the graph; write that"
        )
    is_alike = len(tensor.model_shape) == len(spec.shape) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(tensor.model_shape, spec.shape, strict=True)
    )
    if not is_alike:
        raise UnusableError(
            f"{where} {spec.name}: dims: {list(tensor.model_shape)} are {list(spec.shape)} in the graph, "
            "without the batch; write those"
        )
    return replace(spec, shape=tensor.shape)


def _check_all_there(declared: Mapping[str, Tensor], specs: Sequence[TensorSpec], where: str) -> None:
    missing = declared.keys() - {spec.name for spec in specs}
    if missing:
        names = ", ".join(spec.name for spec in specs)
        raise UnusableError(f"{where}: the graph has no {', '.join(sorted(missing))}; it has {names}")
