"""From what a user names to a model: `module:Name`, `path/file.py:Name`, `onnx:FILE`, or a ready-made one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from carpool.keys import MODEL_NAME
from carpool.plugins import UnusableError, find_object

READY_MADE: Final = {
    "square": "carpool_worker.models.square:Square",
    "docsearch": "carpool_cli.demo.docsearch:DocSearch",
}
_ONNX: Final = "onnx:"


def model_name(spec: str) -> tuple[str, str]:
    """The name under which a model is registered, and where to find it. `NAME=WHERE` says both."""
    name, equals, where = spec.partition("=")
    if equals and MODEL_NAME.fullmatch(name):
        return name, where
    where = spec
    if where in READY_MADE:
        name = where
    elif where.startswith(_ONNX):
        from carpool_worker.models import onnx  # noqa: PLC0415 (an optional extra)

        name = onnx.model_name(Path(where.removeprefix(_ONNX)))
    else:
        name = where.rpartition(":")[2]
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"model {spec!r}: no name to register it under; write NAME={spec}")
    return name, where


def find_model(where: str) -> Any:
    """The model object: a class, an instance or a function. Raises UnusableError: what was expected."""
    if where in READY_MADE:
        where = READY_MADE[where]
    if where.startswith(_ONNX):
        from carpool_worker.models.onnx import OnnxModel  # noqa: PLC0415 (an optional extra)

        return OnnxModel(where.removeprefix(_ONNX))
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise UnusableError(
            f"model {where!r}: write module:Name, path/file.py:Name, onnx:FILE, {' or '.join(READY_MADE)}"
        )
    return find_object(where)
