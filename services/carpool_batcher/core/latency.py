"""How long the model takes for a batch of n, learned from the batches that were settled.

    l(n) = intercept + slope n,    both at least 0;    and l(n) + margin, which one batch in ten exceeds

A line through the last observations by least squares, twice: the second time without those that lie far from
the first (a pause of the machine, a cache that was cold). Batches of one size alone say nothing of others: a
smaller one is taken to last as long, a larger one somewhat longer, so that it is tried and found out. When
several in a row lie off on one side, the model has changed its speed, and what was before is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

REMEMBERED: Final = 64
REFIT_EVERY: Final = 8
CHANGED_AFTER: Final = 6  # so many in a row off on one side are not chance
FAR: Final = 4.0  # times the median distance from the line
UPPER: Final = 0.9
UNKNOWN: Final = 0.25  # of the time in proportion, for sizes beyond the only one that was seen


class Line(NamedTuple):
    """l(n), in microseconds. Beyond `known_to` it is guessed; 0: a line everywhere."""

    intercept_us: float
    slope_us: float
    known_to: int = 0
    margin_us: float = 0.0

    def at(self, size: int) -> int:
        """How long a batch of `size` takes."""
        if self.known_to:
            beyond = max(0.0, size / self.known_to - 1)
            return int(self.intercept_us * (1 + UNKNOWN * beyond))
        return int(self.intercept_us + self.slope_us * size)


class Latency:
    """l(n) of one lane, or of all. `observe` costs about 10 µs, the others less than one."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self._line: Line | None = None
        self._fresh = 0  # observed since the last fit
        self._off = 0  # in a row above (or below, negative) what was expected

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._line is not None

    @property
    def line(self) -> Line | None:
        """What is believed; None before anything was observed."""
        return self._line

    def of(self, size: int) -> int:
        """How long a batch of `size` should take, in microseconds; 0 before anything was observed."""
        return 0 if self._line is None else self._line.at(size)

    def at_most(self, size: int) -> int:
        """How long it may well take: nine of ten do not take longer."""
        return 0 if self._line is None else self._line.at(size) + int(self._line.margin_us)

    def observe(self, size: int, took_us: int) -> None:
        """A batch of `size` took so long."""
        self._seen.append((size, took_us))
        self._fresh += 1
        if self._line is not None:
            self._notice_change(took_us, self._line.at(size))
        if self._fresh >= min(REFIT_EVERY, len(self._seen) // 4) or self._line is None:
            self._line = fit(self._seen)
            self._fresh = 0

    def _notice_change(self, took_us: int, expected_us: int) -> None:
        side = 1 if took_us > 1.3 * expected_us else -1 if took_us < 0.6 * expected_us else 0
        self._off = self._off + side if side and side * self._off >= 0 else side
        if abs(self._off) >= CHANGED_AFTER:
            latest = list(self._seen)[-CHANGED_AFTER:]
            self._seen.clear()
            self._seen.extend(latest)
            self._line, self._off = None, 0


def fit(seen: Sequence[tuple[int, int]]) -> Line:
    """The line through these (size, microseconds). There must be one at least."""
    first = _least_squares(seen)
    off = sorted(abs(took_us - first.at(size)) for size, took_us in seen)
    limit_us = FAR * off[len(off) // 2] + 0.02 * first.at(seen[-1][0])
    near = [one for one in seen if abs(one[1] - first.at(one[0])) <= limit_us]
    line = _least_squares(near or seen)
    above = sorted(took_us - line.at(size) for size, took_us in near or seen)
    margin_us = max(0, above[min(len(above) - 1, int(UPPER * len(above)))])
    return line._replace(margin_us=float(margin_us))


def _least_squares(seen: Sequence[tuple[int, int]]) -> Line:
    count = len(seen)
    mean_size = sum(size for size, _ in seen) / count
    mean_us = sum(took_us for _, took_us in seen) / count
    spread = sum((size - mean_size) ** 2 for size, _ in seen)
    if not spread:
        return Line(mean_us, 0.0, known_to=max(1, round(mean_size)))
    slope = sum((size - mean_size) * (took_us - mean_us) for size, took_us in seen) / spread
    slope = min(
        max(0.0, slope), mean_us / mean_size
    )  # neither faster when fuller, nor less than nothing for none
    return Line(mean_us - slope * mean_size, slope)
