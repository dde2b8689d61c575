"""From a name to what a user wrote: `module:Name` or `path/file.py:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


class UnusableError(ValueError):
    """What a user named or declared cannot be used. The sentence says all: a traceback would not help."""


def find_object(where: str) -> Any:
    """What is called so. Raises UnusableError that says what was expected, and whatever the module raises."""
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise UnusableError(f"{where!r}: write module:Name or path/file.py:Name")
    module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    try:
        return getattr(module, name)
    except AttributeError:
        raise UnusableError(f"{where!r}: {source} has no {name!r}") from None


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UnusableError(f"file {str(path)!r} does not exist (from {str(Path.cwd())!r})")
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
