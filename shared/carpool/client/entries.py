"""Requests on their way to Redis, and the entries of the request stream that carry them. No I/O.

Requests of an entry that differ only in correlation ID and body are a run. A run whose bodies have equal
length is sent as columns: its IDs, one head, and the rows end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from carpool.client.sinks import Sink
from carpool.keys import Keys
from carpool.store.connection import Command

MAX_ENTRY_BYTES: Final = 1024 * 1024
MAX_ENTRY_REQUESTS: Final = 256
NO_FIELDS: Final[Mapping[str, Any]] = {}


@dataclass(slots=True, eq=False)
class Channel:
    """One model as this producer uses it: where its requests go, and where their results are read."""

    keys: Keys
    replies: bytes  # the key of this producer's reply stream
    entry_requests_max: int
    last_id: str = "0-0"  # of the last entry read from the reply stream
    untrimmed_entries: int = 0  # entries that were read and still take memory in Redis
    withdrawn_ids: list[str] = field(default_factory=list)  # correlation IDs to withdraw with the next flush


@dataclass(slots=True, eq=False)
class OutgoingRun:
    """Requests that differ only in correlation ID and body, each of which begins with `head`.

    `rests` has what follows the head in each body. If these have equal length, an element of `rests` may be
    those of several requests, end to end.
    """

    fields: Mapping[str, Any]  # the options that are sent
    head: bytes
    correlation_ids: list[str]
    rests: list[bytes]

    def select(self, wanted: Mapping[str, Any]) -> OutgoingRun:
        """The requests whose correlation IDs are in `wanted`."""
        ids, rests = self.correlation_ids, self.rests
        if len(rests) != len(ids):
            rows, width = rests[0], len(rests[0]) // len(ids)
            rests = [rows[at : at + width] for at in range(0, len(rows), width)]
        kept = [pair for pair in zip(ids, rests, strict=True) if pair[0] in wanted]
        return OutgoingRun(self.fields, self.head, [pair[0] for pair in kept], [pair[1] for pair in kept])

    def element(self) -> dict[str, Any]:
        """The fields of these requests, in an element of `requests` or in an entry: one request, or columns.

        Only an element can have `bodies`, those of unequal length.
        """
        ids, rests = self.correlation_ids, self.rests
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


class OutgoingEntry:
    """Requests of one entry. They share the channel, the content type, the timeout, and the sink.

    `awaited` has the target of each request without a result, by its correlation ID; the sink knows what a
    target is. The runs are kept until Redis has accepted the entry, because it may have to be sent again.
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
        self.simultaneous: set[OutgoingEntry] | None = None  # those whose timeout ends with this one's

    def add(
        self, correlation_id: str, target: Any, fields: Mapping[str, Any], head: bytes, rest: bytes
    ) -> bool:
        """Add a request whose body is `head + rest`. Returns whether the entry takes another."""
        runs = self.runs
        if runs and (run := runs[-1]).head == head and run.fields == fields:
            run.correlation_ids.append(correlation_id)
            run.rests.append(rest)
        else:
            runs.append(OutgoingRun(fields, head, [correlation_id], [rest]))
        self.awaited[correlation_id] = target
        self.room -= 1
        self.room_bytes -= len(rest)
        return self.room > 0 and self.room_bytes > 0

    def add_run(self, run: OutgoingRun, targets: Sequence[Any]) -> None:
        """Add a whole run."""
        self.runs.append(run)
        self.awaited.update(zip(run.correlation_ids, targets, strict=True))

    def command(self, reply_to: str) -> Command | None:
        """The XADD with all requests that are still awaited; None if there are none."""
        awaited = self.awaited
        runs = self.runs
        if len(awaited) != sum([len(run.correlation_ids) for run in runs]):
            runs = [kept for run in runs if (kept := run.select(awaited)).correlation_ids]
            if not runs:
                return None
        parts: list[Any] = ["XADD", self.channel.keys.requests, "*", "content_type", self.content_type]
        parts += ["reply_to", reply_to, "reply_columns", 1]
        if self.timeout_s is not None:
            parts += ["expiration", max(1, int(self.timeout_s * 1000))]
        elements = [run.element() for run in runs]
        if len(elements) > 1 or "bodies" in elements[0]:
            return (*parts, "requests", msgpack.packb(elements))
        for name, value in elements[0].items():
            parts += (name, value)
        return parts
