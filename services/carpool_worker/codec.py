"""Request bodies into frames for the model process, and outcomes into results.

A request that expired, that cannot be decoded or that is to be dead-lettered gets no frame, but its result
here, in its Execution. No Redis, no processes, no clock.

If the model raises, its frame is halved until the failing requests are alone, and all requests of the frame
are late. One producer's failing requests, one in each batch, would so delay those of all others. So requests
of producers on whose requests the model often raises have frames apart, and delay each other.

Why: docs/decisions/0027, docs/decisions/0028, docs/decisions/0098.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Self

import numpy as np

from carpool.errors import (
    ABORTED,
    INTERNAL,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
)
from carpool.messages.batches import BatchedRun
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.parts import Buffer
from carpool.producer_ratios import ProducerRatios
from carpool.rows import Rows, StoredBody
from carpool.wire.bodies import decode_body, encode_result_body, result_type
from carpool.wire.content_types import accepted, is_value
from carpool.wire.padding import pad_bytes, padded_shape, true_sizes
from carpool.wire.tensors import (
    Array,
    HeadMemo,
    TensorSpec,
    are_bools,
    array_of,
    bytes_of,
    check_bools,
    converted,
    is_tensor,
    tensor_head,
    text_of,
    to_be_sent,
    to_bytes,
)
from carpool_worker.execution import EXAMPLE_SEQUENCE, Example, Execution, Frame
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import (
    CallerFields,
    FrameHeader,
    Layout,
    OutcomeHeader,
    Ready,
    RequestFields,
)

_NAMES_SHOWN: Final = 10  # of those in a body, in an error
APART_RATIO_MIN: Final = 0.5  # of a producer's recent frames, these raised: halving costs more than a frame
EXAMPLE_BYTES_MAX: Final = 16 * 1024 * 1024
ERROR_CHARS_MAX: Final = 200  # of what operators are shown
_NO_SEQUENCE: Final = (None, False, False)  # no ID of a sequence, neither its start nor its end
_OTHER_KIND: Final = (
    "the model was replaced by one that {}, and the request was dispatched before: send it again"
)
_NO_STATE: Final = "sequence_id: {}; begin it again with sequence_start"

# Layouts of tensors, and the bytes of one, or a list of those of each. The layouts are () for a model that
# declares no tensors.
_Decoded = tuple[tuple[Layout, ...], Any]
# What shares a frame: positions and their data, by whether their producers are apart, and by tensor layouts.
_Groups = dict[tuple[bool, tuple[Layout, ...]], tuple[list[int], list[Any]]]


class Body(NamedTuple):
    """A decoded body, as its model process gets it."""

    layouts: Sequence[Layout]
    payload: Sequence[Buffer]


class Codec:
    """Encodes and decodes for one model, as it described itself when it was loaded.

    The tensors of a batch usually have the same head (datatype and shape) and differ only in their data, so
    most bodies need no decoding (HeadMemo), and rows with that head are passed on as they are. The same is
    true of results. Not for two threads.
    """

    def __init__(self, ready: Ready) -> None:
        self.inputs = ready.inputs
        self.outputs = ready.outputs
        self.has_tensors = bool(ready.inputs or ready.outputs)  # so octet-stream is the bytes of one
        self._has_bytes = any(_is_bytes(spec) for spec in (*ready.inputs, *ready.outputs))
        self.wants_requests = ready.wants_requests
        self._wants_callers = ready.wants_callers
        self.batch_size_max: int | None = None  # requests that the model takes at a time; None: any number
        self._version = ready.version
        self._has_cost = ready.has_cost
        self._pads = any(spec.buckets for spec in ready.inputs)
        self._takes_sequences = ready.kind.has_sequences
        self._initial_state = ready.initial_state  # empty: no states of sequences are in Redis
        self._memo = HeadMemo()
        self._result_head = _ResultHead((), 0, {})  # of the last outcome
        self._wall_ahead_us = 0  # what this host's wall clock shows, less Redis's time
        self._raising = ProducerRatios()  # of recent frames with requests of a producer, those that raised

    # --- bodies -> frames ----------------------------------------------------------------------------------

    def prepare(self, execution: Execution, now_us: int, wall_ahead_us: int = 0) -> None:
        """Build the frames of an execution that was just fetched, each of at most `batch_size_max` requests.

        `now_us`: Redis's time. `wall_ahead_us`: what this host's wall clock shows, less that; models are told
        times by it. A request that expired or that cannot be decoded gets its result instead. Of a suspect
        execution nothing is decoded yet (see `prepare_next`).
        """
        self._wall_ahead_us = wall_ahead_us
        execution.version = self._version
        if execution.is_suspect:
            execution.undecoded.extend(execution.unanswered)
            return
        groups: _Groups = {}
        raising = self._raising if len(self._raising) else None
        size_max = self.batch_size_max
        is_divided = size_max is not None and execution.batch.size > size_max  # dispatched for other workers
        for start, run in zip(execution.batch.first_positions, execution.batch.runs, strict=True):
            positions: Sequence[int] = range(start, start + len(run.correlation_ids))
            if execution.answered_before:
                positions = [position for position in positions if position not in execution.answered_before]
            is_whole = len(positions) == len(run.correlation_ids)
            is_apart = raising is not None and raising.of(run.producer) >= APART_RATIO_MIN
            if _expired(run, now_us):
                for position in positions:
                    execution.expire(position)
            elif is_whole and not is_divided and (stacked := self._stacked_rows(run)) is not None:
                layouts, data = stacked
                _add(groups, (is_apart, layouts), positions, data)
            else:
                for position in positions:
                    decoded = self._decode_or_fail(execution, run, position, position - start)
                    if decoded is not None:
                        _add(groups, (is_apart, decoded[0]), (position,), decoded[1])
        # Those that are apart are executed last.
        execution.frames = [
            self._frame(execution, layouts, positions, data)._replace(is_apart=is_apart)
            for (is_apart, layouts), group in sorted(groups.items(), key=lambda group: group[0][0])
            for positions, data in (_divided(*group, size_max) if is_divided and size_max else [group])
        ]

    def prepare_next(self, execution: Execution, now_us: int) -> bool:
        """Decode the next request of a suspect execution. Whether it has a frame now, which is the first one;
        if not, it has its result."""
        position = execution.undecoded[0]
        decoded = self._decode_next(execution, position, now_us)
        execution.undecoded.popleft()
        if decoded is None:
            return False
        execution.frames.insert(0, self._frame(execution, decoded[0], [position], [decoded[1]]))
        return True

    def body_of(self, execution: Execution, position: int, now_us: int) -> Body | None:
        """The body of one request, for a stepping model. None as in `_decode_next`."""
        decoded = self._decode_next(execution, position, now_us)
        return None if decoded is None else Body(decoded[0], _payload(decoded[0], [decoded[1]]))

    def _decode_next(self, execution: Execution, position: int, now_us: int) -> _Decoded | None:
        """A body decoded. None if its request expired, cannot be decoded or is to be dead-lettered: then that
        gets its result."""
        run, index = execution.locate(position)
        execution.version = self._version
        if _expired(run, now_us):
            execution.expire(position)
        elif execution.is_given_up(position):
            execution.dead_letter(position)
        else:
            return self._decode_or_fail(execution, run, position, index)
        return None

    def _stacked_rows(self, run: BatchedRun) -> _Decoded | None:
        """The rows of a run as they are, if each is a tensor's data; None: decode each body.

        In msgpack they are if the head of the run is that of the tensor, in octet-stream if it has none.
        """
        rows = run.bodies
        if type(rows) is not Rows or len(self.inputs) != 1 or len(rows) < 2 or self._takes_sequences:
            return None
        if self._pads:
            return None
        spec = self.inputs[0]
        if run.content_type == RAW:
            if rows.head or spec.fixed_bytes != rows.width or not _are_valid(spec.datatype, rows.data):
                return None
            return ((spec.name, spec.datatype, spec.shape),), rows.data
        if run.content_type != MSGPACK:
            return None
        first = rows[0]
        data = self._memo.data_of(first)
        if data is None:
            with contextlib.suppress(Exception):  # what is wrong is reported when each body is decoded
                self._decode_tensors(MSGPACK, first)  # which remembers the head
            data = self._memo.data_of(first)
        if data is None or len(data) != rows.width or not _are_valid(self._memo.datatype, rows.data):
            return None
        return ((spec.name, self._memo.datatype, self._memo.shape),), rows.data

    def _decode_or_fail(
        self, execution: Execution, run: BatchedRun, position: int, index: int
    ) -> _Decoded | None:
        """One body decoded; None if it cannot be: then its request has a result."""
        body = run.bodies[index]
        if isinstance(body, StoredBody):  # it could not be loaded, so its request has a result
            return None
        if self._takes_sequences or run.sequence is not None:
            reason = self._why_without_state(execution, run, position)
            if reason:
                execution.fail(position, ABORTED, reason)
                return None
        try:
            data = self._memo.data_of(body) if run.content_type == MSGPACK else None
            if data is None or not _are_valid(self._memo.datatype, data):
                decoded = self._decode(run.content_type, body)
            else:
                decoded = ((self.inputs[0].name, self._memo.datatype, self._memo.shape),), data
            if self._pads:
                decoded, execution.sizes[position] = self._padded(decoded)
            return decoded
        except CarpoolError as error:
            execution.fail(position, error.status, error.detail)
        except MemoryError:
            detail = f"body: the worker has not enough memory to decode its {len(body):,} bytes"
            execution.fail(position, RESOURCE_EXHAUSTED, detail)
        except Exception as error:  # an unforeseen case must not fail the other requests
            execution.fail(position, INVALID_ARGUMENT, f"body: cannot be decoded ({error})")
        execution.unexecuted.append(position)
        return None

    def _padded(self, decoded: _Decoded) -> tuple[_Decoded, dict[str, list[int]]]:
        """A decoded body, padded to buckets, and its true sizes. Raises InvalidArgumentError if it is too
        large."""
        layouts, data = decoded
        by_input = [data] if len(layouts) == 1 else data
        found: list[Layout] = []
        padded: list[Buffer] = []
        sizes: dict[str, list[int]] = {}
        for spec, (name, datatype, shape), content in zip(self.inputs, layouts, by_input, strict=True):
            bucket = padded_shape(spec, shape)
            found.append((name, datatype, bucket))
            padded.append(pad_bytes(spec, shape, bucket, content) if spec.buckets else content)
            if spec.buckets:
                sizes[name] = true_sizes(spec, shape)
        return (tuple(found), padded[0] if len(layouts) == 1 else padded), sizes

    def _why_without_state(self, execution: Execution, run: BatchedRun, position: int) -> str:
        """Why a request cannot be executed for want of the state of its sequence; empty if it can be."""
        part, needed_bytes = run.sequence, len(self._initial_state)
        if part is None:
            return _OTHER_KIND.format("keeps states of sequences")
        if not self._takes_sequences:
            return _OTHER_KIND.format("keeps none of sequences")
        if part.starts or not needed_bytes:
            return ""
        state = execution.states.get(position)
        if state is None:
            return _NO_STATE.format(f"the state of {part.sequence_id} is lost")
        if len(state) != needed_bytes:
            return _NO_STATE.format(
                f"the state of {part.sequence_id} has {len(state)} bytes, but this model's states take "
                f"{needed_bytes}: the model was replaced"
            )
        return ""

    def _decode(self, content_type: str, body: bytes) -> _Decoded:
        if not self.inputs:
            return (), _pack(decode_body(content_type, body))
        return self._decode_tensors(content_type, body)

    def _decode_tensors(self, content_type: str, body: bytes) -> _Decoded:
        inputs: Sequence[TensorSpec] = self.inputs
        if not is_value(content_type):
            return self._raw_tensor(content_type, body)
        value = decode_body(content_type, body, declared=True)
        if len(inputs) == 1 and not (isinstance(value, dict) and value.keys() == {inputs[0].name}):
            value = {inputs[0].name: value}
        if not isinstance(value, dict) or value.keys() != {spec.name for spec in inputs}:
            inputs = _inputs_in(value, inputs)
        layouts: list[Layout] = []
        data: list[bytes] = []
        for spec in inputs:
            read = _elements if spec.datatype == "BYTES" else _numbers
            shape, item = read(value[spec.name], spec)
            layouts.append((spec.name, spec.datatype, shape))
            data.append(item)
        if len(layouts) > 1:
            return tuple(layouts), data
        if content_type == MSGPACK and len(self.inputs) == 1 and inputs[0].datatype != "BYTES":
            self._memo.remember(body, layouts[0][1], layouts[0][2], len(data[0]))
        return tuple(layouts), data[0]

    def _raw_tensor(self, content_type: str, body: bytes) -> tuple[tuple[Layout, ...], bytes]:
        """A body of bytes, for a model with one tensor of fixed shape: in octet-stream that tensor's bytes,
        and in any type the only element of BYTES."""
        spec = self.inputs[0]
        if len(self.inputs) == 1 and _is_bytes(spec) and {*spec.shape} <= {1}:
            return ((spec.name, spec.datatype, spec.shape),), _pack([bytes(body)])
        expected_bytes = spec.fixed_bytes
        if content_type != RAW or len(self.inputs) > 1 or expected_bytes is None:
            raise InvalidArgumentError(
                "content_type: this model's tensors need application/msgpack or application/json"
            )
        if len(body) != expected_bytes:
            raise InvalidArgumentError(
                f"body: {len(body)} bytes, but the tensor {spec.name!r} takes {expected_bytes}"
            )
        check_bools(spec.datatype, body)
        return ((spec.name, spec.datatype, spec.shape),), body

    def _frame(
        self, execution: Execution, layouts: tuple[Layout, ...], positions: list[int], values: list[Any]
    ) -> Frame:
        fields: list[RequestFields] = []
        if self.wants_requests:
            fields = [self.request_fields(execution, position) for position in positions]
        header = FrameHeader(
            positions[0],
            len(positions),
            layouts,
            fields,
            _deadlines(execution, positions),
            execution.batch.max_result_bytes,
            max_execution_ms=execution.batch.max_execution_ms,
            trace=() if execution.trace is None else execution.trace.batch.headers,
        )
        if self._pads:
            header = header._replace(sizes=_by_input([execution.sizes[position] for position in positions]))
        if self._has_cost:
            cost_max = execution.batch.max_batch_cost
            header = header._replace(cost_max=cost_max, costs=_costs(execution, positions))
        if self._wants_callers:
            header = header._replace(callers=[_caller(*execution.locate(position)) for position in positions])
        payload = _payload(layouts, values)
        if self._initial_state:
            states, initial = execution.states, self._initial_state  # those that start have none yet
            payload += [states.get(position, initial) for position in positions]
        return Frame(positions, header, payload)

    def request_fields(
        self, execution: Execution, position: int, wall_ahead_us: int | None = None
    ) -> RequestFields:
        """What the model is told of a request beside its body. `wall_ahead_us`: see `prepare`; None: as it
        was there."""
        run, index = execution.locate(position)
        part = _NO_SEQUENCE if run.sequence is None else run.sequence[:3]
        ahead_us = self._wall_ahead_us if wall_ahead_us is None else wall_ahead_us
        # Redis's time as this process knows it may be milliseconds behind: nothing arrives in the future.
        arrival_s = min((run.arrival_us + ahead_us) / 1e6, time.time())
        return (
            run.correlation_ids[index],
            execution.batch.lane,
            run.extra or {},
            *part,
            None,
            run.content_type,
            run.priority,
            run.cost,
            arrival_s,
            None if run.deadline_us is None else (run.deadline_us + ahead_us) / 1e6,
            execution.batch.epoch + execution.deaths.get(position, 0),
        )

    def example_of(self, execution: Execution, position: int) -> Example | None:
        """A request that succeeded as an example; None if it is too large, or goes on with a sequence."""
        run, index = execution.locate(position)
        body, part = run.bodies[index], run.sequence
        if isinstance(body, StoredBody) or len(body) > EXAMPLE_BYTES_MAX or (part and not part.starts):
            return None
        sizes: dict[str, list[int]] = {}
        try:
            decoded = self._decode(run.content_type, bytes(body))
            if self._pads:
                decoded, sizes = self._padded(decoded)
        except Exception:  # it was decoded before, as rows
            return None
        layouts, value = decoded
        run_fields = self.request_fields(execution, position)
        sequence = (EXAMPLE_SEQUENCE, True, True) if self._takes_sequences else _NO_SEQUENCE
        # It is executed later, and once in each process: it has no deadline, and counts as delivered once.
        request = (*run_fields[:3], *sequence, *run_fields[6:11], None, 1)
        fields = [request] if self.wants_requests else []
        payload = b"".join([*_payload(layouts, [value]), self._initial_state])
        batch = execution.batch
        header = FrameHeader(0, 1, layouts, fields, sizes=_by_input([sizes]))
        if self._wants_callers:
            header = header._replace(callers=[_caller(run, index)])
        return Example(header, payload, request, batch.cost, batch.max_execution_ms)

    # --- outcomes -> results -------------------------------------------------------------------------------

    def give_results(
        self, execution: Execution, frame: Frame, outcome: OutcomeHeader, payload: Buffer
    ) -> None:
        """Give each request of an executed frame its result."""
        if outcome.size != len(frame.positions) or outcome.first != frame.positions[0]:
            raise RuntimeError(
                "an outcome belongs to another frame"
            )  # never: frames and outcomes are in order
        execution.compute_us += outcome.compute_us
        execution.frames_executed += outcome.parts
        execution.cost += outcome.cost
        execution.decode_us = max(execution.decode_us, outcome.decode_us)
        execution.decode_waited_us += outcome.waited_us
        execution.executed += outcome.executed_together
        execution.is_normal &= outcome.executed_together > 0 or frame.is_apart
        if outcome.errors:
            execution.error = [*outcome.errors][-1]
        if outcome.raised or len(self._raising):
            blamed = {execution.locate(frame.positions[index])[0].producer for index in outcome.raised}
            for producer in {run.producer for run, _, _ in _by_run(execution, frame.positions)}:
                self._raising.observe(producer, 1.0 if producer in blamed else 0.0)
        failures = outcome.failures
        succeeded = frame.positions
        if failures:
            execution.unexecuted += [frame.positions[index] for index in (*outcome.refused, *outcome.raised)]
            for index, (status, detail) in failures.items():
                execution.fail(succeeded[index], status, detail)
            for index, reason in outcome.given_up.items():
                execution.dead_letter(succeeded[index], reason)
            succeeded = [position for index, position in enumerate(succeeded) if index not in failures]
        if self._initial_state:
            payload = self._keep_states(execution, succeeded, payload)
        if outcome.layouts:
            self._give_rows(execution, succeeded, outcome.layouts, payload)
        else:
            values = _unpack(payload)
            if len(values) != len(succeeded):
                raise RuntimeError(f"{len(values)} results for {len(succeeded)} requests")  # never
            for run, start, indexes in _by_run(execution, succeeded):
                run_values = values[indexes.start : indexes.stop]
                self._give_values(execution, run, start, succeeded[indexes.start : indexes.stop], run_values)

    def _keep_states(self, execution: Execution, positions: Sequence[int], payload: Buffer) -> Buffer:
        """Keep the new states of these requests, which are in a payload. Returns its other part."""
        row_bytes = len(self._initial_state)
        results, rows = frames.divide_payload(payload, row_bytes * len(positions))
        for index, position in enumerate(positions):
            execution.states[position] = bytes(rows[index * row_bytes : (index + 1) * row_bytes])
        return results

    def _give_rows(
        self, execution: Execution, positions: Sequence[int], layouts: Sequence[Layout], payload: Buffer
    ) -> None:
        """Stacked results. One tensor in msgpack or octet-stream is a head and a row: no decoding."""
        if layouts != self._result_head.layouts:
            self._result_head = _ResultHead.of(layouts)
        _, row_bytes, heads = self._result_head
        view = memoryview(payload)
        arrays: dict[str, Array] = {}
        for run, start, indexes in _by_run(execution, positions):
            wanted = accepted(run.extra)
            is_value_of_bytes = run.content_type == RAW and not (wanted or self.has_tensors)
            head = None if is_value_of_bytes else heads.get(wanted or run.content_type)
            if head is None:
                arrays = arrays or frames.unstack(layouts, len(positions), payload, to_be_sent)
                run_values = [_row(arrays, index) for index in indexes]
                self._give_values(execution, run, start, positions[indexes.start : indexes.stop], run_values)
                continue
            if 0 < row_bytes <= execution.batch.max_result_bytes - len(head):
                rows = Rows(head, view[indexes.start * row_bytes : indexes.stop * row_bytes], row_bytes)
                execution.succeed(run, start, positions[indexes.start : indexes.stop], rows, wanted)
                continue
            bodies = [
                b"".join((head, view[index * row_bytes : (index + 1) * row_bytes])) for index in indexes
            ]
            _give_bodies(execution, run, start, positions[indexes.start : indexes.stop], bodies, wanted)

    def _give_values(
        self,
        execution: Execution,
        run: BatchedRun,
        start: int,
        positions: Sequence[int],
        values: Sequence[Any],
    ) -> None:
        """Results of requests of one run, which may have several content types."""
        content_type, wanted = run.content_type, accepted(run.extra)
        if wanted or is_value(content_type):  # the usual case: all have one
            if self._has_bytes and (wanted or content_type) == JSON:
                values = [_for_json(value) for value in values]
            bodies = [encode_or_error(content_type, wanted, value) for value in values]
            _give_bodies(execution, run, start, positions, bodies, wanted)
            return
        shown = [_shown_as(content_type, value) for value in values]
        for position, value in zip(positions, shown, strict=True):
            chosen_type = result_type(content_type, wanted, value, has_tensors=self.has_tensors)
            is_for_json = self._has_bytes and chosen_type == JSON
            body = encode_or_error(chosen_type, "", _for_json(value) if is_for_json else value)
            _give_bodies(execution, run, start, [position], [body], chosen_type)


class _ResultHead(NamedTuple):
    """What all rows of an outcome have in common: `layouts`, the bytes of a row of the first of them, and
    what a body of each content type begins with before its row; none for content types that need encoding.
    """

    layouts: Sequence[Layout]
    row_bytes: int
    by_content_type: Mapping[str, bytes]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Self:
        row_bytes = frames.stacked_bytes(layouts[0], 1)
        if len(layouts) > 1:
            return cls(layouts, row_bytes, {})
        _, datatype, shape = layouts[0]
        return cls(layouts, row_bytes, {MSGPACK: tensor_head(datatype, shape, row_bytes), RAW: b""})


def _caller(run: BatchedRun, index: int) -> CallerFields:
    return run.correlation_ids[index], run.priority, run.extra or {}


def _deadlines(execution: Execution, positions: Sequence[int]) -> Sequence[tuple[int, int | None]]:
    """Those of the requests at these positions, for a frame."""
    batch = execution.batch
    if len(positions) == batch.size:
        deadlines = [(len(run.correlation_ids), run.deadline_us) for run in batch.runs]
    else:
        deadlines = [(1, execution.locate(position)[0].deadline_us) for position in positions]
    return deadlines if any(deadline_us is not None for _, deadline_us in deadlines) else ()


def _by_input(sizes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[Sequence[int]]]:
    """The true sizes of requests, for a frame: of each padded input those of all."""
    return {name: [of_one[name] for of_one in sizes] for name in sizes[0]}


def _costs(execution: Execution, positions: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Those that producers sent with the requests at these positions, for a frame."""
    if all(run.cost == 1 for run in execution.batch.runs):
        return ()
    return [(indexes.stop - indexes.start, run.cost) for run, _, indexes in _by_run(execution, positions)]


def _are_valid(datatype: str, data: Buffer) -> bool:
    """Whether these may be the bytes of tensors; if not, those of each request are decoded to tell which."""
    return datatype != "BOOL" or are_bools(data)


def _expired(run: BatchedRun, now_us: int) -> bool:
    return run.deadline_us is not None and run.deadline_us <= now_us


def _add(
    groups: _Groups, shared: tuple[bool, tuple[Layout, ...]], positions: Iterable[int], data: Any
) -> None:
    """Add the data of the requests at these positions to the frame of what they share."""
    group = groups.get(shared)
    if group is None:
        group = groups[shared] = ([], [])
    group[0].extend(positions)
    group[1].append(data)


def _divided(positions: list[int], data: list[Any], size_max: int) -> list[tuple[list[int], list[Any]]]:
    """Requests that share a frame, in groups of at most `size_max`. `data` has an item for each."""
    starts = range(0, len(positions), size_max)
    return [(positions[at : at + size_max], data[at : at + size_max]) for at in starts]


def _by_run(execution: Execution, positions: Sequence[int]) -> list[tuple[BatchedRun, int, range]]:
    """The runs of the requests at these ascending positions, each with its first position in the batch, and
    the indexes in `positions` of its requests."""
    batch, count = execution.batch, len(positions)
    first_positions, runs = batch.first_positions, batch.runs
    if count == batch.size:  # the usual case: all of them
        return [
            (run, start, range(start, start + len(run.correlation_ids)))
            for run, start in zip(runs, first_positions, strict=True)
        ]
    found: list[tuple[BatchedRun, int, range]] = []
    index = number = 0
    while index < count:
        number = bisect_right(first_positions, positions[index], number) - 1
        run, start = runs[number], first_positions[number]
        size = len(run.correlation_ids)
        stop = index + 1 if size == 1 else bisect_left(positions, start + size, index)
        found.append((run, start, range(index, stop)))
        index = stop
    return found


def _give_bodies(
    execution: Execution,
    run: BatchedRun,
    start: int,
    positions: Sequence[int],
    bodies: Sequence[bytes | CarpoolError],
    content_type: str,
) -> None:
    """Results of requests of one run. An error in place of a body fails its request. `content_type`: of the
    bodies; empty if it is that of the run."""
    taken: list[int] = []
    fitting: list[bytes] = []
    bytes_max = execution.batch.max_result_bytes
    for position, body in zip(positions, bodies, strict=True):
        if type(body) is not bytes:
            assert isinstance(body, CarpoolError)
            if body.status == INTERNAL:  # the model's doing
                execution.error = body.detail[:ERROR_CHARS_MAX]
            execution.fail(position, body.status, body.detail)
        elif len(body) > bytes_max:
            status, execution.error = frames.too_large(bytes_max)
            execution.fail(position, status, execution.error)
        else:
            taken.append(position)
            fitting.append(body)
    if fitting:
        execution.succeed(run, start, taken, fitting, content_type)


def _inputs_in(value: Any, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The declared inputs that a body has, which may lack optional ones. Raises InvalidArgumentError."""
    if isinstance(value, dict):
        found = [spec for spec in inputs if spec.name in value]
        if len(found) == len(value) and found and all(spec.optional for spec in inputs if spec not in found):
            return found
    given = f"a map of {_names_of(value)}" if isinstance(value, dict) else "no map"
    optional = [spec.name for spec in inputs if spec.optional]
    more = f", and may have {', '.join(optional)}" if optional else ""
    raise InvalidArgumentError(
        "body: must be a map with exactly the tensors "
        f"{', '.join(spec.name for spec in inputs if not spec.optional)}{more}; it is {given}"
    )


def _numbers(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """The shape and bytes of a decoded numeric tensor, as `spec` declares it. Raises InvalidArgumentError."""
    field_name = f"body.{spec.name}"
    if type(value) is dict:
        raise _no_tensor(value, spec)
    if hasattr(value, "dtype"):
        value = converted(value, spec.datatype, field_name)
    else:
        value = array_of(value, spec.datatype, field_name)
    if not spec.admits(value.shape):
        raise _wrong_shape(value.shape, spec)
    return value.shape, to_bytes(value, spec.datatype)


def _elements(value: Any, spec: TensorSpec) -> tuple[tuple[int, ...], bytes]:
    """As `_numbers`, for BYTES: a packed list of bytes, or of texts if the model takes these."""
    if type(value) is dict:
        raise _no_tensor(value, spec)
    array = np.array(value, object)
    elements = array.ravel().tolist()
    element_of = text_of if spec.text else bytes_of
    if not {str if spec.text else bytes}.issuperset(map(type, elements)):
        try:
            elements = [element_of(item) for item in elements]
        except ValueError as error:
            raise InvalidArgumentError(
                f"body.{spec.name}.data: BYTES takes strings{'' if spec.text else ' and bytes'} only: {error}"
            ) from None
    if not spec.admits(array.shape):
        raise _wrong_shape(array.shape, spec)
    return array.shape, _pack(elements)


def _is_bytes(spec: TensorSpec) -> bool:
    return spec.datatype == "BYTES" and not spec.text


def _for_json(value: Any) -> Any:
    """A result whose bytes are texts, because JSON has no others; an exception if they are not UTF-8."""
    try:
        return _with_texts(value)
    except ValueError as error:
        return ValueError(f"{error}, and JSON has no other bytes: ask for {MSGPACK}")


def _with_texts(value: Any) -> Any:
    if type(value) is bytes:
        return text_of(value)
    if type(value) is not dict:
        return value
    if not is_tensor(value):  # the outputs by name
        return {name: _with_texts(item) for name, item in value.items()}
    if value["datatype"] != "BYTES":
        return value
    return {**value, "data": [text_of(item) for item in value["data"]]}


def _no_tensor(value: Mapping[Any, Any], spec: TensorSpec) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"body.{spec.name}: must be a tensor, which is a map of datatype, shape and data, or a list; "
        f"it is a map of {_names_of(value)}"
    )


def _names_of(value: Mapping[Any, Any]) -> str:
    """The names in a map, for an error; of too many or too long ones the first."""
    return f"{', '.join(sorted(map(str, islice(value, _NAMES_SHOWN)))):.200}" or "nothing"


def _wrong_shape(shape: Sequence[int], spec: TensorSpec) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"body.{spec.name}.shape: {list(shape)}, but this model takes {list(spec.shape)}"
    )


def _unpack(payload: Buffer) -> list[Any]:
    """The model's results; an exception replaces one that cannot be unpacked."""
    try:
        values: list[Any] = frames.unpack_results(payload)
    except Exception:
        return frames.unpack_each(payload)
    return values


def encode_or_error(content_type: str, wanted: str, value: Any) -> bytes | CarpoolError:
    """A result in the content type that its request wants, or else in `content_type`; or why it cannot be."""
    if isinstance(value, Exception):
        return InternalError(f"the model's result cannot be encoded: {value}")
    try:
        chosen_type = result_type(content_type, wanted, value) if wanted else content_type
        return encode_result_body(chosen_type, _shown_as(chosen_type, value))
    except CarpoolError as error:
        return error


def _shown_as(content_type: str, value: Any) -> Any:
    """A tensor of one number without dimensions is a number where no tensors are, in whatever way it came."""
    is_number = isinstance(value, np.ndarray) and value.ndim == 0 and content_type not in (MSGPACK, RAW)
    return value[()] if is_number else value


def _row(arrays: dict[str, Array], index: int) -> Any:
    """One row of stacked results: an array, or several by name."""
    rows = {name: array[index] for name, array in arrays.items()}
    return rows if len(rows) > 1 else next(iter(rows.values()))


def _pack(value: Any) -> bytes:
    try:
        return frames.pack_values(value)
    except OverflowError:
        raise InvalidArgumentError("body: contains an integer of more than 64 bits") from None
    except (TypeError, ValueError) as error:  # for example a lone surrogate, from JSON's \ud800
        raise InvalidArgumentError(f"body: cannot be encoded for the model: {error}") from None


def _payload(layouts: Sequence[Layout], values: list[Any]) -> list[Any]:
    """The decoded bodies of requests as the payload of a frame, in parts."""
    if not layouts:
        return _array_of_packed(values)
    if len(layouts) == 1:
        return values
    return [item for items in zip(*values, strict=True) for item in items]


def _array_of_packed(values: Sequence[bytes]) -> list[bytes]:
    """A msgpack array of values that are already packed, in parts."""
    return [b"\xdd" + len(values).to_bytes(4, "big"), *values]
