"""The states that a model keeps for sequences: what it declares, and what its calls get and return.

Between two requests a state is bytes: the rows of all declared states, in that order. Here the states of a
frame are one array of bytes with a row for each request, divided and joined by columns, not one by one.

Why: docs/decisions/0061.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from carpool.parts import Buffer
from carpool.plugins import UnusableError
from carpool.wire.tensors import Array, StateSpec, unmasked
from carpool.wire.values import check_integers, check_unmasked
from carpool_worker.model_process.failures import WrongOutputError

STATE_BYTES_MAX: Final = 64 * 1024 * 1024  # of one sequence, all its states together


def declared_states(model: Any) -> tuple[StateSpec, ...]:
    """The states that a model declares; none if it keeps none. Raises UnusableError."""
    declared = getattr(model, "states", None)
    if declared is None:
        return ()
    specs = tuple(declared) if isinstance(declared, Iterable) else (None,)
    if not all(isinstance(spec, StateSpec) for spec in specs):
        raise UnusableError(f"the model's 'states' must be a list of StateSpec, not {declared!r:.120}")
    if len({spec.name for spec in specs}) != len(specs):
        raise UnusableError("the model's 'states' name a state more than once")
    size_bytes = sum(spec.row_bytes for spec in specs)
    if size_bytes > STATE_BYTES_MAX:
        raise UnusableError(
            f"the model's 'states' take {size_bytes} bytes for a sequence; the limit is {STATE_BYTES_MAX}"
        )
    return specs


def initial_state(model: Any, specs: Sequence[StateSpec]) -> bytes:
    """The state of a sequence that starts, from `initial_states()` of a loaded model or the declarations.

    Raises UnusableError.
    """
    rows = {spec.name: spec.initial for spec in specs}
    initial_states = getattr(model, "initial_states", None)
    if initial_states is not None:
        if not specs:
            raise UnusableError("the model has 'initial_states', but declares no 'states'")
        given = initial_states()
        if not isinstance(given, Mapping) or not given.keys() <= rows.keys():
            raise UnusableError(
                f"the model's 'initial_states' must return a dict with the names {', '.join(rows)}, "
                f"not {given!r:.120}"
            )
        for name in given:
            if rows[name] is not None:
                raise UnusableError(f"state {name!r}: it has an 'initial', and 'initial_states' returns one")
        rows.update(given)
    try:
        return b"".join([spec.row(rows[spec.name]) for spec in specs])
    except ValueError as error:
        raise UnusableError(str(error)) from None


class States:
    """The states of a frame's requests: those they begin with, and new ones as the model returns them."""

    def __init__(self, specs: Sequence[StateSpec], rows: Buffer, count: int) -> None:
        """`rows`: of `count` requests, end to end."""
        self._specs = specs
        self._rows: Array = np.frombuffer(rows, np.uint8).reshape(count, -1)
        self._new: Array = np.empty_like(self._rows)
        ends = accumulate([spec.row_bytes for spec in specs], initial=0)
        self._columns = [slice(start, end) for start, end in pairwise(ends)]

    def select(self, indexes: Sequence[int]) -> dict[str, Array]:
        """The states of several requests, by name, as passed to `predict`. Copies: it may change them."""
        rows = self._rows if len(indexes) == len(self._rows) else self._rows[list(indexes)]
        return {
            spec.name: spec.split(rows[:, columns])
            for spec, columns in zip(self._specs, self._columns, strict=True)
        }

    def replace(
        self, indexes: Sequence[int], states: Mapping[str, Any], failed: Collection[int] = ()
    ) -> dict[int, BaseException]:
        """Take what `predict` returned as the new states of these requests, whose rows are those of
        `indexes`; of those in `failed` they do not matter. Returns why single rows cannot be kept. Raises
        WrongOutputError if it is no matter of single rows."""
        names = [spec.name for spec in self._specs]
        if states.keys() != set(names):
            raise WrongOutputError(
                f"the model returned the new states {', '.join(map(str, states)) or '(none)'}, "
                f"not {', '.join(names)}"
            )
        rows = slice(None) if len(indexes) == len(self._rows) else list(indexes)
        wrong: dict[int, BaseException] = {}
        for spec, columns in zip(self._specs, self._columns, strict=True):
            given = states[spec.name]
            try:
                if isinstance(given, list | tuple) and len(indexes) > 1:
                    # In an array of all rows, one float would make floats of the integers in the others.
                    found = self._replace_each(spec, columns, indexes, given, failed)
                    if len(found) < len(indexes):
                        wrong |= found
                        continue
                self._new[rows, columns] = spec.join(_plain(given, spec), len(indexes))
            except Exception as error:  # a model's arrays may be of any class and raise anything
                reason = WrongOutputError(f"the model's new state cannot be kept: {error}")
                found = self._replace_each(spec, columns, indexes, given, failed)
                if len(found) == len(indexes):
                    raise reason from None
                wrong |= found
        return wrong

    def _replace_each(
        self, spec: StateSpec, columns: slice, indexes: Sequence[int], states: Any, failed: Collection[int]
    ) -> dict[int, BaseException]:
        """Take the rows that can be kept. Returns the others: all, if rows cannot be told apart."""
        wrong: dict[int, BaseException] = {}
        for row, index in enumerate(indexes):
            try:
                if _count(states, spec.axis) != len(indexes):
                    raise ValueError("not a row for each request")
                one = _row(states, row, spec.axis)
                self._new[index, columns] = spec.join(_plain(one, spec), 1)[0]
            except Exception as error:
                wrong[row] = WrongOutputError(f"the model's new state cannot be kept: {error}")
        return wrong if len(wrong) == len(indexes) else {r: e for r, e in wrong.items() if r not in failed}

    def without(self, failed: Collection[int]) -> Buffer:
        """The new states of all requests but these, end to end."""
        if not failed:
            return self._new.data.cast("B")
        return self._new[[index for index in range(len(self._new)) if index not in failed]].tobytes()


def _is_masked(states: Any) -> bool:
    return isinstance(states, np.ma.MaskedArray)


def _count(states: Any, axis: int) -> int:
    if isinstance(states, list | tuple) and axis == 0:
        return len(states)
    return int(np.shape(states)[axis])


def _row(states: Any, row: int, axis: int) -> Any:
    """The states of one request, as they are: of lists, as a list."""
    if _is_masked(states):
        return np.ma.take(states, [row], axis)
    if not isinstance(states, list | tuple):
        return np.take(np.asarray(states), [row], axis)
    if axis == 0:
        return [states[row]]
    check_unmasked(states)
    return np.take(np.array(states, object), [row], axis).tolist()


def _plain(states: Any, spec: StateSpec) -> Any:
    """States without a mask. Raises ValueError if numbers are masked, or, in lists, integers are rounded."""
    if isinstance(states, list | tuple):
        check_unmasked(states)
        check_integers(states, spec.datatype)
    return unmasked(states) if _is_masked(states) else states
