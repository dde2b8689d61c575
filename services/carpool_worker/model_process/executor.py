"""A batch through a model: items in, outcomes out. Pure: no Redis, no processes, no clock.

An item's failure is the item's. Where the model raises on a batch, the batch is halved until the culprits
stand alone, and the others get their results: at worst 2n - 1 calls for n culprits, 2 log2(n) more for one.
A wrong number of results is an error of the whole batch: nobody can know whose is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from carpool.errors import INTERNAL, INVALID_ARGUMENT, CarpoolError
from carpool.wire.tensors import Array
from carpool_worker.model_process.model import LoadedModel, RequestInfo

Failure = tuple[str, str]  # status, detail
Stacked = dict[str, Array]  # by tensor name; the first dimension is the item's


class Items(Protocol):
    """The bodies of the requests that are executed together."""

    def __len__(self) -> int: ...
    def one(self, position: int) -> Any:
        """One item, as `validate` gets it."""

    def some(self, positions: Sequence[int]) -> Any:
        """Some items, as `predict` gets them."""


class ListItems:
    """Bodies of any kind: `predict` gets a list."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def one(self, position: int) -> Any:
        return self._values[position]

    def some(self, positions: Sequence[int]) -> list[Any]:
        return [self._values[position] for position in positions]


class StackedItems:
    """Declared tensors: `predict` gets one stacked array, or several by name."""

    def __init__(self, arrays: Stacked) -> None:
        self._arrays = arrays
        self._only = next(iter(arrays.values())) if len(arrays) == 1 else None

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def one(self, position: int) -> Any:
        if self._only is not None:
            return self._only[position]
        return {name: array[position] for name, array in self._arrays.items()}

    def some(self, positions: Sequence[int]) -> Any:
        everything = len(positions) == len(self)
        if self._only is not None:
            return self._only if everything else self._only[list(positions)]
        return {name: array if everything else array[list(positions)] for name, array in self._arrays.items()}


class Outcome(NamedTuple):
    """What became of a batch: failures by position, and the results of all others, in order.

    `results` is a list, or Stacked where the model returned stacked arrays of one layout for all of them.
    """

    failures: dict[int, Failure]
    results: list[Any] | Stacked


class WrongOutputError(Exception):
    """What the model returned cannot be parted into one result for each item."""


def execute(model: LoadedModel, items: Items, requests: Sequence[RequestInfo]) -> Outcome:
    """Validate each item, run the model on those that are valid, and sort out who failed."""
    failures = _validate(model, items)
    valid = [position for position in range(len(items)) if position not in failures]
    pieces: list[list[Any] | Stacked] = []
    if valid:
        _attempt(model, items, requests, valid, failures, pieces)
    return Outcome(failures, _join(pieces))


def _validate(model: LoadedModel, items: Items) -> dict[int, Failure]:
    failures: dict[int, Failure] = {}
    if model.validate is not None:
        for position in range(len(items)):
            try:
                model.validate(items.one(position))
            except BaseException as error:  # a library's panic, SystemExit: none of them is ours to die of
                failures[position] = failure_of(error, INVALID_ARGUMENT)
    return failures


def _attempt(
    model: LoadedModel,
    items: Items,
    requests: Sequence[RequestInfo],
    positions: Sequence[int],
    failures: dict[int, Failure],
    pieces: list[list[Any] | Stacked],
) -> None:
    """Run the model on these items; if it raises, on each half of them, to find out on which."""
    try:
        outputs = _run(model, items, requests, positions)
    except BaseException as error:
        failure = failure_of(error, INTERNAL)
        alone = len(positions) == 1 or isinstance(error, WrongOutputError)
    else:
        pieces.append(outputs if isinstance(outputs, dict) else _sort_out(positions, outputs, failures))
        return
    # Here the exception is gone, and with it what the model had in memory: the halves may need that.
    if alone:
        failures.update(dict.fromkeys(positions, failure))
        return
    middle = len(positions) // 2
    for half in (positions[:middle], positions[middle:]):
        _attempt(model, items, requests, half, failures, pieces)


def _run(
    model: LoadedModel, items: Items, requests: Sequence[RequestInfo], positions: Sequence[int]
) -> list[Any] | Stacked:
    """The model's results for these items, one for each. Raises what it raises, or WrongOutputError."""
    infos = [requests[position] for position in positions] if model.wants_requests else ()
    outputs = model.run(items.some(positions), infos)
    if not isinstance(outputs, Sequence | Mapping) and hasattr(outputs, "__array__"):
        outputs = np.asarray(outputs)  # a torch tensor on the CPU, for one
    if isinstance(outputs, Mapping):
        columns = {str(name): _column(values) for name, values in outputs.items()}
        if not columns:
            raise WrongOutputError(f"the model returned no outputs for {len(positions)} requests")
        for name, column in columns.items():
            _check_count(len(column) if column.ndim else 0, len(positions), f" in output {name!r}")
        return _stacked(model, columns)
    if isinstance(outputs, np.ndarray):
        _check_count(len(outputs) if outputs.ndim else 0, len(positions))
        if model.outputs or (outputs.ndim > 1 and outputs.dtype != object):
            return _stacked(model, {model.outputs[0].name if model.outputs else "": outputs})
        # Plain values from a model that declares no tensors.
        return list(outputs) if outputs.dtype == object else list(outputs.tolist())
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Sequence):
        raise WrongOutputError(
            f"the model returned a {type(outputs).__name__} for {len(positions)} requests, not a list"
        )
    _check_count(len(outputs), len(positions))
    return list(outputs)


def _check_count(got: int, wanted: int, where: str = "") -> None:
    if got != wanted:
        raise WrongOutputError(f"the model returned {got} results for {wanted} requests{where}")


def _column(values: Any) -> Array:
    """One output of several, a row for each item; rows of unequal shape as objects."""
    try:
        return np.asarray(values)
    except ValueError:
        column = np.empty(len(values), object)
        for row, value in enumerate(values):
            column[row] = value
        return column


def _stacked(model: LoadedModel, columns: Stacked) -> list[Any] | Stacked:
    """The columns as they are if all can travel stacked; else their rows: texts, and what varies in shape."""
    declared = {spec.name: spec.datatype for spec in model.outputs}
    stackable = True
    for name, column in columns.items():
        kind, datatype = column.dtype.kind, declared.get(name)
        if (datatype == "BYTES" and kind not in "USO") or (datatype not in (None, "BYTES") and kind in "US"):
            raise WrongOutputError(
                f"the model returned {column.dtype} in output {name!r}, declared as {datatype}"
            )
        stackable = stackable and kind in "biuf"
    return columns if stackable else _rows(columns)


def _rows(outputs: list[Any] | Stacked) -> list[Any]:
    """Stacked results as a list, one item each."""
    if not isinstance(outputs, dict):
        return outputs
    if len(outputs) == 1:
        return list(next(iter(outputs.values())))
    return [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]


def _join(pieces: Sequence[list[Any] | Stacked]) -> list[Any] | Stacked:
    """The results of parts of a batch, in order, as one: stacked where all are, alike.

    So a result looks the same whether or not a neighbour failed.
    """
    stacked = [piece for piece in pieces if isinstance(piece, dict)]
    if stacked and len(stacked) == len(pieces) and len({_layout(piece) for piece in stacked}) == 1:
        if len(stacked) == 1:
            return stacked[0]
        return {name: np.concatenate([piece[name] for piece in stacked]) for name in stacked[0]}
    return [row for piece in pieces for row in _rows(piece)]


def _layout(stacked: Stacked) -> tuple[Any, ...]:
    return tuple((name, array.dtype, array.shape[1:]) for name, array in stacked.items())


def _sort_out(positions: Sequence[int], outputs: Sequence[Any], failures: dict[int, Failure]) -> list[Any]:
    """Part the results from the exceptions that the model returned in their place."""
    results: list[Any] = []
    for position, output in zip(positions, outputs, strict=True):
        if isinstance(output, BaseException):
            failures[position] = failure_of(output, INTERNAL)
        else:
            results.append(output)
    return results


def failure_of(error: BaseException, status: str) -> Failure:
    """A status and a sentence for the producer: never the exception's class, never a traceback."""
    if isinstance(error, CarpoolError):
        return str(error.status), _text(getattr(error, "detail", ""))  # a subclass may have left it out
    said = _text(error)
    if isinstance(error, WrongOutputError):
        return status, said
    refused = (
        "the model refused this body" if status == INVALID_ARGUMENT else "the model failed on this request"
    )
    return status, f"{refused}: {said}" if said else refused


def _text(said: object) -> str:
    try:
        return str(said).strip()
    except Exception:  # a model's exceptions are a user's code, too
        return ""
