"""Fair sharing between tenants: a queue that serves them in turns, by cost and weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), in virtual time: a tenant's next request starts when
its previous one ended, or now if the tenant had none waiting. It lasts its cost divided by the tenant's
weight. The request that starts first is served first. So a flood of requests delays only the tenant that
sends it, and a tenant that is alone gets everything.

The turns of a tenant are counted over all lanes of the model (`Turns`): in which lanes its requests wait
makes no difference to its share. Each lane has a queue (`FairQueue`), and looks there. Where a lane was
chosen before others, the tenant whose turn it was pays for the whole batch. Otherwise a tenant with a request
now and then would be the reason to dispatch batch after batch of those that share its lane.

Virtual time now, at which new tenants start, is at least the start of the last turn for which a lane was
chosen. It also advances with all that is served, divided by the tenants that wait and one more. Otherwise an
endless row of new names, which all start now, would never let a tenant have its second turn. A tenant whose
lanes could not be served for a while gets no credit for it: its turns count from that last turn on.

Requests wait in runs. How many requests of a run are served before another tenant's turn is calculated, with
the outcome of turns for each request. For that, virtual time is in integers.

Why: docs/decisions/0016.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import Final, NamedTuple

from carpool.messages.requests import Run
from carpool_batcher.core.applied_settings import Shares
from carpool_batcher.core.waiting.arrival_order import ArrivalOrder, ascending
from carpool_batcher.core.waiting.batch_space import BatchSpace

COST_DURATION: Final = 1 << 32  # of one unit of cost with weight 1, in virtual time
TENANTS_KEPT_MIN: Final = 16  # turns are kept for this many tenants, plus twice those that wait


class RunPart(NamedTuple):
    """`size` requests of a waiting run, from its request `start`."""

    run: Run
    start: int
    size: int


class Turn(NamedTuple):
    """When a tenant's next request starts, in virtual time. Ties go to the turn that was assigned first."""

    start: int
    number: int
    tenant: str


class Turns:
    """The next turn of each tenant with requests of one rank, over all lanes of a model.

    The start of a tenant's turn never falls. O(1), or O(log of the tenants) where some do not wait any more.
    `of` has the turns by tenant, of those that wait, and of others that were served in advance: while it has
    only one, nothing is counted. `floor`: when the last turn for which a lane was chosen started. `queues`:
    how many lanes have such requests.
    """

    __slots__ = ("_idle", "_lanes", "_now", "floor", "number", "of", "queues")

    def __init__(self) -> None:
        self.floor = 0
        self.number = 0  # of the turn that was assigned last
        self.queues = 0
        self.of: dict[str, Turn] = {}
        self._lanes: dict[str, int] = {}  # in how many lanes each tenant waits
        self._idle: list[Turn] = []  # a heap of those that do not wait; outdated ones in it are skipped
        self._now = 0

    def enter(self, tenant: str) -> None:
        """A tenant begins to wait in one more lane."""
        lanes = self._lanes.get(tenant, 0)
        if not lanes:
            turn = self.of.get(tenant)
            if not self._lanes and turn is None:
                self.of.clear()
            if self._lanes or turn is None:
                self._set(tenant, self._now if turn is None else max(self._now, turn.start))
        self._lanes[tenant] = lanes + 1

    def leave(self, tenant: str) -> None:
        """A tenant waits in one lane less. If it waits in none, its turn is kept until it would start now:
        otherwise it could get more than its share by coming and going."""
        lanes = self._lanes[tenant] - 1
        if lanes:
            self._lanes[tenant] = lanes
            return
        del self._lanes[tenant]
        if not self._lanes:
            if len(self.of) > 1:
                self._now = max(self._now, max(self.of.values()).start)
                self.of.clear()
                self._idle.clear()
            return
        heapq.heappush(self._idle, self.of[tenant])
        self._forget_idle()
        if len(self.of) > 2 * len(self._lanes) + TENANTS_KEPT_MIN:
            # Producers may use a new name for each request. New tenants must not start before the forgotten
            # turns, or an endless row of new names would starve the tenants that wait.
            self._now = max(self._now, self._idle[0].start)
            self._forget_idle()

    def serve(self, tenant: str, size: int, duration: int, *, is_first: bool) -> None:
        """Requests of a tenant, each of which lasts `duration`, are served. `is_first`: the lane was chosen
        for them; they are not what else fits into the batch."""
        if is_first:
            self.floor = max(self.floor, self.of[tenant].start)
        each = duration // (1 + len(self._lanes))  # the same for one run and for single requests
        while size:
            together = self._until_forgotten(size, each)
            self._now = max(self._now, self.floor) + together * each
            self._set(tenant, max(self.of[tenant].start, self.floor) + together * duration)
            if self._idle and self._idle[0].start <= self._now:
                self._forget_idle()
            size -= together
            if len(self.of) < 2:  # nothing is counted any more
                break

    def _until_forgotten(self, size: int, each: int) -> int:
        """How many of these requests are served until the next tenant may be forgotten. `each`: by how much
        virtual time advances with one."""
        if size == 1 or not self._idle or not each:
            return size
        left = self._idle[0].start - max(self._now, self.floor)
        return min(size, max(1, -(-left // each)))

    def pay(self, tenant: str, duration: int) -> None:
        """A tenant that was served pays for requests of others, too. It may not wait any more."""
        turn = self.of.get(tenant)
        if turn is not None:
            self._set(tenant, turn.start + duration)
            if tenant not in self._lanes:
                heapq.heappush(self._idle, self.of[tenant])

    def _set(self, tenant: str, start: int) -> None:
        self.number += 1
        self.of[tenant] = Turn(start, self.number, tenant)

    def _forget_idle(self) -> None:
        """Forget tenants that do not wait, and would start now if they did."""
        idle = self._idle
        while idle and (idle[0].start <= self._now or self.of.get(idle[0].tenant) is not idle[0]):
            turn = heapq.heappop(idle)
            if turn.tenant not in self._lanes and self.of.get(turn.tenant) is turn:
                del self.of[turn.tenant]
        if len(idle) > 2 * len(self.of) + TENANTS_KEPT_MIN:
            self._idle = [turn for turn in idle if self.of.get(turn.tenant) is turn]
            heapq.heapify(self._idle)


TurnsByRank = defaultdict[int, Turns]


class FairQueue:
    """The waiting runs of one rank in one lane, in the order of arrival within a tenant and in turns between
    tenants.

    O(1) while one tenant waits; O(log of the waiting tenants) for each turn with more, and once more for each
    turn that a tenant had in another lane meanwhile. O(log of the waiting runs) for those that are not
    inserted in the order of arrival (`waiting.arrival_order`).
    """

    __slots__ = ("_changed", "_oldest", "_queued", "_runs", "_turns", "_turns_here", "changed_fronts")

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = Turns() if turns is None else turns
        self._runs: dict[str, ArrivalOrder] = {}  # by tenant
        self.changed_fronts: set[str] = set()  # tenants whose first run changed since the last `fronts`
        # While several tenants wait here:
        self._turns_here: list[Turn] = []  # a heap of their turns when last looked at; outdated are skipped
        self._queued: dict[str, Turn] = {}  # the current item of each tenant in the heap
        self._oldest: list[tuple[int, str]] = []  # a heap of arrivals of first runs; outdated are skipped
        self._changed: set[str] = set()  # tenants of whose first runs it does not know

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return chain.from_iterable(self._runs.values())

    def insert(self, run: Run) -> None:
        """Add a run, behind those of its tenant that arrived before it."""
        tenant = run.tenant
        runs = self._runs.get(tenant)
        if runs is None:
            runs = self._runs[tenant] = ArrivalOrder()
            self._turns.enter(tenant)
            if len(self._runs) == 1:
                self._turns.queues += 1
            elif len(self._runs) == 2:
                for one in self._runs:
                    self._queue_turn(one)
                self._changed.update(self._runs)
            else:
                self._queue_turn(tenant)
        if runs.insert(run):
            self._front_changed(tenant)

    def remove(self, run: Run) -> None:
        """Remove a run from any position. This does not use up a turn of its tenant."""
        if self._runs[run.tenant].remove(run):
            self._front_changed(run.tenant)
        else:
            self._remove_tenant(run.tenant)

    def pop(self, space: BatchSpace, shares: Shares) -> Run | None:
        """Remove the requests of one run that are served next, as many as fit into a batch. Returns them as
        a run; None if none fits. The queue must not be empty."""
        turns, is_shared = self._turns, len(self._runs) > 1
        tenant = self._first().tenant if is_shared else next(iter(self._runs))
        runs = self._runs[tenant]
        run = runs.first()
        waiting = len(run.correlation_ids)
        size = waiting
        if waiting > 1 and is_shared:
            start = max(turns.of[tenant].start, turns.floor)
            size = min(waiting, _in_one_turn(start, self._second().start, _duration(run, shares)))
        is_counted = len(turns.of) > 1
        is_first = is_counted and space.is_empty
        size = space.add(run, 0, size)
        if not size:
            return None
        if is_counted:
            turns.serve(tenant, size, _duration(run, shares), is_first=is_first)
            if is_shared:
                self._queued[tenant] = turn = turns.of[tenant]
                heapq.heapreplace(self._turns_here, turn)  # its previous turn is still the first one
        if size < waiting:
            return run.cut(size)
        if runs.remove(run):
            self.changed_fronts.add(tenant)
            if is_shared:
                self._changed.add(tenant)
        else:
            self._remove_tenant(tenant)
        return run

    def pay(self, tenant: str, runs: Iterable[Run], shares: Shares) -> None:
        """The tenant for which a batch of these runs was dispatched pays for those of others."""
        others = sum(_counted(run, shares) * len(run.correlation_ids) for run in runs if run.tenant != tenant)
        if others:
            self._turns.pay(tenant, _to_duration(others, tenant, shares))

    @property
    def is_chosen_before_others(self) -> bool:
        """Whether several tenants wait for turns, and several lanes."""
        return self._turns.queues > 1 and len(self._turns.of) > 1

    def in_order(self, shares: Shares) -> Iterator[RunPart]:
        """All requests, in the order in which `pop` would return them. O(log of the waiting tenants) for
        each. The queue must not change meanwhile."""
        if len(self._runs) < 2:
            for run in self:
                yield RunPart(run, 0, len(run))
            return
        numbers = count(self._turns.number + 1)
        later = (turn for turn in ascending(self._turns_here) if self._queued.get(turn.tenant) is turn)
        next_later = next(later, None)  # the tenant does not start before that, but perhaps after it
        turns: list[Turn] = []  # a heap
        runs: dict[str, Iterator[Run]] = {}
        rests: dict[str, RunPart] = {}  # what is left of a run that was served in part
        while turns or next_later is not None:
            while next_later is not None and (len(turns) < 2 or next_later < min(turns[1:3])):
                heapq.heappush(turns, self._turns.of[next_later.tenant])
                runs[next_later.tenant] = iter(self._runs[next_later.tenant])
                next_later = next(later, None)
            turn = turns[0]
            rest = rests.pop(turn.tenant, None)
            if rest is None and (next_run := next(runs[turn.tenant], None)) is not None:
                rest = RunPart(next_run, 0, len(next_run))
            if rest is None:
                heapq.heappop(turns)
                continue
            served, duration = rest.size, _duration(rest.run, shares)
            start = max(turn.start, self._turns.floor)
            if len(turns) > 1:
                served = min(served, _in_one_turn(start, min(turns[1:3]).start, duration))
            heapq.heapreplace(turns, Turn(start + served * duration, next(numbers), turn.tenant))
            if served < rest.size:
                rests[turn.tenant] = RunPart(rest.run, rest.start + served, rest.size - served)
            yield rest._replace(size=served)

    def oldest_arrival_us(self) -> int:
        """The arrival of the oldest request. The queue must not be empty. O(log tenants) amortised."""
        if len(self._runs) == 1:
            return next(iter(self._runs.values())).first().arrival_us
        oldest = self._oldest
        for tenant in self._changed:
            heapq.heappush(oldest, (self._runs[tenant].first().arrival_us, tenant))
        self._changed.clear()
        if len(oldest) > 2 * len(self._runs) + TENANTS_KEPT_MIN:
            oldest = self._oldest = [(runs.first().arrival_us, one) for one, runs in self._runs.items()]
            heapq.heapify(oldest)
        while self.first_arrival_us(oldest[0][1]) != oldest[0][0]:
            heapq.heappop(oldest)
        return oldest[0][0]

    def first_arrival_us(self, tenant: str) -> int | None:
        """The arrival of the oldest request of a tenant; None if it has none here."""
        runs = self._runs.get(tenant)
        return None if runs is None else runs.first().arrival_us

    def by_tenant(self) -> Iterator[tuple[str, ArrivalOrder]]:
        """The waiting runs of each tenant, to be read only."""
        return iter(self._runs.items())

    def fronts(self, *, changed: bool) -> list[tuple[str, int]]:
        """The tenants that wait here, and the arrival of the oldest request of each; with `changed`, only of
        those whose first run changed since the last call."""
        runs, tenants = self._runs, self.changed_fronts if changed else self._runs
        fronts = [(tenant, runs[tenant].first().arrival_us) for tenant in tenants]
        self.changed_fronts.clear()
        return fronts

    def _front_changed(self, tenant: str) -> None:
        self.changed_fronts.add(tenant)
        if len(self._runs) > 1:
            self._changed.add(tenant)

    def _first(self) -> Turn:
        """The next turn. At least two tenants must be waiting."""
        turns, queued = self._turns_here, self._queued
        while True:
            turn = turns[0]
            if queued.get(turn.tenant) is not turn:
                heapq.heappop(turns)
                continue
            current = self._turns.of[turn.tenant]
            if current == turn:
                return turn
            queued[turn.tenant] = current  # it had a turn in another lane
            heapq.heapreplace(turns, current)

    def _second(self) -> Turn:
        """The turn after the next one, which must be at the top of the heap."""
        first = heapq.heappop(self._turns_here)
        second = self._first()
        heapq.heappush(self._turns_here, first)
        return second

    def _queue_turn(self, tenant: str) -> None:
        turn = self._queued[tenant] = Turn._make(self._turns.of[tenant])  # not the same object as before
        if len(self._turns_here) > 2 * len(self._runs) + TENANTS_KEPT_MIN:
            self._turns_here = list(self._queued.values())
            heapq.heapify(self._turns_here)
        else:
            heapq.heappush(self._turns_here, turn)

    def _remove_tenant(self, tenant: str) -> None:
        """A tenant has no more waiting requests here."""
        del self._runs[tenant]
        self._turns.leave(tenant)
        self.changed_fronts.discard(tenant)
        if not self._runs:
            self._turns.queues -= 1
            return
        self._changed.discard(tenant)
        del self._queued[tenant]
        if len(self._runs) == 1:
            self._turns_here.clear()
            self._queued.clear()
            self._oldest.clear()
            self._changed.clear()
            self._runs = dict(self._runs)  # to iterate over it is slow while it has gaps


def _in_one_turn(start: int, next_start: int, duration: int) -> int:
    """How many requests that last `duration` each are served from `start` on, before the turn of the other
    tenant that comes next: those that start before it, and the first one in any case."""
    return max(1, -(-(next_start - start) // duration))


def _duration(run: Run, shares: Shares) -> int:
    """How long the turn of a request of a run lasts, in virtual time. One that costs nothing counts, too."""
    return _to_duration(_counted(run, shares), run.tenant, shares)


def _counted(run: Run, shares: Shares) -> int:
    return min(max(run.cost, shares.cost_min), shares.cost_max)


def _to_duration(counted: int, tenant: str, shares: Shares) -> int:
    return max(1, round(counted * COST_DURATION / shares.weights.get(tenant, 1.0)))
