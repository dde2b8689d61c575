"""Fuzzing what models return, and what they do to their batch.

A model is made at random: what it takes and returns, what it declares, on which bodies it raises, what it
writes into its batch, what it keeps of it, and which arrays it returns again. What a request is answered in
any batch, with the status OK, must be what it is answered alone: the same bytes. These must be the value that
the model returns if it is called directly with that body alone. If what the model returns can be told apart
at all, the status must be the same, too.

    python -m support.fuzzing_models --batches 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import json
import math
import random
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import OK, NotFoundError
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.messages.results import Result
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.tensors import TENSOR_FIELDS, TensorSpec, to_bytes
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.frames import pack_values
from carpool_worker.model_process.model import LoadedModel, RequestInfo

BATCHES_PER_SEED: Final = 250
BODIES_MAX: Final = 6
FIELDS: Final = types.MappingProxyType({"language": b"de"})  # of each request


class _Series(Sequence[Any]):
    """A list that is an array as well, as a Series of pandas is."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return self._values[at]

    def to_list(self) -> list[Any]:
        return list(self._values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.asarray(self._values)


class _Extension:
    """A column of pandas that is no Series: a list by another name, and as an array of floats."""

    to_numpy = None

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def __getitem__(self, at: int) -> Any:
        return self._values[at]

    def tolist(self) -> list[Any]:
        return list(self._values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.asarray(self._values, np.float64)


class _Tensor:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._array

    def __getitem__(self, at: int) -> Any:
        return self._array[at]


class _Subclass(np.ndarray[Any, Any]):
    """An array of a class of its own."""


def _in_objects(values: Iterable[Any]) -> Any:
    values = list(values)
    array = np.empty(len(values), object)
    for at, value in enumerate(values):
        array[at] = value
    return array


_masked_array: Final[Any] = np.ma.masked_array
_BODIES: Final[tuple[Any, ...]] = (
    "42", "unknown", "a\0", 0, 7, -1, 2.5, True, None, [1, 2], [[1], "x"], {"n": 1}, {"n": {"m": [1, 2]}},
    np.array([1, 2, 6], np.float32), np.array([[1], [2]], np.int64), {"x": np.ones(3, np.float32)}, "0", "1",
)  # fmt: skip
_NUMBERS: Final[tuple[Any, ...]] = (
    0, 1, 7, -1, 255, 257, 2.75, 3.0, float("nan"), float("inf"), 1e5, 1e39, 2**53 + 1, 2**63, True,
    np.int8(3), np.float32(0.1), np.uint64(2**64 - 1),
)  # fmt: skip


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


_VALUES: Final[tuple[Any, ...]] = (
    *_NUMBERS, None, "42", "a\0", "", b"\xff", b"a\0", [1, 2], [1, 2.5], [[1], 2], ["a", None], (1, 2),
    {"a": 1}, {"a": [1, {"b": 2.5}]}, np.array([1, 2], np.int8), np.array([[1.5, 2.5]]), np.array(3.5),
    np.arange(3)[::-1],
    np.array([1, 2], ">i4"), np.array(["a", "bcd"]), np.array(["a\0", "b"], object), np.array([], np.float32),
    np.array([True, False]), np.array([1 + 2j]), np.array(["2026-01-01"], "M8[s]"), np.zeros(1, "i4,f4"),
    np.array([1, None], object), _masked_array([1, 2], [0, 1]), _masked_array([1, 2]), np.ma.masked,
    {1, 2}, object(), _deep(70), msgpack.Timestamp(1, 0), msgpack.ExtType(5, b"x"), {1: "a", "1": "b"},
    {True: 1, "true": 2}, {"datatype": "image", "shape": "round", "data": 1}, "\ud800", 2**64,
    ValueError("odd"), NotFoundError("none"), [2**24 + 1, 0.5], [2**53 + 1, 2.5],
    {"datatype": "FP32", "shape": [1], "data": [1.5]}, [_masked_array([1], [1])],
    {"x": np.array(2.5)},
)  # fmt: skip
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_DATATYPES: Final = (
    "BF16",
    "BYTES",
    "BOOL",
    "UINT8",
    "INT32",
    "INT64",
    "UINT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
)
_DTYPES: Final = ("?", "u1", "i2", "i8", ">i4", "u8", "f2", "f4", "f8")
_INPUTS: Final = (
    *((TensorSpec("x", datatype, (2,)),) for datatype in ("FP32", "BF16", "INT64")),
    (TensorSpec("x", "BYTES", (2,), text=True),),
    (TensorSpec("x", "FP32", (2,)), TensorSpec("t", "BYTES", (2,), text=True)),
)
_SHAPES: Final[tuple[tuple[int, ...], ...]] = ((), (1,), (2,), (2, 1), (-1,))
_NAMES: Final = ("y", "score", "0", "n")

# What a model may return for a batch, of the values for each body; and what no request can be told from.
_LISTS: Final[tuple[Callable[[list[Any]], Any], ...]] = (
    list, list, collections.deque, collections.UserList, _Series, _Extension,
)  # fmt: skip
_DICTS: Final[tuple[Callable[[dict[str, Any]], Any], ...]] = (
    dict, dict, collections.OrderedDict, collections.UserDict, types.MappingProxyType,
)  # fmt: skip
_WRONG: Final[tuple[Callable[[list[Any]], Any], ...]] = (
    tuple, iter, dict.fromkeys, lambda values: dict(enumerate(values)), lambda values: "ok"[: len(values)],
    lambda values: bytearray(len(values)), lambda values: memoryview(bytes(len(values))), lambda values: None,
    lambda values: values[:-1], lambda values: [*values, 1], lambda values: {"y": tuple(values)},
    lambda values: {str(row): values for row in range(len(values))}, lambda values: {},
    lambda values: dict(enumerate(values)).values(), lambda values: {"y": {"z": values}},
    lambda values: collections.UserString("ok"[: len(values)]), lambda values: (value for value in values),
    lambda values: map(str, values), lambda values: zip(values, values, strict=True),
    lambda values: {"y": iter(values)},
    lambda values: np.array(len(values)), lambda values: np.zeros((1, len(values))),
    lambda values: set(map(str, values)), lambda values: object(),
    lambda values: np.zeros(len(values), "i4,f4"),
    lambda values: np.array(["2026-01-01"] * len(values), "M8[s]"),
    lambda values: collections.Counter(map(str, values)),
    lambda values: [values], lambda values: {"y": 1.5},
    lambda values: {"y": values, "n": values[1:]}, lambda values: {b"y": values}, lambda values: "",
    lambda values: {("y",): values}, lambda values: range(len(values) + 1),
    lambda values: _masked_array(np.zeros(len(values), "i4,f4"), True),
    lambda values: [values, values], lambda values: [values] * 3,
    lambda values: [_in_objects(values), _in_objects(values)],
)  # fmt: skip


class RandomModel:
    """A model made at random, and the bodies that it knows."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.inputs: tuple[TensorSpec, ...] = choice.choice(_INPUTS) if choice.random() < 0.3 else ()
        self.bodies = self._some_bodies()
        self._keys = {self._key(body): at for at, body in enumerate(self.bodies)}
        self.is_told_apart = choice.random() < 0.8
        self._raises_on = {at for at in range(len(self.bodies)) if choice.random() < 0.15}
        self._refuses = {at for at in range(len(self.bodies)) if choice.random() < 0.1}
        self._writes = choice.random() < 0.5
        self._kept: list[Any] | None = [] if choice.random() < 0.3 else None
        self.outputs: tuple[TensorSpec, ...] = ()
        self._return = self._returning()
        self.loaded = LoadedModel(
            run=self._run,
            wants_requests=choice.random() < 0.3,
            validate=self._validate if choice.random() < 0.3 else None,
            inputs=self.inputs,
            outputs=self.outputs,
        )

    @property
    def content_types(self) -> tuple[str, ...]:
        """Those that its requests may have."""
        is_raw = len(self.inputs) == 1 and self.inputs[0].fixed_bytes is not None
        return (JSON, MSGPACK, RAW) if is_raw else (JSON, MSGPACK)

    def encoded(self, content_type: str) -> list[bytes]:
        """Its bodies."""
        if content_type == RAW:
            return [to_bytes(body, self.inputs[0].datatype) for body in self.bodies]
        return [encode_body(content_type, body) for body in self.bodies]

    def alone(self, at: int) -> Any:
        """What it returns for this body, called directly: the value, or one for each output."""
        returned = self._return([at])
        if isinstance(returned, Mapping):
            rows = {name: column[0] for name, column in returned.items()}
            return copy.deepcopy(next(iter(rows.values())) if len(rows) == 1 else rows)
        return copy.deepcopy(returned[0])

    def has_error(self, at: int) -> bool:
        """Whether it returns an exception in place of a value for this body."""
        returned = self._return([at])
        columns = list(returned.values()) if isinstance(returned, Mapping) else [returned]
        return any(isinstance(column[0], NotFoundError) for column in columns)

    def _some_bodies(self) -> list[Any]:
        if not self.inputs:
            return self._choice.sample(_BODIES, BODIES_MAX)
        return [self._tensors(number) for number in range(BODIES_MAX)]

    def _tensors(self, number: int) -> Any:
        tensors = {
            spec.name: [f"a{number}", "b\0"] if spec.datatype == "BYTES"
            else np.array([number, -number], np.int64 if spec.datatype == "INT64" else np.float32)
            for spec in self.inputs
        }  # fmt: skip
        return next(iter(tensors.values())) if len(tensors) == 1 else tensors

    def _key(self, body: Any) -> Any:
        if not self.inputs:
            return pack_values(body)
        tensors = body.values() if isinstance(body, dict) else [body]
        return str([np.asarray(tensor).tolist() for tensor in tensors])

    def _rows(self, batch: Any) -> list[Any]:
        """Each body of a batch; those of tensors are views of it."""
        if isinstance(batch, dict):
            return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        return list(batch)

    def _validate(self, body: Any) -> None:
        at = self._keys[self._key(body)]
        self._write(body)
        if at in self._refuses:
            raise ValueError("refused")

    def _run(self, batch: Any, requests: Sequence[RequestInfo]) -> Any:
        bodies = self._rows(batch)
        for request in requests:
            assert request.fields == dict(FIELDS)  # as they were sent
            if self._writes and isinstance(request.fields, dict):
                request.fields.clear()
        ats = [self._keys[self._key(body)] for body in bodies]  # KeyError if a body is not as it was sent
        if self._kept is not None:  # what it got and returned before, or some of it
            for kept in self._kept:
                self._write(kept)
            self._kept[:] = [*bodies, batch]
        for body in bodies:
            self._write(body)
        if isinstance(batch, list | dict) and self._writes:
            batch.clear()
        if self._raises_on.intersection(ats):
            raise RuntimeError("bad body")
        return self._return(ats)

    def _write(self, body: Any) -> None:
        """Change a body in place, as models do to spare a copy."""
        if not self._writes:
            return
        if isinstance(body, np.ndarray):
            body[...] = "changed" if body.dtype == object else 77
        elif isinstance(body, dict):
            for inner in body.values():
                self._write(inner)
            if not self.inputs:
                body.clear()
        elif isinstance(body, list):
            body[:] = ["changed"]

    def _returning(self) -> Callable[[list[int]], Any]:
        """What is returned for the bodies at some places."""
        choice = self._choice
        if not self.is_told_apart:
            values = self._values()
            if choice.random() < 0.1:  # with as many values for each body as there are requests
                keys = [str(body) if type(body) in _SCALARS else at for at, body in enumerate(self.bodies)]
                return lambda ats: {keys[at]: [values[at]] * len(ats) for at in ats}
            wrong = choice.choice(_WRONG)
            return lambda ats: wrong([values[at] for at in ats])
        names = choice.sample(_NAMES, choice.choice((1, 1, 2, 3)))
        columns = [self._column(name, choice.random() < 0.4) for name in names]
        if choice.random() < 0.5:
            as_dict = choice.choice(_DICTS)
            return lambda ats: as_dict(
                {name: column(ats) for name, column in zip(names, columns, strict=True)}
            )
        self.outputs = self.outputs[:1] if self.outputs and self.outputs[0].name == names[0] else ()
        return columns[0]

    def _column(self, name: str, is_declared: bool) -> Callable[[list[int]], Any]:
        """One output: a list or an array, by the places of bodies."""
        choice = self._choice
        if is_declared or self.outputs:  # all or none are declared
            self.outputs = (
                *self.outputs,
                TensorSpec(name, choice.choice(_DATATYPES), choice.choice(_SHAPES)),
            )
        spec = self.outputs[-1] if self.outputs and choice.random() < 0.7 else None
        if choice.random() < 0.5:
            return self._array(spec)
        values, as_list = self._fitting(spec) if spec else self._values(), choice.choice(_LISTS)
        if not spec and choice.random() < 0.3:
            return self._refilled_list(values)
        return lambda ats: as_list([values[at] for at in ats])

    def _refilled_list(self, values: list[Any]) -> Callable[[list[int]], Any]:
        """A list with one dict for all calls, filled anew each time; and so is the list."""
        result: list[Any] = []

        def column(ats: list[int]) -> Any:
            result[:] = [result[at] if at < len(result) else {} for at in range(len(ats))]
            for row, at in enumerate(ats):
                result[row]["value"] = values[at]
            return result

        return column

    def _values(self) -> list[Any]:
        pool = self._choice.choice((_VALUES, _VALUES, _NUMBERS))
        return [self._choice.choice(pool) for _ in self.bodies]

    def _fitting(self, spec: TensorSpec) -> list[Any]:
        """Values as they are declared, of several sizes where these may vary."""
        choice, values = self._choice, list[Any]()
        for _ in self.bodies:
            shape = [choice.randint(1, 3) if size < 0 else size for size in spec.shape]
            number = choice.choice((0, 1, 1.0) if spec.datatype in ("BOOL", "UINT8") else (1, 2.0, 100))
            array = np.full(shape, str(number) if spec.datatype == "BYTES" else number)
            values.append(choice.choice((array, array.tolist(), array.astype(object).tolist())))
            if spec.datatype.startswith("FP") and shape == [2] and choice.random() < 0.3:
                values[-1] = [choice.choice((2**24 + 1, 2**53 + 1)), 0.5]  # the integer must be exact
        return values

    def _array(self, spec: TensorSpec | None) -> Callable[[list[int]], Any]:
        """An array with the batch first: if `spec` is given, of this shape, and of texts for BYTES."""
        shape = [2 if size < 0 else size for size in (spec.shape if spec else self._choice.choice(_SHAPES))]
        numbers = [self._choice.choice(_NUMBERS) for _ in self.bodies]
        with np.errstate(all="ignore"):
            array = np.array(numbers, np.float64).astype(self._choice.choice(_DTYPES))
        rows = np.stack([np.full(shape, number) for number in array])
        form = self._choice.random()
        if form < 0.1:
            rows = _masked_array(rows, [np.full(shape, self._choice.random() < 0.2) for _ in rows])
        elif form < 0.2 or (spec and spec.datatype == "BYTES"):
            rows = rows.astype(str)
        elif form < 0.3:
            return lambda ats: rows[ats].view(_Subclass)
        elif form < 0.4:
            return lambda ats: _Tensor(rows[ats])
        elif form < 0.5:
            return lambda ats: _in_objects(rows[ats].tolist())
        elif form < 0.8:  # one array for all calls
            filled = np.zeros((BODIES_MAX, *rows.shape[1:]), rows.dtype)

            def column(ats: list[int]) -> Any:
                filled[: len(ats)] = rows[ats]
                return filled[: len(ats)]

            return column
        return lambda ats: rows[ats]


def check(choice: random.Random, batches: int = BATCHES_PER_SEED) -> int:
    """Execute `batches` batches of a random model. Returns how many results were OK."""
    model = RandomModel(choice)
    dry_run = DryRun(model.loaded)
    alone: dict[tuple[str, int], Result] = {}
    encoded = {content_type: model.encoded(content_type) for content_type in model.content_types}
    succeeded = 0
    for _ in range(batches):
        content_type = choice.choice(model.content_types)
        ats = choice.choices(range(BODIES_MAX), k=choice.randint(2, BODIES_MAX))
        results = dry_run.execute(
            [encoded[content_type][at] for at in ats], content_type, dict(FIELDS)
        ).results
        for at, result in zip(ats, results, strict=True):
            expected = alone.get((content_type, at))
            if expected is None:
                (expected,) = dry_run.execute([encoded[content_type][at]], content_type, dict(FIELDS)).results
                alone[content_type, at] = expected
                _assert_returned(model, at, expected)
            succeeded += result.status == OK
            _assert_same(model, result, expected)
    return succeeded


def _assert_same(model: RandomModel, result: Result, expected: Result) -> None:
    if result.status == OK:
        found, alone = (
            (result.status, result.content_type, result.body),
            (OK, expected.content_type, expected.body),
        )
        assert found == alone, f"{found} in a batch; alone {expected}"
    elif model.is_told_apart:
        assert result.status == expected.status, f"{result.detail}; alone {expected}"


def _assert_returned(model: RandomModel, at: int, result: Result) -> None:
    """A result is what the model returns for this body, if it is called directly."""
    if result.status != OK:
        is_lost = model.is_told_apart and "NotFoundError" in (result.detail or "") and model.has_error(at)
        assert not is_lost, result.detail
        return
    assert result.body is not None
    found, value = decode_result(result.content_type, result.body), model.alone(at)
    if result.content_type == RAW:  # without its datatype
        return
    assert _is_returned(found, value, model.outputs), f"{found!r}, but the model returns {value!r}"
    read: Callable[[bytes], Any] = json.loads if result.content_type == JSON else _unpack
    written = read(result.body)
    for spec in model.outputs:
        tensor = written[spec.name] if len(model.outputs) > 1 else written
        if isinstance(tensor, dict):  # and not a number without dimensions
            assert tensor["datatype"] == spec.datatype, f"{tensor}, which is declared as {spec}"


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False)


def _is_returned(found: Any, value: Any, specs: Sequence[TensorSpec]) -> bool:
    if not specs:
        return _is_value(found, value)
    if len(specs) == 1:
        return _is_declared(found, value, specs[0])
    return found.keys() == {spec.name for spec in specs} and all(
        _is_declared(found[spec.name], value[spec.name], spec) for spec in specs
    )


def _is_value(found: Any, value: Any) -> bool:
    """Whether a result is this value, as docs/values.md says."""
    if isinstance(value, _Tensor | np.ndarray | np.generic):
        return _is_array(found, np.ma.asanyarray(value) if isinstance(value, _Tensor) else value)
    if isinstance(value, dict) and value.keys() == TENSOR_FIELDS:
        return bool(np.array_equal(found, value["data"]))
    if isinstance(value, dict):
        if not isinstance(found, dict) or list(map(str, found)) != list(map(str, value)):
            return False
        return all(map(_is_value, found.values(), value.values()))
    if isinstance(value, list | tuple):
        return isinstance(found, list) and len(found) == len(value) and all(map(_is_value, found, value))
    if isinstance(value, float) and math.isnan(value):
        return isinstance(found, float) and math.isnan(found)
    return type(found) is type(value) and bool(found == value)


def _is_array(found: Any, value: Any) -> bool:
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        return False
    array, result = np.asarray(value), np.asarray(found)
    if array.dtype.kind in "OUS":
        return list(_numbers(found)) == list(_numbers(array))
    if array.ndim and array.dtype.kind != result.dtype.kind:
        return False
    is_float = array.dtype.kind == "f"
    return array.shape == result.shape and bool(np.array_equal(array, result, equal_nan=is_float))


def _is_declared(found: Any, value: Any, spec: TensorSpec) -> bool:
    """Whether a result is this value in the datatype that is declared."""
    results, values = list(_numbers(found)), list(_numbers(value))
    if spec.datatype == "BYTES":
        return results == values
    if not spec.admits(np.shape(found)) or len(results) != len(values):
        return False
    bits = {"FP16": 11, "BF16": 8, "FP32": 24, "FP64": 53}.get(spec.datatype)
    return all(_is_rounded(one, other, bits) for one, other in zip(results, values, strict=True))


def _is_rounded(found: Any, number: Any, bits: int | None) -> bool:
    """Whether a number is another one, rounded to `bits` bits; exactly, if that is None."""
    if math.isnan(number) or math.isinf(number):
        return bool(found == number or (math.isnan(found) and math.isnan(number)))
    if isinstance(number, int):  # in arrays and in lists
        bits = None
    if bits is None or math.isnan(found) or math.isinf(found):
        return bool(found == number)
    exact = Fraction(number)
    allowed = abs(exact) / 2**bits + Fraction(1, 2**25)
    return bool(-allowed <= Fraction(found) - exact <= allowed)


def _numbers(value: Any) -> Iterator[Any]:
    """All numbers, or texts, of nested lists and arrays."""
    if isinstance(value, _Tensor | np.ndarray | np.generic):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    else:
        yield value


def fuzz(batches: int, seed: int, report: Callable[[str], None] = print) -> None:
    """Execute `batches` batches. The seed that is named in a failure replays it."""
    done, succeeded, started_s = 0, 0, time.monotonic()
    for at in itertools.count(seed):
        if not (at - seed) % 200:
            taken_s = time.monotonic() - started_s
            report(f"seed {at}: {done:,} batches in {taken_s:.0f} s, {succeeded:,} results OK")
        if done >= batches:
            return
        count = min(BATCHES_PER_SEED, batches - done)
        try:
            succeeded += check(random.Random(at), count)
        except BaseException as error:
            error.add_note(f"--seed {at} --batches {BATCHES_PER_SEED}")
            raise
        done += count


def main() -> int:
    """Fuzz, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help=f"the first one; each is for {BATCHES_PER_SEED}")
    arguments = parser.parse_args()
    fuzz(arguments.batches, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
