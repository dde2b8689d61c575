"""Loads objects from a user's code by name: `module:Name` or `path/file.py:Name`.

The code is imported as into a program of its own. It sees no arguments of Carpool's, and finds the modules
beside it: those in the folder of the file, or for `module:Name` in the working directory. On `sys.path` that
folder is behind the standard library and before installed packages. So `import utils` finds the user's, also
where a package has installed another one, and a `queue.py` or `secrets.py` of the user's breaks no library.

Why: docs/decisions/0086.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

# What Carpool depends on and imports only when it is needed. A user's file of such a name does not hide it.
_NEEDED_LATER: Final = ("hiredis", "pydantic", "pydantic_settings", "redis", "rich", "uvloop")
_STANDARD_LIBRARY: Final = frozenset(
    (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(os.__file__).parent))
)
_RELATIVE: Final = "attempted relative import with no known parent package"


class UnusableError(ValueError):
    """What a user named or declared cannot be used. The message is for the user, without a traceback."""


def find_object(where: str, folder: Path | None = None) -> Any:
    """The object with this name. `folder`: where modules are found in place of the working directory.

    Raises UnusableError, or whatever importing the module raises.
    """
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise UnusableError(f"{where!r}: must be module:Name or path/file.py:Name")
    hide_arguments(source)
    is_file = source.endswith(".py")
    module = _from_file(Path(source), name) if is_file else _from_module(source, where, folder)
    try:
        return getattr(module, name)
    except AttributeError:
        raise UnusableError(f"{where!r}: {source} has no {name!r}") from None


def hide_arguments(program: str) -> None:
    """From now on a user's code sees the command line of `program` without arguments, not this process's."""
    sys.argv = [program]


def reason_of(error: BaseException) -> str:
    """What to tell of an exception that a user's code raised while it was loaded."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        reason += (
            ". It ended its process while it was loaded. It gets no arguments: give each option a default, "
            "or read it from the environment"
        )
    return reason


# --- modules and files --------------------------------------------------------------------------------------


def _from_module(source: str, where: str, folder: Path | None) -> ModuleType:
    _add_to_path(folder or Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # it was found, and a module that it imports was not
        file = f"{source}.py"
        is_file = (folder or Path.cwd()).joinpath(file).is_file()
        hint = f"; did you mean {file}{where.removeprefix(source)}?" if is_file else ""
        searched = f"in the working directory, {Path.cwd()}," if folder is None else f"in {folder}"
        raise UnusableError(
            f"{where!r}: there is no module {error.name!r} {searched} and none is installed{hint}"
        ) from None


def _from_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UnusableError(f"file {str(path)!r} does not exist (working directory: {str(Path.cwd())!r})")
    file = path.resolve()
    module_name = _name_of(file)
    _add_to_path(file.parent, of=path.stem)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if _RELATIVE not in str(error):
            raise
        raise UnusableError(f"{path} imports relatively, so {_advice(file, name)}") from None
    return module


def _name_of(file: Path) -> str:
    """What the module made of a file is called: as the file, unless another module has that name.

    A model in `queue.py` would otherwise be what libraries get that import `queue`.
    """
    name = file.stem
    while name in sys.stdlib_module_names or _is_taken(name, file):
        name += "_"
    return name


def _is_taken(name: str, file: Path) -> bool:
    module = sys.modules.get(name)
    if module is not None:
        origin = getattr(module, "__file__", None)
        return origin is None or Path(origin).resolve() != file
    spec = _INSTALLED.find(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() != file


def _advice(file: Path, name: str) -> str:
    """How to name an object of a file that is a module of a package."""
    folder, parts = file.parent, [file.stem]
    while len(parts) == 1 or (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    dotted = ".".join(parts)
    return f"it is a module of a package: name it {dotted}:{name}, with {folder} as the working directory"


# --- sys.path -----------------------------------------------------------------------------------------------


class _Installed:
    """Finds some modules as if the folders of a user's code were not on `sys.path`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)
        self.folders: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system, as of the first in `sys.meta_path`."""
        return self.find(name) if path is None and name in self.names else None

    def find(self, name: str) -> ModuleSpec | None:
        """Where the module of this name is, if there is one outside of these folders."""
        return PathFinder.find_spec(name, [at for at in sys.path if at and at not in self.folders])


_INSTALLED: Final = _Installed(_NEEDED_LATER)


def _add_to_path(folder: Path, of: str = "") -> None:
    """Let modules in this folder be imported. `of`: the name of the user's own file, which hides no package:
    `import whisper` in `whisper.py` is the installed one."""
    _INSTALLED.folders.add(str(folder))
    _INSTALLED.names.add(of)
    if _INSTALLED not in sys.meta_path:
        sys.meta_path.insert(0, _INSTALLED)
    behind = max((number for number, at in enumerate(sys.path, 1) if _is_standard(at)), default=0)
    if str(folder) not in sys.path[: behind + 1]:
        sys.path.insert(behind, str(folder))


def _is_standard(at: str) -> bool:
    folder, name = os.path.split(at)
    return at in _STANDARD_LIBRARY or (name == "lib-dynload" and folder in _STANDARD_LIBRARY)
