"""How many requests of a batch the model executes: all of them, unless `validate` refuses some.

What is refused takes hardly any time. If a flood of such requests were counted like others, batches would be
expected to take far longer than they do: the next one would be dispatched too late, and others' requests be
refused because they seemed to be late.

The shares of the latest batches are kept, from the first of which something was refused until all of them
were executed whole again. Before that one, all were whole. So a flood must last for a while until it counts,
and a few batches without it are enough for `ExpectedTimes.at_most` to count all requests again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final, Protocol

BATCHES_MAX: Final = 32  # of which the shares are kept


class ExecutionTimes(Protocol):
    """How long batches take, in microseconds, by the number of requests in them."""

    def of(self, size: int) -> int:
        """How long a batch of `size` is expected to take."""

    def at_most(self, size: int) -> int:
        """A time that nine of ten batches of `size` do not exceed."""


class ExecutedShares:
    """The shares of the latest batches that were executed."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque()
        self._ordered: list[float] = []

    def __bool__(self) -> bool:
        """Whether something was refused of a recent batch."""
        return bool(self._shares)

    def observe(self, size: int, executed: int) -> None:
        """Of a batch of `size`, the model executed so many requests, at least one. O(BATCHES_MAX), or O(1)
        while all batches are executed whole."""
        if executed == size and not self._shares:
            return
        if not self._shares:
            self._shares.extend([1.0] * BATCHES_MAX)
            self._ordered = list(self._shares)
        del self._ordered[bisect_left(self._ordered, self._shares.popleft())]
        self._shares.append(executed / size)
        insort(self._ordered, executed / size)
        if self._ordered[0] == 1.0:
            self._shares.clear()

    def half(self, size: int) -> int:
        """How many of `size` are executed at most in half of the batches."""
        return self._quantile(size, 0.5)

    def nine_of_ten(self, size: int) -> int:
        """How many of `size` are executed at most in nine of ten batches."""
        return self._quantile(size, 0.9)

    def _quantile(self, size: int, quantile: float) -> int:
        return max(1, math.ceil(size * self._ordered[math.ceil(quantile * BATCHES_MAX) - 1]))


class ExpectedTimes:
    """The execution times of batches of which only a share is executed."""

    def __init__(self, times: ExecutionTimes, shares: ExecutedShares) -> None:
        self._times = times
        self._shares = shares

    def of(self, size: int) -> int:
        """As of the requests that are executed in half of the batches."""
        return self._times.of(self._shares.half(size))

    def at_most(self, size: int) -> int:
        """As of the requests that are executed at most in nine of ten batches."""
        return self._times.at_most(self._shares.nine_of_ten(size))
