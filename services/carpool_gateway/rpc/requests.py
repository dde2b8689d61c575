"""The message of an infer request -> its parts, checked as far as possible without knowing the model.

Protobuf parses only what is small: the raw data of inputs stays where it is in the message. What is left when
that and the ID are taken out is the same in all requests that differ in their numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from carpool.rows import Rows
from carpool_gateway.oip.elements import OBJECTS_MAX, Data, check_texts, from_binary, from_list
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import plan
from carpool_gateway.oip.prepared import KeptRequests, Prepared, is_one_of_numbers
from carpool_gateway.oip.requests import (
    InferRequest,
    InputTensor,
    RequestedOutput,
    Scalar,
    called,
    check_sizes,
    count_elements,
    request_of,
    requested_output,
    wants_binary_output,
)
from carpool_gateway.rpc.messages import CONTENTS, INFERENCE
from carpool_gateway.rpc.responses import encode_response

FINAL_RESPONSE_WANTED: Final = "triton_enable_empty_final_response"
_Request: Final = INFERENCE["ModelInferRequest"]
_KEPT_BYTES_MAX: Final = 1024  # of a request that is kept, without its numbers
_LARGE_FIELDS_BYTES: Final = 64 * 1024  # of numbers in `contents`: reading them takes some milliseconds
_LARGE_TEXTS_BYTES: Final = 256 * 1024  # of raw data that may be BYTES
# A field of a message begins with its number and how it is written: 2: with its length.
_LENGTH_DELIMITED: Final = 2
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW = (number << 3 | _LENGTH_DELIMITED for number in (1, 2, 3, 7))
_TEXTS: Final = frozenset((_MODEL_NAME, _MODEL_VERSION, _ID))
_FIXED_BYTES: Final = {1: 8, 5: 4}


class SplitRequest(NamedTuple):
    """A message whose fields are told apart. `rest`: all but the ID and the raw data, also a message."""

    model_name: str
    model_version: str
    id: bytes
    raw: Sequence[memoryview]
    rest: bytes

    @property
    def is_large(self) -> bool:
        """Whether reading it takes long."""
        if len(self.rest) > _LARGE_FIELDS_BYTES:
            return True
        return any(len(raw) > _LARGE_TEXTS_BYTES for raw in self.raw) and b"BYTES" in self.rest


def split(message: bytes) -> SplitRequest:
    """Tell the fields of a ModelInferRequest apart. Raises ProtocolError if it is none."""
    texts: dict[int, bytes] = {}
    raw: list[memoryview] = []
    view, rest, rest_start, rest_end = memoryview(message), b"", 0, 0
    try:
        for tag, start, begin, end in _fields(message):
            if tag == _RAW:
                raw.append(view[begin:end])
                continue
            if tag in _TEXTS:
                texts[tag] = message[begin:end]
                if tag == _ID:
                    continue
            if start != rest_end:
                rest, rest_start = rest + message[rest_start:rest_end], start
            rest_end = end
        name, version = texts.get(_MODEL_NAME, b"").decode(), texts.get(_MODEL_VERSION, b"").decode()
        request_id = texts.get(_ID, b"")
        request_id.decode()
    except IndexError:
        raise _malformed("it ends within a field") from None
    except UnicodeDecodeError:
        raise _malformed("model_name, model_version or id is not UTF-8") from None
    return SplitRequest(name, version, request_id, raw, rest + message[rest_start:rest_end])


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Each field: how it begins, where, and from where to where its content is. Raises IndexError if that is
    not all there, and ProtocolError."""
    at, size = 0, len(message)
    while at < size:
        start = at
        tag, at = message[at], at + 1
        if tag >= 128:
            tag, at = _varint(message, start)
        if tag & 7 == _LENGTH_DELIMITED:
            length, at = message[at], at + 1
            if length >= 128:
                length, at = _varint(message, at - 1)
            begin, at = at, at + length
        else:
            begin, at = at, _end_of_number(message, at, tag & 7)
        if at > size:
            raise IndexError
        yield tag, start, begin, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise _malformed("a number has more than ten bytes")


def _end_of_number(message: bytes, at: int, kind: int) -> int:
    if kind == 0:
        return _varint(message, at)[1]
    if kind in _FIXED_BYTES:
        return at + _FIXED_BYTES[kind]
    raise _malformed(f"a field is written in the way {kind}, which there is not")


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(f"the message is no ModelInferRequest: {why}")


class MessagePreparer:
    """Prepares requests."""

    def __init__(self) -> None:
        self._kept = KeptRequests()

    def prepare(self, model: OfferedModel, request: SplitRequest) -> tuple[Prepared, Rows | list[bytes]]:
        """A request, and the bodies of its rows. Its ID is left out. Raises ProtocolError."""
        if len(request.raw) != 1 or len(request.rest) > _KEPT_BYTES_MAX:
            return _fresh(model, request)
        numbers = request.raw[0]
        key = (model.name, request.rest, len(numbers))
        prepared = self._kept.get(key)
        if prepared is not None and prepared.model is model:
            return prepared, prepared.bodies_of(numbers)
        prepared, bodies = _fresh(model, request)
        if is_one_of_numbers(prepared.request.inputs):
            self._kept.add(key, prepared)
        return prepared, bodies


def _fresh(model: OfferedModel, request: SplitRequest) -> tuple[Prepared, Rows | list[bytes]]:
    decoded, _ = decode_request(request)
    planned = plan(model, decoded)
    return Prepared(model, decoded, planned, encode_response), planned.bodies


def decode_request(split_request: SplitRequest) -> tuple[InferRequest, bool]:
    """An infer request without its ID, and whether its client wants an empty response at the end of a stream.
    Raises ProtocolError. Numbers of raw data are views of the message."""
    try:
        message = _Request.FromString(split_request.rest)
    except DecodeError:
        raise _malformed("protobuf cannot parse it") from None
    check_sizes(message.inputs, message.outputs, message.parameters)
    parameters = _parameters(message.parameters, "")
    wants_final = parameters.pop(FINAL_RESPONSE_WANTED, False)
    if type(wants_final) is not bool:
        raise ProtocolError(f"parameter {FINAL_RESPONSE_WANTED}: must be true or false")
    if type(number := parameters.get("sequence_id")) is int and number < 0:
        parameters["sequence_id"] = number + (
            1 << 64
        )  # clients in C++ write 64 bits without a sign as an int64
    inputs = _inputs(message.inputs, split_request.raw)
    binary_output = wants_binary_output(parameters, default=True)
    outputs = None
    if len(message.outputs):
        outputs = tuple([_output(output, binary_output) for output in message.outputs])
        if len({output.binary for output in outputs}) > 1:
            raise ProtocolError(
                "outputs: some are wanted as binary_data and some not, but a message has all of them in "
                "raw_output_contents, or all in contents"
            )
    decoded = request_of("", inputs, parameters, outputs, binary_output=binary_output)
    return decoded, wants_final


def _output(output: Any, binary_output: bool) -> RequestedOutput:
    return requested_output(
        output.name, _parameters(output.parameters, f"output {output.name!r:.60}"), binary_output
    )


def _parameters(written: Any, of: str) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name in written:
        value = written[name]
        which = value.WhichOneof("choice")
        if which is None:
            raise ProtocolError(f"{of + ': ' if of else ''}parameter {name!r:.60}: has no value")
        found[name] = getattr(value, which)
    return found


def _inputs(written: Any, raw: Sequence[memoryview]) -> tuple[InputTensor, ...]:
    if raw and len(raw) != len(written):
        raise ProtocolError(
            f"raw_input_contents: there are {len(raw)}, but {len(written)} inputs: each has its own, in "
            "their order, or none has any"
        )
    inputs: list[InputTensor] = []
    texts = numbers = 0
    for at, tensor in enumerate(written):
        name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
        of = called(name)
        count = count_elements(datatype, shape, of)
        if datatype == "BYTES":
            texts += count
            check_texts(texts)
        parameters = _parameters(tensor.parameters, of) if len(tensor.parameters) else {}
        if "shared_memory_region" in parameters:
            raise ProtocolError(f"{of}: shared memory is not offered: send raw_input_contents")
        if not raw:
            numbers += _count_contents(tensor, datatype, of)
            if numbers > OBJECTS_MAX:
                raise TooLargeError(
                    f"the inputs have more than {OBJECTS_MAX} elements in contents: send raw_input_contents"
                )
            data = _from_contents(tensor, datatype, count, of)
        elif tensor.HasField("contents") and tensor.contents.ByteSize():
            raise ProtocolError(
                f"{of}: has contents, and the request has raw_input_contents: send one of them"
            )
        else:
            data = from_binary(raw[at], datatype, count, of)
        inputs.append(InputTensor(name, datatype, tuple(shape), data, parameters))
    return tuple(inputs)


def _count_contents(tensor: Any, datatype: str, of: str) -> int:
    """How many elements are in the contents of an input. Raises ProtocolError unless they are where those of
    its datatype are."""
    field = CONTENTS.get(datatype)
    if field is None:
        raise ProtocolError(f"{of}: {datatype} has no contents: send it in raw_input_contents")
    for found, _ in tensor.contents.ListFields():
        if found.name != field:
            raise ProtocolError(f"{of}: {datatype} is in {field}, but the request has {found.name}")
    return len(getattr(tensor.contents, field))


def _from_contents(tensor: Any, datatype: str, count: int, of: str) -> Data:
    """The elements of an input as protobuf has them, exact or refused."""
    elements = list(getattr(tensor.contents, CONTENTS[datatype]))
    if datatype != "BYTES":
        return from_list(elements, datatype, count, of)
    if len(elements) != count:
        raise ProtocolError(f"{of}: has {len(elements)} elements of BYTES, but its shape has {count}")
    return elements
