"""A batch between Redis and the model: its requests' bodies into frames, the model's outcomes into results.

Pure: no Redis, no processes. A frame is what is executed together: normally the whole batch; where declared
tensors vary in shape, one frame for each shape; after a redelivery or a crash, one for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from carpool.bodies import decode_body, encode_body
from carpool.errors import (
    ABORTED,
    DEADLINE_EXCEEDED,
    OK,
    CarpoolError,
    InvalidArgumentError,
)
from carpool.messages import MSGPACK, RAW, Batch, BatchedRequest, DeadLetter, Result
from carpool.tensors import HeadMemo, TensorSpec, array_of, datatype_of, tensor_head, to_bytes
from carpool_worker import frames

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
    sent: bool = False  # every frame is in the process's pipe
    results: dict[int, Result] = field(default_factory=dict)
    noted: set[int] = field(default_factory=set)  # positions whose result was written ahead of the commit
    dead: list[DeadLetter] = field(default_factory=list)
    compute_us: int = 0

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
                else:
                    by_shape.setdefault(parts, []).append((position, value))
        job.frames = [
            self._frame(job, parts, group)
            for parts, whole in by_shape.items()
            for group in ([[one] for one in whole] if job.singly else [whole])
        ]

    def _decode(self, request: BatchedRequest) -> tuple[tuple[frames.Part, ...], Any]:
        """A body as (tensor parts, their bytes), or as ((), value) for a model that declares no tensors."""
        body = request.body
        if not self.inputs:
            return (), _pack(decode_body(request.content_type, body))
        if request.content_type == MSGPACK and (data := self._memo.data_of(body)) is not None:
            return ((self.inputs[0].name, self._memo.datatype, self._memo.shape),), data
        return self._decode_tensors(request)

    def _decode_tensors(self, request: BatchedRequest) -> tuple[tuple[frames.Part, ...], bytes]:
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
            array = as_array(value[spec.name], spec)
            parts.append((spec.name, spec.datatype, array.shape))
            data.append(to_bytes(array, spec.datatype))
        if len(parts) == 1 and request.content_type == MSGPACK:
            self._memo.remember(request.body, parts[0][1], parts[0][2], len(data[0]))
        return tuple(parts), b"".join(data)

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
        return Frame(positions, header, _by_part(parts, [value for _, value in group]))

    # --- outcomes -> results -------------------------------------------------------------------------------

    def take_outcome(self, job: Job, frame: Frame, header: frames.Header, payload: bytearray) -> None:
        """Give each request of an executed frame its result."""
        if header["count"] != len(frame.positions) or header["first"] != frame.positions[0]:
            raise RuntimeError("an outcome came for another frame")  # never: frames and outcomes are in order
        job.compute_us += header["compute_us"]
        requests = job.batch.requests
        failures = header["failures"]
        for at, (status, detail) in failures.items():
            position = frame.positions[at]
            job.results[position] = _failed(job, requests[position], status, detail)
        good = [position for at, position in enumerate(frame.positions) if at not in failures]
        parts = header.get("parts")
        encoded: Iterable[bytes | CarpoolError]
        if parts is None:
            values = frames.unpack_values(payload)
            encoded = (
                _encode(requests[position], value) for position, value in zip(good, values, strict=True)
            )
        else:
            encoded = _encode_stacked([requests[position] for position in good], parts, payload)
        for position, body in zip(good, encoded, strict=True):
            request = requests[position]
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


def as_array(value: Any, spec: TensorSpec) -> Any:
    """A decoded value as the array that `spec` declares. Raises InvalidArgumentError."""
    field_name = f"body.{spec.name}"
    if not hasattr(value, "dtype"):
        value = array_of(value, spec.datatype, field_name) if spec.datatype != "BYTES" else value
    if spec.datatype == "BYTES":
        raise InvalidArgumentError(f"{field_name}: BYTES tensors cannot be stacked")
    got = datatype_of(value)
    if got != spec.datatype and not (spec.datatype == "BF16" and got == "FP32"):
        raise InvalidArgumentError(f"{field_name}.datatype: {got}, but this model takes {spec.datatype}")
    if not spec.admits(value.shape):
        raise InvalidArgumentError(
            f"{field_name}.shape: {list(value.shape)}, but this model takes {list(spec.shape)}"
        )
    return value


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


def _encode(request: BatchedRequest, value: Any) -> bytes | CarpoolError:
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


def _by_part(parts: Sequence[frames.Part], items: Sequence[bytes]) -> bytes:
    """Items whose tensors lie one behind the other -> tensors whose items lie one behind the other."""
    stacked: list[bytes] = []
    start = 0
    for part in parts:
        end = start + frames.part_bytes(part, 1)
        stacked += [item[start:end] for item in items]
        start = end
    return b"".join(stacked)
