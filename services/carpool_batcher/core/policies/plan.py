"""The plans of the policy `deferred`: until when to wait, what to refuse, and how many to dispatch.

The producer of a request is expected to have its result by t + transit + l(n), if it is dispatched at t in a
batch of n. Here l(n) includes the margin of `learned.latency`; transit is round trip and delivery
(`learned.transit`). So with d the earliest deadline, n requests are dispatched just before a batch of n + 1
would be late:

    at d - transit - l(n + 1),    or at once if to wait for more would not raise throughput.

Waiting lets batches grow, and fuller batches raise throughput: this is what latency is traded for (Symphony,
SOSP 2023). But while a batch waits, idle processes wait too. Requests that arrive every g fill it to n + m in
m g, so k idle processes give k m g, and one of them l(n + m), for n + m requests. By the renewal-reward
theorem this is worth it while some m makes (n + m) / (k m g + l(n + m)) larger than n / l(n). Where
l(n) = a + s n, it is so up to n = a / (k g): a single process that is nearly busy hardly waits, and of many
processes at the same load, each waits for a full batch.

When more requests wait than can be in time, a request at the head with an early deadline keeps
its batch small and delays all behind it. Requests are then refused so that the next batch wastes the least
(Nexus, SOSP 2019): the value of a batch of n is n, less what the best throughput would serve in its execution
time. Only a request with a deadline is refused; one that has only a target, or is served late, never is.

Requests at the front now have little slack: they are late if transit takes long. They are refused as well
when later requests can fill the batch. But where time for a long transit would make the batch much smaller,
as where a model pads its batches, it is planned for the usual transit: if more requests are expected to be in
time then, counting each by how likely that is.

Many processes serve much more before a deadline than a plan looks at. If the rest of the queue did not count,
the first requests would always be in time, in batches that become smaller and smaller.

Why: docs/decisions/0015.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from carpool_batcher.core.learned.executed_share import ExecutionTimes
from carpool_batcher.core.learned.transit import TransitBySize, magnitude
from carpool_batcher.core.waiting.lane import NEVER_US

# How likely a request is taken to be in time. Its deadline leaves less time than the usual transit; as much
# (so 0.5 to 0.9); as much as nine of ten do not exceed (0.9 to 1); or as much as the longest takes.
CHANCES: Final = (0.0, 0.7, 0.95, 1.0)
GAIN_MIN: Final = 0.5  # requests: a smaller gain by a plan for the usual transit is none in virtual time


class Plan(NamedTuple):
    """The requests to refuse, by position; and how many of the others to dispatch, from the front."""

    refused: list[int]
    size: int


class Forecast(NamedTuple):
    """What a plan is based on. `transit_us`: what counts, from dispatch until the producer has the results,
    less l(n), by magnitude of n: of `transit` what nine of ten batches do not exceed, unless a plan says
    otherwise. `free_times_us`: from when on each process can be sent a batch."""

    times: ExecutionTimes
    max_size: int
    transit: TransitBySize
    transit_us: Sequence[int]
    free_times_us: Sequence[int] = ()

    def arrives_us(self, start_us: int, size: int) -> int:
        """By when the results of a batch of `size`, dispatched at `start_us`, are expected to arrive."""
        return start_us + self.transit_us[magnitude(size)] + self.times.at_most(size)

    def latest_arrival_us(self, start_us: int, size: int) -> int:
        """The same if transit takes long."""
        return start_us + self.transit.longest_us[magnitude(size)] + self.times.at_most(size)

    def largest_in_time(self, start_us: int, deadline_us: int, limit: int) -> int:
        """The largest batch, up to `limit`, that is in time if dispatched at `start_us`; 0 if none is."""
        if self.arrives_us(start_us, limit) <= deadline_us:
            return limit
        low, high = 0, limit  # a batch of `low` is in time, one of `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            if self.arrives_us(start_us, middle) <= deadline_us:
                low = middle
            else:
                high = middle
        return low


def is_efficient(times: ExecutionTimes, size: int, max_size: int, gap_us: float) -> bool:
    """Whether to wait for more than `size` requests would not raise throughput (see the module).

    `gap_us` is how long idle processes wait, all together, until one more arrives. O(log max_size): only
    powers of two are tried as the number of further requests.
    """
    alone_us = times.of(size)
    more = 1
    while size + more <= max_size:
        if (size + more) * alone_us > size * (more * gap_us + times.of(size + more)):
            return False
        more *= 2
    return True


def latest_start_us(forecast: Forecast, deadline_us: int, waiting: int) -> int:
    """When to dispatch `waiting` requests, the earliest of whose deadlines is `deadline_us`."""
    one_more = min(waiting + 1, forecast.max_size)
    return deadline_us - forecast.arrives_us(0, one_more)


def plan(forecast: Forecast, deadlines_us: Sequence[int], start_us: int, behind: int = 0) -> Plan:
    """Plan what to dispatch, in a batch that settles as if dispatched at `start_us`, and what to refuse.

    If no request is in time even if transit takes long, those are served that are in time if they do not: a
    process that is free has nothing better to do. So they are if more are expected to be in time then (see
    the module).

    `deadlines_us` has those of the waiting requests in the order of dispatch, NEVER_US for no deadline;
    `behind` more wait after them. O(n) if all can be in time, otherwise O(n log max_size); of those behind,
    only batches count.
    """
    planned, is_complete = _plan(forecast, deadlines_us, start_us, behind)
    if is_complete and planned.size:
        return planned
    usual = forecast._replace(transit_us=forecast.transit.usual_us)
    for_usual, _ = _plan(usual, deadlines_us, start_us, behind)
    if not planned.size:
        return for_usual
    longest = forecast._replace(transit_us=forecast.transit.longest_us)
    for_longest, _ = _plan(longest, deadlines_us, start_us, behind)
    for_long = for_longest if for_longest.size >= planned.size else planned
    throughput = _best_throughput(usual, max(deadlines_us), start_us)
    value, usual_value = (
        _expected_value(forecast, deadlines_us, start_us, one, throughput) for one in (for_long, for_usual)
    )
    return for_usual if usual_value > value + GAIN_MIN else for_long


def _expected_value(
    forecast: Forecast, deadlines_us: Sequence[int], start_us: int, planned: Plan, throughput: float
) -> float:
    """How many of a batch are expected to be in time, less what the best `throughput` serves meanwhile."""
    execution_us, of_size = forecast.times.of(planned.size), magnitude(planned.size)
    arrivals_us = [start_us + transit_us[of_size] + execution_us for transit_us in forecast.transit]
    refused = frozenset(planned.refused)
    kept_us = (deadline_us for at, deadline_us in enumerate(deadlines_us) if at not in refused)
    chances = [
        CHANCES[bisect_right(arrivals_us, deadline_us)] for deadline_us in islice(kept_us, planned.size)
    ]
    return sum(chances) - execution_us * throughput


def _plan(forecast: Forecast, deadlines_us: Sequence[int], start_us: int, behind: int) -> tuple[Plan, bool]:
    """The plan, and whether all that it does not refuse can be in time."""
    soonest_us = forecast.arrives_us(start_us, 1)
    hopeless = [at for at, deadline_us in enumerate(deadlines_us) if deadline_us < soonest_us]
    if hopeless:
        deadlines_us = [deadline_us for deadline_us in deadlines_us if deadline_us >= soonest_us]
    if not deadlines_us:
        return Plan(hopeless, 0), True
    limits_us = _earliest_in_batch(deadlines_us, forecast.max_size)
    size_max = min(len(limits_us), forecast.max_size)
    size = forecast.largest_in_time(start_us, limits_us[0], size_max)
    if _are_all_in_time(forecast, limits_us, start_us, behind):
        return Plan(hopeless, size), True
    if size == size_max:
        return Plan(hopeless, size), False
    begin, size = _most_valuable(forecast, limits_us, start_us)
    excluded = set(hopeless)
    positions = (at for at in range(len(deadlines_us) + len(excluded)) if at not in excluded)
    before = zip(islice(positions, begin), deadlines_us, strict=False)
    refused = [*hopeless, *(at for at, deadline_us in before if deadline_us < NEVER_US)]
    return Plan(refused, size), False


def _earliest_in_batch(deadlines_us: Sequence[int], max_size: int) -> list[int]:
    """For each request, the earliest deadline among itself and the `max_size` - 1 behind it, which may share
    its batch."""
    candidates: deque[int] = deque()  # positions with rising deadlines
    earliest_us = [0] * len(deadlines_us)
    for at in range(len(deadlines_us) - 1, -1, -1):
        while candidates and deadlines_us[candidates[0]] >= deadlines_us[at]:
            candidates.popleft()
        candidates.appendleft(at)
        if candidates[-1] >= at + max_size:
            candidates.pop()
        earliest_us[at] = deadlines_us[candidates[-1]]
    return earliest_us


def _are_all_in_time(forecast: Forecast, limits_us: Sequence[int], start_us: int, behind: int) -> bool:
    """Whether all are in time, those behind too, if each batch goes to the process that becomes free first.

    Those behind are assumed to be due later and later, as these are. Nothing is assumed of them if these are
    not more than one batch.
    """
    known, last = len(limits_us), len(limits_us) - forecast.max_size  # `last`: the last with a full batch
    rise_us = max(0.0, (limits_us[last] - limits_us[0]) / last) if last > 0 else 0.0
    waiting = known + (behind if last > 0 else 0)
    free_us = [max(start_us, free_us) for free_us in forecast.free_times_us] or [start_us]
    heapq.heapify(free_us)
    begin = 0
    while begin < waiting:
        next_us = free_us[0]
        limit_us = limits_us[begin] if begin < known else limits_us[last] + int(rise_us * (begin - last))
        size_max = min(waiting - begin, forecast.max_size)
        size = forecast.largest_in_time(next_us, limit_us, size_max)
        if not size:
            return False
        heapq.heapreplace(free_us, next_us + forecast.times.of(size))
        begin += size
    return True


def _most_valuable(forecast: Forecast, limits_us: Sequence[int], start_us: int) -> tuple[int, int]:
    """The first position and the size of the batch that wastes the least of what its time could serve."""
    times = forecast.times
    best_throughput = _best_throughput(forecast, max(limits_us), start_us)
    best, best_value = (0, 0), float("-inf")
    for at, limit_us in enumerate(limits_us):
        size_max = min(len(limits_us) - at, forecast.max_size)
        size = forecast.largest_in_time(start_us, limit_us, size_max)
        value = size - times.of(size) * best_throughput
        if size and value > best_value:
            best, best_value = (at, size), value
        if size == forecast.max_size or at + size >= len(limits_us):
            break  # batches that begin later are only smaller
    return best


def _best_throughput(forecast: Forecast, deadline_us: int, start_us: int) -> float:
    """Requests per microsecond in the largest batch that is in time."""
    largest = max(1, forecast.largest_in_time(start_us, deadline_us, forecast.max_size))
    return largest / max(1, forecast.times.of(largest))
