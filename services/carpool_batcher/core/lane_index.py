"""An index of lanes by when they have a batch to dispatch, and which comes first. O(log lanes) for a change.

For each lane with waiting requests there is one claim. A claim that was replaced stays in the heaps until it
is at the top, or until most claims in them are outdated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from carpool.messages import DispatchReason
from carpool_batcher.core.due_index import NEVER_US

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
    """That a lane has a batch, ready at `ready_at_us`. Of two that are ready the smaller comes first."""

    minus_rank: int
    arrival_us: int
    lane: str
    reason: DispatchReason
    ready_at_us: int


class LaneIndex:
    """The claims of all lanes with waiting requests."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[Gate, Claim]] = {}
        self._ready: list[list[Claim]] = []  # a heap for each gate
        self._later: list[list[tuple[int, Claim]]] = []  # a heap for each gate
        self._oldest: list[tuple[int, Claim]] = []  # a heap
        self._rebuild()

    def put(self, gate: Gate, claim: Claim) -> None:
        """Set the claim of a lane."""
        current = gate, claim
        if self._claims.get(claim.lane) == current:
            return
        self._claims[claim.lane] = current
        if len(self._oldest) > 2 * len(self._claims) + CLAIMS_MIN:
            self._rebuild()
        else:
            self._push(gate, claim)

    def remove(self, lane: str) -> None:
        """A lane has no waiting requests any more."""
        self._claims.pop(lane, None)

    def first(self, gates: Iterable[Gate], now_us: int) -> Claim | None:
        """The first claim that is ready, of those behind these gates."""
        firsts = [claim for gate in gates if (claim := self._first_ready(gate, now_us)) is not None]
        return min(firsts, default=None)

    def ready_at_us(self, gate: Gate, now_us: int) -> int:
        """When the first claim behind a gate is ready: `now_us` if one is, NEVER_US if there is none."""
        if self._first_ready(gate, now_us) is not None:
            return now_us
        later = self._later[gate]
        return later[0][0] if later else NEVER_US

    def oldest_arrival_us(self) -> int | None:
        """The earliest arrival of all claims; None if there is none."""
        oldest = self._oldest
        while oldest and not self._is_current(oldest[0][1]):
            heapq.heappop(oldest)
        return oldest[0][0] if oldest else None

    def _first_ready(self, gate: Gate, now_us: int) -> Claim | None:
        ready, later = self._ready[gate], self._later[gate]
        while later and (later[0][0] <= now_us or not self._is_current(later[0][1])):
            heapq.heappush(ready, heapq.heappop(later)[1])
        while ready:
            claim = ready[0]
            if not self._is_current(claim):
                heapq.heappop(ready)
            elif claim.ready_at_us > now_us:  # the clock was set back
                heapq.heappop(ready)
                heapq.heappush(later, (claim.ready_at_us, claim))
            else:
                return claim
        return None

    def _is_current(self, claim: Claim) -> bool:
        current = self._claims.get(claim.lane)
        return current is not None and current[1] is claim

    def _push(self, gate: Gate, claim: Claim) -> None:
        heapq.heappush(self._oldest, (claim.arrival_us, claim))
        if claim.ready_at_us == ANY_TIME_US:
            heapq.heappush(self._ready[gate], claim)
        else:
            heapq.heappush(self._later[gate], (claim.ready_at_us, claim))

    def _rebuild(self) -> None:
        """Drop outdated claims. O(1) amortised."""
        self._ready = [[] for _ in Gate]
        self._later = [[] for _ in Gate]
        self._oldest = []
        for gate, claim in self._claims.values():
            self._push(gate, claim)
