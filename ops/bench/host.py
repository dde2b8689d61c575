"""How much CPU time of the machine was used, and how much its host withheld (stole)."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

# Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
_COLUMNS = 8
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7

STOLEN_MAX: Final = 0.05  # the largest share at which a measurement says something


class CpuShares(NamedTuple):
    """Shares of the CPU time of all cores: `stolen` by the host, `busy` with the work of this machine."""

    stolen: float
    busy: float


class CpuTime:
    """The CPU time of all cores since this was made."""

    def __init__(self) -> None:
        self._start = _ticks()

    def shares(self) -> CpuShares:
        """Shares of the time since."""
        passed = [after - before for before, after in zip(self._start, _ticks(), strict=True)]
        total = max(1, sum(passed))
        unused = passed[_IDLE] + passed[_IO_WAIT] + passed[_STEAL]
        return CpuShares(passed[_STEAL] / total, 1 - unused / total)


def _ticks() -> list[int]:
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return [int(number) for number in first_line.split()[1 : 1 + _COLUMNS]]
