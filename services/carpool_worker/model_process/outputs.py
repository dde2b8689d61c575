"""What a model returned for a batch: a result for each request, or why there is none. Pure.

It is counted and matched, never guessed: a list, one array, or a dict of outputs by name, each with the batch
first. A value keeps its type and form, whatever the other requests of the batch are: a list is never made an
array of. What is declared is kept: each number is in the declared datatype, or its request fails alone.

Why: docs/decisions/0083.
"""

from __future__ import annotations

from collections import UserString
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.wire.tensors import (
    Array,
    TensorSpec,
    array_of,
    datatype_of,
    for_numpy,
    in_datatype,
    text_of,
    to_bfloat16,
    unmasked,
    why_lost,
)
from carpool.wire.values import check_integers, check_unmasked
from carpool_worker.model_process.failures import UnclearOutputError, WrongOutputError
from carpool_worker.model_process.frames import pack_values, unpack_results
from carpool_worker.model_process.loaded import LoadedModel

Stacked = dict[str, Array]  # by output name; the first dimension counts the requests
Results = list[Any] | Stacked
Wrong = dict[int, BaseException]  # by row

_NO_LISTS: Final = (tuple, str, bytes, bytearray, memoryview, UserString)
_EXPECTED: Final = (
    "return a list with one result for each request, one array with the batch first, or a dict of outputs by "
    "name, each of them such a list or array"
)
_ONE_REQUEST: Final = (  # often a function for one body, such as `body * 2`
    "1 request: the argument is a list of bodies, here of one; return a list with a result for each"
)
# The methods of columns that give exact values, and None or another value of its own where one is missing.
_LISTS: Final = ("to_list",)
_LISTS_OF_TABLES: Final = ("to_list", "tolist", "to_pylist")
_TEXT_KINDS: Final = "USOT"  # of dtypes: numpy's texts and bytes, objects, texts of any length
_KEY_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})
_TEXT: Final = frozenset({str})
_NAMES_SHOWN: Final = 10


class Returned(NamedTuple):
    """The results of a batch: of all rows but those in `wrong`, in order. They are Stacked where the model
    returned arrays of numbers."""

    results: Results
    wrong: Wrong


class _Column(NamedTuple):
    """One output of all rows. Those in `wrong` have values that must not be used."""

    values: Array | list[Any]
    wrong: Wrong

    @property
    def is_stackable(self) -> bool:
        return isinstance(self.values, np.ndarray) and self.values.dtype.kind not in _TEXT_KINDS


def results_of(
    model: LoadedModel,
    outputs: Any,
    count: int,
    keys: Callable[[], Iterable[Any]] = tuple,
    ids: Callable[[], Iterable[str]] = tuple,
) -> Returned:
    """What the model returned for `count` requests. Raises WrongOutputError and UnclearOutputError.

    `keys`, `ids`: the bodies and the correlation IDs, by which a dict with a row for each request could be
    keyed.
    """
    outputs = _listed(outputs)
    if _is_dict(outputs):
        return _of_dict(model, outputs, count, keys, ids)
    if _is_list(outputs):
        _check_count(len(outputs), count)
        return _of_rows(model.outputs, list(outputs)) if model.outputs else _without_errors(list(outputs))
    if len(model.outputs) > 1 and _is_array(outputs):
        raise WrongOutputError(
            f"the model returned one array, but declares the outputs {_shown(model.output_datatypes)}: "
            "return a dict with these names"
        )
    if not _is_array(outputs):
        raise WrongOutputError(
            f"the model returned a {type(outputs).__name__} for {count} requests, not a list: {_EXPECTED}"
        )
    (spec,) = model.outputs or (None,)
    column = _array_column(outputs, spec, count, "")
    if spec is None and isinstance(column.values, np.ndarray) and column.values.ndim == 1:
        # A model that declares no tensors and returns one value for each request: plain values.
        return _without_errors(_kept(column.values.tolist(), column.wrong), column.wrong)
    return _joined({spec.name if spec else "": column}, count)


def check_form(model: LoadedModel, outputs: Any, count: int) -> None:
    """Raise UnclearOutputError if what the model returned for several requests may be a list of columns, with
    as many outputs as there are requests, as scikit-learn's `predict_proba` is for several outputs.

    For fewer requests it is clear: then columns are too many. And so it is, from then on, once the model has
    returned what cannot be columns."""
    if model.seen.returns_rows or model.outputs or _is_dict(outputs):
        return
    if count == 1 or not _may_be_columns(outputs, count):
        model.seen.returns_rows = True
        return
    raise UnclearOutputError(
        f"the model returned {count} times {count} values for {count} requests, which may be outputs and not "
        f"requests: {_EXPECTED}"
    )


def _may_be_columns(outputs: Any, count: int) -> bool:
    if _is_list(outputs):
        return all(_length(value) == count for value in outputs)
    shape: Any = getattr(outputs, "shape", ())
    return len(shape) > 1 and bool(shape[1] == count)


def _length(value: Any) -> int:
    """Of a list or an array; -1 of anything else."""
    if isinstance(value, list | tuple):
        return len(value)
    shape = getattr(value, "shape", None)
    return shape[0] if isinstance(shape, tuple) and shape else -1


def rows_of(results: Results) -> list[Any]:
    """Results as a list with one element for each request, in the form that stacked ones have."""
    if not isinstance(results, dict):
        return results
    if len(results) == 1:
        (array,) = results.values()
        return [array[row, ...] for row in range(len(array))]
    return [dict(zip(results, row, strict=True)) for row in zip(*results.values(), strict=True)]


def without(returned: Returned, wrong: Wrong) -> Returned:
    """What was returned, without more rows that are wrong."""
    wrong = {row: error for row, error in wrong.items() if row not in returned.wrong}
    if not wrong:
        return returned
    results = returned.results
    good_count = len(next(iter(results.values()))) if isinstance(results, dict) else len(results)
    with_results = [row for row in range(good_count + len(returned.wrong)) if row not in returned.wrong]
    right = [at for at, row in enumerate(with_results) if row not in wrong]
    left: Results
    if isinstance(results, dict):
        left = {name: array[right] for name, array in results.items()}
    else:
        left = [results[at] for at in right]
    return Returned(left, returned.wrong | wrong)


def settled(returned: Returned) -> Returned:
    """What was returned, as it is now: models return arrays that they fill anew at each call."""
    results, wrong = returned
    if isinstance(results, dict):
        return Returned({name: array.copy() for name, array in results.items()}, wrong)
    values: list[Any] = []
    for value in results:
        try:
            values.append(unpack_results(pack_values(value)))
        except Exception as error:
            values.append(WrongOutputError(f"the model's result cannot be sent: {error}"))
    return _without_errors(values, wrong)


def join(parts: Sequence[Results]) -> Results:
    """Join the results of parts of a batch, in order: stacked if all are stacked with the same layout.

    Then a result has the same form whether or not another request failed.
    """
    parts = [part for part in parts if part != []]  # of which all requests failed
    if len(parts) <= 1:
        return parts[0] if parts else []
    stacked = [part for part in parts if isinstance(part, dict)]
    if stacked and len(stacked) == len(parts) and len({_layout(part) for part in stacked}) == 1:
        return {name: np.concatenate([part[name] for part in stacked]) for name in stacked[0]}
    return [row for part in parts for row in rows_of(part)]


def _layout(stacked: Stacked) -> tuple[Any, ...]:
    return tuple((name, array.dtype, array.shape[1:]) for name, array in stacked.items())


def _is_list(value: Any) -> bool:
    kind = type(value)  # to ask abstract classes is slow
    return kind is list or (
        kind is not np.ndarray and isinstance(value, Sequence) and not isinstance(value, _NO_LISTS)
    )


def _is_dict(value: Any) -> bool:
    kind = type(value)
    return kind is dict or (kind is not list and kind is not np.ndarray and isinstance(value, Mapping))


def _listed(value: Any) -> Any:
    """A Series or another column of pandas, polars or pyarrow as a list: in an array, one missing value makes
    floats of integers. Raises WrongOutputError."""
    if type(value) in (list, dict, np.ndarray) or not hasattr(value, "__array__") or isinstance(value, type):
        return value
    names = _LISTS_OF_TABLES if hasattr(value, "to_numpy") and not hasattr(value, "columns") else _LISTS
    convert = next((method for name in names if (method := getattr(value, name, None)) is not None), None)
    if convert is None:
        return value
    try:
        return convert()
    except Exception as error:  # for example a column in a GPU's memory
        kind = type(value).__name__
        raise WrongOutputError(f"the model returned a {kind} that cannot be converted: {error}") from None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (hasattr(value, "__array__") and not isinstance(value, type))


def _check_count(count: int, expected: int, where: str = "") -> None:
    if count != expected:
        requests = _ONE_REQUEST if expected == 1 else f"{expected} requests"
        raise WrongOutputError(f"the model returned {count} results{where} for {requests}")


def _shown(names: Collection[Any]) -> str:
    return f"{', '.join(map(repr, list(names)[:_NAMES_SHOWN])):.200}" or "(none)"


# --- outputs by name ---------------------------------------------------------------------------------------


def _of_dict(
    model: LoadedModel,
    outputs: Mapping[Any, Any],
    count: int,
    keys: Callable[[], Iterable[Any]],
    ids: Callable[[], Iterable[str]],
) -> Returned:
    specs = {spec.name: spec for spec in model.outputs}
    _check_names(outputs, specs, count)
    is_keyed = not specs and count > 1 and _is_keyed_by_body(outputs, keys())
    if not specs and ((is_keyed and len(outputs) > 1) or _is_keyed_by_request(outputs, ids())):
        raise WrongOutputError(_keyed(outputs))
    columns = {name: _column(outputs[name], specs.get(name), count, name) for name in specs or outputs}
    if is_keyed:  # all requests have the same body, which is the name: of each alone, one value is the column
        raise UnclearOutputError(_keyed(outputs))
    return _joined(columns, count)


def _keyed(outputs: Mapping[Any, Any]) -> str:
    return (
        f"the model returned a dict with a key for each request, {_shown(outputs)}: {_EXPECTED}; "
        "if these are names of outputs, declare them with outputs = [TensorSpec(...)]"
    )


def _check_names(outputs: Mapping[Any, Any], specs: Mapping[str, TensorSpec], count: int) -> None:
    """Raise WrongOutputError unless these are the names of outputs."""
    if specs and outputs.keys() != specs.keys():
        raise WrongOutputError(
            f"the model returned the outputs {_shown(outputs)}, but declares {_shown(specs)}"
        )
    if not outputs:
        raise WrongOutputError(f"the model returned no outputs for {count} requests")
    if not _TEXT.issuperset(map(type, outputs)) and not all(isinstance(name, str) for name in outputs):
        raise WrongOutputError(
            f"the model returned a dict with the keys {_shown(outputs)}, which are no names of outputs: "
            f"{_EXPECTED}"
        )


def _is_keyed_by_request(outputs: Mapping[Any, Any], ids: Iterable[str]) -> bool:
    """Whether the names are row numbers, or all of them correlation IDs: nobody names outputs so."""
    if "0" in outputs and all(str(row) in outputs for row in range(len(outputs))):
        return True
    return outputs.keys() <= set(ids)


def _is_keyed_by_body(outputs: Mapping[Any, Any], keys: Iterable[Any]) -> bool:
    """Whether these may be rows and not columns: then a row has as many values as there are requests only by
    coincidence."""
    found: set[str] = set()
    for key in keys:  # usually none of them is a name, which the first one shows
        if type(key) not in _KEY_TYPES or (name := str(key)) not in outputs:
            return False
        found.add(name)
    return len(found) == len(outputs)


def _column(value: Any, spec: TensorSpec | None, count: int, name: str) -> _Column:
    """One output by name. Raises WrongOutputError."""
    value = _listed(value)
    if _is_list(value):
        _check_count(len(value), count, f" in output {name!r}")
        if spec is None:
            return _Column(list(value), _errors_in(value))
        return _declared_list(list(value), spec)
    if not _is_array(value):
        kind = type(value).__name__
        raise WrongOutputError(f"the model returned a {kind} in output {name!r}, not a list: {_EXPECTED}")
    return _array_column(value, spec, count, f" in output {name!r}")


def _has_errors(values: Iterable[Any]) -> bool:
    return any(issubclass(kind, BaseException) for kind in set(map(type, values)))


def _errors_in(values: Collection[Any]) -> Wrong:
    """The exceptions among these values, by row."""
    if not _has_errors(values):
        return {}
    return {row: value for row, value in enumerate(values) if isinstance(value, BaseException)}


def _joined(columns: Mapping[str, _Column], count: int) -> Returned:
    """Columns as results. A row that is wrong in one of them is wrong."""
    wrong: Wrong = {}
    for column in columns.values():
        wrong = column.wrong | wrong if column.wrong else wrong
    values = {name: column.values for name, column in columns.items()}
    if wrong:
        right = [row for row in range(count) if row not in wrong]
        values = {name: _selected(entries, right) for name, entries in values.items()}
    if all(column.is_stackable for column in columns.values()):
        return Returned(values, wrong)  # type: ignore[arg-type]
    if len(values) == 1:
        (only,) = values.values()
        return _without_errors(only if isinstance(only, list) else list(only), wrong)
    rows: list[dict[str, Any]] = [{} for _ in range(count - len(wrong))]
    for name, entries in values.items():  # three times faster than a dict(zip(...)) of each row
        for result, value in zip(rows, entries, strict=True):  # of an array of numbers, numbers
            result[name] = value
    return Returned(rows, wrong)


def _selected(values: Array | list[Any], rows: Sequence[int]) -> Array | list[Any]:
    return values[list(rows)] if isinstance(values, np.ndarray) else [values[row] for row in rows]


def _kept(values: list[Any], wrong: Wrong) -> list[Any]:
    return [value for row, value in enumerate(values) if row not in wrong] if wrong else values


def _without_errors(values: list[Any], wrong: Wrong | None = None) -> Returned:
    """Values, of all rows but those that are wrong; exceptions among them are wrong, too."""
    wrong = wrong or {}
    if not _has_errors(values):
        return Returned(values, wrong)
    with_values = (row for row in range(len(values) + len(wrong)) if row not in wrong)
    found = {row: v for row, v in zip(with_values, values, strict=True) if isinstance(v, BaseException)}
    return Returned([value for value in values if not isinstance(value, BaseException)], wrong | found)


# --- arrays ------------------------------------------------------------------------------------------------


def _array_column(value: Any, spec: TensorSpec | None, count: int, where: str) -> _Column:
    """An array with the batch first, or what can be converted to one. Raises WrongOutputError."""
    array = value if type(value) is np.ndarray else _as_array(value, where)
    if not array.ndim:
        raise WrongOutputError(
            f"the model returned a single value{where}, a {type(value).__name__} without dimensions, for "
            f"{count} requests: return an array with a row for each request, also for one request, for "
            "example with mean(axis=1) in place of mean(), or squeeze(axis=1) in place of squeeze()"
        )
    _check_count(len(array), count, where)
    wrong: Wrong = {}
    if isinstance(array, np.ma.MaskedArray):
        array, wrong = _unmasked_rows(array, where)
    if array.dtype.kind == "T":
        array = array.astype(object)
    if spec is not None:
        column = _declared_array(array, spec)
        return column._replace(wrong=column.wrong | wrong) if wrong else column
    if array.dtype.kind == "O":
        wrong = _errors_in(array) | wrong
    elif array.dtype.kind not in _TEXT_KINDS:
        try:
            datatype_of(array)
        except ValueError as error:
            raise WrongOutputError(f"the model's result{where} cannot be sent: {error}") from None
    return _Column(array, wrong)


def _as_array(value: Any, where: str) -> Array:
    kind = type(value).__name__
    if hasattr(value, "columns"):  # pandas and polars; as an array, integers beside numbers become floats
        raise WrongOutputError(
            f"the model returned a {kind}{where}, whose columns have names: return "
            '.to_dict("records") of it, a list with a dict for each row, or a dict of its columns'
        )
    try:
        array = np.asanyarray(for_numpy(value))
    except Exception as error:  # for example a tensor that requires a gradient
        raise WrongOutputError(
            f"the model returned a {kind}{where} that cannot be converted: {error}"
        ) from None
    return array if isinstance(array, np.ma.MaskedArray) else np.asarray(array)


def _unmasked_rows(array: Any, where: str) -> tuple[Array, Wrong]:
    """The numbers, and the rows that have masked ones."""
    mask = np.ma.getmaskarray(array)
    if mask.dtype != np.bool_:
        raise WrongOutputError(f"the model returned a masked structured array{where}")
    rows = np.flatnonzero(mask.reshape(len(array), -1).any(axis=1)).tolist()
    error = WrongOutputError(
        f"the model returned a masked array{where}, and masked values cannot be sent: fill them, for example "
        "with .filled(numpy.nan)"
    )
    return np.asarray(array.data), dict.fromkeys(rows, error)


# --- declared outputs --------------------------------------------------------------------------------------


def declared_row(specs: Sequence[TensorSpec], value: Any) -> Any:
    """What a model emitted for one request, as it declares its outputs: of one the value, of several a dict.
    Raises WrongOutputError, and InvalidArgumentError for numbers that the datatype does not hold."""
    is_named = isinstance(value, Mapping) and value.keys() == {spec.name for spec in specs}
    if len(specs) == 1:
        (spec,) = specs
        return _declared_row(value[spec.name] if is_named else value, spec)
    if is_named:
        return {spec.name: _declared_row(value[spec.name], spec) for spec in specs}
    names = [spec.name for spec in specs]
    if isinstance(value, Mapping):
        raise WrongOutputError(f"the model emitted the outputs {_shown(value)}, but declares {_shown(names)}")
    raise WrongOutputError(
        f"the model emitted a {type(value).__name__}, but declares the outputs {_shown(names)}: emit a dict "
        "with these names"
    )


def _declared_row(value: Any, spec: TensorSpec) -> Any:
    try:
        return _declared_value(value, spec)
    except WrongOutputError:
        raise
    except Exception as error:  # a model's arrays may be of any class and raise anything
        raise WrongOutputError(
            f"the model's result in output {spec.name!r} is not {_of(spec)}: {error}"
        ) from None


def _of_rows(specs: Sequence[TensorSpec], rows: list[Any]) -> Returned:
    """A list of results of a model that declares outputs."""
    wrong = _errors_in(rows)
    names = {spec.name for spec in specs}
    for row, value in enumerate(rows):
        if row in wrong or (len(specs) == 1 and not (isinstance(value, Mapping) and value.keys() == names)):
            continue
        if not isinstance(value, Mapping):
            wrong[row] = WrongOutputError(
                f"the model returned a {type(value).__name__} as the result of a request, but declares the "
                f"outputs {_shown(names)}: return a dict with these names"
            )
        elif value.keys() != names:
            wrong[row] = WrongOutputError(
                f"the model returned the outputs {_shown(value)}, but declares {_shown(names)}"
            )
    columns: dict[str, _Column] = {}
    for spec in specs:
        values = [
            None if row in wrong
            else value[spec.name] if isinstance(value, Mapping) and value.keys() == names
            else value
            for row, value in enumerate(rows)
        ]  # fmt: skip
        columns[spec.name] = _declared_list(values, spec, wrong)
    return _joined(columns, len(rows))


def _declared_list(values: list[Any], spec: TensorSpec, wrong: Wrong | None = None) -> _Column:
    """A declared output as a list: each value in the declared datatype and shape, or its row is wrong."""
    wrong = dict(wrong or {})
    found: list[Any] = [None] * len(values)
    for row, value in enumerate(values):
        if row in wrong:
            continue
        try:
            found[row] = value if isinstance(value, BaseException) else _declared_value(value, spec)
        except Exception as error:  # a model's arrays may be of any class and raise anything
            wrong[row] = error if isinstance(error, WrongOutputError) else WrongOutputError(
                f"the model's result in output {spec.name!r} is not {_of(spec)}: {error}"
            )  # fmt: skip
        else:
            if isinstance(found[row], BaseException):
                wrong[row] = found[row]
    good = [value for row, value in enumerate(found) if row not in wrong]
    if spec.datatype == "BYTES" or not good or len({value.shape for value in good}) > 1:
        return _Column(found, wrong)
    filler = good[0]
    return _Column(np.stack([filler if row in wrong else value for row, value in enumerate(found)]), wrong)


def _of(spec: TensorSpec) -> str:
    return f"{spec.datatype} of shape {list(spec.shape)}, as it is declared"


def _declared_value(value: Any, spec: TensorSpec) -> Any:
    """The value of one request as it is declared. Raises WrongOutputError and InvalidArgumentError."""
    value = _listed(value)
    if _is_array(value) and not isinstance(value, np.generic):
        array = unmasked(value if isinstance(value, np.ndarray) else _as_array(value, ""))
        column = _declared_array(array[np.newaxis], spec)
        for error in column.wrong.values():
            raise error
        return column.values[0] if isinstance(column.values, list) else column.values[0, ...]
    if spec.datatype == "BYTES":
        return _declared_elements(value, spec)
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, bool | int | float) and spec.shape and set(spec.shape) <= {1, -1}:
        plain = [plain]  # a number has no shape: it is a tensor of one number
        for _ in spec.shape[1:]:
            plain = [plain]
    if isinstance(plain, str | bytes | Mapping) or plain is None:
        raise WrongOutputError(
            f"the model returned a {type(plain).__name__} in output {spec.name!r}, which is {_of(spec)}"
        )
    array = _numbers_of(plain, spec)
    column = _declared_array(array[np.newaxis], spec)
    for error in column.wrong.values():
        raise error
    assert isinstance(column.values, np.ndarray)
    return column.values[0, ...]


def _numbers_of(value: Any, spec: TensorSpec) -> Array:
    """Numbers of one request as an array in which each has its value."""
    check_unmasked(value)
    array = np.asarray(value)  # ValueError for rows of unequal length
    if array.dtype.kind == "O":
        raise WrongOutputError(
            f"the model's result in output {spec.name!r} is not {_of(spec)}: not all of it are "
            "numbers of 64 bits"
        )
    if array.dtype.kind == "f":  # in which integers beside floats are rounded
        if spec.datatype not in ("FP16", "BF16", "FP32", "FP64"):
            return array_of(_as_lists(value), spec.datatype, spec.name)
        check_integers(value, spec.datatype)
    return array


def _as_lists(value: Any) -> Any:
    """Nested sequences as lists, and floats that are integers as these."""
    if isinstance(value, Sequence | np.ndarray):
        return [_as_lists(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _declared_elements(value: Any, spec: TensorSpec) -> Any:
    if isinstance(value, str | bytes) and spec.shape == ():
        return _declared_element(value, spec)
    array = np.array(value if _is_list(value) or isinstance(value, tuple) else [value], object)
    if isinstance(value, str | bytes) and set(spec.shape) <= {1, -1}:
        array = array.reshape((1,) * len(spec.shape))
    for index, element in np.ndenumerate(array):
        array[index] = _declared_element(element, spec)
    if not spec.admits(array.shape):
        raise _wrong_shape(array.shape, spec)
    return array


def _declared_element(element: Any, spec: TensorSpec) -> str | bytes:
    if not isinstance(element, str | bytes):
        raise WrongOutputError(
            f"the model returned a {type(element).__name__} in output {spec.name!r}, which is declared as "
            "BYTES"
        )
    return text_of(element) if spec.text else element


def _element_rows(array: Array, spec: TensorSpec) -> _Column:
    """An array with the batch first as elements of BYTES; rows with anything else are wrong."""
    elements, wrong = array.astype(object), Wrong()
    for index, element in np.ndenumerate(elements):
        try:
            elements[index] = _declared_element(element, spec)
        except (WrongOutputError, ValueError) as error:
            wrong[index[0]] = error if isinstance(error, WrongOutputError) else WrongOutputError(
                f"the model's result in output {spec.name!r} is not {_of(spec)}: {error}"
            )  # fmt: skip
    return _Column(elements, wrong)


def _declared_array(array: Array, spec: TensorSpec) -> _Column:
    """A declared output as an array with the batch first: each number is in the declared datatype, or its
    row is wrong. Raises WrongOutputError if all are."""
    kind = array.dtype.kind
    if (kind in "US" and spec.datatype != "BYTES") or (kind not in _TEXT_KINDS and spec.datatype == "BYTES"):
        raise WrongOutputError(
            f"the model returned {array.dtype} in output {spec.name!r}, which is declared as {spec.datatype}"
        )
    if kind == "O" and not (spec.datatype == "BYTES" and spec.admits(array.shape[1:])):
        rows = list(array)
        return _declared_list([row.tolist() if isinstance(row, np.ndarray) else row for row in rows], spec)
    if not spec.admits(array.shape[1:]):
        raise _wrong_shape(array.shape[1:], spec)
    if spec.datatype == "BYTES":
        return _Column(array, {}) if kind == "U" else _element_rows(array, spec)
    try:
        numbers, lost = in_datatype(array, spec.datatype)
    except ValueError:
        raise WrongOutputError(
            f"the model returned {array.dtype} in output {spec.name!r}, which is declared as {spec.datatype}"
        ) from None
    if spec.datatype == "BF16":
        numbers = to_bfloat16(numbers)
    if lost is None:
        return _Column(numbers, {})
    rows = np.flatnonzero(lost.reshape(len(array), -1).any(axis=1)).tolist()
    return _Column(numbers, {row: _lost(array[row], lost[row], spec) for row in rows})


def _wrong_shape(shape: Sequence[int], spec: TensorSpec) -> WrongOutputError:
    return WrongOutputError(
        f"the model returned an array of shape {list(shape)} for a request in output {spec.name!r}, "
        f"which is {_of(spec)}"
    )


def _lost(row: Any, lost: Any, spec: TensorSpec) -> WrongOutputError:
    number = np.asarray(row)[lost].ravel()[0]
    return WrongOutputError(
        f"the model returned {number} in output {spec.name!r}, which is {_of(spec)}: "
        f"{why_lost(np.asarray(row), spec.datatype)}"
    )
