"""A body to paste that the model will understand: zeros of the tensors it declares, or else a text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from carpool.wire.bodies import MAX_JSON_ITEMS
from carpool.wire.tensors import TensorSpec

# What a ready-made model can be asked. Of anyone else's model that declares no tensors we know nothing.
_BODIES: Final = {"square": 7, "docsearch": "how do I read a zip file"}
_SOME_TEXT: Final = "hello"
_OPEN_SIZE: Final = 2  # for a size that may vary: more than one shows that it may
_TYPED: Final = 32  # numbers, at most, that are written out
_AS_JSON: Final = MAX_JSON_ITEMS // 2  # numbers, at most, that JSON is fit for


class Example(NamedTuple):
    """`json` is the body as it is typed. Where that would be long it is empty, and `made` is Python for it;
    where that would be too much for JSON, `made` is empty too. `value` is what Python sends, after `imports`.
    """

    json: str
    made: str
    value: str
    imports: str = ""


def example(model: str, inputs: Sequence[TensorSpec]) -> Example:
    """For the tensors that a model declares."""
    if not inputs:
        text = json.dumps(_BODIES.get(model, _SOME_TEXT))
        return Example(text, "", text)
    specs = [_sized(spec) for spec in inputs]
    value = _body(specs, [_array(spec) for spec in specs])
    imports = "import numpy; " if "numpy." in value else ""
    numbers = sum(math.prod(spec.shape) for spec in specs)
    if numbers <= _TYPED:
        return Example(_body(specs, [_typed(spec) for spec in specs]), "", value, imports)
    made = _body(specs, [_map(spec) for spec in specs]) if numbers <= _AS_JSON else ""
    return Example("", made, value, imports)


def _sized(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.datatype, tuple(_OPEN_SIZE if size == -1 else size for size in spec.shape)
    )


def _body(specs: Sequence[TensorSpec], tensors: Sequence[str]) -> str:
    """One tensor is a body by itself; of several each has its name before it."""
    if len(tensors) == 1:
        return tensors[0]
    named = (f"{json.dumps(spec.name)}: {tensor}" for spec, tensor in zip(specs, tensors, strict=True))
    return f"{{{', '.join(named)}}}"


def _typed(spec: TensorSpec) -> str:
    """As JSON, rows in rows."""
    return json.dumps(_rows(_zero(spec.datatype), spec.shape))


def _rows(zero: Any, shape: Sequence[int]) -> Any:
    return [_rows(zero, shape[1:])] * shape[0] if shape else zero


def _zero(datatype: str) -> Any:
    return {"BYTES": _SOME_TEXT, "BOOL": False}.get(datatype, 0)


def _map(spec: TensorSpec) -> str:
    """As Python that makes a tensor's map for JSON."""
    if spec.datatype == "BYTES":
        return _typed(spec)
    data = f"[{_zero(spec.datatype)}] * {math.prod(spec.shape)}"
    return f'{{"datatype": "{spec.datatype}", "shape": {list(spec.shape)}, "data": {data}}}'


def _array(spec: TensorSpec) -> str:
    """As Python that makes an array."""
    if spec.datatype == "BYTES":
        return _typed(spec)
    named = {"BF16": "float32"}.get(spec.datatype, spec.datatype.lower().replace("fp", "float"))
    return f'numpy.zeros({spec.shape}, "{named}")'
