"""How long the model takes for a batch of n, learned from the batches that were settled.

    l(n) = intercept + slope n,    both at least 0;    and l(n) + margin, which one batch in ten exceeds

A line through the last observations of every size by least squares, twice: the second time without those
that lie far from the first (a pause of the machine, a cache that was cold). Sizes that come often do not push
out what is known of others, or a model that is asked for one size all day would be a riddle in the evening.
Of one size alone nothing follows for others: a smaller one is taken to last as long, a larger one somewhat
longer, so that it is tried and found out. When several in a row lie off on one side, the model has changed
its speed, and all that was observed before is taken to have changed with it. So it is when it drifts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

OF_EACH: Final = 8  # observations that are remembered of sizes 1, 2 and 3, 4 to 7, and so on
REFIT_EVERY: Final = 8
CHANGED: Final = 1.3  # times what was expected, or less by as much
CHANGED_AFTER: Final = 6  # so many in a row off on one side are not chance
FAR: Final = 4.0  # times the median distance from the line
UPPER: Final = 0.9
UNKNOWN: Final = 0.25  # of the time in proportion, for sizes beyond the only one that was seen


Observed = tuple[int, float]  # a batch's size, and how long it took (us)


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


class LatencyModel:
    """l(n) of one lane, or of all. `observe` costs about 20 µs, the others less than one."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[Observed]] = {}  # by the number of bits of the size
        self._before: dict[int, list[Observed]] = {}  # the same, when they were last fitted
        self._fresh: dict[int, int] = {}  # how many were observed since
        self._latest: deque[Observed] = deque(maxlen=CHANGED_AFTER)
        self._line: Line | None = None
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
        one, number = (size, float(took_us)), size.bit_length()
        self._latest.append(one)
        changed = self._line is not None and self._is_change(took_us, self._line.at(size))
        if changed:
            self._follow_change()
        self._seen.setdefault(number, deque(maxlen=OF_EACH)).append(one)
        self._fresh[number] = self._fresh.get(number, 0) + 1
        enough = min(REFIT_EVERY, sum(map(len, self._seen.values())) // 4)
        if self._line is None or changed or sum(self._fresh.values()) >= enough:
            self._refit()

    def _refit(self) -> None:
        if self._line is not None and len(self._fresh) < len(self._seen):
            self._follow_drift(self._line)
        self._line = fit([one for of_size in self._seen.values() for one in of_size])
        self._before |= {number: list(self._seen[number]) for number in self._fresh}
        self._fresh.clear()

    def _is_change(self, took_us: int, expected_us: int) -> bool:
        side = (took_us > CHANGED * expected_us) - (CHANGED * took_us < expected_us)
        self._off = self._off + side if side and side * self._off >= 0 else side
        return abs(self._off) >= CHANGED_AFTER

    def _follow_change(self) -> None:
        """What was observed before is as if the model had been as fast then as it is now."""
        assert self._line is not None
        ratio = _level(self._latest, self._line)
        after = {id(one) for one in self._latest}
        for number, of_size in self._seen.items():
            scaled = [one if id(one) in after else (one[0], ratio * one[1]) for one in of_size]
            self._seen[number] = deque(scaled, maxlen=OF_EACH)
        self._before.clear()
        self._off = 0

    def _follow_drift(self, line: Line) -> None:
        """Sizes of which nothing was heard since the last fit are slower by as much as the others became.

        Each of those is compared with itself, or a law that is no line would be taken for drift.
        """
        became = [
            _level(self._seen[number], line) / _level(self._before[number], line)
            for number in self._fresh
            if number in self._before
        ]
        if not became:
            return
        ratio = sorted(became)[len(became) // 2]
        for number in self._seen.keys() - self._fresh.keys():
            scaled = [(size, ratio * took_us) for size, took_us in self._seen[number]]
            self._seen[number] = deque(scaled, maxlen=OF_EACH)
            self._before[number] = scaled


def _level(seen: Iterable[Observed], line: Line) -> float:
    """How slow these are beside a line: 1 is on it."""
    ratios = sorted(took_us / max(1, line.at(size)) for size, took_us in seen)
    return max(ratios[len(ratios) // 2], 1e-6)


def fit(seen: Sequence[Observed]) -> Line:
    """The line through these (size, microseconds). There must be one at least."""
    first = _least_squares(seen)
    off = sorted(abs(took_us - first.at(size)) for size, took_us in seen)
    limit_us = FAR * off[len(off) // 2] + 0.02 * first.at(seen[-1][0])
    near = [one for one in seen if abs(one[1] - first.at(one[0])) <= limit_us]
    line = _least_squares(near or seen)
    above = sorted(took_us - line.at(size) for size, took_us in near or seen)
    margin_us = max(0, above[min(len(above) - 1, int(UPPER * len(above)))])
    return line._replace(margin_us=float(margin_us))


def _least_squares(seen: Sequence[Observed]) -> Line:
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
