"""Shared by the tests of `carpool.wire`: entries as Redis returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgpack

from carpool.messages.batches import tickets_of_each
from carpool.messages.requests import Entry, Run, SequencePart, SequencesEnd, Withdrawal
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool.rows import Body
from carpool.tickets import TicketRange
from carpool.wire.requests import Decoded, decode_entry
from carpool.wire.results import decode_columns, decode_results, encode_results

DEFAULTS: Final = ModelSettings()
ENTRY_ID: Final = "1700000000123-4"
ARRIVAL_US: Final = 1700000000123_000


def flat_of(fields: dict[str, Any]) -> list[bytes]:
    """Field, value, field, value, as Redis returns an entry."""
    return [part if type(part) is bytes else str(part).encode() for pair in fields.items() for part in pair]


def decode(fields: dict[str, Any], model: ModelSettings = DEFAULTS) -> tuple[Entry, list[Decoded]]:
    """Decode an entry with these fields."""
    return decode_entry(ENTRY_ID.encode(), flat_of(fields), model)


def decode_packed(maps: Any, shared: dict[str, Any] | None = None) -> tuple[Entry, list[Decoded]]:
    """Decode a packed entry with these requests and these shared fields."""
    return decode({"requests": msgpack.packb(maps)} | (shared or {}))


def decode_read(entries: Any) -> list[Single | Refusal | Withdrawal | SequencesEnd]:
    """What entries that were read from a request stream are decoded to, item by item."""
    return [
        item
        for entry_id, fields in entries
        for item in one_by_one(
            decode_entry(entry_id, [part for pair in fields.items() for part in pair], DEFAULTS)[1]
        )
    ]


# --- request by request ------------------------------------------------------------------------------------


class Single(NamedTuple):
    """One request of a run, with everything that is known about it."""

    correlation_id: str
    body: Body
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    priority: int
    lane: str
    cost: int
    extra: dict[str, bytes]
    tenant: str
    reply_columns: bool
    stream: bool
    ticket: TicketRange | None
    sequence: SequencePart | None = None
    not_before_ms: int = 0
    version: str = ""


def singles(runs: Iterable[Run]) -> list[Single]:
    """The requests of these runs, each by itself."""
    return [
        Single(
            correlation_id,
            run.bodies[at],
            run.content_type,
            run.reply_to,
            run.arrival_us,
            run.deadline_us,
            run.priority,
            run.lane,
            run.cost,
            dict(run.extra or {}),
            run.tenant,
            run.reply_columns,
            run.stream,
            ticket,
            run.sequence,
            run.not_before_ms,
            run.version,
        )
        for run in runs
        for at, (correlation_id, ticket) in enumerate(
            zip(run.correlation_ids, tickets_of_each(run), strict=True)
        )
    ]


def one_by_one(decoded: Iterable[Decoded]) -> list[Single | Refusal | Withdrawal | SequencesEnd]:
    """What an entry was decoded to, with an item for each request and for each refused one."""
    return list(_one_by_one(decoded))


def _one_by_one(decoded: Iterable[Decoded]) -> Iterator[Single | Refusal | Withdrawal | SequencesEnd]:
    for item in decoded:
        if isinstance(item, Run):
            yield from singles([item])
        elif isinstance(item, Refusal):
            yield from (item._replace(correlation_ids=[name]) for name in item.correlation_ids)
        else:
            yield item


def count_requests(fields: Mapping[bytes, bytes]) -> int:
    """How many requests an entry of a request stream has, as Redis returns it."""
    flat = [part for pair in fields.items() for part in pair]
    _, decoded = decode_entry(ENTRY_ID.encode(), flat, DEFAULTS)
    return len(one_by_one(decoded))


def envelopes(fields: Mapping[bytes, bytes]) -> list[dict[str, Any]]:
    """The results in an entry of a reply stream, as Redis returns it, each as an envelope of its own."""
    found: list[dict[str, Any]] = decode_results(fields[b"results"]) if b"results" in fields else []
    for columns in decode_columns(fields[b"columns"]) if b"columns" in fields else ():
        found += [decode_results(encode_results([result]))[0] for result in columns.results()]
    return found
