"""What travels: requests, the entries that carry them, batches, and results. Data only, no I/O.

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

    Mutable on purpose: when a dispatch takes only some of a packed entry's requests, the rest go back under a
    new ID. Each request points at its entry, so they need not be told.
    """

    id: str
    arrival_us: int
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One producer's unit of work, as it waits. Compared by identity; not changed after it was admitted.

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
    ticket: str | None = None  # its place in the order of results, where that is preserved


DispatchReason = Literal["full", "preferred", "deadline", "efficient", "delay", "idle"]


class Dispatch(NamedTuple):
    """Requests to be dispatched together as one batch, and why.

    `undated`: those of them that have no deadline once in flight, because they are to be served although they
    expire (`expiration_action` is delay, or they were late already).
    """

    requests: list[Request]
    reason: DispatchReason
    lane: str
    undated: frozenset[Request] = frozenset()

    def deadline_us(self, request: Request) -> int | None:
        """The deadline that a request of this batch has in flight; None if it has none."""
        return None if request in self.undated else request.deadline_us


class Withdrawal(NamedTuple):
    """A producer takes back requests that wait, named by correlation ID."""

    entry: Entry
    correlation_ids: frozenset[str]


class BatchedRequest(NamedTuple):
    """A request on its ride. The order of the fields is the order on the wire."""

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
    """Requests dispatched together, as a worker takes them. `epoch` is the delivery count, from 1."""

    id: str
    epoch: int
    requests: list[BatchedRequest]
    reason: str
    dispatched_us: int
    lane: str
    result_ttl_ms: int = 60_000


class Result(NamedTuple):
    """One request's outcome. `body` is bytes of `content_type`; None unless `status` is OK."""

    correlation_id: str
    status: str = OK
    content_type: str = JSON
    body: bytes | None = None
    detail: str | None = None
    batch_size: int = 0
    queue_us: int = 0
    compute_us: int = 0


class Refusal(NamedTuple):
    """A request that is answered without being dispatched, and where to. `reason` is one word of few, to
    count by; `detail` is a sentence for its producer."""

    entry: Entry
    correlation_id: str
    reply_to: str | None
    content_type: str
    status: str
    reason: str
    detail: str
    request: Request | None = None  # None where it could not be understood


class DeadLetter(NamedTuple):
    """A request given up, as it came, with the reason and how often it was started."""

    request: BatchedRequest
    reason: str
    attempts: int


class BatchSettled(NamedTuple):
    """What the batcher learns of a committed batch. `compute_us` is 0 where no request of it was computed."""

    batch_id: str
    worker: str
    size: int
    compute_us: int


class WorkersChanged(NamedTuple):
    """A model process joined or left."""

    worker: str
