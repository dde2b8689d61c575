"""What a model declares of the methods that it has for single requests, beside its batches."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, Final

from carpool.plugins import UnusableError
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.loaded import Beside
from carpool_worker.model_process.parameters import arguments_of

HOOKS: Final = ("decode", "encode")
DECODE_IN: Final = ("threads", "processes")
WORKERS_MAX: Final = 256


def declared_beside(model: Any, decoded: Sequence[TensorSpec] = ()) -> Beside | None:
    """The hooks of a model that declares where, or in how many at a time, they are called; else None: then
    methods of these names are its own. `decoded`: the tensors that it declares. Raises UnusableError."""
    where, workers = getattr(model, "decode_in", None), getattr(model, "decode_workers", None)
    if where is None and workers is None:
        if decoded:
            raise UnusableError("the model has 'decoded', but neither 'decode_in' nor 'decode_workers'")
        return None
    hooks = {name: getattr(model, name, None) for name in HOOKS}
    if not any(hooks.values()):
        raise UnusableError(
            "the model has 'decode_in' or 'decode_workers', but no method 'decode' or 'encode'"
        )
    for name, hook in hooks.items():
        if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
            raise UnusableError(f"the model's {name!r} must be a plain function that returns a value")
    _check_decoded(decoded, has_decode=hooks["decode"] is not None)
    take_request = tuple(
        name for name, hook in hooks.items() if hook is not None and "request" in arguments_of(hook)
    )
    return Beside(
        hooks["decode"],
        hooks["encode"],
        take_request,
        _workers(workers),
        _where(where) == "processes",
        tuple(decoded),
    )


def _where(where: Any) -> str:
    if where is None:
        return "threads"
    if where not in DECODE_IN:
        raise UnusableError(
            f"the model's 'decode_in' must be {' or '.join(map(repr, DECODE_IN))}, not {where!r:.80}"
        )
    return str(where)


def _workers(workers: Any) -> int:
    if workers is None:
        return _cpus()
    if type(workers) is not int or not 1 <= workers <= WORKERS_MAX:
        raise UnusableError(
            f"the model's 'decode_workers' must be a number from 1 to {WORKERS_MAX}, not {workers!r:.80}"
        )
    return int(workers)


def _cpus() -> int:
    """The CPUs of this process: its worker gave it a share (`carpool_worker.devices`)."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(WORKERS_MAX, max(1, int(first))) if first.isdecimal() else os.cpu_count() or 1


def _check_decoded(decoded: Sequence[TensorSpec], *, has_decode: bool) -> None:
    if decoded and not has_decode:
        raise UnusableError("the model has 'decoded', the tensors that 'decode' returns, but no 'decode'")
    for spec in decoded:
        if spec.datatype == "BYTES":
            raise UnusableError(f"tensor {spec.name!r} of 'decoded' is of BYTES: it must be numeric")
        if spec.cut:
            raise UnusableError(f"tensor {spec.name!r} of 'decoded' has cut, which is for outputs")


def load_decoder(model: Any) -> None:
    """Once in each process in which its hooks are called."""
    hook = getattr(model, "load_decoder", None)
    if hook is not None:
        hook()
