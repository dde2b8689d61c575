"""Runs a model on the items of a frame and isolates the failures. Pure: no Redis, no processes, no clock.

An invalid or failing item fails alone. If the model raises on several items, they are halved until each
failing item is alone, and the others get their results. Of n items, one failing item costs 2 log2(n) more
calls; the worst case is 2n - 1 calls. A wrong number of results fails all items, because it is unknown which
results are missing. So do wrong new states.

Those whose deadlines have passed are not executed, and not executed again: nobody waits for their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT
from carpool.parts import Buffer
from carpool.wire.tensors import Array
from carpool_worker.model_process import frames
from carpool_worker.model_process.failures import WrongOutputError, failure_of
from carpool_worker.model_process.frames import Failure, FrameHeader
from carpool_worker.model_process.model import LoadedModel, RequestInfo
from carpool_worker.model_process.states import States

_LATE: Final = (
    DEADLINE_EXCEEDED,
    "expired: the model raised on its batch, and its deadline passed before it was executed again",
)

_LATE_BEFORE: Final = (DEADLINE_EXCEEDED, "expired: its deadline passed before its batch was executed")

Stacked = dict[str, Array]  # by tensor name; the first dimension counts the items


class Items(Protocol):
    """The bodies of a frame's requests, by index."""

    def __len__(self) -> int: ...
    def item(self, index: int) -> Any:
        """One item, as passed to `validate`."""

    def select(self, indexes: Sequence[int]) -> Any:
        """Several items, as passed to `predict`."""

    def spread(self, indexes: Mapping[int, int], count: int) -> Any:
        """As `select`, of `count` rows: at each key of `indexes` the item of that index, else nothing."""


class ListItems:
    """Bodies of a model that declares no tensors: `predict` gets a list."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def item(self, index: int) -> Any:
        return self._values[index]

    def select(self, indexes: Sequence[int]) -> list[Any]:
        return [self._values[index] for index in indexes]

    def spread(self, indexes: Mapping[int, int], count: int) -> list[Any]:
        return [self._values[indexes[row]] if row in indexes else None for row in range(count)]


class StackedItems:
    """Bodies of a model that declares tensors: `predict` gets one stacked array, or several by name."""

    def __init__(self, arrays: Stacked) -> None:
        self._arrays = arrays
        first = next(iter(arrays.values()))
        self._count = len(first)
        self._only = first if len(arrays) == 1 else None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        if self._only is not None:
            return self._only[index]
        return {name: array[index] for name, array in self._arrays.items()}

    def select(self, indexes: Sequence[int]) -> Any:
        if len(indexes) == self._count:  # without a copy
            return dict(self._arrays) if self._only is None else self._only
        if self._only is not None:
            return self._only[list(indexes)]
        return {name: array[list(indexes)] for name, array in self._arrays.items()}

    def spread(self, indexes: Mapping[int, int], count: int) -> Any:
        spread = {name: _spread(array, indexes, count) for name, array in self._arrays.items()}
        return spread if self._only is None else next(iter(spread.values()))


def _spread(array: Array, indexes: Mapping[int, int], count: int) -> Array:
    empty = "" if array.dtype == object else 0  # a BYTES tensor has strings
    rows = np.full((count, *array.shape[1:]), empty, array.dtype)
    rows[list(indexes)] = array[list(indexes.values())]
    return rows


def decode_items(frame: FrameHeader, payload: Buffer) -> Items:
    """The bodies in a frame's payload, without states."""
    if frame.parts:
        return StackedItems(frames.unstack(frame.parts, frame.size, payload))
    return ListItems(frames.unpack_values(payload))


class Outcome(NamedTuple):
    """Failures by index, and the results of all other items, in order.

    `results` is a list, or Stacked where the model returned stacked arrays of one layout for all of them.
    `executed`: the number of items that the first call of the model executed; 0 if it
    raised, or there was none. `raised`: the items on each of which it raised alone. `refused`: those that
    `validate` rejected.
    """

    failures: dict[int, Failure]
    results: list[Any] | Stacked
    executed: int = 0
    raised: Sequence[int] = ()
    refused: Sequence[int] = ()


class _Given(NamedTuple):
    """What there is of a frame's requests, by index. `states`: of a model that keeps them. `is_late`: whether
    the deadline of one has passed by now."""

    items: Items
    requests: Sequence[RequestInfo]
    states: States | None
    is_late: Callable[[int], bool]


def never_late(_index: int) -> bool:
    """Of requests without deadlines."""
    return False


def execute(
    model: LoadedModel,
    items: Items,
    requests: Sequence[RequestInfo],
    states: States | None = None,
    is_late: Callable[[int], bool] = never_late,
    late: Sequence[int] = (),
) -> Outcome:
    """Validate each item, run the model on the valid ones, and isolate those on which it fails.

    `states` of all items, for a model that keeps them, gets the new ones of those that did not fail.
    `is_late`: whether the deadline of an item has passed by now; such an item is executed once at most.
    `late`: those of which it had passed before, which are not executed.
    """
    failures = validate(model, items)
    refused = tuple(failures)
    failures.update((index, _LATE_BEFORE) for index in late if index not in failures)
    valid: Sequence[int] = range(len(items))
    if failures:
        valid = [index for index in valid if index not in failures]
    parts: list[list[Any] | Stacked] = []
    raised: list[int] = []
    given = _Given(items, requests, states, is_late)
    if valid and not _attempt(model, given, valid, failures, parts, raised):
        return Outcome(failures, _join(parts), 0, tuple(raised), refused)
    return Outcome(failures, _join(parts), len(valid), (), refused)


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


def _attempt(
    model: LoadedModel,
    given: _Given,
    indexes: Sequence[int],
    failures: dict[int, Failure],
    parts: list[list[Any] | Stacked],
    raised: list[int],
) -> bool:
    """Run the model on these items. If it raises, run it on each half, to isolate the failing items, but not
    on items that are late.

    Adds to `failures`, `parts` and `raised`. Returns whether it did not raise.
    """
    try:
        outputs = _run(model, given, indexes)
    except BaseException as error:
        failure = failure_of(error, INTERNAL)
        is_final = len(indexes) == 1 or isinstance(error, WrongOutputError)
    else:
        parts.append(outputs if isinstance(outputs, dict) else take_failures(indexes, outputs, failures))
        return True
    # Outside the except clause the exception is freed with all that the model held: the halves may need the
    # memory.
    if is_final:
        failures.update(dict.fromkeys(indexes, failure))
        if len(indexes) == 1:  # else it is unknown which of them is the cause
            raised.extend(indexes)
        return False
    middle = len(indexes) // 2
    for half in (indexes[:middle], indexes[middle:]):
        awaited = _without_late(given, half, failures)
        if awaited:
            _attempt(model, given, awaited, failures, parts, raised)
    return False


def _without_late(given: _Given, indexes: Sequence[int], failures: dict[int, Failure]) -> Sequence[int]:
    """Those of these items that are to be executed again. The others fail."""
    late = [index for index in indexes if given.is_late(index)]
    if not late:
        return indexes
    failures.update(dict.fromkeys(late, _LATE))
    return [index for index in indexes if index not in failures]


def _run(model: LoadedModel, given: _Given, indexes: Sequence[int]) -> list[Any] | Stacked:
    """The model's results, one for each item. Raises WrongOutputError and what the model raises."""
    items, requests, states, _ = given
    infos = [requests[index] for index in indexes] if model.wants_requests else ()
    if states is None:
        return results_of(model, model.run(items.select(indexes), infos), len(indexes))
    outputs, new_states = model.run(items.select(indexes), infos, states.select(indexes))
    results = results_of(model, outputs, len(indexes))
    states.replace(indexes, new_states)
    return results


def results_of(model: LoadedModel, outputs: Any, count: int) -> list[Any] | Stacked:
    """What the model returned for `count` items, one for each. Raises WrongOutputError."""
    if (
        type(outputs) is not np.ndarray
        and not isinstance(outputs, Sequence | Mapping)
        and hasattr(outputs, "__array__")
    ):
        outputs = np.asarray(outputs)  # for example a torch tensor on the CPU
    if isinstance(outputs, np.ndarray):
        _check_count(len(outputs) if outputs.ndim else 0, count)
        if model.outputs or (outputs.ndim > 1 and outputs.dtype != object):
            return _stacked(model, {model.outputs[0].name if model.outputs else "": outputs})
        # A model that declares no tensors and returns one value for each item: a list of plain values.
        return list(outputs) if outputs.dtype == object else list(outputs.tolist())
    if isinstance(outputs, Mapping):
        columns = {str(name): _column(values) for name, values in outputs.items()}
        if not columns:
            raise WrongOutputError(f"the model returned no outputs for {count} requests")
        for name, column in columns.items():
            _check_count(len(column) if column.ndim else 0, count, f" in output {name!r}")
        return _stacked(model, columns)
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Sequence):
        raise WrongOutputError(
            f"the model returned a {type(outputs).__name__} for {count} requests, not a list"
        )
    _check_count(len(outputs), count)
    return list(outputs)


def _check_count(count: int, expected: int, where: str = "") -> None:
    if count != expected:
        raise WrongOutputError(f"the model returned {count} results{where} for {expected} requests")


def _column(values: Any) -> Array:
    """One of several outputs as an array with a row for each item; rows of unequal shape become objects."""
    try:
        return np.asarray(values)
    except ValueError:
        column = np.empty(len(values), object)
        for row, value in enumerate(values):
            column[row] = value
        return column


def _stacked(model: LoadedModel, columns: Stacked) -> list[Any] | Stacked:
    """The columns if all can be sent stacked; else (strings, rows of unequal shape) a list of rows."""
    stackable = True
    for name, column in columns.items():
        kind, datatype = column.dtype.kind, model.output_datatypes.get(name)
        if (datatype == "BYTES" and kind not in "USO") or (datatype not in (None, "BYTES") and kind in "US"):
            raise WrongOutputError(
                f"the model returned {column.dtype} in output {name!r}, which is declared as {datatype}"
            )
        stackable = stackable and kind in "biuf"
    return columns if stackable else _rows(columns)


def _rows(outputs: list[Any] | Stacked) -> list[Any]:
    """Stacked results as a list with one element for each item."""
    if not isinstance(outputs, dict):
        return outputs
    if len(outputs) == 1:
        return list(next(iter(outputs.values())))
    return [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]


def _join(parts: Sequence[list[Any] | Stacked]) -> list[Any] | Stacked:
    """Join the results of parts of a frame, in order: stacked if all are stacked with the same layout.

    Then a result has the same form whether or not another item failed.
    """
    if len(parts) == 1:
        return parts[0]
    stacked = [part for part in parts if isinstance(part, dict)]
    if stacked and len(stacked) == len(parts) and len({_layout(part) for part in stacked}) == 1:
        return {name: np.concatenate([part[name] for part in stacked]) for name in stacked[0]}
    return [row for part in parts for row in _rows(part)]


def _layout(stacked: Stacked) -> tuple[Any, ...]:
    return tuple((name, array.dtype, array.shape[1:]) for name, array in stacked.items())


def take_failures(indexes: Sequence[int], outputs: Sequence[Any], failures: dict[int, Failure]) -> list[Any]:
    """Move the exceptions that the model returned in place of results to `failures`."""
    results: list[Any] = []
    for index, output in zip(indexes, outputs, strict=True):
        if isinstance(output, BaseException):
            failures[index] = failure_of(output, INTERNAL)
        else:
            results.append(output)
    return results
