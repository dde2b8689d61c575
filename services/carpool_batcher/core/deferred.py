"""The policy `deferred`: a batch leaves as late as its deadlines allow; who cannot be met is told early.

A batch of n that leaves at t is heard of at t + trip + l(n). With d the earliest deadline that waits, n
requests leave at the latest at d - trip - l(n), and so they leave just before one more would make them late:

    at d - trip - l(n + 1),    or at once when they are enough for the model to be efficient.

Queue lets batches grow, and fuller batches make a model faster: that is what latency is traded for here
(Symphony, SOSP 2023). When more wait than can be served in time, a head whose deadline would keep its batch
small holds up all behind it: those are given up first whose batch would waste the most (Nexus, SOSP 2019).
Time is worth what it could serve, so a batch of n is worth n - l(n) * the best n / l(n) there is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from carpool_batcher.core.lane import NEVER
from carpool_batcher.core.latency import LatencyModel, Line

EFFICIENT: Final = 0.85  # of the throughput of the largest batch; waiting for more leaves processes idle


class Plan(NamedTuple):
    """Who is given up, by their places in the order of turns; and how many of the others leave."""

    given_up: list[int]
    leave: int


class Outlook(NamedTuple):
    """What a decision rests on. `frees_us`: when a batch may leave for each process."""

    latency: LatencyModel
    max_size: int
    trip_us: int
    frees_us: Sequence[int]

    def done_us(self, start_us: int, size: int) -> int:
        """When a batch of `size` that leaves at `start_us` may be heard of."""
        return start_us + self.trip_us + self.latency.at_most(size)

    def fits(self, start_us: int, deadline_us: int, limit: int) -> int:
        """The most, up to `limit`, that can leave at `start_us` and be in time; 0 if not even one."""
        if self.done_us(start_us, limit) <= deadline_us:
            return limit
        low, high = 0, limit  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.done_us(start_us, middle) <= deadline_us:
                low = middle
            else:
                high = middle
        return low


def efficient_size(latency: LatencyModel, max_size: int) -> int:
    """The smallest batch that is nearly as efficient as the largest. O(log max_size) when l(n) is another."""
    return 1 if latency.line is None else _efficient_size(latency.line, max_size)


@lru_cache(maxsize=256)
def _efficient_size(line: Line, max_size: int) -> int:
    wanted = EFFICIENT * max_size / max(1, line.at(max_size))
    low, high = 0, max_size
    while high - low > 1:
        middle = (low + high) // 2
        if middle / max(1, line.at(middle)) >= wanted:
            high = middle
        else:
            low = middle
    return high


def latest_start_us(outlook: Outlook, deadline_us: int, waiting: int) -> int:
    """When `waiting` requests must leave, the earliest deadline among them being `deadline_us`."""
    more = min(waiting + 1, outlook.max_size)
    return deadline_us - outlook.trip_us - outlook.latency.at_most(more)


def plan(outlook: Outlook, deadlines_us: Sequence[int], now_us: int) -> Plan:
    """Who leaves now, and who is given up, of these deadlines in the order of their turns (NEVER: none).

    O(n) where all can be served, O(n log max_size) where not.
    """
    soonest_us = outlook.done_us(now_us, 1)
    hopeless = [at for at, deadline_us in enumerate(deadlines_us) if deadline_us < soonest_us]
    if hopeless:
        deadlines_us = [one for one in deadlines_us if one >= soonest_us]
    if not deadlines_us:
        return Plan(hopeless, 0)
    tight_us = _earliest_ahead(deadlines_us, outlook.max_size)
    size = outlook.fits(now_us, tight_us[0], min(len(tight_us), outlook.max_size))
    if size == min(len(tight_us), outlook.max_size) or _all_fit(outlook, tight_us, now_us):
        return Plan(hopeless, size)
    begin, size = _worth_most(outlook, tight_us, now_us)
    without = set(hopeless)
    alive = (at for at in range(len(deadlines_us) + len(without)) if at not in without)
    ahead = zip(islice(alive, begin), deadlines_us, strict=False)
    return Plan([*hopeless, *(at for at, deadline_us in ahead if deadline_us < NEVER)], size)


def _earliest_ahead(deadlines_us: Sequence[int], window: int) -> list[int]:
    """For each, the earliest deadline among it and the `window` - 1 behind it: who may share its batch."""
    earliest: deque[int] = deque()  # positions, of deadlines that rise
    tight_us = [0] * len(deadlines_us)
    for at in range(len(deadlines_us) - 1, -1, -1):
        while earliest and deadlines_us[earliest[0]] >= deadlines_us[at]:
            earliest.popleft()
        earliest.appendleft(at)
        if earliest[-1] >= at + window:
            earliest.pop()
        tight_us[at] = deadlines_us[earliest[-1]]
    return tight_us


def _all_fit(outlook: Outlook, tight_us: Sequence[int], now_us: int) -> bool:
    """Whether all can be in time, one batch after another on whichever process is free first."""
    frees_us = [max(now_us, free_us) for free_us in outlook.frees_us] or [now_us]
    heapq.heapify(frees_us)
    begin = 0
    while begin < len(tight_us):
        start_us = frees_us[0]
        size = outlook.fits(start_us, tight_us[begin], min(len(tight_us) - begin, outlook.max_size))
        if not size:
            return False
        heapq.heapreplace(frees_us, start_us + outlook.latency.of(size))
        begin += size
    return True


def _worth_most(outlook: Outlook, tight_us: Sequence[int], now_us: int) -> tuple[int, int]:
    """From where on, and how many: the batch that wastes the least of what its time could serve."""
    latency = outlook.latency
    largest = max(1, outlook.fits(now_us, max(tight_us), outlook.max_size))
    best_rate = largest / max(1, latency.of(largest))
    best, best_worth = (0, 0), float("-inf")
    for at, deadline_us in enumerate(tight_us):
        size = outlook.fits(now_us, deadline_us, min(len(tight_us) - at, outlook.max_size))
        worth = size - latency.of(size) * best_rate
        if size and worth > best_worth:
            best, best_worth = (at, size), worth
        if size == outlook.max_size or at + size >= len(tight_us):
            break  # from here on batches only get smaller
    return best
