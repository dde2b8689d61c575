"""Requests that are put back, because only some requests of their entry were dispatched or refused.

The batcher writes them as an entry with the same attributes, the same arrival time (`arrival`) and the same
tickets (`tickets`, under `preserve_ordering`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack

from carpool.messages.requests import Entry, Run
from carpool.messages.results import Refusal
from carpool.rows import Body, Rows, StoredBody
from carpool.tickets import TicketRange, Tickets
from carpool.wire.columns import COLUMNS_ONLY, column_body_fields
from carpool.wire.request_fields import Fields
from carpool.wire.sequence_fields import Decoded, sequence_fields

_TICKET_RANGE: Final = re.compile(r"([0-9]{1,20}-[0-9]{1,20}):([0-9]{1,4})\+([0-9]{1,4})")

# --- encoding ----------------------------------------------------------------------------------------------


def encode_runs(runs: Iterable[Run]) -> bytes:
    """The `requests` field of an entry put back: only some of its requests were dispatched or refused."""
    return bytes(msgpack.packb([element for run in runs for element in _elements_of(run)]))


def tickets_of(runs: Iterable[Run]) -> str:
    """The field `tickets` of such an entry. Either all of its requests have one, or none has."""
    ranges = [of_range for run in runs if run.tickets for of_range in run.tickets.ranges]
    return " ".join(map(str, Tickets.join(ranges).ranges))


def _elements_of(run: Run) -> list[Fields]:
    """A run as columns; as single requests if a field of its producer's own has a name that columns use."""
    attributes = _attributes_of(run)
    ids, bodies = run.correlation_ids, run.bodies
    if COLUMNS_ONLY.isdisjoint(attributes):
        if isinstance(bodies, Rows):
            columns: Fields = {"row_head": bodies.head, "rows": bodies.data}
        else:
            columns = {"bodies": [_body_element(body) for body in bodies]}
        return [{"correlation_ids": " ".join(ids), **columns, **attributes}]
    return [
        {"correlation_id": name, **column_body_fields(_body_element(bodies[at])), **attributes}
        for at, name in enumerate(ids)
    ]


def _body_element(body: Body) -> Any:
    return {"body_key": body.name, "body_bytes": body.size_bytes} if type(body) is StoredBody else body


def _attributes_of(run: Run) -> Fields:
    attributes: Fields = {
        "content_type": run.content_type,
        "priority": run.priority,
        "cost": run.cost,
        **(run.extra or {}),
    }
    if run.reply_to is not None:
        attributes["reply_to"] = run.reply_to
    if run.reply_columns:
        attributes["reply_columns"] = 1
    if run.stream:
        attributes["stream"] = 1
    if run.lane:
        attributes["lane"] = run.lane
    if run.version:
        attributes["version"] = run.version
    if run.deadline_us is not None:
        after_us = run.deadline_us - run.arrival_us
        # More than `not_before`, also where it expired before that: an entry put back must not be malformed.
        attributes["expiration"] = run.not_before_ms + max(1, after_us // 1000)
    if run.not_before_ms:
        attributes["not_before"] = run.not_before_ms
    if run.sequence is not None:
        attributes.update(sequence_fields(run.sequence))
    return attributes


# --- decoding ----------------------------------------------------------------------------------------------


def arrival_put_back(arrival: bytes, entry_arrival_us: int) -> int:
    """The arrival of requests that were put back, never later than the arrival of the new entry."""
    try:
        return min(int(arrival) * 1000, entry_arrival_us) if arrival.isdigit() else entry_arrival_us
    except ValueError:  # Python limits the digits of an integer
        return entry_arrival_us


def restore_tickets(entry: Entry, decoded: Sequence[Decoded], text: bytes) -> None:
    """Give requests that were put back the tickets they had; none if the field is malformed.

    Those that are refused, since the model's limits became lower meanwhile, had a ticket each too.
    """
    ranges: list[TicketRange] = []
    for of_range in text.decode("ascii", "replace").split():
        match = _TICKET_RANGE.fullmatch(of_range)
        if match is None:
            return
        ranges.append(TicketRange(match[1], int(match[2]), int(match[3])))
    tickets = Tickets(tuple(ranges))
    counts = [len(item.correlation_ids) for item in decoded if isinstance(item, Run | Refusal)]
    if tickets.size != sum(counts) or not all(one.size for one in ranges):
        return
    entry.stated_tickets = tickets
    start = 0
    for item, count in zip(decoded, counts, strict=True):
        if type(item) is Run:
            item.tickets = tickets.slice(start, start + count)
        start += count
