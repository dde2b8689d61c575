"""How many model processes the entries of a repository declare, read again only where files have changed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from carpool_worker.model_file import DEFAULT_FILE
from carpool_worker.repository.layout import CONFIG_FILE
from carpool_worker.repository.repository import Repository


class DeclaredReplicas:
    """`by_entry`: the numbers of entries that do not declare 1, as of the last `read`. One that declares a
    process for each GPU has as many as this machine has. What cannot be read counts as 1: it cannot be
    loaded."""

    def __init__(self, repository: Repository) -> None:
        self.by_entry: dict[str, int] = {}
        self._repository = repository
        self._read: dict[str, tuple[tuple[int, ...], int]] = {}  # with the times of the files

    def read(self, entries: Iterable[str]) -> None:
        """Read the declarations of these entries that have changed."""
        before, self._read = self._read, {}
        for name in entries:
            changed_ns = self._changed_ns(name)
            found = before.get(name)
            if found is None or found[0] != changed_ns:
                found = changed_ns, self._replicas(name)
            self._read[name] = found
        self.by_entry = {name: number for name, (_, number) in self._read.items() if number != 1}

    def _changed_ns(self, name: str) -> tuple[int, ...]:
        found = []
        for file in (DEFAULT_FILE, CONFIG_FILE):
            with suppress(OSError):
                found.append((self._repository.folder / name / file).stat().st_mtime_ns)
        return tuple(found)

    def _replicas(self, name: str) -> int:
        with suppress(ValueError, OSError):
            return len(self._repository.served_model(name, None, {}).devices)
        return 1
