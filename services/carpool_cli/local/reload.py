"""`carpool up --reload`: a worker whose file has changed is replaced by a new one, once that serves.

The files of a model are its own, the modules beside it, and the TOML file that declares it. One with an
error, and a new worker that cannot load the model, change nothing: the error is printed, and the old worker
goes on serving. While the new one loads, and the old one finishes what it has, both serve, as in a rolling
update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from carpool.keys import MODEL_NAME
from carpool_cli.local.supervisor import Supervisor, WorkerService
from carpool_worker.model_file import SUFFIX, read_model_file
from carpool_worker.model_process.configuration import TRITON
from carpool_worker.model_process.loader import format_of
from carpool_worker.served_models import ServedModel

LOOK_INTERVAL_S: Final = 0.3
Stamp = tuple[int, int]  # when a file was changed (ns), and its size


def model_file(location: str, folder: Path | None = None) -> Path | None:
    """The file of a model; None if it has none that its user writes, as a ready-made one. `folder`: where its
    module is found; None for the working directory."""
    if location.startswith(TRITON):
        return Path(location.removeprefix(TRITON)).resolve()
    source, colon, name = location.rpartition(":")
    if not (colon and source and name) or format_of(location):
        return None
    if source.endswith(".py"):
        return Path(source).resolve()
    beside = (folder or Path()).joinpath(*source.split(".")).with_suffix(".py")  # there a worker looks first
    if beside.is_file():
        return beside.resolve()
    try:
        spec = find_spec(source)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def declaring_file(spec: str) -> Path | None:
    """The TOML file that declares a model; None if it was named by itself."""
    name, equals, location = spec.partition("=")
    file, _, _ = (location if equals and MODEL_NAME.fullmatch(name) else spec).rpartition(":")
    return Path(file).resolve() if file.endswith(SUFFIX) else None


def watched_files(served: ServedModel) -> WatchedFiles | None:
    """Those of a model; None if it has none."""
    file = model_file(served.location, served.configuration.folder)
    declared_in = declaring_file(served.spec)
    return WatchedFiles(file, declared_in) if file is not None or declared_in is not None else None


class WatchedFiles:
    """The files of one model: which of them have changed. `declared_in`: the TOML file that declares it."""

    def __init__(self, file: Path | None, declared_in: Path | None = None) -> None:
        self._file = file
        self._declared_in = declared_in
        self._stamps = self._look()

    def changed(self) -> list[Path]:
        """Those that have changed, appeared or vanished since the last call."""
        before, self._stamps = self._stamps, self._look()
        return sorted(path for path in {*before, *self._stamps} if before.get(path) != self._stamps.get(path))

    def _look(self) -> dict[Path, Stamp]:
        stamps: dict[Path, Stamp] = {}
        modules = [] if self._file is None else self._file.parent.glob("*.py")
        for path in [*modules, *([self._declared_in] if self._declared_in else [])]:
            try:
                found = path.stat()
            except OSError:  # it has just vanished
                continue
            stamps[path] = (found.st_mtime_ns, found.st_size)
        return stamps


def syntax_error(files: Iterable[Path]) -> str:
    """What is wrong with the first of these files that cannot be read; empty if all can be."""
    for path in files:
        if path.suffix == SUFFIX:
            try:
                read_model_file(path)
            except ValueError as error:
                return str(error)
            continue
        try:
            compile(path.read_bytes(), str(path), "exec")
        except FileNotFoundError:
            continue
        except (SyntaxError, ValueError, OSError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            return f"{path}{line}: {getattr(error, 'msg', None) or error}"
    return ""


class Reloader:
    """Call `run_once` as often as the supervisor's, from the same thread. `show` prints a line."""

    def __init__(self, supervisor: Supervisor, show: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._show = show
        self._watched = {
            worker.model: watched
            for worker in supervisor.workers
            if (watched := watched_files(worker.served)) is not None
        }
        self._new: dict[str, WorkerService] = {}  # those that load the model, by their models
        self._look_at_s = 0.0

    def run_once(self) -> None:
        """Start workers of changed files, and let those that serve take over."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_INTERVAL_S
            for worker in list(self._supervisor.workers):
                watched = self._watched.get(worker.model)
                changed = watched.changed() if watched is not None else []
                if changed:
                    self._begin(worker, changed)
        for worker in list(self._supervisor.workers):
            if worker.model in self._new:
                self._take_over(worker, self._new[worker.model])

    def stop(self) -> None:
        """End the workers that do not serve yet."""
        for new in self._new.values():
            new.terminate()
            new.wait_or_kill(1.0)

    def _begin(self, worker: WorkerService, changed: list[Path]) -> None:
        error = syntax_error(changed)
        if error:
            self._show(f"  {worker.model} is not loaded again: {error}")
            return
        unfinished = self._new.pop(worker.model, None)
        if unfinished is not None:  # of a file that has changed again
            unfinished.terminate()
            unfinished.wait_or_kill(1.0)
        self._show(f"  {', '.join(path.name for path in changed)} changed: {worker.model} is loaded again")
        self._new[worker.model] = self._supervisor.start_beside(worker)

    def _take_over(self, worker: WorkerService, new: WorkerService) -> None:
        reason = new.exit_reason()
        if reason is not None:
            del self._new[worker.model]
            self._show(
                f"  {worker.model} cannot be loaded again ({reason}; the log above says why): the worker of "
                "the file as it was goes on serving"
            )
        elif self._supervisor.take_over_if_serving(worker, new):
            del self._new[worker.model]
            self._show(f"  {worker.model} is served from the changed file")
