"""Outputs, errors and documents -> messages, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from carpool.errors import InvalidArgumentError
from carpool.parts import Buffer
from carpool.wire.tensors import from_bytes
from carpool_gateway.oip.elements import Data, to_binary
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.responses import OutputTensor, Response
from carpool_gateway.rpc.messages import CONTENTS, INFERENCE

_FINAL_RESPONSE: Final = "triton_final_response"
_Response: Final = INFERENCE["ModelInferResponse"]
_StreamResponse: Final = INFERENCE["ModelStreamInferResponse"]
_ID, _RAW = b"\x1a", b"\x32"  # how the fields 3 and 6 of a ModelInferResponse begin
_INFER_RESPONSE: Final = b"\x12"  # and the field 2 of a ModelStreamInferResponse


def encode_response(
    model_name: str, request_id: str, outputs: Sequence[OutputTensor], model_version: str
) -> Response:
    """The response with these outputs, in their order, as oip's `encode_response` makes one: its parts are a
    ModelInferResponse. Raises ProtocolError for an output that has no `contents`."""
    message = _Response(model_name=model_name, model_version=model_version, id=request_id)
    raw: list[Buffer] = []
    for name, datatype, shape, data, is_binary in outputs:
        output = message.outputs.add(name=name, datatype=datatype, shape=shape)
        if is_binary:
            raw.append(to_binary(data))
        else:
            _fill(output.contents, datatype, shape, data, f"output {name!r}")
    before: bytes = message.SerializeToString()
    parts: list[Buffer] = []
    for part in raw:
        parts += [before + _RAW + _varint(len(part)), part]
        before = b""
    return Response(parts or [before], None)


def _fill(contents: Any, datatype: str, shape: Sequence[int], data: Data, of: str) -> None:
    field = CONTENTS.get(datatype)
    if field is None:
        raise ProtocolError(f"{of}: {datatype} has no contents: leave binary_data_output out")
    elements = data if isinstance(data, list) else from_bytes(datatype, shape, data).reshape(-1).tolist()
    getattr(contents, field).extend(elements)


def with_id(response: Response, request_id: bytes) -> bytes:
    """The message of a response, with the ID of its request."""
    parts = response.parts
    if request_id:
        return b"".join([*parts, _ID, _varint(len(request_id)), request_id])
    return b"".join(parts)


def _final_response(*, is_final: bool) -> bytes:
    message = _Response()
    message.parameters[_FINAL_RESPONSE].bool_param = is_final
    return bytes(message.SerializeToString())


_FINAL, _NOT_FINAL = _final_response(is_final=True), _final_response(is_final=False)


def of_stream(response: bytes, *, is_final: bool) -> bytes:
    """A message on a stream, with a response, and whether that is the last one to its request."""
    end = _FINAL if is_final else _NOT_FINAL
    return b"".join([_INFER_RESPONSE, _varint(len(response) + len(end)), response, end])


def empty_final(model_name: str, model_version: str, request_id: bytes) -> bytes:
    """A message on a stream that tells the end of the responses to a request, and has no outputs."""
    return of_stream(with_id(encode_response(model_name, "", (), model_version), request_id), is_final=True)


def error_on_stream(detail: str, request_id: bytes) -> bytes:
    """A message on a stream that answers a request with an error."""
    message = _StreamResponse(error_message=detail or "the request failed")
    message.infer_response.id = request_id.decode()
    return bytes(message.SerializeToString())


def document(name: str, text: bytes, *, wrapped_in: str = "") -> bytes:
    """A document of the protocol, in JSON, as a message of this name. `wrapped_in`: it is the value of this
    field. Fields that the message does not have are left out."""
    if wrapped_in:
        text = b'{"%b":%b}' % (wrapped_in.encode(), text)
    return bytes(json_format.Parse(text, INFERENCE[name](), ignore_unknown_fields=True).SerializeToString())


def decoded(name: str, message: bytes) -> Any:
    """The message of this name in what a client sent. Raises InvalidArgumentError."""
    try:
        return INFERENCE[name].FromString(message)
    except DecodeError:
        raise InvalidArgumentError(f"the message is no {name}") from None


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL: Final = [bytes((value,)) for value in range(128)]
