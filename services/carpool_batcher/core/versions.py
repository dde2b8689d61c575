"""The versions of a model: which have processes, and what becomes of requests for one that has none.

1. A request that asks for a version is executed by that version only. If no process of it is there, but
   others of the model are, it waits VERSION_AWAITED_US for one: a worker may be about to replace another. The
   time counts from when the version was missed first, so requests that come later are refused at once.
   A request is not refused before the processes were looked at after its arrival: one may have come since.
2. While the model has no process at all, requests wait, whatever they ask for.
3. Of a batch in flight that asks for a version the same holds, unless a process that drains has it in hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

NEVER_US: Final = 1 << 62
VERSION_AWAITED_US: Final = 5_000_000  # about as long as the lease of a worker
MISSED_MAX: Final = 1000  # versions that are awaited; requests that ask for others are refused at once


class Versions:
    """`processes`: how many take batches, by version, which is '' for those that name none; as of `known_us`.
    `awaited_us`: how long a version that is missing is awaited."""

    def __init__(self) -> None:
        self.processes: Mapping[str, int] = {}
        self.known_us = 0
        self.awaited_us = VERSION_AWAITED_US
        self._missing_since_us: dict[str, int] = {}  # of versions that requests ask for

    def set_processes(self, processes: Mapping[str, int], now_us: int) -> None:
        """These versions have this number of processes, at least one each."""
        had_any, self.processes, self.known_us = bool(self.processes), processes, now_us
        for version in self._missing_since_us.keys() & processes.keys():
            del self._missing_since_us[version]
        if not had_any:
            self._missing_since_us = dict.fromkeys(self._missing_since_us, now_us)

    def be_final(self) -> None:
        """No process comes or goes any more: what asks for another version need not wait."""
        self.awaited_us, self.known_us = 0, NEVER_US

    def miss(self, versions: Iterable[str], now_us: int) -> None:
        """Requests that wait, or are in flight, ask for these versions."""
        missing = self._missing_since_us
        if len(missing) >= MISSED_MAX:  # forget those whose requests have been refused for some time
            from_us = now_us - 2 * VERSION_AWAITED_US
            missing = {version: since_us for version, since_us in missing.items() if since_us > from_us}
            self._missing_since_us = missing
        for version in versions:
            if len(missing) < MISSED_MAX and version not in self.processes:
                missing.setdefault(version, now_us)

    def refused(self, versions: Iterable[str], now_us: int) -> list[str]:
        """Those of these versions whose requests are not to wait any more."""
        if not self.processes:
            return []
        until_us = now_us - self.awaited_us
        is_full = len(self._missing_since_us) >= MISSED_MAX
        unknown_us = until_us if is_full else now_us
        return [
            version
            for version in versions
            if version not in self.processes and self._missing_since_us.get(version, unknown_us) <= until_us
        ]

    def refused_from_us(self, versions: Collection[str], now_us: int) -> int | None:
        """When, after now, requests of one of these versions are next not to wait any more; None: never, as
        it is."""
        if not self.processes:
            return None
        missing_since_us = [self._missing_since_us.get(version, 0) for version in versions]
        from_us = [since_us + self.awaited_us for since_us in missing_since_us]
        return min((at_us for at_us in from_us if at_us > now_us), default=None)

    def describe_missing(self, version: str) -> str:
        """Why a request that asks for this version is refused, for its producer."""
        named = ", ".join(sorted(filter(None, self.processes))) or "none: its workers name no version"
        return f"version: no worker has version {version!r} of this model; those that have workers: {named}"
