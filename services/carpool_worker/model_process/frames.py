"""What crosses the boundary between a worker and its model process, used on both sides.

A worker first sends what the model is loaded with (`configuration`), and the model process the result of
loading: Ready or LoadFailed. Then each frame that the worker sends is answered by one outcome, in order (of
an async model in any order), or by Ending, if the process is unhealthy and ends. Raised may come ahead of
either, Measured and ModelSpans at any time, and Again ahead of an outcome, if the process wants the frame
once more. A message is a msgpack header and a payload of raw bytes, over a socket pair.

A model may write into the socket by mistake, for example to a descriptor that it has closed already. So both
ends of a message are marked, and its lengths are believed only between the marks. Bytes that were written
before or into a message move its marks.

No pickle: data from a producer is never executed. Stacked tensors are sent as they lie in memory, so neither
side copies or converts single numbers.

Why: docs/decisions/0004.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import msgpack
import numpy as np

from carpool.errors import RESOURCE_EXHAUSTED
from carpool.metrics import Change, Kind
from carpool.model_settings import RESULT_BYTES_DEFAULT, ModelKind
from carpool.parts import Buffer
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.tracing import Span
from carpool.wire.tensors import (
    WIDTHS,
    Array,
    TensorSpec,
    datatype_of,
    from_bytes,
    tensor_map,
    to_be_sent,
    to_bytes,
)
from carpool.wire.values import NOT_CONTIGUOUS, plain

# Neither is text: 0xC1 is in no UTF-8, and begins nothing in msgpack.
_BEGIN: Final = b"\xc1Cp\x8e\x1d\xf2\xc1>"
_END: Final = b"<\xc1\xd7\x0b\x94Cp\xc1"
_HEAD: Final = struct.Struct("<8sIII")  # a mark; the lengths of header and payload, and their check
_CHECK: Final = 0x5AC3_0F96
_ALIGNMENT_BYTES: Final = 64  # of large payloads, which may be tensors
_READS_MAX: Final = (
    64  # for one look at what has arrived: another process may write faster than this one reads
)
_BUFFER_BYTES: Final = 64 * 1024
DEATHS_MAX: Final = 2  # processes that a request may end before it is given up
_ONE_WRITE_BYTES_MAX: Final = 64 * 1024  # payloads below this are joined to their header: one system call
_TENSOR: Final = 1  # msgpack extension types
_ELEMENTS: Final = 2  # an array of texts or bytes

_READY: Final = "ready"
_LOAD_FAILED: Final = "load failed"
_ENDING: Final = "ending"
_RAISED: Final = "raised"
_MEASURED: Final = "measured"
_SPANS: Final = "spans"
_AGAIN: Final = "again"
_END_SEQUENCES: Final = "end"
_WITHDRAW_CALLS: Final = "cancel"

MEASURED_INTERVAL_S: Final = 0.25  # between two messages of what a model measures

Layout = tuple[str, str, tuple[int, ...]]  # of one stacked tensor: name, datatype, shape of one item
Failure = tuple[str, str]  # status, detail
_Read = Callable[[str, Sequence[int], Buffer], Array]  # datatype, shape, bytes
RequestFields = Sequence[Any]  # those of a RequestInfo (`loaded`), in its order; the last may be missing


CallerFields = tuple[str, int, Mapping[str, bytes]]  # correlation ID, priority, fields for the model


class Ready(NamedTuple):
    """The model is loaded; what it declares about itself."""

    settings: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    wants_requests: bool
    misspelt: Mapping[str, str]  # attribute that has no effect -> the setting that was probably meant
    kind: ModelKind = ModelKind.PLAIN  # if STEPPING, what follows are the messages of `stepping.frames`
    initial_state: bytes = b""  # if STATEFUL: of a sequence that starts; states of all others are as long
    parameters: Mapping[str, str] = MappingProxyType({})  # for people; secrets are hidden
    version: str = ""  # empty: it declares none
    has_cost: bool = False  # it tells the cost of a body
    wants_callers: bool = False  # the model calls others on behalf of its requests
    is_async: bool = False  # it executes `max_concurrent_batches` frames at a time
    spoken: Spoken = NOT_SPOKEN  # what it says of OpenAI's API


class LoadFailed(NamedTuple):
    """The model cannot be loaded, and the model process ends."""

    reason: str
    trace: str  # the traceback if the model's own code raised, else ""


class FrameHeader(NamedTuple):
    """Worker to model process: the payload has the bodies of `size` requests, the first at position `first`.

    Without `layouts` the payload is a packed list of values. `requests` only for a model that asks for them.
    For a model that keeps states, the payload ends with the states of all requests.

    `deadlines`: how many requests, in order, have the same deadline (us) by Redis's clock, which is
    `redis_ahead_us` ahead of this host's monotonic one; None: they have none. Empty if none has one.
    `result_bytes_max`: how many bytes the result of a request may have, packed.
    `sizes`: of each padded input, the true sizes of each request (`carpool.wire.padding`).
    `cost_max`: what the requests of one call of the model may cost together; None: any. `costs`: how many
    requests, in order, have the same cost from their producers; empty if all have 1. Both only for a model
    that tells the cost of a body.
    `callers`: of each request what the requests to other models inherit, only for a model that asks for it.
    `max_execution_ms`: after which time a body whose deadline has passed is not decoded any more.
    `trace`: the `traceparent` and `tracestate` of the span of its batch; empty if that has none.
    """

    first: int
    size: int
    layouts: Sequence[Layout] = ()
    requests: Sequence[RequestFields] = ()
    deadlines: Sequence[tuple[int, int | None]] = ()
    result_bytes_max: int = RESULT_BYTES_DEFAULT
    sizes: Mapping[str, Sequence[Sequence[int]]] = {}
    cost_max: int | None = None
    costs: Sequence[tuple[int, int]] = ()
    callers: Sequence[CallerFields] = ()
    max_execution_ms: int | None = None
    trace: Sequence[str] = ()
    redis_ahead_us: int = 0  # set when the frame is sent
    number: int = 0  # set when the frame is sent, and returned with its outcome


class EndSequences(NamedTuple):
    """Worker to the process of a model that binds sequences: these have ended, and their slots are free.

    The process never ends one by itself, because only the worker knows which results were written. Those
    that it does not know are ignored. There is no outcome.
    """

    sequence_ids: Sequence[str]

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_END_SEQUENCES, *self)


class WithdrawCalls(NamedTuple):
    """Worker to the process of an async model: nobody waits any more for the results of these requests, by
    index, of the frame with this number. What they asked of other models is withdrawn. It has no outcome, and
    is ignored if the frame has one.
    """

    number: int
    indexes: Sequence[int]

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_WITHDRAW_CALLS, *self)


def read_request(fields: Sequence[Any]) -> FrameHeader | EndSequences:
    """What a worker sends, from its header; to a stepping model it sends those of `stepping.frames`."""
    return EndSequences(*fields[1:]) if fields[0] == _END_SEQUENCES else FrameHeader(*fields)


def read_async_request(fields: Sequence[Any]) -> FrameHeader | WithdrawCalls:
    """What a worker sends to an async model, from its header."""
    return WithdrawCalls(*fields[1:]) if fields[0] == _WITHDRAW_CALLS else FrameHeader(*fields)


class OutcomeHeader(NamedTuple):
    """Model process to worker: failures by index in the frame; the payload has the results of all others.

    Without `layouts` the payload is a packed list of values. `first`, `size` and `number` are the frame's.
    `executed_together`: how many requests one call of the model executed, or one for each part that
    `max_batch_cost` allowed; 0 if it took other calls. `parts`: how many there were. `cost`: that of all
    requests that were executed, as the model told it; 0 if it tells none.
    `raised`: the requests on each of which the model raised alone, by index in the frame.
    `errors`: the names of what it raised (`raised`), the last one last, and the requests concerned, by index
    in the frame: those on which it raised so alone, or else all on which it did. And why a result is too
    large.
    `refused`: those that `validate` or `decode` rejected, by index in the frame.
    `given_up`: those that ended decoder processes again and again, by index in the frame, and how.
    `decode_us`, `waited_us`: of a model that decodes (`decoding`), how long after the frame came all bodies
    were decoded, and for how much of that the model waited.
    For a model that keeps states, the payload ends with the new ones of the requests that did not fail.
    """

    first: int
    size: int
    number: int
    compute_us: int
    failures: Mapping[int, Failure]
    layouts: Sequence[Layout] = ()
    executed_together: int = 0
    raised: Sequence[int] = ()
    errors: Mapping[str, Sequence[int]] = {}
    refused: Sequence[int] = ()
    cost: int = 0
    parts: int = 1
    given_up: Mapping[int, str] = {}
    decode_us: int = 0
    waited_us: int = 0

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self:
        """The header of which these are the fields. Raises ValueError if they are not those of one."""
        if [type(field) for field in fields] != _OUTCOME_TYPES:
            raise ValueError("these are not the fields of an outcome")
        return cls(*fields)


_OUTCOME_TYPES: Final = [int, int, int, int, dict, list, int, list, dict, list, int, int, dict, int, int]


class Raised(NamedTuple):
    """Model process to worker: the model raised this, of which the log had no traceback lately.

    Sent at once, ahead of the outcome or the Step that says which requests it concerns: what follows may kill
    the process. `error`: its name (`raised`). `left_out`: how many of that name were not sent since the last.
    `of_body`: the body is to blame, as its producer is told, and not the model.
    """

    error: str
    trace: str
    left_out: int = 0
    of_body: bool = False

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_RAISED, *self)

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self | None:
        """The message of which these are the header's fields; None if it is another one. Raises ValueError if
        they are not those of one."""
        if not fields or fields[0] != _RAISED:
            return None
        if [type(field) for field in fields] != _RAISED_TYPES:
            raise ValueError("these are not the fields of what was raised")
        return cls(*fields[1:])


_RAISED_TYPES: Final = [str, str, str, int, bool]


class Measured(NamedTuple):
    """Model process to worker, ahead of an outcome or a Step: what has changed of a metric of the model's own
    (`carpool.metrics.Change`, whose first field is taken apart here)."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    series: Sequence[tuple[tuple[str, ...], Sequence[float]]]

    @classmethod
    def of(cls, change: Change) -> Self:
        """The message about a change."""
        return cls(*change.description, change.series)

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_MEASURED, *self)

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self | None:
        """The message of which these are the header's fields; None if it is another one. Raises ValueError if
        they are not those of what was measured."""
        if not fields or fields[0] != _MEASURED:
            return None
        if [type(field) for field in fields] != _MEASURED_TYPES or fields[2] not in _KINDS_MEASURED:
            raise ValueError("these are not the fields of what was measured")
        _, name, kind, documentation, labels, buckets, series = fields
        numbers = len(buckets) + 2 if kind == "histogram" else 1
        read = [(tuple(values), list(changed)) for values, changed in series]
        if any(len(values) != len(labels) or len(changed) != numbers for values, changed in read):
            raise ValueError("these are not the values of a metric")
        return cls(name, kind, documentation, tuple(labels), tuple(buckets), read)


class ModelSpans(NamedTuple):
    """Model process to worker, at any time: spans that the model has recorded, and how many were too many."""

    spans: Sequence[Span]
    dropped: int

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_SPANS, [span.to_fields() for span in self.spans], self.dropped)

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self | None:
        """The message of which these are the header's fields; None if it is another one. Raises ValueError or
        TypeError if they are not those of spans."""
        if not fields or fields[0] != _SPANS:
            return None
        _, spans, dropped = fields
        return cls([Span.of_fields(span) for span in spans], int(dropped))


_MEASURED_TYPES: Final = [str, str, str, str, list, list, list]
_KINDS_MEASURED: Final = ("counter", "gauge", "histogram")


class Ending(NamedTuple):
    """Model process to worker, in place of an outcome or a Step: it is unhealthy, and ends now."""

    reason: str

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_ENDING, *self)

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self | None:
        """The message of which these are the header's fields; None if it is another one."""
        return cls(*fields[1:]) if fields and fields[0] == _ENDING else None


class Again(NamedTuple):
    """Model process to worker: the frame with this number, which has no outcome yet, is wanted once more.

    The model may have changed its payload. The worker sends it as before, after what is on its way.
    """

    number: int

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_AGAIN, *self)


def read_answer(fields: Sequence[Any]) -> OutcomeHeader | Again:
    """What a model process sends for a frame, from its header. Raises ValueError if it is neither."""
    if len(fields) == 2 and fields[0] == _AGAIN and type(fields[1]) is int:
        return Again(fields[1])
    return OutcomeHeader.read(fields)


class ProcessGoneError(ConnectionError):
    """The connection to the other process is closed."""


def too_large(result_bytes_max: int) -> Failure:
    """What becomes of a request whose result, or whose stream, has more bytes than that."""
    return RESOURCE_EXHAUSTED, (
        f"the result is too large: it may have {result_bytes_max} bytes (max_result_bytes), all chunks of a "
        "stream together; ask for less, or raise that setting with carpool config"
    )


class StrayBytesError(ProcessGoneError):
    """What arrived is no message of the other process, so nothing that follows it can be read."""

    def __init__(self) -> None:
        super().__init__("something else wrote into the connection to the other process")


# An exception's text may have lone surrogates. Threads may share this: packing plain values runs no Python.
_HEADER_PACKER: Final = msgpack.Packer(unicode_errors="replace")


# --- messages ----------------------------------------------------------------------------------------------


def message_parts(header: Any, *payload: Buffer) -> list[Buffer]:
    """One message as parts to be sent one after the other; those of a large payload are not copied."""
    fields = _HEADER_PACKER.pack(header)
    payload_bytes = sum(map(len, payload))
    head = _HEAD.pack(_BEGIN, len(fields), payload_bytes, len(fields) ^ payload_bytes ^ _CHECK)
    if payload_bytes < _ONE_WRITE_BYTES_MAX:
        return [b"".join((head, fields, *payload, _END))]
    return [head + fields, *payload, _END]


def send_message(sock: socket.socket, header: Any, *payload: Buffer) -> None:
    """Send one message. Raises ProcessGoneError."""
    try:
        for part in message_parts(header, *payload):
            sock.sendall(part)
    except OSError as error:
        raise ProcessGoneError(str(error)) from error


class MessageSender:
    """Sends messages of several threads, one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, header: Any, *payload: Buffer) -> None:
        """Send one message. Raises ProcessGoneError."""
        with self._lock:
            send_message(self._sock, header, *payload)


class MessageReader:
    """Reads messages from a socket: small ones with one system call, large payloads without a copy.

    `receive` waits for a message, and `receive_arrived` does not: what has arrived of one is kept.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._large: memoryview | None = None  # a message that does not fit into the buffer, without its head
        self._filled = 0  # how much of that has arrived
        self._lengths = (0, 0)  # of its header and payload
        self._is_waiting = False  # the socket has to be readable before there can be another message

    @property
    def has_buffered(self) -> bool:
        """Whether a message, or a part of one, was read from the socket with the one before it."""
        return self._start < self._end and not self._is_waiting

    def receive(self) -> tuple[Any, Buffer]:
        """The next message's header (a NamedTuple arrives as a list) and payload.

        Raises ProcessGoneError at the end of the stream, and StrayBytesError.
        """
        while (message := self._next()) is None:
            self._read(0)
        return message

    def receive_arrived(self) -> tuple[Any, Buffer] | None:
        """The same, if all of it has arrived; else None. Never waits."""
        message = self._next()
        reads = 0
        while message is None and reads < _READS_MAX and self._read(socket.MSG_DONTWAIT):
            message = self._next()
            reads += 1
        self._is_waiting = message is None
        return message

    def _next(self) -> tuple[Any, Buffer] | None:
        """The next message, if all of it was read. Raises StrayBytesError."""
        if self._large is not None:
            return self._next_large(self._large)
        if self._start == self._end:
            return None
        start, buffered = self._start, self._end - self._start
        if buffered < _HEAD.size:
            if not _BEGIN.startswith(self._buffer[start : min(self._end, start + len(_BEGIN))]):
                raise StrayBytesError
            return None
        begin, head_bytes, payload_bytes, check = _HEAD.unpack_from(self._buffer, start)
        if begin != _BEGIN or check != head_bytes ^ payload_bytes ^ _CHECK:
            raise StrayBytesError
        after_bytes = head_bytes + payload_bytes + len(_END)
        if _HEAD.size + after_bytes > _BUFFER_BYTES:
            self._begin_large(head_bytes, payload_bytes)
            return None
        if buffered < _HEAD.size + after_bytes:
            return None
        head = start + _HEAD.size
        payload = head + head_bytes
        end = payload + payload_bytes
        self._start = end + len(_END)
        is_whole = self._buffer.startswith(_END, end)
        return _message(self._buffer[head:payload], self._buffer[payload:end], is_whole=is_whole)

    def _begin_large(self, head_bytes: int, payload_bytes: int) -> None:
        padding = -head_bytes % _ALIGNMENT_BYTES  # so that the payload is aligned
        size = padding + head_bytes + payload_bytes + len(_END)
        view: memoryview = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
        self._large, self._lengths = view[padding:], (head_bytes, payload_bytes)
        self._start += _HEAD.size
        self._filled = self._end - self._start
        self._large[: self._filled] = self._view[self._start : self._end]
        self._start = self._end = 0

    def _next_large(self, large: memoryview) -> tuple[Any, Buffer] | None:
        if self._filled < len(large):
            return None
        head_bytes, payload_bytes = self._lengths
        self._large, end = None, head_bytes + payload_bytes
        return _message(large[:head_bytes], large[head_bytes:end], is_whole=bytes(large[end:]) == _END)

    def _read(self, flags: int) -> bool:
        """Read once. False if nothing has arrived (MSG_DONTWAIT). Raises ProcessGoneError."""
        large = self._large
        if large is None and self._start:
            buffered = self._end - self._start
            self._view[:buffered] = self._view[self._start : self._end]
            self._start, self._end = 0, buffered
        try:
            space = self._view[self._end :] if large is None else large[self._filled :]
            received = self._sock.recv_into(space, 0, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ProcessGoneError(str(error)) from error
        if not received:
            raise ProcessGoneError("the other process closed the connection")
        if large is None:
            self._end += received
        else:
            self._filled += received
        return True


def _message(fields: Buffer, payload: Buffer, *, is_whole: bool) -> tuple[Any, Buffer]:
    """A message that was read. Raises StrayBytesError, also if its end is not where it should be."""
    if not is_whole:
        raise StrayBytesError
    try:
        return msgpack.unpackb(fields, strict_map_key=False), payload
    except ValueError:  # as all that msgpack raises
        raise StrayBytesError from None


def send_load_result(sock: socket.socket, result: Ready | LoadFailed) -> None:
    """Send the first message of a model process. Raises ProcessGoneError."""
    if isinstance(result, LoadFailed):
        send_message(sock, (_LOAD_FAILED, *result))
        return
    inputs, outputs = ([spec.fields for spec in specs] for specs in (result.inputs, result.outputs))
    parameters = dict(result.parameters)
    fields = result._asdict() | {"inputs": inputs, "outputs": outputs, "parameters": parameters}
    send_message(sock, (_READY, *fields.values()))


def read_load_result(header: Sequence[Any]) -> Ready | LoadFailed:
    """The first message of a model process, from its header."""
    kind, *fields = header
    if kind == _LOAD_FAILED:
        return LoadFailed(*fields)
    settings, inputs, outputs, wants_requests, misspelt, model_kind, *others, spoken = fields
    ready = Ready(
        settings,
        tuple(TensorSpec(*spec) for spec in inputs),
        tuple(TensorSpec(*spec) for spec in outputs),
        wants_requests,
        misspelt,
        ModelKind(model_kind),
        *others,
    )
    return ready._replace(spoken=Spoken(*map(tuple, spoken)))


def divide_payload(payload: Buffer, tail_bytes: int) -> tuple[memoryview, memoryview]:
    """A payload without its last bytes, and these: the states."""
    view = memoryview(payload)
    middle = len(view) - tail_bytes
    return view[:middle], view[middle:]


# --- values ------------------------------------------------------------------------------------------------


def pack_values(values: Any) -> bytes:
    """Python values and arrays as bytes. Raises TypeError, ValueError or OverflowError for anything else.

    Arrays of strings become a BYTES tensor's map, as in request and result bodies.
    """
    try:
        return bytes(msgpack.packb(values, default=_pack_other, strict_types=False))
    except BufferError:
        raise ValueError(NOT_CONTIGUOUS) from None


def pack_exactly(value: Any) -> bytes:
    """As `pack_values`, for another process of the same model: arrays of texts and bytes stay arrays."""
    try:
        return bytes(msgpack.packb(value, default=_pack_elements, strict_types=False))
    except BufferError:
        raise ValueError(NOT_CONTIGUOUS) from None


def unpack_exactly(data: Buffer) -> Any:
    """The inverse of `pack_exactly`, and as `unpack_bodies`."""
    return _unpack(data, _unpack_elements_or_writable)


def unpack_values(data: Buffer) -> Any:
    """The inverse of `pack_values`; tuples come back as lists, so none can be a key."""
    return _unpack(data, _unpack_ext)


def unpack_bodies(data: Buffer) -> Any:
    """As `unpack_values`, for a model: it may write into the arrays."""
    return _unpack(data, _unpack_writable)


def unpack_results(data: Buffer) -> Any:
    """As `unpack_values`, for what is sent on: BF16 stays what it is."""
    return _unpack(data, _unpack_to_send)


def _unpack(data: Buffer, read_array: Callable[[int, bytes], Any]) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=read_array, strict_map_key=False)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        raise TypeError("a key in a dict is a tuple: use text, such as str(key)") from None


def unpack_each(data: Buffer) -> list[Any]:
    """The results of a packed list, each unpacked alone. An exception replaces one that cannot be."""
    values: list[Any] = []
    for place in places_in(data):
        try:
            values.append(unpack_results(data[place]))
        except Exception as error:  # for example a tuple as a map's key, which comes back as a list
            values.append(error)
    return values


def places_in(data: Buffer) -> list[slice]:
    """Where the values of a packed list are."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    places: list[slice] = []
    for _ in range(unpacker.read_array_header()):
        start = unpacker.tell()
        unpacker.skip()
        places.append(slice(start, unpacker.tell()))
    return places


def _pack_other(value: Any) -> Any:
    value = plain(value)
    if not isinstance(value, np.ndarray):
        return value
    tensor = tensor_map(value)
    return tensor if tensor["datatype"] == "BYTES" else msgpack.ExtType(_TENSOR, msgpack.packb(tensor))


def _pack_elements(value: Any) -> Any:
    packed = _pack_other(value)
    if not isinstance(packed, dict):  # else it is the map of such an array
        return packed
    return msgpack.ExtType(_ELEMENTS, msgpack.packb((packed["shape"], packed["data"])))


def _unpack_elements_or_writable(code: int, data: bytes) -> Any:
    if code != _ELEMENTS:
        return _unpack_writable(code, data)
    shape, elements = msgpack.unpackb(data)
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _unpack_ext(code: int, data: bytes, read: _Read = from_bytes) -> Any:
    if code != _TENSOR:
        return msgpack.ExtType(code, data)
    tensor = msgpack.unpackb(data)
    return read(tensor["datatype"], tensor["shape"], tensor["data"])


def _unpack_to_send(code: int, data: bytes) -> Any:
    return _unpack_ext(code, data, to_be_sent)


def _unpack_writable(code: int, data: bytes) -> Any:
    value = _unpack_ext(code, data)
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


# --- stacked tensors ---------------------------------------------------------------------------------------


def stacked_bytes(layout: Layout, count: int) -> int:
    """The size of `count` stacked items of a numeric tensor."""
    return WIDTHS[layout[1]] * math.prod(layout[2]) * count


def unstack(
    layouts: Sequence[Layout], count: int, data: Buffer, read: _Read = from_bytes
) -> dict[str, Array]:
    """The stacked arrays that follow each other in `data`, each of shape (count, *shape), made by `read`:
    `from_bytes`, or `to_be_sent` for results.

    A BYTES tensor's item is a packed list of bytes or texts. They are stacked as an array of these objects,
    because numpy's own strings are padded to the longest and lose trailing zeros.
    """
    arrays: dict[str, Array] = {}
    view, start = memoryview(data), 0
    for name, datatype, shape in layouts:
        if datatype == "BYTES":
            elements, length = _unpack_elements(view[start:], count)
            array = np.empty(len(elements), object)
            array[:] = elements
            arrays[name] = array.reshape((count, *shape))
            start += length
            continue
        end = start + stacked_bytes((name, datatype, shape), count)
        arrays[name] = read(datatype, (count, *shape), view[start:end])
        start = end
    return arrays


def _unpack_elements(data: memoryview, count: int) -> tuple[list[Any], int]:
    """The elements of `count` items of a BYTES tensor, and their size in bytes."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    elements = [element for _ in range(count) for element in unpacker.unpack()]
    return elements, unpacker.tell()


def stack(arrays: dict[str, Array], declared: Mapping[str, str]) -> tuple[list[Layout], bytes]:
    """Stacked numeric arrays as layouts and bytes; a `declared` datatype replaces the array's own.

    Raises ValueError for an array that cannot be sent stacked.
    """
    layouts: list[Layout] = []
    data: list[bytes] = []
    for name, array in arrays.items():
        datatype = declared.get(name) or datatype_of(array)
        if datatype == "BYTES":
            raise ValueError(f"output {name!r}: strings cannot be sent stacked")
        layouts.append((name, datatype, tuple(array.shape[1:])))
        data.append(to_bytes(array, datatype))
    return layouts, b"".join(data)
