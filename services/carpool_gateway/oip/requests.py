"""The body of an infer request -> its parts, checked as far as that can be done without knowing the model.

A body is JSON, followed by the binary data of those inputs that have none in JSON; a header of the request
tells how many bytes are JSON. If that is 0, the whole body is the data of the model's only input. The content
type decides nothing: programs send JSON with any, and with none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sized
from typing import Any, Final, NamedTuple

import msgspec

from carpool.keys import CORRELATION_ID
from carpool.messages.requests import PRIORITY_LEVELS
from carpool.wire.tensors import DATATYPES, MAX_DIMENSIONS, MAX_ITEMS
from carpool_gateway.oip.elements import Data, check_json, check_texts, from_binary, from_json, from_list
from carpool_gateway.oip.errors import ProtocolError, TooLargeError
from carpool_gateway.oip.json_text import check_names, parse

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

NAMES_MAX: Final = 1000  # of inputs, of outputs and of parameters

Scalar = bool | int | float | str

_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_SEQUENCE_ID_MAX: Final = (1 << 64) - 1
_TIMEOUT_US_MAX: Final = (1 << 63) - 1
_RESERVED: Final = frozenset(
    {"binary_data_output", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)
NO_PARAMETERS: Final[Mapping[str, Scalar]] = {}


class InputTensor(NamedTuple):
    """An input as it was sent. `shape` has the batch first; `data` is what that takes of `datatype`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data
    parameters: Mapping[str, Scalar] = NO_PARAMETERS


class RequestedOutput(NamedTuple):
    """An output that is wanted: as binary data or in JSON, and of how many classes; 0: the tensor itself."""

    name: str
    binary: bool
    classes: int = 0


class InferRequest(NamedTuple):
    """What a client asks of a model.

    `id`: to be sent back; empty: none. `outputs`: those that are wanted; None: all, as binary data if
    `binary_output`. `raw`: instead of inputs, the data of the only one. `priority`: 0 to 9, higher first, as
    Carpool has it; None: the default. `parameters`: those that the protocol does not define, for the model.
    """

    id: str = ""
    inputs: tuple[InputTensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] | None = None
    binary_output: bool = False
    raw: memoryview | None = None
    sequence_id: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int | None = None
    timeout_us: int | None = None
    parameters: Mapping[str, Scalar] = NO_PARAMETERS


def decode_request(body: bytes, header_length: bytes | None = None) -> InferRequest:
    """An infer request. `header_length`: the value of the header HEADER_LENGTH; None: all of the body is
    JSON.

    Raises ProtocolError. Numbers of binary data are views of `body`, not copied.
    """
    json_bytes = _json_bytes(header_length, len(body))
    if json_bytes == 0 and header_length is not None:
        return InferRequest(binary_output=True, raw=memoryview(body))
    text = body if json_bytes == len(body) else body[:json_bytes]
    check_json(text)
    written = _read(text)
    check_sizes(written.inputs, written.outputs or (), written.parameters or ())
    inputs = _inputs(written, memoryview(body)[json_bytes:])
    parameters = written.parameters or NO_PARAMETERS
    binary_output = wants_binary_output(parameters)
    outputs = None
    if written.outputs:
        outputs = tuple(
            [
                requested_output(output.name, output.parameters or NO_PARAMETERS, binary_output)
                for output in written.outputs
            ]
        )
    return request_of(written.id or "", inputs, parameters, outputs, binary_output=binary_output)


def request_of(
    request_id: str,
    inputs: tuple[InputTensor, ...],
    parameters: Mapping[str, Scalar],
    outputs: tuple[RequestedOutput, ...] | None = None,
    *,
    binary_output: bool = False,
) -> InferRequest:
    """A request with these parameters, some of which the protocol defines. Raises ProtocolError."""
    if not parameters:
        return InferRequest(request_id, inputs, outputs, binary_output)
    return InferRequest(
        request_id,
        inputs,
        outputs,
        binary_output,
        None,
        *_sequence(parameters),
        _priority(parameters),
        _whole_number(parameters, "timeout", _TIMEOUT_US_MAX) or None,
        {name: value for name, value in parameters.items() if name not in _RESERVED},
    )


def check_sizes(inputs: Sized, outputs: Sized, parameters: Sized) -> None:
    """Raise TooLargeError if there are more names than can be read without holding up others."""
    for name, given in (("inputs", inputs), ("outputs", outputs), ("parameters", parameters)):
        if len(given) > NAMES_MAX:
            raise TooLargeError(f"{name}: the request has {len(given)}, and may have {NAMES_MAX}")


def _json_bytes(header_length: bytes | None, body_bytes: int) -> int:
    """How many bytes of the body are JSON."""
    if header_length is None:
        return body_bytes
    if not _LENGTH.fullmatch(header_length) or int(header_length) > body_bytes:
        shown = header_length.decode("ascii", "backslashreplace")
        raise ProtocolError(
            f"{HEADER_LENGTH}: {shown!r:.40} must be a number of bytes, at most the {body_bytes} of the body"
        )
    return int(header_length)


# --- JSON -> what is written -------------------------------------------------------------------------------


class _Input(msgspec.Struct):
    """An input as it is written: `data` is its JSON; empty if it has none."""

    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Scalar] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Scalar] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: dict[str, Scalar] | None = None


class _ParsedInput(NamedTuple):
    """As _Input, but `data` was parsed; None if it has none."""

    name: str
    datatype: str
    shape: list[int]
    data: Any
    parameters: dict[str, Scalar] | None


class _ParsedRequest(NamedTuple):
    """As _Request."""

    inputs: list[_ParsedInput]
    id: str | None
    outputs: list[_Output] | None
    parameters: dict[str, Scalar] | None


_DECODER: Final = msgspec.json.Decoder(_Request)


def _read(text: bytes) -> _Request | _ParsedRequest:
    """What is written. What msgspec refuses is read again by `_checked`, which knows NaN and says what is
    wrong."""
    try:
        written = _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _checked(parse(text))
    check_names(text, _count_names(written), [bytes(of.data) for of in written.inputs])
    return written


def _count_names(written: _Request) -> int:
    """The names in maps of a request, without those of values that are null or unknown."""
    names = 1 + (written.id is not None)
    for of_input in written.inputs:
        names += 3 + (len(memoryview(of_input.data)) > 0) + _count_parameters(of_input.parameters)
    if written.outputs is not None:
        names += 1
        for output in written.outputs:
            names += 1 + _count_parameters(output.parameters)
    return names + _count_parameters(written.parameters)


def _count_parameters(parameters: Mapping[str, Scalar] | None) -> int:
    return 0 if parameters is None else 1 + len(parameters)


def _checked(value: Any) -> _ParsedRequest:
    """A parsed JSON text as a request. Raises ProtocolError, which names what is missing or has another
    type."""
    request = _object(value, "the request")
    inputs = [
        _checked_input(item, f"inputs[{index}]")
        for index, item in enumerate(_list(request, "inputs", "the request"))
    ]
    outputs = None
    if request.get("outputs") is not None:
        outputs = []
        for index, item in enumerate(_list(request, "outputs", "the request")):
            of = f"outputs[{index}]"
            output = _object(item, of)
            outputs.append(_Output(_text(output, "name", of), _parameters(output, of)))
    name = None if request.get("id") is None else _text(request, "id", "the request")
    return _ParsedRequest(inputs, name, outputs, _parameters(request, "the request"))


def _checked_input(value: Any, of: str) -> _ParsedInput:
    tensor = _object(value, of)
    name, datatype = _text(tensor, "name", of), _text(tensor, "datatype", of)
    shape = _list(tensor, "shape", of)
    if any(type(size) is not int for size in shape):
        raise ProtocolError(f"{called(name)}: shape must be a list of whole numbers")
    data = tensor.get("data", _NO_DATA)
    return _ParsedInput(name, datatype, shape, data, _parameters(tensor, called(name)))


_NO_DATA: Final = object()


def _object(value: Any, of: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ProtocolError(f"{of}: must be a JSON object")
    return value


def _text(fields: Mapping[str, Any], name: str, of: str) -> str:
    value = fields.get(name)
    if type(value) is not str:
        raise ProtocolError(f"{of}: {name} {'is missing' if name not in fields else 'must be a text'}")
    return value


def _list(fields: Mapping[str, Any], name: str, of: str) -> list[Any]:
    value = fields.get(name)
    if type(value) is not list:
        raise ProtocolError(f"{of}: {name} {'is missing' if name not in fields else 'must be a list'}")
    return value


def _parameters(fields: Mapping[str, Any], of: str) -> dict[str, Scalar] | None:
    value = fields.get("parameters")
    if value is None:
        return None
    for name, item in _object(value, f"{of}: parameters").items():
        if type(item) not in (bool, int, float, str):
            raise ProtocolError(f"{of}: parameter {name!r:.60} must be a text, a number, true or false")
    return dict(value)


# --- what is written -> a request --------------------------------------------------------------------------


def called(name: str) -> str:
    """What an input is called in errors."""
    return f"input {name!r:.60}"


def _inputs(written: _Request | _ParsedRequest, binary: memoryview) -> tuple[InputTensor, ...]:
    inputs: list[InputTensor] = []
    at = texts = 0
    for of_input in written.inputs:
        of = called(of_input.name)
        count = count_elements(of_input.datatype, of_input.shape, of)
        if of_input.datatype == "BYTES":
            texts += count
            check_texts(texts)
        parameters = of_input.parameters or NO_PARAMETERS
        size = parameters.get("binary_data_size")
        if "shared_memory_region" in parameters:
            raise ProtocolError(f"{of}: shared memory is not offered: send data, or binary data")
        if _has_data(of_input) == (size is not None):
            which = "both" if size is not None else "neither"
            raise ProtocolError(f"{of}: needs data or the parameter binary_data_size, and has {which}")
        if size is None:
            data = _from_json(of_input, count, of)
        elif type(size) is not int or not 0 <= size <= len(binary) - at:
            raise ProtocolError(
                f"{of}: binary_data_size {size!r:.40} must be a number of bytes, and {len(binary) - at} of "
                "binary data are left"
            )
        else:
            data = from_binary(binary[at : at + size], of_input.datatype, count, of)
            at += size
        inputs.append(InputTensor(of_input.name, of_input.datatype, tuple(of_input.shape), data, parameters))
    if at != len(binary):
        raise ProtocolError(f"{len(binary) - at} bytes of binary data are left after those of all inputs")
    return tuple(inputs)


_ALL_DATATYPES: Final = ", ".join(sorted(DATATYPES))


def _has_data(of_input: _Input | _ParsedInput) -> bool:
    if isinstance(of_input, _Input):
        return len(memoryview(of_input.data)) > 0
    return of_input.data is not _NO_DATA


def _from_json(of_input: _Input | _ParsedInput, count: int, of: str) -> Data:
    if isinstance(of_input, _Input):
        return from_json(bytes(of_input.data), of_input.datatype, count, of)
    return from_list(of_input.data, of_input.datatype, count, of)


def count_elements(datatype: str, shape: list[int], of: str) -> int:
    """The number of elements of a shape. Raises ProtocolError for one that no tensor can have, and for an
    unknown datatype."""
    if datatype not in DATATYPES:
        raise ProtocolError(f"{of}: datatype {datatype!r:.40} is not one of {_ALL_DATATYPES}")
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"{of}: shape has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are possible")
    if min(shape, default=0) < 0:
        raise ProtocolError(f"{of}: shape {_shown(shape)} has a negative size")
    count = math.prod(shape)
    # Also of an empty tensor, which needs no data that would have to be there.
    if count > MAX_ITEMS or (count == 0 and math.prod(filter(None, shape)) > MAX_ITEMS):
        raise ProtocolError(f"{of}: shape {_shown(shape)} has more than {MAX_ITEMS} elements")
    return count


def _shown(shape: list[int]) -> str:
    """A shape, with no more digits of a size than needed to see that it is too large."""
    return "[" + ", ".join("..." if abs(size) > 1 << 64 else str(size) for size in shape) + "]"


def wants_binary_output(parameters: Mapping[str, Scalar], *, default: bool = False) -> bool:
    """Whether outputs are binary data that do not say it themselves. Raises ProtocolError."""
    return _flag(parameters, "binary_data_output", default=default)


def requested_output(name: str, parameters: Mapping[str, Scalar], binary_output: bool) -> RequestedOutput:
    """An output with its parameters. Raises ProtocolError."""
    of = f"output {name!r:.60}"
    if "shared_memory_region" in parameters:
        raise ProtocolError(f"{of}: shared memory is not offered")
    binary = _flag(parameters, "binary_data", of, default=binary_output)
    classes = _whole_number(parameters, "classification", MAX_ITEMS, of)
    if "classification" in parameters and classes == 0:
        raise ProtocolError(f"{of}: classification must be 1 or more")
    return RequestedOutput(name, binary, classes)


def _flag(parameters: Mapping[str, Scalar], name: str, of: str = "", *, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise _wrong(of, name, value, "true or false")
    return value


def _whole_number(parameters: Mapping[str, Scalar], name: str, highest: int, of: str = "") -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= highest:
        raise _wrong(of, name, value, f"a whole number from 0 to {highest}")
    return value


def _wrong(of: str, name: str, value: Scalar, valid: str) -> ProtocolError:
    shown = f"{value!r:.40}" if type(value) is not int or abs(value) < 1 << 128 else "a huge number"
    return ProtocolError(f"{of + ': ' if of else ''}parameter {name}: {shown} must be {valid}")


def _sequence(parameters: Mapping[str, Scalar]) -> tuple[str, bool, bool]:
    """The sequence of a request, empty if it has none, and whether it is the first and the last one of it.
    Also refuses parameters that only a server may set."""
    for name in parameters:
        if name == "headers" or name.startswith("triton_"):
            raise ProtocolError(f"parameter {name!r:.60}: is reserved")
    starts, ends = _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")
    sequence_id = parameters.get("sequence_id", 0)
    if type(sequence_id) is int and 0 <= sequence_id <= _SEQUENCE_ID_MAX:
        sequence_id = str(sequence_id) if sequence_id else ""
    elif type(sequence_id) is not str or (sequence_id and not CORRELATION_ID.fullmatch(sequence_id)):
        raise _wrong(
            "",
            "sequence_id",
            sequence_id,
            "a whole number of 64 bits, or 1 to 128 characters: letters, digits, '.', '_', ':', '-'",
        )
    if not sequence_id and (starts or ends):
        raise ProtocolError("parameters sequence_start and sequence_end: only together with a sequence_id")
    return sequence_id, starts, ends


def _priority(parameters: Mapping[str, Scalar]) -> int | None:
    """The priority as Carpool has it, where higher is earlier: 1, the highest, is 9."""
    priority = _whole_number(parameters, "priority", PRIORITY_LEVELS)
    return PRIORITY_LEVELS - priority if priority else None
