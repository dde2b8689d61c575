"""Traces of arrivals for the simulator: random (Poisson), in bursts, like days, or recorded.

A recorded trace is a text file with one request in each line: its time of arrival in seconds, counted from
any moment, so that Unix times are as good as 0.0125. Empty lines and lines that begin with # are ignored. The
lines may be in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from carpool.text_files import read_text

BURST_PHASE_S: Final = 0.5  # mean duration of a busy or a quiet phase
BURST_RATE_RATIO: Final = 5.0  # of a busy phase to a quiet one
DAY_S: Final = 3600.0  # of `diurnal`: shorter than a day, so that a trace has several
DAY_AMPLITUDE: Final = 0.8  # by which the rate differs from the mean: nine times as high by day as by night


class Arrival(NamedTuple):
    """A request of the trace. It never expires if `expiration_us` is None."""

    at_us: int
    expiration_us: int | None = None
    lane: str = ""
    priority: int = 4
    cost: int = 1


class Traffic(Protocol):
    """Makes a trace of `number` requests at a mean rate of `per_s`. The same seed makes the same trace."""

    def __call__(
        self, per_s: float, number: int, seed: int = 0, expiration_us: int | None = None
    ) -> Iterator[Arrival]: ...


class TraceError(Exception):
    """A file is not a trace. The message says why."""


def poisson(per_s: float, number: int, seed: int = 0, expiration_us: int | None = None) -> Iterator[Arrival]:
    """A Poisson process: arrivals are independent of each other."""
    chance = random.Random(seed)  # noqa: S311 (a simulation)
    at_us = 0.0
    for _ in range(number):
        at_us += chance.expovariate(per_s) * 1e6
        yield Arrival(int(at_us), expiration_us)


def bursty(
    per_s: float,
    number: int,
    seed: int = 0,
    expiration_us: int | None = None,
    ratio: float = BURST_RATE_RATIO,
    phase_s: float = BURST_PHASE_S,
) -> Iterator[Arrival]:
    """A Poisson process modulated by a Markov chain of two states (MMPP), at a mean rate of `per_s`.

    One state has `ratio` times the rate of the other. Each state lasts `phase_s` on average.
    """
    chance = random.Random(seed)  # noqa: S311 (a simulation)
    slow = 2 * per_s / (1 + ratio)
    rates = (slow, slow * ratio)
    at_us, state, until_us = 0.0, 0, chance.expovariate(1 / phase_s) * 1e6
    made = 0
    while made < number:
        gap_us = chance.expovariate(rates[state]) * 1e6
        if (
            at_us + gap_us > until_us
        ):  # the process has no memory, so the gap is drawn again in the next state
            at_us, state = until_us, 1 - state
            until_us += chance.expovariate(1 / phase_s) * 1e6
            continue
        at_us += gap_us
        made += 1
        yield Arrival(int(at_us), expiration_us)


def diurnal(
    per_s: float, number: int, seed: int = 0, expiration_us: int | None = None, day_s: float = DAY_S
) -> Iterator[Arrival]:
    """A Poisson process whose rate rises and falls like a sine, at a mean of `per_s`. It begins at night."""
    chance = random.Random(seed)  # noqa: S311 (a simulation)
    at_s, made, highest = 0.0, 0, per_s * (1 + DAY_AMPLITUDE)
    while made < number:
        at_s += chance.expovariate(highest)
        rate = per_s * (1 - DAY_AMPLITUDE * math.cos(2 * math.pi * at_s / day_s))
        if chance.random() * highest < rate:
            made += 1
            yield Arrival(int(at_s * 1e6), expiration_us)


class Recorded:
    """Recorded traffic, stretched in time to have the requested rate. Nothing in it is random.

    A trace that is longer than the recording repeats it.
    """

    def __init__(self, times_us: Sequence[int]) -> None:
        self._times_us = times_us
        gaps = max(1, len(times_us) - 1)
        self._period_us = max(1.0, (times_us[-1] - times_us[0]) * (1 + 1 / gaps)) if times_us else 1.0

    @property
    def per_s(self) -> float:
        """The mean rate of the recording."""
        return len(self._times_us) / self._period_us * 1e6

    def __len__(self) -> int:
        return len(self._times_us)

    def __call__(
        self, per_s: float, number: int, seed: int = 0, expiration_us: int | None = None
    ) -> Iterator[Arrival]:
        stretch = self.per_s / per_s if self._times_us else 1.0
        for made in range(number if self._times_us else 0):
            repetition, index = divmod(made, len(self._times_us))
            at_us = self._times_us[index] - self._times_us[0] + repetition * self._period_us
            yield Arrival(round(at_us * stretch), expiration_us)


def recorded(times_us: Sequence[int], expiration_us: int | None = None) -> Iterator[Arrival]:
    """Arrivals at exactly these times."""
    for at_us in times_us:
        yield Arrival(at_us, expiration_us)


def traffic(name: str, period_s: float | None = None) -> Traffic:
    """The traffic of this name: poisson, bursty, diurnal, or the file of a recorded trace. `period_s`: how
    long a phase is, or a day; by default BURST_PHASE_S and DAY_S. Raises TraceError."""
    if name == "poisson":
        return poisson
    if name == "bursty":
        return bursty if period_s is None else partial(bursty, phase_s=period_s)
    if name == "diurnal":
        return diurnal if period_s is None else partial(diurnal, day_s=period_s)
    return Recorded(read_trace(Path(name)))


def read_trace(path: Path) -> list[int]:
    """The times of a recorded trace in us, in order, the first at 0. Raises TraceError."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise TraceError(
            f"--arrivals must be poisson, bursty, diurnal, or a readable file of recorded arrivals; {reason}"
        ) from None
    times_s = [
        _seconds(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not times_s:
        raise TraceError(f"{path}: the trace has no arrivals")
    first_s = min(times_s)
    return sorted(round((time_s - first_s) * 1e6) for time_s in times_s)


def _seconds(path: Path, number: int, line: str) -> float:
    try:
        seconds = float(line)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise TraceError(f"{path}, line {number}: {line.strip()!r:.60} must be a number of seconds")
    return seconds


def write_trace(path: Path, times_us: Sequence[int], title: str) -> None:
    """Write a trace that `read_trace` reads."""
    first_us = min(times_us, default=0)
    lines = [f"# {title}", *(f"{(at_us - first_us) / 1e6:.6f}" for at_us in sorted(times_us))]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
