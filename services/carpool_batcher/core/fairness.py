"""Fair sharing between tenants: a queue that serves them in turns, by cost and weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), in virtual time: a tenant's next request starts when
its previous one ended, or now if the tenant had none waiting. It lasts its cost divided by the tenant's
weight. The request that starts first is served first. So a flood of requests delays only the tenant that
sends it, and a tenant that is alone gets everything.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain, count
from types import MappingProxyType
from typing import Final, NamedTuple

from carpool.messages import Request

NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})
TENANTS_KEPT_MIN: Final = 16  # turns are kept for this many tenants, plus twice those that wait


class Turn(NamedTuple):
    """When a tenant's next request starts, in virtual time. Ties go to the turn that was assigned first."""

    start: float
    number: int
    tenant: str


class FairQueue:
    """Waiting requests, in the order of arrival within a tenant and in turns between tenants.

    O(1) while one tenant waits; O(log of the waiting tenants) with more.
    """

    __slots__ = ("_next_turn", "_now", "_numbers", "_requests", "_turns")

    def __init__(self) -> None:
        # By tenant. An OrderedDict and not a deque: expired and withdrawn requests are removed anywhere.
        self._requests: dict[str, OrderedDict[Request, None]] = {}
        self._next_turn: dict[str, Turn] = {}
        self._turns: list[Turn] = []  # a heap of the next turns; outdated ones in it are skipped
        self._numbers = count()
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request: Request) -> bool:
        requests = self._requests.get(request.tenant)
        return requests is not None and request in requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._requests.values())

    def insert(self, request: Request) -> None:
        """Append a request; one that was put back under a later entry ID is inserted by its arrival."""
        requests = self._requests.get(request.tenant)
        if requests is None:
            requests = self._requests[request.tenant] = OrderedDict()
            turn = self._next_turn.get(request.tenant)
            self._set_turn(request.tenant, self._now if turn is None else max(self._now, turn.start))
        if requests and next(reversed(requests)).arrival_us > request.arrival_us:
            later = [other for other in requests if other.arrival_us > request.arrival_us]
            requests[request] = None
            for other in later:
                requests.move_to_end(other)
        else:
            requests[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request from any position. This does not use up a turn of its tenant."""
        requests = self._requests[request.tenant]
        del requests[request]
        if not requests:
            self._remove_tenant(request.tenant)

    def first(self) -> Request:
        """The request that is served next. The queue must not be empty."""
        return next(iter(self._requests[self._next_tenant()]))

    def pop(self, weights: Mapping[str, float]) -> Request:
        """Remove and return the request that is served next. The queue must not be empty."""
        tenant = self._next_tenant()
        requests = self._requests[tenant]
        request, _ = requests.popitem(last=False)
        if len(self._next_turn) > 1:
            start = self._next_turn[tenant].start
            self._now = max(self._now, start)
            self._set_turn(tenant, start + _duration(request, weights))
        if not requests:
            self._remove_tenant(tenant)
        return request

    def in_order(self, weights: Mapping[str, float]) -> Iterator[Request]:
        """All requests, in the order in which `pop` would return them."""
        if len(self._requests) < 2:
            yield from self
            return
        numbers = count()
        turns = [turn._replace(number=next(numbers)) for turn in sorted(self._waiting_turns())]
        requests = {tenant: iter(of_tenant) for tenant, of_tenant in self._requests.items()}
        while turns:  # sorted, and so a heap
            start, _, tenant = turns[0]
            request = next(requests[tenant], None)
            if request is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, Turn(start + _duration(request, weights), next(numbers), tenant))
                yield request

    def oldest_arrival_us(self) -> int:
        """The arrival of the oldest request. The queue must not be empty. O(waiting tenants)."""
        return min(next(iter(requests)).arrival_us for requests in self._requests.values())

    def _next_tenant(self) -> str:
        if len(self._requests) == 1:
            return next(iter(self._requests))
        turns = self._turns
        while turns[0].tenant not in self._requests or turns[0] is not self._next_turn[turns[0].tenant]:
            heapq.heappop(turns)
        return turns[0].tenant

    def _waiting_turns(self) -> list[Turn]:
        return [self._next_turn[tenant] for tenant in self._requests]

    def _set_turn(self, tenant: str, start: float) -> None:
        turn = self._next_turn[tenant] = Turn(start, next(self._numbers), tenant)
        if len(self._turns) > 2 * len(self._requests) + TENANTS_KEPT_MIN:
            self._turns = sorted(self._waiting_turns())
        else:
            heapq.heappush(self._turns, turn)

    def _remove_tenant(self, tenant: str) -> None:
        """A tenant has no more waiting requests. Its next turn is kept while other tenants wait: otherwise it
        could get more than its share by coming and going."""
        del self._requests[tenant]
        if not self._requests:
            self._next_turn.clear()
            self._turns.clear()
            self._now = 0.0
        elif len(self._next_turn) > 2 * len(self._requests) + TENANTS_KEPT_MIN:
            self._forget_idle_tenants()

    def _forget_idle_tenants(self) -> None:
        """Forget the turns of half of the tenants that have no waiting request: producers may use a new name
        for each request. New tenants then start after the forgotten turns, or an endless row of new names
        would starve the tenants that wait."""
        idle = sorted(turn for tenant, turn in self._next_turn.items() if tenant not in self._requests)
        forgotten = idle[: 1 + len(idle) // 2]
        for turn in forgotten:
            del self._next_turn[turn.tenant]
        self._now = max(self._now, forgotten[-1].start)


def _duration(request: Request, weights: Mapping[str, float]) -> float:
    """How long a request's turn lasts, in virtual time. A request that costs nothing counts as cost 1."""
    return max(request.cost, 1) / weights.get(request.tenant, 1.0)
