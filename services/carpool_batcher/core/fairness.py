"""Fair sharing between tenants: a queue that serves them in turns, by cost and weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), in virtual time: a tenant's next request starts when
its previous one ended, or now if the tenant had none waiting. It lasts its cost divided by the tenant's
weight. The request that starts first is served first. So a flood of requests delays only the tenant that
sends it, and a tenant that is alone gets everything.

Requests wait in runs. How many requests of a run are served before another tenant's turn is calculated, with
the outcome of turns for each request. For that, virtual time is in integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import chain, count
from types import MappingProxyType
from typing import Final, NamedTuple

from carpool.messages import Run
from carpool_batcher.core.arrival_order import ArrivalOrder
from carpool_batcher.core.batch_space import BatchSpace

NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})
COST_DURATION: Final = 1 << 32  # of one unit of cost with weight 1, in virtual time
TENANTS_KEPT_MIN: Final = 16  # turns are kept for this many tenants, plus twice those that wait


class Slice(NamedTuple):
    """`size` requests of a waiting run, from its request `start`."""

    run: Run
    start: int
    size: int


class Turn(NamedTuple):
    """When a tenant's next request starts, in virtual time. Ties go to the turn that was assigned first."""

    start: int
    number: int
    tenant: str


class FairQueue:
    """Waiting runs, in the order of arrival within a tenant and in turns between tenants.

    O(1) while one tenant waits; O(log of the waiting tenants) for each turn with more. O(log of the waiting
    runs) for those that are not inserted in the order of arrival (`core.arrival_order`).
    """

    __slots__ = ("_next_turn", "_now", "_numbers", "_runs", "_turns")

    def __init__(self) -> None:
        self._runs: dict[str, ArrivalOrder] = {}  # by tenant
        self._next_turn: dict[str, Turn] = {}
        self._turns: list[Turn] = []  # a heap of the next turns; outdated ones in it are skipped
        self._numbers = count()
        self._now = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __contains__(self, run: Run) -> bool:
        runs = self._runs.get(run.tenant)
        return runs is not None and run in runs

    def __iter__(self) -> Iterator[Run]:
        return chain.from_iterable(self._runs.values())

    def insert(self, run: Run) -> None:
        """Add a run, behind those of its tenant that arrived before it."""
        runs = self._runs.get(run.tenant)
        if runs is None:
            runs = self._runs[run.tenant] = ArrivalOrder()
            turn = self._next_turn.get(run.tenant)
            self._set_turn(run.tenant, self._now if turn is None else max(self._now, turn.start))
        runs.insert(run)

    def remove(self, run: Run) -> None:
        """Remove a run from any position. This does not use up a turn of its tenant."""
        if not self._runs[run.tenant].remove(run):
            self._remove_tenant(run.tenant)

    def pop(self, space: BatchSpace, weights: Mapping[str, float]) -> Run | None:
        """Remove the requests of one run that are served next, as many as fit into a batch. Returns them as
        a run; None if none fits. The queue must not be empty."""
        tenant = self._next_tenant()
        runs = self._runs[tenant]
        run = runs.first()
        waiting = len(run.correlation_ids)
        size = waiting
        if waiting > 1 and len(self._runs) > 1:
            next_turn = self._next_turn[tenant]
            size = min(waiting, _in_one_turn(next_turn, self._second_turn(), _duration(run, weights)))
        size = space.add(run, 0, size)
        if not size:
            return None
        if len(self._next_turn) > 1:
            start, duration = self._next_turn[tenant].start, _duration(run, weights)
            self._now = max(self._now, start + (size - 1) * duration)
            self._set_turn(tenant, start + size * duration)
        if size < waiting:
            return run.cut(size)
        if not runs.remove(run):
            self._remove_tenant(tenant)
        return run

    def in_order(self, weights: Mapping[str, float]) -> Iterator[Slice]:
        """All requests, in the order in which `pop` would return them."""
        if len(self._runs) < 2:
            for run in self:
                yield Slice(run, 0, len(run))
            return
        numbers = count()
        turns = [turn._replace(number=next(numbers)) for turn in sorted(self._waiting_turns())]
        runs = {tenant: iter(of_tenant) for tenant, of_tenant in self._runs.items()}
        rests: dict[str, Slice] = {}  # what is left of a run that was served in part
        while turns:  # sorted, and so a heap
            turn = turns[0]
            rest = rests.pop(turn.tenant, None)
            if rest is None and (next_run := next(runs[turn.tenant], None)) is not None:
                rest = Slice(next_run, 0, len(next_run))
            if rest is None:
                heapq.heappop(turns)
                continue
            served, duration = rest.size, _duration(rest.run, weights)
            if len(turns) > 1:
                served = min(served, _in_one_turn(turn, min(turns[1:3]), duration))
            next_turn = Turn(turn.start + served * duration, next(numbers), turn.tenant)
            heapq.heapreplace(turns, next_turn)
            if served < rest.size:
                rests[turn.tenant] = Slice(rest.run, rest.start + served, rest.size - served)
            yield rest._replace(size=served)

    def oldest_arrival_us(self) -> int:
        """The arrival of the oldest request. The queue must not be empty. O(waiting tenants)."""
        return min(runs.first().arrival_us for runs in self._runs.values())

    def _next_tenant(self) -> str:
        if len(self._runs) == 1:
            return next(iter(self._runs))
        turns = self._turns
        while not self._is_valid(turns[0]):
            heapq.heappop(turns)
        return turns[0].tenant

    def _second_turn(self) -> Turn:
        """The turn after the next one. At least two tenants must be waiting."""
        turns = self._turns
        first = heapq.heappop(turns)
        while not self._is_valid(turns[0]):
            heapq.heappop(turns)
        second = turns[0]
        heapq.heappush(turns, first)
        return second

    def _is_valid(self, turn: Turn) -> bool:
        return turn.tenant in self._runs and turn is self._next_turn[turn.tenant]

    def _waiting_turns(self) -> list[Turn]:
        return [self._next_turn[tenant] for tenant in self._runs]

    def _set_turn(self, tenant: str, start: int) -> None:
        turn = self._next_turn[tenant] = Turn(start, next(self._numbers), tenant)
        if len(self._turns) > 2 * len(self._runs) + TENANTS_KEPT_MIN:
            self._turns = sorted(self._waiting_turns())
        else:
            heapq.heappush(self._turns, turn)

    def _remove_tenant(self, tenant: str) -> None:
        """A tenant has no more waiting requests. Its next turn is kept while other tenants wait: otherwise it
        could get more than its share by coming and going."""
        del self._runs[tenant]
        if not self._runs:
            self._next_turn.clear()
            self._turns.clear()
            self._now = 0
        elif len(self._next_turn) > 2 * len(self._runs) + TENANTS_KEPT_MIN:
            self._forget_idle_tenants()

    def _forget_idle_tenants(self) -> None:
        """Forget the turns of half of the tenants that have no waiting request: producers may use a new name
        for each request. New tenants then start after the forgotten turns, or an endless row of new names
        would starve the tenants that wait."""
        idle = sorted(turn for tenant, turn in self._next_turn.items() if tenant not in self._runs)
        forgotten = idle[: 1 + len(idle) // 2]
        for turn in forgotten:
            del self._next_turn[turn.tenant]
        self._now = max(self._now, forgotten[-1].start)


def _in_one_turn(turn: Turn, next_turn: Turn, duration: int) -> int:
    """How many requests that last `duration` each are served from `turn` on, before the turn of the other
    tenant that comes next: those that start before it, and the first one in any case."""
    return max(1, -(-(next_turn.start - turn.start) // duration))


def _duration(run: Run, weights: Mapping[str, float]) -> int:
    """How long the turn of a request of a run lasts, in virtual time. One that costs nothing counts as cost
    1."""
    return max(1, round(max(run.cost, 1) * COST_DURATION / weights.get(run.tenant, 1.0)))
