"""Request bodies into frames for the model process, and outcomes into results.

A request that expired, that cannot be decoded or that is to be dead-lettered gets no frame, but its result
here, in its Execution. No Redis, no processes, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from carpool.errors import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    OK,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
)
from carpool.messages import MSGPACK, RAW, BatchedRequest, Result
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import HeadMemo, TensorSpec, array_of, datatype_of, tensor_head, to_bytes
from carpool_worker.execution import DEATHS_MAX, Execution, Frame
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader, Part, Ready

RESULT_BYTES_MAX: Final = 64 * 1024 * 1024


class Codec:
    """Encodes and decodes for one model, as it described itself when it was loaded.

    The tensors of a batch usually have the same head (datatype and shape) and differ only in their data, so
    most bodies need no decoding (HeadMemo).
    """

    def __init__(self, ready: Ready) -> None:
        self.inputs = ready.inputs
        self.outputs = ready.outputs
        self.wants_requests = ready.wants_requests
        self._memo = HeadMemo()

    # --- bodies -> frames ----------------------------------------------------------------------------------

    def prepare(self, execution: Execution, now_us: int) -> None:
        """Build the frames of an execution that was just fetched."""
        execution.frames = self.build_frames(execution, execution.unanswered, now_us)

    def build_frames(self, execution: Execution, positions: Sequence[int], now_us: int) -> list[Frame]:
        """Decode the bodies at these positions into frames.

        A request that expired, that cannot be decoded or that is to be dead-lettered gets its result instead.
        """
        requests = execution.batch.requests
        deaths = execution.deaths
        by_shape: dict[tuple[Part, ...], list[tuple[int, Any]]] = {}
        for position in positions:
            request = requests[position]
            if request.deadline_us is not None and request.deadline_us <= now_us:
                detail = "expired: a worker received its batch after the request's deadline"
                execution.fail(position, DEADLINE_EXCEEDED, detail)
            elif deaths.get(position, 0) >= DEATHS_MAX:
                execution.dead_letter(position)
            else:
                try:
                    parts, value = self._decode(request)
                except CarpoolError as error:
                    execution.fail(position, error.status, error.detail)
                except Exception as error:  # an unforeseen case must not fail the other requests
                    execution.fail(position, INVALID_ARGUMENT, f"body: cannot be decoded ({error})")
                else:
                    by_shape.setdefault(parts, []).append((position, value))
        is_suspect = execution.is_suspect
        return [
            self._frame(execution, parts, group)
            for parts, same_shape in by_shape.items()
            for group in ([[item] for item in same_shape] if is_suspect else [same_shape])
        ]

    def _decode(self, request: BatchedRequest) -> tuple[tuple[Part, ...], Any]:
        """A body as (tensor parts, its bytes), or as ((), its bytes) for a model that declares no tensors.

        For several tensors, a list of the bytes of each.
        """
        body = request.body
        if not self.inputs:
            return (), _pack(decode_body(request.content_type, body))
        memo = self._memo
        if request.content_type == MSGPACK and (data := memo.data_of(body)) is not None:
            return ((self.inputs[0].name, memo.datatype, memo.shape),), data
        return self._decode_tensors(request)

    def _decode_tensors(self, request: BatchedRequest) -> tuple[tuple[Part, ...], Any]:
        inputs = self.inputs
        if request.content_type == RAW:
            return self._raw_tensor(request.body)
        value = decode_body(request.content_type, request.body)
        if len(inputs) == 1 and not (isinstance(value, dict) and value.keys() == {inputs[0].name}):
            value = {inputs[0].name: value}
        if not isinstance(value, dict) or value.keys() != {spec.name for spec in inputs}:
            raise InvalidArgumentError(
                f"body: must be a map with exactly the tensors {', '.join(spec.name for spec in inputs)}"
            )
        parts: list[Part] = []
        data: list[bytes] = []
        for spec in inputs:
            read = _strings if spec.datatype == "BYTES" else _numbers
            shape, item = read(value[spec.name], spec)
            parts.append((spec.name, spec.datatype, shape))
            data.append(item)
        if len(parts) > 1:
            return tuple(parts), data
        if request.content_type == MSGPACK and inputs[0].datatype != "BYTES":
            memo = HeadMemo()  # replaced, never changed: fetcher and committer both decode, on two threads
            memo.remember(request.body, parts[0][1], parts[0][2], len(data[0]))
            if memo.datatype:
                self._memo = memo
        return tuple(parts), data[0]

    def _raw_tensor(self, body: bytes) -> tuple[tuple[Part, ...], bytes]:
        """An octet-stream body, for a model with one tensor of fixed shape: the tensor's bytes."""
        spec = self.inputs[0]
        expected_bytes = spec.fixed_bytes
        if len(self.inputs) > 1 or expected_bytes is None:
            raise InvalidArgumentError(
                "content_type: this model's tensors need application/msgpack or application/json"
            )
        if len(body) != expected_bytes:
            raise InvalidArgumentError(
                f"body: {len(body)} bytes, but the tensor {spec.name!r} takes {expected_bytes}"
            )
        return ((spec.name, spec.datatype, spec.shape),), body

    def _frame(self, execution: Execution, parts: tuple[Part, ...], group: list[tuple[int, Any]]) -> Frame:
        positions = [position for position, _ in group]
        values = [value for _, value in group]
        fields: list[frames.RequestFields] = []
        if self.wants_requests:
            batch = execution.batch
            requests = [batch.requests[position] for position in positions]
            fields = [(request.correlation_id, batch.lane, request.extra or {}) for request in requests]
        header = FrameHeader(positions[0], len(positions), parts, fields)
        if not parts:
            return Frame(positions, header, _array_of_packed(values))
        if len(parts) == 1:
            return Frame(positions, header, b"".join(values))
        by_tensor = zip(*values, strict=True)
        return Frame(positions, header, b"".join([item for items in by_tensor for item in items]))

    # --- outcomes -> results -------------------------------------------------------------------------------

    def take_outcome(
        self, execution: Execution, frame: Frame, outcome: OutcomeHeader, payload: bytearray
    ) -> None:
        """Give each request of an executed frame its result."""
        if outcome.size != len(frame.positions) or outcome.first != frame.positions[0]:
            raise RuntimeError(
                "an outcome belongs to another frame"
            )  # never: frames and outcomes are in order
        execution.compute_us += outcome.compute_us
        execution.frames_executed += 1
        requests = execution.batch.requests
        failures = outcome.failures
        for index, (status, detail) in failures.items():
            execution.fail(frame.positions[index], status, detail)
        succeeded = [position for index, position in enumerate(frame.positions) if index not in failures]
        encoded: Iterable[bytes | CarpoolError]
        if outcome.parts:
            encoded = _encode_stacked([requests[position] for position in succeeded], outcome.parts, payload)
        else:
            values = _unpack(payload)
            encoded = (
                _encode(requests[position], value) for position, value in zip(succeeded, values, strict=True)
            )
        for position, encoded_body in zip(succeeded, encoded, strict=True):
            request, body = requests[position], encoded_body
            if isinstance(body, bytes) and len(body) > RESULT_BYTES_MAX:
                body = InternalError(f"the result has {len(body)} bytes; the limit is {RESULT_BYTES_MAX}")
            if isinstance(body, CarpoolError):
                execution.fail(position, body.status, body.detail)
            else:
                execution.results[position] = Result(
                    request.correlation_id,
                    OK,
                    request.content_type,
                    body,
                    None,
                    len(requests),
                    max(0, execution.batch.dispatched_us - request.arrival_us),
                    execution.compute_us,
                )


def _numbers(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """The shape and bytes of a decoded numeric tensor, as `spec` declares it. Raises InvalidArgumentError."""
    field_name = f"body.{spec.name}"
    if not hasattr(value, "dtype"):
        value = array_of(value, spec.datatype, field_name)
    datatype = datatype_of(value)
    if datatype != spec.datatype and not (spec.datatype == "BF16" and datatype == "FP32"):
        raise InvalidArgumentError(f"{field_name}.datatype: {datatype}, but this model takes {spec.datatype}")
    if not spec.admits(value.shape):
        raise _wrong_shape(value.shape, spec)
    return value.shape, to_bytes(value, spec.datatype)


def _strings(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """As `_numbers`, for BYTES. A flat list takes the declared shape if that is unambiguous."""
    array = np.array(value, object)
    if not all(type(text) is str for text in array.flat):
        raise InvalidArgumentError(f"body.{spec.name}.data: BYTES takes strings only")
    shape = array.shape
    if not spec.admits(shape):
        inferred = _infer_shape(spec.shape, array.size) if array.ndim == 1 else None
        if inferred is None:
            raise _wrong_shape(shape, spec)
        shape = inferred
    return shape, _pack(array.ravel().tolist())


def _infer_shape(declared: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The one shape that `declared` admits for `size` items; None if there is none, or several."""
    varying = declared.count(-1)
    fixed = math.prod(length for length in declared if length != -1)
    if varying == 0 and fixed == size:
        return declared
    if varying == 1 and fixed and size % fixed == 0:
        return tuple(size // fixed if length == -1 else length for length in declared)
    return None


def _wrong_shape(shape: Sequence[int], spec: TensorSpec) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"body.{spec.name}.shape: {list(shape)}, but this model takes {list(spec.shape)}"
    )


def _unpack(payload: bytearray) -> list[Any]:
    """The model's results; an exception replaces one that cannot be unpacked."""
    try:
        values: list[Any] = frames.unpack_values(payload)
    except Exception:
        return frames.unpack_each(payload)
    return values


def _encode(request: BatchedRequest, value: Any) -> bytes | CarpoolError:
    if isinstance(value, Exception):
        return InternalError(f"the model's result cannot be encoded: {value}")
    try:
        return encode_body(request.content_type, value)
    except CarpoolError as error:
        return error


def _encode_stacked(
    requests: Sequence[BatchedRequest], parts: Sequence[Part], payload: bytearray
) -> Iterable[bytes | CarpoolError]:
    """The rows of stacked results as bodies. One tensor in msgpack is a head and a slice: no decoding."""
    count = len(requests)
    name, datatype, shape = parts[0]
    row_bytes = frames.part_bytes((name, datatype, shape), 1)
    head = tensor_head(datatype, shape, row_bytes)
    arrays = None
    view = memoryview(payload)
    for row, request in enumerate(requests):
        data = view[row * row_bytes : (row + 1) * row_bytes]
        if len(parts) == 1 and request.content_type == MSGPACK:
            yield b"".join((head, data))
        elif len(parts) == 1 and request.content_type == RAW:
            yield bytes(data)
        else:
            arrays = arrays or frames.unstack(parts, count, payload)
            values = {part: array[row] for part, array in arrays.items()}
            yield _encode(request, values if len(parts) > 1 else values[name])


def _pack(value: Any) -> bytes:
    try:
        return frames.pack_values(value)
    except OverflowError:
        raise InvalidArgumentError("body: contains an integer of more than 64 bits") from None
    except (TypeError, ValueError) as error:  # for example a lone surrogate, from JSON's \ud800
        raise InvalidArgumentError(f"body: cannot be encoded for the model: {error}") from None


def _array_of_packed(values: Sequence[bytes]) -> bytes:
    """A msgpack array of values that are already packed."""
    count = len(values)
    return b"".join((b"\xdd", count.to_bytes(4, "big"), *values))
