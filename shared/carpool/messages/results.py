"""Results, chunks, refusals and dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.errors import ABORTED, OK
from carpool.messages.batches import BatchedRequest, BatchedRun
from carpool.messages.requests import JSON, Entry, Run, SequencePart
from carpool.rows import Rows
from carpool.tickets import Tickets


class Result(NamedTuple):
    """The result of one request. `body` is bytes of `content_type`; None unless `status` is OK.

    Of a streamed request: `index` is the number of its chunks; `first_us` the time from its arrival to the
    first of them, None if there is none. `warnings`: sentences for its producer about the request.
    `version`: of the model that executed it; empty if it declares none, or nothing was executed.
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
    version: str = ""


# What the detail of the result of a request begins with that was given up.
GIVEN_UP: Final = "given up, and kept as a dead letter"


def state_of(result: Result) -> str:
    """What became of the request that has this result: done, failed, or dead (it was given up)."""
    if result.status == OK:
        return "done"
    return "dead" if result.status == ABORTED and (result.detail or "").startswith(GIVEN_UP) else "failed"


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
    version: str = ""  # as in a Result

    def results(self) -> list[Result]:
        """Each result by itself."""
        also = (None, None, (), self.version) if self.version else ()
        return _results(self.correlation_ids, self.content_type, self.rows, (*self[3:6], *also))

    def select(self, positions: Sequence[int]) -> ResultColumns:
        """The results at these positions, copied."""
        ids = self.correlation_ids
        return self._replace(correlation_ids=[ids[at] for at in positions], rows=self.rows.select(positions))


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
    version: str = ""  # as in a Result

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
        also = (None, None, self.warnings, self.version) if self.warnings or self.version else ()
        return _results(self.correlation_ids, self.content_type, self.bodies, (*self[5:8], *also))


def _results(
    correlation_ids: Sequence[str],
    content_type: str,
    bodies: Rows | list[bytes],
    served: tuple[Any, ...],  # the fields of each Result from `batch_size` on
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
    fields: Mapping[str, Any] | None = None  # those of its trace, if it could not be decoded

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
