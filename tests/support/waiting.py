"""Wait for another process or thread, without sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

Value = TypeVar("Value")

_POLL_S: Final = 0.002  # between two looks at the beginning ...
_POLL_S_MAX: Final = 0.03  # ... and later; to look takes time from what is waited for
_POLL_SHARE: Final = 0.02  # of the time waited so far

# For what must happen sooner or later, on a machine however busy: only what never happens waits for it.
EVENTUALLY_S: Final = 120.0
AMPLE_RATIO: Final = 20.0  # see `ample_ms`
_TICKS_PER_S: Final = 100  # of /proc/stat, on every architecture
_STEAL: Final = 8  # its column in the line of a processor


class Stopwatch:
    """How long something took, less what the host of a virtual machine withheld from it meanwhile.

    A host that is overcommitted may run a machine for a fifth of the time. A limit for what this machine does
    in a second then says nothing, unless only the time counts in which the machine ran. What must not come
    too early is compared with `elapsed_s`: timers go on while the host withholds time.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._stolen_before_s = _stolen_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._started_s

    @property
    def passed_s(self) -> float:
        """Seconds since this was made, less those withheld from the processor that lacks most."""
        stolen_s = [now - before for before, now in zip(self._stolen_before_s, _stolen_s(), strict=True)]
        return self.elapsed_s - max(stolen_s, default=0.0)

    @property
    def share(self) -> float:
        """The share of the time since this was made that counts in `passed_s`: a factor for other times."""
        return self.passed_s / self.elapsed_s


def ample_ms(measured: Stopwatch, least_ms: int) -> int:
    """`least_ms`, or on a busy machine more: a time that is long compared with what was measured so far."""
    return max(least_ms, int(1000 * AMPLE_RATIO * measured.elapsed_s))


def growing_s(first_s: float) -> Iterator[float]:
    """Limits, each twice as long as the one before: for tries of what must happen within a limit that runs
    out all the same, as the expiration of a request does that is to be dispatched first."""
    limit_s = first_s
    while limit_s < EVENTUALLY_S:
        yield limit_s
        limit_s *= 2
    raise AssertionError(f"it did not happen within {limit_s / 2:g} s either")


def wait_until(predicate: Callable[[], Value], *, description: str, timeout_s: float = EVENTUALLY_S) -> Value:
    """Return what `predicate` returns, as soon as it is true. `description` completes "timed out waiting
    until ...".

    The time that a host withholds from this machine does not count for `timeout_s`.
    """
    stopwatch = Stopwatch()
    began_s = time.monotonic()
    deadline = began_s + timeout_s
    pause = Lock()
    pause.acquire()
    while not (value := predicate()):
        now_s = time.monotonic()
        if now_s > deadline:
            left_s = timeout_s - stopwatch.passed_s
            if left_s <= 0:
                raise AssertionError(f"timed out after {timeout_s:g} s waiting until {description}")
            deadline += left_s
        pause.acquire(timeout=min(_POLL_S_MAX, max(_POLL_S, _POLL_SHARE * (now_s - began_s))))
    return value


def _stolen_s() -> list[float]:
    """The seconds that a host has withheld from each processor of this machine since its start."""
    lines = Path("/proc/stat").read_text().splitlines()[1:]
    return [int(line.split()[_STEAL]) / _TICKS_PER_S for line in lines if line.startswith("cpu")]
