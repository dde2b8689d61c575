"""The extension "generate": inputs and outputs by their names in plain JSON, without datatypes and shapes.

    {"PROMPT": "Once", "temperature": 0.7}  ->  {"model_name": "m", "model_version": "1", "TEXT": " upon"}

A name in the request is an input of the model, or else a parameter. A model that declares no inputs takes
`text_input`, a text, or `body`, any JSON value: what it gets is that value. One that declares no outputs
answers with `text_output`. One that speaks completions of OpenAI's API gets `{"prompt": ...}` with all
parameters, and its pieces are texts. A request with `inputs` is a whole infer request, and is answered as
such.

Errors begin with Triton's words, for which its clients look.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from carpool.messages.requests import JSON
from carpool.spoken import COMPLETIONS
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.elements import Data, check_json, check_texts, from_list, to_json
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.models import BODY, OfferedModel
from carpool_gateway.oip.requests import InferRequest, InputTensor, Scalar, decode_request, request_of
from carpool_gateway.oip.responses import OutputTensor, encode_response

TEXT_INPUT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"
_ID: Final = "id"
_PARAMETERS: Final = "parameters"
_INPUTS: Final = "inputs"
_SCALARS: Final = (bool, int, float, str)
_AS_JSON: Final = {"content_type": JSON}


class GenerateRequest(NamedTuple):
    """`is_whole`: it is a whole infer request, and its responses are those of infer. `prompt`: the body for a
    model that speaks completions of OpenAI's API, whose pieces are the responses; else empty."""

    request: InferRequest
    is_whole: bool
    prompt: bytes = b""


def decode_generate(model: OfferedModel, body: bytes) -> GenerateRequest:
    """A request for a model. Raises ProtocolError."""
    check_json(body)
    value = _parsed(body) if body.strip() else {}
    if type(value) is not dict:
        raise ProtocolError("the request: must be a JSON object")
    names = {spec.name: spec for spec in model.inputs}
    if _INPUTS not in names and type(value.get(_INPUTS)) is list:
        request = decode_request(body)
        if request.binary_output or any(output.binary for output in request.outputs or ()):
            raise ProtocolError("binary data: generate answers in JSON alone; use infer, or a WebSocket")
        return GenerateRequest(request, True)
    found = _Found()
    _read(model, names, value, found, is_nested=False)
    request_id = value.get(_ID, "")
    if type(request_id) is not str:
        raise ProtocolError("id: must be a text")
    request = request_of(request_id, tuple(found.inputs), found.parameters)
    if COMPLETIONS not in model.spoken.speaks or model.declares_inputs or TEXT_INPUT not in value:
        return GenerateRequest(request, False)
    prompt = msgspec.json.encode({"prompt": value[TEXT_INPUT], **request.parameters})
    return GenerateRequest(request._replace(parameters={}), False, prompt)


def encode_text(model: OfferedModel, request_id: str, text: str) -> bytes:
    """The JSON of a response with a text."""
    written = {_ID: request_id} if request_id else {}
    written |= {"model_name": model.name, "model_version": model.version, TEXT_OUTPUT: text}
    return msgspec.json.encode(written)


def encode_generate(model: OfferedModel, request_id: str, outputs: Sequence[OutputTensor]) -> bytes:
    """The JSON of a response. An output of one element is that element, and of others a list. Raises
    ProtocolError for an output that cannot be written in JSON."""
    written: dict[str, Any] = {_ID: request_id} if request_id else {}
    written |= {"model_name": model.name, "model_version": model.version}
    for output in outputs:
        data = to_json(output.data, output.datatype, f"output {output.name!r}")
        is_one = _count(output.data, output.datatype, output.shape) == 1
        name = output.name if model.declares_outputs else TEXT_OUTPUT
        written[name] = msgspec.Raw(data[1:-1] if is_one else data)
    return msgspec.json.encode(written)


def encode_whole(model: OfferedModel, request_id: str, outputs: Sequence[OutputTensor]) -> bytes:
    """The JSON of a response to a whole infer request. Raises ProtocolError as `encode_generate` does."""
    (document,) = encode_response(model.name, request_id, outputs, model.version).parts
    return bytes(document)


def _count(data: Data, datatype: str, shape: Iterable[int]) -> int:
    if isinstance(data, list):
        return len(data)
    count = 1
    for size in shape:
        count *= size
    return count


class _Found:
    """What was read of a request so far."""

    def __init__(self) -> None:
        self.inputs: list[InputTensor] = []
        self.parameters: dict[str, Scalar] = {}


def _read(
    model: OfferedModel,
    names: Mapping[str, TensorSpec],
    fields: Mapping[str, Any],
    found: _Found,
    *,
    is_nested: bool,
) -> None:
    """Read the fields of a request, or those under `parameters`, in their order."""
    for name, value in fields.items():
        if name in names and model.declares_inputs:
            if any(tensor.name == name for tensor in found.inputs):
                raise _exists(name)
            found.inputs.append(_input(names[name], value))
        elif name == _PARAMETERS and not is_nested:
            if type(value) is not dict:
                raise ProtocolError("Expected JSON object for keyword: 'parameters'")
            _read(model, names, value, found, is_nested=True)
        elif name == _ID and not is_nested:
            continue
        elif name in (TEXT_INPUT, BODY.name) and not (model.declares_inputs or is_nested):
            if found.inputs:
                raise ProtocolError(f"{TEXT_INPUT} and {BODY.name}: a request has one of them")
            found.inputs.append(_body(name, value))
        elif type(value) in _SCALARS:
            found.parameters[name] = value
        else:
            where = "Converting keyword: 'parameters': " if is_nested else ""
            raise ProtocolError(
                f"{where}parameter {name!r:.60} has invalid type. It must be a text, a number, true or "
                "false, because the model has no input of this name"
            )


def _body(name: str, value: Any) -> InputTensor:
    """The body of a model that declares no inputs: the JSON of a value."""
    if name == TEXT_INPUT and type(value) is not str:
        raise ProtocolError(f"{TEXT_INPUT}: must be a text; send other values as {BODY.name}")
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return InputTensor(BODY.name, "BYTES", (1, 1), [data], _AS_JSON)


def _input(spec: TensorSpec, value: Any) -> InputTensor:
    of = f"input {spec.name!r}"
    values = value if type(value) is list else [value]
    for kind, datatype, called in ((str, "BYTES", "string"), (bool, "BOOL", "boolean")):
        if spec.datatype == datatype and any(type(item) is not kind for item in values):
            raise ProtocolError(f"{of}: attempt to access JSON non-{called} as {called}")
    if spec.datatype == "BYTES":
        check_texts(len(values))
    shape = _shape(spec, len(values))
    return InputTensor(spec.name, spec.datatype, shape, from_list(values, spec.datatype, len(values), of))


def _shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """The shape of this number of elements. Of the sizes that vary, the last one takes all elements, and the
    others are 1. Raises ProtocolError."""
    shape, left, fixed = list(spec.shape), count, 1
    for size in shape:
        fixed *= size if size != -1 else 1
    if fixed and not left % fixed:
        left //= fixed
        for axis in range(len(shape) - 1, -1, -1):
            if shape[axis] == -1:
                shape[axis], left = left, 1
    if (left != 1 and fixed) or (not fixed and count):
        raise ProtocolError(
            f"The schema can not convert input {spec.name!r} to tensor with proper shape: it has {count} "
            f"elements, and the model takes the shape {list(spec.shape)}"
        )
    return (1, *shape)


def _parsed(body: bytes) -> Any:
    """The value of the JSON. A name that is in it twice is named as an input is."""
    try:
        return parse(body)
    except ProtocolError:
        twice = _first_twice(body)
        if twice is None:
            raise
        raise _exists(twice) from None


def _exists(name: str) -> ProtocolError:
    return ProtocolError(f"input {name!r:.60} already exists in request")


def _first_twice(body: bytes) -> str | None:
    """The first name that is in the request, or in its parameters, a second time; None if none is."""
    try:
        fields = json.loads(body, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, _Pairs):
        return None
    nested = [value for name, value in fields if name == _PARAMETERS and isinstance(value, _Pairs)]
    for pairs in (fields, *nested):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                return name
            seen.add(name)
    return None


class _Pairs(list[tuple[str, Any]]):
    """A map as it is written, also with names that are there twice."""
