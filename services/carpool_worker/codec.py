"""A batch between Redis and the model: its requests' bodies into frames, the model's outcomes into results.

Pure: no Redis, no processes. A frame is what is executed together: normally the whole batch; where declared
tensors vary in shape, one frame for each shape; after a redelivery or a crash, one for each request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import (
    ABORTED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
)
from carpool.messages import MSGPACK, RAW, Batch, BatchedRequest, DeadLetter, Result
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import HeadMemo, TensorSpec, array_of, datatype_of, tensor_head, to_bytes
from carpool_worker.model_process import frames

MAX_RESULT_BYTES: Final = 64 * 1024 * 1024
FATAL_ATTEMPTS: Final = 2  # a request that ended its process this often is given up


class Frame(NamedTuple):
    """What is sent to the model process at once: requests of a job, by their positions in its batch."""

    positions: list[int]
    header: frames.Header
    payload: bytes


@dataclass(slots=True, eq=False)
class Job:
    """A batch in hand. `results` fills up until every position that was not `answered` elsewhere has one."""

    batch: Batch
    answered: frozenset[int] = frozenset()
    deaths: dict[int, int] = field(default_factory=dict)  # processes that ended while executing this position
    frames: list[Frame] = field(default_factory=list)
    sent: bool = False  # every frame is in the process's pipe, or on its way there
    results: dict[int, Result] = field(default_factory=dict)
    noted: set[int] = field(default_factory=set)  # positions whose result was written ahead of the commit
    dead: list[DeadLetter] = field(default_factory=list)
    input_us: int = 0  # how long decoding took
    compute_us: int = 0  # the model's work, over all executions
    executions: int = 0

    @property
    def singly(self) -> bool:
        """A worker or a process died on this batch: it is executed one request at a time."""
        return self.batch.epoch > 1 or bool(self.deaths)


class Codec:
    """Bodies to frames and outcomes to results, for one model as it described itself when it was ready.

    A batch's bodies differ in their numbers, not in their heads, so most tensors need no decoding (HeadMemo).
    """

    def __init__(self, ready: Mapping[str, Any]) -> None:
        self.inputs = tuple(TensorSpec(*spec) for spec in ready["inputs"])
        self.outputs = tuple(TensorSpec(*spec) for spec in ready["outputs"])
        self.wants_requests = bool(ready["wants_requests"])
        self._memo = HeadMemo()

    # --- bodies -> frames ----------------------------------------------------------------------------------

    def prepare(self, job: Job, now_us: int) -> None:
        """Decode a job's bodies into its frames. Who expired, or cannot be understood, gets a result now."""
        by_shape: dict[tuple[frames.Part, ...], list[tuple[int, Any]]] = {}
        for position, request in enumerate(job.batch.requests):
            if position in job.answered:
                continue
            if request.deadline_us is not None and request.deadline_us <= now_us:
                detail = "expired: its batch reached a worker after its deadline"
                job.results[position] = _failed(job, request, DEADLINE_EXCEEDED, detail)
            elif job.deaths.get(position, 0) >= FATAL_ATTEMPTS:
                bury(job, position)
            else:
                try:
                    parts, value = self._decode(request)
                except CarpoolError as error:
                    job.results[position] = _failed(job, request, error.status, error.detail)
                except Exception as error:  # a case nobody thought of stops this request, not its neighbours
                    detail = f"body: cannot be decoded ({error})"
                    job.results[position] = _failed(job, request, INVALID_ARGUMENT, detail)
                else:
                    by_shape.setdefault(parts, []).append((position, value))
        job.frames = [
            self._frame(job, parts, group)
            for parts, whole in by_shape.items()
            for group in ([[one] for one in whole] if job.singly else [whole])
        ]

    def _decode(self, request: BatchedRequest) -> tuple[tuple[frames.Part, ...], Any]:
        """A body as (tensor parts, its bytes), or as ((), its bytes) for a model that declares no tensors.

        Where there are several tensors, a list of the bytes of each.
        """
        body = request.body
        if not self.inputs:
            return (), _pack(decode_body(request.content_type, body))
        memo = self._memo
        if request.content_type == MSGPACK and (data := memo.data_of(body)) is not None:
            return ((self.inputs[0].name, memo.datatype, memo.shape),), data
        return self._decode_tensors(request)

    def _decode_tensors(self, request: BatchedRequest) -> tuple[tuple[frames.Part, ...], Any]:
        inputs = self.inputs
        if request.content_type == RAW:
            return self._raw_tensor(request.body)
        value = decode_body(request.content_type, request.body)
        if len(inputs) == 1 and not (isinstance(value, dict) and value.keys() == {inputs[0].name}):
            value = {inputs[0].name: value}
        if not isinstance(value, dict) or value.keys() != {spec.name for spec in inputs}:
            raise InvalidArgumentError(
                f"body: must name the tensors {', '.join(spec.name for spec in inputs)}"
            )
        parts: list[frames.Part] = []
        data: list[bytes] = []
        for spec in inputs:
            read = _texts if spec.datatype == "BYTES" else _numbers
            shape, item = read(value[spec.name], spec)
            parts.append((spec.name, spec.datatype, shape))
            data.append(item)
        if len(parts) > 1:
            return tuple(parts), data
        if request.content_type == MSGPACK and inputs[0].datatype != "BYTES":
            memo = HeadMemo()  # replaced and never changed: intake and committer both decode
            memo.remember(request.body, parts[0][1], parts[0][2], len(data[0]))
            if memo.datatype:
                self._memo = memo
        return tuple(parts), data[0]

    def _raw_tensor(self, body: bytes) -> tuple[tuple[frames.Part, ...], bytes]:
        """octet-stream for a model with one tensor of fixed shape: its bytes."""
        spec = self.inputs[0]
        wanted = spec.fixed_bytes
        if len(self.inputs) > 1 or wanted is None:
            raise InvalidArgumentError(
                "content_type: this model's tensors need application/msgpack or application/json"
            )
        if len(body) != wanted:
            raise InvalidArgumentError(f"body: {len(body)} bytes, but {spec.name} takes {wanted}")
        return ((spec.name, spec.datatype, spec.shape),), body

    def _frame(self, job: Job, parts: tuple[frames.Part, ...], group: list[tuple[int, Any]]) -> Frame:
        positions = [position for position, _ in group]
        header: frames.Header = {"count": len(group), "first": positions[0]}
        if self.wants_requests:
            chosen = [job.batch.requests[position] for position in positions]
            header["requests"] = [(one.correlation_id, job.batch.lane, one.extra or {}) for one in chosen]
        if not parts:
            return Frame(positions, header, _array_of_packed([value for _, value in group]))
        header["parts"] = parts
        if len(parts) == 1:
            return Frame(positions, header, b"".join([value for _, value in group]))
        by_tensor = zip(*[value for _, value in group], strict=True)
        return Frame(positions, header, b"".join([item for items in by_tensor for item in items]))

    # --- outcomes -> results -------------------------------------------------------------------------------

    def take_outcome(self, job: Job, frame: Frame, header: frames.Header, payload: bytearray) -> None:
        """Give each request of an executed frame its result."""
        if header["count"] != len(frame.positions) or header["first"] != frame.positions[0]:
            raise RuntimeError("an outcome came for another frame")  # never: frames and outcomes are in order
        job.compute_us += header["compute_us"]
        job.executions += 1
        requests = job.batch.requests
        failures = header["failures"]
        for at, (status, detail) in failures.items():
            position = frame.positions[at]
            job.results[position] = _failed(job, requests[position], status, detail)
        good = [position for at, position in enumerate(frame.positions) if at not in failures]
        parts = header.get("parts")
        encoded: Iterable[bytes | CarpoolError]
        if parts is None:
            values = _unpack(payload)
            encoded = (
                _encode(requests[position], value) for position, value in zip(good, values, strict=True)
            )
        else:
            encoded = _encode_stacked([requests[position] for position in good], parts, payload)
        for position, encoded_body in zip(good, encoded, strict=True):
            request, body = requests[position], encoded_body
            if isinstance(body, bytes) and len(body) > MAX_RESULT_BYTES:
                body = InternalError(f"the result takes {len(body)} bytes; at most {MAX_RESULT_BYTES}")
            if isinstance(body, CarpoolError):
                job.results[position] = _failed(job, request, body.status, body.detail)
            else:
                job.results[position] = Result(
                    request.correlation_id,
                    OK,
                    request.content_type,
                    body,
                    None,
                    len(requests),
                    max(0, job.batch.dispatched_us - request.arrival_us),
                    job.compute_us,
                )


def fail(job: Job, frame: Frame, detail: str) -> None:
    """Every request of a frame fails: what the model returned cannot be understood."""
    for position in frame.positions:
        job.results[position] = _failed(job, job.batch.requests[position], INTERNAL, detail)


def split(frame: Frame, job: Job, codec: Codec, now_us: int) -> None:
    """The process died on this frame: its requests are executed one at a time from now on."""
    for position in frame.positions:
        job.deaths[position] = job.deaths.get(position, 0) + 1
    rest = [one for one in job.frames if one is not frame]
    others = frozenset(range(len(job.batch.requests))) - frozenset(frame.positions)
    alone = Job(job.batch, others, job.deaths)
    codec.prepare(alone, now_us)
    job.results.update(alone.results)
    job.dead += alone.dead
    job.frames = alone.frames + rest


def bury(job: Job, position: int) -> None:
    """Give a request up: it becomes a dead letter, and its producer is told."""
    request = job.batch.requests[position]
    attempts = job.deaths.get(position, 0)
    reason = f"its worker's process ended {attempts} times while executing it"
    job.dead.append(DeadLetter(request, reason, attempts))
    job.results[position] = _failed(job, request, ABORTED, f"given up: {reason}")


def _numbers(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """The shape and the bytes of a decoded value as `spec` declares it. Raises InvalidArgumentError."""
    field_name = f"body.{spec.name}"
    if not hasattr(value, "dtype"):
        value = array_of(value, spec.datatype, field_name)
    got = datatype_of(value)
    if got != spec.datatype and not (spec.datatype == "BF16" and got == "FP32"):
        raise InvalidArgumentError(f"{field_name}.datatype: {got}, but this model takes {spec.datatype}")
    if not spec.admits(value.shape):
        raise _wrong_shape(value.shape, spec)
    return value.shape, to_bytes(value, spec.datatype)


def _texts(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """As `_numbers`, for BYTES. A flat list, as a tensor's map has it, fills what shape it can."""
    array = np.array(value, object)
    if not all(type(text) is str for text in array.flat):
        raise InvalidArgumentError(f"body.{spec.name}.data: holds what is not BYTES (texts)")
    shape = array.shape
    if not spec.admits(shape):
        filled = _filled(spec.shape, array.size) if array.ndim == 1 else None
        if filled is None:
            raise _wrong_shape(shape, spec)
        shape = filled
    return shape, _pack(array.ravel().tolist())


def _filled(wanted: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The one shape that `wanted` admits for as many items; None if there are none, or several."""
    open_sizes = wanted.count(-1)
    fixed = math.prod(one for one in wanted if one != -1)
    if open_sizes == 0 and fixed == size:
        return wanted
    if open_sizes == 1 and fixed and size % fixed == 0:
        return tuple(size // fixed if one == -1 else one for one in wanted)
    return None


def _wrong_shape(shape: Sequence[int], spec: TensorSpec) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"body.{spec.name}.shape: {list(shape)}, but this model takes {list(spec.shape)}"
    )


def _failed(job: Job, request: BatchedRequest, status: str, detail: str) -> Result:
    return Result(
        request.correlation_id,
        status,
        request.content_type,
        detail=detail,
        batch_size=len(job.batch.requests),
        queue_us=max(0, job.batch.dispatched_us - request.arrival_us),
        compute_us=job.compute_us,
    )


def _unpack(payload: bytearray) -> list[Any]:
    """The model's results; an exception in place of one that cannot be read."""
    try:
        values: list[Any] = frames.unpack_values(payload)
    except Exception:
        return frames.unpack_each(payload)
    return values


def _encode(request: BatchedRequest, value: Any) -> bytes | CarpoolError:
    if isinstance(value, Exception):
        return InternalError(f"the model's result cannot be passed on: {value}")
    try:
        return encode_body(request.content_type, value)
    except CarpoolError as error:
        return error


def _encode_stacked(
    requests: Sequence[BatchedRequest], parts: Sequence[frames.Part], payload: bytearray
) -> Iterable[bytes | CarpoolError]:
    """The rows of stacked results as bodies: for one tensor in msgpack a header and a slice, no decoding."""
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
            one = {part: array[row] for part, array in arrays.items()}
            yield _encode(request, one if len(parts) > 1 else one[name])


def _pack(value: Any) -> bytes:
    try:
        return frames.pack_values(value)
    except OverflowError:
        raise InvalidArgumentError("body: a number in it is beyond 64 bits") from None
    except (TypeError, ValueError) as error:  # half a surrogate pair from JSON's \ud800, for one
        raise InvalidArgumentError(f"body: cannot be passed on: {error}") from None


def _array_of_packed(values: Sequence[bytes]) -> bytes:
    """A msgpack array of values that are msgpack already."""
    count = len(values)
    return b"".join((b"\xdd", count.to_bytes(4, "big"), *values))
