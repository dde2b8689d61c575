"""What no policy can exceed: U1 for any number of workers, U3 for one.

U1  workers * max b / l(b) requests per second, over the batch sizes b that can meet the deadline. Of the
    requests that arrive in an interval, at most that rate times (the interval plus a deadline)
U3  the exact offline optimum for one worker and equal deadlines, where all arrivals are known in advance:
    served batches are contiguous blocks, so a dynamic programme over (considered, served) finds it
"""

from __future__ import annotations

from typing import Final

import numpy as np

from carpool_cli.tuning.simulator import World

BATCH_SIZE_MAX: Final = 256


def bound(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int) -> int:
    """The bound that figures are a share of: U3 for one worker, else U1."""
    return (u3 if world.processes == 1 else u1)(times_us, world, deadline_us, max_batch)


def u1(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> int:
    """The most requests that workers can serve in time if all batches have the best size.

    A leaky bucket: it leaks at the rate of `u1_per_s`, and holds what leaks within a deadline.
    """
    per_us = u1_per_s(world, deadline_us, max_batch) / 1e6
    bucket_size = per_us * (deadline_us - world.out_us - world.back_us)
    served, level, last_us = 0, 0.0, float(times_us[0])
    for at_us in times_us.tolist():
        level = max(0.0, level - per_us * (at_us - last_us))
        last_us = at_us
        if level + 1 <= bucket_size:
            level += 1
            served += 1
    return served


def u1_per_s(world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> float:
    """Requests/s that no policy can exceed, for any arrivals."""
    execution_us_max = deadline_us - world.out_us - world.back_us
    rates = [
        size / world.execution_us(size)
        for size in range(1, max_batch + 1)
        if world.execution_us(size) <= execution_us_max
    ]
    return world.processes * max(rates, default=0.0) * 1e6


def u3(times_us: np.ndarray, world: World, deadline_us: int, max_batch: int = BATCH_SIZE_MAX) -> int:
    """The most requests that one worker can serve in time if all arrivals are known in advance.

    `free[j, d]` is the earliest time at which the worker can be idle after the first j requests, of which d
    were given up. A batch changes j and not d, so all batches that begin with request j are one operation on
    a block. Giving up more requests helps only if the worker is idle earlier, and no time before the arrival
    of the next request helps at all: so only a narrow band of each row matters.
    """
    number = len(times_us)
    ready_us = times_us + world.out_us
    due_us = times_us + deadline_us - world.back_us
    execution_us = np.array([world.execution_us(size) for size in range(1, max_batch + 1)])
    free = np.full((max_batch + 1, number + 1), np.inf)  # a ring of rows: no batch is larger
    free[0, 0] = -np.inf
    for j in range(number):
        here, after = free[j % len(free)], free[(j + 1) % len(free)]
        low, high = _band(here, ready_us[j])
        np.minimum(after[low + 1 : high + 1], here[low:high], out=after[low + 1 : high + 1])  # give up j
        sizes = min(max_batch, number - j)
        earliest_us = ready_us[j : j + sizes] + execution_us[:sizes]
        sizes = int(np.searchsorted(earliest_us, due_us[j], side="right"))  # larger batches are always late
        done_us = np.maximum(here[low:high], ready_us[j : j + sizes, None]) + execution_us[:sizes, None]
        done_us[done_us > due_us[j]] = np.inf
        rows = np.arange(j + 1, j + 1 + sizes) % len(free)
        free[rows, low:high] = np.minimum(free[rows, low:high], done_us)
        here[:] = np.inf
    return number - int(np.flatnonzero(free[number % len(free)] < np.inf)[0])


def _band(free_us: np.ndarray, needed_us: float) -> tuple[int, int]:
    """The range of d that matters: from the first possible one to the first that is idle in time."""
    possible = np.flatnonzero(free_us < np.inf)
    in_time = np.flatnonzero(free_us <= needed_us)
    return int(possible[0]), int(in_time[0] if len(in_time) else possible[-1]) + 1
