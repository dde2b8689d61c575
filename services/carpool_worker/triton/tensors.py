"""Inputs and outputs of a configuration, as tensors of one request: as clients send them, and as the model
has them. Pure.

In Triton a request has several rows where `max_batch_size` is not 0. Here each row is a request, and a shape
is that of one row. A model without batches (0) whose shapes all begin with 1 has a batch of one row; other
shapes are those of a request as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from carpool_worker.triton.config import Config

if TYPE_CHECKING:
    from carpool.wire.tensors import Array, TensorSpec

_PREFIX: Final = "TYPE_"
_STRING: Final = "STRING"
_SIZE_MIN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An input or output. `shape`: of one request. `model_shape`: as the model has it, where the batch is not
    counted. `label_file`: of an output, a file in the entry's folder with a label in each line."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    model_shape: tuple[int, ...]
    optional: bool = False
    label_file: str = ""

    def to_model(self, array: Array) -> Array:
        """Rows as clients send them, (n, *shape), as the model has them, (n, *model_shape)."""
        return _reshaped(array, self.shape, self.model_shape)

    def from_model(self, array: Array) -> Array:
        """The inverse of `to_model`."""
        return _reshaped(array, self.model_shape, self.shape)

    def spec(self, labels: Sequence[str] = ()) -> TensorSpec:
        """As a model declares it."""
        from carpool.wire.tensors import TensorSpec  # noqa: PLC0415 (only a model process needs numpy for it)

        return TensorSpec(self.name, self.datatype, self.shape, labels=tuple(labels), optional=self.optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """All of a model. `has_batch`: its arrays have the batch as their first dimension."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    has_batch: bool


def datatype_of(name: str) -> str:
    """A datatype of Triton's in Carpool's words; empty for TYPE_INVALID."""
    short = name.removeprefix(_PREFIX)
    return {"INVALID": "", _STRING: "BYTES"}.get(short, short)


def tensors_of(config: Config, problems: list[str]) -> Tensors:
    """The inputs and outputs. What is wrong with one is appended to `problems`, and it is left out."""
    given = [(kind, index, one) for kind in ("input", "output") for index, one in enumerate(config[kind])]
    shapes = [one["reshape"]["shape"] if "reshape" in one else one["dims"] for _, _, one in given]
    is_single = config["max_batch_size"] == 0 and bool(shapes) and all(shape[:1] == [1] for shape in shapes)
    found: dict[str, dict[str, Tensor]] = {"input": {}, "output": {}}
    for kind, index, one in given:
        try:
            tensor = _tensor(one, is_single=is_single)
            if tensor.name in found[kind]:
                raise ValueError("is there twice; remove one")
            found[kind][tensor.name] = tensor
        except ValueError as error:
            problems.append(f"{kind} {one['name'] or index}: {error}")
    return Tensors(
        inputs=tuple(found["input"].values()),
        outputs=tuple(found["output"].values()),
        has_batch=is_single or config["max_batch_size"] > 0,
    )


def _tensor(given: Mapping[str, Any], *, is_single: bool) -> Tensor:
    name, dims = given["name"], given["dims"]
    if not name:
        raise ValueError("name: is missing; write the name of the tensor")
    datatype = datatype_of(given["data_type"])
    if not datatype:
        raise ValueError("data_type: is missing; write one such as TYPE_FP32")
    model_shape = given["reshape"]["shape"] if "reshape" in given else dims
    for key, sizes in (("dims", dims), ("reshape", model_shape)):
        if any(size < _SIZE_MIN or size == 0 for size in sizes):
            raise ValueError(f"{key}: {sizes} must have sizes of at least 1, or -1 for one that varies")
    if not dims:
        raise ValueError("dims: are missing; write those of one request, such as [ 4 ]")
    if "reshape" in given and not _is_reshaped(dims, model_shape):
        raise ValueError(
            f"reshape: {model_shape} must have as many elements as dims, {dims}, and as many sizes that vary"
        )
    is_led = is_single and "reshape" not in given
    return Tensor(
        name=name,
        datatype=datatype,
        shape=tuple(dims[1:] if is_led else dims),
        model_shape=tuple(model_shape[1:] if is_single else model_shape),
        optional=given.get("optional", False),
        label_file=given.get("label_filename", ""),
    )


def _reshaped(array: Array, declared: Sequence[int], target: Sequence[int]) -> Array:
    """Rows in another shape. The sizes that vary keep their order."""
    if tuple(declared) == tuple(target):
        return array
    varying = iter([size for size, one in zip(array.shape[1:], declared, strict=True) if one == -1])
    return array.reshape(len(array), *[next(varying) if one == -1 else one for one in target])


def _is_reshaped(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return list(dims).count(-1) == list(shape).count(-1) and abs(prod(dims)) == abs(prod(shape))
