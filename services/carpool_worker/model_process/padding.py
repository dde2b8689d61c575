"""Padded batches in a model process: what a model gets beside the tensors, and results cut back. Pure.

The worker pads inputs, and the process what `decode` returns. Both keep the true sizes of each request.

Why: docs/decisions/0105.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from carpool.plugins import UnusableError
from carpool.wire.padding import Sizes, lengths_array, padded_sizes
from carpool.wire.tensors import Array, TensorSpec
from carpool_worker.model_process.failures import WrongOutputError

TrueSizes = Mapping[str, Sequence[Sizes]]  # by input, of each request


class Cut(NamedTuple):
    """An output whose dimensions `axes` are cut back to the true sizes of an input, in order."""

    output: str
    axes: tuple[int, ...]
    padded: TensorSpec


def cuts_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[Cut, ...]:
    """The outputs that are to be cut back. Raises UnusableError for one that cannot be."""
    by_name = {spec.name: spec for spec in inputs if spec.buckets}
    return tuple(_cut(spec, by_name) for spec in outputs if spec.cut)


def _cut(output: TensorSpec, padded: Mapping[str, TensorSpec]) -> Cut:
    found = padded.get(output.cut)
    if found is None:
        raise UnusableError(
            f"output {output.name!r}: cut names {output.cut!r}, which is no tensor with buckets; "
            f"such are: {', '.join(padded) or 'none'}"
        )
    axes = tuple(axis for axis, size in enumerate(output.shape) if size == -1)
    if len(axes) != len(found.buckets):
        raise UnusableError(
            f"output {output.name!r}: {len(axes)} of its dimensions vary, but {len(found.buckets)} of "
            f"{output.cut!r} are padded; to be cut back, as many must vary"
        )
    return Cut(output.name, axes, found)


def check_padding(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise UnusableError for what tensors of models that are not padded may not declare."""
    for spec in outputs:
        if spec.buckets:
            raise UnusableError(f"output {spec.name!r} has buckets, which are for inputs; see cut")
    names = {spec.name for spec in inputs}
    for spec in inputs:
        if spec.cut:
            raise UnusableError(f"input {spec.name!r} has cut, which is for outputs")
        if spec.lengths in names:
            raise UnusableError(f"input {spec.name!r}: lengths names {spec.lengths!r}, which is an input")


def with_lengths(arrays: dict[str, Array], specs: Sequence[TensorSpec], sizes: TrueSizes) -> dict[str, Array]:
    """A padded batch, with the true sizes that the model asks for."""
    return arrays | {spec.lengths: lengths_array(sizes[spec.name]) for spec in specs if spec.lengths}


def cut_row(row: Array, spec: TensorSpec, sizes: Sizes) -> Array:
    """A padded tensor of one request as it was before."""
    cuts = [slice(None)] * row.ndim
    for (axis, _), size in zip(spec.buckets, sizes, strict=True):
        cuts[axis] = slice(size)
    return row[tuple(cuts)]


def cut_rows(cuts: Sequence[Cut], rows: list[Any], sizes: TrueSizes, indexes: Sequence[int]) -> None:
    """Cut back the results of these requests, arrays or dicts of them by output. Raises WrongOutputError."""
    for cut in cuts:
        of_input = sizes[cut.padded.name]
        for at, index in enumerate(indexes):
            row = rows[at]
            if isinstance(row, dict):
                row[cut.output] = _cut_back(row[cut.output], cut, of_input[index])
            else:
                rows[at] = _cut_back(row, cut, of_input[index])


def _cut_back(value: Any, cut: Cut, sizes: Sizes) -> Any:
    cuts = [slice(None)] * value.ndim
    for axis, size, padded in zip(cut.axes, sizes, padded_sizes(cut.padded, sizes), strict=True):
        if value.shape[axis] != padded:
            raise WrongOutputError(
                f"the model returned the size {value.shape[axis]} in dimension {axis} of output "
                f"{cut.output!r}, but {cut.padded.name!r} was padded to {padded}: it cannot be cut back"
            )
        cuts[axis] = slice(size)
    return value[tuple(cuts)]
