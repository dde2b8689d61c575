"""Requests, the entries that carry them, batches and results. Data only, no I/O.

Times are integers in microseconds (`_us`) or milliseconds (`_ms`) on Redis's clock: an entry's ID begins with
the millisecond at which Redis accepted it, and no other host's clock decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from carpool.errors import OK

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RAW: Final = "application/octet-stream"
CONTENT_TYPES: Final = (JSON, MSGPACK, RAW)

PRIORITY_DEFAULT: Final = 4
PRIORITY_LEVELS: Final = 10


@dataclass(slots=True, eq=False)
class Entry:
    """One entry of the request stream, and the requests in it that still wait.

    `wire.requests.decode_entry` fills it. From then on only the batcher's EntryTable changes `id` and
    `requests`, after a script changed the entry in Redis: when only some of its requests are dispatched or
    refused, the others are put back under a new ID. Requests refer to their entry, so they follow.
    """

    id: str
    arrival_us: int
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One producer's unit of work, as the batcher has it: waiting or in flight. Compared by identity.

    Not changed after it was decoded, except for `ticket`, which the batcher sets when it admits the request.
    (Not `frozen=True`: that alone costs 1 µs a request.)
    """

    entry: Entry
    correlation_id: str
    body: bytes
    content_type: str = JSON
    reply_to: str | None = None
    arrival_us: int = 0
    deadline_us: int | None = None
    priority: int = PRIORITY_DEFAULT
    lane: str = ""
    cost: int = 1
    extra: Mapping[str, bytes] | None = None
    tenant: str = ""
    ticket: str | None = None  # its place in the order of results, if that is preserved


DispatchReason = Literal["full", "preferred", "deadline", "efficient", "delay", "idle"]


class Dispatch(NamedTuple):
    """Requests to be dispatched together as one batch, and why.

    `undated`: those that have no deadline in flight, because they are to be executed even if they are late
    (`expiration_action` is delay, or they were late already).
    """

    requests: list[Request]
    reason: DispatchReason
    lane: str
    undated: frozenset[Request] = frozenset()

    def deadline_us(self, request: Request) -> int | None:
        """The deadline that a request of this batch has in flight; None if it has none."""
        return None if request in self.undated else request.deadline_us


class Withdrawal(NamedTuple):
    """A producer withdraws waiting requests, by their correlation IDs."""

    entry: Entry
    correlation_ids: frozenset[str]


class BatchedRequest(NamedTuple):
    """A request in a batch. The order of the fields is the order on the wire."""

    entry_id: str
    correlation_id: str
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    body: bytes
    extra: Mapping[str, bytes] | None
    ticket: str | None = None


class Batch(NamedTuple):
    """Requests dispatched together, as a worker fetches them. `epoch` is the delivery count, from 1."""

    id: str
    epoch: int
    requests: list[BatchedRequest]
    reason: str
    dispatched_us: int
    lane: str
    result_ttl_ms: int = 60_000


class Result(NamedTuple):
    """The result of one request. `body` is bytes of `content_type`; None unless `status` is OK."""

    correlation_id: str
    status: str = OK
    content_type: str = JSON
    body: bytes | None = None
    detail: str | None = None
    batch_size: int = 0
    queue_us: int = 0
    compute_us: int = 0


class Refusal(NamedTuple):
    """The answer to a request that is not dispatched.

    `reason` is one of a few fixed words, which metrics count by; `detail` is a sentence for the producer.
    """

    entry: Entry
    correlation_id: str
    reply_to: str | None
    content_type: str
    status: str
    reason: str
    detail: str
    request: Request | None = None  # None if it could not be decoded


class DeadLetter(NamedTuple):
    """A request that was given up, with the reason and how often a process ended while executing it.

    Its lane, priority, cost and expiration are not kept.
    """

    request: BatchedRequest
    reason: str
    attempts: int


class BatchSettled(NamedTuple):
    """A batch was committed. `compute_us` is 0 if none of its requests was executed."""

    batch_id: str
    worker: str
    size: int
    compute_us: int


class ModelProcessesChanged(NamedTuple):
    """A model process joined or left."""

    worker: str


SettledEvent = BatchSettled | ModelProcessesChanged  # what an entry of the stream `settled` says
