"""The inputs and outputs of an ONNX graph by their roles: of requests, states, constants, controls.

The graph says names, types and shapes, the declaration the roles. Whatever does not fit together is a
ValueError that names the file, the input or key, and what would be valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.wire.tensors import Array, StateSpec, TensorSpec, array_of
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.models.onnx_declaration import (
    Constant,
    Control,
    ControlKind,
    Cut,
    Declaration,
    Outputs,
    Padding,
    State,
    toml_path,
)

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
ID_DATATYPES: Final = ("INT32", "INT64", "UINT32", "UINT64", "BYTES")

# What skl2onnx and others make of probabilities (ZipMap): for each request a map from labels to numbers.
_MAPS: Final = re.compile(r"seq\(map\((int64|string),tensor\((float|double|int64|string)\)\)\)")
_FIX: Final = "export the model with a dynamic first dimension (dynamic_shapes or dynamic_axes in PyTorch)"


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """A constant as an array. `is_row`: it is one row of the input, to be repeated for each request."""

    name: str
    datatype: str
    array: Array
    is_row: bool

    def value(self, rows: int) -> Array:
        """The input for a batch of `rows`."""
        if not self.is_row:
            return self.array
        return np.repeat(self.array[np.newaxis], rows, axis=0)


@dataclass(frozen=True, slots=True)
class ControlInput:
    """A control whose input has the shape (n, *tail). `values`: what it has for false and for true."""

    kind: ControlKind
    name: str
    datatype: str
    tail: tuple[int, ...]
    values: Array | None

    def value(self, requests: Sequence[RequestInfo]) -> Array:
        """The input for a batch. Raises InvalidArgumentError for an ID that its datatype cannot hold."""
        if self.values is None:
            column = _ids([request.sequence_id or "" for request in requests], self.datatype)
        else:
            column = self.values[[_FLAGS[self.kind](request) for request in requests]]
        return column.reshape(len(requests), *self.tail)


_FLAGS: Final[dict[ControlKind, Callable[[RequestInfo], int]]] = {
    ControlKind.START: lambda request: int(request.sequence_start),
    ControlKind.END: lambda request: int(request.sequence_end),
    ControlKind.READY: lambda _: 1,  # a batch has no rows without a request
}


def _ids(ids: Sequence[str], datatype: str) -> Array:
    """Sequence IDs as text, or as the numbers that they are written as."""
    if datatype == "BYTES":
        return np.array(ids, object)
    dtype = np.dtype(datatype.lower())
    limits = np.iinfo(dtype)
    for name in ids:
        number = int(name) if name.removeprefix("-").isdecimal() and len(name) <= 20 else None
        if number is None or not limits.min <= number <= limits.max or str(number) != name:
            raise InvalidArgumentError(
                f"sequence_id: {name!r:.80} is not a whole number of {limits.min} to {limits.max}, "
                f"which this model takes as {datatype}"
            )
    return np.array([int(name) for name in ids], dtype)


@dataclass(frozen=True, slots=True)
class LengthsInput:
    """An input that gets the true sizes of a padded one, in the shape (n, *tail)."""

    name: str
    datatype: str
    tail: tuple[int, ...]

    def value(self, lengths: Array) -> Array:
        """The input for a batch, from INT64 (n), or (n, k)."""
        return lengths.astype(self.datatype.lower()).reshape(len(lengths), *self.tail)


@dataclass(frozen=True, slots=True)
class ResultOutput:
    """An output of results, as the graph declares it, which may be wrong (see `onnx_probe`).

    `datatype`: "" for a sequence of maps. `shape`: without the batch; None if none is declared. `problem`:
    why what is declared has not the batch first; "" if it may have. `rows`: the name of its first dimension,
    if that is another one than the batch of the inputs, and the output was not chosen by name.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None = None
    problem: str = ""
    rows: str = ""

    @property
    def is_maps(self) -> bool:
        """Whether it has a map for each request, and not a row of a tensor."""
        return not self.datatype


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs by role. `inputs` are those of requests, in file order; `results` are those that are
    declared, in the order there, or all, in file order."""

    inputs: tuple[TensorSpec, ...]
    results: tuple[ResultOutput, ...]
    states: tuple[StateSpec, ...] = ()
    constants: tuple[ConstantInput, ...] = ()
    controls: tuple[ControlInput, ...] = ()
    lengths: tuple[LengthsInput, ...] = ()
    datatypes: Mapping[str, str] = field(init=False)  # of all inputs and outputs, by name

    def __post_init__(self) -> None:
        parts: tuple[Any, ...]
        parts = (*self.inputs, *self.results, *self.states, *self.constants, *self.controls, *self.lengths)
        object.__setattr__(self, "datatypes", {part.name: part.datatype for part in parts})


def read_signature(graph: Any, declaration: Declaration, path: Path) -> Signature:
    """The roles of the inputs and outputs of a graph: an InferenceSession, or what has its two methods."""
    inputs = {value.name: value for value in graph.get_inputs()}
    outputs = {value.name: value for value in graph.get_outputs()}
    _check_declared(declaration, inputs, outputs)
    if declaration.settings.get("max_batch_size") == 1:
        axes = {
            name: state.shape.index(-1) if state.shape and -1 in state.shape else state.axis
            for state in declaration.states
            for name in (state.input, state.output)
        }
        inputs, outputs = (
            {name: _of_one(value, axes.get(name, 0)) for name, value in values.items()}
            for values in (inputs, outputs)
        )
    _check_padding(declaration, inputs, outputs)
    padding = {part.input: part for part in declaration.padding}
    declared = {part.input for part in declaration.inputs} | {part.lengths for part in declaration.padding}
    of_states = {state.output for state in declaration.states}
    of_requests = [value for name, value in inputs.items() if name not in declared]
    chosen = outputs if declaration.outputs is None else declaration.outputs.names
    of_results = [outputs[name] for name in chosen if name not in of_states]
    if not of_requests:
        problem = "has no inputs" if not inputs else "has no inputs beside those that are declared"
        raise ValueError(f"{path} {problem}, so it cannot serve requests")
    if not of_results:
        raise ValueError(
            f"{path} has no outputs beside those of states, so it has no results: if a state is the result, "
            "export the model with a copy of it as another output"
        )
    signature = Signature(
        inputs=tuple(_padded(_spec(value, path), padding.get(value.name)) for value in of_requests),
        results=_results(of_requests, of_results, path, are_chosen=declaration.outputs is not None),
        states=tuple(
            _state(state, inputs[state.input], outputs[state.output]) for state in declaration.states
        ),
        constants=tuple(_constant(constant, inputs[constant.input]) for constant in declaration.constants),
        controls=tuple(_control(control, inputs[control.input]) for control in declaration.controls),
        lengths=tuple(_lengths(part, inputs[part.lengths]) for part in declaration.padding if part.lengths),
    )
    _check_inputs(of_requests, path)
    return signature


class _Value(NamedTuple):
    """An input or output of a graph, as onnxruntime's NodeArg."""

    name: str
    type: str
    shape: Sequence[int | str | None]


def _of_one(value: Any, axis: int | None) -> Any:
    """An input or output of a graph for one request at a time, as one whose batch dimension varies: at
    `axis`, or, if it is None, where its only 1 is."""
    shape: list[int | str | None] = list(value.shape or ())
    if axis is None and shape.count(1) == 1 and all(isinstance(size, int) for size in shape):
        axis = shape.index(1)
    if axis is None or not axis < len(shape) or shape[axis] != 1:
        return value
    shape[axis] = None
    return _Value(value.name, value.type, shape)


# --- of requests and results -------------------------------------------------------------------------------


def _spec(value: Any, path: Path) -> TensorSpec:
    """The TensorSpec of an input, one of onnxruntime's NodeArgs, without its batch dimension."""
    datatype = DATATYPES.get(value.type)
    if datatype is None:
        raise ValueError(
            f"{path}: input {value.name!r} is of type {value.type}, which Carpool cannot send; {_fix_types()}"
        )
    if not value.shape:
        raise ValueError(
            f"{path}: input {value.name!r} is a scalar or has no declared shape, so it has no batch "
            "dimension; export the model with a dynamic first dimension, or declare it under [constants] in "
            f"{toml_path(path)}"
        )
    shape = tuple(_size(size) for size in value.shape[1:])
    return TensorSpec(value.name, datatype, shape, text=datatype == "BYTES")


def _fix_types() -> str:
    return f"export the model with tensors of one of the types {', '.join(sorted(DATATYPES.values()))}"


def _size(size: int | str | None) -> int:
    """A declared size; -1 for a dimension that varies: it has a name ("sequence"), or nothing."""
    return size if isinstance(size, int) else -1


def _check_inputs(inputs: Sequence[Any], path: Path) -> None:
    """Raise ValueError unless the first dimension of every input varies."""
    fixed = {value.name: value.shape[0] for value in inputs if isinstance(value.shape[0], int)}
    if not fixed:
        return
    if len(fixed) == len(inputs) and set(fixed.values()) == {1}:
        raise ValueError(
            f"{path} takes one item at a time and cannot be batched: the batch dimension of "
            f"{', '.join(map(repr, fixed))} is fixed at 1; {_FIX}, or execute each request alone with "
            f"max_batch_size = 1 in {toml_path(path)}"
        )
    name, size = next(iter(fixed.items()))
    raise ValueError(f"{path}: the batch dimension (the first) of input {name!r} is fixed at {size}; {_FIX}")


def _results(
    inputs: Sequence[Any], outputs: Sequence[Any], path: Path, *, are_chosen: bool
) -> tuple[ResultOutput, ...]:
    """The outputs of results. Raises ValueError for one that cannot be sent."""
    batch = {value.shape[0] for value in inputs if value.shape}
    inner = {size for value in inputs for size in value.shape[1:] if isinstance(size, str)} - batch
    known = batch | inner
    results = tuple(
        replace(result, rows="" if are_chosen else _other_rows(value, known))
        for value, result in ((value, _result(value, inner, path)) for value in outputs)
    )
    types = {value.type for value in (*inputs, *outputs)}
    maps = [result.name for result in results if result.is_maps]
    if maps and "tensor(bfloat16)" in types:  # for which onnxruntime's Python interface has no way
        raise ValueError(
            f"{path}: output {maps[0]!r} has maps, which onnxruntime does not return beside BF16; "
            f"export the model with zipmap=False, or {_leave_out(path)}"
        )
    return results


def _result(value: Any, inner: Collection[str], path: Path) -> ResultOutput:
    """An output of results; `inner`: names of sizes of the inputs that are not the batch."""
    if _MAPS.fullmatch(value.type):
        return ResultOutput(value.name, "")
    datatype = DATATYPES.get(value.type)
    if datatype is None:
        zipmap = "export it with zipmap=False, if skl2onnx made it; " if "map(" in value.type else ""
        raise ValueError(
            f"{path}: output {value.name!r} is of type {value.type}, which Carpool cannot send; {zipmap}"
            f"{_leave_out(path)}, or {_fix_types()}"
        )
    if not value.shape:
        return ResultOutput(value.name, datatype, None, "is a scalar or has no declared shape")
    shape = tuple(_size(size) for size in value.shape[1:])
    first = value.shape[0]
    is_other = isinstance(first, int) or first in inner
    problem = f"has {first} as its first dimension, which is not the batch" if is_other else ""
    return ResultOutput(value.name, datatype, shape, problem)


def _other_rows(value: Any, known: Collection[int | str | None]) -> str:
    """The first dimension of an output, if it varies and is none of the inputs' dimensions."""
    first = value.shape[0] if value.shape else 1
    return "" if isinstance(first, int) or first in known else first or "?"


def _leave_out(path: Path) -> str:
    return f"write outputs = [...] with the names of the others in {toml_path(path)}"


# --- what is declared --------------------------------------------------------------------------------------


def _check_declared(declaration: Declaration, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that the graph does not have, or that is declared twice."""
    used: dict[tuple[str, str], str] = {}
    names = [
        *((state.where, "output", state.output, outputs) for state in declaration.states),
        *((part.where, "input", part.input, inputs) for part in declaration.inputs),
    ]
    for where, role, name, known in names:
        if name not in known:
            raise ValueError(f"{where}: the file has no {role} {name!r}; it has {', '.join(known)}")
        if (role, name) in used:
            raise ValueError(f"{where}: {role} {name!r} is declared by {used[role, name]} already")
        used[role, name] = where
    if declaration.outputs is not None:
        _check_chosen(declaration.outputs, outputs, used)
    if declaration.controls and not declaration.states:
        raise ValueError(
            f"{declaration.controls[0].where}: control inputs are for sequences, but no states are "
            "declared; declare states, or the input under constants"
        )


def _check_padding(declaration: Declaration, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError for padding of what is no input of requests, or a cut of what is no output."""
    used = {part.input: part.where for part in declaration.inputs}
    for part in declaration.padding:
        for name in (part.input, part.lengths):
            if name and name not in inputs:
                known = ", ".join(inputs)
                raise ValueError(f"{part.where}: the file has no input {name!r}; it has {known}")
            if name in used:
                raise ValueError(f"{part.where}: input {name!r} is declared by {used[name]} already")
        used[part.lengths] = part.where
    padded = [part.input for part in declaration.padding]
    for cut in declaration.cut:
        if cut.output not in outputs:
            raise ValueError(
                f"{cut.where}: the file has no output {cut.output!r}; it has {', '.join(outputs)}"
            )
        if cut.input not in padded:
            known = ", ".join(padded) or "none"
            raise ValueError(f"{cut.where}: {cut.input!r} is no input that is padded; such are: {known}")


def _padded(spec: TensorSpec, padding: Padding | None) -> TensorSpec:
    if padding is None:
        return spec
    try:
        return replace(spec, pad=padding.pad, buckets=padding.buckets, lengths=padding.lengths)
    except ValueError as error:
        raise ValueError(f"{padding.where}: {error}") from None


def _lengths(padding: Padding, value: Any) -> LengthsInput:
    datatype = DATATYPES.get(value.type, value.type)
    if datatype not in ("INT32", "INT64") or len(value.shape) not in (1, 2):
        raise ValueError(
            f"{padding.where}.lengths: input {value.name!r} is {value.type} of shape {_shown(value.shape)}; "
            "it must be INT32 or INT64, with one number for each padded dimension of each request"
        )
    return LengthsInput(value.name, datatype, (-1,) * (len(value.shape) - 1))


def with_cuts(outputs: Sequence[TensorSpec], cuts: Sequence[Cut]) -> tuple[TensorSpec, ...]:
    """The outputs, those that are cut back with what to. Raises ValueError."""
    by_output = {cut.output: cut for cut in cuts}
    for cut in cuts:
        if cut.output not in {spec.name for spec in outputs}:
            raise ValueError(f"{cut.where}: it is no tensor of the result")
    found: list[TensorSpec] = []
    for spec in outputs:
        of_output = by_output.get(spec.name)
        if of_output is None:
            found.append(spec)
            continue
        try:
            found.append(replace(spec, cut=of_output.input))
        except ValueError as error:
            raise ValueError(f"{of_output.where}: {error}") from None
    return tuple(found)


def _check_chosen(chosen: Outputs, outputs: Mapping[str, Any], used: Mapping[tuple[str, str], str]) -> None:
    """Raise ValueError for an output of results that the graph does not have, or that is one of a state."""
    for name in chosen.names:
        if name not in outputs:
            raise ValueError(f"{chosen.where}: the file has no output {name!r}; it has {', '.join(outputs)}")
        if ("output", name) in used:
            raise ValueError(
                f"{chosen.where}: output {name!r} is the new state of {used['output', name]}, and no part "
                "of the result; leave it out here, or export the model with a copy of it as another output"
            )


def _state(state: State, value: Any, output: Any) -> StateSpec:
    datatype = DATATYPES.get(value.type)
    if datatype is None or datatype == "BYTES":
        raise ValueError(
            f"{state.where}: input {value.name!r} is of type {value.type}; a state must be numeric"
        )
    if output.type != value.type:
        raise ValueError(
            f"{state.where}: output {output.name!r} is of type {output.type}, but input {value.name!r} of "
            f"type {value.type}; both must have one type"
        )
    shape = _state_shape(state, value)
    if output.shape and not _fits(output.shape, shape):
        raise ValueError(
            f"{state.where}: output {output.name!r} has the shape {_shown(output.shape)}, but input "
            f"{value.name!r} takes {list(shape)}; they must be the same, with the batch at the same place"
        )
    try:
        return StateSpec(
            name=state.input,
            datatype=datatype,
            shape=shape,
            axis=shape.index(-1),
            initial=state.initial,
            output=state.output,
        )
    except ValueError as error:  # only the initial state is not checked yet
        raise ValueError(f"{state.where}.initial: {error}") from None


def _state_shape(state: State, value: Any) -> tuple[int, ...]:
    """The shape of the states of a batch, with -1 for the batch alone."""
    declared = tuple(_size(size) for size in value.shape)
    has_shape = f"input {value.name!r} has the shape {_shown(value.shape)}"
    if state.shape is not None:
        if value.shape and not _fits(value.shape, state.shape):
            raise ValueError(f"{state.where}.shape: {list(state.shape)} does not fit: {has_shape}")
        return state.shape
    varying = [axis for axis, size in enumerate(declared) if size == -1]
    if not varying:
        raise ValueError(
            f"{state.where}: {has_shape}, in which nothing varies; export the model with a state whose batch "
            "dimension is dynamic"
        )
    if state.axis is not None and state.axis not in varying:
        raise ValueError(
            f"{state.where}.axis: {state.axis} is not a dimension that varies: {has_shape}; valid is "
            f"{' or '.join(map(str, varying))}"
        )
    if len(varying) > 1:
        raise ValueError(
            f"{state.where}: {has_shape}, in which several sizes vary; write shape = [...] with all "
            "sizes, and -1 for the batch"
        )
    return declared


def _fits(graph_shape: Sequence[int | str | None], shape: Sequence[int]) -> bool:
    """Whether a shape with -1 for the batch is one that the graph allows."""
    return len(graph_shape) == len(shape) and all(
        size in (-1, wanted) for size, wanted in zip(map(_size, graph_shape), shape, strict=True)
    )


def _constant(constant: Constant, value: Any) -> ConstantInput:
    datatype = DATATYPES.get(value.type)
    if datatype is None:
        raise ValueError(
            f"{constant.where}: input {value.name!r} is of type {value.type}, which cannot be declared"
        )
    sizes = tuple(_size(size) for size in value.shape)
    array = _array(constant.value, datatype, constant.where)
    is_row = sizes[:1] == (-1,) and array.ndim < len(sizes)
    array = _filled(array, sizes[1:] if is_row else sizes, constant.where)
    return ConstantInput(value.name, datatype, array, is_row)


def _control(control: Control, value: Any) -> ControlInput:
    datatype = DATATYPES.get(value.type, value.type)
    sizes = tuple(_size(size) for size in value.shape)
    if sizes not in ((-1,), (-1, 1), (-1, -1)):
        raise ValueError(
            f"{control.where}: input {value.name!r} has the shape {_shown(value.shape)}; a control must "
            "have one value for each request: [batch] or [batch, 1]"
        )
    tail = (1,) * (len(sizes) - 1)
    if control.kind is ControlKind.CORRID:
        if datatype not in ID_DATATYPES:
            raise ValueError(
                f"{control.where}: input {value.name!r} is of type {value.type}; an ID must be one of "
                f"{', '.join(ID_DATATYPES)}"
            )
        return ControlInput(control.kind, value.name, datatype, tail, None)
    if datatype not in DATATYPES.values() or datatype == "BYTES":
        raise ValueError(
            f"{control.where}: input {value.name!r} is of type {value.type}; it must be numeric or BOOL"
        )
    usual = (False, True) if datatype == "BOOL" else (0, 1)
    where = f"{control.where}.false_true"
    values = _filled(_array(list(control.false_true or usual), datatype, where), (2,), where)
    return ControlInput(control.kind, value.name, datatype, tail, values)


def _array(value: Any, datatype: str, where: str) -> Array:
    """A declared value as an array of its own shape."""
    if datatype == "BYTES":
        array = np.array(value, object)
        if any(not isinstance(text, str) for text in array.ravel().tolist()):
            raise ValueError(f"{where}: {value!r:.80} must be a text, or lists of texts")
        return array
    try:
        return array_of(value.tolist() if isinstance(value, np.ndarray) else value, datatype)
    except InvalidArgumentError as error:
        raise ValueError(
            f"{where}: {value!r:.80} is not {datatype}: it {error.detail.partition(': ')[2]}"
        ) from None


def _filled(array: Array, shape: tuple[int, ...], where: str) -> Array:
    """A declared value in the shape that is needed, where -1 allows any size; a single number fills it."""
    if not array.ndim and -1 not in shape:
        return np.full(shape, array)
    if not _fits(shape, array.shape):
        single = "" if -1 in shape else ", or a single value"
        raise ValueError(f"{where}: has the shape {list(array.shape)}; it must be {_shown(shape)}{single}")
    return array


def _shown(shape: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if size in (None, -1) else str(size) for size in shape)}]"
