"""Which batch sizes were observed. Pure. At all others l(n) is a guess, and output for people says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool_cli.screen import count

GUESSED_SHARE_MIN: Final = 0.01  # of the simulated batches: fewer hardly change the 99th percentile


class ObservedSizes(NamedTuple):
    """The smallest and the largest size of some batches, and how many batches they were."""

    smallest: int
    largest: int
    batches: int

    def covers(self, size: int) -> bool:
        """Whether l(size) is measured, or lies between measured times. Otherwise it is a guess."""
        return self.smallest <= size <= self.largest

    def guessed_share(self, sizes: Sequence[int]) -> float:
        """The share of batches of these sizes whose l(n) is a guess."""
        return sum(not self.covers(size) for size in sizes) / max(1, len(sizes))

    def __str__(self) -> str:
        sizes = " to ".join(map(str, sorted({self.smallest, self.largest})))
        return f"{count(self.batches, 'batch', 'batches')} of {sizes}"


def observed_sizes(observed: Sequence[tuple[int, int]]) -> ObservedSizes:
    """What sizes these batches had; each is a size and a time. There must be at least one."""
    sizes = [size for size, _ in observed]
    return ObservedSizes(min(sizes), max(sizes), len(sizes))
