"""Requests on their way to Redis, and the entries of the request stream that carry them. No I/O.

Requests of an entry that differ only in correlation ID and body are a run. A run whose bodies have equal
length is sent as columns: its IDs, one head, and the rows end to end.

A large body is stored under a key of its own, in one transaction with the entry that names it. In the stream
it would be copied by Redis, the batcher and the worker each time its request is moved.

Why: docs/decisions/0050.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgpack

from carpool.client.options import expiration_ms
from carpool.client.sinks import Sink
from carpool.keys import Keys
from carpool.rows import BODY_TTL_MS
from carpool.store.connection import Command

MAX_ENTRY_BYTES: Final = 1024 * 1024
MAX_ENTRY_REQUESTS: Final = 256
MAX_ENDED_SEQUENCES: Final = 5000  # in one entry, of which a batcher reads at most 1 MiB
MAX_WITHDRAWN_IDS: Final = 5000  # likewise
STORED_BYTES_RATIO: Final = 16  # a stored body takes this much less of MAX_ENTRY_BYTES
INT_BITS_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Channel:
    """One model as this producer uses it: where its requests go, and where their results are read."""

    keys: Keys
    replies: bytes  # the key of this producer's reply stream
    entry_requests_max: int
    last_id: str = "0-0"  # of the last entry read from the reply stream
    untrimmed_entries: int = 0  # entries that were read and still take memory in Redis
    has_chunks: bool = False  # some of these entries have chunks
    withdrawn_ids: list[str] = field(default_factory=list)  # correlation IDs to withdraw with the next flush

    def rows_max(self, row_bytes: int) -> int:
        """How many requests with bodies of this size an entry takes."""
        return max(1, min(self.entry_requests_max, MAX_ENTRY_BYTES // row_bytes))


class Encoded(NamedTuple):
    """The body of a request as bytes: `head + rest`, of a content type in its canonical form.

    The head may be empty. Requests with the same one, as tensors of one shape have it, share it in an entry.
    """

    content_type: str
    head: bytes
    rest: bytes


@dataclass(slots=True, eq=False)
class OutgoingRun:
    """Requests that differ only in correlation ID and body, each of which begins with `head`.

    `rests` has what follows the head in each body. If these have equal length, an element of `rests` may be
    those of several requests, end to end. `body_names`, if not empty, has the name under which each body is
    stored; then there is no head.
    """

    fields: Mapping[str, Any]  # the options that are sent
    head: bytes
    correlation_ids: list[str]
    rests: list[bytes]
    body_names: list[str] = field(default_factory=list)

    def select(self, wanted: Mapping[str, Any]) -> OutgoingRun:
        """The requests whose correlation IDs are in `wanted`."""
        ids, rests, names = self.correlation_ids, self.rests, self.body_names
        if len(rests) != len(ids):
            rows, width = rests[0], len(rests[0]) // len(ids)
            rests = [rows[at : at + width] for at in range(0, len(rows), width)]
        selected = [at for at, correlation_id in enumerate(ids) if correlation_id in wanted]
        return OutgoingRun(
            self.fields,
            self.head,
            [ids[at] for at in selected],
            [rests[at] for at in selected],
            [names[at] for at in selected] if names else [],
        )

    def after(self, elapsed_ms: int) -> OutgoingRun:
        """The run as it is to be sent so long after it was to be sent first: of a delay, what is left."""
        not_before_ms = self.fields.get("not_before")
        if type(not_before_ms) is not int:  # no delay, or one that the caller wrote as a field of its own
            return self
        others = {name: value for name, value in self.fields.items() if name != "not_before"}
        left_ms = not_before_ms - elapsed_ms
        return replace(self, fields={**others, "not_before": left_ms} if left_ms > 0 else others)

    def element(self) -> dict[str, Any]:
        """The fields of these requests, in an element of `requests` or in an entry: one request, or columns.

        Only an element can have `bodies`, those of unequal length.
        """
        ids, rests = self.correlation_ids, self.rests
        if self.body_names:
            return self._stored_element()
        if len(ids) == 1:
            return {**self.fields, "correlation_id": ids[0], "body": self.head + rests[0]}
        element = {**self.fields, "correlation_ids": " ".join(ids)}
        rows = b"".join(rests)
        if rows and (len(rests) != len(ids) or len(set(map(len, rests))) == 1):
            if self.head:
                element["row_head"] = self.head
            element["rows"] = rows
        else:
            element["bodies"] = [self.head + rest for rest in rests]
        return element

    def _stored_element(self) -> dict[str, Any]:
        bodies = [
            {"body_key": name, "body_bytes": len(rest)}
            for name, rest in zip(self.body_names, self.rests, strict=True)
        ]
        if len(bodies) == 1:
            return {**self.fields, "correlation_id": self.correlation_ids[0], **bodies[0]}
        return {**self.fields, "correlation_ids": " ".join(self.correlation_ids), "bodies": bodies}


class OutgoingEntry:
    """Requests of one entry. They share the channel, the content type, the timeout, and the sink.

    `awaited` has the target of each request without a result, by its correlation ID; the sink knows what a
    target is. The runs are kept until each request has its result, because it may have to be sent again.

    `started_s`: when the timeout began, on time.monotonic's clock; None if it did not begin yet. An entry
    that is sent later, or again, has what is left of the timeout and of delays: they are its producer's, not
    those of the connection over which it is sent.
    """

    __slots__ = (
        "awaited",
        "channel",
        "content_type",
        "room",
        "room_bytes",
        "runs",
        "sent",
        "simultaneous",
        "sink",
        "started_s",
        "timeout_s",
    )

    def __init__(self, channel: Channel, content_type: str, timeout_s: float | None, sink: Sink) -> None:
        self.channel = channel
        self.content_type = content_type
        self.timeout_s = timeout_s
        self.sink = sink
        self.runs: list[OutgoingRun] = []
        self.awaited: dict[str, Any] = {}
        self.room = channel.entry_requests_max  # how many more requests it takes
        self.room_bytes = MAX_ENTRY_BYTES
        self.sent = False
        self.started_s: float | None = None
        self.simultaneous: set[OutgoingEntry] | None = None  # those whose timeout ends with this one's

    def add(
        self, correlation_id: str, target: Any, fields: Mapping[str, Any], head: bytes, rest: bytes
    ) -> bool:
        """Add a request whose body is `head + rest`. Returns whether the entry takes another."""
        runs = self.runs
        if runs and (run := runs[-1]).head == head and run.fields == fields and not run.body_names:
            run.correlation_ids.append(correlation_id)
            run.rests.append(rest)
        else:
            runs.append(OutgoingRun(fields, head, [correlation_id], [rest]))
        self.awaited[correlation_id] = target
        self.room -= 1
        self.room_bytes -= len(rest)
        return self.room > 0 and self.room_bytes > 0

    def add_stored(
        self, correlation_id: str, target: Any, fields: Mapping[str, Any], body: bytes, body_name: str
    ) -> bool:
        """Add a request whose body is to be stored under a key. Returns whether the entry takes another."""
        runs = self.runs
        if not runs or not runs[-1].body_names or runs[-1].fields != fields:
            runs.append(OutgoingRun(fields, b"", [], []))
        run = runs[-1]
        run.correlation_ids.append(correlation_id)
        run.rests.append(body)
        run.body_names.append(body_name)
        self.awaited[correlation_id] = target
        self.room -= 1
        self.room_bytes -= len(body) // STORED_BYTES_RATIO
        return self.room > 0 and self.room_bytes > 0

    def add_run(self, run: OutgoingRun, targets: Sequence[Any]) -> None:
        """Add a whole run."""
        self.runs.append(run)
        self.awaited.update(zip(run.correlation_ids, targets, strict=True))

    def rename(self, names: Mapping[str, str]) -> None:
        """Send only these requests, under other correlation IDs: `names` has these by their present ones."""
        self.runs = [selected for run in self.runs if (selected := run.select(names)).correlation_ids]
        for run in self.runs:
            run.correlation_ids = [names[correlation_id] for correlation_id in run.correlation_ids]
            if run.body_names:
                run.body_names = list(run.correlation_ids)
        self.awaited = {names.get(now, now): target for now, target in self.awaited.items()}

    @property
    def is_wanted(self) -> bool:
        """Whether a request of it is awaited."""
        return bool(self.awaited)

    @property
    def size(self) -> int:
        """The number of its requests that are awaited."""
        return len(self.awaited)

    @property
    def size_bytes(self) -> int:
        """The bytes of the bodies that it keeps, without their common heads."""
        return sum([len(rest) for run in self.runs for rest in run.rests])

    def commands(self, reply_to: str) -> list[Command]:
        """What sends all requests that are still awaited: an XADD, or a transaction if bodies are stored.

        Empty if no request is awaited. Raises an exception if a field cannot be encoded.
        """
        awaited = self.awaited
        runs = self.runs
        if len(awaited) != sum([len(run.correlation_ids) for run in runs]):
            runs = [selected for run in runs if (selected := run.select(awaited)).correlation_ids]
        if not runs:
            return []
        elapsed_ms = 0 if self.started_s is None else int((time.monotonic() - self.started_s) * 1000)
        if elapsed_ms:
            runs = [run.after(elapsed_ms) for run in runs]
        for run in runs:
            if run.fields:
                _check_numbers(run.fields)
        parts: list[Any] = ["XADD", self.channel.keys.requests, "*", "content_type", self.content_type]
        parts += ["reply_to", reply_to, "reply_columns", 1]
        if self.sink.takes_chunks:
            parts += ["stream", 1]
        if self.timeout_s is not None:
            parts += ["expiration", max(1, self._timeout_ms - elapsed_ms)]
        elements = [run.element() for run in runs]
        if len(elements) > 1 or "bodies" in elements[0]:
            parts += ("requests", msgpack.packb(elements))
        else:
            for name, value in elements[0].items():
                parts += (name, value)
        stored = [command for run in runs for command in self._set_bodies(run)]
        return [("MULTI",), *stored, parts, ("EXEC",)] if stored else [parts]

    def sent_at_most_once(self) -> list[str]:
        """Correlation IDs of the requests that must not be sent again if Redis may have accepted them.

        That is those of a sequence that have no index, which would be processed twice.
        """
        return [
            correlation_id
            for run in self.runs
            if "sequence_id" in run.fields and "sequence_index" not in run.fields
            for correlation_id in run.correlation_ids
            if correlation_id in self.awaited
        ]

    @property
    def _timeout_ms(self) -> int:
        return 0 if self.timeout_s is None else expiration_ms(self.timeout_s)

    def _set_bodies(self, run: OutgoingRun) -> list[Command]:
        keys, ttl_ms = self.channel.keys, self._timeout_ms + BODY_TTL_MS
        bodies = zip(run.body_names, run.rests, strict=True) if run.body_names else ()
        return [("SET", keys.body(name), body, "PX", ttl_ms) for name, body in bodies]


def withdraw_command(keys: Keys, correlation_ids: Sequence[str]) -> Command:
    """The command that withdraws requests, of which no results are wanted: at most MAX_WITHDRAWN_IDS."""
    return ("XADD", keys.requests, "*", "withdraw", " ".join(correlation_ids))


def _check_numbers(fields: Mapping[str, Any]) -> None:
    """Raise OverflowError for a number of more than 64 bits. The options have none, but of one with thousands
    of digits hiredis would end the process."""
    for name, value in fields.items():
        if isinstance(value, int) and value.bit_length() > INT_BITS_MAX:
            raise OverflowError(f"{name}: a number of more than {INT_BITS_MAX} bits")


class SequencesEnded:
    """An entry that ends sequences of a model by force. Nobody awaits a result of it."""

    __slots__ = ("channel", "is_wanted", "sent", "sequence_ids")
    size = size_bytes = 0

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sequence_ids: list[str] = []
        self.sent = False
        self.is_wanted = True

    def commands(self, reply_to: str) -> list[Command]:
        """The XADD."""
        return [("XADD", self.channel.keys.requests, "*", "end_sequences", " ".join(self.sequence_ids))]
