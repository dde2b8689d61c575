"""The results of a request's rows -> its response: JSON, followed by the binary data of those outputs that
are wanted so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgpack
import msgspec
import numpy as np

from carpool.errors import OK, InternalError, InvalidArgumentError, UnimplementedError, error_for
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.messages.results import Chunk
from carpool.model_settings import ModelKind
from carpool.parts import Buffer
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.content_types import is_value
from carpool.wire.tensors import (
    WIDTHS,
    TensorSpec,
    array_of,
    check_header,
    check_length,
    from_bytes,
    is_tensor,
    to_bytes,
)
from carpool_gateway.oip.elements import Data, to_binary, to_json
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import RESULT, VERSION, OfferedModel
from carpool_gateway.oip.plans import Plan, WantedOutput

CLASSIFIED_ELEMENTS_MAX: Final = 1_000_000


class RowResult(NamedTuple):
    """The result of one row, as it is in an envelope. `version`: that of the model, if it names one."""

    status: str
    content_type: str = ""
    body: Buffer = b""
    detail: str = ""
    version: str = ""


class OutputTensor(NamedTuple):
    """An output of a response. `shape` has the batch first."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data
    binary: bool


class Response(NamedTuple):
    """`header_length`: the value of the header HEADER_LENGTH; None: no byte is binary, and there is no such
    header. `parts`: the body, end to end."""

    parts: Sequence[Buffer]
    header_length: int | None

    @property
    def content_type(self) -> str:
        """JSON, or octet-stream if there is binary data."""
        return JSON if self.header_length is None else RAW


def join_results(model: OfferedModel, plan: Plan, results: Sequence[RowResult]) -> list[OutputTensor]:
    """The wanted outputs of all rows, whose results are in their order.

    Raises CarpoolError: of the first row that failed, its status; and if the rows cannot be one tensor.
    """
    for row, result in enumerate(results):
        if result.status != OK:
            raise error_for(
                result.status, f"row {row}: {result.detail}" if len(results) > 1 else result.detail
            )
    if model.kind is ModelKind.STEPPING and model.declares_outputs:
        results = [_only_response(model, result) for result in results]
    return _outputs_of(model, plan, results)


def _only_response(model: OfferedModel, result: RowResult) -> RowResult:
    """The outputs that a model which steps emitted, if it did so once: the result is all that it emitted, put
    end to end. Raises UnimplementedError."""
    value = msgpack.unpackb(result.body) if result.content_type == MSGPACK else None
    spec = model.outputs[0]
    if type(value) is list and len(value) == 1:  # of what cannot be put end to end
        return result._replace(body=msgpack.packb(value[0]))
    if isinstance(value, dict):
        is_one = not is_tensor(value) or spec.admits(value["shape"])
    else:
        is_one = type(value) in _KINDS_OF_PLAIN and not spec.shape
    if not is_one:
        raise UnimplementedError(
            f"the model {model.name!r} steps, and made none or several responses to this request, but infer "
            "has one: use generate_stream, or a stream of another protocol"
        )
    return result


def _outputs_of(model: OfferedModel, plan: Plan, results: Sequence[RowResult]) -> list[OutputTensor]:
    """The wanted outputs of rows that succeeded."""
    if model.declares_outputs:
        joined = _joined_alike(model, plan, results) or _joined(model, plan, results)
    else:
        elements = [_element(result, plan.is_chosen) for result in results]
        shape = (len(elements), *RESULT.shape)
        joined = [
            OutputTensor(RESULT.name, "BYTES", shape, elements, output.binary) for output in plan.outputs
        ]
    return [
        _classified(tensor, output.classes, output.spec.labels) if output.classes else tensor
        for tensor, output in zip(joined, plan.outputs, strict=True)
    ]


def responses_of_chunk(model: OfferedModel, plan: Plan, chunk: Chunk) -> list[list[OutputTensor]]:
    """The responses in a chunk: the wanted outputs of each value that the model emitted.

    Values that were merged, because they came faster than they were written, are divided again. Two kinds are
    not, which mean the same end to end: those of a model that declares no outputs, and those of an output
    whose first size varies, or which is a text without dimensions. Raises CarpoolError.
    """
    return [
        _outputs_of(model, plan, [RowResult(OK, chunk.content_type, body)])
        for body in _emitted_bodies(model, chunk)
    ]


def _emitted_bodies(model: OfferedModel, chunk: Chunk) -> Sequence[Buffer]:
    """The bodies of the values in a chunk."""
    if chunk.is_list:
        if chunk.content_type == JSON:
            return [json.dumps(value, separators=(",", ":")).encode() for value in json.loads(chunk.body)]
        return [msgpack.packb(value) for value in msgpack.unpackb(chunk.body, strict_map_key=False)]
    if chunk.merged == 1 or not model.declares_outputs or chunk.content_type != MSGPACK:
        return [chunk.body]
    (spec,) = model.outputs  # values of several outputs are not put end to end
    if not spec.shape or spec.shape[0] == -1:
        return [chunk.body]
    return _divided(msgpack.unpackb(chunk.body), chunk.merged)


def _divided(tensor: Mapping[str, Any], count: int) -> list[bytes]:
    """A tensor that was put end to end of `count` ones of equal size, as these."""
    data, (first, *others) = tensor["data"], tensor["shape"]
    width = len(data) // count
    return [
        msgpack.packb(
            {
                "datatype": tensor["datatype"],
                "shape": [first // count, *others],
                "data": data[at * width : (at + 1) * width],
            }
        )
        for at in range(count)
    ]


def encode_response(
    model_name: str, request_id: str, outputs: Sequence[OutputTensor], model_version: str = VERSION
) -> Response:
    """The response with these outputs, in their order. `request_id`: empty: none was sent.

    Raises ProtocolError for an output that cannot be written in JSON.
    """
    written: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for name, datatype, shape, data, is_binary in outputs:
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if is_binary:
            part = to_binary(data)
            output["parameters"] = {"binary_data_size": len(part)}
            if len(part):
                binary.append(part)
        else:
            output["data"] = msgspec.Raw(to_json(data, datatype, f"output {name!r}"))
        written.append(output)
    response: dict[str, Any] = {"id": request_id} if request_id else {}
    response |= {"model_name": model_name, "model_version": model_version, "outputs": written}
    header = msgspec.json.encode(response)
    return Response([header, *binary], len(header) if binary else None)


def _joined_alike(model: OfferedModel, plan: Plan, results: Sequence[RowResult]) -> list[OutputTensor] | None:
    """The only output, of several rows, if it is numbers and the results differ in these alone: then only the
    first of them is decoded. Else None."""
    if len(results) < 2 or len(model.outputs) > 1 or not plan.outputs:
        return None
    first, ((spec, binary, _),) = results[0], plan.outputs
    tensor = _tensors_of(model, first)[spec.name]
    datatype, shape = _header(spec, tensor)
    size, data = len(first.body), tensor["data"]
    head = bytes(first.body[: size - len(data)])
    if datatype == "BYTES" or not data or first.body[len(head) :] != data:
        return None
    for result in results:
        if len(result.body) != size or result.body[: len(head)] != head or result.content_type != MSGPACK:
            return None
    joined = b"".join([result.body[len(head) :] for result in results])
    return [OutputTensor(spec.name, datatype, (len(results), *shape), joined, binary)]


def _tensors_of(model: OfferedModel, result: RowResult) -> Mapping[str, Any]:
    """The tensors of one result, as maps, by name."""
    if result.content_type != MSGPACK:
        raise InternalError(f"the result is {result.content_type}, but the model declares outputs")
    try:
        value = msgpack.unpackb(result.body)
    except ValueError:
        raise InternalError("the result is not msgpack") from None
    specs = {spec.name: spec for spec in model.outputs}
    if len(specs) == 1 and (type(value) is not dict or is_tensor(value)):
        value = {model.outputs[0].name: value}
    if type(value) is not dict or value.keys() != specs.keys():
        raise InternalError("the result has not the outputs that the model declares: was the model replaced?")
    return {name: _as_tensor(of_one, specs[name]) for name, of_one in value.items()}


def _as_tensor(value: Any, spec: TensorSpec) -> Any:
    """A tensor's map; also of a plain number, text or bytes, as which one without dimensions may be
    written."""
    if spec.shape or type(value) not in _KINDS_OF_PLAIN:
        return value
    if type(value) in (str, bytes):
        return {"datatype": "BYTES", "shape": [], "data": [value]}
    try:
        data = to_bytes(array_of(value, spec.datatype), spec.datatype)
    except (InvalidArgumentError, LookupError):
        return value
    return {"datatype": spec.datatype, "shape": [], "data": data}


_KINDS_OF_PLAIN: Final = frozenset({bool, int, float, str, bytes})


def _joined(model: OfferedModel, plan: Plan, results: Sequence[RowResult]) -> list[OutputTensor]:
    tensors = [_tensors_of(model, result) for result in results]
    return [_join(output, [of_row[output.spec.name] for of_row in tensors]) for output in plan.outputs]


def _join(output: WantedOutput, tensors: Sequence[Mapping[str, Any]]) -> OutputTensor:
    """One tensor of those of all rows."""
    spec = output.spec
    if not tensors:
        shape = (0, *[max(0, size) for size in spec.shape])
        return OutputTensor(
            spec.name, spec.datatype, shape, [] if spec.datatype == "BYTES" else b"", output.binary
        )
    headers = [_header(spec, tensor) for tensor in tensors]
    datatype, shape = headers[0]
    if any(header != headers[0] for header in headers):
        row = next(row for row, header in enumerate(headers) if header != headers[0])
        raise ProtocolError(
            f"output {spec.name!r} has the shape {list(shape)} for row 0 and {list(headers[row][1])} for row "
            f"{row}, which are no batch: send each row in a request of its own"
        )
    data: Data
    if datatype == "BYTES":
        data = [_bytes_of(text) for tensor in tensors for text in tensor["data"]]
    else:
        data = tensors[0]["data"] if len(tensors) == 1 else b"".join([tensor["data"] for tensor in tensors])
    return OutputTensor(spec.name, datatype, (len(tensors), *shape), data, output.binary)


def _header(spec: TensorSpec, tensor: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The datatype and shape of an output of one row, whose data is what they take. Raises InternalError."""
    data = tensor["data"] if is_tensor(tensor) else None
    try:
        datatype, shape = check_header(tensor, spec.name)
        if datatype != "BYTES":
            check_length(datatype, shape, len(data) if isinstance(data, bytes) else -1, spec.name)
        is_declared = datatype == spec.datatype and spec.admits(shape)
    except (InvalidArgumentError, LookupError, TypeError):
        is_declared = False
    if not is_declared or (spec.datatype == "BYTES" and type(data) is not list):
        raise InternalError(f"output {spec.name!r} is not what the model declares: was the model replaced?")
    return datatype, shape


def _bytes_of(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _element(result: RowResult, is_chosen: bool) -> bytes:
    """What a result is as an element of BYTES: bytes and texts are themselves, and other values are JSON. If
    the client chose the content type, its bytes."""
    body = bytes(result.body)
    if is_chosen or not is_value(result.content_type):
        return body
    if result.content_type == JSON:
        if body[:1] != b'"':
            return body
        with suppress(msgspec.DecodeError):  # what it refuses is decoded below, which says why
            return _TEXT.decode(body).encode()
    value = decode_result(result.content_type, body)
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else encode_body(JSON, value)


_TEXT: Final = msgspec.json.Decoder(str)


def _classified(tensor: OutputTensor, classes: int, labels: Sequence[str]) -> OutputTensor:
    """The largest elements of each row, as texts: the value, its index, and its label if it has one, with
    colons between them.

    Among equal ones the lower index is first. Floats have six digits after the point; NaN is last.
    """
    rows = tensor.shape[0]
    assert not isinstance(tensor.data, list)
    size = len(tensor.data) // WIDTHS[tensor.datatype]
    if size > CLASSIFIED_ELEMENTS_MAX:
        raise ProtocolError(
            f"output {tensor.name!r}: has {size} elements, and a classification is of at most "
            f"{CLASSIFIED_ELEMENTS_MAX}"
        )
    width = size // rows if rows else 0
    values = from_bytes(tensor.datatype, (rows, width), tensor.data)
    is_float = values.dtype.kind == "f"
    ranks = np.where(np.isnan(values), -np.inf, values) if is_float else values
    # Sorted upwards from behind and turned round: so equal elements keep their order.
    order = width - 1 - np.argsort(ranks[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :classes]
    texts = [
        (b"%f:%d%b" if is_float else b"%d:%d%b") % (values[row, index], index, _label(labels, index))
        for row in range(rows)
        for index in order[row].tolist()
    ]
    return tensor._replace(datatype="BYTES", shape=(rows, min(classes, width)), data=texts)


def _label(labels: Sequence[str], index: int) -> bytes:
    """The end of a class's text; empty if it has no label."""
    label = labels[index] if index < len(labels) else ""
    return b":" + label.encode() if label else b""
