"""Runs a model on the items of a frame and isolates the failures. Pure: no Redis, no processes, no clock.

An invalid or failing item fails alone. If the model raises on several items, they are halved until each
failing item is alone, and the others get their results. Of n items, one failing item costs 2 log2(n) more
calls; the worst case is 2n - 1 calls. A wrong number of results fails all items, because it is unknown which
results are missing. So do wrong new states.

Where the model tells what a body costs, it gets the items in parts of at most `max_batch_cost` (`costs`).
Items of shapes that one call cannot take are in several parts, too.
An error that says which request it concerns (`request_index`) fails that one, and the others are executed
again together: what another model answered is no reason to ask it again and again.

Those whose deadlines have passed are not executed, and not executed again: nobody waits for their results.

The functions that execute are coroutines, because those of an async model wait. Of another model they never
wait: `run_now`.

Why: docs/decisions/0027.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, CarpoolError
from carpool.parts import Buffer
from carpool.wire.tensors import Array, TensorSpec
from carpool_worker.model_process import frames
from carpool_worker.model_process.calls import FrameCalls
from carpool_worker.model_process.costs import cost_of, of_producers, parts_of
from carpool_worker.model_process.failures import (
    Observe,
    OutputError,
    WrongOutputError,
    failure_of,
    not_observed,
)
from carpool_worker.model_process.frames import Failure, FrameHeader, Layout, RequestFields
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
from carpool_worker.model_process.outputs import (
    Results,
    Returned,
    Stacked,
    check_form,
    join,
    results_of,
    rows_of,
    settled,
    without,
)
from carpool_worker.model_process.padding import TrueSizes, cut_row, with_lengths
from carpool_worker.model_process.states import States

_LATE_AT_START: Final = (DEADLINE_EXCEEDED, "expired: its deadline passed before its batch was executed")
_LATE_AT_PART: Final = (
    DEADLINE_EXCEEDED,
    "expired: its deadline passed while other parts of its batch were executed (max_batch_cost, shapes)",
)
_LATE_WHEN_HALVED: Final = (
    DEADLINE_EXCEEDED,
    "expired: the model raised on its batch, and its deadline passed before it was executed again",
)

T = TypeVar("T")

FIXED_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})  # of values that nobody can change


class Checked(NamedTuple):
    """What became of items that were validated before: those that failed, and what the others cost, by index.
    There are no costs if the model tells none."""

    failures: Mapping[int, Failure]
    costs: Mapping[int, int]


class Items(Protocol):
    """The bodies of a frame's requests, by index, as they were sent: what is handed out may be changed."""

    def __len__(self) -> int: ...
    @property
    def checked(self) -> Checked | None:
        """What is known of them already; None: they are to be validated."""

    def item(self, index: int) -> Any:
        """One item, as passed to `validate`."""

    def select(self, indexes: Sequence[int]) -> Any:
        """Several items, as passed to `predict`."""

    def spread(self, indexes: Mapping[int, int], count: int) -> Any:
        """As `select`, of `count` rows: at each key of `indexes` the item of that index, else nothing."""

    def together(self, indexes: Sequence[int]) -> Sequence[Sequence[int]]:
        """These indexes in groups that one call of the model can take."""


class ListItems:
    """Bodies of a model that declares no tensors: `predict` gets a list.

    Bodies that may be changed are handed out once, and unpacked again if they are wanted again.
    """

    checked = None

    def __init__(self, values: list[Any], packed: Buffer = b"") -> None:
        """`packed`: the list of these values."""
        self._values = values
        self._packed = packed
        self._places: list[slice] | None = None
        is_fixed = not packed or FIXED_TYPES.issuperset(map(type, values))
        self._handed_out = [] if is_fixed else [False] * len(values)

    def __len__(self) -> int:
        return len(self._values)

    def item(self, index: int) -> Any:
        if not self._handed_out:
            return self._values[index]
        if not self._handed_out[index]:
            self._handed_out[index] = True
            return self._values[index]
        if self._places is None:
            self._places = frames.places_in(self._packed)
        return frames.unpack_bodies(self._packed[self._places[index]])

    def select(self, indexes: Sequence[int]) -> list[Any]:
        if len(indexes) == len(self._values) and not any(self._handed_out):  # the usual case
            self._handed_out = [True] * len(self._handed_out)
            return list(self._values)
        return [self.item(index) for index in indexes]

    def key(self, index: int) -> Any:
        """What a model may have used as the key of a dict: not handed out, because of a body that can be
        changed only the type is true."""
        return self._values[index]

    def spread(self, indexes: Mapping[int, int], count: int) -> list[Any]:
        return [self.item(indexes[row]) if row in indexes else None for row in range(count)]

    def together(self, indexes: Sequence[int]) -> Sequence[Sequence[int]]:
        return (indexes,)


class StackedItems:
    """Bodies of a model that declares tensors: `predict` gets one stacked array, or several by name.

    All of them together are handed out as they are. If they are wanted once more, the model may have written
    into them: then they are asked for `again`. Single ones, halves and rows of slots are copies.
    """

    checked = None

    def __init__(self, arrays: Stacked, again: Callable[[], Stacked] | None = None) -> None:
        """`again` brings the arrays as they were sent. None: nothing is wanted after all were handed out."""
        self._arrays = arrays
        self._again = again
        self._is_handed_out = False
        first = next(iter(arrays.values()))
        self._count = len(first)
        self._is_one = len(arrays) == 1

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        rows = {name: _copied(array[index]) for name, array in self._as_sent().items()}
        return next(iter(rows.values())) if self._is_one else rows

    def select(self, indexes: Sequence[int]) -> Any:
        arrays = self._as_sent()
        if len(indexes) < self._count:
            selected = {name: array[list(indexes)] for name, array in arrays.items()}
        else:
            selected = {name: _writable(array) for name, array in arrays.items()}
            self._is_handed_out = True
        return next(iter(selected.values())) if self._is_one else selected

    def spread(self, indexes: Mapping[int, int], count: int) -> Any:
        spread = {name: _spread(array, indexes, count) for name, array in self._as_sent().items()}
        return next(iter(spread.values())) if self._is_one else spread

    def together(self, indexes: Sequence[int]) -> Sequence[Sequence[int]]:
        return (indexes,)

    def _as_sent(self) -> Stacked:
        if self._is_handed_out:
            assert self._again is not None
            self._arrays, self._is_handed_out = self._again(), False
        return self._arrays


class PaddedItems(StackedItems):
    """The same where inputs are padded: `validate` gets each as it was sent, and `predict` the true sizes."""

    def __init__(
        self,
        arrays: Stacked,
        again: Callable[[], Stacked] | None,
        specs: Sequence[TensorSpec],
        sizes: TrueSizes,
    ) -> None:
        def complete(arrays: Stacked) -> Stacked:
            return with_lengths(arrays, specs, sizes)

        super().__init__(complete(arrays), again and (lambda: complete(again())))
        self._specs = specs
        self._sizes = sizes

    def item(self, index: int) -> Any:
        rows: dict[str, Any] = {}
        for spec in self._specs:
            row = self._as_sent()[spec.name][index]
            if spec.buckets:
                row = cut_row(row, spec, self._sizes[spec.name][index])
            rows[spec.name] = _copied(row)
        return rows if len(rows) > 1 else next(iter(rows.values()))


def _copied(row: Any) -> Any:
    return row.copy() if isinstance(row, np.ndarray) else row  # or a number, or a text


def _writable(array: Array) -> Array:
    return array if array.flags.writeable else array.copy()


def _spread(array: Array, indexes: Mapping[int, int], count: int) -> Array:
    empty: Any = 0
    if array.dtype == object:  # a BYTES tensor, whose elements are all texts, or all bytes
        empty = type(next(iter(array.flat), ""))()
    rows = np.full((count, *array.shape[1:]), empty, array.dtype)
    rows[list(indexes)] = array[list(indexes.values())]
    return rows


def decode_items(
    frame: FrameHeader,
    payload: Buffer,
    again: Callable[[], Buffer] | None = None,
    specs: Sequence[TensorSpec] = (),
) -> Items:
    """The bodies in a frame's payload, without states. `again`: see StackedItems; it brings the payload.
    `specs`: the declared inputs, which tell what is padded."""
    if not frame.layouts:
        return ListItems(frames.unpack_bodies(payload), payload)
    layouts, count = frame.layouts, frame.size
    arrays = frames.unstack(layouts, count, payload)
    unstack_again: Callable[[], Stacked] | None = None
    if again is not None:
        unstack_again = partial(_unstacked, layouts, count, again)
    if frame.sizes:
        return PaddedItems(arrays, unstack_again, specs, frame.sizes)
    return StackedItems(arrays, unstack_again)


def _unstacked(layouts: Sequence[Layout], count: int, sent: Callable[[], Buffer]) -> Stacked:
    return frames.unstack(layouts, count, sent())


class Outcome(NamedTuple):
    """Failures by index, and the results of all other items, in order.

    `results` is a list, or Stacked where the model returned stacked arrays of one layout for all of them.
    `executed_together`: the number of items that the first call of the model executed, or the first of each
    part; 0 if one raised, or there was none. `raised`: the items on each of which it raised alone. `refused`:
    those that `validate` or `decode` rejected.
    `cost`: of all items in `parts`, as the model told it; 0 if it tells none.
    """

    failures: dict[int, Failure]
    results: Results
    executed_together: int = 0
    raised: Sequence[int] = ()
    refused: Sequence[int] = ()
    cost: int = 0
    parts: int = 1


class _Given(NamedTuple):
    """What there is of a frame's requests, by index. `states`: of a model that keeps them. `is_late`: whether
    the deadline of one has passed by now. `observe` is told what the model raises. `calls`: of a model that
    calls others."""

    items: Items
    requests: Sequence[Sequence[Any]]
    states: States | None
    is_late: Callable[[int], bool]
    observe: Observe
    calls: FrameCalls | None


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that does not wait for anything, as where no model is async."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a model that is not async waited in the event loop")


def never_late(_index: int) -> bool:
    """Of requests without deadlines."""
    return False


async def execute_async(
    model: LoadedModel,
    items: Items,
    requests: Sequence[Sequence[Any]],
    states: States | None = None,
    is_late: Callable[[int], bool] = never_late,
    late: Sequence[int] = (),
    observe: Observe = not_observed,
    cost_max: int | None = None,
    producer_costs: Sequence[tuple[int, int]] = (),
    calls: FrameCalls | None = None,
) -> Outcome:
    """Validate each item, run the model on the valid ones, and isolate those on which it fails.

    `requests`: the fields of a RequestInfo for each item, if the model wants them.
    `states` of all items, for a model that keeps them, gets the new ones of those that did not fail.
    `is_late`: whether the deadline of an item has passed by now; such an item is executed once at most.
    `late`: those of which it had passed before, which are not executed. `observe` is told what the model
    raises, each time it does. `cost_max`, `producer_costs`: as in a frame. `calls`: of a model that calls
    others.
    """
    checked = items.checked
    failures = validate(model, items) if checked is None else dict(checked.failures)
    refused = tuple(failures)
    failures.update((index, _LATE_AT_START) for index in late if index not in failures)
    valid: Sequence[int] = range(len(items))
    if failures:
        valid = [index for index in valid if index not in failures]
    given = _Given(items, requests, states, is_late, observe, calls)
    costs: Mapping[int, int] = {}
    if model.cost is not None:
        costs = _costs(model, given, valid, producer_costs, failures) if checked is None else checked.costs
        valid = [index for index in valid if index in costs]
        if model.wants_requests:
            given = given._replace(requests=_with_costs(requests, costs))
    groups = items.together(valid) if valid else ()
    parts = groups if model.cost is None else [
        part for group in groups for part in parts_of(group, costs, cost_max)
    ]  # fmt: skip
    results: list[Results] = []
    raised: list[int] = []
    executed, is_normal = 0, True
    for number, part in enumerate(parts):
        awaited = _without_late(given, part, failures, _LATE_AT_PART) if number else part
        of_part: list[Results] = []
        if awaited:
            is_half = len(parts) > 1
            is_normal &= await _attempt(model, given, awaited, failures, of_part, raised, is_half=is_half)
            executed += len(awaited)
        results.append(join(of_part))
    return Outcome(
        failures,
        join(results) if len(groups) < 2 else _in_order(parts, results, failures),
        executed if is_normal else 0,
        tuple(raised),
        refused,
        sum(costs[index] for index in valid) if costs else 0,
        max(1, len(parts)),
    )


def _in_order(
    parts: Sequence[Sequence[int]], results: Sequence[Results], failures: Mapping[int, Failure]
) -> Results:
    """The results of several parts of a batch, in the order of the items."""
    rows: dict[int, Any] = {}
    for part, of_part in zip(parts, results, strict=True):
        succeeded = [index for index in part if index not in failures]
        rows.update(zip(succeeded, rows_of(of_part), strict=True))
    return [rows[index] for index in sorted(rows)]


def _costs(
    model: LoadedModel,
    given: _Given,
    valid: Sequence[int],
    producer_costs: Sequence[tuple[int, int]],
    failures: dict[int, Failure],
) -> dict[int, int]:
    """What each of these items costs, in their order. One whose cost is not known fails."""
    assert model.cost is not None
    costs: dict[int, int] = {}
    sent = of_producers(producer_costs, len(given.items))
    for index in valid:
        try:
            costs[index] = cost_of(model.cost, given.items.item(index), sent[index])
        except BaseException as error:  # a library's panic, SystemExit: none may end this process
            if not isinstance(error, OutputError):
                given.observe(error, (index,))
            failures[index] = failure_of(error, INTERNAL)
    return costs


def _with_costs(requests: Sequence[RequestFields], costs: Mapping[int, int]) -> Sequence[RequestFields]:
    told = list(requests)
    for index, cost in costs.items():
        told[index] = RequestInfo(*requests[index])._replace(cost=cost)
    return told


def validate(model: LoadedModel, items: Items) -> dict[int, Failure]:
    """The items that the model rejects, by index."""
    failures: dict[int, Failure] = {}
    if model.validate is not None:
        for index in range(len(items)):
            try:
                model.validate(items.item(index))
            except BaseException as error:  # a library's panic, SystemExit: none may end this process
                failures[index] = failure_of(error, INVALID_ARGUMENT)
    return failures


async def _attempt(
    model: LoadedModel,
    given: _Given,
    indexes: Sequence[int],
    failures: dict[int, Failure],
    parts: list[Results],
    raised: list[int],
    *,
    is_half: bool = False,
) -> bool:
    """Run the model on these items. If it raises, run it on each half, to isolate the failing items, but not
    on items that are late.

    Adds to `failures`, `parts` and `raised`. Returns whether it did not raise.
    """
    try:
        results, wrong = await _run(model, given, indexes)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        if not isinstance(error, OutputError):
            given.observe(error, indexes)
        failure = failure_of(error, INTERNAL)
        is_final = len(indexes) == 1 or isinstance(error, WrongOutputError)
        concerned = error.request_index if isinstance(error, CarpoolError) else None
    else:
        if is_half:  # or one of several parts: the model is called again, and may use its arrays again then
            results, wrong = settled(Returned(results, wrong))
        failures.update({indexes[row]: failure_of(error, INTERNAL) for row, error in wrong.items()})
        parts.append(results)
        return True
    # Outside the except clause the exception is freed with all that the model held: the halves may need the
    # memory.
    if is_final:
        failures.update(dict.fromkeys(indexes, failure))
        if len(indexes) == 1:  # else it is unknown which of them is the cause
            raised.extend(indexes)
        return False
    middle = len(indexes) // 2
    others: Sequence[Sequence[int]] = (indexes[:middle], indexes[middle:])
    if concerned is not None and 0 <= concerned < len(indexes):
        failures[indexes[concerned]] = failure
        others = ([index for index in indexes if index not in failures],)
    for again in others:
        awaited = _without_late(given, again, failures, _LATE_WHEN_HALVED)
        if awaited:
            await _attempt(model, given, awaited, failures, parts, raised, is_half=True)
    return False


def _is_cancelled() -> bool:
    """Whether this process ends, and not the model: its task is cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no event loop
        return False
    return task is not None and task.cancelling() > 0


def _without_late(
    given: _Given, indexes: Sequence[int], failures: dict[int, Failure], why: Failure
) -> Sequence[int]:
    """Those of these items that are still to be executed. The others fail."""
    late = [index for index in indexes if given.is_late(index)]
    if not late:
        return indexes
    failures.update(dict.fromkeys(late, why))
    return [index for index in indexes if index not in failures]


def _info(correlation_id: str, lane: str, fields: Mapping[str, bytes], *more: Any) -> RequestInfo:
    """What the model sees of a request in one call: what it does to the fields stays there."""
    return RequestInfo(correlation_id, lane, dict(fields), *more)


async def _run(model: LoadedModel, given: _Given, indexes: Sequence[int]) -> Returned:
    """The model's results, one for each item. Raises WrongOutputError and what the model raises."""
    items, requests, states = given.items, given.requests, given.states
    infos = [_info(*requests[index]) for index in indexes] if model.wants_requests else ()

    def keys() -> Iterable[Any]:
        return map(items.key, indexes) if isinstance(items, ListItems) else ()

    def ids() -> Iterable[str]:
        return (requests[index][0] for index in indexes) if model.wants_requests else ()

    count = len(indexes)
    arguments = [items.select(indexes), infos, *([] if states is None else [states.select(indexes)])]
    if given.calls is None:
        outputs = model.run(*arguments)
        if model.is_async:
            outputs = await outputs
    else:
        outputs = await _call(model, arguments, given.calls, indexes)
    if states is not None:
        outputs, new_states = outputs
    returned = results_of(model, outputs, count, keys, ids)
    check_form(model, outputs, count)
    if states is None:
        return returned
    wrong = states.replace(indexes, new_states, returned.wrong)
    return without(returned, wrong)


async def _call(
    model: LoadedModel, arguments: Sequence[Any], calls: FrameCalls, indexes: Sequence[int]
) -> Any:
    """What a model returns that calls others. What these have not answered by then is withdrawn."""
    clients = calls.open(indexes)
    try:
        returned = model.run(*arguments, clients=clients)
        return await returned if model.is_async else returned
    finally:
        await calls.close(clients)
