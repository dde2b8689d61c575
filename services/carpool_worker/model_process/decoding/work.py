"""A frame on its way: its bodies are decoded one by one, and the model gets what comes of them.

Each body is decoded by a thread of the pool; the last of them makes the batch. A request whose deadline
passes meanwhile is not waited for. What the model may have written into is decoded again before it is handed
out again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import (
    ABORTED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    CarpoolError,
    Unhealthy,
    error_for,
)
from carpool.messages.results import GIVEN_UP
from carpool.parts import Buffer
from carpool.wire.padding import pad_array, padded_shape, true_sizes
from carpool.wire.tensors import Array, TensorSpec, for_numpy, in_datatype, unmasked, why_lost
from carpool_worker.model_process import frames
from carpool_worker.model_process.costs import cost_of, of_producers
from carpool_worker.model_process.decoding.callers import Body, Caller, GivenUpError, Keep
from carpool_worker.model_process.decoding.pool import Jobs
from carpool_worker.model_process.decoding.process import HookRaisedError
from carpool_worker.model_process.executor import FIXED_TYPES, Checked, StackedItems
from carpool_worker.model_process.failures import OutputError, WrongOutputError, failure_of
from carpool_worker.model_process.frame_execution import deadlines_of, redis_now_us
from carpool_worker.model_process.frames import Failure, FrameHeader
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
from carpool_worker.model_process.padding import with_lengths

_LATE: Final = (DEADLINE_EXCEEDED, "expired: its deadline passed before its body was decoded")


# --- bodies ------------------------------------------------------------------------------------------------


class Bodies:
    """The bodies of a frame. What is handed out is made anew each time, so that it may be changed."""

    def __init__(self, frame: FrameHeader, payload: Buffer) -> None:
        self._payload = memoryview(payload)
        self._items = None
        self._places: list[slice] = []
        if frame.layouts:
            self._items = StackedItems(frames.unstack(frame.layouts, frame.size, payload))
        else:
            self._places = frames.places_in(self._payload)

    def of(self, index: int) -> Body:
        """That of one request."""
        if self._items is not None:
            return _Row(self._items, index)
        return _Packed(self._payload[self._places[index]])


class _Packed(NamedTuple):
    data: memoryview

    def value(self) -> Any:
        return frames.unpack_bodies(self.data)

    def packed(self) -> Buffer:
        return self.data


class _Row(NamedTuple):
    items: StackedItems
    row: int

    def value(self) -> Any:
        return self.items.item(self.row)

    def packed(self) -> Buffer:
        return frames.pack_exactly(self.value())


# --- the frame ---------------------------------------------------------------------------------------------


class Observed(NamedTuple):
    """What the model raised on a body: an exception, or of a decoder process its name and traceback."""

    at: int
    error: BaseException | None
    name: str = ""
    trace: str = ""


class Decoding:
    """Bodies of a frame that are decoded: all, or again some of them.

    Once `wait` has returned: `rejected` has those that failed, `given_up` why those were that ended
    processes, `costs` what the others cost, if the model tells that, and `raised` what the log is to have.
    """

    def __init__(
        self,
        model: LoadedModel,
        frame: FrameHeader,
        bodies: Bodies,
        indexes: Sequence[int] | None = None,
        costs: dict[int, int] | None = None,
    ) -> None:
        """`indexes`, `costs`: of those that are decoded again, which are not validated again."""
        assert model.beside is not None
        self.frame = frame
        self.model = model
        self.bodies = bodies
        self.specs = model.beside.decoded
        self.rejected: dict[int, Failure] = {}
        self.given_up: dict[int, str] = {}
        self.raised: list[Observed] = []
        self.costs: dict[int, int] = {} if costs is None else costs
        self._producer_costs = of_producers(frame.costs, frame.size) if model.cost is not None else ()
        self._is_again = indexes is not None
        self._takes_request = "decode" in model.beside.take_request
        self._batch = _new_batch(self.specs, frame.size)
        self._indexes = range(frame.size) if indexes is None else indexes
        self._open = set(self._indexes)
        self._deadlines_us = deadlines_of(frame)
        self._changed = threading.Condition()
        self._is_ready = not self._open
        self._broken: BaseException | None = None
        self.again: list[Decoding] = []  # of the same frame, whose late bodies were still decoded
        self._running: dict[int, tuple[Caller, int]] = {}  # by request: its caller, and when it began (ns)
        self._began_ns = self._ended_ns = time.monotonic_ns()

    def start(self, jobs: Jobs) -> None:
        """Have all decoded."""
        for index in sorted(self._open):
            jobs.put(self.frame.number, partial(self._decode, index))

    @property
    def took_us(self) -> int:
        """How long it took to decode all of them."""
        return (self._ended_ns - self._began_ns) // 1000

    def wait(self) -> _Batch:
        """Wait until all bodies of requests in time are decoded. Raises Unhealthy, and what is unforeseen."""
        with self._changed:
            while not self._is_ready and self._broken is None:
                late = [index for index in self._open if self._is_late(index)]
                if late:
                    for index in late:
                        self.rejected[index] = _LATE
                    self._close(late)
                else:
                    self._changed.wait(self._until_late_s())
        if self._broken is not None:
            raise self._broken
        return self._batch

    def _is_late(self, index: int) -> bool:
        deadline_us = self._deadlines_us[index] if self._deadlines_us else None
        return deadline_us is not None and deadline_us <= redis_now_us(self.frame)

    def _until_late_s(self) -> float | None:
        if not self._deadlines_us:
            return None
        deadlines_us = [us for index in self._open if (us := self._deadlines_us[index]) is not None]
        return max(0.0, (min(deadlines_us) - redis_now_us(self.frame)) / 1e6) if deadlines_us else None

    def _close(self, indexes: Sequence[int]) -> None:
        """These are decoded, or have failed. With the lock."""
        self._open.difference_update(indexes)
        if not self._open and not self._is_ready:
            try:
                decoded = [index for index in self._indexes if index not in self.rejected]
                self.rejected |= self._batch.complete(decoded)
            except BaseException as error:  # else the model's thread would wait for ever
                self._broken = error
            self._ended_ns = time.monotonic_ns()
            self._is_ready = True
            self._changed.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether a body is being decoded that `end_overdue` may end. After `wait` no batch needs it."""
        return bool(self._running) or any(again.is_running for again in self.again)

    def end_overdue(self) -> None:
        """After `wait`: end what has decoded a late body for longer than `max_execution_ms`. It may hang, and
        nothing else could be decoded in its place. Raises Unhealthy if this process has to end for that."""
        limit_ms = self.frame.max_execution_ms
        if limit_ms is None:
            return
        for again in self.again:
            again.end_overdue()
        with self._changed:  # so that none of them begins another body meanwhile
            for index, (caller, since_ns) in [*self._running.items()]:
                if time.monotonic_ns() - since_ns > limit_ms * 1_000_000:
                    del self._running[index]  # once
                    caller.interrupt(
                        f"decode of a late request took longer than max_execution_ms, {limit_ms} ms"
                    )

    # --- in a thread of the pool ---------------------------------------------------------------------------

    def _decode(self, index: int, caller: Caller) -> None:
        if index not in self._open:
            return
        is_limited = self.frame.max_execution_ms is not None
        if is_limited:
            self._running[index] = caller, time.monotonic_ns()
        try:
            self._decode_and_take(index, caller)
        except BaseException as error:  # unforeseen
            self._break(error)
        finally:
            if is_limited:
                with self._changed:
                    self._running.pop(index, None)

    def _decode_and_take(self, index: int, caller: Caller) -> None:
        failure = observed = None
        reason = ""
        value: Any = None
        try:
            if self._is_late(index):
                failure = _LATE
            else:
                value = self._decoded(index, caller)
        except HookRaisedError as error:
            failure = error.failure
            observed = Observed(index, None, error.name, error.trace) if error.name else None
        except GivenUpError as error:
            reason = str(error)
            failure = (ABORTED, f"{GIVEN_UP}: {reason}")
        except _RejectedError as error:
            failure = error.failure
            observed = None if error.observed is None else Observed(index, error.observed)
        except WrongOutputError as error:
            failure = failure_of(error, INTERNAL)
        except BaseException as error:  # a library's panic, SystemExit: none may end this process
            try:
                failure = failure_of(error, INVALID_ARGUMENT)
            except Unhealthy as unhealthy:
                self._break(unhealthy)
                return
            observed = None if isinstance(error, CarpoolError) else Observed(index, error)
        self._take(index, value, failure, observed, reason)

    def _decoded(self, index: int, caller: Caller) -> Any:
        body = self.bodies.of(index)
        if not self._is_again:
            self._check(body)
            self._ask_cost(index, body)
        request: Sequence[Any] | None = None
        if self._takes_request:
            request = self.frame.requests[index]
            if (cost := self.costs.get(index)) is not None:
                request = RequestInfo(*request)._replace(cost=cost)
        keep: Keep | None = partial(self._batch.keep, index) if self.specs else None
        return caller.decode(body, request, keep)

    def _check(self, body: Body) -> None:
        """Have the model validate a body. Raises _RejectedError."""
        if self.model.validate is not None:
            try:
                self.model.validate(body.value())
            except BaseException as error:
                raise _RejectedError(failure_of(error, INVALID_ARGUMENT)) from error

    def _ask_cost(self, index: int, body: Body) -> None:
        """Have the model tell what a body costs. Raises _RejectedError."""
        if self.model.cost is None:
            return
        try:
            cost = cost_of(self.model.cost, body.value(), self._producer_costs[index])
        except BaseException as error:
            observed = None if isinstance(error, OutputError) else error
            raise _RejectedError(failure_of(error, INTERNAL), observed) from error
        with self._changed:
            if index in self._open:  # else no batch needs it, and the model may be running on the others
                self.costs[index] = cost

    def _take(
        self, index: int, value: Any, failure: Failure | None, observed: Observed | None, reason: str
    ) -> None:
        with self._changed:
            if index not in self._open:  # its deadline passed meanwhile
                return
            if failure is None:
                self._batch.values[index] = value
            else:
                self.rejected[index] = failure
            if reason:
                self.given_up[index] = reason
            if observed is not None:
                self.raised.append(observed)
            self._close((index,))

    def _break(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()


class _RejectedError(Exception):
    """`validate` raised, which is no error of the model; or `cost` did: then what it raised is `observed`."""

    def __init__(self, failure: Failure, observed: BaseException | None = None) -> None:
        super().__init__(failure[1])
        self.failure = failure
        self.observed = observed


# --- batches -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Requests that one call of the model can take, and their arrays, stacked by name."""

    indexes: tuple[int, ...]
    arrays: dict[str, Array]


class _Batch:
    """What was decoded of a frame, by index: any values, of which the model gets a list."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.parts: list[Part] = []  # of arrays
        self.sizes: dict[str, list[Sequence[int]]] = {}  # of arrays that are padded, the true ones

    def keep(self, index: int, value: Any) -> Any:
        """Take what `decode` returned for a request. What is to be in `values`. Raises WrongOutputError."""
        raise NotImplementedError

    def complete(self, indexes: Sequence[int]) -> Mapping[int, Failure]:
        """These are there, and nothing else comes. Those for which there is not enough memory."""
        return {}


class _FixedBatch(_Batch):
    """Arrays of one shape: each is written where it is in the batch, by the thread that has it."""

    def __init__(self, specs: Sequence[TensorSpec], count: int) -> None:
        super().__init__(count)
        self._specs = specs
        self._count = count
        self._arrays: dict[str, Array] = {}
        self._lock = threading.Lock()

    def keep(self, index: int, value: Any) -> Any:
        arrays = conform(value, self._specs)
        with self._lock:
            if not self._arrays:
                self._arrays = {
                    spec.name: np.empty((self._count, *array.shape), array.dtype)
                    for spec, array in zip(self._specs, arrays, strict=True)
                }
        for spec, array in zip(self._specs, arrays, strict=True):
            self._arrays[spec.name][index] = array
        return None

    def complete(self, indexes: Sequence[int]) -> Mapping[int, Failure]:
        if not indexes:
            return {}
        arrays = self._arrays
        if len(indexes) < self._count:
            arrays = {name: array[list(indexes)] for name, array in arrays.items()}
        self.parts = [Part(tuple(indexes), arrays)]
        return {}


class _VaryingBatch(_Batch):
    """Arrays whose shapes vary: those of one shape, or padded to one, are a part."""

    def __init__(self, specs: Sequence[TensorSpec], count: int) -> None:
        super().__init__(count)
        self._specs = specs

    def keep(self, index: int, value: Any) -> Any:
        arrays = conform(value, self._specs)
        shapes = [padded_shape(spec, array.shape) for spec, array in zip(self._specs, arrays, strict=True)]
        # A view may be of the memory that a decoder process writes into again.
        return tuple(shapes), [array if array.base is None else array.copy() for array in arrays]

    def complete(self, indexes: Sequence[int]) -> Mapping[int, Failure]:
        groups: dict[Any, list[int]] = {}
        for index in indexes:
            groups.setdefault(self.values[index][0], []).append(index)
        self.sizes = {
            spec.name: [
                () if value is None else true_sizes(spec, value[1][at].shape) for value in self.values
            ]
            for at, spec in enumerate(self._specs)
            if spec.buckets
        }
        left, too_large = deque(groups.items()), {}
        while left:
            shapes, members = left.popleft()
            try:
                self.parts.append(self._part(shapes, members))
            except MemoryError:  # there may be enough for fewer
                if len(members) == 1:
                    too_large[members[0]] = self._too_large(shapes)
                else:
                    middle = len(members) // 2
                    left.extendleft([(shapes, members[middle:]), (shapes, members[:middle])])
        return too_large

    def _too_large(self, shapes: Sequence[Sequence[int]]) -> Failure:
        named = (
            f"{spec.name!r} of shape {list(shape)}" for spec, shape in zip(self._specs, shapes, strict=True)
        )
        return RESOURCE_EXHAUSTED, f"the model process has not enough memory for {', '.join(named)}"

    def _part(self, shapes: Sequence[Sequence[int]], indexes: Sequence[int]) -> Part:
        arrays: dict[str, Array] = {}
        for at, (spec, shape) in enumerate(zip(self._specs, shapes, strict=True)):
            rows = [self.values[index][1][at] for index in indexes]
            arrays[spec.name] = np.empty((len(rows), *shape), rows[0].dtype)
            for row, target in zip(rows, arrays[spec.name], strict=True):
                pad_array(spec, row, target)
        sizes = {name: [of_all[index] for index in indexes] for name, of_all in self.sizes.items()}
        return Part(tuple(indexes), with_lengths(arrays, self._specs, sizes))


def _new_batch(specs: Sequence[TensorSpec], count: int) -> _Batch:
    if not specs:
        return _Batch(count)
    return (
        _VaryingBatch(specs, count) if any(-1 in spec.shape for spec in specs) else _FixedBatch(specs, count)
    )


def conform(value: Any, specs: Sequence[TensorSpec]) -> list[Array]:
    """What `decode` returned for a request as the declared tensors. Raises WrongOutputError."""
    names = [spec.name for spec in specs]
    if len(specs) == 1 and not (isinstance(value, Mapping) and value.keys() == {names[0]}):
        value = {names[0]: value}
    if not isinstance(value, Mapping) or value.keys() != set(names):
        found = (
            f"the names {', '.join(map(str, value)):.80}"
            if isinstance(value, Mapping)
            else type(value).__name__
        )
        raise WrongOutputError(
            f"decode returned {found}, but 'decoded' declares {', '.join(names)}: return a dict of these"
        )
    return [_declared(value[spec.name], spec) for spec in specs]


def _declared(value: Any, spec: TensorSpec) -> Array:
    declared = f"which 'decoded' declares as {spec.datatype} of shape {list(spec.shape)}"
    try:
        array = np.asarray(unmasked(np.asanyarray(for_numpy(value))))
        numbers, lost = in_datatype(array, spec.datatype)
    except Exception as error:  # a library's arrays may raise anything
        raise WrongOutputError(f"decode returned no tensor for {spec.name!r}, {declared}: {error}") from None
    if not spec.admits(array.shape):
        raise WrongOutputError(f"decode returned the shape {list(array.shape)} for {spec.name!r}, {declared}")
    if lost is not None:
        why = why_lost(array, spec.datatype)
        raise WrongOutputError(f"decode returned {array.dtype} for {spec.name!r}, {declared}: {why}")
    return numbers


# --- what the model gets -----------------------------------------------------------------------------------


class DecodedItems:
    """What was decoded of a frame, for the executor."""

    def __init__(self, decoding: Decoding, batch: _Batch, jobs: Jobs) -> None:
        self._decoding = decoding
        self._batch = batch
        self._jobs = jobs
        self.checked = Checked(decoding.rejected, decoding.costs)
        self._handed_out: set[int] = set()

    def __len__(self) -> int:
        return self._decoding.frame.size

    def together(self, indexes: Sequence[int]) -> Sequence[Sequence[int]]:
        if not self._decoding.specs:
            return (indexes,)
        wanted = set(indexes)
        groups = [[index for index in part.indexes if index in wanted] for part in self._batch.parts]
        return [group for group in groups if group]

    def select(self, indexes: Sequence[int]) -> Any:
        batch = self._batch
        if any(index in self._handed_out and not self._is_fixed(index) for index in indexes):
            batch = self._decoded_again(indexes)
        if not self._decoding.specs:
            self._handed_out.update(indexes)
            return [batch.values[index] for index in indexes]
        part = next(part for part in batch.parts if indexes[0] in part.indexes)
        arrays = part.arrays
        if len(indexes) == len(part.indexes):
            self._handed_out.update(indexes)
        else:  # copies
            row_of = {index: row for row, index in enumerate(part.indexes)}
            rows = [row_of[index] for index in indexes]
            arrays = {name: array[rows] for name, array in arrays.items()}
        return next(iter(arrays.values())) if len(arrays) == 1 else dict(arrays)

    def _is_fixed(self, index: int) -> bool:
        return not self._decoding.specs and type(self._batch.values[index]) in FIXED_TYPES

    def _decoded_again(self, indexes: Sequence[int]) -> _Batch:
        """The same once more. Raises CarpoolError if one cannot be decoded any more."""
        first = self._decoding
        again = Decoding(first.model, first.frame, first.bodies, indexes, first.costs)
        again.start(self._jobs)
        batch = again.wait()
        if again.is_running:
            first.again.append(again)
        for status, detail in again.rejected.values():
            raise error_for(status, detail)
        return batch

    def item(self, index: int) -> Any:
        raise NotImplementedError  # bodies are validated before they are decoded

    def spread(self, indexes: Mapping[int, int], count: int) -> Any:
        raise NotImplementedError  # models that bind sequences have no `decode`
