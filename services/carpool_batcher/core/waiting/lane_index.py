"""An index of lanes by when they have a batch to dispatch, and which comes first.

For each lane with waiting requests there is one claim. Of the lanes that are ready, those with requests of
the highest rank come first. Of these, the ones in which that tenant waits whose turn is next, over all lanes
(`waiting.fairness`); and of these, the one in which its oldest request waits.

Therefore a lane that is ready is listed for each tenant that waits in it. When a tenant is served anywhere,
only its turn moves, and not its lanes. A change of a lane costs O(log lanes), and O(tenants in it) if it
becomes ready or is to wait for something else; but a lane with more requests than a batch has is full, and
stays so until a batch of it was dispatched. A lane that is the only one is not listed until there is
another one. Then it stays listed: a lane that comes and goes must not be a reason to list it again.

What was replaced stays in the heaps until it is at the top, or until most of a heap is outdated.

Why: docs/decisions/0041.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from carpool.messages.batches import DispatchReason
from carpool_batcher.core.waiting.fairness import Turn, Turns
from carpool_batcher.core.waiting.lane import NEVER_US, Lane

ANY_TIME_US: Final = 0  # `ready_at_us` of a batch that is ready whatever the time
CLAIMS_MIN: Final = 64


class Gate(IntEnum):
    """What a batch that is ready has to wait for."""

    AHEAD = 0  # only until one may be dispatched ahead
    FULL = 1  # until a process is nearly free: it cannot grow meanwhile
    FREE = 2  # until a process is free
    SPACED = 3  # until a process is free, and dispatches are spaced
    BUSY = 4  # until the process that must execute it has no batch, which changes the lane


class Claim(NamedTuple):
    """That a lane, whose oldest request arrived at `arrival_us`, has a batch, ready at `ready_at_us`."""

    lane: str
    arrival_us: int
    reason: DispatchReason
    ready_at_us: int


class _IndexedLane:
    """What is known of a lane. `is_ready`: it is among the lanes that are ready."""

    __slots__ = ("claim", "gate", "is_ready", "lane")

    def __init__(self, gate: Gate, claim: Claim, lane: Lane, *, is_ready: bool) -> None:
        self.gate = gate
        self.claim = claim
        self.lane = lane
        self.is_ready = is_ready


class _ReadyLanes:
    """Lanes that are ready behind one gate, and have requests of one rank, by the tenants that wait there."""

    __slots__ = ("by_tenant", "turns")

    def __init__(self) -> None:
        self.by_tenant: dict[str, list[tuple[int, str]]] = {}  # heaps of arrivals and lanes
        self.turns: list[Turn] = []  # a heap of the turns of these tenants when last looked at


class LaneIndex:
    """The claims of all lanes with waiting requests. `turns` are those of tenants, by rank."""

    def __init__(self, turns: Mapping[int, Turns]) -> None:
        self._turns = turns
        self._lanes: dict[str, _IndexedLane] = {}
        self._ready: list[dict[int, _ReadyLanes]] = []  # for each gate, by rank
        self._later: list[list[tuple[int, Claim]]] = []  # a heap for each gate
        self._oldest: list[tuple[int, str]] = []  # a heap of arrivals and lanes
        self._only: _IndexedLane | None = None  # a lane that is in no heap, because there is no other one
        self._fronts = 0  # in the heaps of all tenants
        self._fronts_max = 0
        self._rebuild()

    def put(self, gate: Gate, claim: Claim, lane: Lane, now_us: int) -> None:
        """Set the claim of a lane."""
        indexed = self._lanes.get(claim.lane)
        only = self._only
        if only is not None:
            if only.lane is lane:
                only.gate, only.claim = gate, claim
                return
            self._list_only(only)
        elif not self._lanes:
            self._only = self._lanes[claim.lane] = _IndexedLane(gate, claim, lane, is_ready=False)
            return
        is_ready = claim.ready_at_us <= now_us
        if indexed is None or indexed.lane is not lane:
            indexed = self._lanes[claim.lane] = _IndexedLane(gate, claim, lane, is_ready=is_ready)
            heapq.heappush(self._oldest, (claim.arrival_us, claim.lane))
            self._push(indexed)
        elif indexed.is_ready and is_ready and indexed.gate is gate:
            self._replace(indexed, claim)
            if lane.has_changed_fronts():
                self._enter(indexed, lane.fronts(changed=True))
        elif indexed.gate is not gate or indexed.claim != claim:
            self._replace(indexed, claim)
            indexed.gate, indexed.is_ready = gate, is_ready
            self._push(indexed)
        if self._fronts > self._fronts_max or len(self._oldest) > 2 * len(self._lanes) + CLAIMS_MIN:
            self._rebuild()

    def remove(self, lane: str) -> None:
        """A lane has no waiting requests any more."""
        indexed = self._lanes.pop(lane, None)
        if indexed is self._only:
            self._only = None

    def first(self, gates: Sequence[Gate], now_us: int) -> Claim | None:
        """The first claim that is ready, of those behind these gates."""
        only = self._only
        if only is not None:
            return only.claim if only.claim.ready_at_us <= now_us and only.gate in gates else None
        ready = [(gate, by_rank) for gate in gates if (by_rank := self._ready_behind(gate, now_us))]
        for rank in sorted({rank for _, by_rank in ready for rank in by_rank}, reverse=True):
            firsts = [
                found
                for gate, by_rank in ready
                if rank in by_rank and (found := self._first_of(gate, rank, now_us)) is not None
            ]
            if firsts:
                return self._lanes[min(firsts)[2]].claim
        return None

    def gate_of(self, claim: Claim) -> Gate:
        """What the batch of a current claim has to wait for."""
        return self._lanes[claim.lane].gate

    def ready_at_us(self, gate: Gate, now_us: int) -> int:
        """When the first claim behind a gate is ready: `now_us` if one is, NEVER_US if there is none."""
        only = self._only
        if only is not None:
            return max(now_us, only.claim.ready_at_us) if only.gate is gate else NEVER_US
        if self.first((gate,), now_us) is not None:
            return now_us
        later = self._later[gate]
        return later[0][0] if later else NEVER_US

    def oldest_arrival_us(self) -> int | None:
        """The earliest arrival of all claims; None if there is none."""
        if self._only is not None:
            return self._only.claim.arrival_us
        oldest = self._oldest
        while oldest:
            arrival_us, lane = oldest[0]
            indexed = self._lanes.get(lane)
            if indexed is not None and indexed.claim.arrival_us == arrival_us:
                return arrival_us
            heapq.heappop(oldest)
        return None

    def _list_only(self, indexed: _IndexedLane) -> None:
        """Enter the lane that was the only one into the heaps."""
        self._only = None
        heapq.heappush(self._oldest, (indexed.claim.arrival_us, indexed.claim.lane))
        self._push(indexed)

    def _ready_behind(self, gate: Gate, now_us: int) -> dict[int, _ReadyLanes]:
        """The lanes that are ready behind a gate, by rank."""
        later = self._later[gate]
        while later and (later[0][0] <= now_us or not self._is_later(later[0][1])):
            claim = heapq.heappop(later)[1]
            if self._is_later(claim):
                indexed = self._lanes[claim.lane]
                indexed.is_ready = True
                self._push(indexed)
        return self._ready[gate]

    def _first_of(self, gate: Gate, rank: int, now_us: int) -> tuple[Turn, int, str] | None:
        """Whose turn is next behind a gate, and the arrival and lane of its oldest request there."""
        ready, turns = self._ready[gate][rank], self._turns[rank]
        while ready.turns:
            turn = ready.turns[0]
            lanes = ready.by_tenant[turn.tenant]
            while lanes:
                arrival_us, lane = lanes[0]
                indexed = self._lanes.get(lane)
                if (
                    indexed is not None
                    and self._is_ready(indexed, gate, now_us)
                    and indexed.lane.is_front(rank, turn.tenant, arrival_us)
                ):
                    break
                heapq.heappop(lanes)
                self._fronts -= 1
            if not lanes:
                heapq.heappop(ready.turns)
                del ready.by_tenant[turn.tenant]
                continue
            current = turns.of[turn.tenant]
            if current == turn:
                return turn, *lanes[0]
            heapq.heapreplace(ready.turns, current)  # the tenant was served since
        del self._ready[gate][rank]
        return None

    def _is_ready(self, indexed: _IndexedLane, gate: Gate, now_us: int) -> bool:
        """Whether a lane is ready behind a gate."""
        if not indexed.is_ready or indexed.gate is not gate:
            return False
        if indexed.claim.ready_at_us > now_us:  # the clock was set back
            indexed.is_ready = False
            self._push(indexed)
            return False
        return True

    def _is_later(self, claim: Claim) -> bool:
        indexed = self._lanes.get(claim.lane)
        return indexed is not None and indexed.claim is claim and not indexed.is_ready

    def _replace(self, indexed: _IndexedLane, claim: Claim) -> None:
        if claim.arrival_us != indexed.claim.arrival_us:
            heapq.heappush(self._oldest, (claim.arrival_us, claim.lane))
        indexed.claim = claim

    def _push(self, indexed: _IndexedLane) -> None:
        if indexed.is_ready:
            self._enter(indexed, indexed.lane.fronts(changed=False))
            return
        later = self._later[indexed.gate]
        if len(later) > 2 * len(self._lanes) + CLAIMS_MIN:
            later = self._later[indexed.gate] = [item for item in later if self._is_later(item[1])]
            heapq.heapify(later)
        heapq.heappush(later, (indexed.claim.ready_at_us, indexed.claim))

    def _enter(self, indexed: _IndexedLane, fronts: Iterable[tuple[int, str, int]]) -> None:
        """These fronts are new in a lane that is ready."""
        by_rank, lane = self._ready[indexed.gate], indexed.claim.lane
        for rank, tenant, arrival_us in fronts:
            ready = by_rank.get(rank)
            if ready is None:
                ready = by_rank[rank] = _ReadyLanes()
            lanes = ready.by_tenant.get(tenant)
            if lanes is None:
                lanes = ready.by_tenant[tenant] = []
                heapq.heappush(ready.turns, self._turns[rank].of[tenant])
            heapq.heappush(lanes, (arrival_us, lane))
            self._fronts += 1

    def _rebuild(self) -> None:
        """Drop what is outdated. O(1) amortised."""
        self._ready = [{} for _ in Gate]
        self._later = [[] for _ in Gate]
        self._oldest = [(indexed.claim.arrival_us, lane) for lane, indexed in self._lanes.items()]
        heapq.heapify(self._oldest)
        self._fronts = 0
        for indexed in self._lanes.values():
            self._push(indexed)
        self._fronts_max = 2 * self._fronts + CLAIMS_MIN
