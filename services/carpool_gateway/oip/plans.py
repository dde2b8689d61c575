"""An infer request for a model -> the bodies of requests, one for each row of the batch, and which outputs
are wanted.

Bodies are msgpack tensors, as `wire.tensors` writes them. Those of numbers have a head in common, and what
follows it is cut out of what came in, for all rows at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from carpool.messages.requests import MSGPACK, RAW
from carpool.parts import Buffer
from carpool.rows import Rows
from carpool.wire.content_types import ACCEPT, canonical
from carpool.wire.tensors import WIDTHS, TensorSpec, tensor_head
from carpool_gateway.oip.elements import NO_JSON, from_binary, texts_of
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.models import BODY, OfferedModel, shown, shown_shape
from carpool_gateway.oip.requests import InferRequest, InputTensor, RequestedOutput, Scalar

ROWS_MAX: Final = 1024
_CONTENT_TYPE: Final = "content_type"
_NAMES_SHOWN: Final = 10  # of inputs that a request has, in an error
_Pieces = list[
    tuple[bytes, Buffer, int]
]  # for each input: what stands before its data, that of all rows, of one row


class WantedOutput(NamedTuple):
    """An output that is wanted, as the model offers it: see RequestedOutput."""

    spec: TensorSpec
    binary: bool
    classes: int


class Plan(NamedTuple):
    """What is to be sent to a model, and what of its results is wanted.

    `bodies`: of the requests, one for each row, all of `content_type`. `accept`: the content type of their
    results; empty: what the model makes of that of the requests. `is_chosen`: the client chose it. `fields`:
    for the model.
    """

    content_type: str
    bodies: Rows | list[bytes]
    accept: str
    is_chosen: bool
    outputs: Sequence[WantedOutput]
    fields: Mapping[str, Scalar]


def plan(model: OfferedModel, request: InferRequest) -> Plan:
    """What to send for this request. Raises ProtocolError if it does not suit the model, or TooLargeError."""
    outputs = _wanted(model, request)
    specs, inputs = _in_order(model, request)
    rows = _count_rows(model, inputs)
    if request.sequence_id and rows != 1:
        raise ProtocolError(f"a request of a sequence has one row, and the batch of this one has {rows}")
    content_type, bodies = _bodies(model, specs, inputs, rows)
    if isinstance(bodies, Rows):
        body_bytes = len(bodies.head) + bodies.width
    else:
        body_bytes = max(map(len, bodies), default=0)
    if body_bytes > model.settings.max_body_bytes:
        raise TooLargeError(
            f"a row has {body_bytes} bytes, and the model takes at most {model.settings.max_body_bytes} "
            "(max_body_bytes)"
        )
    accept = _accept(model, request)
    is_chosen = bool(accept)
    if model.declares_outputs and content_type != MSGPACK:
        accept = MSGPACK
    fields = {name: value for name, value in request.parameters.items() if name != ACCEPT}
    return Plan(content_type, bodies, accept, is_chosen, outputs, fields)


def _accept(model: OfferedModel, request: InferRequest) -> str:
    """The content type that the client wants of results; empty: none."""
    accept = request.parameters.get(ACCEPT, "")
    if not accept:
        return ""
    if model.declares_outputs:
        raise ProtocolError(f"parameter {ACCEPT}: this model has tensors as outputs, so it has no meaning")
    usual = canonical(accept) if type(accept) is str else ""
    if not usual:
        raise ProtocolError(f"parameter {ACCEPT}: {accept!r:.60} is no content type, such as image/png")
    return usual


# --- outputs -----------------------------------------------------------------------------------------------


def _wanted(model: OfferedModel, request: InferRequest) -> list[WantedOutput]:
    requested = request.outputs
    if requested is None:
        requested = tuple([RequestedOutput(spec.name, request.binary_output) for spec in model.outputs])
    wanted: list[WantedOutput] = []
    offered = {spec.name: spec for spec in model.outputs}
    for name, binary, classes in requested:
        spec = offered.get(name)
        if spec is None:
            raise ProtocolError(
                f"unexpected inference output {name!r:.60} for model {model.name!r}: it has "
                f"{shown(model.outputs)}"
            )
        if classes and spec.datatype in {*NO_JSON, "BYTES"}:
            raise ProtocolError(f"output {name!r}: {spec.datatype} has no classification")
        if not binary and spec.datatype in NO_JSON:
            raise ProtocolError(
                f"output {name!r}: {spec.datatype} is not written in JSON: ask for binary_data"
            )
        wanted.append(WantedOutput(spec, binary, classes))
    if len(wanted) > 1:
        ((twice, times),) = Counter(output.spec.name for output in wanted).most_common(1)
        if times > 1:
            raise ProtocolError(f"output {twice!r} already exists in request: it is wanted {times} times")
    return wanted


# --- inputs ------------------------------------------------------------------------------------------------


def _in_order(model: OfferedModel, request: InferRequest) -> tuple[Sequence[TensorSpec], list[InputTensor]]:
    """The inputs of the request in the order of the model, and their declarations. Raises ProtocolError
    unless they are its inputs, of which optional ones may be missing."""
    specs = model.inputs
    if request.raw is not None:
        return specs, [_raw_input(model, request.raw)]
    named = {tensor.name: tensor for tensor in request.inputs}
    if len(named) != len(request.inputs):
        ((twice, times),) = Counter(tensor.name for tensor in request.inputs).most_common(1)
        raise ProtocolError(f"input {twice!r:.60} already exists: it is there {times} times")
    try:
        ordered = [named[spec.name] for spec in specs]
    except KeyError:
        specs = [spec for spec in specs if spec.name in named or not spec.optional]
        if not specs or not all(spec.name in named for spec in specs):
            raise ProtocolError(_why_other_inputs(model, named)) from None
        ordered = [named[spec.name] for spec in specs]
    if len(named) != len(ordered):
        raise ProtocolError(_why_other_inputs(model, named))
    for spec, tensor in zip(specs, ordered, strict=True):
        if tensor.datatype != spec.datatype:
            raise ProtocolError(
                f"input {spec.name!r}: datatype is {tensor.datatype}, but the model takes {spec.datatype}"
            )
        if not tensor.shape or not (
            spec.admits(tensor.shape[1:]) or (spec is BODY and len(tensor.shape) == 1)
        ):
            raise ProtocolError(
                f"input {spec.name!r}: shape is {list(tensor.shape)}, but the model takes "
                f"{shown_shape(spec)}, of which the first is the batch"
            )
    return specs, ordered


def _why_other_inputs(model: OfferedModel, named: Mapping[str, InputTensor]) -> str:
    expected = [spec.name for spec in model.inputs]
    missing = [spec.name for spec in model.inputs if spec.name not in named and not spec.optional]
    unknown = [name for name in named if name not in expected]
    wrong = [f"lacks {', '.join(missing)}"] if missing else []
    if unknown:
        wrong.append(
            f"has {', '.join(f'{name:.40}' for name in unknown[:_NAMES_SHOWN])}, which it does not take"
        )
    given = ", ".join(f"{name:.40}" for name in list(named)[:_NAMES_SHOWN]) or "none"
    least = sum(not spec.optional for spec in model.inputs)
    number = f"{len(expected)} inputs"
    if least < len(expected):
        number = f"number of inputs between {least} and {len(expected)}"
    return (
        f"expected {number} but got {len(named)} inputs for model {model.name!r}: the request "
        f"{' and '.join(wrong)}. Got {given}; expected {shown(model.inputs)}"
    )


def _raw_input(model: OfferedModel, raw: memoryview) -> InputTensor:
    """The only input, of one row, from a body that is its data. At most one of its sizes may vary."""
    if len(model.inputs) != 1:
        raise ProtocolError(
            f"a raw request is for a model with one input; this one has {shown(model.inputs)}"
        )
    (spec,) = model.inputs
    if spec.datatype == "BYTES":
        if math.prod(spec.shape) != 1:
            raise ProtocolError(
                f"a raw request has one element of BYTES, but input {spec.name!r} has the shape "
                f"{list(spec.shape)}"
            )
        return InputTensor(spec.name, "BYTES", (1, *spec.shape), [bytes(raw)])
    if spec.shape.count(-1) > 1:
        raise ProtocolError(
            f"a raw request has no shape, and more than one size of input {spec.name!r} varies: "
            f"{list(spec.shape)}"
        )
    item_bytes = WIDTHS[spec.datatype] * math.prod([size for size in spec.shape if size != -1])
    varying = len(raw) // item_bytes if item_bytes else 0
    shape = tuple([varying if size == -1 else size for size in spec.shape])
    data = from_binary(raw, spec.datatype, math.prod(shape), f"raw request for input {spec.name!r}")
    return InputTensor(spec.name, spec.datatype, (1, *shape), data)


def _count_rows(model: OfferedModel, inputs: Sequence[InputTensor]) -> int:
    rows = inputs[0].shape[0]
    if rows > ROWS_MAX:
        raise ProtocolError(
            f"input {inputs[0].name!r}: shape {list(inputs[0].shape)} has {rows} rows, but a request for "
            f"{shown(model.inputs)} has at most {ROWS_MAX}"
        )
    for tensor in inputs:
        if tensor.shape[0] != rows:
            raise ProtocolError(
                f"input {tensor.name!r}: the batch has {tensor.shape[0]} rows, but that of "
                f"{inputs[0].name!r} has {rows}"
            )
    return rows


# --- bodies ------------------------------------------------------------------------------------------------


def _bodies(
    model: OfferedModel, specs: Sequence[TensorSpec], inputs: Sequence[InputTensor], rows: int
) -> tuple[str, Rows | list[bytes]]:
    """The content type and the bodies of the requests. `specs`: those of the inputs."""
    is_map = len(model.inputs) > 1
    if not model.declares_inputs:
        elements = inputs[0].data
        assert isinstance(elements, list)
        return _content_type(inputs[0]), elements
    if any(tensor.datatype == "BYTES" for tensor in inputs):
        return MSGPACK, _with_elements(specs, inputs, rows, is_map=is_map)
    pieces: _Pieces = []
    for tensor in inputs:
        before = b"" if not is_map else _name(tensor.name, 0 if pieces else len(inputs))
        row_bytes = WIDTHS[tensor.datatype] * math.prod(tensor.shape[1:])
        data = tensor.data
        assert not isinstance(data, list)
        pieces.append((before + _head(tensor.datatype, tensor.shape[1:]), data, row_bytes))
    return MSGPACK, _joined(pieces, rows)


def _joined(pieces: _Pieces, rows: int) -> Rows | list[bytes]:
    """Bodies, each of which has all pieces with its own row of their data."""
    head, data, width = pieces[0]
    if len(pieces) > 1:
        width = sum([len(before) + row_bytes for before, _, row_bytes in pieces]) - len(head)
        data = _interleaved(pieces, rows, width) if rows > 1 else b"".join(_alone(pieces))
    if width == 0 or rows == 0:
        return [head] * rows
    return Rows(head, data if isinstance(data, bytes | memoryview) else bytes(data), width)


def _alone(pieces: _Pieces) -> list[Buffer]:
    """What follows the head of the only row."""
    (_, first, _), *others = pieces
    return [first, *[part for before, data, _ in others for part in (before, data)]]


def _interleaved(pieces: _Pieces, rows: int, width: int) -> memoryview:
    """The rows of several tensors, side by side, with what stands between them."""
    matrix = np.empty((rows, width), np.uint8)
    at = 0
    for number, (before, data, row_bytes) in enumerate(pieces):
        if number:
            matrix[:, at : at + len(before)] = np.frombuffer(before, np.uint8)
            at += len(before)
        matrix[:, at : at + row_bytes] = np.frombuffer(data, np.uint8).reshape(rows, row_bytes)
        at += row_bytes
    return matrix.reshape(-1).data


@lru_cache(maxsize=1024)
def _head(datatype: str, shape: tuple[int, ...]) -> bytes:
    return tensor_head(datatype, shape, WIDTHS[datatype] * math.prod(shape))


@lru_cache(maxsize=1024)
def _name(name: str, names: int) -> bytes:
    """A name in a msgpack map; the first one with the head of the map, which tells the number of `names`."""
    packer = msgpack.Packer(autoreset=False)
    if names:
        packer.pack_map_header(names)
    packer.pack(name)
    return bytes(packer.bytes())


def _with_elements(
    specs: Sequence[TensorSpec], inputs: Sequence[InputTensor], rows: int, *, is_map: bool
) -> list[bytes]:
    """Bodies of inputs some of which are BYTES. `is_map`: they are maps, also of one."""
    tensors = {
        tensor.name: _row_tensors(tensor, spec, rows) for spec, tensor in zip(specs, inputs, strict=True)
    }
    if not is_map:
        return [msgpack.packb(tensor) for tensor in next(iter(tensors.values()))]
    names = list(tensors)
    return [
        msgpack.packb(dict(zip(names, of_row, strict=True))) for of_row in zip(*tensors.values(), strict=True)
    ]


def _row_tensors(tensor: InputTensor, spec: TensorSpec, rows: int) -> list[dict[str, Any]]:
    """The tensor of each row, as a map."""
    shape, data = list(tensor.shape[1:]), tensor.data
    values: Sequence[Any] = data
    width = math.prod(shape)
    if spec.text:
        assert isinstance(data, list)
        values = texts_of(data, f"input {tensor.name!r}", ", and the model takes texts")
    elif not isinstance(data, list):
        width *= WIDTHS[tensor.datatype]
    return [
        {"datatype": tensor.datatype, "shape": shape, "data": values[at * width : (at + 1) * width]}
        for at in range(rows)
    ]


def _content_type(tensor: InputTensor) -> str:
    """What the elements of BODY are: the parameter of the input, if it is a content type. Other programs have
    words of their own there, such as `str`."""
    given = tensor.parameters.get(_CONTENT_TYPE, "")
    if type(given) is not str or "/" not in given:
        return RAW
    usual = canonical(given)
    if not usual:
        raise ProtocolError(f"input {tensor.name!r}: content_type {given!r:.60} is none, such as image/png")
    return usual
