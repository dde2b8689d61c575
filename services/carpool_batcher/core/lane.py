"""The waiting requests of one lane: higher priorities first, tenants in fair turns within a priority.

Requests that expired, and are served all the same (`expiration_action` is delay), come behind all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

from carpool.messages import PRIORITY_LEVELS, Request
from carpool_batcher.core.due_index import DueIndex
from carpool_batcher.core.fairness import NO_WEIGHTS, FairQueue

EXPIRED_RANK: Final = 0  # a request's rank is 1 + its priority, or this
DUE_INDEX_SIZE_MIN: Final = 64


class Lane:
    """Requests that may share a batch. With one tenant, adding, removing or taking a request is O(1), except
    `insert` of one that was put back; `core.fairness` has the cost with more tenants.

    `urgent`: requests that must be dispatched now to meet their deadlines. `expired`: see the module.
    The Queue inserts and removes; `core.deadlines` adds to `urgent`, and calls `move_expired`.
    """

    __slots__ = (
        "_due_index",
        "_head",
        "_ranks",
        "bytes",
        "cost",
        "count",
        "expired",
        "name",
        "urgent",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.cost = 0
        self.bytes = 0
        self.urgent: set[Request] = set()
        self.expired: set[Request] = set()
        self._ranks = [FairQueue() for _ in range(1 + PRIORITY_LEVELS)]
        self._due_index: DueIndex | None = None  # built when it is first asked for
        self._head: tuple[int, int] | None = None  # cached: a producer may use a new lane for each request

    def __contains__(self, request: Request) -> bool:
        return request in self._ranks[self._rank(request)]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._ranks)

    def _rank(self, request: Request) -> int:
        return EXPIRED_RANK if request in self.expired else 1 + request.priority

    # --- changing ------------------------------------------------------------------------------------------

    def insert(self, request: Request) -> None:
        """Add a waiting request."""
        rank = self._rank(request)
        self._ranks[rank].insert(request)
        if self._due_index is not None:
            self._due_index.insert(request)
            if len(self._due_index) > 2 * self.count + DUE_INDEX_SIZE_MIN:
                self._due_index = None  # most requests in it no longer wait; perhaps the policy changed
        head = self._head
        if not self.count:
            self._head = rank, request.arrival_us
        elif head is not None and EXPIRED_RANK in (rank, head[0]):
            self._head = None
        elif head is not None and (rank > head[0] or request.arrival_us < head[1]):
            self._head = max(head[0], rank), min(head[1], request.arrival_us)
        self.count += 1
        self.cost += request.cost
        self.bytes += bytes_of(request)

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        self._ranks[self._rank(request)].remove(request)
        self.count -= 1
        self.cost -= request.cost
        self.bytes -= bytes_of(request)
        self.urgent.discard(request)
        self.expired.discard(request)
        self._head = None

    def move_expired(self, request: Request) -> None:
        """A request expired: move it behind all others."""
        self.remove(request)
        self.expired.add(request)
        self.insert(request)

    def pop_batch(
        self,
        max_size: int,
        max_cost: int | None,
        max_bytes: int,
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> list[Request]:
        """Remove and return the next batch: in order, up to the first request that would exceed a limit, and
        at least one."""
        batch: list[Request] = []
        cost = size_bytes = 0
        for queue in reversed(self._ranks):
            while queue:
                request = queue.first()
                next_cost, next_bytes = cost + request.cost, size_bytes + bytes_of(request)
                is_over = (max_cost is not None and next_cost > max_cost) or next_bytes > max_bytes
                if batch and (is_over or len(batch) == max_size):
                    break
                batch.append(queue.pop(weights))
                cost, size_bytes = next_cost, next_bytes
            if queue:
                break
        self.count -= len(batch)
        self.cost -= cost
        self.bytes -= size_bytes
        if self.urgent:
            self.urgent.difference_update(batch)
        if self.expired:
            self.expired.difference_update(batch)
        self._head = None
        return batch

    # --- reading -------------------------------------------------------------------------------------------

    def in_order(self, weights: Mapping[str, float]) -> Iterator[Request]:
        """All requests, in the order in which `pop_batch` would return them."""
        return chain.from_iterable(queue.in_order(weights) for queue in reversed(self._ranks))

    def peek_batch(
        self, max_size: int, max_cost: int | None, max_bytes: int, weights: Mapping[str, float]
    ) -> list[Request]:
        """The requests that `pop_batch` would return, without removing them."""
        batch: list[Request] = []
        cost = size_bytes = 0
        for request in self.in_order(weights):
            cost, size_bytes = cost + request.cost, size_bytes + bytes_of(request)
            is_over = (max_cost is not None and cost > max_cost) or size_bytes > max_bytes
            if batch and (is_over or len(batch) == max_size):
                break
            batch.append(request)
        return batch

    def earliest_due_us(self, target_us: int | None) -> int:
        """The earliest due time of the requests that have not expired; NEVER_US if none is ever due.

        A request is due at its deadline, or else `target_us` after its arrival. O(1) where later arrivals are
        due later; O(n) on the first call, and with another `target_us` than in the last one.
        """
        if self._due_index is None or self._due_index.target_us != target_us:
            self._due_index = DueIndex(target_us, self)
        return self._due_index.earliest_us(self._is_in_time)

    def _is_in_time(self, request: Request) -> bool:
        return request in self and request not in self.expired

    def head(self) -> tuple[int, int]:
        """The highest rank, and the oldest arrival. The lane must not be empty.

        The arrival of an expired request counts only where all requests have expired.
        """
        if self._head is None:
            ranks = [rank for rank, queue in enumerate(self._ranks) if queue]
            in_time = [rank for rank in ranks if rank != EXPIRED_RANK] or ranks
            self._head = ranks[-1], min(self._ranks[rank].oldest_arrival_us() for rank in in_time)
        return self._head


def bytes_of(request: Request) -> int:
    """The bytes of a request that count against limits: its body, and the fields for the model."""
    if request.extra is None:
        return len(request.body)
    return len(request.body) + sum(len(name) + len(value) for name, value in request.extra.items())
