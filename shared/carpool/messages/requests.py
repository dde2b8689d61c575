"""Requests, the entries that carry them, and the commands of producers.

Why: docs/decisions/0042.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from carpool.rows import Bodies, Body, Rows
from carpool.tickets import Tickets

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
    stated_tickets: Tickets | None = None  # those of an entry put back; `BatcherStore.admit` verifies them


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
    when it admits the run, and the last two, which the queue sets. (Not `frozen=True`: that alone costs
    1 µs.)
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
    version: str = ""  # of the model, which must execute it; empty if any may
    is_doubtful: bool = False  # the model is not expected to execute it (`learned.doubtful_producers`)
    waits_in: object | None = field(default=None, init=False, repr=False)  # the part of the queue
    is_late: bool = field(default=False, init=False, repr=False)  # expired, and served behind others

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

    def one(self, index: int) -> Run:
        """The request at this index as a run, without its body: what it takes to answer it in flight."""
        tickets = None if self.tickets is None else self.tickets.slice(index, index + 1)
        return self._part([self.correlation_ids[index]], [], tickets)

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
            self.version,
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


class Withdrawal(NamedTuple):
    """A producer withdraws waiting requests, by their correlation IDs."""

    entry: Entry
    correlation_ids: frozenset[str]


class SequencesEnd(NamedTuple):
    """A producer ends sequences by force. `place`: where that stands in the request stream."""

    entry: Entry
    sequence_ids: Sequence[str]
    place: str
