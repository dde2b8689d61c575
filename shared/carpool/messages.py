"""Requests, the entries that carry them, batches and results. Data only, no I/O.

Times are integers in microseconds (`_us`) or milliseconds (`_ms`) on Redis's clock: an entry's ID begins with
the millisecond at which Redis accepted it, and no other host's clock decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

from carpool.errors import OK
from carpool.rows import Bodies, Body, Rows
from carpool.tickets import TicketRange, Tickets

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RAW: Final = "application/octet-stream"
CONTENT_TYPES: Final = (JSON, MSGPACK, RAW)

PRIORITY_DEFAULT: Final = 4
PRIORITY_LEVELS: Final = 10

Producer = tuple[str, str]  # tenant and reply stream, either of which may be empty


@dataclass(slots=True, eq=False)
class Entry:
    """One entry of the request stream, and the requests in it that still wait, in the order of the entry.

    `wire.requests.decode_entry` fills it. From then on only the batcher's EntryTable changes `id`, after a
    script changed the entry in Redis: when only some of its requests are dispatched or refused, the others
    are put back under a new ID. Runs refer to their entry, so they follow.

    `runs` always has exactly the requests that the entry in Redis has: a run that is divided keeps its place
    here, until a script has removed some of its parts.
    """

    id: str
    arrival_us: int
    runs: list[Run] = field(default_factory=list, repr=False)
    claimed_tickets: Tickets | None = None  # those of an entry put back; `BatcherStore.admit` verifies them


class SequencePart(NamedTuple):
    """What makes a request a part of a sequence. The order of the fields is the order on the wire.

    `index`: its number in the sequence, from 0; None if its producer does not count. `place`: where it stands
    in the request stream. Places are compared as text: the earlier request has the lesser one. A request that
    is put back keeps its place.
    """

    sequence_id: str
    starts: bool
    ends: bool
    index: int | None  # type: ignore[assignment]  # hides tuple.index
    place: str

    @staticmethod
    def place_of(entry_id: str, position: int) -> str:
        """The place of the request at this position, from 0, in the entry in which it arrived."""
        milliseconds, _, number = entry_id.partition("-")
        return f"{int(milliseconds):020d}-{int(number):020d}:{position:05d}"


@dataclass(slots=True, eq=False)
class Run:
    """Requests of one entry that differ only in their correlation IDs and bodies, as the batcher has them.

    The unit of scheduling: an ordinary request is a run of one. A run is divided where a batch ends
    (`cut`) and where some of its requests are removed (`take`). Compared by identity.

    Nothing else changes after it was decoded, except for `tickets` and `is_doubtful`, which the batcher sets
    when it admits the run. (Not `frozen=True`: that alone costs 1 µs.)
    """

    entry: Entry
    correlation_ids: list[str]
    bodies: Bodies
    content_type: str = JSON
    reply_to: str | None = None
    arrival_us: int = 0
    deadline_us: int | None = None
    priority: int = PRIORITY_DEFAULT
    lane: str = ""
    cost: int = 1  # of each request
    extra: Mapping[str, bytes] | None = None
    tenant: str = ""
    reply_columns: bool = False  # the producer reads results as columns
    tickets: Tickets | None = None  # the places in the order of results, if that is preserved
    stream: bool = False  # the producer wants partial results
    sequence: SequencePart | None = None  # then it is a run of one
    # How long it is delayed after its entry arrived; then `arrival_us` is the end of that time.
    not_before_ms: int = 0
    is_doubtful: bool = False  # the model is not expected to execute it (`core.doubtful_producers`)

    def __len__(self) -> int:
        return len(self.correlation_ids)

    @property
    def producer(self) -> Producer:
        """Who sent it, as far as that is known: requests with neither name count as one producer's."""
        return self.tenant, self.reply_to or ""

    def cut(self, count: int) -> Run:
        """Remove the first `count` requests, at least one and not all, and return them as a run."""
        ids, bodies, tickets = self.correlation_ids, self.bodies, self.tickets
        if isinstance(bodies, Rows):
            front: Bodies = bodies.slice(0, count)
            self.bodies = bodies.rest(count)
        else:
            front, self.bodies = bodies[:count], bodies[count:]
        self.correlation_ids = ids[count:]
        if tickets is not None:
            self.tickets = tickets.slice(count, len(ids))
            tickets = tickets.slice(0, count)
        return self._insert_part(ids[:count], front, tickets)

    def take(self, indexes: Sequence[int]) -> Run:
        """Remove the requests at these ascending indexes, at least one and not all, as a run."""
        ids, bodies, tickets = self.correlation_ids, self.bodies, self.tickets
        taken = frozenset(indexes)
        kept = [at for at in range(len(ids)) if at not in taken]
        if isinstance(bodies, Rows):
            part: Bodies = bodies.select(indexes)
            self.bodies = bodies.select(kept)
        else:
            part, self.bodies = [bodies[at] for at in indexes], [bodies[at] for at in kept]
        self.correlation_ids = [ids[at] for at in kept]
        if tickets is not None:
            self.tickets = tickets.select(kept)
            tickets = tickets.select(indexes)
        return self._insert_part([ids[at] for at in indexes], part, tickets)

    def divide(self, size: int) -> list[Run]:
        """This run as runs of at most `size` requests, each of which keeps only its own bodies in memory.

        Their entry is unchanged: the caller puts them into it. O(n).
        """
        ids, bodies, tickets = self.correlation_ids, self.bodies, self.tickets
        parts: list[Run] = []
        for start in range(0, len(ids), size):
            stop = min(start + size, len(ids))
            part = bodies.copy(start, stop) if isinstance(bodies, Rows) else bodies[start:stop]
            of_part = None if tickets is None else tickets.slice(start, stop)
            parts.append(self._part(ids[start:stop], part, of_part))
        return parts

    def separate(self) -> list[Run]:
        """Each request by itself as a run, in its place in their entry. O(n)."""
        if len(self.correlation_ids) == 1:
            return [self]
        runs, parts = self.entry.runs, self.divide(1)
        at = runs.index(self)
        runs[at : at + 1] = parts
        return parts

    def _insert_part(self, ids: list[str], bodies: Bodies, tickets: Tickets | None) -> Run:
        """A run with the attributes of this one, put before it in their entry."""
        part = self._part(ids, bodies, tickets)
        runs = self.entry.runs
        runs.insert(runs.index(self), part)
        return part

    def _part(self, ids: list[str], bodies: Bodies, tickets: Tickets | None) -> Run:
        """A run with the attributes of this one."""
        return Run(
            self.entry,
            ids,
            bodies,
            self.content_type,
            self.reply_to,
            self.arrival_us,
            self.deadline_us,
            self.priority,
            self.lane,
            self.cost,
            self.extra,
            self.tenant,
            self.reply_columns,
            tickets,
            self.stream,
            self.sequence,
            self.not_before_ms,
            self.is_doubtful,
        )

    def requests(self, start: int = 0, stop: int | None = None) -> list[Request]:
        """Each request from `start` to before `stop` by itself, as custom policies see it."""
        bodies = self.bodies
        return [
            Request(
                correlation_id,
                bodies[at],
                self.content_type,
                self.reply_to,
                self.arrival_us,
                self.deadline_us,
                self.priority,
                self.lane,
                self.cost,
                self.extra,
                self.tenant,
            )
            for at, correlation_id in enumerate(self.correlation_ids[start:stop], start)
        ]


class Request(NamedTuple):
    """One waiting request, as a custom policy sees it.

    A body that its producer stored under a key of its own is a StoredBody: the batcher does not know its
    bytes.
    """

    correlation_id: str
    body: Body
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    priority: int
    lane: str
    cost: int
    extra: Mapping[str, bytes] | None
    tenant: str


DispatchReason = Literal["full", "preferred", "deadline", "efficient", "delay", "idle"]


class Dispatch(NamedTuple):
    """Runs to be dispatched together as one batch, and why.

    `undated`: those that have no deadline in flight, because they are to be executed even if they are late
    (`expiration_action` is delay, or they were late already).
    `expected_us`: how long their execution is expected to take; 0 if that is unknown.
    `process`: of a bound model, the process that executes it; empty if it is any.
    """

    runs: list[Run]
    reason: DispatchReason
    lane: str
    undated: frozenset[Run] = frozenset()
    expected_us: int = 0
    process: str = ""

    @property
    def size(self) -> int:
        """The number of requests."""
        return sum(map(len, self.runs))

    def deadline_us(self, run: Run) -> int | None:
        """The deadline that a run of this batch has in flight; None if it has none."""
        return None if run in self.undated else run.deadline_us


class Withdrawal(NamedTuple):
    """A producer withdraws waiting requests, by their correlation IDs."""

    entry: Entry
    correlation_ids: frozenset[str]


class SequencesEnd(NamedTuple):
    """A producer ends sequences by force. `place`: where that stands in the request stream."""

    entry: Entry
    sequence_ids: Sequence[str]
    place: str


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


def tickets_of_each(run: Run | BatchedRun) -> Sequence[TicketRange | None]:
    """The ticket of each request of a run."""
    return [None] * len(run.correlation_ids) if run.tickets is None else run.tickets.singles()


@dataclass(eq=False)
class Batch:
    """Runs dispatched together, as a worker fetches them. `epoch` is the delivery count, from 1.
    `expected_us`: how long their execution is expected to take; 0 if that is unknown. `stream` and `cost` are
    those of the request, if it is alone in the batch, as requests of stepping models are; `settings` has the
    model's effective settings that concern their worker (`ModelSettings.for_steps`). `process`: of a bound
    model, the one for which it was dispatched; empty for others. `max_execution_ms` and `max_result_bytes`:
    those of the model.
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
    starts: list[int] = field(init=False)  # the position of the first request of each run
    size: int = field(init=False)  # the number of requests

    def __post_init__(self) -> None:
        starts, size = [], 0
        for run in self.runs:
            starts.append(size)
            size += len(run.correlation_ids)
        self.starts, self.size = starts, size

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
            )
            for run in self.runs
            for at, (correlation_id, ticket) in enumerate(
                zip(run.correlation_ids, tickets_of_each(run), strict=True)
            )
        ]


SequenceOutcome = Literal["kept", "ended", "broken"]


class SequenceChange(NamedTuple):
    """What the result of a request does to its sequence. The script that writes the result carries it out.

    `outcome`: with an OK result, the sequence is kept with a new state, or has ended, if this was its last
    request. With any other result it is broken: later requests are ABORTED, until one starts it anew.
    `content`: the state of a sequence that is kept; why one is broken.
    """

    part: SequencePart
    correlation_id: str
    outcome: SequenceOutcome
    content: bytes | str = b""


class SlotFreed(NamedTuple):
    """A sequence of a bound model has no slot any more, and its process may not know."""

    process: str
    sequence_id: str


class KeptSequence(NamedTuple):
    """What Redis keeps of a sequence, without its state. `process`: of a bound model, the one that has it.

    `next_index`: how many of its requests succeeded; None if it has no state. `first_id` and `last_id`: the
    correlation IDs of the first and the last of these. `broken` says why requests later than `broken_at` are
    not served; empty if they are. `failed_at`: the first place at which it was broken, if that is another;
    what stands between the two is served from the next start on.
    """

    sequence_id: str
    changed_us: int
    next_index: int | None
    first_id: str = ""
    last_id: str = ""
    broken: str = ""
    broken_at: str = ""
    failed_at: str = ""
    process: str = ""


class Result(NamedTuple):
    """The result of one request. `body` is bytes of `content_type`; None unless `status` is OK.

    Of a streamed request: `index` is the number of its chunks; `first_us` the time from its arrival to the
    first of them, None if there is none. `warnings`: sentences for its producer about the request.
    """

    correlation_id: str
    status: str = OK
    content_type: str = JSON
    body: bytes | None = None
    detail: str | None = None
    batch_size: int = 0
    queue_us: int = 0
    compute_us: int = 0
    index: int | None = None  # type: ignore[assignment]  # hides tuple.index
    first_us: int | None = None
    warnings: Sequence[str] = ()


class Chunk(NamedTuple):
    """A partial result: one emitted value of a streamed request, or `merged` of them.

    Merged values are concatenated. If they cannot be, the body is a list of them (`is_list`). `index` counts
    the chunks of a request from 0. `body` is bytes of `content_type`.
    """

    correlation_id: str
    content_type: str
    body: bytes
    index: int  # type: ignore[assignment]  # hides tuple.index
    merged: int = 1
    is_list: bool = False


class ResultColumns(NamedTuple):
    """Results of requests that all succeeded, and whose results differ only in correlation ID and row."""

    correlation_ids: Sequence[str]
    content_type: str
    rows: Rows
    batch_size: int
    queue_us: int
    compute_us: int

    def results(self) -> list[Result]:
        """Each result by itself."""
        return _results(self.correlation_ids, self.content_type, self.rows, self[3:])


class RunResults(NamedTuple):
    """Results of requests of one run of a batch, which all succeeded.

    `positions` are the requests', ascending; `correlation_ids`, `bodies` and `tickets` (if the run has any)
    theirs.
    """

    run: BatchedRun
    positions: Sequence[int]
    correlation_ids: Sequence[str]
    bodies: Rows | list[bytes]
    tickets: Tickets | None
    batch_size: int
    queue_us: int
    compute_us: int
    warnings: Sequence[str] = ()  # to each of them
    other_type: str = ""  # their content type, if it is not that of the run

    @property
    def content_type(self) -> str:
        """The content type of the bodies."""
        return self.other_type or self.run.content_type

    @property
    def are_columns(self) -> bool:
        """Whether they are written as columns: several rows, for a producer that reads columns."""
        run = self.run
        has_rows = type(self.bodies) is Rows and len(self.correlation_ids) > 1 and not self.warnings
        return has_rows and run.reply_columns and run.reply_to is not None

    def results(self) -> list[Result]:
        """Each result by itself."""
        of_run = _results(self.correlation_ids, self.content_type, self.bodies, self[5:8])
        return [result._replace(warnings=self.warnings) for result in of_run] if self.warnings else of_run


def _results(
    correlation_ids: Sequence[str],
    content_type: str,
    bodies: Rows | list[bytes],
    served: tuple[int, int, int],  # batch size, queue delay, execution time
) -> list[Result]:
    return [
        Result(correlation_id, OK, content_type, bodies[at], None, *served)
        for at, correlation_id in enumerate(correlation_ids)
    ]


UNANSWERED: Final = ""  # in place of a status


class Refusal(NamedTuple):
    """The answer to requests of one entry that are not dispatched.

    `reason` is one of a few fixed words, which metrics count by; `detail` is a sentence for the producer.
    With the status UNANSWERED there is no answer: the request was sent twice, and is answered once.
    """

    entry: Entry
    correlation_ids: Sequence[str]
    reply_to: str | None
    content_type: str
    status: str
    reason: str
    detail: str
    run: Run | None = None  # what is refused; None if it could not be decoded
    body_names: Sequence[str] = ()  # of stored bodies, if it could not be decoded
    breaks: SequencePart | None = None  # the sequence that is broken by it: so recorded with the answer
    warnings: Sequence[str] = ()  # to its producer, if it could not be decoded

    def where_it_is(self) -> Refusal:
        """This refusal, with the entry in which the run is now: it may have been put back in another one."""
        return self if self.run is None else self._replace(entry=self.run.entry)


class DeadLetter(NamedTuple):
    """A request that was given up, with the reason and how often a process ended while executing it.

    Its lane, priority, cost and expiration are not kept.
    """

    request: BatchedRequest
    reason: str
    attempts: int


class KeptDeadLetter(NamedTuple):
    """A dead letter as Redis has it. Its `id` begins with the milliseconds at which it was given up.

    `fields`: those of the request, as they are sent again.
    """

    id: str
    fields: dict[str, bytes]
    reason: str
    attempts: int

    @property
    def at_ms(self) -> int:
        """When the request was given up, by Redis's clock."""
        return int(self.id.partition("-")[0])

    @property
    def correlation_id(self) -> str:
        """That of the request."""
        return self.text("correlation_id")

    @property
    def body(self) -> bytes | None:
        """The body as it came; None if it was under a key of its own, and is gone."""
        return self.fields.get("body")

    def text(self, name: str) -> str:
        """A field as text; empty if there is none."""
        return self.fields.get(name, b"").decode("utf-8", "replace")


class Streamed(NamedTuple):
    """What was streamed of a request that ended: how many chunks, counted before any were merged; the time
    from its arrival to the first one; and from that to the last one, None if it expired or was withdrawn."""

    chunks: int
    first_us: int
    first_to_last_us: int | None = None

    @property
    def gap_us(self) -> int | None:
        """The mean time between two chunks, if that is known, and there were two."""
        if self.first_to_last_us is None or self.chunks < 2:
            return None
        return self.first_to_last_us // (self.chunks - 1)


class Failures(NamedTuple):
    """How many requests of a batch have an error as their result, by status; and what the model raised last,
    such as `KeyError at model.py:14`, which tells nothing of a request."""

    statuses: Mapping[str, int] = {}
    error: str = ""


class ExecutedOf(NamedTuple):
    """How many of a producer's requests in a batch the model executed: not those that `validate` refused,
    that could not be decoded, or on which the model raised."""

    producer: Producer
    requests: int
    executed: int


class Executed(NamedTuple):
    """How a batch was executed: see `BatchSettled`. `requests`: how many the model executed together."""

    compute_us: int = 0
    requests: int = 0
    waited_us: int = 0
    overhead_us: int = 0
    failures: Failures = Failures()
    of_producers: Sequence[ExecutedOf] = ()


class BatchSettled(NamedTuple):
    """A batch was committed at `settled_us`, by Redis's clock. `compute_us` is 0 if none of its requests was
    executed.

    `executed`: how many of its requests the model executed together in that time; 0 if its execution was not
    a normal one: none was valid, or the model raised, or they were executed one at a time.
    `waited_us`: how long it waited until a model process could take it.
    `streamed`: only of a streamed request, which is alone in its batch.
    `broken`: the IDs of sequences whose request in the batch did not succeed.
    `overhead_us`: for which it occupied its process beside `compute_us`; 0 if that was not measured.
    `failures`: what failed; None if nothing did.
    `of_producers`: those of whose requests in the batch not all were executed.
    """

    batch_id: str
    worker: str
    size: int
    compute_us: int
    settled_us: int
    executed: int
    waited_us: int = 0
    streamed: Streamed | None = None
    broken: Sequence[str] = ()
    overhead_us: int = 0
    failures: Failures | None = None
    of_producers: Sequence[ExecutedOf] = ()


class ModelProcessesChanged(NamedTuple):
    """A model process joined or left."""

    worker: str


SettledEvent = BatchSettled | ModelProcessesChanged  # an entry of the stream `settled`
