"""Loads objects from a user's code by name: `module:Name` or `path/file.py:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


class UnusableError(ValueError):
    """What a user named or declared cannot be used. The message is for the user, without a traceback."""


def find_object(where: str) -> Any:
    """The object with this name. Raises UnusableError, or whatever importing the module raises."""
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise UnusableError(f"{where!r}: must be module:Name or path/file.py:Name")
    module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    try:
        return getattr(module, name)
    except AttributeError:
        raise UnusableError(f"{where!r}: {source} has no {name!r}") from None


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UnusableError(f"file {str(path)!r} does not exist (working directory: {str(Path.cwd())!r})")
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import modules beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
