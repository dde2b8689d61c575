"""How much CPU time of the machine was used, and how much its host withheld (stole)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

# Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
_COLUMNS = 8
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7

STOLEN_MAX: Final = 0.05  # the largest share at which a measurement says something

Figures = dict[str, Any]  # what a measurement showed; `stolen` is the share that was withheld meanwhile
_Item = TypeVar("_Item")


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


def is_disturbed(figures: Figures) -> bool:
    """Whether the host withheld too much CPU time while these were measured."""
    return bool(figures["stolen"] > STOLEN_MAX)


def usable(rounds: Sequence[Figures]) -> Sequence[Figures]:
    """The figures of the rounds that were not disturbed; of all, if all were."""
    return [figures for figures in rounds if not is_disturbed(figures)] or rounds


def turns(
    items: Sequence[_Item], rounds: int, is_done: Callable[[_Item], bool]
) -> Iterator[tuple[int, _Item]]:
    """What to measure next, with the number of the round: everything in each round, in an order that is
    reversed from round to round. Further rounds, up to as many again, repeat what is not done, because the
    host disturbed it.
    """
    for number in range(2 * rounds):
        for item in items if number % 2 == 0 else reversed(items):
            if not is_done(item):
                yield number, item


def _ticks() -> list[int]:
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return [int(number) for number in first_line.split()[1 : 1 + _COLUMNS]]
