"""The detail of a model, while somebody looks: figures by lane and tenant from what is known of them.

Producers choose the names of lanes and tenants, and may use one for each request. So not more than some
thousands are looked at, and the next detail is computed only after a multiple of the time that the last one
took.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from carpool.messages.requests import Entry
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.detail import (
    BatchDetail,
    LaneDetail,
    LearnedPoint,
    ModelDetail,
    PriorityDetail,
    ProcessDetail,
    TenantDetail,
    clipped,
)
from carpool.wire.report import SequencesReport
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.core.waiting.arrival_order import ArrivalOrder
from carpool_batcher.core.waiting.lane import EXPIRED_RANK
from carpool_batcher.core.waiting.queue import Queue
from carpool_batcher.recent import RawBatch, Recent, RecentBatch

WINDOW_US: Final = 60_000_000
INTERVAL_US: Final = 1_000_000  # between two details, and
INTERVAL_RATIO_MIN: Final = 50  # times as long as the last one took
LANES_LOOKED_AT_MAX: Final = 2048
TENANTS_LOOKED_AT_MAX: Final = 2048  # in lanes, one in each of its lanes and priorities anew
RUNS_EXACT_MAX: Final = 64  # of a tenant in a lane: of more, the number of requests is estimated from these
RUNS_LOOKED_AT_MAX: Final = 16_384  # of all of them
LANES_SHOWN: Final = 24  # a third of them because they are slow, the others because most waits there
TENANTS_SHOWN: Final = 24
BATCHES_SHOWN: Final = 32
ERRORS_SHOWN: Final = 16
PROCESSES_SHOWN: Final = 64
SLICES: Final = 6  # of the window, in which arrivals are counted
TENANTS_OF_SLICE_MAX: Final = 1024  # those that come later are in no tenant's count

_LaneName = tuple[str, str]  # what producers named, and the version


class _Slice:
    """What arrived from `began_us` on: requests by tenant, and all."""

    __slots__ = ("all", "began_us", "counts")

    def __init__(self, began_us: int) -> None:
        self.began_us = began_us
        self.counts: dict[str, int] = {}
        self.all = 0


class Arrivals:
    """How many requests of each tenant arrived in the last minute, since somebody looks."""

    def __init__(self, now_us: int) -> None:
        self._began_us = now_us
        self._slices = deque([_Slice(now_us)], maxlen=SLICES + 1)

    def add(self, entries: Iterable[Entry], now_us: int) -> None:
        """The requests of these entries arrived. O(runs)."""
        newest = self._slices[-1]
        if now_us - newest.began_us >= WINDOW_US // SLICES:
            newest = _Slice(now_us)
            self._slices.append(newest)
        counts = newest.counts
        for entry in entries:
            for run in entry.runs:
                newest.all += len(run)
                known = counts.get(run.tenant)
                if known is not None or len(counts) < TENANTS_OF_SLICE_MAX:
                    counts[run.tenant] = (known or 0) + len(run)

    def counted(self, now_us: int) -> tuple[dict[str, int], int, int]:
        """By tenant, of all, and the time in which they arrived (us)."""
        totals: dict[str, int] = {}
        kept = [one for one in self._slices if now_us - one.began_us <= WINDOW_US]
        for one in kept:
            for tenant, number in one.counts.items():
                totals[tenant] = totals.get(tenant, 0) + number
        over_us = max(1, min(now_us - self._began_us, WINDOW_US))
        return totals, sum([one.all for one in kept]), over_us


class _OfTenant:
    __slots__ = ("oldest_us", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.oldest_us: int | None = None


class _OfLane:
    """A lane: what waits, and samples of its batches."""

    __slots__ = ("batches", "executions", "latencies", "oldest_us", "requests", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.oldest_us: int | None = None
        self.batches = 0
        self.requests = 0
        self.latencies: list[tuple[int, int]] = []  # us, and for how many requests it counts
        self.executions: list[tuple[int, int]] = []

    def settled(self, one: RecentBatch) -> None:
        event = one.event
        self.batches += 1
        self.requests += event.size
        quarter = max(1, event.size // 4)
        for (arrival_us, number), counts in zip(one.arrivals, (quarter, 2 * quarter, quarter), strict=True):
            if number:
                self.latencies.append((max(0, event.settled_us - arrival_us), counts))
        if event.compute_us:
            self.executions.append((event.compute_us, 1))


class _Waiting(NamedTuple):
    """What waits in lanes: by lane, by tenant, and the oldest arrival by priority. `is_exact`: all of it was
    counted."""

    lanes: dict[_LaneName, _OfLane]
    tenants: dict[str, _OfTenant]
    oldest_us: dict[int, int]
    is_exact: bool


class Detail:
    """Makes the details of one model. There is one only while somebody looks."""

    def __init__(self, now_us: int) -> None:
        self.due_us = now_us
        self._arrivals = Arrivals(now_us)

    def arrived(self, entries: Iterable[Entry], now_us: int) -> None:
        """These entries were read."""
        self._arrivals.add(entries, now_us)

    def make(
        self,
        batcher: str,
        scheduler: Scheduler,
        recent: Recent,
        sequences: SequencesReport | None,
        clock_us: Clock,
    ) -> ModelDetail:
        """The detail now. `clock_us` tells the time (us), for that which it shows and for its cost."""
        now_us = clock_us()
        waiting = count_waiting(scheduler.queue)
        batches = _in_window(recent.batches, now_us)
        for one in batches:
            name = one.lane, one.version
            waiting.lanes.setdefault(name, _OfLane()).settled(one)
        arrived, all_arrived, arrivals_over_us = self._arrivals.counted(now_us)
        processes = _processes(scheduler)
        queue = scheduler.queue
        detail = ModelDetail(
            batcher,
            now_us,
            over_us=max(0, min(WINDOW_US, now_us - recent.since_us())),
            arrivals_over_us=arrivals_over_us,
            arrived=all_arrived,
            lanes=_lanes(waiting.lanes, now_us),
            lanes_number=sum(1 for lane in islice(queue.lanes.values(), LANES_LOOKED_AT_MAX) if lane.count)
            + max(0, len(queue.lanes) - LANES_LOOKED_AT_MAX),
            tenants=_tenants(waiting.tenants, arrived, all_arrived, now_us),
            tenants_number=len(waiting.tenants.keys() | arrived.keys()),
            priorities=_priorities(queue.count_by_priority, waiting.oldest_us, now_us),
            delayed=queue.delayed.requests,
            followers=len(scheduler.sequences.followers),
            batches=tuple(
                [_batch(one, scheduler.settings) for one in islice(reversed(batches), BATCHES_SHOWN)]
            ),
            errors=tuple(recent.errors()[:ERRORS_SHOWN]),
            learned=_learned(scheduler),
            sequences=sequences,
            processes=processes[:PROCESSES_SHOWN],
            processes_number=len(processes),
            is_partial=not waiting.is_exact,
        )
        ended_us = clock_us()
        self.due_us = ended_us + max(INTERVAL_US, INTERVAL_RATIO_MIN * (ended_us - now_us))
        return detail


Clock = Callable[[], int]


def _in_window(batches: Iterable[RawBatch], now_us: int) -> Sequence[RecentBatch]:
    """Those that settled in the last minute, the latest last."""
    from_us = now_us - WINDOW_US
    return [one for one in map(RecentBatch._make, batches) if one.event.settled_us >= from_us]


# --- what waits --------------------------------------------------------------------------------------------


def count_waiting(queue: Queue) -> _Waiting:
    """Count what waits in lanes. O(LANES_LOOKED_AT_MAX + TENANTS_LOOKED_AT_MAX + RUNS_LOOKED_AT_MAX)."""
    counted = _Waiting({}, {}, {}, is_exact=True)
    tenants_left, runs_left, is_exact = TENANTS_LOOKED_AT_MAX, RUNS_LOOKED_AT_MAX, True
    if len(queue.lanes) > LANES_LOOKED_AT_MAX:
        is_exact = False
    for lane in islice(queue.lanes.values(), LANES_LOOKED_AT_MAX):
        if not lane.count:
            continue
        of_lane = counted.lanes.setdefault((lane.label, lane.version), _OfLane())
        of_lane.waiting += lane.count
        of_lane.oldest_us = _earlier(of_lane.oldest_us, lane.front()[1])
        for rank, tenant, runs in islice(lane.by_tenant(), tenants_left):
            tenants_left -= 1
            requests, looked_at, are_all = _requests_in(runs, min(RUNS_EXACT_MAX, runs_left))
            runs_left -= looked_at
            is_exact = is_exact and are_all
            _count_tenant(counted, rank, tenant, requests, runs.first().arrival_us)
        is_exact = is_exact and tenants_left > 0
    return counted._replace(is_exact=is_exact)


def _count_tenant(counted: _Waiting, rank: int, tenant: str, requests: int, oldest_us: int) -> None:
    of_tenant = counted.tenants.get(tenant)
    if of_tenant is None:
        of_tenant = counted.tenants[tenant] = _OfTenant()
    of_tenant.waiting += requests
    of_tenant.oldest_us = _earlier(of_tenant.oldest_us, oldest_us)
    if rank != EXPIRED_RANK:
        counted.oldest_us[rank - 1] = min(counted.oldest_us.get(rank - 1, oldest_us), oldest_us)


def _requests_in(runs: ArrivalOrder, exact_max: int) -> tuple[int, int, bool]:
    """How many requests these runs have, how many of the runs were looked at, and whether that is exact."""
    number = len(runs)
    looked_at = max(1, min(number, exact_max))
    requests = sum([len(run) for run in islice(runs, looked_at)])
    return requests * number // looked_at, looked_at, looked_at == number


def _earlier(one_us: int | None, other_us: int) -> int:
    return other_us if one_us is None else min(one_us, other_us)


# --- the parts of a detail ---------------------------------------------------------------------------------


def _lanes(lanes: dict[_LaneName, _OfLane], now_us: int) -> tuple[LaneDetail, ...]:
    """Those where most waits, and the slowest of the others."""
    slow = LANES_SHOWN // 3

    def load(name: _LaneName) -> tuple[int, int]:
        return lanes[name].waiting, lanes[name].requests

    def slowest_us(name: _LaneName) -> int:
        return max([latency_us for latency_us, _ in lanes[name].latencies])

    first = heapq.nlargest(LANES_SHOWN - slow, lanes, key=load)
    others = [name for name, of_lane in lanes.items() if of_lane.latencies and name not in first]
    names = [*first, *heapq.nlargest(slow, others, key=slowest_us)]
    return tuple([_lane(name, lanes[name], now_us) for name in names])


def _lane(name: _LaneName, of: _OfLane, now_us: int) -> LaneDetail:
    label, version = map(clipped, name)
    age_s = _age_s(of.oldest_us, now_us)
    times = quantiles(of.latencies), quantiles(of.executions)
    return LaneDetail(label, version, of.waiting, age_s, of.batches, of.requests, *times)


def quantiles(samples: list[tuple[int, int]]) -> tuple[int, int] | None:
    """p50 and p99 of values, each of which counts a number of times; None without any."""
    if not samples:
        return None
    samples.sort()
    total = sum([counts for _, counts in samples])
    return _quantile(samples, 0.5 * total), _quantile(samples, 0.99 * total)


def _quantile(ascending: Sequence[tuple[int, int]], rank: float) -> int:
    reached = 0
    for value, counts in ascending:
        reached += counts
        if reached >= rank:
            return value
    return ascending[-1][0]


def _tenants(
    waiting: dict[str, _OfTenant], arrived: dict[str, int], all_arrived: int, now_us: int
) -> tuple[TenantDetail, ...]:
    """Those with most requests, that wait or arrived."""
    nothing = _OfTenant()
    names = waiting.keys() | arrived.keys()
    in_order = sorted(names, key=lambda one: (-waiting.get(one, nothing).waiting - arrived.get(one, 0), one))
    found: list[TenantDetail] = []
    for tenant in in_order[:TENANTS_SHOWN]:
        of_tenant, number = waiting.get(tenant, nothing), arrived.get(tenant, 0)
        age_s = _age_s(of_tenant.oldest_us, now_us)
        share = number / all_arrived if all_arrived else 0.0
        found.append(TenantDetail(clipped(tenant), of_tenant.waiting, age_s, number, share))
    return tuple(found)


def _priorities(counts: Sequence[int], oldest_us: dict[int, int], now_us: int) -> tuple[PriorityDetail, ...]:
    """Those with requests, the highest first."""
    found = [
        PriorityDetail(priority, number, _age_s(oldest_us.get(priority), now_us))
        for priority, number in enumerate(counts)
        if number
    ]
    return tuple(reversed(found))


def _age_s(since_us: int | None, now_us: int) -> float | None:
    return None if since_us is None else max(0, now_us - since_us) / 1e6


def _batch(one: RecentBatch, settings: ModelSettings) -> BatchDetail:
    event = one.event
    fill = event.size / settings.max_batch_size
    if settings.max_batch_cost is not None:
        fill = max(fill, event.cost / settings.max_batch_cost)
    failures = event.failures
    return BatchDetail(
        event.batch_id,
        one.reason,
        event.size,
        min(1.0, fill),
        clipped(one.lane),
        clipped(one.version),
        clipped(event.worker),
        one.dispatched_us,
        event.settled_us,
        max(0, one.dispatched_us - one.arrivals[0][0]) if one.arrivals[0][1] else 0,
        event.waited_us,
        event.compute_us,
        {} if failures is None else dict(failures.statuses),
        "" if failures is None else clipped(failures.error),
    )


def _learned(scheduler: Scheduler) -> tuple[LearnedPoint, ...]:
    curve = scheduler.learned.latency.curve
    if curve is None:
        return ()
    return tuple(
        [
            LearnedPoint(size, time_us, max(time_us, round(curve.at_most(size))))
            for size, time_us in curve.shown
        ]
    )


def _processes(scheduler: Scheduler) -> tuple[ProcessDetail, ...]:
    """Those of a bound model."""
    if scheduler.kind is not ModelKind.BOUND:
        return ()
    processes = scheduler.processes
    return tuple(
        [
            ProcessDetail(
                clipped(one), processes.slots_taken(one), processes.slots_each, processes.is_busy(one)
            )
            for one in processes.live
        ]
    )
