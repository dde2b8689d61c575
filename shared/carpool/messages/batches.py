"""Batches: as they are dispatched, and as a worker has them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from carpool.messages.requests import PRIORITY_DEFAULT, Producer, Run, SequencePart
from carpool.rows import Bodies, Body
from carpool.tickets import TicketRange, Tickets

DispatchReason = Literal["full", "preferred", "deadline", "efficient", "delay", "idle"]


class Dispatch(NamedTuple):
    """Runs to be dispatched together as one batch, and why.

    `undated`: those that have no deadline in flight, because they are to be executed even if they are late
    (`expiration_action` is delay, or they were late already).
    `expected_us`: how long their execution is expected to take; 0 if that is unknown.
    `process`: of a bound model, the process that executes it; empty if it is any.
    `version`: the version of the model whose workers execute it; empty if any do. `is_asked`: its requests
    ask for that version, so no other one may execute them.
    """

    runs: list[Run]
    reason: DispatchReason
    lane: str
    undated: frozenset[Run] = frozenset()
    expected_us: int = 0
    process: str = ""
    version: str = ""
    is_asked: bool = False

    @property
    def size(self) -> int:
        """The number of requests."""
        return sum(map(len, self.runs))

    def deadline_us(self, run: Run) -> int | None:
        """The deadline that a run of this batch has in flight; None if it has none."""
        return None if run in self.undated else run.deadline_us


class BatchedRun(NamedTuple):
    """A run in a batch. The order of the fields is the order on the wire."""

    entry_id: str
    correlation_ids: list[str]
    bodies: Bodies
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    extra: Mapping[str, bytes] | None
    reply_columns: bool = False
    tickets: Tickets | None = None
    sequence: SequencePart | None = None
    priority: int = PRIORITY_DEFAULT
    cost: int = 1  # of each request

    @property
    def producer(self) -> Producer:
        """As `Run.producer`."""
        tenant = self.extra.get("tenant", b"") if self.extra else b""
        return tenant.decode("utf-8", "replace"), self.reply_to or ""


class BatchedRequest(NamedTuple):
    """One request of a batch."""

    entry_id: str
    correlation_id: str
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    body: Body
    extra: Mapping[str, bytes] | None
    ticket: TicketRange | None = None
    sequence: SequencePart | None = None
    version: str = ""  # that it asks for


def tickets_of_each(run: Run | BatchedRun) -> Sequence[TicketRange | None]:
    """The ticket of each request of a run."""
    return [None] * len(run.correlation_ids) if run.tickets is None else run.tickets.singles()


@dataclass(eq=False)
class Batch:
    """Runs dispatched together, as a worker fetches them. `epoch` is the delivery count, from 1.
    `expected_us`: how long their execution is expected to take; 0 if that is unknown. `stream` and `cost` are
    those of the request, if it is alone in the batch, as requests of stepping models are; `settings` has all
    effective settings that their worker needs (`ModelSettings.for_workers`). `process`: of a bound model, the
    one for which it was dispatched; empty for others. `max_execution_ms`, `max_result_bytes`,
    `max_batch_cost` and the limits of a process: those of the model.
    `version` and `is_asked`: as of its Dispatch. `redelivered`: how often workers of a version had it, before
    that had no worker any more, and it was given to others.
    `answered`: positions of requests that had results when it was dispatched, because they were sent again.

    A request's position is its place in the batch, counted over all runs, which do not change.
    """

    id: str
    epoch: int
    runs: list[BatchedRun]
    reason: str
    dispatched_us: int
    lane: str
    result_ttl_ms: int = 60_000
    expected_us: int = 0
    stream: bool = False
    cost: int = 1
    settings: str = ""
    process: str = ""
    max_execution_ms: int | None = None
    max_result_bytes: int = 64 * 1024 * 1024
    body_names: Sequence[str] = ()  # of the stored bodies, which are deleted when the batch is committed
    answered: frozenset[int] = frozenset()
    max_batch_cost: int | None = None
    max_requests_per_process: int | None = None
    max_process_memory: int | None = None
    version: str = ""
    is_asked: bool = False
    redelivered: int = 0
    first_positions: list[int] = field(init=False)  # the position of the first request of each run
    size: int = field(init=False)  # the number of requests

    def __post_init__(self) -> None:
        first_positions, size = [], 0
        for run in self.runs:
            first_positions.append(size)
            size += len(run.correlation_ids)
        self.first_positions, self.size = first_positions, size

    def run_of(self, position: int) -> BatchedRun:
        """The run of the request at this position. O(log runs)."""
        return self.runs[bisect_right(self.first_positions, position) - 1]

    @cached_property
    def requests(self) -> list[BatchedRequest]:
        """Each request by itself, by position: for what concerns single requests."""
        return [
            BatchedRequest(
                run.entry_id,
                correlation_id,
                run.content_type,
                run.reply_to,
                run.arrival_us,
                run.deadline_us,
                run.bodies[at],
                run.extra,
                ticket,
                run.sequence,
                self.version if self.is_asked else "",
            )
            for run in self.runs
            for at, (correlation_id, ticket) in enumerate(
                zip(run.correlation_ids, tickets_of_each(run), strict=True)
            )
        ]
