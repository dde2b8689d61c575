"""The waiting runs of one lane: higher priorities first, tenants in fair turns within a priority.

Runs that expired, and are served all the same (`expiration_action` is delay), come behind all others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from carpool.messages.requests import Run
from carpool_batcher.core.applied_settings import EQUAL_SHARES, BatchLimits, Shares
from carpool_batcher.core.learned.doubtful_producers import executable_size
from carpool_batcher.core.waiting.arrival_order import ArrivalOrder
from carpool_batcher.core.waiting.batch_space import BatchSpace, bytes_of
from carpool_batcher.core.waiting.fairness import FairQueue, RunPart, Turns, TurnsByRank

NEVER_US: Final = 1 << 62

# In the names of lanes that are for one version, between the lane that producers named and the version: a
# lone surrogate, which no UTF-8 has.
_OF_VERSION: Final = "\udc00"


def lane_of_version(lane: str, version: str, *, is_asked: bool) -> str:
    """The name, in the queue, of a lane whose requests one version is to execute: they ask for it, or its
    share of the traffic has them."""
    return f"{lane}{_OF_VERSION}{'?' if is_asked else '%'}{version}"


def version_of_lane(name: str) -> str:
    """The version that is to execute the requests of a lane; '' if any may."""
    _, marked, version = name.rpartition(_OF_VERSION)
    return version[1:] if marked else ""


def is_lane_asked(name: str) -> bool:
    """Whether the requests of a lane ask for a version."""
    return f"{_OF_VERSION}?" in name


class DueIndex:
    """The earliest due time of the runs in it. Those that no longer wait are skipped lazily.

    A request is due at its deadline; without one, `target_us` (`target_latency_ms`) after its arrival;
    without either, never. All requests of a run are due together. Most runs are due no earlier than those
    before them, and are dispatched in that order: they are kept in order, O(1) each. The others go into a
    heap, O(log of their number).
    """

    __slots__ = ("_heap", "_sorted", "target_us")

    def __init__(self, target_us: int | None, runs: Iterable[Run]) -> None:
        self.target_us = target_us
        self._sorted: deque[tuple[int, Run]] = deque()
        self._heap: list[tuple[int, int, Run]] = []
        for run in runs:
            self.insert(run)

    def __len__(self) -> int:
        return len(self._sorted) + len(self._heap)

    def insert(self, run: Run) -> None:
        """Add a waiting run. One that is never due is not kept."""
        if run.deadline_us is not None:
            due_us = run.deadline_us
        elif self.target_us is not None:
            due_us = run.arrival_us + self.target_us
        else:
            return
        if not self._sorted or due_us >= self._sorted[-1][0]:
            self._sorted.append((due_us, run))
        else:
            heapq.heappush(self._heap, (due_us, id(run), run))

    def earliest_us(self, is_waiting: Callable[[Run], bool]) -> int:
        """The earliest due time of the runs that still wait; NEVER_US if there is none."""
        in_order, heap = self._sorted, self._heap
        while in_order and not is_waiting(in_order[0][1]):
            in_order.popleft()
        while heap and not is_waiting(heap[0][2]):
            heapq.heappop(heap)
        return min(in_order[0][0] if in_order else NEVER_US, heap[0][0] if heap else NEVER_US)


EXPIRED_RANK: Final = 0  # a run's rank is 1 + its priority, or this
DUE_INDEX_SIZE_MIN: Final = 64


class PoppedBatch(NamedTuple):
    """Runs that are to be dispatched together; the last `expired` of them had expired."""

    runs: list[Run]
    expired: int


class Lane:
    """Requests that may share a batch. With one tenant, adding, removing or taking a run is O(1), except
    `insert` of one that was put back; `waiting.fairness` has the cost with more tenants.

    `name` is unique in the queue; `label` is the lane that producers named. They differ where `process` is to
    execute its requests, of a bound model, or `version` is, for which they ask or not (`is_asked`). `turns`
    are those of tenants in all lanes of the model.

    `count`, `cost` and `bytes` are totals over all requests. `doubtful`: how many of them the model is not
    expected to execute (`learned.doubtful_producers`). `urgent`: runs that must be dispatched now to
    meet their deadlines. Only the Queue changes a lane.
    """

    __slots__ = (
        "_due_index",
        "_front",
        "_queues",
        "_turns",
        "bytes",
        "cost",
        "count",
        "doubtful",
        "is_asked",
        "label",
        "name",
        "process",
        "urgent",
        "version",
    )

    def __init__(
        self, name: str, label: str | None = None, process: str = "", turns: TurnsByRank | None = None
    ) -> None:
        self.name = name
        self.label = name if label is None else label
        self.process = process
        self.version = version_of_lane(name)
        self.is_asked = is_lane_asked(name)
        self.count = 0
        self.doubtful = 0
        self.cost = 0
        self.bytes = 0
        self.urgent: set[Run] = set()
        self._queues: dict[int, FairQueue] = {}  # by rank, the highest first
        self._turns = TurnsByRank(Turns) if turns is None else turns
        self._due_index: DueIndex | None = None  # built when it is first asked for
        self._front: tuple[int, int] | None = None  # cached: a producer may use a new lane for each request

    def __iter__(self) -> Iterator[Run]:
        return chain.from_iterable(self._queues.values())

    # --- changing ------------------------------------------------------------------------------------------

    def insert(self, run: Run, size_bytes: int) -> None:
        """Add a waiting run, which has `size_bytes`."""
        rank = _rank(run)
        run.waits_in = self
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = FairQueue(self._turns[rank])
            if len(self._queues) > 1:
                self._queues = dict(sorted(self._queues.items(), reverse=True))
        queue.insert(run)
        if self._due_index is not None:
            self._due_index.insert(run)
            if len(self._due_index) > 2 * self.count + DUE_INDEX_SIZE_MIN:
                self._due_index = None  # most runs in it no longer wait; perhaps the policy changed
        front = self._front
        if not self.count:
            self._front = rank, run.arrival_us
        elif front is not None and EXPIRED_RANK in (rank, front[0]):
            self._front = None
        elif front is not None and (rank > front[0] or run.arrival_us < front[1]):
            self._front = max(front[0], rank), min(front[1], run.arrival_us)
        count = len(run.correlation_ids)
        self.count += count
        if run.is_doubtful:
            self.doubtful += count
        self.cost += count * run.cost
        self.bytes += size_bytes

    def remove(self, run: Run, size_bytes: int) -> None:
        """Remove a run, which has `size_bytes`, from any position."""
        self._queues[_rank(run)].remove(run)
        run.waits_in = None
        self.urgent.discard(run)
        self._front = None
        self._count_removed(run, size_bytes)

    def take(self, run: Run, indexes: Sequence[int]) -> Run:
        """Remove some requests of a waiting run, and not all, and return them as a run. The others keep their
        place."""
        taken = run.take(indexes)
        self._count_removed(taken, bytes_of(taken))
        return taken

    def move_expired(self, run: Run) -> None:
        """A run expired: move it behind all others."""
        size_bytes = bytes_of(run)
        self.remove(run, size_bytes)
        run.is_late = True
        self.insert(run, size_bytes)

    def pop_batch(self, limits: BatchLimits, shares: Shares = EQUAL_SHARES) -> PoppedBatch:
        """Remove and return the next batch: in order, up to the first request that would exceed a limit, and
        at least one. A run of which only a part fits is cut."""
        space = BatchSpace(limits)
        runs: list[Run] = []
        expired = 0
        chosen_by: FairQueue | None = None
        for rank, queue in self._queues.items():
            if queue and not runs and queue.is_chosen_before_others:
                chosen_by = queue
            while queue:
                run = queue.pop(space, shares)
                if run is None:
                    break
                runs.append(run)
                expired += rank == EXPIRED_RANK
            if queue:
                break
        if chosen_by is not None:
            chosen_by.pay(runs[0].tenant, runs, shares)
        return self._popped(runs, expired, limits, space)

    def pop_run(self, limits: BatchLimits, shares: Shares = EQUAL_SHARES) -> PoppedBatch:
        """As `pop_batch`, but of the first run only, each of whose requests is a batch by itself. Only one if
        several tenants take turns: the next turn may be in another lane."""
        rank, queue = next((rank, queue) for rank, queue in self._queues.items() if queue)
        if len(self._turns[rank].of) > 1:
            limits = limits._replace(size=1)
        space = BatchSpace(limits)
        run = queue.pop(space, shares)
        assert run is not None  # the first request fits in any case
        return self._popped([run], int(rank == EXPIRED_RANK), limits, space)

    def _popped(self, runs: list[Run], expired: int, limits: BatchLimits, space: BatchSpace) -> PoppedBatch:
        """These runs were removed, and took what `space` lacks of the limits."""
        self.count -= limits.size - space.size
        self.cost -= limits.cost - space.cost
        self.bytes -= limits.bytes - space.bytes
        if self.doubtful:
            self.doubtful -= limits.size - space.size - executable_size(runs)
        if self.urgent:
            self.urgent.difference_update(runs)
        for run in runs:
            run.waits_in = None
        self._front = None
        return PoppedBatch(runs, expired)

    def _count_removed(self, run: Run, size_bytes: int) -> None:
        count = len(run.correlation_ids)
        self.count -= count
        if run.is_doubtful:
            self.doubtful -= count
        self.cost -= count * run.cost
        self.bytes -= size_bytes

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def executable(self) -> int:
        """The number of requests that the model is expected to execute."""
        return self.count - self.doubtful

    def has_full_batch(self, limits: BatchLimits) -> bool:
        """Whether its next batch could not grow by waiting."""
        return self.count >= limits.size or self.cost >= limits.cost or self.bytes >= limits.bytes

    def in_order(self, shares: Shares) -> Iterator[RunPart]:
        """All requests, in the order in which `pop_batch` would return them."""
        return chain.from_iterable(queue.in_order(shares) for queue in self._queues.values())

    def peek_batch(self, limits: BatchLimits, shares: Shares) -> list[RunPart]:
        """The requests that `pop_batch` would return, without removing them."""
        space = BatchSpace(limits)
        parts: list[RunPart] = []
        for run, start, count in self.in_order(shares):
            fitting = space.add(run, start, count)
            if fitting:
                parts.append(RunPart(run, start, fitting))
            if fitting < count:
                break
        return parts

    def earliest_due_us(self, target_us: int | None) -> int:
        """The earliest due time of the requests that have not expired; NEVER_US if none is ever due.

        A request is due at its deadline, or else `target_us` after its arrival. O(1) where later arrivals are
        due later; O(n) on the first call, and with another `target_us` than in the last one.
        """
        if self._due_index is None or self._due_index.target_us != target_us:
            self._due_index = DueIndex(target_us, self)
        return self._due_index.earliest_us(self._is_in_time)

    def _is_in_time(self, run: Run) -> bool:
        return run.waits_in is self and not run.is_late

    def front(self) -> tuple[int, int]:
        """The highest rank, and the oldest arrival. The lane must not be empty.

        The arrival of an expired request counts only where all requests have expired.
        """
        if self._front is None:
            ranks = [rank for rank, queue in self._queues.items() if queue]
            in_time = [rank for rank in ranks if rank != EXPIRED_RANK] or ranks
            self._front = ranks[0], min(self._queues[rank].oldest_arrival_us() for rank in in_time)
        return self._front

    def by_tenant(self) -> Iterator[tuple[int, str, ArrivalOrder]]:
        """The waiting runs of each rank and tenant, to be read only."""
        for rank, queue in self._queues.items():
            for tenant, runs in queue.by_tenant():
                yield rank, tenant, runs

    def has_changed_fronts(self) -> bool:
        """Whether `fronts` has any that changed."""
        for queue in self._queues.values():  # noqa: SIM110 (faster than `any`)
            if queue.changed_fronts:
                return True
        return False

    def fronts(self, *, changed: bool) -> Iterator[tuple[int, str, int]]:
        """Each rank and tenant with requests here, and the arrival of the oldest of these; with `changed`,
        only those that changed since the last call. O(their number)."""
        for rank, queue in self._queues.items():
            for tenant, arrival_us in queue.fronts(changed=changed):
                yield rank, tenant, arrival_us

    def is_front(self, rank: int, tenant: str, arrival_us: int) -> bool:
        """Whether a tenant's oldest request of a rank arrived at this time."""
        queue = self._queues.get(rank)
        return queue is not None and queue.first_arrival_us(tenant) == arrival_us


def _rank(run: Run) -> int:
    return EXPIRED_RANK if run.is_late else 1 + run.priority
