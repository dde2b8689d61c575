"""When a batch is dispatched, why, and with which requests: rules 1 to 3 at the top of `core.scheduler`.

`waiting.queue` holds the waiting runs, and `core.capacity` knows when processes are free. Here is the index
of lanes by when they have a batch: it follows the lanes that changed, and is made anew when settings change.

Why: docs/decisions/0053.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from carpool.messages.batches import Dispatch, DispatchReason
from carpool.messages.requests import Run
from carpool_batcher.core.applied_settings import AppliedSettings, BatchLimits
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import Decision
from carpool_batcher.core.learned.doubtful_producers import executable_size
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.policies.custom import Custom, CustomPolicy
from carpool_batcher.core.policies.deferred import Deferred
from carpool_batcher.core.policies.eager import Eager
from carpool_batcher.core.sequences.processes import Processes
from carpool_batcher.core.waiting.lane import NEVER_US, Lane, PoppedBatch, version_of_lane
from carpool_batcher.core.waiting.lane_index import Claim, Gate, LaneIndex
from carpool_batcher.core.waiting.queue import Queue

LANES_UPDATED_MAX: Final = 16  # for each batch from which something was learned
CONTENDING: Final = (Gate.AHEAD, Gate.FULL, Gate.FREE, Gate.SPACED)  # batches that have to wait for capacity


class Outlook(NamedTuple):
    """What the next batch of a lane waits for: see Gate and Claim. `first`: the lane of the ready batch that
    comes first, None if none is ready. `free_at_us`: from when on it may be dispatched, as far as processes
    decide; None: not before a batch settles. `spaced_us`: the same for even spacing."""

    gate: Gate
    claim: Claim
    first: Lane | None
    free_at_us: int | None
    spaced_us: int


class Dispatcher:
    """Forms the batches that are dispatched now, and says when to ask again."""

    def __init__(
        self,
        applied: AppliedSettings,
        queue: Queue,
        capacity: Capacity,
        learned: Learned,
        processes: Processes,
        *,
        reserve: Callable[[int, str], None] | None = None,
        versions: Collection[str] | None = None,
    ) -> None:
        """`capacity`: what is free for these batches. `reserve`: takes it up, by default there. `versions`:
        it dispatches the lanes of these versions, '' being those that any may execute; None: all lanes."""
        self._applied = applied
        self._queue = queue
        self._capacity = capacity
        self._reserve = capacity.reserve if reserve is None else reserve
        self._versions = None if versions is None else frozenset(versions)
        self._learned = learned
        self._processes = processes
        self._index = LaneIndex(queue.turns)
        self._eager = Eager(applied, queue)
        self._deferred = Deferred(applied, queue, capacity, learned)
        self._policy = self._eager
        self._is_index_outdated = True  # the claims of all lanes are
        self._indexed_learned = 0
        self._outdated: list[str] = []  # lanes whose claims are still to be updated with what was learned
        self._overtaken = 0  # batches dispatched before one that came first, but had to wait for a process
        self._is_held_up = False  # full batches wait until that one is dispatched

    def settings_changed(self, custom: CustomPolicy | None) -> None:
        """The settings or the custom policy changed."""
        if custom is not None:
            self._policy = Custom(self._applied, self._queue, custom)
        else:
            self._policy = self._deferred if self._applied.policy == "deferred" else self._eager
        self._is_index_outdated = True

    def dispatch(self, now_us: int) -> list[Decision]:
        """The batches to dispatch now, those with the strongest claim first, and the requests to refuse."""
        decisions: list[Decision] = []
        self._update_index(now_us)
        self._is_held_up = False
        while self._queue.count and (gates := self._open_gates(now_us)):
            claim, overtakes = self._next_claim(gates, now_us)
            if claim is None:
                break
            gate = self._index.gate_of(claim)
            decided = self._dispatch_or_refuse(self._queue.lanes[claim.lane], claim.reason, now_us)
            decisions += decided
            if overtakes:
                self._overtaken += sum(type(decision) is Dispatch for decision in decided)
            elif gate in (Gate.FREE, Gate.SPACED):
                self._overtaken = 0
            self._update_index(now_us)
        return decisions

    def outlook(self, lane: Lane, now_us: int) -> Outlook:
        """What the next batch of a lane waits for. The lane must not be empty."""
        self._update_index(now_us)
        gate, claim = self._claim(lane, now_us)
        first = self._index.first(CONTENDING, now_us)
        free_at_us: int | None = now_us
        if gate is Gate.FULL:
            free_at_us = self._capacity.free_at_us(now_us, is_full=self._policy.may_be_early)
        elif gate is not Gate.AHEAD or not self._capacity.has_capacity():
            free_at_us = self._capacity.free_at_us(now_us)
        spaced_us = self._capacity.spacing_ends_us() if gate is Gate.SPACED else 0
        return Outlook(
            gate, claim, None if first is None else self._queue.lanes[first.lane], free_at_us, spaced_us
        )

    def serves(self, lane: Lane) -> bool:
        """Whether it dispatches this lane."""
        return self._versions is None or lane.version in self._versions

    def wake_at_us(self, now_us: int) -> int | None:
        """When a batch could be dispatched by time alone; None if not before something happens."""
        may_be_early = self._policy.may_be_early
        full_at_us = self._capacity.free_at_us(now_us, is_full=may_be_early)
        if full_at_us is None or not self._queue.undelayed:
            return None
        self._update_index(now_us)
        free_at_us = self._capacity.free_at_us(now_us) if may_be_early else full_at_us
        if free_at_us is None:
            free_at_us = NEVER_US
        spaced_at_us = max(self._index.ready_at_us(Gate.SPACED, now_us), self._capacity.spacing_ends_us())
        ready_at_us = min(
            self._index.ready_at_us(Gate.AHEAD, now_us), self._index.ready_at_us(Gate.FREE, now_us)
        )
        full_at_us = max(full_at_us, self._index.ready_at_us(Gate.FULL, now_us))
        if self._is_held_up:
            full_at_us = NEVER_US
        wake_us = min(full_at_us, max(free_at_us, min(ready_at_us, spaced_at_us)))
        return None if wake_us == NEVER_US else wake_us

    def earliest_dispatch_us(self, now_us: int) -> int:
        """Before this no batch needs to be dispatched, whatever arrives; NEVER_US: not before one settles.

        A batch that becomes full may be dispatched before that, to wait at a busy process: where that may
        happen soon, or where it is unknown for how long the process is busy, it is `now_us`.
        """
        if self._capacity.has_capacity() and self._may_go_ahead_soon():
            return now_us
        at_us = self._capacity.free_at_us(now_us, is_full=self._policy.may_be_early)
        return NEVER_US if at_us is None else at_us

    def first(self, now_us: int) -> tuple[int, int]:
        """Which of several dispatchers comes first, the one with the least: of its next batch the highest
        rank, negative, and its oldest request. If no batch is ready, it comes last."""
        self._update_index(now_us)
        claim = self._index.first(CONTENDING, now_us)
        if claim is None:
            return 0, NEVER_US
        rank, arrival_us = self._queue.lanes[claim.lane].front()
        return -rank, arrival_us

    def oldest_arrival_us(self, now_us: int) -> int | None:
        """When the oldest waiting request arrived; None if none waits."""
        self._update_index(now_us)
        return self._index.oldest_arrival_us()

    # --- when, and why -------------------------------------------------------------------------------------

    def _next_claim(self, gates: Sequence[Gate], now_us: int) -> tuple[Claim | None, bool]:
        """The claim of the next batch, of those behind these gates; and whether it overtakes one that comes
        first, but has to wait until a process is free.

        As many may overtake it as there are processes, one ahead of each. Then full batches wait, too: with
        one ahead of each process at any time, none would ever be free. Nor does it wait for even spacing.
        """
        while (claim := self._index.first(CONTENDING, now_us)) is not None:
            if not self._is_current(claim, now_us):
                continue
            gate = self._index.gate_of(claim)
            if gate in gates:
                return claim, False
            if self._overtaken >= self._capacity.processes:
                if gate is Gate.SPACED and Gate.FREE in gates:
                    return claim, False
                self._is_held_up = True
                return None, False
            full = self._index.first(gates, now_us)
            if full is None or self._is_current(full, now_us):
                return full, True
        return None, False

    def _open_gates(self, now_us: int) -> Sequence[Gate]:
        ahead = (Gate.AHEAD,) if self._capacity.has_capacity() else ()
        may_be_early = self._policy.may_be_early
        if self._capacity.is_early(now_us, is_full=may_be_early):
            return ahead
        if not ahead:
            return (Gate.FULL,)
        if may_be_early and self._capacity.is_early(now_us):
            return (Gate.AHEAD, Gate.FULL)
        if self._capacity.spacing_ends_us() > now_us:
            return (Gate.AHEAD, Gate.FULL, Gate.FREE)
        return (Gate.AHEAD, Gate.FULL, Gate.FREE, Gate.SPACED)

    def _update_index(self, now_us: int) -> None:
        """Follow the lanes that changed. What was learned since concerns all lanes, but only if deferred."""
        queue, index = self._queue, self._index
        self._policy.observe(now_us)
        learned = self._learned.batches if self._policy.forecasts else 0
        own = queue.changed if self._versions is None else self._own(queue.changed)
        changed: Iterable[str] = own
        if self._is_index_outdated:
            changed = own | self._lanes()
        elif learned != self._indexed_learned:
            changed = own | self._next_outdated(LANES_UPDATED_MAX * (learned - self._indexed_learned))
        self._is_index_outdated, self._indexed_learned = False, learned
        for name in changed:
            lane = queue.lanes.get(name)
            if lane is None or not lane.count:
                index.remove(name)
            else:
                index.put(*self._claim(lane, now_us), lane, now_us)
        if own is queue.changed:
            own.clear()
        else:
            queue.changed -= own

    def _own(self, names: Iterable[str]) -> set[str]:
        """Those of these lanes that it dispatches."""
        versions = self._versions
        return {name for name in names if versions is None or version_of_lane(name) in versions}

    def _lanes(self) -> set[str]:
        lanes = self._queue.lanes
        return set(lanes) if self._versions is None else self._own(lanes)

    def _next_outdated(self, count: int) -> set[str]:
        """The next `count` lanes to update with what was learned: all of them unless there are many.

        Thousands of lanes take turns, or each batch that settles would cost milliseconds. Until its turn, a
        lane's batch may start a little late; never too early, because claims are verified before they count.
        """
        if len(self._queue.lanes) <= count:
            self._outdated.clear()
            return self._lanes()
        if not self._outdated:
            self._outdated = list(self._lanes())
        next_lanes = set(self._outdated[-count:])
        del self._outdated[-count:]
        return next_lanes

    def _is_current(self, claim: Claim, now_us: int) -> bool:
        """Whether a lane's claim accounts for all that was learned; if not, it is updated."""
        if not self._policy.forecasts:
            return True
        lane = self._queue.lanes[claim.lane]
        gate, current = self._claim(lane, now_us)
        self._index.put(gate, current, lane, now_us)
        return current == claim

    def _claim(self, lane: Lane, now_us: int) -> tuple[Gate, Claim]:
        ready_at_us, reason = self._policy.ready(lane, now_us)
        is_busy = lane.process and self._processes.is_busy(lane.process)
        gate = Gate.BUSY if is_busy else self._policy.gate(reason)
        return gate, Claim(lane.name, lane.front()[1], reason, ready_at_us)

    # --- forming a batch -----------------------------------------------------------------------------------

    def _dispatch_or_refuse(self, lane: Lane, reason: DispatchReason, now_us: int) -> list[Decision]:
        """Dispatch a batch of a lane that is ready, or refuse requests of it."""
        if self._applied.batch.size == 1 and self._policy.is_full_final and not lane.process:
            return self._dispatch_singly(lane, reason)  # each is full, so that only capacity decides how many
        size, refusals = self._policy.form(lane, reason, now_us)
        decisions: list[Decision] = list(refusals)
        if size:
            decisions.append(self._reserve_and_dispatch(lane, reason, self._queue.pop_batch(lane, size)))
        return decisions

    def _may_go_ahead_soon(self) -> bool:
        """Whether a batch may soon be full, and is to be dispatched ahead of a busy process then."""
        if self._policy.full_gate is not Gate.AHEAD:
            return False
        is_half_full = 2 * (self._queue.undelayed + 1) > self._applied.batch.size
        return is_half_full or self._applied.has_batch_cost or not self._learned.latency.known

    def _dispatch_singly(self, lane: Lane, reason: DispatchReason) -> list[Decision]:
        """Take requests of the next run of a lane, each for a batch by itself: as many as there is capacity
        for, in one turn of their tenant. They arrived together, so no other request comes between them, and
        to decide on each of them costs several times as much."""
        batches, cost = self._capacity.left()
        (run,), expired = self._queue.pop_run(lane, BatchLimits(batches, cost))
        return [
            self._reserve_and_dispatch(lane, reason, PoppedBatch([one], expired)) for one in run.separate()
        ]

    def _reserve_and_dispatch(self, lane: Lane, reason: DispatchReason, popped: PoppedBatch) -> Dispatch:
        """Reserve capacity for these, and dispatch them as a batch."""
        runs, expired = popped
        applied, first_expired = self._applied, len(runs) - expired
        undated = frozenset(
            run for at, run in enumerate(runs) if at >= first_expired or _outlives_deadline(run, applied)
        )
        version = lane.version or self._capacity.next_version()
        cost = sum([run.cost * len(run) for run in runs]) if applied.has_batch_cost else 0
        self._reserve(cost, version)
        expected_us = self._learned.expected_us(lane.label, executable_size(runs))
        if lane.process:
            self._processes.begin_batch(lane.process)
            self._queue.look_again(lane.process)
        return Dispatch(runs, reason, lane.label, undated, expected_us, lane.process, version, lane.is_asked)


def _outlives_deadline(run: Run, applied: AppliedSettings) -> bool:
    """Whether a run is served even after its deadline (`expiration_action` is delay)."""
    return run.deadline_us is not None and applied.served_late[run.priority]
