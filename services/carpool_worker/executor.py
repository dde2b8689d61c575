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
from carpool.tensors import Array
from carpool_worker.model import LoadedModel, RequestInfo

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

    `results` is a list, or Stacked where the model returned stacked arrays for a batch in which none failed.
    """

    failures: dict[int, Failure]
    results: list[Any] | Stacked


class WrongCountError(Exception):
    """The model returned another number of results than it got items."""


def execute(model: LoadedModel, items: Items, requests: Sequence[RequestInfo]) -> Outcome:
    """Validate each item, run the model on those that are valid, and sort out who failed."""
    failures = _validate(model, items)
    valid = [position for position in range(len(items)) if position not in failures]
    if not valid:
        return Outcome(failures, [])
    try:
        outputs = _run(model, items, requests, valid)
    except (Exception, SystemExit) as error:
        results: dict[int, Any] = {}
        _halve(model, items, requests, valid, error, failures, results)
        return Outcome(failures, [results[position] for position in sorted(results)])
    if isinstance(outputs, dict):
        return Outcome(failures, outputs)
    return _sort_out(valid, outputs, failures)


def _validate(model: LoadedModel, items: Items) -> dict[int, Failure]:
    failures: dict[int, Failure] = {}
    if model.validate is not None:
        for position in range(len(items)):
            try:
                model.validate(items.one(position))
            except (Exception, SystemExit) as error:
                failures[position] = failure_of(error, INVALID_ARGUMENT)
    return failures


def _run(model: LoadedModel, items: Items, requests: Sequence[RequestInfo], positions: Sequence[int]) -> Any:
    """The model's results for these items: a list or Stacked of the right length. Raises what it raises."""
    infos = [requests[position] for position in positions] if model.wants_requests else ()
    outputs = model.run(items.some(positions), infos)
    if isinstance(outputs, Mapping):
        stacked = {str(name): np.asarray(array) for name, array in outputs.items()}
        for name, array in stacked.items():
            _check_count(len(array) if array.ndim else 0, len(positions), f" in output {name!r}")
        return stacked
    if isinstance(outputs, np.ndarray):
        _check_count(len(outputs) if outputs.ndim else 0, len(positions))
        if outputs.dtype == object:
            return list(outputs)
        if model.outputs or outputs.ndim > 1:
            return {model.outputs[0].name if model.outputs else "": outputs}
        return outputs.tolist()  # plain numbers from a model that declares no tensors
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Sequence):
        raise WrongCountError(
            f"the model returned a {type(outputs).__name__} for {len(positions)} requests, not a list"
        )
    _check_count(len(outputs), len(positions))
    return list(outputs)


def _check_count(got: int, wanted: int, where: str = "") -> None:
    if got != wanted:
        raise WrongCountError(f"the model returned {got} results for {wanted} requests{where}")


def _halve(
    model: LoadedModel,
    items: Items,
    requests: Sequence[RequestInfo],
    positions: Sequence[int],
    error: BaseException,
    failures: dict[int, Failure],
    results: dict[int, Any],
) -> None:
    """The model raised `error` on these items: find out on which."""
    if len(positions) == 1 or isinstance(error, WrongCountError):
        failures.update(dict.fromkeys(positions, failure_of(error, INTERNAL)))
        return
    middle = len(positions) // 2
    for half in (positions[:middle], positions[middle:]):
        try:
            outputs = _run(model, items, requests, half)
        except (Exception, SystemExit) as half_error:
            _halve(model, items, requests, half, half_error, failures, results)
        else:
            outcome = _sort_out(half, _rows(outputs), failures)
            good = [position for position in half if position not in failures]
            results.update(zip(good, outcome.results, strict=True))


def _rows(outputs: list[Any] | Stacked) -> list[Any]:
    """Stacked results as a list, one item each."""
    if not isinstance(outputs, dict):
        return outputs
    if len(outputs) == 1:
        return list(next(iter(outputs.values())))
    return [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]


def _sort_out(positions: Sequence[int], outputs: Sequence[Any], failures: dict[int, Failure]) -> Outcome:
    """Part the results from the exceptions that the model returned in their place."""
    results: list[Any] = []
    for position, output in zip(positions, outputs, strict=True):
        if isinstance(output, BaseException):
            failures[position] = failure_of(output, INTERNAL)
        else:
            results.append(output)
    return Outcome(failures, results)


def failure_of(error: BaseException, status: str) -> Failure:
    """A status and a sentence for the producer: never the exception's class, never a traceback."""
    if isinstance(error, CarpoolError):
        return error.status, error.detail
    if isinstance(error, WrongCountError):
        return status, str(error)
    said = str(error).strip()
    refused = (
        "the model refused this body" if status == INVALID_ARGUMENT else "the model failed on this request"
    )
    return status, f"{refused}: {said}" if said else refused
