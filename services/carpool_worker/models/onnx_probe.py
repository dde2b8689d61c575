"""Whether the outputs of an ONNX graph have the batch first, found with made-up requests. Pure.

That an output has as many rows as a batch has requests may be luck: a transposed one of three columns has
three rows for three requests. So two different requests, 0 and 1, are executed, each alone and then together
as 0, 0, 1, 0. An output has the batch first if its first dimension is 1, 1 and 4. What is declared about it
counts less: exporters write the sizes of the example that they had.

A graph may raise for values and sizes that are made up. Then others are tried; if it raises for all of them,
what it declares is believed, and what comes is counted for each batch. Values are compared, too: a row that
belongs to another request is an error, and one that depends on the others is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.wire.tensors import Array, TensorSpec
from carpool_worker.models.onnx_declaration import toml_path
from carpool_worker.models.onnx_signature import ResultOutput

_ALONE: Final = ((0,), (1,))
# By the size of the batch, from 2 on. None is the same from behind, or in descending order.
_TOGETHER: Final = ((0, 1), (0, 0, 1), (0, 0, 1, 0))
# For dimensions that vary: a small one; and one that networks for images can halve five times. Neither is the
# size of a batch here, and hardly one that an exporter had as an example.
_SIZES: Final = (5, 96)
# For integers: two indexes that most tables have; then ones, which are lengths and masks, too. No zeros: some
# versions of onnxruntime end the process when integers are divided by zero.
_INTEGERS: Final = ((1, 2), (1, 1))
_NUMBERS_MAX: Final = 2**24  # in the inputs of one execution, if their size is chosen here
_TOLERANCE: Final = 1e-2  # of the largest number; sums in another order differ, in FP16 by so much
_FLOATS: Final = ("FP16", "BF16", "FP32", "FP64")


class Filling(NamedTuple):
    """What made-up inputs are filled with: sizes of dimensions that vary, integers of the two requests."""

    size: int
    integers: tuple[int, int]


class ProbeRun(NamedTuple):
    """An execution: which of the two requests its rows are, and its outputs by name."""

    rows: Sequence[int]
    outputs: Mapping[str, Any]


class _Row(NamedTuple):
    """A row of the batch: whose it is, and what this request and the other one get alone."""

    request: int
    value: Any
    alone: Any
    other: Any


Execute = Callable[[Sequence[int], Filling], Mapping[str, Any]]


class Probed(NamedTuple):
    """What was found. `runs`: alone and together, as far as the graph did not raise; none if it always did.
    `error`: the last that it raised. `batch_max`: of the model."""

    runs: tuple[ProbeRun, ...]
    error: str
    batch_max: int

    @property
    def has_batch(self) -> bool:
        """Whether there was a batch as it may be in service, of more than one request if there are such."""
        return any(len(run.rows) > 1 for run in self.runs) or (self.batch_max == 1 and bool(self.runs))


def probe(inputs: Sequence[TensorSpec], execute: Execute, batch_max: int) -> Probed:
    """Execute made-up requests for these inputs, together if batches may have several."""
    best: tuple[ProbeRun, ...] = ()
    error = ""
    for filling in _fillings(inputs):
        runs: list[ProbeRun] = []
        try:
            for rows in (*_ALONE, *_together(batch_max)):
                runs.append(ProbeRun(rows, execute(rows, filling)))
        except Exception as raised:  # onnxruntime's exceptions have no common base class
            error = f"{' '.join(str(raised).split()):.300}"
        found = Probed(tuple(runs), error, batch_max)
        if found.has_batch:
            return found
        best = max(best, found.runs if len(runs) == len(_ALONE) else (), key=len)
    return Probed(best, error, batch_max)


def _together(batch_max: int) -> tuple[tuple[int, ...], ...]:
    """The largest of the batches that may be; none if each request is executed alone."""
    return _TOGETHER[: batch_max - 1][-1:]


def _fillings(inputs: Sequence[TensorSpec]) -> list[Filling]:
    """What to try, in order; of what makes no difference for these inputs only the first."""
    varies = any(-1 in spec.shape for spec in inputs)
    sizes = [size for size in _SIZES if _count(inputs, size) <= _NUMBERS_MAX] if varies else _SIZES[:1]
    has_integers = any(spec.datatype.startswith(("INT", "UINT")) for spec in inputs)
    integers = _INTEGERS if has_integers else _INTEGERS[:1]
    return [Filling(size, pair) for pair, size in product(integers, sizes)]


def _count(inputs: Sequence[TensorSpec], size: int) -> int:
    return len(_TOGETHER[-1]) * sum(math.prod(_filled(spec.shape, size)) for spec in inputs)


def _filled(shape: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(size if declared == -1 else declared for declared in shape)


def made_up(spec: TensorSpec, rows: Sequence[int], filling: Filling) -> Array:
    """The input of a batch of the requests `rows`, each 0 or 1: (n, *spec.shape), BF16 as float32."""
    return np.stack([_row(spec, row, filling) for row in rows])


def _row(spec: TensorSpec, row: int, filling: Filling) -> Array:
    shape = _filled(spec.shape, filling.size)
    if spec.datatype in _FLOATS:
        dtype = {"FP16": np.float16, "FP64": np.float64}.get(spec.datatype, np.float32)
        return np.asarray(np.random.default_rng(row).random(shape)).astype(dtype)
    if spec.datatype == "BYTES":
        return np.full(shape, str(row), object)
    if spec.datatype == "BOOL":
        return np.full(shape, bool(row))
    return np.full(shape, filling.integers[row], spec.datatype.lower())


# --- what was found ----------------------------------------------------------------------------------------


def outputs_found(
    results: Sequence[ResultOutput], probed: Probed, path: Path, operator: str = ""
) -> tuple[TensorSpec, ...]:
    """The outputs as they are sent, without maps. A size that differs from the declared one varies, and so do
    all that were not seen. Raises ValueError for an output that has not the batch first.

    `operator`: one in the graph that makes as many rows as the numbers say."""
    problems = {result.name: _problem(result, probed) or _doubt(result, operator) for result in results}
    good = [name for name, problem in problems.items() if not problem]
    for result in results:
        if problem := problems[result.name]:
            fixes = ["export the model with a row for each request there"]
            if good:
                fixes.append(f"leave it out with outputs = {json.dumps(good)} in {toml_path(path)}")
            if operator and not _problem(result, probed):
                names = json.dumps([other.name for other in results])
                fixes.append(f"if it always has one, write outputs = {names} in {toml_path(path)}")
            if probed.batch_max > 1 and _is_right_alone(result, probed.runs):
                fixes.append(f"execute each request alone with max_batch_size = 1 in {toml_path(path)}")
            raise ValueError(f"{path}: output {result.name!r} {problem}; {', or '.join(fixes)}")
    return tuple(_spec(result, probed.runs) for result in results if not result.is_maps)


def _is_right_alone(result: ResultOutput, runs: Sequence[ProbeRun]) -> bool:
    counts = [count_of(run.outputs[result.name]) for run in runs if len(run.rows) == 1]
    return bool(counts) and set(counts) == {1}


def batch_mates_matter(results: Sequence[ResultOutput], probed: Probed) -> bool:
    """Whether a row depends on the other rows of its batch, by more than rounding, and not on chance."""
    return any(_depends_on_others(_rows(result, probed.runs)) for result in results)


def _depends_on_others(rows: Sequence[_Row]) -> bool:
    if all(_is_same(row.value, row.alone) for row in rows):
        return False
    first, *others = (row for row in rows if row.request == 0)  # by chance, rows of one request differ, too
    return _is_same(first.value, first.alone) or all(_is_same(first.value, row.value) for row in others)


def count_of(value: Any) -> int:
    """How many rows an output has: an array, or a list of maps. -1 for a scalar."""
    return len(value) if isinstance(value, list) or value.ndim else -1


def shown(value: Any) -> str:
    """The form of an output, for errors."""
    return f"{len(value)} maps" if isinstance(value, list) else f"shape {list(value.shape)}"


def _problem(result: ResultOutput, probed: Probed) -> str:
    """Why an output has not the batch first; empty if it has, or nothing says that it has not."""
    for run in reversed(probed.runs):  # the batch says most
        value = run.outputs[result.name]
        if count_of(value) != len(run.rows):
            return (
                f"has {shown(value)} for a batch of {len(run.rows)}, so its first dimension is not the batch"
            )
    if result.problem and not probed.has_batch:
        return f"{result.problem}, and could not be tried out ({probed.error})"
    if _is_in_another_order(result, probed.runs):
        return "has rows that belong to other requests of the batch"
    return ""


def _doubt(result: ResultOutput, operator: str) -> str:
    """Why an output may have the batch first only by chance; empty if nothing says so."""
    if not (operator and result.rows):
        return ""
    return (
        f"has {result.rows} as its first dimension, which is no dimension of the inputs, and the graph has "
        f"{operator}, so the numbers may decide how many rows there are"
    )


def _rows(result: ResultOutput, runs: Sequence[ProbeRun]) -> list[_Row]:
    """The rows of an output of the batch; none if no batch was executed."""
    alone = {run.rows[0]: run.outputs[result.name][0] for run in runs if len(run.rows) == 1}
    return [
        _Row(request, value, alone[request], alone[1 - request])
        for run in runs
        if len(run.rows) > 1
        for request, value in zip(run.rows, run.outputs[result.name], strict=True)
    ]


def _is_in_another_order(result: ResultOutput, runs: Sequence[ProbeRun]) -> bool:
    """Whether the rows are those of the two requests alone, but not in their order.

    If the two have exchanged rows, that is certain. Else floats of one request must differ: in a graph that
    only scales by the batch they are equal. Integers and texts say nothing then, because a label at a tie may
    be another by rounding; two that change places by it are not to be expected.
    """
    rows = _rows(result, runs)
    if not rows or _is_same(rows[0].alone, rows[0].other):
        return False
    if not all(_is_same(row.value, row.alone) or _is_same(row.value, row.other) for row in rows):
        return False
    moved = [row.request for row in rows if not _is_same(row.value, row.alone)]
    if moved.count(0) == moved.count(1) > 0:
        return True
    return result.datatype in ("", *_FLOATS) and 0 < moved.count(0) < [row.request for row in rows].count(0)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of an output are equal but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool((one == other).all())
    one, other = one.astype(np.float64), other.astype(np.float64)
    largest = np.max(np.abs(other), initial=0.0, where=np.isfinite(other))
    return bool(np.allclose(one, other, rtol=0, atol=_TOLERANCE * largest, equal_nan=True))


def _spec(result: ResultOutput, runs: Sequence[ProbeRun]) -> TensorSpec:
    """An output with the sizes that are declared and were seen."""
    shapes = [run.outputs[result.name].shape[1:] for run in runs]
    declared, is_text = result.shape or (), result.datatype == "BYTES"
    if not shapes:
        return TensorSpec(result.name, result.datatype, (-1,) * len(declared), text=is_text)
    if len(declared) != len(shapes[0]):
        declared = (-1,) * len(shapes[0])
    sizes = zip(declared, *shapes, strict=True)
    shape = tuple(size if {size} == {*seen} else -1 for size, *seen in sizes)
    return TensorSpec(result.name, result.datatype, shape, text=is_text)
