"""The waiting queue of a model: all lanes, their totals, and the limits on what may wait.

Requests begin and cease to wait only here, so that the totals are always right. Of a sequence only the
head is in a lane; its followers wait in `core.sequences`.

Why: docs/decisions/0021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, Protocol

from carpool.errors import INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.messages.requests import PRIORITY_LEVELS, Run
from carpool.messages.results import Refusal
from carpool.rows import StoredBody
from carpool_batcher.core.applied_settings import NO_LIMIT, AppliedSettings, BatchLimits, Shares
from carpool_batcher.core.decisions import WITHDRAWN, copy_refusal, refusal
from carpool_batcher.core.sequences.heads import Decided
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.core.waiting.batch_space import bytes_of, sizes_bytes
from carpool_batcher.core.waiting.copies_index import BodiesInUse, WaitingIds, repeated_in
from carpool_batcher.core.waiting.delayed import DelayedRuns
from carpool_batcher.core.waiting.fairness import RunPart, Turns, TurnsByRank
from carpool_batcher.core.waiting.lane import (
    Lane,
    PoppedBatch,
    is_lane_asked,
    lane_of_version,
    version_of_lane,
)
from carpool_batcher.core.waiting.withdrawals import ArrivedLater

_Pop = Callable[[BatchLimits, Shares], PoppedBatch]
_IsCopy = Callable[[tuple[str | None, str]], bool]


class Division(Protocol):
    """Which version is to execute a request that asks for none (`carpool.wire.traffic`)."""

    def __bool__(self) -> bool:
        """Whether versions have shares; if not, any of them executes it."""

    def version_of(self, name: str) -> str:
        """By its correlation ID, or the ID of its sequence."""


class _Limit(NamedTuple):
    """A limit on what may wait: how many more requests, or bytes, may; and why a request is refused by it."""

    space: int
    reason: str
    detail: Callable[[Sequence[int]], str]  # of the sizes, in bytes, of the requests that are refused


class Queue:
    """The waiting runs of one model.

    `count` and `bytes` are totals over all requests of all lanes. `arrived_executable`: how many were ever
    admitted that the model is expected to execute. `withheld` is the number of results that wait for earlier
    tickets (`preserve_ordering`): they count against `max_queue_size`. `changed` has the names of lanes that
    changed since the Dispatcher last looked, which empties it. Of a bound model, the heads of the sequences
    of each process are in lanes of their own. `delayed` has the runs that are in no lane yet, because their
    producers put them off; they count, too. `ids` says which requests wait twice, and `bodies` has the names
    of stored bodies. `division` says which version is to execute the requests that ask for none.
    `turns` are those of tenants, by rank, over all lanes.
    """

    def __init__(self, applied: AppliedSettings, sequences: Sequences) -> None:
        self._applied = applied
        self.count = 0
        self.bytes = 0
        self.arrived_executable = 0
        self.withheld = 0
        self.turns = TurnsByRank(Turns)
        self.lanes: dict[str, Lane] = {"": Lane("", turns=self.turns)}  # only this one may be empty
        self.changed: set[str] = set()
        self.delayed = DelayedRuns(applied)
        self.ids = WaitingIds()
        self.bodies = BodiesInUse()
        self._count_by_priority = [0] * PRIORITY_LEVELS
        self._sequences = sequences
        self._lanes_of: dict[str, set[str]] = {}  # the names of lanes by process, of a bound model
        self.division: Division | None = None
        self.asked_lanes: dict[str, set[str]] = {}  # the names of lanes by the version that they ask for

    def runs(self) -> Iterator[Run]:
        """All waiting runs."""
        return chain(chain.from_iterable(self.lanes.values()), self._sequences.followers, self.delayed)

    @property
    def undelayed(self) -> int:
        """The number of waiting requests that are not delayed."""
        return self.count - self.delayed.requests

    @property
    def count_by_priority(self) -> Sequence[int]:
        """The number of waiting requests of each priority, delayed ones and followers included."""
        return self._count_by_priority

    # --- admitting -----------------------------------------------------------------------------------------

    def admit(
        self,
        run: Run,
        now_us: int,
        is_copy: _IsCopy,
    ) -> list[Refusal]:
        """Admit a run, or as much of it as the limits allow. Returns the Refusals of the others, which are
        taken out of the run; if none is admitted, one of the Refusals is of the run itself.

        A request that is not admitted and `is_copy` gets no answer: the first copy of it has one. The
        later copies of requests give their places to others, so there may be Refusals of other runs.
        """
        applied = self._applied
        refusals: list[Refusal] = []
        if len(run.correlation_ids) > 1 and len(set(run.correlation_ids)) < len(run.correlation_ids):
            refusals.append(copy_refusal(run.take(repeated_in(run, set()))))
        if applied.has_batch_cost and run.cost > applied.batch.cost:
            detail = f"cost: {run.cost} is over this model's max_batch_cost {applied.batch.cost}"
            return refusals + _refuse(run, is_copy, INVALID_ARGUMENT, "cost", detail)
        is_delayed = run.not_before_ms > 0 and run.arrival_us > now_us
        size_bytes, count = bytes_of(run), len(run.correlation_ids)
        if (
            self.count + self.withheld + count <= applied.queue_size
            and self.bytes + size_bytes <= applied.queue_bytes
            and (not applied.queue_size_of_priority or count <= self._priority_space(run.priority))
            and (not is_delayed or self.delayed.have_space(run, size_bytes))
        ):
            self._insert(run, size_bytes, is_delayed=is_delayed)
            return refusals
        copies = _part(run, _copies_in(run, is_copy))
        if copies is not None:
            refusals.append(copy_refusal(copies))
        if copies is run:
            return refusals
        refusals += self._drop_copies()
        return refusals + self._admit_part(run, is_delayed=is_delayed)

    def _insert(self, run: Run, size_bytes: int, *, is_delayed: bool = False) -> None:
        run.is_late = False
        if run.sequence is not None:
            self._sequences.add(run)
        else:
            if is_delayed:
                self.delayed.add(run)
            else:
                name = self._lane_name(run) if run.version or self.division else run.lane
                self._enter_lane(run, name, size_bytes)
            self.ids.add(run)
        count = len(run.correlation_ids)
        self.count += count
        if not run.is_doubtful:
            self.arrived_executable += count
        self.bytes += size_bytes
        bodies = run.bodies
        if type(bodies) is list and (type(bodies[0]) is StoredBody or len(bodies) > 1):
            self.bodies.add(run)
        self._count_by_priority[run.priority] += count

    def release(self, now_us: int) -> list[Run]:
        """Let the delayed runs whose time has come enter their lanes, and return them."""
        released = self.delayed.due(now_us)
        for run in released:
            self._enter_lane(run, self._lane_name(run), bytes_of(run))
        return released

    def _lane_name(self, run: Run) -> str:
        """The name of the lane that a run enters. Of a run that is divided among versions, all requests are
        for the version of the first."""
        if run.sequence is not None and self._sequences.are_bound:
            return self._sequences.lane_name(run)
        if run.version:
            return lane_of_version(run.lane, run.version, is_asked=True)
        if not self.division:
            return run.lane
        name = run.correlation_ids[0] if run.sequence is None else run.sequence.sequence_id
        return lane_of_version(run.lane, self.division.version_of(name), is_asked=False)

    def divide(self, run: Run, *, in_order: bool) -> list[Run]:
        """A run that is about to wait, as runs of which each is for one version. `in_order`: their requests
        stay in the order of the run; else there is one run for each version."""
        if not self.division or run.version or run.sequence is not None or len(run.correlation_ids) == 1:
            return [run]
        versions = list(map(self.division.version_of, run.correlation_ids))
        if in_order:
            lengths = [len(list(group)) for _, group in groupby(versions)]
            return [*[run.cut(length) for length in lengths[:-1]], run]
        parts: list[Run] = []
        for version in sorted(set(versions))[1:]:
            parts.append(run.take([at for at, one in enumerate(versions) if one == version]))
            versions = [one for one in versions if one != version]
        return [*parts, run]

    def divide_again(self) -> list[Run]:
        """The division changed: the requests in lanes that ask for no version enter those of their versions.
        Returns their runs. O(all waiting)."""
        moved: list[Run] = []
        for lane in [lane for lane in self.lanes.values() if lane.count and not lane.is_asked]:
            for run in list(lane):
                lane.remove(run, bytes_of(run))
                if run.sequence is None:
                    self.ids.remove((run,))
                for part in self.divide(run, in_order=False):  # each request has its ticket, if any has
                    self._enter_lane(part, self._lane_name(part), bytes_of(part))
                    if part.sequence is None:
                        self.ids.add(part)
                    moved.append(part)
            if not lane.count:
                self._drop_if_empty(lane)
        return moved

    def remove_asked(self, version: str, until_us: int) -> list[Run]:
        """Remove the requests in lanes that ask for this version, and were added to the stream by then."""
        names = list(self.asked_lanes.get(version, ()))
        runs = [run for name in names for run in self.lanes[name] if run.entry.arrival_us <= until_us]
        for run in runs:
            self.remove(run)
        return runs

    def _enter_lane(self, run: Run, name: str, size_bytes: int) -> None:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = self._new_lane(run, name)
        lane.insert(run, size_bytes)
        self.changed.add(name)

    def _new_lane(self, run: Run, name: str) -> Lane:
        if name == run.lane:
            return Lane(name, turns=self.turns)
        if version := version_of_lane(name):
            if is_lane_asked(name):
                self.asked_lanes.setdefault(version, set()).add(name)
            return Lane(name, run.lane, turns=self.turns)
        process = self._sequences.process_of(run)
        self._lanes_of.setdefault(process, set()).add(name)
        return Lane(name, run.lane, process, self.turns)

    def _admit_part(self, run: Run, *, is_delayed: bool) -> list[Refusal]:
        """Admit the requests of a run in order, each if there is space for it."""
        by_number, by_bytes = self._limits_of(run, is_delayed=is_delayed)
        bytes_max = by_bytes.space
        admitted = 0
        over_count: list[int] = []
        over_bytes: list[int] = []
        sizes = sizes_bytes(run)
        for at, size_bytes in enumerate(sizes):
            if admitted >= by_number.space:
                over_count.append(at)
            elif size_bytes > bytes_max:
                over_bytes.append(at)
            else:
                admitted += 1
                bytes_max -= size_bytes
        refusals: list[Refusal] = []
        # Those over the count are at the end, so the other indexes stay valid.
        refused = [
            (by_number, over_count, _part(run, over_count)),
            (by_bytes, over_bytes, _part(run, over_bytes)),
        ]
        if admitted:
            self._insert(run, bytes_of(run), is_delayed=is_delayed)
        for limit, indexes, part in reversed(refused):
            if part is not None:
                detail = limit.detail([sizes[at] for at in indexes])
                refusals.append(refusal(part, RESOURCE_EXHAUSTED, limit.reason, detail))
        return refusals

    def _limits_of(self, run: Run, *, is_delayed: bool) -> tuple[_Limit, _Limit]:
        """How many more requests like those of a run may wait, and of how many bytes."""
        numbers = [
            _Limit(self._applied.queue_size - self.count - self.withheld, "queue_size", partial(_full, self)),
            _Limit(
                self._priority_space(run.priority),
                "queue_size",
                lambda sizes: _full_for_priority(run.priority),
            ),
        ]
        sizes = [_Limit(self._applied.queue_bytes - self.bytes, "queue_bytes", partial(_full_of_bytes, self))]
        if is_delayed:
            number, size_bytes = self.delayed.space(run.priority)
            numbers.append(_Limit(number, "delayed", lambda sizes: self.delayed.full()))
            sizes.append(_Limit(size_bytes, "delayed", lambda sizes: self.delayed.full()))
        return min(numbers, key=lambda limit: limit.space), min(sizes, key=lambda limit: limit.space)

    def _priority_space(self, priority: int) -> int:
        """How many more requests of a priority may wait by the limit of this priority."""
        limit = self._applied.queue_size_of_priority.get(priority, NO_LIMIT)
        return limit - self._count_by_priority[priority]

    # --- removing ------------------------------------------------------------------------------------------

    def pop_batch(self, lane: Lane, size: int) -> PoppedBatch:
        """Remove and return the next batch of a lane, of at most `size` requests."""
        limits = self._applied.batch
        return self._pop(lane, lane.pop_batch, limits if size == limits.size else limits._replace(size=size))

    def pop_run(self, lane: Lane, limits: BatchLimits) -> PoppedBatch:
        """Remove and return the requests of one run of a lane that are next, as many as the limits allow."""
        return self._pop(lane, lane.pop_run, limits)

    def _pop(self, lane: Lane, pop: _Pop, limits: BatchLimits) -> PoppedBatch:
        count_before, bytes_before = lane.count, lane.bytes
        batch = pop(limits, self._applied.shares)
        self.count -= count_before - lane.count
        self.bytes -= bytes_before - lane.bytes
        for run in batch.runs:
            self._count_by_priority[run.priority] -= len(run.correlation_ids)
        if self.bodies.waiting:
            for run in batch.runs:
                self.bodies.remove(run, is_popped=True)
        self.ids.remove(batch.runs)
        self._drop_if_empty(lane)
        if self._sequences:
            for run in batch.runs:
                self._sequences.dispatch(run)
        return batch

    def awaited(self, run: Run) -> str:
        """What a waiting run waits for, other than its batch, to tell its producer; '' if for nothing."""
        awaited = "" if run.sequence is None else self._sequences.awaited(run)
        return awaited or (f"a worker of version {run.version}" if run.version else "")

    def remove(self, run: Run) -> None:
        """Remove a run. It must be waiting. If it is part of a sequence, that is broken."""
        size_bytes, holder = bytes_of(run), run.waits_in
        self._count_removed(run, size_bytes)
        if type(holder) is Lane:
            holder.remove(run, size_bytes)
            self._drop_if_empty(holder)
        elif holder is self.delayed:
            self.delayed.remove(run)
        if run.sequence is not None:
            self._sequences.removed(run)

    def take(self, run: Run, indexes: Sequence[int]) -> Run:
        """Remove the requests of a waiting run at these ascending indexes, at least one, and return them as a
        run: the run itself if that is all."""
        if len(indexes) == len(run.correlation_ids):
            self.remove(run)
            return run
        holder = run.waits_in
        if type(holder) is Lane:
            taken = holder.take(run, indexes)
            self.changed.add(holder.name)
        else:
            taken = self.delayed.take(run, indexes)
        self._count_removed(taken, bytes_of(taken))
        return taken

    def take_from(self, parts: Sequence[RunPart], indexes: Iterable[int]) -> list[Run]:
        """Remove the requests at these indexes, counted over all parts, and return them as runs."""
        requests = [(run, at) for run, start, count in parts for at in range(start, start + count)]
        by_run: dict[Run, list[int]] = {}
        for index in indexes:
            run, at = requests[index]
            by_run.setdefault(run, []).append(at)
        return [self.take(run, sorted(at)) for run, at in by_run.items()]

    def withdraw(self, arrived_later: ArrivedLater) -> list[Refusal]:
        """Remove the requests with these correlation IDs, except in the runs that arrived later than their
        withdrawal. Returns their answers. O(all waiting)."""
        names = frozenset(arrived_later)
        named = [run for run in self.runs() if not names.isdisjoint(run.correlation_ids)]
        refusals: list[Refusal] = []
        answered: set[tuple[str | None, str]] = set()
        for run in named:
            indexes = [
                at
                for at, name in enumerate(run.correlation_ids)
                if name in names and run not in (arrived_later[name] or ())
            ]
            if indexes:
                taken = self.take(run, indexes)
                copies = _part(taken, repeated_in(taken, answered))
                if copies is not None:
                    refusals.append(copy_refusal(copies))
                if copies is not taken:
                    status, detail = WITHDRAWN
                    refusals.append(refusal(taken, status, "withdrawn", detail))
        return refusals

    def take_copies(self, dispatched: Iterable[Run]) -> list[Refusal]:
        """Remove the requests that repeat one of these, which are in flight now. They get no answer of their
        own: that of the first copy is theirs."""
        return self._remove_copies(self.ids.later_copies(dispatched))

    def _drop_copies(self) -> list[Refusal]:
        """Remove what waits more than once, except for its first copy. O(copies)."""
        if not self.ids.repeated:
            return []
        refusals = self._remove_copies(self.ids.all_later())
        self.ids.forget_later()
        return refusals

    def _remove_copies(self, copies: Mapping[Run, set[str]]) -> list[Refusal]:
        refusals: list[Refusal] = []
        for run, names in copies.items():
            indexes = [at for at, name in enumerate(run.correlation_ids) if name in names]
            if indexes:
                refusals.append(copy_refusal(self.take(run, indexes)))
        return refusals

    def forget(self, runs: Iterable[Run]) -> None:
        """Remove those of these runs that wait, without an answer."""
        for run in runs:
            if run.waits_in is not None:
                self.remove(run)

    def _count_removed(self, run: Run, size_bytes: int) -> None:
        count = len(run.correlation_ids)
        self.count -= count
        self.bytes -= size_bytes
        self._count_by_priority[run.priority] -= count
        self.ids.remove((run,))
        if self.bodies.waiting:
            self.bodies.remove(run)

    def _drop_if_empty(self, lane: Lane) -> None:
        self.changed.add(lane.name)
        if lane.count or not lane.name:
            return
        del self.lanes[lane.name]  # producers choose the names: empty lanes would pile up
        if lane.is_asked:
            names = self.asked_lanes[lane.version]
            names.remove(lane.name)
            if not names:
                del self.asked_lanes[lane.version]
        if lane.process:
            names = self._lanes_of[lane.process]
            names.remove(lane.name)
            if not names:
                del self._lanes_of[lane.process]

    # --- sequences -----------------------------------------------------------------------------------------

    def apply(self, decided: Decided) -> None:
        """Followers became heads of their sequences, or do not wait any more."""
        for run in decided.heads:
            self._enter_lane(run, self._lane_name(run), bytes_of(run))
        for refused in decided.refusals:
            if refused.run is not None:
                self._count_removed(refused.run, bytes_of(refused.run))

    def leave_lane(self, head: Run) -> None:
        """A head becomes a follower, because its model process is gone, or drains."""
        lane = head.waits_in
        assert type(lane) is Lane
        lane.remove(head, bytes_of(head))
        self._drop_if_empty(lane)

    def look_again(self, process: str) -> None:
        """A process of a bound model began or ended a batch: whether its lanes can be served has changed."""
        self.changed |= self._lanes_of.get(process, set())

    # --- deadlines -----------------------------------------------------------------------------------------

    def mark_urgent(self, run: Run) -> None:
        """A waiting run must be dispatched now to meet its deadline. A follower or delayed run cannot be."""
        lane = run.waits_in
        if type(lane) is Lane:
            lane.urgent.add(run)
            self.changed.add(lane.name)

    def move_expired(self, run: Run) -> None:
        """A waiting run expired, and is served behind all others. One in no lane is so once it is in one."""
        lane = run.waits_in
        if type(lane) is Lane:
            lane.move_expired(run)
            self.changed.add(lane.name)
        else:
            run.is_late = True


def _part(run: Run, indexes: Sequence[int]) -> Run | None:
    """Take the requests at these indexes out of a run: the run itself if they are all, None if none."""
    if not indexes:
        return None
    return run if len(indexes) == len(run) else run.take(indexes)


def _copies_in(run: Run, is_copy: _IsCopy) -> list[int]:
    if run.sequence is not None:
        return []
    return [at for at, name in enumerate(run.correlation_ids) if is_copy((run.reply_to, name))]


def _refuse(run: Run, is_copy: _IsCopy, status: str, reason: str, detail: str) -> list[Refusal]:
    """The Refusals of all requests of a run."""
    copies = _part(run, _copies_in(run, is_copy))
    refusals = [] if copies is None else [copy_refusal(copies)]
    return refusals if copies is run else [*refusals, refusal(run, status, reason, detail)]


def _full(queue: Queue, refused_sizes: Sequence[int]) -> str:
    content = f"{queue.count} requests wait"
    if queue.withheld:
        content += f", {queue.withheld} results are withheld until earlier ones are done"
    return f"the queue is full (max_queue_size): {content}; try again later"


def _full_of_bytes(queue: Queue, refused_sizes: Sequence[int]) -> str:
    least, most = min(refused_sizes), max(refused_sizes)
    size = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"the queue is full (max_queue_bytes): {queue.bytes} bytes wait, and this request has {size}; "
        "try again later"
    )


def _full_for_priority(priority: int) -> str:
    return f"the queue is full for priority {priority} (priority_policies); try again later"
