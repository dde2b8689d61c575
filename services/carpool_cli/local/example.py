"""An example body for a model: zeros for the tensors it declares, or a text if it declares none. One that
speaks OpenAI's API gets what that sends to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.spoken import CHAT, COMPLETIONS, EMBEDDINGS, NOT_SPOKEN, Spoken
from carpool.wire.bodies import MAX_JSON_ITEMS
from carpool.wire.tensors import TensorSpec

# For ready-made models. Any other model that declares no tensors gets a text.
_BODIES: Final = {"square": 7, "docsearch": "how do I read a zip file", "writer": "Return the"}
TEXT: Final = "hello"
# Of OpenAI's API: the path of an interface, and what a request has beside the model.
_SPOKEN: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    COMPLETIONS: ("/v1/completions", {"prompt": "Return the"}),
    CHAT: ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    EMBEDDINGS: ("/v1/embeddings", {"input": TEXT}),
}
_VARIABLE_SIZE: Final = 2  # for a dimension of any size; more than 1, to show that it is one
_WRITTEN_NUMBERS_MAX: Final = 32  # more are made by a Python expression
_JSON_NUMBERS_MAX: Final = MAX_JSON_ITEMS // 2  # more cannot be sent as JSON


def is_known(model: str, inputs: Sequence[TensorSpec], spoken: Spoken = NOT_SPOKEN) -> bool:
    """Whether the example is a body that the model takes. Otherwise it is only a text, in its place."""
    return bool(inputs or spoken.speaks) or model in _BODIES


def spoken_example(model: str, spoken: Spoken, *, is_stream: bool) -> tuple[str, str]:
    """A path of OpenAI's API, and a body for it as JSON. `is_stream`: if it can be one, it is."""
    interface = spoken.speaks[0]
    path, fields = _SPOKEN[interface]
    stream = {"stream": True} if is_stream and interface != EMBEDDINGS else {}
    return path, json.dumps({"model": model, **fields, **stream})


class Example(NamedTuple):
    """An example body.

    `json`: the body as JSON; empty if that would be long.
    `json_maker`: a Python expression that makes the long body; empty if it is too large for JSON.
    `value`: a Python expression for the body that a Python producer sends, after `imports`.
    """

    json: str
    json_maker: str
    value: str
    imports: str = ""


def example(model: str, inputs: Sequence[TensorSpec], spoken: Spoken = NOT_SPOKEN) -> Example:
    """The example for a model with these input tensors."""
    if spoken.speaks and model not in _BODIES:
        text = json.dumps(_SPOKEN[spoken.speaks[0]][1])
        return Example(text, "", text)
    if not inputs:
        text = json.dumps(_BODIES.get(model, TEXT))
        return Example(text, "", text)
    specs = [_sized(spec) for spec in inputs]
    value = _body(specs, [_array(spec) for spec in specs])
    imports = "import numpy; " if "numpy." in value else ""
    numbers = sum(math.prod(spec.shape) for spec in specs)
    if numbers <= _WRITTEN_NUMBERS_MAX:
        return Example(_body(specs, [_written(spec) for spec in specs]), "", value, imports)
    json_maker = (
        _body(specs, [_tensor_object(spec) for spec in specs]) if numbers <= _JSON_NUMBERS_MAX else ""
    )
    return Example("", json_maker, value, imports)


def _sized(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.datatype, tuple(_VARIABLE_SIZE if size == -1 else size for size in spec.shape)
    )


def _body(specs: Sequence[TensorSpec], tensors: Sequence[str]) -> str:
    """One tensor is a body by itself; several make an object with their names as keys."""
    if len(tensors) == 1:
        return tensors[0]
    named = (f"{json.dumps(spec.name)}: {tensor}" for spec, tensor in zip(specs, tensors, strict=True))
    return f"{{{', '.join(named)}}}"


def _written(spec: TensorSpec) -> str:
    """A tensor as nested JSON lists."""
    return json.dumps(_nested_lists(_zero(spec.datatype), spec.shape))


def _nested_lists(zero: Any, shape: Sequence[int]) -> Any:
    return [_nested_lists(zero, shape[1:])] * shape[0] if shape else zero


def _zero(datatype: str) -> Any:
    return {"BYTES": TEXT, "BOOL": False}.get(datatype, 0)


def _tensor_object(spec: TensorSpec) -> str:
    """A Python expression that makes a tensor's JSON object."""
    if spec.datatype == "BYTES":
        return _written(spec)
    data = f"[{_zero(spec.datatype)}] * {math.prod(spec.shape)}"
    return f'{{"datatype": "{spec.datatype}", "shape": {list(spec.shape)}, "data": {data}}}'


def _array(spec: TensorSpec) -> str:
    """A Python expression that makes an array."""
    if spec.datatype == "BYTES":
        return _written(spec)
    named = {"BF16": "float32"}.get(spec.datatype, spec.datatype.lower().replace("fp", "float"))
    return f'numpy.zeros({spec.shape}, "{named}")'
