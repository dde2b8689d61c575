"""Fuzzing what models return, and what they do to their batch.

A model is made at random: what it returns, what it declares, on which bodies it raises, and what it writes
into its batch. What a request is answered in any batch, with the status OK, must be what it is answered
alone: the same bytes. If what the model returns can be told apart at all, the status must be the same, too.

    python -m support.fuzzing_models --batches 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import OK
from carpool.messages import JSON, MSGPACK, Result
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.frames import pack_values
from carpool_worker.model_process.model import LoadedModel
from carpool_worker.rehearsal import Rehearsal

BATCHES_PER_SEED: Final = 250
BODIES_MAX: Final = 6

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
    ValueError("odd"), {"datatype": "FP32", "shape": [1], "data": [1.5]}, [_masked_array([1], [1])],
    {"x": np.array(2.5)},
)  # fmt: skip
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_DATATYPES: Final = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "BF16", "FP32", "FP64", "BYTES")
_DTYPES: Final = ("?", "u1", "i2", "i8", ">i4", "u8", "f2", "f4", "f8")
_SHAPES: Final[tuple[tuple[int, ...], ...]] = ((), (1,), (2,), (2, 1), (-1,))
_NAMES: Final = ("y", "score", "0", "n")

# What a model may return for a batch, of the values for each body; and what no request can be told from.
_LISTS: Final[tuple[Callable[[list[Any]], Any], ...]] = (list, collections.deque, collections.UserList)
_WRONG: Final[tuple[Callable[[list[Any]], Any], ...]] = (
    tuple, iter, dict.fromkeys, lambda values: dict(enumerate(values)), lambda values: "ok"[: len(values)],
    lambda values: bytearray(len(values)), lambda values: memoryview(bytes(len(values))), lambda values: None,
    lambda values: values[:-1], lambda values: [*values, 1], lambda values: {"y": tuple(values)},
    lambda values: {str(row): values for row in range(len(values))}, lambda values: {},
    lambda values: dict(enumerate(values)).values(), lambda values: {"y": {"z": values}},
    lambda values: collections.UserString("ok"[: len(values)]),
)  # fmt: skip


class RandomModel:
    """A model made at random, and the bodies that it knows."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.has_inputs = choice.random() < 0.3
        self.bodies = self._some_bodies()
        self._keys = {self._key(body): at for at, body in enumerate(self.bodies)}
        self.is_told_apart = choice.random() < 0.8
        self._raises_on = {at for at in range(len(self.bodies)) if choice.random() < 0.15}
        self._refuses = {at for at in range(len(self.bodies)) if choice.random() < 0.1}
        self._writes = choice.random() < 0.5
        self.outputs: tuple[TensorSpec, ...] = ()
        self._return = self._returning()
        self.loaded = LoadedModel(
            run=lambda batch, requests: self._run(batch),
            validate=self._validate if choice.random() < 0.3 else None,
            inputs=(TensorSpec("x", "FP32", (2,)),) if self.has_inputs else (),
            outputs=self.outputs,
        )

    def _some_bodies(self) -> list[Any]:
        if not self.has_inputs:
            return self._choice.sample(_BODIES, BODIES_MAX)
        return [np.array([number, -number], np.float32) for number in range(BODIES_MAX)]

    def _key(self, body: Any) -> bytes:
        return bytes(np.asarray(body, np.float32).tobytes()) if self.has_inputs else pack_values(body)

    def _validate(self, body: Any) -> None:
        at = self._keys[self._key(body)]
        self._write(body)
        if at in self._refuses:
            raise ValueError("refused")

    def _run(self, batch: Any) -> Any:
        ats = [self._keys[self._key(body)] for body in batch]  # KeyError if a body is not as it was sent
        for body in batch:
            self._write(body)
        if isinstance(batch, list) and self._writes:
            batch.clear()
        if self._raises_on.intersection(ats):
            raise RuntimeError("bad body")
        return self._return(ats)

    def _write(self, body: Any) -> None:
        """Change a body in place, as models do to spare a copy."""
        if not self._writes:
            return
        if isinstance(body, np.ndarray):
            body *= 0
            body -= 1
        elif isinstance(body, dict):
            for inner in body.values():
                self._write(inner)
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
        if choice.random() < 0.5 and not any(name == "0" for name in names):
            return lambda ats: {name: column(ats) for name, column in zip(names, columns, strict=True)}
        self.outputs = self.outputs[:1] if self.outputs and self.outputs[0].name == names[0] else ()
        return columns[0]

    def _column(self, name: str, is_declared: bool) -> Callable[[list[int]], Any]:
        """One output: a list or an array, by the places of bodies."""
        choice = self._choice
        if is_declared or self.outputs:  # all or none are declared
            datatype, shape = choice.choice(_DATATYPES), choice.choice(_SHAPES)
            if datatype == "BF16":  # in a list of results, numbers of BF16 are FP32
                shape = (2,)
            self.outputs = (*self.outputs, TensorSpec(name, datatype, shape))
        if choice.random() < 0.5:
            return self._array()
        values, as_list = self._values(), choice.choice(_LISTS)
        return lambda ats: as_list([values[at] for at in ats])

    def _values(self) -> list[Any]:
        pool = self._choice.choice((_VALUES, _VALUES, _NUMBERS))
        return [self._choice.choice(pool) for _ in self.bodies]

    def _array(self) -> Callable[[list[int]], Any]:
        shape = [2 if size < 0 else size for size in self._choice.choice(_SHAPES)]
        numbers = [self._choice.choice(_NUMBERS) for _ in self.bodies]
        with np.errstate(all="ignore"):
            array = np.array(numbers, np.float64).astype(self._choice.choice(_DTYPES))
        rows = np.stack([np.full(shape, number) for number in array])
        if self._choice.random() < 0.1:
            rows = _masked_array(rows, [np.full(shape, self._choice.random() < 0.2) for _ in rows])
        elif self._choice.random() < 0.1:
            rows = rows.astype(str)
        return lambda ats: rows[ats]


def check(choice: random.Random, batches: int = BATCHES_PER_SEED) -> int:
    """Execute so many batches of a random model. Returns how many results were OK."""
    model = RandomModel(choice)
    rehearsal = Rehearsal(model.loaded)
    alone: dict[tuple[str, int], Result] = {}
    encoded: dict[str, list[bytes]] = {
        content_type: [encode_body(content_type, body) for body in model.bodies]
        for content_type in (JSON, MSGPACK)
    }
    succeeded = 0
    for _ in range(batches):
        content_type = choice.choice((JSON, MSGPACK))
        ats = choice.choices(range(BODIES_MAX), k=choice.randint(2, BODIES_MAX))
        results = rehearsal.execute([encoded[content_type][at] for at in ats], content_type).results
        for at, result in zip(ats, results, strict=True):
            expected = alone.get((content_type, at))
            if expected is None:
                (expected,) = rehearsal.execute([encoded[content_type][at]], content_type).results
                alone[content_type, at] = expected
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
        assert result.body is not None
        decode_result(result.content_type, result.body)
    elif model.is_told_apart:
        assert result.status == expected.status, f"{result.detail}; alone {expected}"


def fuzz(batches: int, seed: int, report: Callable[[str], None] = print) -> None:
    """Execute so many batches. The seed that is named in a failure replays it."""
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
