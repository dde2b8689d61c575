"""When a batch is dispatched, why, and with which requests: rules 1 to 3 at the top of `core.scheduler`.

`waiting.queue` holds the waiting runs, and `core.capacity` knows when processes are free. Here is the index
of lanes by when they have a batch: it follows the lanes that changed, and is made anew when settings change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from carpool.errors import DEADLINE_EXCEEDED, INTERNAL
from carpool.messages.batches import Dispatch, DispatchReason
from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.decisions import Decision, refusal
from carpool_batcher.core.deferred import ArrivalRate, Forecast, is_efficient, latest_start_us, plan
from carpool_batcher.core.learned.doubtful_producers import executable_size
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.rules import BatchLimits, Rules, Shares
from carpool_batcher.core.sequences.space import Processes
from carpool_batcher.core.waiting.fairness import Slice
from carpool_batcher.core.waiting.lane import NEVER_US, Lane, PoppedBatch
from carpool_batcher.core.waiting.lane_index import ANY_TIME_US, Claim, Gate, LaneIndex
from carpool_batcher.core.waiting.queue import Queue

# How many waiting requests a plan considers one by one, in batches of the largest size; and as batches, for
# each process.
PLANNED_BATCHES_MAX: Final = 4
LANES_UPDATED_MAX: Final = 16  # for each batch from which something was learned
CONTENDING: Final = (Gate.AHEAD, Gate.FULL, Gate.FREE, Gate.SPACED)  # batches that have to wait for capacity


class Dispatcher:
    """Forms the batches that are dispatched now, and says when to ask again."""

    def __init__(
        self, rules: Rules, queue: Queue, capacity: Capacity, learned: Learned, processes: Processes
    ) -> None:
        self._rules = rules
        self._queue = queue
        self._capacity = capacity
        self._learned = learned
        self._processes = processes
        self._index = LaneIndex(queue.turns)
        self._arrivals = ArrivalRate()
        self._indexed_version = 0  # of the rules
        self._indexed_learned = 0
        self._outdated: list[str] = []  # lanes whose claims are still to be updated with what was learned
        self._is_put_off = False  # until a process is free, full batches wait as others do
        self._overtaken = 0  # batches dispatched before one that came first, but had to wait for a process
        self._is_held_up = False  # full batches wait until that one is dispatched

    def dispatch(self, custom: CustomPolicy | None, now_us: int) -> list[Decision]:
        """The batches to dispatch now, those with the strongest claim first, and the requests to refuse."""
        decisions: list[Decision] = []
        self._update_index(now_us)
        self._is_put_off = self._is_put_off and self._is_early(now_us)
        self._is_held_up = False
        while self._queue.count and (gates := self._open_gates(now_us)):
            claim, overtakes = self._next_claim(gates, now_us)
            if claim is None:
                break
            gate = self._index.gate_of(claim)
            formed = self._form(self._queue.lanes[claim.lane], claim.reason, custom, now_us)
            decisions += formed
            if overtakes:
                self._overtaken += sum(type(decision) is Dispatch for decision in formed)
            elif gate in (Gate.FREE, Gate.SPACED):
                self._overtaken = 0
            self._update_index(now_us)
        return decisions

    def wake_at_us(self, now_us: int) -> int | None:
        """When a batch could be dispatched by time alone; None if not before something happens."""
        full_at_us = self._capacity.free_at_us(now_us, is_full=self._may_be_early())
        if full_at_us is None or not self._queue.undelayed:
            return None
        self._update_index(now_us)
        free_at_us = self._capacity.free_at_us(now_us)
        if free_at_us is None:
            free_at_us = NEVER_US
        spaced_at_us = max(self._index.ready_at_us(Gate.SPACED, now_us), self._capacity.spacing_ends_us())
        ready_at_us = min(self._index.ready_at_us(gate, now_us) for gate in (Gate.AHEAD, Gate.FREE))
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
        at_us = self._capacity.free_at_us(now_us, is_full=self._may_be_early())
        return NEVER_US if at_us is None else at_us

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
        if self._is_early(now_us, is_full=self._may_be_early()):
            return ahead
        if not ahead:
            return (Gate.FULL,)
        if self._is_early(now_us):
            return (Gate.AHEAD, Gate.FULL)
        if self._capacity.spacing_ends_us() > now_us:
            return (Gate.AHEAD, Gate.FULL, Gate.FREE)
        return (Gate.AHEAD, Gate.FULL, Gate.FREE, Gate.SPACED)

    def _update_index(self, now_us: int) -> None:
        """Follow the lanes that changed. What was learned since concerns all lanes, but only if deferred."""
        queue, index = self._queue, self._index
        if self._rules.policy == "deferred":
            self._arrivals.observe(queue.arrived, now_us, self._learned.turnaround_all_us)
        learned = self._learned.batches if self._rules.policy == "deferred" else 0
        changed: Iterable[str] = queue.changed
        if self._rules.version != self._indexed_version:
            changed = queue.changed | queue.lanes.keys()
        elif learned != self._indexed_learned:
            changed = queue.changed | self._next_outdated(
                LANES_UPDATED_MAX * (learned - self._indexed_learned)
            )
        self._indexed_version, self._indexed_learned = self._rules.version, learned
        for name in changed:
            lane = queue.lanes.get(name)
            if lane is None or not lane.count:
                index.remove(name)
            else:
                index.put(*self._claim(lane, now_us), lane, now_us)
        queue.changed.clear()

    def _next_outdated(self, count: int) -> set[str]:
        """The next `count` lanes to update with what was learned: all of them unless there are many.

        Thousands of lanes take turns, or each batch that settles would cost milliseconds. Until its turn, a
        lane's batch may start a little late; never too early, because claims are verified before they count.
        """
        lanes = self._queue.lanes
        if len(lanes) <= count:
            self._outdated.clear()
            return set(lanes)
        if not self._outdated:
            self._outdated = list(lanes)
        next_lanes = set(self._outdated[-count:])
        del self._outdated[-count:]
        return next_lanes

    def _is_current(self, claim: Claim, now_us: int) -> bool:
        """Whether a lane's claim accounts for all that was learned; if not, it is updated."""
        if self._rules.policy != "deferred":
            return True
        lane = self._queue.lanes[claim.lane]
        gate, current = self._claim(lane, now_us)
        self._index.put(gate, current, lane, now_us)
        return current == claim

    def _claim(self, lane: Lane, now_us: int) -> tuple[Gate, Claim]:
        ready_at_us, reason = self._ready_at_us(lane, now_us)
        gate = Gate.FREE
        if lane.process and self._processes.is_busy(lane.process):
            gate = Gate.BUSY
        elif reason == "full" and self._rules.policy != "deferred":
            gate = Gate.AHEAD  # it cannot grow. Under `deferred` it could be late if it is ahead for long
        elif reason == "full":
            gate = Gate.FULL
        elif reason == "idle":
            gate = Gate.SPACED
        return gate, Claim(lane.name, lane.head()[1], reason, ready_at_us)

    def _ready_at_us(self, lane: Lane, now_us: int) -> tuple[int, DispatchReason]:
        """When a batch of a lane is ready, and the reason. The lane must not be empty."""
        if self._queue.has_full_batch(lane):
            return ANY_TIME_US, "full"
        if self._rules.preferred_sizes and _preferred_size(lane, self._rules):
            return ANY_TIME_US, "preferred"
        if lane.urgent:
            return ANY_TIME_US, "deadline"
        delay_ends_us = lane.head()[1] + self._rules.queue_delay_us
        if not self._is_deferred(lane):
            return delay_ends_us, "delay" if self._rules.has_queue_delay else "idle"
        forecast = self._forecast(lane)
        size = max(1, lane.executable)
        if is_efficient(forecast.times, size, self._rules.batch.size, self._gap_us(lane, now_us)):
            return ANY_TIME_US, "efficient"
        start_us = latest_start_us(forecast, lane.earliest_due_us(self._rules.target_us), size)
        if self._rules.has_queue_delay and delay_ends_us < start_us:
            return delay_ends_us, "delay"
        return start_us, "deadline"

    def _gap_us(self, lane: Lane, now_us: int) -> float:
        """How long all idle processes together wait for one more request of a lane."""
        lane_ratio = lane.count / (
            self._queue.count - self._queue.delayed.requests
        )  # of the arrivals, as of those that wait
        return self._arrivals.gap_us / lane_ratio * max(1, self._capacity.idle_processes(now_us))

    def _is_deferred(self, lane: Lane) -> bool:
        """Whether the policy is `deferred`, and both l(n) and a due time are known."""
        if self._rules.policy != "deferred" or not self._learned.latency.known:
            return False
        return lane.earliest_due_us(self._rules.target_us) != NEVER_US

    def _forecast(self, lane: Lane) -> Forecast:
        """What is known of a lane's batches, without when processes are free."""
        transit = self._learned.transit_by_size
        times = self._learned.times_of(lane.label)
        return Forecast(times, self._rules.batch.size, transit, transit.at_most_us)

    # --- forming a batch -----------------------------------------------------------------------------------

    def _form(
        self,
        lane: Lane,
        reason: DispatchReason,
        custom: CustomPolicy | None,
        now_us: int,
    ) -> list[Decision]:
        """Dispatch a batch of a lane that is ready, or refuse requests of it.

        After a refusal no batch is dispatched yet: the lane is looked at again, because the other requests
        may have time to wait, and the fair turns have changed. If it is early, and only a part of a full
        batch would be in time, nothing is decided yet: others may arrive that can take part.
        """
        if custom is not None:
            return self._form_custom(lane, reason, custom)
        if self._rules.batch.size == 1 and self._rules.policy != "deferred" and not lane.process:
            # Each is full, so that nothing but capacity decides how many are dispatched.
            return self._dispatch_singly(lane, reason)
        size = _preferred_size(lane, self._rules) if reason == "preferred" else self._rules.batch.size
        if not lane.executable or not self._is_deferred(lane):
            return [self._dispatch_from(lane, reason, size)]
        forecast, starts_us = self._forecast(lane), self._capacity.starts_us(now_us)
        size_max = min(lane.executable, self._rules.batch.size)
        if forecast.latest_arrival_us(starts_us, size_max) <= lane.earliest_due_us(self._rules.target_us):
            return [self._dispatch_from(lane, reason, size)]  # all are in time: no plan is needed
        shares = self._rules.shares
        slices = list(_planned_front(lane, shares, PLANNED_BATCHES_MAX * size))
        if not slices:
            return [self._dispatch_from(lane, reason, size)]
        forecast = forecast._replace(free_times_us=self._capacity.free_times_us(now_us))
        deadlines_us: list[int] = []
        for run, _, count in slices:
            deadlines_us += [_strict_deadline_us(run, lane, self._rules)] * count
        ahead_max = PLANNED_BATCHES_MAX * size * max(1, len(forecast.free_times_us))
        behind = min(lane.executable, ahead_max) - len(deadlines_us)
        planned = plan(forecast, deadlines_us, starts_us, behind)
        if planned.size < size_max and self._is_early(now_us):
            self._is_put_off = True
            return []
        if not planned.size and self._begins_trial(lane.label, now_us):
            return [self._dispatch_from(lane, reason, size)]
        if planned.refused:
            return [self._refuse_early(run, now_us) for run in self._take(slices, planned.refused)]
        length = _length_with_doubtful(lane, shares, planned.size, size)
        return [self._dispatch_from(lane, reason, length)]

    def _begins_trial(self, lane: str, now_us: int) -> bool:
        """O(batches in flight)."""
        is_in_flight = any(batch.lane == lane for batch in self._capacity.in_flight.values())
        return not is_in_flight and self._learned.begin_trial(lane, now_us)

    def _may_be_early(self) -> bool:
        """Whether a full batch may be dispatched earlier than others."""
        return self._rules.policy == "deferred" and not self._is_put_off

    def _may_go_ahead_soon(self) -> bool:
        """Whether a batch may soon be full, and is to be dispatched ahead of a busy process then."""
        if self._rules.policy == "deferred":
            return False
        is_half_full = 2 * (self._queue.undelayed + 1) > self._rules.batch.size
        return is_half_full or self._rules.has_batch_cost or not self._learned.latency.known

    def _is_early(self, now_us: int, *, is_full: bool = False) -> bool:
        """Whether it is too early to dispatch a batch, or a full one."""
        free_at_us = self._capacity.free_at_us(now_us, is_full=is_full)
        return free_at_us is None or free_at_us > now_us

    def _form_custom(self, lane: Lane, reason: DispatchReason, custom: CustomPolicy) -> list[Decision]:
        """Dispatch the requests that a user's policy includes, or refuse those for which it raised."""
        slices = self._queue.peek_batch(lane)
        requests = [request for run, start, count in slices for request in run.requests(start, start + count)]
        formed = custom.form(requests)
        decisions: list[Decision] = [
            refusal(run, INTERNAL, "policy", formed.detail) for run in self._take(slices, formed.failed)
        ]
        if formed.size:
            decisions.append(self._dispatch_from(lane, reason, formed.size))
        return decisions

    def _take(self, slices: Sequence[Slice], indexes: Iterable[int]) -> list[Run]:
        """Remove the requests at these indexes, counted over all slices, and return them as runs."""
        requests = [(run, at) for run, start, count in slices for at in range(start, start + count)]
        by_run: dict[Run, list[int]] = {}
        for index in indexes:
            run, at = requests[index]
            by_run.setdefault(run, []).append(at)
        return [self._queue.take(run, sorted(at)) for run, at in by_run.items()]

    def _refuse_early(self, run: Run, now_us: int) -> Refusal:
        remaining_ms = ((run.deadline_us or 0) - now_us) / 1000
        detail = f"refused early: the {remaining_ms:.0f} ms before its deadline are not enough to execute it"
        return refusal(run, DEADLINE_EXCEEDED, "early", detail)

    def _dispatch_from(self, lane: Lane, reason: DispatchReason, size: int) -> Dispatch:
        """Take the next batch of a lane, of at most `size` requests, and reserve capacity for it."""
        return self._to_dispatch(lane, reason, self._queue.pop_batch(lane, size))

    def _dispatch_singly(self, lane: Lane, reason: DispatchReason) -> list[Decision]:
        """Take requests of the next run of a lane, each for a batch by itself: as many as there is capacity
        for, in one turn of their tenant. They arrived together, so no other request comes between them, and
        to decide on each of them costs several times as much."""
        batches, cost = self._capacity.left()
        (run,), expired = self._queue.pop_run(lane, BatchLimits(batches, cost))
        return [self._to_dispatch(lane, reason, PoppedBatch([one], expired)) for one in run.separate()]

    def _to_dispatch(self, lane: Lane, reason: DispatchReason, popped: PoppedBatch) -> Dispatch:
        """Dispatch these, and reserve capacity for them."""
        runs, expired = popped
        first_expired = len(runs) - expired
        undated = frozenset(
            run for at, run in enumerate(runs) if at >= first_expired or _outlives_deadline(run, self._rules)
        )
        self._capacity.reserve(
            sum([run.cost * len(run) for run in runs]) if self._rules.has_batch_cost else 0
        )
        expected_us = self._learned.expected_us(lane.label, executable_size(runs))
        if lane.process:
            self._processes.begin_batch(lane.process)
            self._queue.look_again(lane.process)
        return Dispatch(runs, reason, lane.label, undated, expected_us, lane.process)


def _planned_front(lane: Lane, shares: Shares, size: int) -> Iterator[Slice]:
    """The first `size` requests of a lane that the model is expected to execute, in order. Not those behind
    more than `size` others: these may be any number."""
    others = size
    for one in lane.in_order(shares):
        if one.run.is_doubtful:
            others -= one.size
        else:
            yield one._replace(size=min(one.size, size))
            size -= one.size
        if size <= 0 or others < 0:
            return


def _length_with_doubtful(lane: Lane, shares: Shares, executable: int, length_max: int) -> int:
    """The length of a batch that has `executable` requests that the model is expected to execute, and those
    between them and right behind them that it is not; at most `length_max`."""
    if not lane.doubtful:
        return min(executable, length_max)
    length = 0
    for run, _, count in lane.in_order(shares):
        if not run.is_doubtful:
            if count > executable:
                return min(length + executable, length_max)
            executable -= count
        length += count
        if length >= length_max:
            return length_max
    return length


def _preferred_size(lane: Lane, rules: Rules) -> int:
    """The largest preferred size that a lane can fill; 0 if none."""
    return max((size for size in rules.preferred_sizes if size <= lane.count), default=0)


def _strict_deadline_us(run: Run, lane: Lane, rules: Rules) -> int:
    """The deadline for which a run may be refused early: NEVER_US if it has only a target, or is served
    even after its deadline."""
    if run.deadline_us is None or run in lane.expired:
        return NEVER_US
    return NEVER_US if rules.served_late[run.priority] else run.deadline_us


def _outlives_deadline(run: Run, rules: Rules) -> bool:
    """Whether a run is served even after its deadline (`expiration_action` is delay)."""
    return run.deadline_us is not None and rules.served_late[run.priority]
